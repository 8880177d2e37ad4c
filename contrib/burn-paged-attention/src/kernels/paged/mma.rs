//! The rows kernel on tensor cores: nothing but the end goes through shared memory.
//!
//! Both products have keys or numbers of values as rows and queries as columns, of which mma.sync has only eight, so that few queries waste little.
//!
//! ```text
//! sᵀ = K · qᵀ       16 keys × 8 queries, 16 numbers deep
//! oᵀ = Vᵀ · pᵀ      16 numbers of values × 8 queries, 16 keys deep
//! ```
//!
//! Lane `4 g + t` has of a left factor rows `g` and `g + 8`, columns `2t, 2t + 1` and `2t + 8, 2t + 9`, two in a word. The sum does not care which number
//! of a key is which column, so a lane takes 16 bytes of a key at a time as columns of two products, and the queries are taken likewise. For values the rows
//! may be any numbers: a lane takes 16 bytes of four keys, and words of two of them become words of two keys. Scores come out with keys along `g` and queries
//! along `t`, and `pᵀ` is needed the other way round: `movmatrix` transposes it.
//!
//! Quantised numbers become pairs in half precision just before a product, the first and third of a word and the second and fourth: queries are paired likewise.
//! Scores are multiplied by the scales of keys, and weights by those of values.

use cubecl::prelude::*;

use crate::kernels::paged::join::{cube_of, join_parts};
use crate::kernels::paged::last::join_shares;
use crate::kernels::paged::mma_load::{
    key_factor, load_keys, load_scales, load_values, paired, value_factor,
};
use crate::kernels::paged::mma_tile::{KEYS, MmaTile, QUERIES};
use crate::kernels::paged::page_list::{
    CubePages, Found, PageList, Sizes, page_at, share_of, span_of,
};
use blocksparse_cubecl::arch::ptx::{
    above_any, exp2, pack, shuffle_word, shuffle_xor, transpose_eight,
};
use blocksparse_cubecl::arch::sm80::{Element, multiply};
use blocksparse_cubecl::shared::addressing::Four;
use blocksparse_cubecl::shared::score::{LOW, LOWEST_MAX, SLACK};

/// The scale of values that sums are relative to before there are any.
const LEAST_SCALE: f32 = f32::from_bits(27 << 23);

/// How much larger than what sums are relative to a scale of values must be for sums to be rescaled.
const SCALE_SLACK: f32 = 16.0;

/// ln 2.
const LN_2: f32 = core::f32::consts::LN_2;

/// As [`attend`](crate::kernels::paged::attend::attend), with numbers of keys, values and queries eight at a time. Scores are powers of two until the end.
///
/// `factor` is `scale · log₂ e`; with a softcap `scale / softcap`, and `bound` is `softcap · log₂ e`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn attend_mma<V: Size>(
    q: &[Vector<u32, Four>],
    keys: &[Vector<u32, Four>],
    values: &[Vector<u32, V>],
    key_scales: ComptimeOption<Box<[f32]>>,
    value_scales: ComptimeOption<Box<[f32]>>,
    table: &[i32],
    spans: &[i32],
    positions: ComptimeOption<Box<[i32]>>,
    last: ComptimeOption<Box<[i32]>>,
    query_positions: ComptimeOption<Box<[i32]>>,
    selected: ComptimeOption<Box<[i32]>>,
    partial: &mut [f32],
    stats: &mut [f32],
    counters: ComptimeOption<Box<[u32]>>,
    sinks: ComptimeOption<Box<[f32]>>,
    mut out: ComptimeOption<Box<[u32]>>,
    mut lse: ComptimeOption<Box<[f32]>>,
    sizes: Sizes,
    factor: f32,
    bound: f32,
    #[comptime] t: MmaTile,
) {
    let columns = comptime!(t.columns);
    let rows = comptime!(t.rows());
    let key_loads = comptime!(t.key_loads());
    let value_loads = comptime!(t.value_loads());
    let query_loads = comptime!(t.query_loads());
    let tiles = comptime!(t.tiles());
    let is_quantised = comptime!(t.quantization.is_some());
    let unit = UNIT_POS as usize;
    let warp = unit / 32;
    let lane = unit % 32;
    // `g` and `t` above.
    let across = lane / 4;
    let along = lane % 4;

    let mut counts = Shared::<[u32]>::new_slice(comptime!(2 * t.units()));
    let mut outs = Shared::<[f32]>::new_slice(comptime!(t.warps * rows * t.value_width));
    let mut tops = Shared::<[f32]>::new_slice(comptime!(t.warps * rows));
    let mut totals = Shared::<[f32]>::new_slice(comptime!(t.warps * rows));

    let cube = cube_of(&sizes);
    let share = share_of(
        spans,
        cube.item,
        &sizes,
        &mut counts,
        comptime!(t.page_list_shape()),
    );
    if share.page_list < sizes.page_lists {
        let batch = share.page_list / sizes.tables;
        let kv_heads = sizes.tables * sizes.shared_heads;
        let head = batch * kv_heads
            + share.page_list % sizes.tables * sizes.shared_heads
            + cube.shared_head;
        let first_row = cube.block * rows;
        let cube_pages = CubePages {
            page_list: PageList {
                span: span_of(spans, share.page_list, comptime!(t.page_list_shape())),
                table: share.page_list * sizes.entries,
                selected: head * sizes.selected,
            },
            first_page: share.first,
            slots: share.pages * comptime!(t.page),
            shared_head: cube.shared_head,
        };

        // Rows behind the last query are it once more.
        let mut queries = Array::<Vector<u32, Four>>::new(comptime!(columns * query_loads));
        #[unroll]
        for column in 0..columns {
            let row = min(
                first_row + comptime!(column * QUERIES) + across,
                sizes.group_rows - 1,
            );
            let row = (head * sizes.group_rows + row) * comptime!(t.width / 8);
            #[unroll]
            for i in 0..query_loads {
                if is_quantised {
                    // A load of keys is two of queries.
                    let x = q[row + (comptime!(i / 2 * 4) + along) * 2 + comptime!(i % 2)];
                    queries[comptime!(column * query_loads + i)] = paired(x);
                } else {
                    queries[comptime!(column * query_loads + i)] =
                        q[row + comptime!(4 * i) + along];
                }
            }
        }
        // The lane's scores are of two queries of each column.
        let mut query_positions_own = Array::<i32>::new(comptime!(2 * columns));
        if comptime!(t.visibility) {
            let first = query_positions.as_ref().unwrap()[batch];
            #[unroll]
            for i in 0..comptime!(2 * columns) {
                let row = first_row + comptime!(i / 2 * QUERIES + i % 2) + 2 * along;
                let row = min(row, sizes.group_rows - 1);
                query_positions_own[i] = first + (row % sizes.rows) as i32;
            }
        }

        let mut m = Array::<f32>::new(comptime!(2 * columns));
        let mut l = Array::<f32>::new(comptime!(2 * columns));
        #[unroll]
        for i in 0..comptime!(2 * columns) {
            m[i] = LOWEST_MAX.runtime();
            l[i] = 0.0f32.runtime();
        }
        let mut o = Array::<Vector<f32, Four>>::new(comptime!(columns * tiles));
        #[unroll]
        for i in 0..comptime!(columns * tiles) {
            o[i] = Vector::<f32, Four>::zeroed();
        }
        // The scale of values that sums are relative to: weights times scales of values alone may be subnormal in f16.
        let mut unit_scale = comptime!(LEAST_SCALE).runtime();
        // What is not loaded must be finite.
        let mut k = Array::<Vector<u32, Four>>::new(comptime!(2 * key_loads));
        #[unroll]
        for i in 0..comptime!(2 * key_loads) {
            k[i] = Vector::<u32, Four>::zeroed();
        }
        let mut v = Array::<Vector<u32, V>>::new(comptime!(4 * value_loads));
        #[unroll]
        for i in 0..comptime!(4 * value_loads) {
            v[i] = Vector::<u32, V>::zeroed();
        }
        // Of the two keys that the lane's scores are of, and of their values.
        let mut scales = Array::<f32>::new(4usize);
        let mut next_scales = Array::<f32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            scales[i] = 1.0f32.runtime();
            next_scales[i] = 1.0f32.runtime();
        }

        let stride = comptime!(t.warps * KEYS);
        let mut at = warp * KEYS;
        let mut page = Array::<u32>::new(comptime!(t.place_words()));
        let mut next_page = Array::<u32>::new(comptime!(t.place_words()));
        find(table, &selected, &cube_pages, &sizes, &mut page, at, t);
        load_keys(
            keys,
            &mut k,
            &page,
            &cube_pages,
            &sizes,
            at,
            across,
            along,
            t,
        );
        load_values::<V>(
            values,
            &mut v,
            &page,
            &cube_pages,
            &sizes,
            at,
            across,
            along,
            t,
        );
        if is_quantised {
            load_scales(
                &key_scales,
                &value_scales,
                &mut scales,
                &page,
                &cube_pages,
                &sizes,
                at,
                across,
                t,
            );
        }
        find(
            table,
            &selected,
            &cube_pages,
            &sizes,
            &mut next_page,
            at + stride,
            t,
        );
        while at < cube_pages.slots {
            let next = at + stride;
            let mut s = Array::<Vector<f32, Four>>::new(columns);
            #[unroll]
            for column in 0..columns {
                s[column] = Vector::<f32, Four>::zeroed();
            }
            #[unroll]
            for i in 0..key_loads {
                let low = k[i];
                let high = k[comptime!(key_loads + i)];
                // A product takes a word of each key that is quantised, and otherwise two.
                #[unroll]
                for part in 0..comptime!(2 * query_loads / key_loads) {
                    let a = key_factor(low, high, part, t);
                    #[unroll]
                    for column in 0..columns {
                        let b = queries[comptime!(
                            column * query_loads + query_loads / key_loads * i + part / 2
                        )];
                        s[column] = multiply(
                            a,
                            b.extract(comptime!(part % 2 * 2)),
                            b.extract(comptime!(part % 2 * 2 + 1)),
                            s[column],
                            comptime!(Element::Half(t.half)),
                        );
                    }
                }
            }
            if is_quantised {
                load_scales(
                    &key_scales,
                    &value_scales,
                    &mut next_scales,
                    &next_page,
                    &cube_pages,
                    &sizes,
                    next,
                    across,
                    t,
                );
            }
            load_keys(
                keys,
                &mut k,
                &next_page,
                &cube_pages,
                &sizes,
                next,
                across,
                along,
                t,
            );

            // Which of the scores count: element `2 key + query` of a column.
            let mut grows = 0u32;
            #[unroll]
            for key in 0..2usize {
                let in_page = (at % comptime!(t.page) + comptime!(8 * key) + across) as u32;
                let mut exists = page[key] > 0u32;
                if comptime!(!t.apart()) {
                    exists = page[0] > 0u32 && in_page >= page[1] && in_page < page[2];
                }
                let mut from = 0i32;
                let mut to = 0i32;
                if comptime!(t.visibility) {
                    let slot = (max(page[0], 1u32) - 1u32) as usize * comptime!(t.page);
                    let slot = select(exists, slot + in_page as usize, 0usize);
                    from = positions.as_ref().unwrap()[slot];
                    to = last.as_ref().unwrap()[slot];
                }
                if comptime!(t.scales_sums()) {
                    let scale = scales[comptime!(2 + key)];
                    grows |= select(scale > unit_scale * SCALE_SLACK, 1u32, 0u32);
                }
                #[unroll]
                for column in 0..columns {
                    let mut scores = s[column];
                    #[unroll]
                    for query in 0..2usize {
                        let own = comptime!(2 * column + query);
                        let mut counts = exists;
                        if comptime!(t.visibility) {
                            let position = query_positions_own[own];
                            counts = counts && from <= position && position <= to;
                        }
                        let mut score = scores.extract(comptime!(2 * key + query)) * factor;
                        if is_quantised {
                            score *= scales[key];
                        }
                        if comptime!(t.softcap) {
                            score = bound * score.tanh();
                        }
                        score = select(counts, score, LOW);
                        scores.insert(comptime!(2 * key + query), score);
                        grows |= select(score > m[own] + SLACK, 1u32, 0u32);
                    }
                    s[column] = scores;
                }
            }
            // The maximum follows late, so that it rarely has to be found.
            if above_any(grows) != 0u32 {
                let mut unit_shrink = 1.0f32.runtime();
                if comptime!(t.scales_sums()) {
                    let mut largest = unit_scale.max(scales[2].max(scales[3]));
                    #[unroll]
                    for step in 0..5u32 {
                        largest = largest.max(shuffle_xor(largest, comptime!(1u32 << step)));
                    }
                    unit_shrink = unit_scale / largest;
                    unit_scale = largest;
                }
                #[unroll]
                for column in 0..columns {
                    let mut shrinks = Vector::<f32, Four>::zeroed();
                    #[unroll]
                    for query in 0..2usize {
                        let own = comptime!(2 * column + query);
                        let low = s[column].extract(query);
                        let high = s[column].extract(comptime!(2 + query));
                        let mut top = m[own].max(low.max(high));
                        #[unroll]
                        for step in 2..5u32 {
                            top = top.max(shuffle_xor(top, comptime!(1u32 << step)));
                        }
                        let shrink = exp2(m[own] - top);
                        m[own] = top;
                        l[own] *= shrink;
                        let mut of_sums = shrink;
                        if comptime!(t.scales_sums()) {
                            of_sums *= unit_shrink;
                        }
                        shrinks.insert(query, of_sums);
                        shrinks.insert(comptime!(2 + query), of_sums);
                    }
                    #[unroll]
                    for tile in 0..tiles {
                        o[comptime!(column * tiles + tile)] *= shrinks;
                    }
                }
            }
            let mut p = Array::<u32>::new(comptime!(2 * columns));
            let mut factors = Array::<f32>::new(2usize);
            if is_quantised {
                #[unroll]
                for key in 0..2usize {
                    factors[key] = scales[comptime!(2 + key)];
                    if comptime!(t.scales_sums()) {
                        factors[key] /= unit_scale;
                    }
                }
            }
            #[unroll]
            for column in 0..columns {
                #[unroll]
                for key in 0..2usize {
                    let low =
                        exp2(s[column].extract(comptime!(2 * key)) - m[comptime!(2 * column)]);
                    let high = exp2(
                        s[column].extract(comptime!(2 * key + 1)) - m[comptime!(2 * column + 1)],
                    );
                    l[comptime!(2 * column)] += low;
                    l[comptime!(2 * column + 1)] += high;
                    let mut pair = Array::<f32>::new(2usize);
                    pair[0] = low;
                    pair[1] = high;
                    if is_quantised {
                        pair[0] = low * factors[key];
                        pair[1] = high * factors[key];
                    }
                    p[comptime!(2 * column + key)] =
                        transpose_eight(pack(pair[0], pair[1], t.half));
                }
            }
            #[unroll]
            for i in 0..value_loads {
                #[unroll]
                for part in 0..comptime!(tiles / value_loads) {
                    let a = value_factor::<V>(&v, i, part, t);
                    #[unroll]
                    for column in 0..columns {
                        let tile = comptime!(column * tiles + tiles / value_loads * i + part);
                        o[tile] = multiply(
                            a,
                            p[comptime!(2 * column)],
                            p[comptime!(2 * column + 1)],
                            o[tile],
                            comptime!(Element::Half(t.half)),
                        );
                    }
                }
            }
            load_values::<V>(
                values,
                &mut v,
                &next_page,
                &cube_pages,
                &sizes,
                next,
                across,
                along,
                t,
            );
            #[unroll]
            for i in 0..4usize {
                scales[i] = next_scales[i];
            }
            #[unroll]
            for i in 0..comptime!(t.place_words()) {
                page[i] = next_page[i];
            }
            find(
                table,
                &selected,
                &cube_pages,
                &sizes,
                &mut next_page,
                next + stride,
                t,
            );
            at = next;
        }

        #[unroll]
        for column in 0..columns {
            #[unroll]
            for query in 0..2usize {
                let own = comptime!(2 * column + query);
                let mut total = l[own];
                #[unroll]
                for step in 2..5u32 {
                    total += shuffle_xor(total, comptime!(1u32 << step));
                }
                let row = comptime!(column * QUERIES + query) + 2 * along;
                if across == 0 {
                    tops[warp * rows + row] = m[own] * LN_2;
                    totals[warp * rows + row] = total;
                }
                let first = (warp * rows + row) * comptime!(t.value_width);
                #[unroll]
                for tile in 0..tiles {
                    let x = o[comptime!(column * tiles + tile)];
                    // A lane has two numbers of each tile of a load.
                    let of_load = comptime!(tiles / value_loads);
                    let number =
                        comptime!(tile / of_load * t.value_elements() + tile % of_load * 2)
                            + across * comptime!(2 * of_load);
                    let mut low = x.extract(query);
                    let mut high = x.extract(comptime!(2 + query));
                    if comptime!(t.scales_sums()) {
                        low *= unit_scale;
                        high *= unit_scale;
                    }
                    outs[first + number] = low;
                    outs[first + number + 1] = high;
                }
            }
        }
        sync_cube();
        join_parts::<f32>(
            &outs,
            &tops,
            &totals,
            partial,
            stats,
            &share,
            &sizes,
            comptime!([t.warps, rows, t.value_width, t.units()]),
        );
        if comptime!(t.fused) {
            join_shares(
                &*partial,
                &*stats,
                counters.as_ref().unwrap(),
                &sinks,
                &mut out,
                &mut lse,
                &mut counts,
                &share,
                head,
                &sizes,
                t,
            );
        }
    }
}

/// The page of a step, the same for all lanes of a warp; or of pages that are shorter than a step the slots among all of the keys that a lane loads, and 1, or 0
/// of those that do not count: two keys, and four of which it loads the values.
#[cube]
fn find(
    table: &[i32],
    selected: &ComptimeOption<Box<[i32]>>,
    cube_pages: &CubePages,
    sizes: &Sizes,
    page: &mut Array<u32>,
    at: usize,
    #[comptime] t: MmaTile,
) {
    if comptime!(t.apart()) {
        // Each of sixteen lanes looks for one.
        let lane = UNIT_POS % 32;
        let slot = at + (lane % 16) as usize;
        let found: Found = page_at(
            table,
            selected,
            cube_pages,
            sizes,
            slot,
            comptime!(t.page_list_shape()),
        );
        let within = slot % comptime!(t.page);
        let counts = found.id > 0u32 && within as u32 >= found.from && (within as u32) < found.to;
        let id = (max(found.id, 1u32) - 1u32) as usize;
        let id = id * sizes.shared_heads + cube_pages.shared_head;
        let own = select(
            counts,
            (id * comptime!(t.page) + within) as u32 + 1u32,
            0u32,
        );
        let (across, along) = (lane / 4, lane % 4);
        #[unroll]
        for key in 0..2u32 {
            page[comptime!(key as usize)] = shuffle_word(own, across + comptime!(8 * key));
        }
        #[unroll]
        for key in 0..4u32 {
            let from = 2 * along + comptime!(key / 2 * 8 + key % 2);
            page[comptime!(2 + key as usize)] = shuffle_word(own, from);
        }
    } else {
        let found: Found = page_at(
            table,
            selected,
            cube_pages,
            sizes,
            at,
            comptime!(t.page_list_shape()),
        );
        page[0] = found.id;
        page[1] = found.from;
        page[2] = found.to;
    }
}
