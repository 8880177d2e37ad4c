//! The SIMT kernel: one cube per share of a page list, with an online softmax over its slots.

// Integers in kernels lack `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use crate::kernels::paged::exchange::{
    across_row, any_differ, collect, deal, of_rows, shuffle_xor,
};
use crate::kernels::paged::join::{Parts, ShareOuts, join_parts, room_for};
use crate::kernels::paged::page_list::{
    CubePages, Found, PageLists, Scales, Sizes, cube_of, page_at, pages_of_cube, query_row,
    share_of, sight_of, stored_page,
};
use crate::kernels::paged::tile::Tile;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::codec::decode_word;
use blocksparse_cubecl::shared::score::{LOW, LOWEST_MAX};

/// Computes attention over a share.
///
/// ```text
/// m = −∞  l = 0  o = 0                         of each group of lanes and row
/// for each step of the share's slots:
///     s  = scale · q · kᵀ                      each lane's part of the sums, then dealt out
///     m' = max(m, max(s))     p = exp(s − m')     a = exp(m − m')
///     l  = a · l + Σ p        o = a · o + p · v
/// o, lse of the groups as one softmax          shuffles within a plane, shared memory between planes
/// ```
///
/// The next step's keys are loaded as soon as those of this one are used, and values likewise, so that loads are always in flight.
///
/// The scales of quantized keys and values multiply scores and weights:
///
/// ```text
/// s_j = σ_j · (q · k̂_j)     o = Σ_j (p_j · σv_j) · v̂_j
/// ```
///
/// `q` `[batch, kv_heads, group_rows, width]`, `keys` `[pages, P, width]`, `values` `[pages, P, value_width]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn attend<E: Float, K: Numeric, A: Float, N: Size, W: Size>(
    q: &[Vector<E, N>],
    keys: &[Vector<K, W>],
    values: &[Vector<K, W>],
    of_scales: ComptimeOption<Scales>,
    lists: PageLists,
    mut shares: ShareOuts<A>,
    scale: InputScalar,
    softcap: InputScalar,
    #[comptime] t: Tile,
    #[define(E, K, A)] _types: [ElemType; 3],
) {
    let lanes = comptime!(t.lanes);
    let rows = comptime!(t.rows);
    let value_vectors = comptime!(t.lane_vectors(t.value_vectors()) * t.parts);
    let unit = UNIT_POS as usize;
    let lane = unit % lanes;
    let in_plane = unit % comptime!(t.plane);
    let group = in_plane / lanes;

    let mut counts = Shared::<[u32]>::new_slice(comptime!(2 * t.units()));
    let mut exchanged = Shared::<[A]>::new_slice(comptime!(t.exchanged()));
    let mut parts = room_for::<A>(t.cube_parts());
    let cube = cube_of(&lists.sizes);
    let list_shape = comptime!(t.page_list_shape());
    let share = share_of(&lists, cube.item, &mut counts, list_shape);
    if share.page_list < lists.sizes.page_lists {
        let pages = pages_of_cube(&lists, &cube, &share, rows, list_shape);
        let scale = Vector::<A, N>::empty().fill(scale.get::<A>());
        let softcap = softcap.get::<A>();
        let queries = load_queries::<E, A, N>(q, scale, &pages, &lists.sizes, lane, t);
        // All scores of a lane belong to one row; their keys begin at `key`.
        let own_score = lane * comptime!(t.lane_scores()) / comptime!(t.copies());
        let key = own_score % comptime!(t.keys);
        let mut position = 0i32;
        if comptime!(t.visibility) {
            let row = query_row(own_score / comptime!(t.keys), &pages, &lists.sizes);
            let first = lists.visibility.as_ref().unwrap().queries[pages.batch];
            position = first + (row % lists.sizes.rows) as i32;
        }
        let own = Own {
            lane,
            group,
            key,
            position,
        };

        let mut m = A::new(LOWEST_MAX);
        let mut l = A::new(0.0);
        let mut o = zeros::<A, N>(comptime!(rows * value_vectors));
        // Registers that no load fills must be finite.
        let mut k = zeros::<K, W>(comptime!(t.keys * t.lane_vectors(t.vectors())));
        let mut v = zeros::<K, W>(comptime!(t.keys * t.lane_vectors(t.value_vectors())));

        let stride = comptime!(t.planes * t.step());
        let at = unit / comptime!(t.plane) * comptime!(t.step());
        let mut step = find(&lists, &pages, at, group, t);
        let [of_keys, of_values] = comptime!([t.vectors(), t.value_vectors()]);
        load::<K, W>(keys, &mut k, &step, &pages, &own, of_keys, t);
        load::<K, W>(values, &mut v, &step, &pages, &own, of_values, t);
        let mut scales = Array::<A>::new(comptime!(t.scales()));
        let mut next_scales = Array::<A>::new(comptime!(t.scales()));
        if comptime!(t.quantization.is_some()) {
            load_scales::<A>(&of_scales, &lists, &mut scales, &step, &pages, &own, t);
        }
        while step.at < pages.slots {
            let next = find(&lists, &pages, step.at + stride, group, t);
            if comptime!(t.quantization.is_some()) {
                load_scales::<A>(&of_scales, &lists, &mut next_scales, &next, &pages, &own, t);
            }
            let mut s = products::<K, A, N, W>(&queries, &k, t);
            load::<K, W>(keys, &mut k, &next, &pages, &own, of_keys, t);
            let mut p = deal::<A>(&mut s, &mut exchanged, t);
            let largest =
                count_scores::<A>(&mut p, &scales, softcap, &lists, &step, &pages, &own, t);
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
                p[i] = (p[i] - m).exp();
                l += p[i];
                if comptime!(t.quantization.is_some()) {
                    p[i] *= scales[comptime!(2 * i + 1)];
                }
            }
            let p = collect::<A>(&p, &mut exchanged, t);
            weigh::<K, A, N, W>(&p, &v, &mut o, t);
            load::<K, W>(values, &mut v, &next, &pages, &own, of_values, t);
            #[unroll]
            for i in 0..comptime!(3 * t.places()) {
                step.places[i] = next.places[i];
            }
            if comptime!(t.quantization.is_some()) {
                #[unroll]
                for i in 0..comptime!(t.scales()) {
                    scales[i] = next_scales[i];
                }
            }
            step.at = next.at;
        }
        // Lanes of a row hold different scores, except for copies.
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
            store_sums::<A, N>(&mut parts, m, l, &o, part, lane, t);
        }
        sync_cube();
        join_parts::<A>(&parts, &mut shares, &share, &lists.sizes, t.cube_parts());
    }
}

/// Position of a lane, and its scores.
#[derive(CubeType, Clone, Copy)]
struct Own {
    lane: usize,
    group: usize,
    /// First key of its scores.
    key: usize,
    /// Position of the query of its scores.
    position: i32,
}

/// Keys that a plane processes at a time.
#[derive(CubeType)]
struct Step {
    /// First slot, within the share.
    at: usize,
    /// Its page; one page per key of a unit if pages are shorter than steps.
    places: Array<u32>,
}

#[cube]
pub fn zeros<T: Numeric, N: Size>(#[comptime] count: usize) -> Array<Vector<T, N>> {
    let mut all = Array::<Vector<T, N>>::new(count);
    #[unroll]
    for i in 0..count {
        all[i] = Vector::<T, N>::zeroed();
    }
    all
}

/// Loads and scales queries. Lanes beyond a row's end get zeros; rows are clamped to the last one.
#[cube]
fn load_queries<E: Float, A: Float, N: Size>(
    q: &[Vector<E, N>],
    scale: Vector<A, N>,
    pages: &CubePages,
    sizes: &Sizes,
    lane: usize,
    #[comptime] t: Tile,
) -> Array<Vector<A, N>> {
    let vectors = comptime!(t.lane_vectors(t.vectors()) * t.parts);
    let mut queries = Array::<Vector<A, N>>::new(comptime!(t.rows * vectors));
    #[unroll]
    for row in 0..comptime!(t.rows) {
        let at = pages.head * sizes.group_rows + query_row(row, pages, sizes);
        #[unroll]
        for i in 0..vectors {
            let load = lane + comptime!(i / t.parts * t.lanes);
            let mut x = Vector::<A, N>::zeroed();
            if load < comptime!(t.vectors()) {
                let vector = load * comptime!(t.parts) + comptime!(i % t.parts);
                let vector = at * comptime!(t.vectors() * t.parts) + vector;
                x = Vector::<A, N>::cast_from(q[vector]) * scale;
            }
            queries[comptime!(row * vectors + i)] = x;
        }
    }
    queries
}

/// Scales, caps and masks the lane's scores. Returns their maximum.
#[cube]
fn count_scores<A: Float>(
    s: &mut Array<A>,
    scales: &Array<A>,
    softcap: A,
    lists: &PageLists,
    step: &Step,
    pages: &CubePages,
    own: &Own,
    #[comptime] t: Tile,
) -> A {
    let mut largest = A::new(LOW);
    #[unroll]
    for i in 0..comptime!(t.lane_scores()) {
        let slot = step.at + (own.key + i) * comptime!(t.groups()) + own.group;
        let place = place_at(lists, pages, step, slot, t);
        let in_page = (slot % comptime!(t.page)) as u32;
        let mut counts = place.id > 0u32 && in_page >= place.from && in_page < place.to;
        if comptime!(t.visibility) {
            let sight = sight_of(&lists.visibility, place.id, in_page, counts, t.page);
            counts = counts && sight.from <= own.position && own.position <= sight.to;
        }
        let mut score = s[i];
        if comptime!(t.quantization.is_some()) {
            score *= scales[comptime!(2 * i)];
        }
        if comptime!(t.softcap) {
            score = softcap * (score / softcap).tanh();
        }
        s[i] = select(counts, score, A::new(LOW));
        largest = largest.max(s[i]);
    }
    largest
}

/// Adds weighted values to the output.
#[cube]
fn weigh<K: Numeric, A: Float, N: Size, W: Size>(
    p: &Array<A>,
    v: &Array<Vector<K, W>>,
    o: &mut Array<Vector<A, N>>,
    #[comptime] t: Tile,
) {
    let loads = comptime!(t.lane_vectors(t.value_vectors()));
    let vectors = comptime!(loads * t.parts);
    #[unroll]
    for key in 0..comptime!(t.keys) {
        #[unroll]
        for i in 0..vectors {
            let x = part_of::<K, A, N, W>(
                v[comptime!(key * loads + i / t.parts)],
                comptime!(i % t.parts),
                t,
            );
            #[unroll]
            for row in 0..comptime!(t.rows) {
                let p = Vector::<A, N>::empty().fill(p[comptime!(row * t.keys + key)]);
                o[comptime!(row * vectors + i)] += p * x;
            }
        }
    }
}

/// Writes the softmax state of a plane, or of a group, as part `part`.
#[cube]
fn store_sums<A: Float, N: Size>(
    parts: &mut Parts<A>,
    m: A,
    l: A,
    o: &Array<Vector<A, N>>,
    part: usize,
    lane: usize,
    #[comptime] t: Tile,
) {
    let rows = comptime!(t.rows);
    let vectors = comptime!(t.lane_vectors(t.value_vectors()) * t.parts);
    if lane % comptime!(t.row_lanes()) == 0 {
        parts.tops[part * rows + lane / comptime!(t.row_lanes())] = m;
        parts.totals[part * rows + lane / comptime!(t.row_lanes())] = l;
    }
    #[unroll]
    for row in 0..rows {
        #[unroll]
        for i in 0..vectors {
            let load = lane + comptime!(i / t.parts * t.lanes);
            if load < comptime!(t.value_vectors()) {
                let vector = load * comptime!(t.parts) + comptime!(i % t.parts);
                let x = o[comptime!(row * vectors + i)];
                let first = (part * rows + row) * comptime!(t.value_width) + vector * N::value();
                #[unroll]
                for c in 0..N::value() {
                    parts.outs[first + c] = x.extract(c);
                }
            }
        }
    }
}

/// Finds the pages of the step at slot `at` of the share.
#[cube]
fn find(
    lists: &PageLists,
    pages: &CubePages,
    at: usize,
    group: usize,
    #[comptime] t: Tile,
) -> Step {
    let mut places = Array::<u32>::new(comptime!(3 * t.places()));
    #[unroll]
    for i in 0..comptime!(t.places()) {
        let mut slot = at;
        if comptime!(t.places() > 1) {
            slot = at + comptime!(i * t.groups()) + group;
        }
        let found = page_at(lists, pages, slot, comptime!(t.page_list_shape()));
        places[comptime!(3 * i)] = found.id;
        places[comptime!(3 * i + 1)] = found.from;
        places[comptime!(3 * i + 2)] = found.to;
    }
    Step { at, places }
}

/// Returns the page of a slot of a step.
#[cube]
fn place_at(
    lists: &PageLists,
    pages: &CubePages,
    step: &Step,
    slot: usize,
    #[comptime] t: Tile,
) -> Found {
    if comptime!(t.places() > 1) {
        page_at(lists, pages, slot, comptime!(t.page_list_shape()))
    } else {
        Found {
            id: step.places[0],
            from: step.places[1],
            to: step.places[2],
        }
    }
}

/// Loads the scales of the keys of a lane's scores, each followed by the scale of its value; 1 if the key does not exist.
#[cube]
fn load_scales<A: Float>(
    of: &ComptimeOption<Scales>,
    lists: &PageLists,
    into: &mut Array<A>,
    step: &Step,
    pages: &CubePages,
    own: &Own,
    #[comptime] t: Tile,
) {
    let of = of.as_ref().unwrap();
    #[unroll]
    for i in 0..comptime!(t.lane_scores()) {
        let slot = step.at + (own.key + i) * comptime!(t.groups()) + own.group;
        let place = place_at(lists, pages, step, slot, t);
        let in_page = (slot % comptime!(t.page)) as u32;
        let exists = place.id > 0u32 && in_page >= place.from && in_page < place.to;
        let mut key = A::new(1.0);
        let mut value = A::new(1.0);
        if exists {
            let at = stored_page(pages, place.id) * comptime!(t.page) + in_page as usize;
            key = A::cast_from(of.keys[at]);
            value = A::cast_from(of.values[at]);
        }
        into[comptime!(2 * i)] = key;
        into[comptime!(2 * i + 1)] = value;
    }
}

/// Converts a load: all its elements, or the four of a word, unscaled.
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

/// Loads the unit's part of the keys of a step, or of their values. Registers of missing keys keep their contents.
#[cube]
fn load<K: Numeric, W: Size>(
    rows: &[Vector<K, W>],
    into: &mut Array<Vector<K, W>>,
    step: &Step,
    pages: &CubePages,
    own: &Own,
    #[comptime] vectors: usize,
    #[comptime] t: Tile,
) {
    let lane_vectors = comptime!(t.lane_vectors(vectors));
    if comptime!(t.places() == 1) {
        // All units of a plane have the same page, so the branch does not diverge.
        if step.places[0] > 0u32 {
            let page = stored_page(pages, step.places[0]) * comptime!(t.page * vectors);
            #[unroll]
            for key in 0..comptime!(t.keys) {
                let slot =
                    (step.at % comptime!(t.page) + comptime!(key * t.groups()) + own.group) as u32;
                // Unused slots load the nearest used one, because their contents might not be finite.
                let slot = min(max(slot, step.places[1]), step.places[2] - 1u32) as usize;
                #[unroll]
                for i in 0..lane_vectors {
                    let vector = lane_vector(own.lane, i, vectors, t);
                    into[comptime!(key * lane_vectors + i)] = rows[page + slot * vectors + vector];
                }
            }
        }
    } else {
        #[unroll]
        for key in 0..comptime!(t.keys) {
            let slot = (step.at + comptime!(key * t.groups()) + own.group) % comptime!(t.page);
            let found = Found {
                id: step.places[comptime!(3 * key)],
                from: step.places[comptime!(3 * key + 1)],
                to: step.places[comptime!(3 * key + 2)],
            };
            if found.id > 0u32 && slot as u32 >= found.from && (slot as u32) < found.to {
                let page = stored_page(pages, found.id);
                #[unroll]
                for i in 0..lane_vectors {
                    let vector = lane_vector(own.lane, i, vectors, t);
                    into[comptime!(key * lane_vectors + i)] =
                        rows[(page * comptime!(t.page) + slot) * vectors + vector];
                }
            }
        }
    }
}

/// Returns the index of the `i`-th vector of a lane, clamped to the row's last one.
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

/// Computes the lane's part of the products of its keys with all queries: element `row · keys + key`.
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
