//! Kernel of the backward pass's stats of each query.

use cubecl::ir::features::Plane;
use cubecl::prelude::*;

use crate::shared::addressing::*;
use crate::shared::score::LOW;

/// Outputs of a forward pass, and the gradients with respect to them.
#[derive(CubeType, CubeLaunch)]
pub struct OutputRows<T: CubePrimitive, A: CubePrimitive> {
    /// `[batch, heads, seq_q, value_dim]`, contiguous.
    pub out: Box<[T]>,
    /// Like `out`, with any strides of its outer dimensions.
    pub grad_out: RowTensor<T>,
    /// `[batch, heads, seq_q]`, contiguous, as is its gradient.
    pub lse: Box<[A]>,
    pub grad_lse: ComptimeOption<Box<[A]>>,
}

/// Lengths of the stats.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct StatsLengths {
    pub heads: usize,
    /// Places of all heads.
    pub rows: usize,
    /// Places per head.
    pub pitch: usize,
    /// Element at which the table of distances begins, and its number of elements.
    pub table_start: usize,
    pub table_len: usize,
}

/// Compile-time parameters of [`delta`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeltaConfig {
    pub value_dim: usize,
    /// Units of a plane that share a row, so that their loads coalesce.
    pub lanes: usize,
    /// Whether places are listed by residue class.
    pub residue: bool,
}

/// Computes `stats[head, place] = (lse · lse_factor, delta)` with `delta = rowsum(dO ∘ O) − dlse`, for the query at each place. Both are in one buffer
/// because some devices bind only eight. Rows without keys get lse and delta 0, so that no infinity enters the arithmetic. Places without a position get
/// zeros.
///
/// `stats` is `[rows, 2]`, followed by the ALiBi slopes `[heads]`, if there are any, and the table of distances from `table_start` on.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn delta<E: Float, A: Float, N: Size>(
    outputs: OutputRows<Vector<E, N>, A>,
    slopes: ComptimeOption<Box<[A]>>,
    table: ComptimeOption<Box<[A]>>,
    stats: &mut [A],
    listing: Listing,
    lengths: StatsLengths,
    lse_factor: InputScalar,
    #[comptime] t: DeltaConfig,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let lanes = comptime!(t.lanes);
    let row = ABSOLUTE_POS / lanes;
    let lane = ABSOLUTE_POS % lanes;
    let width = N::value();
    let vectors = comptime!(t.value_dim / width);
    let rows = lengths.rows;
    let strides = &outputs.grad_out.strides;
    let position = position_of(row % lengths.pitch, &listing, t.residue);
    let head = row / lengths.pitch % lengths.heads;
    let batch = row / lengths.pitch / lengths.heads;
    let exists = row < rows && position < strides.len;
    let out_row = (batch * lengths.heads + head) * strides.len + position;
    let mut sum = A::new(0.0);
    if exists {
        let grad_row = batch * strides.batch + head * strides.head + position * strides.row;
        let mut i = lane;
        while i < vectors {
            let product = Vector::<A, N>::cast_from(outputs.out[out_row * vectors + i])
                * Vector::<A, N>::cast_from(outputs.grad_out.vectors[grad_row + i]);
            #[unroll]
            for c in 0..width {
                sum += product.extract(c);
            }
            i += lanes;
        }
    }
    // All units of a plane must reach this.
    #[unroll]
    for step in 0..comptime!(lanes.ilog2()) {
        sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
    }
    if row < rows && lane == 0 {
        let mut log = A::new(0.0);
        if exists {
            log = outputs.lse[out_row];
            #[comptime]
            match outputs.grad_lse {
                ComptimeOption::Some(grad_lse) => {
                    sum -= select(log < A::new(LOW), A::new(0.0), grad_lse[out_row]);
                }
                ComptimeOption::None => {}
            }
        }
        stats[row * 2] = select(log < A::new(LOW), A::new(0.0), log * lse_factor.get::<A>());
        stats[row * 2 + 1] = sum;
        #[comptime]
        match slopes {
            ComptimeOption::Some(slopes) => {
                if row < lengths.heads {
                    stats[rows * 2 + row] = slopes[row];
                }
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        match table {
            ComptimeOption::Some(table) => {
                let mut at = row;
                while at < lengths.table_len {
                    stats[lengths.table_start + at] = table[at];
                    at += rows;
                }
            }
            ComptimeOption::None => {}
        }
    }
}

/// Returns the number of units that share a row of `vectors` in [`delta`], a power of two.
pub fn delta_lanes(properties: &DeviceProperties, vectors: usize) -> usize {
    let plane = properties.hardware.plane_size_min.max(1) as usize;
    match properties.features.plane.contains(Plane::Ops) {
        true => 1 << vectors.min(plane).ilog2(),
        false => 1,
    }
}
