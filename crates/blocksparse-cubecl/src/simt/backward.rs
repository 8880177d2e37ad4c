//! The backward kernel: a loop over rows for dQ, over columns for dK and dV.

use cubecl::prelude::*;

use super::dq::*;
use super::dropout::factors;
use super::forward::scratch_len;
use super::gather::*;
use super::mask::*;
use super::product::*;
use super::score::*;
use super::tile::*;
use crate::shared::addressing::*;
use crate::shared::dropout::Mask;
use blocksparse::plan::Mainloop;

/// Lengths of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct MainloopLengths {
    /// Query heads.
    pub heads: usize,
    /// Query heads to a head of keys.
    pub heads_per_kv: usize,
    /// Stored blocks of a batch entry.
    pub weight_blocks: usize,
    /// The vector where dV begins.
    pub second: usize,
    /// The number of the stats where ALiBi's slopes begin.
    pub slopes: usize,
    /// Tiles of a head.
    pub tiles: usize,
}

/// One kernel for both mainloops. `a` are the tile's own rows, `b` the gathered ones:
///
/// ```text
///            a1  a2   b1  b2        s  = scale · a1 · b1ᵀ      p  = exp(s − lse)
/// rows       q   dO   k   v         dp = a2 · b2ᵀ              ds = p ∘ (dp − delta)
/// columns    k   v    q   dO        out1 += ds · b1            out2 += p · b2   (columns only)
/// ```
///
/// In a loop over columns s, p, dp and ds are the transposes. `out1 · scale` is dQ or dK, `out2` is dV.
/// With a softcap `ds` has the factor `1 − (s / softcap)²`, s being softcapped, before biases are added to it. With dropout p in
/// `p · b2`, and dp, have the factors of the forward pass. The stored weights, if there are any, take the place of `exp(s − lse)`.
///
/// Key heads serve `heads_per_kv` query heads: a loop over columns goes through all of them.
///
/// With `t.bias_gradient` the kernel makes the gradient of the bias instead, `ds` without the softcap's factor: a loop over rows adds it
/// pair by pair, a loop over columns, where all queries share a row of the bias, a sum for each key. Batch entries and heads that share
/// a bias are launched one after the other, in a slice each, so that every element has one writer at a time.
///
/// With `t.fused` a loop over columns makes dQ, too. A cube computes the tiles of a group one after the other: see [`rank_of`]. Each group has
/// `sums` of dQ of its own, `[groups, batch, heads, seq_q, fours]`, to which only this cube adds: [`finish`] sums them up.
///
/// `out` holds out1 and from vector `second` on out2, both contiguous; `stats` from number `slopes` on the ALiBi slopes, and further on the
/// biases of `distances`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn backward<E: Float, A: Float, N: Size>(
    a1: &[Vector<E, N>],
    a2: &[Vector<E, N>],
    b1: &[Vector<E, N>],
    b2: &[Vector<E, N>],
    stats: &[A],
    weights: ComptimeOption<Box<[A]>>,
    bias: ComptimeOption<Box<[E]>>,
    bias_grad: ComptimeOption<Box<[A]>>,
    sums: ComptimeOption<Box<[Vector<A, Four>]>>,
    out: &mut [Vector<E, N>],
    plan: &[u32],
    strides: OperandStrides<Strides>,
    bias_strides: BiasStrides,
    distances: Distances,
    schedule: Schedule,
    lengths: MainloopLengths,
    scale: InputScalar,
    softcap: InputScalar,
    dropout: Mask,
    dropout_factor: InputScalar,
    #[comptime] mainloop: Mainloop,
    #[comptime] t: Tile,
    #[define(E)] _element: ElemType,
    #[define(A)] _accumulator: ElemType,
) {
    let parts = schedule.parts;
    let listing = schedule.listing;
    let slice = schedule.slice;
    let a1_strides = strides.a1;
    let a2_strides = strides.a2;
    let b1_strides = strides.b1;
    let b2_strides = strides.b2;
    let heads = lengths.heads;
    let heads_per_kv = lengths.heads_per_kv;
    let second = lengths.second;
    let columns = comptime!(matches!(mainloop, Mainloop::Columns));
    let mut bias_grad = bias_grad;
    let mut dq_sums = sums;
    let width = N::value();
    let rows = comptime!(t.unit_rows);
    let fours1 = comptime!(t.unit_fours(t.head_dim));
    let fours2 = comptime!(t.unit_fours(t.value_dim));
    let unit_x = UNIT_POS_X as usize % comptime!(t.units_x);
    let unit_y = UNIT_POS_X as usize / comptime!(t.units_x);
    let outer = head_of(&slice);
    let batch = batch_of(&slice);
    let scale = scale.get::<A>();
    let softcap = softcap.get::<A>();
    let inverse = A::new(1.0) / softcap;

    let mut a1_tile = Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.rows * pitch(t.head_dim)));
    let mut a2_tile =
        Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.rows * pitch(t.value_dim)));
    let mut b1_tile =
        Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.cols() * pitch(t.head_dim)));
    let mut b2_tile =
        Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.cols() * pitch(t.value_dim)));
    let mut ds_tile = Shared::<[Vector<A, Four>]>::new_slice(comptime!(t.rows * t.weight_pitch()));
    // A fused mainloop has its weights and ds in one tile, one after the other.
    let two = comptime!(columns && !t.fused);
    let p_len = comptime!(if two { t.rows * t.weight_pitch() } else { 1 });
    let mut p_tile = Shared::<[Vector<A, Four>]>::new_slice(p_len);

    // The tile is the same for all heads of the group; a rank is of the first one.
    let mut loops = 1usize;
    let mut first_own = outer;
    let mut a_head = outer;
    if comptime!(columns && t.bias_gradient) {
        a_head = outer / heads_per_kv;
    } else if comptime!(columns) {
        loops = heads_per_kv;
        first_own = outer * heads_per_kv;
    }
    let mut scratch = Shared::<[A]>::new_slice(comptime!(if columns && t.bias_gradient {
        scratch_len(t)
    } else {
        1
    }));
    let mut key_sums = Array::<A>::new(rows);
    #[unroll]
    for i in 0..rows {
        key_sums[i] = A::new(0.0);
    }
    // A fused pass has a cube for a group of tiles, and sums of dQ for each group.
    let slice_rows = slice.batches * heads * b1_strides.len;
    let group_rows = CUBE_POS_X as usize * slice_rows;
    if comptime!(t.fused) {
        let first = group_rows + (batch * heads + first_own) * b1_strides.len;
        clear(&mut dq_sums, first, loops * b1_strides.len, t);
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
            // The tile before reads its keys to the end.
            sync_cube();
        }
        let own = tile_steps(plan, &parts, batch, first_own, rank, t);
        let tile = own.tile;
        load_both::<E, A, N>(
            a1,
            a2,
            &rows_of(&a1_strides, batch, a_head),
            &rows_of(&a2_strides, batch, a_head),
            &listing,
            plan,
            own.rows,
            &mut a1_tile,
            &mut a2_tile,
            comptime!([t.head_dim, t.value_dim]),
            Side::Own,
            t,
        );

        let mut out1 = Array::<Vector<A, Four>>::new(comptime!(rows * fours1));
        #[unroll]
        for i in 0..comptime!(rows * fours1) {
            out1[i] = Vector::<A, Four>::zeroed();
        }
        let mut out2 =
            Array::<Vector<A, Four>>::new(comptime!(if columns { rows * fours2 } else { 1 }));
        if comptime!(columns) {
            #[unroll]
            for i in 0..comptime!(rows * fours2) {
                out2[i] = Vector::<A, Four>::zeroed();
            }
        }
        // lse and delta of the tile's rows, if they are queries.
        let mut row_lse = Array::<A>::new(rows);
        let mut row_delta = Array::<A>::new(rows);
        let own_span = row_span(plan, own.rows, unit_y * rows, &listing, t);
        #[unroll]
        for i in 0..rows {
            row_lse[i] = A::new(0.0);
            row_delta[i] = A::new(0.0);
            if comptime!(!columns) {
                let row = own_span.first + i * own_span.step;
                if row < a1_strides.len {
                    let at = ((batch * heads + outer) * a1_strides.len + row) * 2;
                    row_lse[i] = stats[at];
                    row_delta[i] = stats[at + 1];
                }
            }
        }

        let mut positions = row_positions(plan, own.rows, unit_y, &listing, t);
        let mut queries = a1_strides.len;
        let mut keys = b1_strides.len;
        if comptime!(columns) {
            queries = b1_strides.len;
            keys = a1_strides.len;
        }
        let seq_lengths = SeqLengths { queries, keys };

        for turn in 0..loops {
            let head = first_own + turn;
            let mut alibi_slope = A::new(0.0);
            if comptime!(t.score.alibi) {
                alibi_slope = stats[lengths.slopes + head];
            }
            let bias_start = batch * bias_strides.batch + head * bias_strides.head;
            let mut first_entry = own.entry;
            let mut steps = own.steps;
            let mut masked_steps = own.masked;
            if turn > 0 {
                let first_record = plan[parts.heads + batch * parts.batch + head] as usize;
                let turn_steps = tile_steps_of(plan, &parts, first_record, tile, t);
                first_entry = turn_steps.entry;
                steps = turn_steps.steps;
                masked_steps = turn_steps.masked;
            }
            let mut inner = head;
            if comptime!(!columns) {
                inner = head / heads_per_kv;
            }
            let b1_rows = rows_of(&b1_strides, batch, inner);
            let b2_rows = rows_of(&b2_strides, batch, inner);
            let place0 = batch * lengths.weight_blocks
                + plan[parts.places + batch * parts.batch + head] as usize;

            for step in 0..steps {
                let entry = first_entry + step * comptime!(t.entries() * t.entry_words());
                sync_step(t);
                load_both::<E, A, N>(
                    b1,
                    b2,
                    &b1_rows,
                    &b2_rows,
                    &listing,
                    plan,
                    entry,
                    &mut b1_tile,
                    &mut b2_tile,
                    comptime!([t.head_dim, t.value_dim]),
                    Side::Gathered,
                    t,
                );
                sync_cube();

                let masked = step < masked_steps;
                let bits = mask_bits(plan, &parts, entry, masked, unit_y, unit_x, t);
                let halves = needed(bits, masked, unit_x, t);
                if halves != 0u32 {
                    // lse and delta of the unit's columns, if they are queries.
                    let mut col_lse = Array::<A>::new(4usize);
                    let mut col_delta = Array::<A>::new(4usize);
                    if comptime!(columns) {
                        let span = column_span(plan, entry, unit_x, &listing, t);
                        #[unroll]
                        for j in 0..4usize {
                            col_lse[j] = A::new(0.0);
                            col_delta[j] = A::new(0.0);
                            let query = span.first + j * span.step;
                            if query < b1_strides.len {
                                let at = ((batch * heads + head) * b1_strides.len + query) * 2;
                                col_lse[j] = stats[at];
                                col_delta[j] = stats[at + 1];
                            }
                        }
                    }

                    set_columns(&mut positions, plan, entry, unit_x, &listing, t);
                    let mut biases = biases::<E, A>(
                        alibi_slope,
                        &bias,
                        bias_start,
                        bias_strides.row,
                        &positions,
                        &seq_lengths,
                        mainloop,
                        t,
                    );
                    let start = distances.start + head * distances.head;
                    add_distances(
                        &mut biases,
                        stats,
                        start,
                        distances.reach,
                        &positions,
                        &seq_lengths,
                        mainloop,
                        t,
                    );
                    let mut p = Array::<A>::new(comptime!(rows * 4));
                    let mut slope =
                        Array::<A>::new(comptime!(if t.score.softcap { rows * 4 } else { 1 }));
                    if comptime!(t.store.is_some()) {
                        let weights = weights.as_ref().unwrap();
                        #[unroll]
                        for i in 0..rows {
                            let row = own.rows + unit_y * rows + i;
                            let at = weight_place(plan, place0, entry, row, unit_x, mainloop, t);
                            #[unroll]
                            for j in 0..4usize {
                                let index = comptime!(4 * i + j);
                                p[index] = A::new(0.0);
                                if at.kept {
                                    p[index] = weights[at.element
                                        + comptime!(
                                            j * match mainloop {
                                                Mainloop::Rows => 1,
                                                Mainloop::Columns => t.store.unwrap(),
                                            }
                                        )];
                                }
                                if comptime!(t.score.softcap) {
                                    let log = query_value(&row_lse, &col_lse, i, j, mainloop);
                                    let mut s = p[index].ln() + log;
                                    if comptime!(t.score.biased()) {
                                        s -= biases[index];
                                    }
                                    let capped = s * inverse;
                                    slope[index] = select(
                                        p[index] > A::new(0.0),
                                        A::new(1.0) - capped * capped,
                                        A::new(0.0),
                                    );
                                }
                            }
                        }
                    } else {
                        let mut s = product_rows(
                            &a1_tile,
                            &b1_tile,
                            unit_y,
                            unit_x,
                            comptime!(t.head_dim),
                            t,
                        );
                        score(&mut s, scale, softcap, t);
                        if comptime!(t.score.softcap) {
                            #[unroll]
                            for i in 0..comptime!(rows * 4) {
                                let capped = s[i] * inverse;
                                slope[i] = A::new(1.0) - capped * capped;
                            }
                        }
                        add_biases(&mut s, &biases, t);
                        #[unroll]
                        for i in 0..rows {
                            #[unroll]
                            for j in 0..4usize {
                                let index = comptime!(4 * i + j);
                                p[index] = (s[index]
                                    - query_value(&row_lse, &col_lse, i, j, mainloop))
                                .exp();
                            }
                        }
                        if masked {
                            #[unroll]
                            for i in 0..comptime!(rows * 4) {
                                let allowed = (bits >> comptime!(i as u32)) & 1u32 == 1u32;
                                p[i] = select(allowed, p[i], A::new(0.0));
                            }
                        }
                    }

                    let dp = product_rows(
                        &a2_tile,
                        &b2_tile,
                        unit_y,
                        unit_x,
                        comptime!(t.value_dim),
                        t,
                    );
                    let mut kept =
                        Array::<A>::new(comptime!(if t.score.dropout { rows * 4 } else { 1 }));
                    if comptime!(t.score.dropout) {
                        let factor = dropout_factor.get::<A>();
                        kept = factors::<A>(&dropout, factor, &positions, batch, head, mainloop, t);
                    }
                    let mut ds_rows =
                        Array::<Vector<A, Four>>::new(comptime!(if t.fused { rows } else { 1 }));
                    #[unroll]
                    for i in 0..rows {
                        let at = (unit_y * rows + i) * comptime!(t.weight_pitch()) + unit_x;
                        let mut p_four = Vector::<A, Four>::zeroed();
                        let mut ds_four = Vector::<A, Four>::zeroed();
                        #[unroll]
                        for j in 0..4usize {
                            let index = comptime!(4 * i + j);
                            let delta = query_value(&row_delta, &col_delta, i, j, mainloop);
                            let mut weight = p[index];
                            let mut by_weight = dp[index];
                            if comptime!(t.score.dropout) {
                                weight *= kept[index];
                                by_weight *= kept[index];
                            }
                            let mut ds = p[index] * (by_weight - delta);
                            if comptime!(t.bias_gradient && columns) {
                                key_sums[i] += ds;
                            }
                            if comptime!(t.bias_gradient && !columns) {
                                // Pairs that are not computed have p = 0, and may stand for others.
                                if p[index] > A::new(0.0) {
                                    let pair = pair_at(&positions, i, j, mainloop);
                                    let at = bias_start + pair.query * bias_strides.row + pair.key;
                                    bias_grad.as_mut().unwrap()[at] += ds;
                                }
                            }
                            if comptime!(t.score.softcap) {
                                ds *= slope[index];
                            }
                            p_four.insert(j, weight);
                            ds_four.insert(j, ds);
                        }
                        if comptime!(t.fused) {
                            ds_tile[at] = p_four;
                            ds_rows[i] = ds_four;
                        } else {
                            ds_tile[at] = ds_four;
                        }
                        if comptime!(two) {
                            p_tile[at] = p_four;
                        }
                    }
                    sync_row(t);
                    if comptime!(t.fused) {
                        let dim = comptime!(t.value_dim);
                        accumulate_product(
                            &ds_tile, &b2_tile, &mut out2, unit_y, unit_x, halves, dim, t,
                        );
                        sync_row(t);
                        #[unroll]
                        for i in 0..rows {
                            let row = unit_y * rows + i;
                            ds_tile[row * comptime!(t.weight_pitch()) + unit_x] = ds_rows[i];
                        }
                    } else if comptime!(!t.bias_gradient) {
                        let dim = comptime!(t.head_dim);
                        accumulate_product(
                            &ds_tile, &b1_tile, &mut out1, unit_y, unit_x, halves, dim, t,
                        );
                        if comptime!(two) {
                            let dim = comptime!(t.value_dim);
                            accumulate_product(
                                &p_tile, &b2_tile, &mut out2, unit_y, unit_x, halves, dim, t,
                            );
                        }
                    }
                }
                if comptime!(t.fused) {
                    if halves == 0u32 {
                        clear_rows(&mut ds_tile, unit_y, unit_x, t);
                    }
                    sync_cube();
                    let head_rows = group_rows + (batch * heads + head) * b1_strides.len;
                    let mut dq = read(
                        &dq_sums,
                        head_rows,
                        b1_strides.len,
                        plan,
                        entry,
                        &listing,
                        t,
                    );
                    if halves != 0u32 {
                        let dim = comptime!(t.head_dim);
                        accumulate_product(
                            &ds_tile, &b1_tile, &mut out1, unit_y, unit_x, halves, dim, t,
                        );
                    }
                    add_product(&ds_tile, &a1_tile, &mut dq, t);
                    write(
                        &mut dq_sums,
                        &dq,
                        head_rows,
                        b1_strides.len,
                        plan,
                        entry,
                        &listing,
                        t,
                    );
                }
            }
        }

        if comptime!(t.bias_gradient && columns) {
            reduce_rows(&mut key_sums, &mut scratch, unit_y, unit_x, false, t);
            let start = batch * bias_strides.batch + outer * bias_strides.head;
            #[unroll]
            for i in 0..rows {
                let key = positions.rows[i];
                if unit_x == 0 && key < keys {
                    bias_grad.as_mut().unwrap()[start + key] += key_sums[i];
                }
            }
        }
        if comptime!(!t.bias_gradient) {
            let own_span = row_span(plan, own.rows, unit_y * rows, &listing, t);
            let mut factor = scale;
            if comptime!(t.carry) {
                factor = A::new(1.0);
                #[unroll]
                for i in 0..rows {
                    let row = own_span.first + i * own_span.step;
                    let row = row.min(a1_strides.len - 1);
                    let at = (batch * slice.heads + outer) * a1_strides.len + row;
                    let source = at * comptime!(t.head_dim / width);
                    add_row::<E, A, N>(
                        &out[..],
                        source,
                        &mut out1,
                        scale,
                        unit_x,
                        i,
                        comptime!(t.head_dim),
                        t,
                    );
                    if comptime!(columns) {
                        let source = second + at * comptime!(t.value_dim / width);
                        add_row::<E, A, N>(
                            &out[..],
                            source,
                            &mut out2,
                            factor,
                            unit_x,
                            i,
                            comptime!(t.value_dim),
                            t,
                        );
                    }
                }
            }
            #[unroll]
            for i in 0..rows {
                let row = own_span.first + i * own_span.step;
                if row < a1_strides.len {
                    let at = (batch * slice.heads + outer) * a1_strides.len + row;
                    let target = at * comptime!(t.head_dim / width);
                    store_row::<E, A, N>(
                        out,
                        target,
                        &out1,
                        factor,
                        unit_x,
                        i,
                        comptime!(t.head_dim),
                        t,
                    );
                    if comptime!(columns) {
                        let target = second + at * comptime!(t.value_dim / width);
                        store_row::<E, A, N>(
                            out,
                            target,
                            &out2,
                            A::new(1.0),
                            unit_x,
                            i,
                            comptime!(t.value_dim),
                            t,
                        );
                    }
                }
            }
        }
    }
}

/// The number of row `i` or of column `j`, whichever is the query.
#[cube]
fn query_value<A: Float>(
    rows: &Array<A>,
    cols: &Array<A>,
    #[comptime] i: usize,
    #[comptime] j: usize,
    #[comptime] mainloop: Mainloop,
) -> A {
    if comptime!(matches!(mainloop, Mainloop::Columns)) {
        cols[j]
    } else {
        rows[i]
    }
}
