//! The backward pass of a residual stream and its norm: one pass over the rows, and one small sum.

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

/// Elements of a row that a unit has in registers: beside them it has as many of each sum, so twice as many would leave a multiprocessor with half of its planes.
const LANE_NUMBERS: usize = 8;
/// Units of a cube, which meet in each step.
const UNITS: usize = 128;
/// Cubes of a multiprocessor that sum.
const CUBES: usize = 6;
/// Multiprocessors, where the device does not say.
const MULTIPROCESSORS: usize = 128;

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct BackwardKind {
    kind: Kind,
    /// Whether there is a gradient by the stream that was returned in a buffer of its own,
    read: bool,
    /// or where the gradient by the stream that came is to be.
    in_place: bool,
    /// Whether there is the norm's part.
    norm: bool,
    /// Whether the gradient by the stream is written,
    stream: bool,
    /// and the branch's.
    branch: bool,
    /// Whether the branch's bias, gamma and beta get gradients.
    sums: [bool; 3],
    /// Vectors of a sum.
    pitch: usize,
}

impl BackwardKind {
    /// Sums before that of an index.
    fn before(&self, index: usize) -> usize {
        self.sums[..index].iter().filter(|sum| **sum).count()
    }
}

/// Adds what the rows of a cube have of a column up, and writes it.
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

/// What the norm's part reads: the gradient with respect to the normed stream and x̂, `[rows, width]`, 1/σ, `[rows]`, and γ.
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
/// A cube reads many rows and keeps its part of the sums over rows in registers; `partial` is `[cubes, sums, pitch]`. Without `norm`
/// ds is ds'.
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
    // All units of a cube take as many steps, because they meet in each.
    for step in 0..steps {
        let row = own + step * stride;
        let exists = row < rows;
        // Units behind the last row read it once more.
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
            // As they are stored, and widened where they are used: half of the registers, and twice the rows on their way.
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

/// What the norm's part of a backward pass reads.
#[derive(Clone, Copy, Debug)]
pub struct NormGrad<'a> {
    /// Whether the mean was taken off.
    pub centered: bool,
    /// By the normed stream, `[rows, width]`.
    pub normed: Typed<'a>,
    /// x̂, `[rows, width]` in its type.
    pub xhat: &'a Handle,
    /// 1/σ, `[rows]` in the type of sums.
    pub rstd: &'a Handle,
    /// `[width]`.
    pub gamma: Typed<'a>,
}

/// Where the gradient by the stream goes.
#[derive(Clone, Copy, Debug)]
pub enum StreamGrad<'a> {
    /// Nowhere: it is what came.
    Kept,
    /// To a buffer of its own.
    Written(&'a Handle),
    /// Into what came.
    InPlace,
}

/// A backward pass of [`add_norm`](crate::kernels::rows::norm::add_norm).
#[derive(Clone, Copy, Debug)]
pub struct NormBackward<'a> {
    /// The type of the stream.
    pub element: ElemType,
    /// By the stream that was returned, `[rows, width]`, if it was used.
    pub sum: Option<&'a Handle>,
    /// The norm's part, if what it returned was used.
    pub norm: Option<NormGrad<'a>>,
    /// By the stream that came.
    pub stream: StreamGrad<'a>,
    /// By the branch, to be written: `[rows, width]`.
    pub branch: Option<Typed<'a>>,
    /// Dropout of the branch.
    pub dropout: Option<&'a ElementDropout>,
    /// Whether sums over rows are wanted: by the branch's bias, gamma and beta.
    pub sums: [bool; 3],
}

/// The sums over rows that [`residual_norm_backward`] was asked for, one behind the other in the type of sums.
#[derive(Clone, Debug)]
pub struct RowSums {
    /// The buffer.
    pub handle: Handle,
    /// Numbers from the beginning of one to that of the next: a multiple of where buffers may begin.
    pub pitch: usize,
}

/// The most buffers of a backward pass.
const BUFFERS: usize = 8;

/// How a backward pass is launched.
struct Launch {
    tile: RowTile,
    cubes: usize,
}

/// Many rows for each cube if there are `sums`, or else one tile.
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
        // As many steps in each.
        true => tiles.div_ceil(tiles.div_ceil(multiprocessors * CUBES).max(1)),
        false => tiles,
    };
    Ok(Launch { tile, cubes })
}

/// How [`add_norm`](crate::kernels::rows::norm::add_norm) and its backward pass are launched, for plans.
///
/// # Errors
/// As [`add_norm`](crate::kernels::rows::norm::add_norm), if `elements` are all of its types.
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

/// Gradients of a residual stream and its norm. Sums that are wanted are returned.
///
/// # Errors
/// [`KernelError::Limit`] as the forward pass, or if the device does not bind the buffers.
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
    // Where buffers may begin, and whole vectors.
    let align = client.properties().memory.alignment as usize / accumulator.size();
    let pitch = width.next_multiple_of(align.max(tile.vector));
    // Without rows nothing is written, but a binding holds a vector.
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
        // SAFETY: a unit reads vectors of a row below `rows`, and writes its own of a row that exists; in place it reads them before. It writes its
        // own vectors of its cube's sums. The buffers have the lengths they say (see `buffer`).
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
