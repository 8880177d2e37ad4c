//! What the backward kernel needs of each query.

use cubecl::ir::features::Plane;
use cubecl::prelude::*;

use crate::shared::addressing::*;
use crate::shared::score::LOW;

/// `stats[head, place] = (lse · lse_factor, delta)`, `delta = rowsum(dO ∘ O) − dlse`: what backward needs of the query at each
/// place, in one buffer because some devices bind only eight. Rows without keys get lse and delta 0, so that no infinity enters the
/// arithmetic; places of no position get zeros. The ALiBi slopes, `[heads]`, are copied behind them, and then the biases of
/// distances. `lanes` units of a plane share a row, so that neighbours read neighbouring numbers.
///
/// `out`, `lse`, `grad_lse` contiguous; `grad_out` with any strides of its outer dimensions; `stats` `[rows, 2]`, with `pitch` places
/// of each head, and behind it `[heads]` where there are slopes and `table_len` numbers from `table_start` on.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn delta<E: Float, A: Float, N: Size>(
    out: &[Vector<E, N>],
    grad_out: &[Vector<E, N>],
    lse: &[A],
    grad_lse: ComptimeOption<Box<[A]>>,
    slopes: ComptimeOption<Box<[A]>>,
    table: ComptimeOption<Box<[A]>>,
    stats: &mut [A],
    grad_strides: Strides,
    listing: Listing,
    heads: usize,
    rows: usize,
    pitch: usize,
    table_start: usize,
    table_len: usize,
    lse_factor: InputScalar,
    #[comptime] value_dim: usize,
    #[comptime] lanes: usize,
    #[comptime] residue: bool,
    #[define(E)] _element: ElemType,
    #[define(A)] _accumulator: ElemType,
) {
    let row = ABSOLUTE_POS / lanes;
    let lane = ABSOLUTE_POS % lanes;
    let width = N::value();
    let vectors = comptime!(value_dim / width);
    let position = position_of(row % pitch, &listing, residue);
    let head = row / pitch % heads;
    let batch = row / pitch / heads;
    let exists = row < rows && position < grad_strides.len;
    let out_row = (batch * heads + head) * grad_strides.len + position;
    let mut sum = A::new(0.0);
    if exists {
        let grad_row =
            batch * grad_strides.batch + head * grad_strides.head + position * grad_strides.row;
        let mut i = lane;
        while i < vectors {
            let product = Vector::<A, N>::cast_from(out[out_row * vectors + i])
                * Vector::<A, N>::cast_from(grad_out[grad_row + i]);
            #[unroll]
            for c in 0..width {
                sum += product.extract(c);
            }
            i += lanes;
        }
    }
    // All units of a plane get here.
    #[unroll]
    for step in 0..comptime!(lanes.ilog2()) {
        sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
    }
    if row < rows && lane == 0 {
        let mut log = A::new(0.0);
        if exists {
            log = lse[out_row];
            #[comptime]
            match grad_lse {
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
                if row < heads {
                    stats[rows * 2 + row] = slopes[row];
                }
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        match table {
            ComptimeOption::Some(table) => {
                let mut at = row;
                while at < table_len {
                    stats[table_start + at] = table[at];
                    at += rows;
                }
            }
            ComptimeOption::None => {}
        }
    }
}

/// Units that share a row of `vectors` in [`delta`]: a power of two.
pub fn delta_lanes(properties: &DeviceProperties, vectors: usize) -> usize {
    let plane = properties.hardware.plane_size_min.max(1) as usize;
    match properties.features.plane.contains(Plane::Ops) {
        true => 1 << vectors.min(plane).ilog2(),
        false => 1,
    }
}
