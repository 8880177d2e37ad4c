//! Sums of weights along lines: over the queries of each key, and over the pairs at each distance; and the gradient of biases of distances,
//! which is a sum over diagonals, too.

use cubecl::prelude::*;

use super::dropout::factors;
use super::gather::*;
use super::product::*;
use super::score::*;
use super::tile::*;
use crate::shared::addressing::*;
use crate::shared::dropout::Mask;
use crate::shared::score::LOW;
use blocksparse::lines::Line;
use blocksparse::plan::Mainloop;

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

/// Fours of each of the two sets of rows that are in shared memory.
pub fn row_fours(tile: &Tile, gradient: bool) -> usize {
    let values = if gradient { pitch(tile.value_dim) } else { 0 };
    tile.rows * pitch(tile.head_dim).max(values)
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
/// With `gradient` it is `ds = p ∘ (dO · vᵀ − delta)`, without the softcap's factor, in the place of the weights: then `v` and `grad_out` are there, and `lse` is
/// the stats of the backward kernel, with slopes and biases of distances behind them.
///
/// `q`, `k` as in the forward kernel, `lse` `[batch, heads, seq_q]`, `sums` `[batch, heads, segments, line_width]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn attention_sums<E: Float, A: Float, N: Size>(
    q: &[Vector<E, N>],
    k: &[Vector<E, N>],
    lse: &[A],
    slopes: ComptimeOption<Box<[A]>>,
    bias: ComptimeOption<Box<[E]>>,
    table: ComptimeOption<Box<[A]>>,
    v: ComptimeOption<Box<[Vector<E, N>]>>,
    grad_out: ComptimeOption<Box<[Vector<E, N>]>>,
    sums: &mut [A],
    plan: &[u32],
    q_strides: Strides,
    k_strides: Strides,
    v_strides: Strides,
    grad_strides: Strides,
    bias_strides: BiasStrides,
    distances: Distances,
    listing: Listing,
    parts: LineParts,
    slice: Slice,
    heads_per_kv: usize,
    slopes_at: usize,
    scale: InputScalar,
    softcap: InputScalar,
    dropout: Mask,
    dropout_factor: InputScalar,
    #[comptime] gradient: bool,
    #[comptime] line: Line,
    #[comptime] t: Tile,
    #[define(E)] _element: ElemType,
    #[define(A)] _accumulator: ElemType,
) {
    let side = comptime!(t.rows);
    let rows = comptime!(t.unit_rows);
    let unit_x = UNIT_POS_X as usize % comptime!(t.units_x);
    let unit_y = UNIT_POS_X as usize / comptime!(t.units_x);
    let head = head_of(&slice);
    let batch = batch_of(&slice);
    let row0 = (batch * slice.heads + head) * q_strides.len;
    let scale = scale.get::<A>();
    let softcap = softcap.get::<A>();
    // Queries and keys, and after them what their gradients are made of.
    let mut a_tile = Shared::<[Vector<A, Four>]>::new_slice(comptime!(row_fours(&t, gradient)));
    let mut b_tile = Shared::<[Vector<A, Four>]>::new_slice(comptime!(row_fours(&t, gradient)));
    let mut pairs = Shared::<[A]>::new_slice(comptime!(t.rows * t.rows));

    let kv_head = head / heads_per_kv;
    let bias_start = batch * bias_strides.batch + head * bias_strides.head;
    let mut slope = A::new(0.0);
    if comptime!(t.score.alibi && gradient) {
        slope = lse[slopes_at + head];
    } else if comptime!(t.score.alibi) {
        let slopes = slopes.unwrap();
        slope = slopes[head];
    }
    let lengths = SeqLengths {
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
        load::<E, A, N>(
            q,
            &rows_of(&q_strides, batch, head),
            &listing,
            plan,
            first_row,
            &mut a_tile,
            comptime!(t.head_dim),
            Side::Own,
            t,
        );
        load::<E, A, N>(
            k,
            &rows_of(&k_strides, batch, kv_head),
            &listing,
            plan,
            entry,
            &mut b_tile,
            comptime!(t.head_dim),
            Side::Gathered,
            t,
        );
        sync_cube();
        let mut s = product_rows(&a_tile, &b_tile, unit_y, unit_x, comptime!(t.head_dim), t);
        score(&mut s, scale, softcap, t);
        let mut positions = row_positions(plan, first_row, unit_y, &listing, t);
        set_columns(&mut positions, plan, entry, unit_x, &listing, t);
        let mut biases = biases::<E, A>(
            slope,
            &bias,
            bias_start,
            bias_strides.row,
            &positions,
            &lengths,
            Mainloop::Rows,
            t,
        );
        let start = distances.start + head * distances.head;
        if comptime!(t.score.relative && gradient) {
            add_distances(
                &mut biases,
                lse,
                start,
                distances.reach,
                &positions,
                &lengths,
                Mainloop::Rows,
                t,
            );
        } else if comptime!(t.score.relative) {
            add_distances(
                &mut biases,
                &table.as_ref().unwrap()[..],
                start,
                distances.reach,
                &positions,
                &lengths,
                Mainloop::Rows,
                t,
            );
        }
        add_biases(&mut s, &biases, t);
        let mut dp = Array::<A>::new(comptime!(rows * 4));
        if comptime!(gradient) {
            sync_cube();
            let v = v.as_ref().unwrap();
            let grad_out = grad_out.as_ref().unwrap();
            load::<E, A, N>(
                &grad_out[..],
                &rows_of(&grad_strides, batch, head),
                &listing,
                plan,
                first_row,
                &mut a_tile,
                comptime!(t.value_dim),
                Side::Own,
                t,
            );
            load::<E, A, N>(
                &v[..],
                &rows_of(&v_strides, batch, kv_head),
                &listing,
                plan,
                entry,
                &mut b_tile,
                comptime!(t.value_dim),
                Side::Gathered,
                t,
            );
            sync_cube();
            dp = product_rows(&a_tile, &b_tile, unit_y, unit_x, comptime!(t.value_dim), t);
        }
        let mut kept = Array::<A>::new(comptime!(if t.score.dropout { rows * 4 } else { 1 }));
        if comptime!(t.score.dropout) {
            let factor = dropout_factor.get::<A>();
            kept = factors::<A>(&dropout, factor, &positions, batch, head, Mainloop::Rows, t);
        }
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
            let at = row0 + query.min(q_strides.len - 1);
            let log = lse[at * comptime!(if gradient { 2usize } else { 1usize })];
            let log = select(log < A::new(LOW), A::new(0.0), log);
            let mut delta = A::new(0.0);
            if comptime!(gradient) {
                delta = lse[at * 2 + 1];
            }
            #[unroll]
            for j in 0..4usize {
                let at = comptime!(4 * i + j);
                let allowed = (bits >> comptime!(j as u32)) & 1u32 == 1u32;
                let mut value = (s[at] - log).exp();
                if comptime!(gradient) {
                    let mut by_weight = dp[at];
                    if comptime!(t.score.dropout) {
                        by_weight *= kept[at];
                    }
                    value *= by_weight - delta;
                }
                sum[at] += select(allowed, value, A::new(0.0));
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
    let segment = (batch * slice.heads + head) * CUBE_COUNT_X as usize;
    let target = (segment + CUBE_POS_X as usize) * width;
    let mut at = UNIT_POS_X as usize;
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

/// Units that share a distance's sum.
pub const FOLD_UNITS: usize = 64;

/// The gradient of biases of distances, `table` `[own_heads, 2 · reach + 1]`, of `diagonals` `[batch, heads, length]`: a cube for each of its numbers. Batch
/// entries, heads that share it and, at both ends, distances beyond the reach are added up: each unit every [`FOLD_UNITS`]-th of them, then the units in order.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn fold_distances<A: Float>(
    diagonals: &[A],
    table: &mut [A],
    batch: usize,
    heads: usize,
    own_heads: usize,
    seq_q: usize,
    length: usize,
    reach: usize,
    #[define(A)] _accumulator: ElemType,
) {
    let at = CUBE_POS;
    let width = 2 * reach + 1;
    if at < own_heads * width {
        // Element x is of the distance key − query = seq_q − 1 − x.
        let zero = seq_q - 1;
        let index = at % width;
        let mut first = 0usize;
        let mut end = length;
        if index > 0 {
            end = (zero + reach + 1).max(index) - index;
            end = end.min(length);
        }
        if index < 2 * reach {
            first = zero + reach - index.min(zero + reach);
            first = first.min(length);
        }
        let sharing = heads / own_heads;
        let terms = (end.max(first) - first) * sharing * batch;
        let mut partial = Shared::<[A]>::new_slice(FOLD_UNITS);
        let mut sum = A::new(0.0);
        let mut term = UNIT_POS_X as usize;
        while term < terms {
            let x = first + term % (end - first);
            let rest = term / (end - first);
            let head = at / width + rest % sharing;
            sum += diagonals[(rest / sharing * heads + head) * length + x];
            term += FOLD_UNITS;
        }
        partial[UNIT_POS_X as usize] = sum;
        sync_cube();
        if UNIT_POS == 0 {
            let mut total = A::new(0.0);
            for unit in 0..FOLD_UNITS {
                total += partial[unit];
            }
            table[at] = total;
        }
    }
}
