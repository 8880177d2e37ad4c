//! The rows kernel: a cube per share of a page list, online softmax over its slots.

// A kernel's integers have no such method.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use crate::kernels::paged::exchange::{across_row, collect, deal, of_rows};
use crate::kernels::paged::join::{cube_of, join_parts};
use crate::kernels::paged::lanes::{any_differ, shuffle_xor};
use crate::kernels::paged::page_list::{
    CubePages, Found, PageList, Sizes, page_at, share_of, span_of,
};
use crate::kernels::paged::tile::Tile;
use blocksparse_cubecl::shared::codec::decode_word;
use blocksparse_cubecl::shared::score::{LOW, LOWEST_MAX};

/// ```text
/// m = −∞  l = 0  o = 0                         of each group of lanes and row
/// for each step of the share's slots:
///     s  = scale · q · kᵀ                      each lane's part of the sums, then dealt out
///     m' = max(m, max(s))     p = exp(s − m')     a = exp(m − m')
///     l  = a · l + Σ p        o = a · o + p · v
/// o, lse of the groups as one softmax          shuffles within a plane, shared memory between planes
/// ```
///
/// Keys of the next step are asked for when those of this one are used up, and values likewise, so that loads are always under way.
///
/// Quantised keys and values are multiplied by their scales once for a score and once for a weight:
///
/// ```text
/// s_j = σ_j · (q · k̂_j)     o = Σ_j (p_j · σv_j) · v̂_j
/// ```
///
/// `q` `[batch, kv_heads, group_rows, width]`, `keys` `[pages, P, width]`, `values` `[pages, P, value_width]`; `partial` `[items, shared_heads, group_rows,
/// value_width]` and `stats` `[items, shared_heads, group_rows]`, behind which come the first share and the number of shares of each page list.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn attend<E: Float, K: Numeric, A: Float, N: Size, W: Size>(
    q: &[Vector<E, N>],
    keys: &[Vector<K, W>],
    values: &[Vector<K, W>],
    key_scales: ComptimeOption<Box<[f32]>>,
    value_scales: ComptimeOption<Box<[f32]>>,
    table: &[i32],
    spans: &[i32],
    positions: ComptimeOption<Box<[i32]>>,
    last: ComptimeOption<Box<[i32]>>,
    query_positions: ComptimeOption<Box<[i32]>>,
    selected: ComptimeOption<Box<[i32]>>,
    partial: &mut [A],
    stats: &mut [A],
    sizes: Sizes,
    scale: InputScalar,
    softcap: InputScalar,
    #[comptime] t: Tile,
    #[define(E)] _element: ElemType,
    #[define(K)] _stored: ElemType,
    #[define(A)] _accumulator: ElemType,
) {
    let lanes = comptime!(t.lanes);
    let rows = comptime!(t.rows);
    let parts = comptime!(t.parts);
    let key_loads = comptime!(t.lane_vectors(t.vectors()));
    let value_loads = comptime!(t.lane_vectors(t.value_vectors()));
    let key_vectors = comptime!(key_loads * parts);
    let value_vectors = comptime!(value_loads * parts);
    let unit = UNIT_POS as usize;
    let lane = unit % lanes;
    let in_plane = unit % comptime!(t.plane);
    let group = in_plane / lanes;

    let mut counts = Shared::<[u32]>::new_slice(comptime!(2 * t.units()));
    let mut exchanged = Shared::<[A]>::new_slice(comptime!(t.exchanged()));
    let mut outs = Shared::<[A]>::new_slice(comptime!(t.parts() * rows * t.value_width));
    let mut tops = Shared::<[A]>::new_slice(comptime!(t.parts() * rows));
    let mut totals = Shared::<[A]>::new_slice(comptime!(t.parts() * rows));

    let cube = cube_of(&sizes);
    let shared_head = cube.shared_head;
    let item = cube.item;
    let share = share_of(
        spans,
        item,
        &sizes,
        &mut counts,
        comptime!(t.page_list_shape()),
    );
    if share.page_list < sizes.page_lists {
        let batch = share.page_list / sizes.tables;
        let kv_heads = sizes.tables * sizes.shared_heads;
        let head =
            batch * kv_heads + share.page_list % sizes.tables * sizes.shared_heads + shared_head;
        let first_row = cube.block * rows;
        let page_list = PageList {
            span: span_of(spans, share.page_list, comptime!(t.page_list_shape())),
            table: share.page_list * sizes.entries,
            selected: head * sizes.selected,
        };

        // Queries, scaled. Lanes behind a row's end have zeros, rows behind the last one are it once more.
        let scale = Vector::<A, N>::empty().fill(scale.get::<A>());
        let softcap = softcap.get::<A>();
        let mut queries = Array::<Vector<A, N>>::new(comptime!(rows * key_vectors));
        #[unroll]
        for row in 0..rows {
            let at = head * sizes.group_rows + min(first_row + row, sizes.group_rows - 1);
            #[unroll]
            for i in 0..key_vectors {
                let load = lane + comptime!(i / parts * lanes);
                let mut x = Vector::<A, N>::zeroed();
                if load < comptime!(t.vectors()) {
                    let vector = load * parts + comptime!(i % parts);
                    let vector = at * comptime!(t.vectors() * parts) + vector;
                    x = Vector::<A, N>::cast_from(q[vector]) * scale;
                }
                queries[comptime!(row * key_vectors + i)] = x;
            }
        }
        // The lane's scores are of one row, of the keys from `own_key` on.
        let own_score = lane * comptime!(t.lane_scores()) / comptime!(t.copies());
        let own_key = own_score % comptime!(t.keys);
        let mut query_position = 0i32;
        if comptime!(t.visibility) {
            let row = min(
                first_row + own_score / comptime!(t.keys),
                sizes.group_rows - 1,
            );
            let first = query_positions.as_ref().unwrap()[batch];
            query_position = first + (row % sizes.rows) as i32;
        }

        let mut m = A::new(LOWEST_MAX);
        let mut l = A::new(0.0);
        let mut o = Array::<Vector<A, N>>::new(comptime!(rows * value_vectors));
        #[unroll]
        for i in 0..comptime!(rows * value_vectors) {
            o[i] = Vector::<A, N>::zeroed();
        }
        let mut k = Array::<Vector<K, W>>::new(comptime!(t.keys * key_loads));
        let mut v = Array::<Vector<K, W>>::new(comptime!(t.keys * value_loads));
        // What is not loaded must be finite.
        #[unroll]
        for i in 0..comptime!(t.keys * key_loads) {
            k[i] = Vector::<K, W>::zeroed();
        }
        #[unroll]
        for i in 0..comptime!(t.keys * value_loads) {
            v[i] = Vector::<K, W>::zeroed();
        }

        let stride = comptime!(t.planes * t.step());
        let slots = share.pages * comptime!(t.page);
        let mut at = unit / comptime!(t.plane) * comptime!(t.step());
        let cube_pages = CubePages {
            page_list,
            first_page: share.first,
            slots,
            shared_head,
        };
        let mut places = Array::<u32>::new(comptime!(3 * t.places()));
        find(
            table,
            &selected,
            &cube_pages,
            &sizes,
            &mut places,
            at,
            group,
            t,
        );
        let of_keys = comptime!(t.vectors());
        let of_values = comptime!(t.value_vectors());
        load::<K, W>(
            keys,
            &mut k,
            &places,
            &cube_pages,
            &sizes,
            at,
            group,
            lane,
            of_keys,
            t,
        );
        load::<K, W>(
            values,
            &mut v,
            &places,
            &cube_pages,
            &sizes,
            at,
            group,
            lane,
            of_values,
            t,
        );
        let mut scales = Array::<A>::new(comptime!(t.scales()));
        let mut next_scales = Array::<A>::new(comptime!(t.scales()));
        if comptime!(t.quantization.is_some()) {
            load_scales::<A>(
                &key_scales,
                &value_scales,
                table,
                &selected,
                &mut scales,
                &places,
                &cube_pages,
                &sizes,
                at,
                group,
                own_key,
                t,
            );
        }
        while at < slots {
            let next = at + stride;
            let mut next_places = Array::<u32>::new(comptime!(3 * t.places()));
            find(
                table,
                &selected,
                &cube_pages,
                &sizes,
                &mut next_places,
                next,
                group,
                t,
            );

            if comptime!(t.quantization.is_some()) {
                load_scales::<A>(
                    &key_scales,
                    &value_scales,
                    table,
                    &selected,
                    &mut next_scales,
                    &next_places,
                    &cube_pages,
                    &sizes,
                    next,
                    group,
                    own_key,
                    t,
                );
            }
            let mut s = products::<K, A, N, W>(&queries, &k, t);
            load::<K, W>(
                keys,
                &mut k,
                &next_places,
                &cube_pages,
                &sizes,
                next,
                group,
                lane,
                of_keys,
                t,
            );
            let mut own = deal::<A>(&mut s, &mut exchanged, t);
            let mut largest = A::new(LOW);
            #[unroll]
            for i in 0..comptime!(t.lane_scores()) {
                let slot = at + (own_key + i) * comptime!(t.groups()) + group;
                let place = place_at(table, &selected, &cube_pages, &sizes, &places, slot, t);
                let in_page = (slot % comptime!(t.page)) as u32;
                let mut counts = place.id > 0u32 && in_page >= place.from && in_page < place.to;
                if comptime!(t.visibility) {
                    // A slot that does not count may have no position.
                    let page = max(place.id, 1u32) - 1u32;
                    let mut slot = page as usize * comptime!(t.page) + in_page as usize;
                    slot = select(counts, slot, 0usize);
                    let from = positions.as_ref().unwrap()[slot];
                    let to = last.as_ref().unwrap()[slot];
                    counts = counts && from <= query_position && query_position <= to;
                }
                let mut score = own[i];
                if comptime!(t.quantization.is_some()) {
                    score *= scales[comptime!(2 * i)];
                }
                if comptime!(t.softcap) {
                    score = softcap * (score / softcap).tanh();
                }
                own[i] = select(counts, score, A::new(LOW));
                largest = largest.max(own[i]);
            }
            let top = m.max(across_row::<A>(largest, &mut exchanged, true, t));
            let mut grows = true;
            if comptime!(t.shuffles) {
                grows = any_differ::<A>(top, m, t);
            }
            if grows {
                let shrink = (m - top).exp();
                m = top;
                l *= shrink;
                let shrinks = of_rows::<A>(shrink, &mut exchanged, t);
                #[unroll]
                for row in 0..rows {
                    let shrink = Vector::<A, N>::empty().fill(shrinks[row]);
                    #[unroll]
                    for i in 0..value_vectors {
                        o[comptime!(row * value_vectors + i)] *= shrink;
                    }
                }
            }
            #[unroll]
            for i in 0..comptime!(t.lane_scores()) {
                own[i] = (own[i] - m).exp();
                l += own[i];
                if comptime!(t.quantization.is_some()) {
                    own[i] *= scales[comptime!(2 * i + 1)];
                }
            }
            let p = collect::<A>(&own, &mut exchanged, t);
            #[unroll]
            for key in 0..comptime!(t.keys) {
                #[unroll]
                for i in 0..value_vectors {
                    let x = part_of::<K, A, N, W>(
                        v[comptime!(key * value_loads + i / parts)],
                        comptime!(i % parts),
                        t,
                    );
                    #[unroll]
                    for row in 0..rows {
                        let p = Vector::<A, N>::empty().fill(p[comptime!(row * t.keys + key)]);
                        o[comptime!(row * value_vectors + i)] += p * x;
                    }
                }
            }
            load::<K, W>(
                values,
                &mut v,
                &next_places,
                &cube_pages,
                &sizes,
                next,
                group,
                lane,
                of_values,
                t,
            );
            #[unroll]
            for i in 0..comptime!(3 * t.places()) {
                places[i] = next_places[i];
            }
            if comptime!(t.quantization.is_some()) {
                #[unroll]
                for i in 0..comptime!(t.scales()) {
                    scales[i] = next_scales[i];
                }
            }
            at = next;
        }
        // The lanes of a row have different scores of it, but for copies.
        l = across_row::<A>(l, &mut exchanged, false, t) / A::new(comptime!(t.copies() as f32));

        let mut part = unit / comptime!(t.plane);
        let mut writes = group == 0;
        if comptime!(t.shuffles) {
            #[unroll]
            for step in 0..comptime!(t.groups().ilog2()) {
                let distance = comptime!((t.lanes << step) as u32);
                let top = m.max(shuffle_xor::<A>(m, distance, t));
                let shrink = (m - top).exp();
                m = top;
                l *= shrink;
                l += shuffle_xor::<A>(l, distance, t);
                let shrinks = of_rows::<A>(shrink, &mut exchanged, t);
                #[unroll]
                for row in 0..rows {
                    #[unroll]
                    for i in 0..value_vectors {
                        let mut x = o[comptime!(row * value_vectors + i)];
                        #[unroll]
                        for c in 0..N::value() {
                            let own = x.extract(c) * shrinks[row];
                            x.insert(c, own + shuffle_xor::<A>(own, distance, t));
                        }
                        o[comptime!(row * value_vectors + i)] = x;
                    }
                }
            }
        } else {
            part = group;
            writes = true.runtime();
        }
        if writes {
            if lane % comptime!(t.row_lanes()) == 0 {
                tops[part * rows + lane / comptime!(t.row_lanes())] = m;
                totals[part * rows + lane / comptime!(t.row_lanes())] = l;
            }
            #[unroll]
            for row in 0..rows {
                #[unroll]
                for i in 0..value_vectors {
                    let load = lane + comptime!(i / parts * lanes);
                    if load < comptime!(t.value_vectors()) {
                        let vector = load * parts + comptime!(i % parts);
                        let x = o[comptime!(row * value_vectors + i)];
                        let first =
                            (part * rows + row) * comptime!(t.value_width) + vector * N::value();
                        #[unroll]
                        for c in 0..N::value() {
                            outs[first + c] = x.extract(c);
                        }
                    }
                }
            }
        }
        sync_cube();
        join_parts::<A>(
            &outs,
            &tops,
            &totals,
            partial,
            stats,
            &share,
            &sizes,
            comptime!([t.parts(), rows, t.value_width, t.units()]),
        );
    }
}

/// The pages of a step from slot `at` of the share on: one, or that of each key where pages are shorter than steps.
#[cube]
fn find(
    table: &[i32],
    selected: &ComptimeOption<Box<[i32]>>,
    cube_pages: &CubePages,
    sizes: &Sizes,
    places: &mut Array<u32>,
    at: usize,
    group: usize,
    #[comptime] t: Tile,
) {
    #[unroll]
    for i in 0..comptime!(t.places()) {
        let mut slot = at;
        if comptime!(t.places() > 1) {
            slot = at + comptime!(i * t.groups()) + group;
        }
        let found = page_at(
            table,
            selected,
            cube_pages,
            sizes,
            slot,
            comptime!(t.page_list_shape()),
        );
        places[comptime!(3 * i)] = found.id;
        places[comptime!(3 * i + 1)] = found.from;
        places[comptime!(3 * i + 2)] = found.to;
    }
}

/// The page of a slot of a step whose pages are `places`.
#[cube]
fn place_at(
    table: &[i32],
    selected: &ComptimeOption<Box<[i32]>>,
    cube_pages: &CubePages,
    sizes: &Sizes,
    places: &Array<u32>,
    slot: usize,
    #[comptime] t: Tile,
) -> Found {
    if comptime!(t.places() > 1) {
        page_at(
            table,
            selected,
            cube_pages,
            sizes,
            slot,
            comptime!(t.page_list_shape()),
        )
    } else {
        Found {
            id: places[0],
            from: places[1],
            to: places[2],
        }
    }
}

/// The scales of the keys of a lane's scores, each followed by that of its value; 1 where there is no key.
#[cube]
fn load_scales<A: Float>(
    key_scales: &ComptimeOption<Box<[f32]>>,
    value_scales: &ComptimeOption<Box<[f32]>>,
    table: &[i32],
    selected: &ComptimeOption<Box<[i32]>>,
    into: &mut Array<A>,
    places: &Array<u32>,
    cube_pages: &CubePages,
    sizes: &Sizes,
    at: usize,
    group: usize,
    own_key: usize,
    #[comptime] t: Tile,
) {
    #[unroll]
    for i in 0..comptime!(t.lane_scores()) {
        let slot = at + (own_key + i) * comptime!(t.groups()) + group;
        let place = place_at(table, selected, cube_pages, sizes, places, slot, t);
        let in_page = (slot % comptime!(t.page)) as u32;
        let exists = place.id > 0u32 && in_page >= place.from && in_page < place.to;
        let mut key = A::new(1.0);
        let mut value = A::new(1.0);
        if exists {
            let page = (place.id - 1u32) as usize * sizes.shared_heads + cube_pages.shared_head;
            let at = page * comptime!(t.page) + in_page as usize;
            key = A::cast_from(key_scales.as_ref().unwrap()[at]);
            value = A::cast_from(value_scales.as_ref().unwrap()[at]);
        }
        into[comptime!(2 * i)] = key;
        into[comptime!(2 * i + 1)] = value;
    }
}

/// The elements of a load: all of them, or the four of a word, without their scale.
#[cube]
fn part_of<K: Numeric, A: Float, N: Size, W: Size>(
    x: Vector<K, W>,
    #[comptime] part: usize,
    #[comptime] t: Tile,
) -> Vector<A, N> {
    if comptime!(t.quantization.is_some()) {
        let word = u32::cast_from(x.extract(part));
        decode_word::<A, N>(word, comptime!(t.quantization.unwrap()))
    } else {
        Vector::<A, N>::cast_from(x)
    }
}

/// The unit's part of the keys of a step, or of their values. What does not exist leaves what was there.
#[cube]
fn load<K: Numeric, W: Size>(
    rows: &[Vector<K, W>],
    into: &mut Array<Vector<K, W>>,
    places: &Array<u32>,
    cube_pages: &CubePages,
    sizes: &Sizes,
    at: usize,
    group: usize,
    lane: usize,
    #[comptime] vectors: usize,
    #[comptime] t: Tile,
) {
    let lane_vectors = comptime!(t.lane_vectors(vectors));
    if comptime!(t.places() == 1) {
        // All units of a plane have the same page, so this is no branch within it.
        if places[0] > 0u32 {
            let page = (places[0] - 1u32) as usize * sizes.shared_heads + cube_pages.shared_head;
            let page = page * comptime!(t.page * vectors);
            #[unroll]
            for key in 0..comptime!(t.keys) {
                let slot = (at % comptime!(t.page) + comptime!(key * t.groups()) + group) as u32;
                // Slots that do not count are the next that does: their numbers must be finite.
                let slot = min(max(slot, places[1]), places[2] - 1u32) as usize;
                #[unroll]
                for i in 0..lane_vectors {
                    let vector = lane_vector(lane, i, vectors, t);
                    into[comptime!(key * lane_vectors + i)] = rows[page + slot * vectors + vector];
                }
            }
        }
    } else {
        #[unroll]
        for key in 0..comptime!(t.keys) {
            let slot = (at + comptime!(key * t.groups()) + group) % comptime!(t.page);
            let found = Found {
                id: places[comptime!(3 * key)],
                from: places[comptime!(3 * key + 1)],
                to: places[comptime!(3 * key + 2)],
            };
            if found.id > 0u32 && slot as u32 >= found.from && (slot as u32) < found.to {
                let page = (found.id - 1u32) as usize * sizes.shared_heads + cube_pages.shared_head;
                #[unroll]
                for i in 0..lane_vectors {
                    let vector = lane_vector(lane, i, vectors, t);
                    into[comptime!(key * lane_vectors + i)] =
                        rows[(page * comptime!(t.page) + slot) * vectors + vector];
                }
            }
        }
    }
}

/// The `i`-th vector of a lane; behind the row's end it is the last one.
#[cube]
fn lane_vector(
    lane: usize,
    #[comptime] i: usize,
    #[comptime] vectors: usize,
    #[comptime] t: Tile,
) -> usize {
    let mut vector = lane + comptime!(i * t.lanes);
    if comptime!((i + 1) * t.lanes > vectors) {
        vector = min(vector, comptime!(vectors - 1));
    }
    vector
}

/// The lane's part of the products of its keys with all queries: element `row · keys + key`.
#[cube]
fn products<K: Numeric, A: Float, N: Size, W: Size>(
    queries: &Array<Vector<A, N>>,
    k: &Array<Vector<K, W>>,
    #[comptime] t: Tile,
) -> Array<A> {
    let loads = comptime!(t.lane_vectors(t.vectors()));
    let lane_vectors = comptime!(loads * t.parts);
    let mut s = Array::<A>::new(comptime!(t.scores()));
    #[unroll]
    for key in 0..comptime!(t.keys) {
        #[unroll]
        for i in 0..lane_vectors {
            let x = part_of::<K, A, N, W>(
                k[comptime!(key * loads + i / t.parts)],
                comptime!(i % t.parts),
                t,
            );
            #[unroll]
            for row in 0..comptime!(t.rows) {
                let q = queries[comptime!(row * lane_vectors + i)];
                let mut sum = A::new(0.0);
                if comptime!(i > 0) {
                    sum = s[comptime!(row * t.keys + key)];
                }
                #[unroll]
                for c in 0..N::value() {
                    sum += q.extract(c) * x.extract(c);
                }
                s[comptime!(row * t.keys + key)] = sum;
            }
        }
    }
    s
}
