//! The backward pass of a residual norm: one pass over the rows, and one small sum.

use crate::kernels::prelude::*;
use crate::kernels::rows::dropout::{StreamMask, stream_factors, stream_mask};
use blocksparse::ElementDropout;
use blocksparse_cubecl::rows::norm_shape::LANE_NUMBERS as FORWARD_NUMBERS;
use blocksparse_cubecl::rows::norm_shape::{
    Kind, check_buffers, has, load_row, place, store_row, sum_of, tile_of, widest,
};
use blocksparse_cubecl::seeds;
use blocksparse_cubecl::shared::row_tile::{
    Combine, RowTile, across_lanes, pair_across_lanes, pair_shared,
};

/// Elements of a row that a unit holds in registers. It also holds as many of each sum, so twice as many would halve the planes of a multiprocessor.
const LANE_NUMBERS: usize = 8;
/// Units of a cube, which synchronize in each step.
const UNITS: usize = 128;
/// Cubes per multiprocessor when sums are computed.
const CUBES: usize = 6;
/// Number of multiprocessors, if the device does not report it.
const MULTIPROCESSORS: usize = 128;

/// Comptime parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct BackwardKind {
    kind: Kind,
    /// True if the gradient of the returned stream is read from a buffer of its own.
    read: bool,
    /// True if the gradient of the returned stream is in the buffer that the input stream's gradient is written to.
    in_place: bool,
    /// True if the norm contributes.
    norm: bool,
    /// True if the gradient with respect to the stream is written.
    stream: bool,
    /// True if the gradient with respect to the branch is written.
    branch: bool,
    /// True for each wanted gradient of the branch's bias, gamma and beta.
    sums: [bool; 3],
    /// Vectors of a sum.
    pitch: usize,
}

impl BackwardKind {
    /// Returns the number of wanted sums before an index.
    fn before(&self, index: usize) -> usize {
        self.sums[..index].iter().filter(|sum| **sum).count()
    }
}

/// Adds a column's sums over the rows of a cube, and writes the result.
#[cube]
fn finish<A: Float, N: Size>(
    sums: &Array<Vector<A, N>>,
    shared: &mut [Vector<A, N>],
    partial: &mut [Vector<A, N>],
    lane: usize,
    #[comptime] index: usize,
    #[comptime] k: BackwardKind,
) {
    let tile = comptime!(k.kind.tile);
    let unit = UNIT_POS as usize;
    let start =
        (CUBE_POS * comptime!(k.before(3)) + comptime!(k.before(index))) * comptime!(k.pitch);
    #[unroll]
    for i in 0..comptime!(tile.lane_vectors()) {
        shared[unit] = sums[i];
        sync_cube();
        if unit < comptime!(tile.lanes) && has(lane, i, tile) {
            let mut sum = sums[i];
            #[unroll]
            for other in 1..comptime!(tile.rows) {
                sum += shared[unit + other * comptime!(tile.lanes)];
            }
            partial[start + place(lane, i, tile)] = sum;
        }
        sync_cube();
    }
}

#[cube]
fn zeros<A: Float, N: Size>(#[comptime] tile: RowTile) -> Array<Vector<A, N>> {
    let mut row = Array::<Vector<A, N>>::new(comptime!(tile.lane_vectors()));
    #[unroll]
    for i in 0..comptime!(tile.lane_vectors()) {
        row[i] = Vector::<A, N>::zeroed();
    }
    row
}

/// Inputs of the norm's contribution: the gradient with respect to the normed stream and x̂, `[rows, width]`, 1/σ, `[rows]`, and γ.
#[derive(CubeType, CubeLaunch)]
struct NormPart<G: Float, R: Float, A: Float, N: Size> {
    grad: Box<[Vector<R, N>]>,
    centered: Box<[Vector<R, N>]>,
    rstd: Box<[A]>,
    gamma: Box<[Vector<G, N>]>,
}

/// ```text
/// ĝ = γ ∘ dh      ds = ds' + r (ĝ − Σ ĝ / d − x̂ Σ (ĝ ∘ x̂) / d)      without a mean: without Σ ĝ
/// da = m ∘ ds     db = Σ da      dγ = Σ dh ∘ x̂      dβ = Σ dh
/// ```
///
/// Computes the backward pass. A cube reads many rows and keeps its part of the sums over rows in registers; `partial` is `[cubes, sums, pitch]`. Without
/// `norm`, ds is ds'.
#[cube(launch_unchecked, address_type = "dynamic")]
fn backward<S: Float, B: Float, G: Float, H: Float, A: Float, N: Size>(
    grad_sum: ComptimeOption<Box<[Vector<S, N>]>>,
    norm: ComptimeOption<NormPart<G, H, A, N>>,
    grad_stream: ComptimeOption<Box<[Vector<S, N>]>>,
    grad_branch: ComptimeOption<Box<[Vector<B, N>]>>,
    partial: ComptimeOption<Box<[Vector<A, N>]>>,
    rows: usize,
    steps: usize,
    inverse_width: InputScalar,
    mask: StreamMask,
    #[comptime] k: BackwardKind,
    #[define(S, B, G, H, A)] _types: [ElemType; 5],
) {
    let mut grad_stream = grad_stream;
    let mut grad_branch = grad_branch;
    let tile = comptime!(k.kind.tile);
    let vectors = comptime!(tile.lane_vectors());
    let row_vectors = comptime!(tile.row_vectors);
    let zero = Vector::<A, N>::zeroed();
    let inverse_width = inverse_width.get::<A>();
    let mut shared = Shared::<[A]>::new_slice(comptime!(pair_shared(&tile).max(tile.shared())));
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(tile.lanes);
    let own = CUBE_POS * comptime!(tile.rows) + unit / comptime!(tile.lanes);
    let stride = CUBE_COUNT * comptime!(tile.rows);

    let bias_sum = comptime!(k.sums[0]);
    let gamma_sum = comptime!(k.sums[1]);
    let beta_sum = comptime!(k.sums[2]);
    let mut by_bias = Array::<Vector<A, N>>::new(comptime!(if bias_sum { vectors } else { 1 }));
    let mut by_gamma = Array::<Vector<A, N>>::new(comptime!(if gamma_sum { vectors } else { 1 }));
    let mut by_beta = Array::<Vector<A, N>>::new(comptime!(if beta_sum { vectors } else { 1 }));
    #[unroll]
    for i in 0..vectors {
        if comptime!(bias_sum) {
            by_bias[i] = zero;
        }
        if comptime!(gamma_sum) {
            by_gamma[i] = zero;
        }
        if comptime!(beta_sum) {
            by_beta[i] = zero;
        }
    }
    // All units of a cube take the same number of steps, because they synchronize in each.
    for step in 0..steps {
        let row = own + step * stride;
        let exists = row < rows;
        // Units past the last row read it again.
        let row = min(row, rows - 1);
        let start = row * row_vectors;
        let mut ds = if comptime!(k.read) {
            load_row::<S, A, N>(&grad_sum.as_ref().unwrap()[..], start, lane, tile)
        } else if comptime!(k.in_place) {
            load_row::<S, A, N>(&grad_stream.as_ref().unwrap()[..], start, lane, tile)
        } else {
            zeros::<A, N>(tile)
        };
        if comptime!(k.norm) {
            let norm = norm.as_ref().unwrap();
            let scale = norm.rstd[row];
            // Kept in the stored type and widened where used: half of the registers, and twice the rows in flight.
            let mut x = Array::<Vector<H, N>>::new(vectors);
            let mut g = Array::<Vector<H, N>>::new(vectors);
            #[unroll]
            for i in 0..vectors {
                x[i] = norm.centered[start + place(lane, i, tile)];
            }
            #[unroll]
            for i in 0..vectors {
                g[i] = norm.grad[start + place(lane, i, tile)];
            }
            let mut total = zero;
            let mut product = zero;
            #[unroll]
            for i in 0..vectors {
                let grad = Vector::<A, N>::cast_from(g[i]);
                let grad = select(exists && has(lane, i, tile), grad, zero);
                let x = Vector::<A, N>::cast_from(x[i]);
                if comptime!(gamma_sum) {
                    by_gamma[i] += grad * x;
                }
                if comptime!(beta_sum) {
                    by_beta[i] += grad;
                }
                let grad = grad * Vector::<A, N>::cast_from(norm.gamma[place(lane, i, tile)]);
                total += grad;
                product += grad * x;
            }
            let product = sum_of::<A, N>(product);
            let mut mean = zero;
            let mut product = product;
            if comptime!(k.kind.centered) {
                let total = sum_of::<A, N>(total);
                let sums = pair_across_lanes::<A>(product, total, &mut shared, step, tile);
                product = sums.a;
                mean = Vector::<A, N>::empty().fill(sums.b * inverse_width);
            } else {
                product = across_lanes::<A>(product, &mut shared, tile, Combine::Sum);
            }
            let product = Vector::<A, N>::empty().fill(product * inverse_width);
            let scale = Vector::<A, N>::empty().fill(scale);
            #[unroll]
            for i in 0..vectors {
                let grad = Vector::<A, N>::cast_from(g[i])
                    * Vector::<A, N>::cast_from(norm.gamma[place(lane, i, tile)]);
                let x = Vector::<A, N>::cast_from(x[i]);
                ds[i] += scale * (grad - mean - x * product);
            }
        }
        if comptime!(k.stream) {
            let target = &mut grad_stream.as_mut().unwrap()[..];
            store_row::<S, A, N>(target, &ds, start, exists, lane, tile);
        }
        if comptime!(k.kind.dropout) {
            #[unroll]
            for i in 0..vectors {
                let column = place(lane, i, tile) * N::value();
                ds[i] *= stream_factors::<A, N>(&mask, row, column);
            }
        }
        if comptime!(bias_sum) {
            #[unroll]
            for i in 0..vectors {
                by_bias[i] += select(exists && has(lane, i, tile), ds[i], zero);
            }
        }
        if comptime!(k.branch) {
            let target = &mut grad_branch.as_mut().unwrap()[..];
            store_row::<B, A, N>(target, &ds, start, exists, lane, tile);
        }
    }
    if comptime!(k.before(3) > 0) {
        let mut partial = partial.unwrap();
        let mut rows_of = Shared::<[Vector<A, N>]>::new_slice(comptime!(tile.units()));
        if comptime!(bias_sum) {
            finish::<A, N>(&by_bias, &mut rows_of, &mut partial, lane, 0usize, k);
        }
        if comptime!(gamma_sum) {
            finish::<A, N>(&by_gamma, &mut rows_of, &mut partial, lane, 1usize, k);
        }
        if comptime!(beta_sum) {
            finish::<A, N>(&by_beta, &mut rows_of, &mut partial, lane, 2usize, k);
        }
    }
}

/// Inputs of the norm's contribution.
#[derive(Clone, Copy, Debug)]
pub struct NormGrad<'a> {
    /// True if the mean was subtracted.
    pub centered: bool,
    /// Gradient with respect to the normed stream, `[rows, width]`.
    pub normed: Typed<'a>,
    /// x̂, `[rows, width]`, in `normed`'s type.
    pub xhat: &'a Handle,
    /// 1/σ, `[rows]`, in the type of sums.
    pub rstd: &'a Handle,
    /// Scale, `[width]`.
    pub gamma: Typed<'a>,
}

/// Destination of the gradient with respect to the stream.
#[derive(Clone, Copy, Debug)]
pub enum StreamGrad<'a> {
    /// Not written: it equals the gradient of the returned stream.
    Kept,
    /// A buffer of its own.
    Written(&'a Handle),
    /// The buffer of the returned stream's gradient.
    InPlace,
}

/// Arguments of the backward pass of [`add_norm`](crate::kernels::rows::norm::add_norm).
#[derive(Clone, Copy, Debug)]
pub struct NormBackward<'a> {
    /// Type of the stream.
    pub element: ElemType,
    /// Gradient with respect to the returned stream, `[rows, width]`, if it was used.
    pub sum: Option<&'a Handle>,
    /// The norm's contribution, if the normed stream was used.
    pub norm: Option<NormGrad<'a>>,
    /// Destination of the gradient with respect to the input stream.
    pub stream: StreamGrad<'a>,
    /// Output: gradient with respect to the branch, `[rows, width]`.
    pub branch: Option<Typed<'a>>,
    /// Dropout of the branch.
    pub dropout: Option<&'a ElementDropout>,
    /// True for each wanted sum over rows: the gradients of the branch's bias, gamma and beta.
    pub sums: [bool; 3],
}

/// Sums over rows that [`residual_norm_backward`] returns, in one buffer, in the type of sums.
#[derive(Clone, Debug)]
pub struct RowSums {
    pub handle: Handle,
    /// Distance between sums, in elements: a multiple of the alignment of buffers.
    pub pitch: usize,
}

/// Most buffers of a backward pass.
const BUFFERS: usize = 8;

/// Launch of a backward pass.
struct Launch {
    tile: RowTile,
    cubes: usize,
}

/// Returns the launch. With `sums` each cube has many rows, without them one tile.
fn launch_of(
    client: &Client,
    [rows, width]: [usize; 2],
    widest: ElemType,
    sums: bool,
) -> Result<Launch, KernelError> {
    let properties = client.properties();
    let tile = tile_of(properties, width, widest, LANE_NUMBERS)?.with_units(UNITS);
    let tiles = rows.div_ceil(tile.rows);
    let multiprocessors = (properties.hardware.num_streaming_multiprocessors)
        .map_or(MULTIPROCESSORS, |count| count as usize);
    let cubes = match sums {
        // Equally many steps in each cube.
        true => tiles.div_ceil(tiles.div_ceil(multiprocessors * CUBES).max(1)),
        false => tiles,
    };
    Ok(Launch { tile, cubes })
}

/// Describes the launches of [`add_norm`](crate::kernels::rows::norm::add_norm) and its backward pass.
///
/// # Errors
/// Those of [`add_norm`](crate::kernels::rows::norm::add_norm), if `elements` are all of its types.
pub fn residual_norm_text(
    client: &Client,
    [rows, width]: [usize; 2],
    elements: &[ElemType],
) -> Result<String, KernelError> {
    let widest = widest(elements.iter().copied());
    let tile = tile_of(client.properties(), width, widest, FORWARD_NUMBERS)?;
    let backward = launch_of(client, [rows, width], widest, true)?;
    let text = |tile: RowTile| {
        format!(
            "{} rows a cube, {} units a row, {} vectors of {} each",
            tile.rows,
            tile.lanes,
            tile.lane_vectors(),
            tile.vector
        )
    };
    let backward = match check_buffers(client, BUFFERS) {
        Ok(()) => format!("{}, {} cubes", text(backward.tile), backward.cubes),
        Err(error) => format!("primitives, because {error}"),
    };
    Ok(format!(
        "norm forward: {}; backward: {backward}",
        text(tile)
    ))
}

/// Computes the gradients of a residual norm and returns the wanted sums.
///
/// # Errors
/// [`KernelError::Limit`] as in the forward pass, or if the device does not bind the buffers.
pub fn residual_norm_backward(
    client: &Client,
    [rows, width]: [usize; 2],
    pass: &NormBackward,
) -> Result<Option<RowSums>, KernelError> {
    let element = pass.element;
    let accumulator = accumulator_of(element);
    let branch_type = pass.branch.map_or(element, |(_, element)| element);
    let gamma_type = pass.norm.map_or(element, |norm| norm.gamma.1);
    let normed_type = pass.norm.map_or(element, |norm| norm.normed.1);
    let wanted = pass.sums.iter().filter(|sum| **sum).count();
    let types = widest([element, branch_type, gamma_type, normed_type]);
    let Launch { tile, cubes } = launch_of(client, [rows, width], types, wanted > 0)?;
    let in_place = matches!(pass.stream, StreamGrad::InPlace);
    let (read, written) = match pass.stream {
        StreamGrad::Kept => (pass.sum, None),
        StreamGrad::Written(handle) => (pass.sum, Some(handle)),
        StreamGrad::InPlace => (None, pass.sum),
    };
    let buffers = [
        read.is_some(),
        written.is_some(),
        pass.branch.is_some(),
        wanted > 0,
    ];
    let norm_buffers = if pass.norm.is_some() { 4 } else { 0 };
    let buffers = buffers.into_iter().filter(|some| *some).count()
        + norm_buffers
        + seeds::buffers(pass.dropout.map(|dropout| dropout.seed));
    check_buffers(client, buffers)?;
    // A multiple of the alignment of buffers and of whole vectors.
    let align = client.properties().memory.alignment as usize / accumulator.size();
    let pitch = width.next_multiple_of(align.max(tile.vector));
    // Without rows nothing is written, but a binding holds at least one vector.
    let numbers = cubes.max(1) * wanted * pitch;
    let partial = (wanted > 0).then(|| client.empty(numbers * accumulator.size()));
    let k = BackwardKind {
        kind: Kind {
            tile,
            centered: pass.norm.is_some_and(|norm| norm.centered),
            dropout: pass.dropout.is_some(),
        },
        read: read.is_some(),
        in_place: in_place && pass.sum.is_some(),
        norm: pass.norm.is_some(),
        stream: written.is_some(),
        branch: pass.branch.is_some(),
        sums: pass.sums,
        pitch: pitch / tile.vector,
    };
    if rows > 0 {
        let tiles = rows.div_ceil(tile.rows);
        let largest = (rows * width)
            .max(2 * tiles * tile.rows)
            .max(cubes * wanted * pitch);
        let address = address_of(client, largest)?;
        let matrix = rows * tile.row_vectors;
        let count = spread(client, cubes as u64)?;
        let norm = pass.norm.map(|norm| {
            NormPartLaunch::new(
                buffer(norm.normed.0, matrix),
                buffer(norm.xhat, matrix),
                buffer(norm.rstd, rows),
                buffer(norm.gamma.0, tile.row_vectors),
            )
        });
        // SAFETY: a unit reads vectors of a row below `rows`, and writes its own of an existing row; in place it has read them before. It writes its own
        // vectors of its cube's sums. The buffers have the declared lengths (see `buffer`).
        unsafe {
            backward::launch_unchecked(
                client,
                count,
                CubeDim::new_1d(tile.units() as u32),
                address,
                tile.vector,
                optional(read, matrix),
                norm.into(),
                optional(written, matrix),
                optional(pass.branch.map(|(handle, _)| handle), matrix),
                optional(partial.as_ref(), cubes * wanted * pitch / tile.vector),
                rows,
                tiles.div_ceil(cubes),
                InputScalar::new(1.0 / width as f64, accumulator),
                stream_mask(pass.dropout, accumulator),
                k,
                [element, branch_type, gamma_type, normed_type, accumulator],
            );
        }
    }
    let Some(partial) = partial else {
        return Ok(None);
    };
    let handle = client.empty(wanted * pitch * accumulator.size());
    column_sums(
        client,
        (&partial, accumulator),
        [cubes, wanted * pitch],
        (&handle, accumulator),
    )?;
    Ok(Some(RowSums { handle, pitch }))
}
