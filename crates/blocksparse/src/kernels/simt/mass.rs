//! Sums of weights along lines: over the queries of each key, and over the pairs at each distance.

use cubecl::prelude::*;

use super::forward::LOW;
use super::score::*;
use super::tile::*;
use crate::lines::Line;
use crate::plan::Walk;

/// Where the parts of a line plan's words begin: `lines::LineSections` on the device.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct LineParts {
    /// First line, first segment and segments of each head.
    pub heads: usize,
    /// Segments before each line.
    pub lines: usize,
    /// Segments.
    pub segments: usize,
    /// Tiles.
    pub tiles: usize,
    /// Masks.
    pub masks: usize,
    /// Words between the heads of two batch entries: 0 if all share one layout.
    pub batch: usize,
}

/// The sums of a tile's line: its columns, or twice its side for the diagonals and one more.
pub fn line_width(line: Line, side: usize) -> usize {
    match line {
        Line::Columns => side,
        Line::Diagonals => 2 * side,
    }
}

/// One cube for each segment of each head:
///
/// ```text
/// sum = 0                                     a number for each pair of a tile
/// for each tile of the segment:
///     s    = scale · q · kᵀ                   softcap, biases
///     sum += exp(s − lse)                     of allowed pairs
/// sums = sum over rows, or over diagonals     each in the order of rows
/// ```
///
/// `q`, `k` as in the forward kernel, `lse` `[batch, heads, seq_q]`, `sums` `[batch, heads, segments, line_width]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn masses<E: Float, A: Float, N: Size>(
    q: &[Vector<E, N>],
    k: &[Vector<E, N>],
    lse: &[A],
    slopes: ComptimeOption<Box<[A]>>,
    bias: ComptimeOption<Box<[E]>>,
    sums: &mut [A],
    plan: &[u32],
    q_strides: Strides,
    k_strides: Strides,
    bias_strides: BiasStrides,
    listing: Listing,
    parts: LineParts,
    heads_per_kv: usize,
    scale: InputScalar,
    softcap: InputScalar,
    #[comptime] line: Line,
    #[comptime] t: Tile,
    #[define(E)] _element: ElemType,
    #[define(A)] _accumulator: ElemType,
) {
    let side = comptime!(t.rows);
    let rows = comptime!(t.unit_rows);
    let unit_x = UNIT_POS as usize % comptime!(t.units_x);
    let unit_y = UNIT_POS as usize / comptime!(t.units_x);
    let head = CUBE_POS_Y as usize;
    let batch = CUBE_POS_Z as usize;
    let row0 = (batch * CUBE_COUNT_Y as usize + head) * q_strides.len;
    let scale = scale.get::<A>();
    let softcap = softcap.get::<A>();
    let mut q_tile = Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.rows * pitch(t.head_dim)));
    let mut k_tile = Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.rows * pitch(t.head_dim)));
    let mut pairs = Shared::<[A]>::new_slice(comptime!(t.rows * t.rows));

    let q_base = batch * q_strides.batch + head * q_strides.head;
    let k_base = batch * k_strides.batch + head / heads_per_kv * k_strides.head;
    let bias_start = batch * bias_strides.batch + head * bias_strides.head;
    let mut slope = A::new(0.0);
    if comptime!(t.alibi) {
        let slopes = slopes.unwrap();
        slope = slopes[head];
    }
    let lengths = Lengths {
        queries: q_strides.len,
        keys: k_strides.len,
    };
    let mut sum = Array::<A>::new(comptime!(rows * 4));
    #[unroll]
    for i in 0..comptime!(rows * 4) {
        sum[i] = A::new(0.0);
    }

    // A head may have fewer segments than another.
    let record = parts.heads + (batch * parts.batch + head) * 3;
    let mut first = 0usize;
    let mut tiles = 0usize;
    if CUBE_POS_X < plan[record + 2] {
        let segment = parts.segments + (plan[record + 1] + CUBE_POS_X) as usize * 2;
        first = plan[segment] as usize;
        tiles = plan[segment + 1] as usize;
    }
    for index in 0..tiles {
        let entry = parts.tiles + (first + index) * 3;
        let first_row = plan[entry + 2] as usize * side;
        sync_cube();
        load_rows::<E, A, N>(
            q,
            q_base,
            &q_strides,
            &listing,
            plan,
            first_row,
            &mut q_tile,
            comptime!(t.head_dim),
            t,
        );
        gather_rows::<E, A, N>(
            k,
            k_base,
            &k_strides,
            &listing,
            plan,
            entry,
            &mut k_tile,
            comptime!(t.head_dim),
            t,
        );
        sync_cube();
        let mut s = product_rows(&q_tile, &k_tile, unit_y, unit_x, comptime!(t.head_dim), t);
        score(&mut s, scale, softcap, t);
        let mut positions = row_positions(plan, first_row, unit_y, &listing, t);
        set_columns(&mut positions, plan, entry, unit_x, &listing, t);
        let biases = biases::<E, A>(
            slope,
            &bias,
            bias_start,
            bias_strides.row,
            &positions,
            &lengths,
            Walk::Rows,
            t,
        );
        add_biases(&mut s, &biases, t);
        let mask = plan[entry + 1] as usize;
        #[unroll]
        for i in 0..rows {
            let row = unit_y * rows + i;
            let mut bits = 15u32;
            if mask != 0 {
                let word =
                    parts.masks + (mask * side + row) * comptime!(t.mask_words) + unit_x * 4 / 32;
                bits = (plan[word] >> (unit_x * 4 % 32) as u32) & 15u32;
            }
            // Rows without keys have lse −∞, and no bits.
            let query = first_row + row;
            let log = lse[row0 + query.min(q_strides.len - 1)];
            let log = select(log < A::new(LOW), A::new(0.0), log);
            #[unroll]
            for j in 0..4usize {
                let at = comptime!(4 * i + j);
                let allowed = (bits >> comptime!(j as u32)) & 1u32 == 1u32;
                sum[at] += select(allowed, (s[at] - log).exp(), A::new(0.0));
            }
        }
    }

    #[unroll]
    for i in 0..rows {
        #[unroll]
        for j in 0..4usize {
            pairs[(unit_y * rows + i) * side + unit_x * 4 + j] = sum[comptime!(4 * i + j)];
        }
    }
    sync_cube();
    let width = comptime!(line_width(line, t.rows));
    let segment = (batch * CUBE_COUNT_Y as usize + head) * CUBE_COUNT_X as usize;
    let target = (segment + CUBE_POS_X as usize) * width;
    let mut at = UNIT_POS as usize;
    while at < width {
        let mut total = A::new(0.0);
        for row in 0..side {
            // Element (row, column) of a tile is of its diagonal side − 1 + row − column.
            let mut column = at;
            if comptime!(matches!(line, Line::Diagonals)) {
                column = side - 1 + row - at.min(side - 1 + row);
                if at > side - 1 + row {
                    column = side;
                }
            }
            if column < side {
                total += pairs[row * side + column];
            }
        }
        sums[target + at] = total;
        at += comptime!(t.units());
    }
}

/// Adds up the segments of each line: `out` `[batch, heads, length]`, of which `total` elements. Element `x` of a head is column `x`, or the
/// diagonal `x + offset` of the lines' tiles, counted from the upper right corner of the last key tile.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::collapsible_if)] // What is known at compile time stays apart from what is not.
pub fn add_segments<A: Float>(
    sums: &[A],
    out: &mut [A],
    plan: &[u32],
    parts: LineParts,
    heads: usize,
    segments: usize,
    lines: usize,
    length: usize,
    offset: usize,
    total: usize,
    #[comptime] line: Line,
    #[comptime] side: usize,
    #[define(A)] _accumulator: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < total {
        let row = at / length;
        let record = parts.heads + (row / heads * parts.batch + row % heads) * 3;
        let firsts = parts.lines + plan[record] as usize;
        let first = row * segments;
        let place = at % length + offset;
        let own = place / side;
        let within = place % side;
        let width = comptime!(line_width(line, side));
        let mut sum = A::new(0.0);
        // A diagonal of positions crosses two diagonals of tiles.
        if comptime!(matches!(line, Line::Diagonals)) {
            if own > 0 {
                for segment in plan[firsts + own - 1]..plan[firsts + own] {
                    sum += sums[(first + segment as usize) * width + within + side];
                }
            }
        }
        if own < lines {
            for segment in plan[firsts + own]..plan[firsts + own + 1] {
                sum += sums[(first + segment as usize) * width + within];
            }
        }
        out[at] = sum;
    }
}
