//! Sums of weights along lines: over the queries of each key, and over the pairs at each distance. Also the gradient of the table of distances, which is a
//! sum over diagonals.

use cubecl::prelude::*;

use super::dropout::factors;
use super::gather::*;
use super::product::*;
use super::score::*;
use super::tile::*;
use crate::shared::addressing::*;
use crate::shared::biases::ScoreBiases;
use crate::shared::dropout::DropoutArgs;
use crate::shared::score::{LOW, ScoreInputs};
use blocksparse::lines::Line;

/// Offsets of a line plan's sections: `lines::LineSections` on the device.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct LineParts {
    /// First line, first segment and number of segments of each head.
    pub heads: usize,
    /// Number of segments before each line.
    pub lines: usize,
    /// Segments.
    pub segments: usize,
    /// Tiles.
    pub tiles: usize,
    /// Masks.
    pub masks: usize,
    /// Words between the heads of two batch entries, 0 if all share one layout.
    pub batch: usize,
}

/// Returns the number of sums of a tile's line: its columns, or twice its side, which is one more than its diagonals.
pub fn line_width(line: Line, side: usize) -> usize {
    match line {
        Line::Columns => side,
        Line::Diagonals => 2 * side,
    }
}

/// Vectors of four in shared memory for each of the two sets of rows.
pub fn row_fours(tile: &Tile, gradient: bool) -> usize {
    let values = if gradient { pitch(tile.value_dim) } else { 0 };
    tile.rows * pitch(tile.head_dim).max(values)
}

/// Inputs of the gradients of scores besides queries and keys.
#[derive(CubeType, CubeLaunch)]
pub struct GradientInputs<T: CubePrimitive> {
    /// `[batch, kv_heads, seq_kv, value_dim]`
    pub v: RowTensor<T>,
    /// `[batch, heads, seq_q, value_dim]`
    pub grad_out: RowTensor<T>,
}

/// Compile-time parameters of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SumsConfig {
    /// Whether to sum gradients of scores instead of weights.
    pub gradient: bool,
    pub line: Line,
    pub tile: Tile,
}

/// Sums along lines, with one cube per segment of each head:
///
/// ```text
/// sum = 0                                     one per pair of a tile
/// for each tile of the segment:
///     s    = scale · q · kᵀ                   softcap, biases
///     sum += exp(s − lse)                     allowed pairs only
/// sums = Σ sum over columns or diagonals      in the order of rows
/// ```
///
/// With `gradient`, the sum is over `ds = p ∘ (dO · vᵀ − delta)`, without the softcap's factor, instead of the weights. Then `lse` is the stats of the
/// backward kernel, with slopes from element `slopes_at` on, followed by the table of distances.
///
/// `q` and `k` are as in the forward kernel, `lse` `[batch, heads, seq_q]`, `sums` `[batch, heads, segments, line_width]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn attention_sums<E: Float, A: Float, N: Size>(
    q: RowTensor<Vector<E, N>>,
    k: RowTensor<Vector<E, N>>,
    lse: &[A],
    biases: ScoreBiases<E, A>,
    gradient: ComptimeOption<GradientInputs<Vector<E, N>>>,
    sums: &mut [A],
    schedule: LineSchedule,
    heads_per_kv: usize,
    slopes_at: usize,
    numbers: ScoreInputs,
    dropout: DropoutArgs<InputScalar>,
    #[comptime] config: SumsConfig,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let t = comptime!(config.tile);
    let side = comptime!(t.rows);
    let plan = &schedule.plan;
    let unit = unit_of_cube(t);
    let head = head_of(&schedule.slice);
    let batch = batch_of(&schedule.slice);
    let head_row = batch * schedule.slice.heads + head;
    let kv_head = head / heads_per_kv;
    // Queries and keys, and with `gradient` later dO and values in the same memory.
    let fours = comptime!(row_fours(&t, config.gradient));
    let mut a_tile = Shared::<[Vector<A, Four>]>::new_slice(fours);
    let mut b_tile = Shared::<[Vector<A, Four>]>::new_slice(fours);
    let mut pairs = Shared::<[A]>::new_slice(comptime!(t.rows * t.rows));

    let mut slope = A::new(0.0);
    if comptime!(t.score.alibi && config.gradient) {
        slope = lse[slopes_at + head];
    } else if comptime!(t.score.alibi) {
        slope = biases.slopes.as_ref().unwrap()[head];
    }
    let of_head = head_scores::<E, A>(&numbers, &biases, slope, batch, head);
    let lengths = SeqLengths {
        queries: q.strides.len,
        keys: k.strides.len,
    };
    let mut sum = no_numbers::<A>(comptime!(t.unit_rows * 4));

    let segment = segment_of_cube(&schedule, batch, head);
    for index in 0..segment.tiles {
        let entry = schedule.parts.tiles + (segment.first + index) * 3;
        let first_row = plan.words[entry + 2] as usize * side;
        sync_cube();
        let dim = comptime!(t.head_dim);
        let rows = rows_of(&q.strides, batch, head);
        load::<E, A, N>(
            &q.vectors[..],
            &rows,
            plan,
            first_row,
            &mut a_tile,
            dim,
            Side::Own,
            t,
        );
        let rows = rows_of(&k.strides, batch, kv_head);
        load::<E, A, N>(
            &k.vectors[..],
            &rows,
            plan,
            entry,
            &mut b_tile,
            dim,
            Side::Gathered,
            t,
        );
        sync_cube();
        let mut s = product_rows(&a_tile, &b_tile, &unit, dim, t);
        score(&mut s, &of_head, t);
        let mut positions = row_positions(plan, first_row, &unit, t);
        set_columns(&mut positions, plan, entry, &unit, t);
        let added = if comptime!(config.gradient) {
            biases_in_stats::<E, A>(&of_head, &biases, lse, &positions, &lengths, t)
        } else {
            biases_in_table::<E, A>(&of_head, &biases, &positions, &lengths, t)
        };
        add_biases(&mut s, &added, t);
        let mut dp = Array::<A>::new(comptime!(t.unit_rows * 4));
        if comptime!(config.gradient) {
            sync_cube();
            let inputs = gradient.as_ref().unwrap();
            let dim = comptime!(t.value_dim);
            let rows = rows_of(&inputs.grad_out.strides, batch, head);
            let source = &inputs.grad_out.vectors[..];
            load::<E, A, N>(
                source,
                &rows,
                plan,
                first_row,
                &mut a_tile,
                dim,
                Side::Own,
                t,
            );
            let rows = rows_of(&inputs.v.strides, batch, kv_head);
            let source = &inputs.v.vectors[..];
            load::<E, A, N>(
                source,
                &rows,
                plan,
                entry,
                &mut b_tile,
                dim,
                Side::Gathered,
                t,
            );
            sync_cube();
            dp = product_rows(&a_tile, &b_tile, &unit, dim, t);
        }
        let kept = factors::<A>(&dropout, &positions, batch, head, t);
        let mask = plan.words[entry + 1] as usize;
        #[unroll]
        for i in 0..comptime!(t.unit_rows) {
            let row = unit.y * comptime!(t.unit_rows) + i;
            let mut bits = 15u32;
            if mask != 0 {
                let word = schedule.parts.masks
                    + (mask * side + row) * comptime!(t.mask_words)
                    + unit.x * 4 / 32;
                bits = (plan.words[word] >> (unit.x * 4 % 32) as u32) & 15u32;
            }
            // Rows without keys have lse −∞ and no mask bits.
            let query = first_row + row;
            let at = head_row * lengths.queries + query.min(lengths.queries - 1);
            let log = lse[at * comptime!(if config.gradient { 2usize } else { 1usize })];
            let log = select(log < A::new(LOW), A::new(0.0), log);
            let mut delta = A::new(0.0);
            if comptime!(config.gradient) {
                delta = lse[at * 2 + 1];
            }
            #[unroll]
            for j in 0..4usize {
                let at = comptime!(4 * i + j);
                let allowed = (bits >> comptime!(j as u32)) & 1u32 == 1u32;
                let mut value = (s[at] - log).exp();
                if comptime!(config.gradient) {
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
    for i in 0..comptime!(t.unit_rows) {
        #[unroll]
        for j in 0..4usize {
            let row = unit.y * comptime!(t.unit_rows) + i;
            pairs[row * side + unit.x * 4 + j] = sum[comptime!(4 * i + j)];
        }
    }
    sync_cube();
    let segment = head_row * CUBE_COUNT_X as usize + CUBE_POS_X as usize;
    store_line(sums, &pairs, segment, config.line, t);
}

/// Line plan and slice of a launch.
#[derive(CubeType, CubeLaunch)]
pub struct LineSchedule {
    pub plan: PlanWords,
    /// Offsets of the plan's sections.
    pub parts: LineParts,
    pub slice: Slice,
}

/// The cube's segment.
#[derive(CubeType, Clone, Copy)]
struct Segment {
    /// Its first tile.
    first: usize,
    /// Number of its tiles.
    tiles: usize,
}

/// Returns the cube's segment, which is empty if its head has fewer segments than another.
#[cube]
fn segment_of_cube(schedule: &LineSchedule, batch: usize, head: usize) -> Segment {
    let words = &schedule.plan.words;
    let parts = &schedule.parts;
    let record = parts.heads + (batch * parts.batch + head) * 3;
    let mut first = 0usize;
    let mut tiles = 0usize;
    if CUBE_POS_X < words[record + 2] {
        let segment = parts.segments + (words[record + 1] + CUBE_POS_X) as usize * 2;
        first = words[segment] as usize;
        tiles = words[segment + 1] as usize;
    }
    Segment { first, tiles }
}

/// Sums a tile's pairs along lines and stores them.
#[cube]
fn store_line<A: Float>(
    sums: &mut [A],
    pairs: &Shared<[A]>,
    segment: usize,
    #[comptime] line: Line,
    #[comptime] t: Tile,
) {
    let side = comptime!(t.rows);
    let width = comptime!(line_width(line, t.rows));
    let mut at = UNIT_POS_X as usize;
    while at < width {
        let mut total = A::new(0.0);
        for row in 0..side {
            // Element (row, column) of a tile is on its diagonal side − 1 + row − column.
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
        sums[segment * width + at] = total;
        at += comptime!(t.units());
    }
}

/// Adds up the segments of each line into `out` `[batch, heads, length]` of `total` elements. Element `x` of a head is column `x`, or the diagonal
/// `x + offset` of the lines' tiles, counted from the upper right corner of the last key tile.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::collapsible_if)] // Compile-time conditions stay separate from run-time ones.
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

/// Units that share the sum of a distance.
pub const FOLD_UNITS: usize = 64;

/// Computes the gradient of the table of distances, `table` `[own_heads, 2 · reach + 1]`, from `diagonals` `[batch, heads, length]`, with one cube per
/// element. It sums over batch entries, over heads that share the table and, at both ends, over distances beyond the reach. Each unit adds every
/// [`FOLD_UNITS`]-th term, then the units' sums are added in order.
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
        // Element x belongs to the distance key − query = seq_q − 1 − x.
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
