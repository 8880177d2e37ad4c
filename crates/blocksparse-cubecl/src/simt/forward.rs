//! The forward kernel: one cube per tile of queries, online softmax over the steps.

use cubecl::prelude::*;

use super::dropout::factors;
use super::gather::*;
use super::mask::*;
use super::product::*;
use super::score::*;
use super::softmax::*;
use super::tile::*;
use crate::shared::addressing::*;
use crate::shared::biases::ScoreBiases;
use crate::shared::dropout::DropoutArgs;
use crate::shared::score::{LOW, ScoreInputs};

/// Computes a tile of queries:
///
/// ```text
/// m = −∞  l = 0  o = 0                         per row of the tile
/// for each step:
///     s  = scale · q · kᵀ                      softcap, biases, masked pairs to LOW
///     next step if s < m − threshold           with a threshold, if it holds for all pairs of the unit's rows
///     m' = max(m, max(s))
///     p  = exp(s − m')                         a = exp(m − m')
///     l  = a · l + Σ p                         o = a · o + p · v      dropout sets some p of this product to 0
/// out = o / l        lse = m + ln l            rows without keys: 0 and −∞
/// ```
///
/// With `max_scores`, each row's largest score is written too. It is separate from `m`, which begins at the lse of earlier parts.
///
/// `q` is `[batch, heads, seq_q, head_dim]`, `k` and `v` are `[batch, kv_heads, seq_kv, ·]`. `weights` is `[batch, blocks, b, b]` and holds zeros before.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn forward<E: Float, A: Float, N: Size>(
    inputs: Qkv<RowTensor<Vector<E, N>>>,
    mut outputs: ForwardOutputs<Vector<E, N>, A>,
    weights: ComptimeOption<Box<[A]>>,
    biases: ScoreBiases<E, A>,
    schedule: Schedule,
    heads_per_kv: usize,
    weight_blocks: usize,
    numbers: ScoreInputs,
    neg_infinity: InputScalar,
    dropout: DropoutArgs<InputScalar>,
    #[comptime] t: Tile,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let plan = &schedule.plan;
    let unit = unit_of_cube(t);
    let head = head_of(&schedule.slice);
    let batch = batch_of(&schedule.slice);

    let mut q_tile = Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.rows * pitch(t.head_dim)));
    let mut k_tile =
        Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.cols() * pitch(t.head_dim)));
    let mut v_tile =
        Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.cols() * pitch(t.value_dim)));
    let mut p_tile = Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.rows * t.weight_pitch()));
    let mut scratch = Shared::<[A]>::new_slice(comptime!(scratch_len(t)));

    let own = tile_steps(&schedule, batch, head, CUBE_POS_X as usize, t);
    let kv_head = head / heads_per_kv;
    let k_rows = rows_of(&inputs.k.strides, batch, kv_head);
    let v_rows = rows_of(&inputs.v.strides, batch, kv_head);
    let dims = comptime!([t.head_dim, t.value_dim]);
    let q_rows = rows_of(&inputs.q.strides, batch, head);
    let q = &inputs.q.vectors[..];
    load::<E, A, N>(
        q,
        &q_rows,
        plan,
        own.rows,
        &mut q_tile,
        dims[0],
        Side::Own,
        t,
    );

    let mut positions = row_positions(plan, own.rows, &unit, t);
    let lengths = SeqLengths {
        queries: inputs.q.strides.len,
        keys: inputs.k.strides.len,
    };
    let mut slope = A::new(0.0);
    if comptime!(t.score.alibi) {
        slope = biases.slopes.as_ref().unwrap()[head];
    }
    let of_head = head_scores::<E, A>(&numbers, &biases, slope, batch, head);
    let head_row = batch * schedule.slice.heads + head;
    let mut softmax = Softmax::<A>::begin(&numbers.threshold, t);
    if comptime!(t.carry) {
        let rows = unit_rows(&schedule, own.rows, head_row, lengths.queries, &unit, t);
        softmax.carry_on::<E, N>(&outputs, &rows, &unit, t);
    }

    for step in 0..own.steps {
        let entry = own.entry + step * comptime!(t.entries() * t.entry_words());
        sync_cube();
        load_both::<E, A, N>(
            &inputs.k.vectors[..],
            &inputs.v.vectors[..],
            &k_rows,
            &v_rows,
            plan,
            entry,
            &mut k_tile,
            &mut v_tile,
            dims,
            Side::Gathered,
            t,
        );
        sync_cube();

        let masked = step < own.masked;
        let bits = mask_bits(&schedule, entry, masked, &unit, t);
        let halves = needed(bits, masked, unit.x, t);
        if halves != 0u32 {
            let mut s = product_rows(&q_tile, &k_tile, &unit, dims[0], t);
            // After the product, which leaves no registers for them.
            set_columns(&mut positions, plan, entry, &unit, t);
            score_products::<E, A>(&mut s, &of_head, &biases, &positions, &lengths, t);
            if masked {
                mask(&mut s, bits, t);
            }
            let kept = factors::<A>(&dropout, &positions, batch, head, t);
            let counts = softmax.step(&s, &kept, &mut p_tile, &mut scratch, &unit, t);
            sync_row(t);
            if counts {
                accumulate_product(&p_tile, &v_tile, &mut softmax.o, &unit, halves, dims[1], t);
            }
        }
    }
    let rows = unit_rows(&schedule, own.rows, head_row, lengths.queries, &unit, t);
    softmax.store::<E, N>(&mut outputs, &rows, &neg_infinity, &mut scratch, &unit, t);

    if comptime!(t.store.is_some()) {
        let mut weights = weights.unwrap();
        let place = schedule.parts.places + batch * schedule.parts.batch + head;
        let place0 = batch * weight_blocks + plan.words[place] as usize;
        for step in 0..own.steps {
            let entry = own.entry + step * comptime!(t.entries() * t.entry_words());
            sync_cube();
            let k = &inputs.k.vectors[..];
            load::<E, A, N>(
                k,
                &k_rows,
                plan,
                entry,
                &mut k_tile,
                dims[0],
                Side::Gathered,
                t,
            );
            sync_cube();
            let mut s = product_rows(&q_tile, &k_tile, &unit, dims[0], t);
            set_columns(&mut positions, plan, entry, &unit, t);
            score_products::<E, A>(&mut s, &of_head, &biases, &positions, &lengths, t);
            let masked = step < own.masked;
            if masked {
                let bits = mask_bits(&schedule, entry, masked, &unit, t);
                mask(&mut s, bits, t);
            }
            #[unroll]
            for i in 0..comptime!(t.unit_rows) {
                let row = own.rows + unit.y * comptime!(t.unit_rows) + i;
                let at = weight_place(plan, place0, entry, row, unit.x, t);
                if at.kept {
                    #[unroll]
                    for j in 0..4usize {
                        weights[at.element + j] = (s[comptime!(4 * i + j)] - softmax.m[i]).exp();
                    }
                }
            }
        }
    }
}

/// Turns the unit's products into scores.
#[cube]
fn score_products<E: Float, A: Float>(
    s: &mut Array<A>,
    of_head: &HeadScores<A>,
    biases: &ScoreBiases<E, A>,
    positions: &Positions,
    lengths: &SeqLengths,
    #[comptime] t: Tile,
) {
    score(s, of_head, t);
    let sums = biases_in_table::<E, A>(of_head, biases, positions, lengths, t);
    add_biases(s, &sums, t);
}

/// Sets the scores of pairs that are not allowed to [`LOW`].
#[cube]
fn mask<A: Float>(s: &mut Array<A>, bits: u32, #[comptime] t: Tile) {
    #[unroll]
    for i in 0..comptime!(t.unit_rows * 4) {
        let allowed = (bits >> comptime!(i as u32)) & 1u32 == 1u32;
        s[i] = select(allowed, s[i], A::new(LOW));
    }
}
