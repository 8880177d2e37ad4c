//! Residual addition and norm in one pass.

use crate::kernels::prelude::*;
use crate::kernels::rows::dropout::{StreamMask, stream_factors, stream_mask};
use blocksparse::ElementDropout;
use blocksparse_cubecl::rows::norm_shape::{
    Kind, LANE_NUMBERS, check_buffers, has, load_row, place, store_row, sum_of, tile_of, widest,
};
use blocksparse_cubecl::seeds;
use blocksparse_cubecl::shared::row_tile::{Combine, across_lanes};

/// Outputs for the backward pass: x̂, `[rows, width]`, and 1/σ, `[rows]`.
#[derive(CubeType, CubeLaunch)]
struct Kept<R: Float, A: Float, N: Size> {
    centered: Box<[Vector<R, N>]>,
    rstd: Box<[A]>,
}

/// ```text
/// s' = s + m ∘ (a + b)                            of the type of s, and so it goes on
/// μ = Σ s' / d       r = (Σ (s' − μ)² / d + ε)^−½       without a mean: μ = 0
/// x̂ = (s' − μ) r     h = γ ∘ x̂ + β
/// ```
///
/// Adds and norms. A row stays in registers between the two passes over it. Absent tensors are neither read, written nor computed.
#[cube(launch_unchecked, address_type = "dynamic")]
fn forward<S: Float, B: Float, P: Float, G: Float, T: Float, H: Float, A: Float, N: Size>(
    stream: &[Vector<S, N>],
    branch: ComptimeOption<Box<[Vector<B, N>]>>,
    bias: ComptimeOption<Box<[Vector<P, N>]>>,
    gamma: ComptimeOption<Box<[Vector<G, N>]>>,
    beta: ComptimeOption<Box<[Vector<T, N>]>>,
    sum: ComptimeOption<Box<[Vector<S, N>]>>,
    normed: ComptimeOption<Box<[Vector<H, N>]>>,
    kept: ComptimeOption<Kept<H, A, N>>,
    rows: usize,
    inverse_width: InputScalar,
    epsilon: InputScalar,
    mask: StreamMask,
    #[comptime] kind: Kind,
    #[define(S, B, P, G, T, H, A)] _types: [ElemType; 7],
) {
    let tile = comptime!(kind.tile);
    let vectors = comptime!(tile.lane_vectors());
    let row_vectors = comptime!(tile.row_vectors);
    let zero = Vector::<A, N>::zeroed();
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(tile.lanes);
    let row = CUBE_POS * comptime!(tile.rows) + unit / comptime!(tile.lanes);
    let exists = row < rows;
    // Units past the last row read it again, so that no load waits for a comparison.
    let row = min(row, rows - 1);
    let start = row * row_vectors;

    let mut x = load_row::<S, A, N>(stream, start, lane, tile);
    #[comptime]
    match branch {
        ComptimeOption::Some(branch) => {
            let mut sum = sum.unwrap();
            let mut added = load_row::<B, A, N>(&branch[..], start, lane, tile);
            #[comptime]
            match bias {
                ComptimeOption::Some(bias) =>
                {
                    #[unroll]
                    for i in 0..vectors {
                        added[i] += Vector::<A, N>::cast_from(bias[place(lane, i, tile)]);
                    }
                }
                ComptimeOption::None => {}
            }
            #[unroll]
            for i in 0..vectors {
                let at = place(lane, i, tile);
                let mut value = added[i];
                if comptime!(kind.dropout) {
                    value *= stream_factors::<A, N>(&mask, row, at * N::value());
                }
                let value = Vector::<S, N>::cast_from(x[i] + value);
                x[i] = Vector::<A, N>::cast_from(value);
                if exists && has(lane, i, tile) {
                    sum[start + at] = value;
                }
            }
        }
        ComptimeOption::None => {}
    }
    #[comptime]
    match normed {
        ComptimeOption::Some(mut normed) => {
            let mut shared = Shared::<[A]>::new_slice(comptime!(tile.shared()));
            let inverse_width = inverse_width.get::<A>();
            if comptime!(kind.centered) {
                let mut total = zero;
                #[unroll]
                for i in 0..vectors {
                    total += select(has(lane, i, tile), x[i], zero);
                }
                let mean =
                    across_lanes::<A>(sum_of::<A, N>(total), &mut shared, tile, Combine::Sum)
                        * inverse_width;
                let mean = Vector::<A, N>::empty().fill(mean);
                #[unroll]
                for i in 0..vectors {
                    x[i] -= mean;
                }
            }
            let mut total = zero;
            #[unroll]
            for i in 0..vectors {
                total += select(has(lane, i, tile), x[i] * x[i], zero);
            }
            let variance =
                across_lanes::<A>(sum_of::<A, N>(total), &mut shared, tile, Combine::Sum)
                    * inverse_width;
            let scale = A::new(1.0) / (variance + epsilon.get::<A>()).sqrt();
            #[unroll]
            for i in 0..vectors {
                x[i] *= Vector::<A, N>::empty().fill(scale);
            }
            #[comptime]
            match kept {
                ComptimeOption::Some(mut kept) => {
                    store_row::<H, A, N>(&mut kept.centered[..], &x, start, exists, lane, tile);
                    if exists && lane == 0 {
                        kept.rstd[row] = scale;
                    }
                }
                ComptimeOption::None => {}
            }
            let gamma = gamma.unwrap();
            #[unroll]
            for i in 0..vectors {
                x[i] *= Vector::<A, N>::cast_from(gamma[place(lane, i, tile)]);
            }
            #[comptime]
            match beta {
                ComptimeOption::Some(beta) =>
                {
                    #[unroll]
                    for i in 0..vectors {
                        x[i] += Vector::<A, N>::cast_from(beta[place(lane, i, tile)]);
                    }
                }
                ComptimeOption::None => {}
            }
            store_row::<H, A, N>(&mut normed[..], &x, start, exists, lane, tile);
        }
        ComptimeOption::None => {}
    }
}

/// Branch added to a stream.
#[derive(Clone, Copy, Debug)]
pub struct NormBranch<'a> {
    /// Branch, `[rows, width]`.
    pub x: Typed<'a>,
    /// Bias, `[width]`.
    pub bias: Option<Typed<'a>>,
    /// Dropout of branch and bias.
    pub dropout: Option<&'a ElementDropout>,
    /// Output: the sum of stream and branch, `[rows, width]` in the stream's type.
    pub sum: &'a Handle,
}

/// Norm of a stream.
#[derive(Clone, Copy, Debug)]
pub struct NormOf<'a> {
    /// True if the mean is subtracted.
    pub centered: bool,
    /// Term added to the variance.
    pub epsilon: f64,
    /// Scale, `[width]`.
    pub gamma: Typed<'a>,
    /// Shift, `[width]`.
    pub beta: Option<Typed<'a>>,
    /// Output: the normed stream, `[rows, width]`.
    pub normed: Typed<'a>,
    /// Outputs for the backward pass: x̂, `[rows, width]` in normed's type, and 1/σ, `[rows]` in the type of sums.
    pub kept: Option<[&'a Handle; 2]>,
}

/// Computes `s' = s + m ∘ (a + b)` if there is a branch, and the norm of `s'` (of `s` without a branch) if there is a norm.
///
/// All matrices are contiguous. Computation is f32, or f64 if the stream is. Devices that do not bind the buffers of both steps at once run two launches.
///
/// # Errors
/// [`KernelError::Limit`] if a row exceeds a cube's registers, or the device cannot index the matrix.
pub fn add_norm(
    client: &Client,
    stream: Typed,
    [rows, width]: [usize; 2],
    branch: Option<NormBranch>,
    norm: Option<NormOf>,
) -> Result<(), KernelError> {
    if let (Some(branch), Some(norm)) = (branch, norm) {
        let optional = [branch.bias.is_some(), norm.beta.is_some()];
        let kept = if norm.kept.is_some() { 2 } else { 0 };
        let kept = kept + seeds::buffers(branch.dropout.map(|dropout| dropout.seed));
        let buffers = 5 + optional.into_iter().filter(|some| *some).count() + kept;
        if check_buffers(client, buffers).is_err() {
            launch(client, stream, [rows, width], Some(branch), None)?;
            return launch(
                client,
                (branch.sum, stream.1),
                [rows, width],
                None,
                Some(norm),
            );
        }
    }
    launch(client, stream, [rows, width], branch, norm)
}

fn launch(
    client: &Client,
    (stream, element): Typed,
    [rows, width]: [usize; 2],
    branch: Option<NormBranch>,
    norm: Option<NormOf>,
) -> Result<(), KernelError> {
    let bias = branch.and_then(|branch| branch.bias);
    let beta = norm.and_then(|norm| norm.beta);
    let [added, gamma, normed] = [
        branch.map(|branch| branch.x),
        norm.map(|norm| norm.gamma),
        norm.map(|norm| norm.normed),
    ];
    let tensors = [added, bias, gamma, beta, normed];
    // Absent tensors get the stream's type.
    let [added_type, bias_type, gamma_type, beta_type, normed_type] =
        tensors.map(|tensor| tensor.map_or(element, |(_, element)| element));
    let accumulator = accumulator_of(element);
    let types = [
        element,
        added_type,
        bias_type,
        gamma_type,
        beta_type,
        normed_type,
        accumulator,
    ];
    let stored = widest(types[..6].iter().copied());
    let tile = tile_of(client.properties(), width, stored, LANE_NUMBERS)?;
    if rows == 0 {
        return Ok(());
    }
    let tiles = rows.div_ceil(tile.rows);
    let address = address_of(client, (rows * width).max(2 * tiles * tile.rows))?;
    let cubes = spread(client, tiles as u64)?;
    let dropout = branch.and_then(|branch| branch.dropout);
    let kind = Kind {
        tile,
        centered: norm.is_some_and(|norm| norm.centered),
        dropout: dropout.is_some(),
    };
    let (matrix, row) = (rows * tile.row_vectors, tile.row_vectors);
    let kept = (norm.and_then(|norm| norm.kept))
        .map(|[centered, rstd]| KeptLaunch::new(buffer(centered, matrix), buffer(rstd, rows)));
    let handles = tensors.map(|tensor| tensor.map(|(handle, _)| handle));
    let [added, bias, gamma, beta, normed] = handles;
    // SAFETY: a unit reads vectors of a row below `rows`, and of `[width]` below the row's vectors; it writes its own vectors of an existing row, and the
    // first lane writes 1/σ. The buffers have the declared lengths (see `buffer`).
    unsafe {
        forward::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(tile.units() as u32),
            address,
            tile.vector,
            buffer(stream, matrix),
            optional(added, matrix),
            optional(bias, row),
            optional(gamma, row),
            optional(beta, row),
            optional(branch.map(|branch| branch.sum), matrix),
            optional(normed, matrix),
            kept.into(),
            rows,
            InputScalar::new(1.0 / width as f64, accumulator),
            InputScalar::new(norm.map_or(0.0, |norm| norm.epsilon), accumulator),
            stream_mask(dropout, accumulator),
            kind,
            types,
        );
    }
    Ok(())
}
