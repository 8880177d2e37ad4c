//! The forward kernel: one cube per tile of queries, online softmax over the steps.

use cubecl::prelude::*;

use super::dropout::factors;
use super::gather::*;
use super::mask::*;
use super::product::*;
use super::score::*;
use super::tile::*;
use crate::shared::addressing::*;
use crate::shared::dropout::Mask;
use crate::shared::score::{LOW, LOWEST_MAX};
use blocksparse::plan::Mainloop;

/// ```text
/// m = −∞  l = 0  o = 0                         per row of the tile
/// for each step:
///     s  = scale · q · kᵀ                      softcap, biases, masked pairs to LOW
///     m' = max(m, max(s))
///     p  = exp(s − m')                         a = exp(m − m')
///     l  = a · l + Σ p                         o = a · o + p · v      with dropout, of the p that are kept
/// out = o / l        lse = m + ln l            rows without keys: 0 and −∞
/// ```
///
/// With `max_scores` the largest score of each row is written, too: it is kept apart from `m`, which begins at the lse of the parts before.
///
/// `q` `[batch, heads, seq_q, head_dim]`, `k`, `v` `[batch, kv_heads, seq_kv, ·]` with any strides of their outer
/// dimensions; `out`, `lse` and `max_scores` contiguous; `weights` `[batch, blocks, b, b]`, zeroed before.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn forward<E: Float, A: Float, N: Size>(
    q: &[Vector<E, N>],
    k: &[Vector<E, N>],
    v: &[Vector<E, N>],
    out: &mut [Vector<E, N>],
    lse: &mut [A],
    max_scores: ComptimeOption<Box<[A]>>,
    weights: ComptimeOption<Box<[A]>>,
    slopes: ComptimeOption<Box<[A]>>,
    bias: ComptimeOption<Box<[E]>>,
    table: ComptimeOption<Box<[A]>>,
    plan: &[u32],
    strides: InputStrides<Strides>,
    bias_strides: BiasStrides,
    distances: Distances,
    schedule: Schedule,
    heads_per_kv: usize,
    weight_blocks: usize,
    scale: InputScalar,
    softcap: InputScalar,
    neg_infinity: InputScalar,
    dropout: Mask,
    dropout_factor: InputScalar,
    #[comptime] t: Tile,
    #[define(E)] _element: ElemType,
    #[define(A)] _accumulator: ElemType,
) {
    let parts = schedule.parts;
    let listing = schedule.listing;
    let slice = schedule.slice;
    let q_strides = strides.q;
    let k_strides = strides.k;
    let v_strides = strides.v;
    let width = N::value();
    let rows = comptime!(t.unit_rows);
    let unit_fours = comptime!(t.unit_fours(t.value_dim));
    let unit_x = UNIT_POS_X as usize % comptime!(t.units_x);
    let unit_y = UNIT_POS_X as usize / comptime!(t.units_x);
    let head = head_of(&slice);
    let batch = batch_of(&slice);
    let scale = scale.get::<A>();
    let softcap = softcap.get::<A>();

    let mut q_tile = Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.rows * pitch(t.head_dim)));
    let mut k_tile =
        Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.cols() * pitch(t.head_dim)));
    let mut v_tile =
        Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.cols() * pitch(t.value_dim)));
    let mut p_tile = Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.rows * t.weight_pitch()));
    let mut scratch = Shared::<[A]>::new_slice(comptime!(scratch_len(t)));

    let own = tile_steps(plan, &parts, batch, head, CUBE_POS_X as usize, t);
    let kv_head = head / heads_per_kv;
    let k_rows = rows_of(&k_strides, batch, kv_head);
    let v_rows = rows_of(&v_strides, batch, kv_head);
    load::<E, A, N>(
        q,
        &rows_of(&q_strides, batch, head),
        &listing,
        plan,
        own.rows,
        &mut q_tile,
        comptime!(t.head_dim),
        Side::Own,
        t,
    );

    let mut positions = row_positions(plan, own.rows, unit_y, &listing, t);
    let lengths = SeqLengths {
        queries: q_strides.len,
        keys: k_strides.len,
    };
    let mut slope = A::new(0.0);
    if comptime!(t.score.alibi) {
        let slopes = slopes.unwrap();
        slope = slopes[head];
    }
    let of_head = HeadScores::<A> {
        scale,
        softcap,
        slope,
        bias_start: batch * bias_strides.batch + head * bias_strides.head,
        bias_row: bias_strides.row,
        table_start: distances.start + head * distances.head,
        reach: distances.reach,
    };

    let mut m = Array::<A>::new(rows);
    let mut l = Array::<A>::new(rows);
    let mut o = Array::<Vector<A, Four>>::new(comptime!(rows * unit_fours));
    #[unroll]
    for i in 0..rows {
        m[i] = A::new(LOWEST_MAX);
        l[i] = A::new(0.0);
    }
    #[unroll]
    for i in 0..comptime!(rows * unit_fours) {
        o[i] = Vector::<A, Four>::zeroed();
    }
    let tops = comptime!(if t.max_scores { rows } else { 0 });
    let mut top = Array::<A>::new(comptime!(tops.max(1)));
    #[unroll]
    for i in 0..tops {
        top[i] = A::new(LOWEST_MAX);
    }
    if comptime!(t.carry) {
        // A finished part is a row of the softmax with maximum lse and sum 1. All is asked for at once, beyond the end of the
        // sequence for its last row.
        let mut logs = Array::<A>::new(rows);
        let span = row_span(plan, own.rows, unit_y * rows, &listing, t);
        #[unroll]
        for i in 0..rows {
            let row = span.first + i * span.step;
            let at = (batch * slice.heads + head) * q_strides.len + row.min(q_strides.len - 1);
            logs[i] = select(row < q_strides.len, lse[at], A::new(LOW));
            #[unroll]
            for f in 0..unit_fours {
                o[comptime!(i * unit_fours + f)] = load_four::<E, A, N>(
                    &out[..],
                    at * comptime!(t.value_dim / width),
                    unit_x + comptime!(f * t.units_x),
                    comptime!(t.value_dim),
                );
            }
        }
        #[unroll]
        for i in 0..rows {
            let kept = logs[i] > A::new(LOWEST_MAX);
            m[i] = select(kept, logs[i], m[i]);
            // l is a sum over the units of a row.
            l[i] = select(kept && unit_x == 0, A::new(1.0), A::new(0.0));
            #[unroll]
            for f in 0..unit_fours {
                if !kept {
                    o[comptime!(i * unit_fours + f)] = Vector::<A, Four>::zeroed();
                }
            }
        }
    }

    for step in 0..own.steps {
        let entry = own.entry + step * comptime!(t.entries() * t.entry_words());
        sync_cube();
        load_both::<E, A, N>(
            k,
            v,
            &k_rows,
            &v_rows,
            &listing,
            plan,
            entry,
            &mut k_tile,
            &mut v_tile,
            comptime!([t.head_dim, t.value_dim]),
            Side::Gathered,
            t,
        );
        sync_cube();

        let masked = step < own.masked;
        let bits = mask_bits(plan, &parts, entry, masked, unit_y, unit_x, t);
        let halves = needed(bits, masked, unit_x, t);
        if halves != 0u32 {
            let mut s = scores::<E, A>(
                &q_tile,
                &k_tile,
                plan,
                entry,
                &of_head,
                &bias,
                &table,
                &mut positions,
                &listing,
                &lengths,
                unit_y,
                unit_x,
                t,
            );
            if masked {
                mask(&mut s, bits, t);
            }
            let mut kept = Array::<A>::new(comptime!(if t.score.dropout { rows * 4 } else { 1 }));
            if comptime!(t.score.dropout) {
                let factor = dropout_factor.get::<A>();
                kept = factors::<A>(&dropout, factor, &positions, batch, head, Mainloop::Rows, t);
            }
            let mut largest = Array::<A>::new(rows);
            #[unroll]
            for i in 0..rows {
                let a = s[comptime!(4 * i)].max(s[comptime!(4 * i + 1)]);
                let b = s[comptime!(4 * i + 2)].max(s[comptime!(4 * i + 3)]);
                largest[i] = a.max(b);
            }
            reduce_rows(&mut largest, &mut scratch, unit_y, unit_x, true, t);
            #[unroll]
            for i in 0..tops {
                top[i] = top[i].max(largest[i]);
            }
            #[unroll]
            for i in 0..rows {
                let next = m[i].max(largest[i]);
                let shrink = (m[i] - next).exp();
                m[i] = next;
                let mut p = Vector::<A, Four>::zeroed();
                #[unroll]
                for j in 0..4usize {
                    p.insert(j, (s[comptime!(4 * i + j)] - next).exp());
                }
                l[i] = l[i] * shrink
                    + (p.extract(0usize)
                        + p.extract(1usize)
                        + (p.extract(2usize) + p.extract(3usize)));
                #[unroll]
                for f in 0..unit_fours {
                    o[comptime!(i * unit_fours + f)] *= Vector::new(shrink);
                }
                if comptime!(t.score.dropout) {
                    #[unroll]
                    for j in 0..4usize {
                        p.insert(j, p.extract(j) * kept[comptime!(4 * i + j)]);
                    }
                }
                p_tile[(unit_y * rows + i) * comptime!(t.weight_pitch()) + unit_x] = p;
            }
            sync_row(t);
            accumulate_product(
                &p_tile,
                &v_tile,
                &mut o,
                unit_y,
                unit_x,
                halves,
                comptime!(t.value_dim),
                t,
            );
        }
    }

    reduce_rows(&mut l, &mut scratch, unit_y, unit_x, false, t);
    let span = row_span(plan, own.rows, unit_y * rows, &listing, t);
    #[unroll]
    for i in 0..rows {
        let row = span.first + i * span.step;
        let at = (batch * slice.heads + head) * q_strides.len + row;
        let mut inverse = A::new(0.0);
        let mut log = neg_infinity.get::<A>();
        if l[i] > A::new(0.0) {
            inverse = A::new(1.0) / l[i];
            log = m[i] + l[i].ln();
        }
        if row < q_strides.len {
            let target = at * comptime!(t.value_dim / width);
            store_row::<E, A, N>(
                out,
                target,
                &o,
                inverse,
                unit_x,
                i,
                comptime!(t.value_dim),
                t,
            );
            if unit_x == 0 {
                lse[at] = log;
            }
        }
        // For the second mainloop: exp(s − lse), which is 0 in rows without keys since all is masked there.
        m[i] = select(l[i] > A::new(0.0), log, A::new(0.0));
    }

    if comptime!(t.max_scores) {
        let mut max_scores = max_scores.unwrap();
        #[unroll]
        for i in 0..rows {
            let row = span.first + i * span.step;
            let at = (batch * slice.heads + head) * q_strides.len + row;
            if row < q_strides.len && unit_x == 0 {
                let mut most = top[i];
                if comptime!(t.carry) {
                    most = most.max(max_scores[at]);
                }
                // Where there are no keys, and none in the parts before.
                let none = most <= A::new(LOWEST_MAX);
                max_scores[at] = select(none, neg_infinity.get::<A>(), most);
            }
        }
    }

    if comptime!(t.store.is_some()) {
        let mut weights = weights.unwrap();
        let place0 =
            batch * weight_blocks + plan[parts.places + batch * parts.batch + head] as usize;
        for step in 0..own.steps {
            let entry = own.entry + step * comptime!(t.entries() * t.entry_words());
            sync_cube();
            load::<E, A, N>(
                k,
                &k_rows,
                &listing,
                plan,
                entry,
                &mut k_tile,
                comptime!(t.head_dim),
                Side::Gathered,
                t,
            );
            sync_cube();
            let mut s = scores::<E, A>(
                &q_tile,
                &k_tile,
                plan,
                entry,
                &of_head,
                &bias,
                &table,
                &mut positions,
                &listing,
                &lengths,
                unit_y,
                unit_x,
                t,
            );
            let masked = step < own.masked;
            if masked {
                let bits = mask_bits(plan, &parts, entry, masked, unit_y, unit_x, t);
                mask(&mut s, bits, t);
            }
            #[unroll]
            for i in 0..rows {
                let row = own.rows + unit_y * rows + i;
                let at = weight_place(plan, place0, entry, row, unit_x, Mainloop::Rows, t);
                if at.kept {
                    #[unroll]
                    for j in 0..4usize {
                        weights[at.element + j] = (s[comptime!(4 * i + j)] - m[i]).exp();
                    }
                }
            }
        }
    }
}

/// What the scores of a head are made with.
#[derive(CubeType, Clone, Copy)]
struct HeadScores<A: Float> {
    scale: A,
    softcap: A,
    /// The ALiBi slope.
    slope: A,
    /// Where its bias begins, and the elements between queries.
    bias_start: usize,
    bias_row: usize,
    /// Where its biases of distances begin, and how far they reach.
    table_start: usize,
    reach: usize,
}

/// The unit's scores of a step, masked pairs included.
#[cube]
fn scores<E: Float, A: Float>(
    q: &Shared<[Vector<A, Four>]>,
    k: &Shared<[Vector<A, Four>]>,
    plan: &[u32],
    entry: usize,
    of_head: &HeadScores<A>,
    bias: &ComptimeOption<Box<[E]>>,
    table: &ComptimeOption<Box<[A]>>,
    positions: &mut Positions,
    listing: &Listing,
    lengths: &SeqLengths,
    unit_y: usize,
    unit_x: usize,
    #[comptime] t: Tile,
) -> Array<A> {
    let mut s = product_rows(q, k, unit_y, unit_x, comptime!(t.head_dim), t);
    score(&mut s, of_head.scale, of_head.softcap, t);
    // Behind the product, which has no registers for them.
    set_columns(positions, plan, entry, unit_x, listing, t);
    let mut biases = biases::<E, A>(
        of_head.slope,
        bias,
        of_head.bias_start,
        of_head.bias_row,
        &*positions,
        lengths,
        Mainloop::Rows,
        t,
    );
    if comptime!(t.score.relative) {
        add_distances(
            &mut biases,
            &table.as_ref().unwrap()[..],
            of_head.table_start,
            of_head.reach,
            &*positions,
            lengths,
            Mainloop::Rows,
            t,
        );
    }
    add_biases(&mut s, &biases, t);
    s
}

/// Shared numbers that [`reduce_rows`] needs.
pub fn scratch_len(t: Tile) -> usize {
    match t.planes {
        true => 1,
        false => t.rows * t.units_x,
    }
}

/// Sets the scores of pairs that are not computed to [`LOW`].
#[cube]
fn mask<A: Float>(s: &mut Array<A>, bits: u32, #[comptime] t: Tile) {
    #[unroll]
    for i in 0..comptime!(t.unit_rows * 4) {
        let allowed = (bits >> comptime!(i as u32)) & 1u32 == 1u32;
        s[i] = select(allowed, s[i], A::new(LOW));
    }
}
