//! The backward kernel: a loop over rows for dQ, over columns for dK and dV.

use cubecl::prelude::*;

use super::dq::*;
use super::dropout::factors;
use super::gather::*;
use super::mask::*;
use super::product::*;
use super::score::*;
use super::score_gradient::*;
use super::tile::*;
use crate::shared::addressing::*;
use crate::shared::biases::ScoreBiases;
use crate::shared::dropout::DropoutArgs;
use crate::shared::row_tile::Combine;
use crate::shared::score::ScoreInputs;

/// Lengths of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct MainloopLengths {
    /// Number of query heads.
    pub heads: usize,
    /// Query heads per head of keys.
    pub heads_per_kv: usize,
    /// Stored blocks per batch entry.
    pub weight_blocks: usize,
    /// Vector of `out` at which dV begins.
    pub second: usize,
    /// Element of the stats at which the ALiBi slopes begin.
    pub slopes: usize,
    /// Tiles per head.
    pub tiles: usize,
}

/// Outputs of a mainloop. Which of them it writes depends on the tile.
#[derive(CubeType, CubeLaunch)]
pub struct MainloopOutputs<E: Float, A: Float, N: Size> {
    /// Gradient of the bias.
    pub bias: ComptimeOption<Box<[A]>>,
    /// Sums of dQ.
    pub sums: ComptimeOption<Box<[Vector<A, Four>]>>,
    /// out1, followed from vector `second` by out2, both contiguous.
    pub out: Box<[Vector<E, N>]>,
}

/// One kernel for both mainloops. `a` are the tile's own rows, `b` the gathered rows:
///
/// ```text
///            a1  a2   b1  b2        s  = scale · a1 · b1ᵀ      p  = exp(s − lse)
/// rows       q   dO   k   v         dp = a2 · b2ᵀ              ds = p ∘ (dp − delta)
/// columns    k   v    q   dO        out1 += ds · b1            out2 += p · b2   (columns only)
/// ```
///
/// In a loop over columns, s, p, dp and ds are transposed. `out1 · scale` is dQ or dK, and `out2` is dV. With a softcap, `ds` has the factor
/// `1 − (s / softcap)²`, where s is softcapped but without biases. With dropout, dp and the p in `p · b2` have the factors of the forward pass. Stored
/// weights, if there are any, replace `exp(s − lse)`.
///
/// With a threshold, a step computes only s if all weights of a plane's pairs are below `exp(−threshold)`.
///
/// A head of keys serves `heads_per_kv` query heads, and a loop over columns goes through all of them.
///
/// With `t.bias_gradient`, the kernel computes the gradient of the bias instead, which is `ds` without the softcap's factor. A loop over rows adds it pair
/// by pair. If all queries share a row of the bias, a loop over columns adds a sum per key. Batch entries and heads that share a bias are launched one
/// after the other, in a slice each, so that every element has one writer at a time.
///
/// With `t.fused`, a loop over columns computes dQ too. A cube computes the tiles of a group one after the other: see [`rank_of`]. Each group has its own
/// `sums` of dQ, `[groups, batch, heads, seq_q, fours]`, to which only this cube adds. [`finish`] adds them up.
///
/// The ALiBi slopes begin at element `slopes` of `stats`, followed by the table of distances.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn backward<E: Float, A: Float, N: Size>(
    operands: MainloopOperands<RowTensor<Vector<E, N>>>,
    stats: &[A],
    weights: ComptimeOption<Box<[A]>>,
    biases: ScoreBiases<E, A>,
    mut outputs: MainloopOutputs<E, A, N>,
    schedule: Schedule,
    lengths: MainloopLengths,
    numbers: ScoreInputs,
    dropout: DropoutArgs<InputScalar>,
    #[comptime] t: Tile,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let plan = &schedule.plan;
    let columns = comptime!(t.columns());
    let dims = comptime!([t.head_dim, t.value_dim]);
    let unit = unit_of_cube(t);
    let outer = head_of(&schedule.slice);
    let batch = batch_of(&schedule.slice);
    let heads = lengths.heads;
    let a_len = operands.a1.strides.len;
    let b_len = operands.b1.strides.len;

    let mut a1_tile = Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.rows * pitch(t.head_dim)));
    let mut a2_tile =
        Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.rows * pitch(t.value_dim)));
    let mut b1_tile =
        Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.cols() * pitch(t.head_dim)));
    let mut b2_tile =
        Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.cols() * pitch(t.value_dim)));
    let mut ds_tile = Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.rows * t.weight_pitch()));
    // A fused mainloop keeps its weights and then ds in the same memory.
    let p_len = comptime!(if columns && !t.fused {
        t.rows * t.weight_pitch()
    } else {
        1
    });
    let mut p_tile = Shared::<[Vector<A, Four>]>::new_slice(p_len);

    // All heads of the group have the same tile. Its rank is looked up in the first head.
    let mut turns = 1usize;
    let mut first_head = outer;
    let mut a_head = outer;
    if comptime!(columns && t.bias_gradient) {
        a_head = outer / lengths.heads_per_kv;
    } else if comptime!(columns) {
        turns = lengths.heads_per_kv;
        first_head = outer * lengths.heads_per_kv;
    }
    let mut scratch = Shared::<[A]>::new_slice(comptime!(if columns && t.bias_gradient {
        scratch_len(t)
    } else {
        1
    }));
    let mut key_sums = no_numbers::<A>(t.unit_rows);
    // A fused pass has one cube per group of tiles, and sums of dQ for each group.
    let group_rows = CUBE_POS_X as usize * schedule.slice.batches * heads * b_len;
    if comptime!(t.fused) {
        let first = group_rows + (batch * heads + first_head) * b_len;
        clear(&mut outputs.sums, first, turns * b_len, t);
    }
    let rounds = if comptime!(t.fused) {
        rounds_of(CUBE_POS_X as usize, lengths.tiles)
    } else {
        1usize.runtime()
    };
    #[unroll(!t.fused)]
    for round in 0..rounds {
        let mut rank = CUBE_POS_X as usize;
        if comptime!(t.fused) {
            rank = rank_of(rank, round);
            // All units must have read the previous tile's keys.
            sync_cube();
        }
        let own = tile_steps(&schedule, batch, first_head, rank, t);
        load_both::<E, A, N>(
            &operands.a1.vectors[..],
            &operands.a2.vectors[..],
            &rows_of(&operands.a1.strides, batch, a_head),
            &rows_of(&operands.a2.strides, batch, a_head),
            plan,
            own.rows,
            &mut a1_tile,
            &mut a2_tile,
            dims,
            Side::Own,
            t,
        );
        let mut out1 = no_fours::<A>(comptime!(t.unit_rows * t.unit_fours(t.head_dim)));
        let mut out2 = no_fours::<A>(comptime!(if columns {
            t.unit_rows * t.unit_fours(t.value_dim)
        } else {
            1
        }));
        let span = row_span(plan, own.rows, unit.y * comptime!(t.unit_rows), t);
        let count = comptime!(t.unit_rows);
        let head_row = batch * heads + outer;
        let of_rows = query_stats::<A>(stats, &span, head_row, a_len, count, !columns);
        let mut positions = row_positions(plan, own.rows, &unit, t);
        let seq_lengths = lengths_of(a_len, b_len, t);

        for turn in 0..turns {
            let head = first_head + turn;
            let mut slope = A::new(0.0);
            if comptime!(t.score.alibi) {
                slope = stats[lengths.slopes + head];
            }
            let of_head = head_scores::<E, A>(&numbers, &biases, slope, batch, head);
            let mut first_entry = own.entry;
            let mut steps = own.steps;
            let mut masked_steps = own.masked;
            if turn > 0 {
                let of_turn = tile_steps_of(&schedule, batch, head, own.tile, t);
                first_entry = of_turn.entry;
                steps = of_turn.steps;
                masked_steps = of_turn.masked;
            }
            let mut b_head = head;
            if comptime!(!columns) {
                b_head = head / lengths.heads_per_kv;
            }
            let b1_rows = rows_of(&operands.b1.strides, batch, b_head);
            let b2_rows = rows_of(&operands.b2.strides, batch, b_head);
            let place = schedule.parts.places + batch * schedule.parts.batch + head;
            let place0 = batch * lengths.weight_blocks + plan.words[place] as usize;

            for step in 0..steps {
                let entry = first_entry + step * comptime!(t.entries() * t.entry_words());
                sync_step(t);
                load_both::<E, A, N>(
                    &operands.b1.vectors[..],
                    &operands.b2.vectors[..],
                    &b1_rows,
                    &b2_rows,
                    plan,
                    entry,
                    &mut b1_tile,
                    &mut b2_tile,
                    dims,
                    Side::Gathered,
                    t,
                );
                sync_cube();

                let masked = step < masked_steps;
                let bits = mask_bits(&schedule, entry, masked, &unit, t);
                let halves = needed(bits, masked, unit.x, t);
                if halves != 0u32 {
                    let span = column_span(plan, entry, unit.x, t);
                    let head_row = batch * heads + head;
                    let of_cols = query_stats::<A>(stats, &span, head_row, b_len, 4usize, columns);
                    set_columns(&mut positions, plan, entry, &unit, t);
                    let sums = biases_in_stats::<E, A>(
                        &of_head,
                        &biases,
                        stats,
                        &positions,
                        &seq_lengths,
                        t,
                    );
                    let mut pairs = if comptime!(t.store.is_some()) {
                        let places = StoredPlaces {
                            first: place0,
                            entry,
                            row: own.rows + unit.y * comptime!(t.unit_rows),
                            unit_x: unit.x,
                        };
                        stored_weights(
                            &weights, plan, &places, &sums, &of_rows, &of_cols, &of_head, t,
                        )
                    } else {
                        let mut s = product_rows(&a1_tile, &b1_tile, &unit, dims[0], t);
                        weights_of_products(
                            &mut s, &sums, &of_rows, &of_cols, &of_head, masked, bits, t,
                        )
                    };
                    if pairs.count(&numbers.threshold, t) {
                        let dp = product_rows(&a2_tile, &b2_tile, &unit, dims[1], t);
                        let kept = factors::<A>(&dropout, &positions, batch, head, t);
                        let ds = pairs.gradients(&dp, &kept, &of_rows, &of_cols, t);
                        if comptime!(t.bias_gradient) {
                            if comptime!(columns) {
                                add_rows(&mut key_sums, &ds, t);
                            } else {
                                let strides = &biases.strides;
                                let bias = &mut outputs.bias;
                                add_pairs(bias, &pairs, &ds, &positions, &of_head, strides, t);
                            }
                        } else if comptime!(t.fused) {
                            put_rows(&mut ds_tile, &pairs.given(&kept, t), &unit, t);
                            sync_row(t);
                            let dim = dims[1];
                            accumulate_product(
                                &ds_tile, &b2_tile, &mut out2, &unit, halves, dim, t,
                            );
                            sync_row(t);
                            put_rows(&mut ds_tile, &ds, &unit, t);
                        } else {
                            put_rows(&mut ds_tile, &ds, &unit, t);
                            if comptime!(columns) {
                                put_rows(&mut p_tile, &pairs.given(&kept, t), &unit, t);
                            }
                            sync_row(t);
                            let dim = dims[0];
                            accumulate_product(
                                &ds_tile, &b1_tile, &mut out1, &unit, halves, dim, t,
                            );
                            if comptime!(columns) {
                                let dim = dims[1];
                                accumulate_product(
                                    &p_tile, &b2_tile, &mut out2, &unit, halves, dim, t,
                                );
                            }
                        }
                    } else if comptime!(t.fused) {
                        clear_rows(&mut ds_tile, &unit, t);
                    }
                }
                if comptime!(t.fused) {
                    if halves == 0u32 {
                        clear_rows(&mut ds_tile, &unit, t);
                    }
                    sync_cube();
                    let first = group_rows + (batch * heads + head) * b_len;
                    let mut dq = read(&outputs.sums, first, b_len, plan, entry, t);
                    if halves != 0u32 {
                        accumulate_product(
                            &ds_tile, &b1_tile, &mut out1, &unit, halves, dims[0], t,
                        );
                    }
                    add_product(&ds_tile, &a1_tile, &mut dq, t);
                    write(&mut outputs.sums, &dq, first, b_len, plan, entry, t);
                }
            }
        }
        if comptime!(t.bias_gradient && columns) {
            reduce_rows(&mut key_sums, &mut scratch, &unit, Combine::Sum, t);
            let first = batch * biases.strides.batch + outer * biases.strides.head;
            add_keys(
                &mut outputs.bias,
                &key_sums,
                first,
                &positions,
                a_len,
                &unit,
                t,
            );
        }
        if comptime!(!t.bias_gradient) {
            let head_row = batch * schedule.slice.heads + outer;
            let rows = unit_rows(&schedule, own.rows, head_row, a_len, &unit, t);
            let scale = numbers.scale.get::<A>();
            let second = lengths.second;
            let out = &mut outputs.out[..];
            store_gradients::<E, A, N>(out, &mut out1, &mut out2, second, scale, &rows, &unit, t);
        }
    }
}

/// Writes the unit's rows of out1 and out2, or adds them to the present values.
#[cube]
fn store_gradients<E: Float, A: Float, N: Size>(
    out: &mut [Vector<E, N>],
    out1: &mut Array<Vector<A, Four>>,
    out2: &mut Array<Vector<A, Four>>,
    second: usize,
    scale: A,
    own: &UnitRows,
    unit: &Unit,
    #[comptime] t: Tile,
) {
    let (dim1, dim2) = comptime!((t.head_dim, t.value_dim));
    let one = A::new(1.0);
    let mut factor = scale;
    if comptime!(t.carry) {
        factor = one;
        add_rows_of::<E, A, N>(&out[..], 0usize, out1, scale, own, unit, dim1, t);
        if comptime!(t.columns()) {
            add_rows_of::<E, A, N>(&out[..], second, out2, one, own, unit, dim2, t);
        }
    }
    store_rows::<E, A, N>(out, 0usize, &*out1, factor, own, unit, dim1, t);
    if comptime!(t.columns()) {
        store_rows::<E, A, N>(out, second, &*out2, one, own, unit, dim2, t);
    }
}
