//! The kernel on tensor cores: only the final join uses shared memory.
//!
//! In both products the rows are keys or elements of values, and the columns are queries. mma.sync has only eight columns, so few queries waste
//! little.
//!
//! ```text
//! sᵀ = K · qᵀ       16 keys × 8 queries, 16 numbers deep
//! oᵀ = Vᵀ · pᵀ      16 numbers of values × 8 queries, 16 keys deep
//! ```
//!
//! Of a left operand, lane `4 g + t` holds rows `g` and `g + 8`, columns `2t, 2t + 1` and `2t + 8, 2t + 9`, two per register. The sum over a key's
//! elements does not depend on their order, so a lane loads 16 bytes of a key as the columns of two products, and queries are permuted likewise. For
//! values the rows may be any elements: a lane loads 16 bytes of four keys, and merges registers of two keys. Scores come out with keys along `g`
//! and queries along `t`; `movmatrix` transposes them to `pᵀ`.
//!
//! Quantized elements are converted to half-precision pairs just before a product: the first and third of a word, then the second and fourth;
//! queries are paired likewise. Scores are multiplied by the scales of keys, and weights by those of values.

use cubecl::prelude::*;

use crate::kernels::paged::attend::zeros;
use crate::kernels::paged::join::{Joined, Parts, ShareOuts, join_parts, join_shares, room_for};
use crate::kernels::paged::mma_load::{
    Lane, key_factor, load_keys, load_scales, load_values, paired, value_factor,
};
use crate::kernels::paged::mma_tile::{KEYS, MmaTile, QUERIES};
use crate::kernels::paged::page_list::{
    CubePages, Found, PageLists, Scales, Sizes, Visibility, cube_of, page_at, pages_of_cube,
    query_row, share_of, sight_of, stored_page,
};
use blocksparse_cubecl::arch::ptx::{above_any, exp2, pack, shuffle_word, shuffle_xor, transpose};
use blocksparse_cubecl::arch::sm80::{Element, multiply};
use blocksparse_cubecl::shared::addressing::Four;
use blocksparse_cubecl::shared::score::{LOW, LOWEST_MAX, SLACK};

/// Initial reference scale of the sums.
const LEAST_SCALE: f32 = f32::from_bits(27 << 23);

/// Sums are rescaled once a value's scale exceeds the reference scale by this factor.
const SCALE_SLACK: f32 = 16.0;

const LN_2: f32 = core::f32::consts::LN_2;

/// Like [`attend`](crate::kernels::paged::attend::attend), with elements of keys, values and queries in eights. Scores are base-2 logarithms until
/// the end.
///
/// `factor` is `scale · log₂ e`; with a softcap it is `scale / softcap`, and `bound` is `softcap · log₂ e`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn attend_mma<V: Size>(
    q: &[Vector<u32, Four>],
    keys: &[Vector<u32, Four>],
    values: &[Vector<u32, V>],
    of_scales: ComptimeOption<Scales>,
    lists: PageLists,
    mut shares: ShareOuts<f32>,
    joined: ComptimeOption<Joined>,
    factor: f32,
    bound: f32,
    #[comptime] t: MmaTile,
) {
    let columns = comptime!(t.columns);
    let is_quantised = comptime!(t.quantization.is_some());
    let unit = UNIT_POS as usize;
    let warp = unit / 32;
    let lane = unit % 32;
    let lane = Lane {
        warp,
        across: lane / 4,
        along: lane % 4,
    };
    let mut counts = Shared::<[u32]>::new_slice(comptime!(2 * t.units()));
    let mut parts = room_for::<f32>(t.parts());
    let cube = cube_of(&lists.sizes);
    let list_shape = comptime!(t.page_list_shape());
    let share = share_of(&lists, cube.item, &mut counts, list_shape);
    if share.page_list < lists.sizes.page_lists {
        let pages = pages_of_cube(&lists, &cube, &share, t.rows(), list_shape);
        let queries = load_queries(q, &pages, &lists.sizes, &lane, t);
        let positions = positions_of(&lists, &pages, &lane, t);
        let mut m = Array::<f32>::new(comptime!(2 * columns));
        let mut l = Array::<f32>::new(comptime!(2 * columns));
        #[unroll]
        for i in 0..comptime!(2 * columns) {
            m[i] = LOWEST_MAX.runtime();
            l[i] = 0.0f32.runtime();
        }
        let mut o = zeros::<f32, Four>(comptime!(columns * t.tiles()));
        // Reference scale of the sums: a weight times a value's scale alone may be subnormal in f16.
        let mut unit_scale = comptime!(LEAST_SCALE).runtime();
        // Registers that no load fills must be finite.
        let mut k = zeros::<u32, Four>(comptime!(2 * t.key_loads()));
        let mut v = zeros::<u32, V>(comptime!(4 * t.value_loads()));
        // Scales of the two keys of the lane's scores, then of their values.
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
        find(&lists, &pages, &mut page, at, t);
        load_keys(keys, &mut k, &page, &pages, at, &lane, t);
        load_values::<V>(values, &mut v, &page, &pages, at, &lane, t);
        if is_quantised {
            load_scales(&of_scales, &mut scales, &page, &pages, at, &lane, t);
        }
        find(&lists, &pages, &mut next_page, at + stride, t);
        while at < pages.slots {
            let next = at + stride;
            let mut s = scores_of(&queries, &k, t);
            if is_quantised {
                let into = &mut next_scales;
                load_scales(&of_scales, into, &next_page, &pages, next, &lane, t);
            }
            load_keys(keys, &mut k, &next_page, &pages, next, &lane, t);
            let grows = count_scores(
                &mut s,
                &m,
                &scales,
                unit_scale,
                &page,
                at,
                &lists.visibility,
                &positions,
                &lane,
                factor,
                bound,
                t,
            );
            // The maximum is raised lazily, only once scores exceed it by more than the slack.
            if above_any(grows) != 0u32 {
                let mut unit_shrink = 1.0f32.runtime();
                if comptime!(t.scales_sums()) {
                    let largest = largest_scale(&scales, unit_scale);
                    unit_shrink = unit_scale / largest;
                    unit_scale = largest;
                }
                raise(&mut m, &mut l, &mut o, &s, unit_shrink, t);
            }
            let p = weights(&s, &m, &mut l, &scales, unit_scale, t);
            weigh::<V>(&p, &v, &mut o, t);
            load_values::<V>(values, &mut v, &next_page, &pages, next, &lane, t);
            #[unroll]
            for i in 0..4usize {
                scales[i] = next_scales[i];
            }
            #[unroll]
            for i in 0..comptime!(t.place_words()) {
                page[i] = next_page[i];
            }
            find(&lists, &pages, &mut next_page, next + stride, t);
            at = next;
        }
        store_sums(&mut parts, &m, &l, &o, unit_scale, &lane, t);
        sync_cube();
        join_parts::<f32>(&parts, &mut shares, &share, &lists.sizes, t.parts());
        #[comptime]
        match joined {
            ComptimeOption::Some(mut joined) => join_shares(
                &shares,
                &mut joined,
                &mut counts,
                &share,
                pages.head,
                &lists.sizes,
                t,
            ),
            ComptimeOption::None => {}
        }
    }
}

/// Loads the lane's words of queries, one query per column; columns are clamped to the last query.
#[cube]
fn load_queries(
    q: &[Vector<u32, Four>],
    pages: &CubePages,
    sizes: &Sizes,
    lane: &Lane,
    #[comptime] t: MmaTile,
) -> Array<Vector<u32, Four>> {
    let loads = comptime!(t.query_loads());
    let mut queries = Array::<Vector<u32, Four>>::new(comptime!(t.columns * loads));
    #[unroll]
    for column in 0..comptime!(t.columns) {
        let row = query_row(comptime!(column * QUERIES) + lane.across, pages, sizes);
        let row = (pages.head * sizes.group_rows + row) * comptime!(t.width / 8);
        #[unroll]
        for i in 0..loads {
            if comptime!(t.quantization.is_some()) {
                // A load of quantized keys matches two of queries.
                let x = q[row + (comptime!(i / 2 * 4) + lane.along) * 2 + comptime!(i % 2)];
                queries[comptime!(column * loads + i)] = paired(x);
            } else {
                queries[comptime!(column * loads + i)] = q[row + comptime!(4 * i) + lane.along];
            }
        }
    }
    queries
}

/// Returns the positions of the queries of the lane's scores: two per column.
#[cube]
fn positions_of(
    lists: &PageLists,
    pages: &CubePages,
    lane: &Lane,
    #[comptime] t: MmaTile,
) -> Array<i32> {
    let mut positions = Array::<i32>::new(comptime!(2 * t.columns));
    if comptime!(t.visibility) {
        let first = lists.visibility.as_ref().unwrap().queries[pages.batch];
        #[unroll]
        for i in 0..comptime!(2 * t.columns) {
            let row = comptime!(i / 2 * QUERIES + i % 2) + 2 * lane.along;
            let row = query_row(row, pages, &lists.sizes);
            positions[i] = first + (row % lists.sizes.rows) as i32;
        }
    }
    positions
}

/// Multiplies the lane's keys with the queries of each column: element `2 key + query`.
#[cube]
fn scores_of(
    queries: &Array<Vector<u32, Four>>,
    k: &Array<Vector<u32, Four>>,
    #[comptime] t: MmaTile,
) -> Array<Vector<f32, Four>> {
    let (loads, query_loads) = comptime!((t.key_loads(), t.query_loads()));
    let mut s = zeros::<f32, Four>(t.columns);
    #[unroll]
    for i in 0..loads {
        let low = k[i];
        let high = k[comptime!(loads + i)];
        // A product takes one word of each key if quantized, otherwise two.
        #[unroll]
        for part in 0..comptime!(2 * query_loads / loads) {
            let a = key_factor(low, high, part, t);
            #[unroll]
            for column in 0..comptime!(t.columns) {
                let b =
                    queries[comptime!(column * query_loads + query_loads / loads * i + part / 2)];
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
    s
}

/// Scales, caps and masks the scores. Returns nonzero if the maximum or the reference scale has to be raised.
#[cube]
fn count_scores(
    s: &mut Array<Vector<f32, Four>>,
    m: &Array<f32>,
    scales: &Array<f32>,
    unit_scale: f32,
    page: &Array<u32>,
    at: usize,
    visibility: &ComptimeOption<Visibility>,
    positions: &Array<i32>,
    lane: &Lane,
    factor: f32,
    bound: f32,
    #[comptime] t: MmaTile,
) -> u32 {
    let mut grows = 0u32;
    #[unroll]
    for key in 0..2usize {
        let in_page = (at % comptime!(t.page) + comptime!(8 * key) + lane.across) as u32;
        let mut exists = page[key] > 0u32;
        if comptime!(!t.apart()) {
            exists = page[0] > 0u32 && in_page >= page[1] && in_page < page[2];
        }
        let mut from = 0i32;
        let mut to = 0i32;
        if comptime!(t.visibility) {
            let sight = sight_of(visibility, page[0], in_page, exists, t.page);
            from = sight.from;
            to = sight.to;
        }
        if comptime!(t.scales_sums()) {
            let scale = scales[comptime!(2 + key)];
            grows |= select(scale > unit_scale * SCALE_SLACK, 1u32, 0u32);
        }
        #[unroll]
        for column in 0..comptime!(t.columns) {
            let mut scores = s[column];
            #[unroll]
            for query in 0..2usize {
                let own = comptime!(2 * column + query);
                let mut counts = exists;
                if comptime!(t.visibility) {
                    let position = positions[own];
                    counts = counts && from <= position && position <= to;
                }
                let mut score = scores.extract(comptime!(2 * key + query)) * factor;
                if comptime!(t.quantization.is_some()) {
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
    grows
}

/// Returns the largest scale of values that the warp has met.
#[cube]
fn largest_scale(scales: &Array<f32>, unit_scale: f32) -> f32 {
    let mut largest = unit_scale.max(scales[2].max(scales[3]));
    #[unroll]
    for step in 0..5u32 {
        largest = largest.max(shuffle_xor(largest, comptime!(1u32 << step)));
    }
    largest
}

/// Raises the maxima to those of the scores, and rescales the sums to them and to a larger reference scale.
#[cube]
fn raise(
    m: &mut Array<f32>,
    l: &mut Array<f32>,
    o: &mut Array<Vector<f32, Four>>,
    s: &Array<Vector<f32, Four>>,
    unit_shrink: f32,
    #[comptime] t: MmaTile,
) {
    #[unroll]
    for column in 0..comptime!(t.columns) {
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
        for tile in 0..comptime!(t.tiles()) {
            o[comptime!(column * t.tiles() + tile)] *= shrinks;
        }
    }
}

/// Computes the weights of scores, adds them to the sums, and returns them as right operands of the products with values.
#[cube]
fn weights(
    s: &Array<Vector<f32, Four>>,
    m: &Array<f32>,
    l: &mut Array<f32>,
    scales: &Array<f32>,
    unit_scale: f32,
    #[comptime] t: MmaTile,
) -> Array<u32> {
    let is_quantised = comptime!(t.quantization.is_some());
    let mut p = Array::<u32>::new(comptime!(2 * t.columns));
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
    for column in 0..comptime!(t.columns) {
        #[unroll]
        for key in 0..2usize {
            let low = exp2(s[column].extract(comptime!(2 * key)) - m[comptime!(2 * column)]);
            let high =
                exp2(s[column].extract(comptime!(2 * key + 1)) - m[comptime!(2 * column + 1)]);
            l[comptime!(2 * column)] += low;
            l[comptime!(2 * column + 1)] += high;
            let mut pair = Array::<f32>::new(2usize);
            pair[0] = low;
            pair[1] = high;
            if is_quantised {
                pair[0] = low * factors[key];
                pair[1] = high * factors[key];
            }
            p[comptime!(2 * column + key)] = transpose(pack(pair[0], pair[1], t.half));
        }
    }
    p
}

/// Adds weighted values to the output.
#[cube]
fn weigh<V: Size>(
    p: &Array<u32>,
    v: &Array<Vector<u32, V>>,
    o: &mut Array<Vector<f32, Four>>,
    #[comptime] t: MmaTile,
) {
    let (loads, tiles) = comptime!((t.value_loads(), t.tiles()));
    #[unroll]
    for i in 0..loads {
        #[unroll]
        for part in 0..comptime!(tiles / loads) {
            let a = value_factor::<V>(v, i, part, t);
            #[unroll]
            for column in 0..comptime!(t.columns) {
                let tile = comptime!(column * tiles + tiles / loads * i + part);
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
}

/// Writes the warp's softmax state of each query.
#[cube]
fn store_sums(
    parts: &mut Parts<f32>,
    m: &Array<f32>,
    l: &Array<f32>,
    o: &Array<Vector<f32, Four>>,
    unit_scale: f32,
    lane: &Lane,
    #[comptime] t: MmaTile,
) {
    let rows = comptime!(t.rows());
    #[unroll]
    for column in 0..comptime!(t.columns) {
        #[unroll]
        for query in 0..2usize {
            let own = comptime!(2 * column + query);
            let mut total = l[own];
            #[unroll]
            for step in 2..5u32 {
                total += shuffle_xor(total, comptime!(1u32 << step));
            }
            let row = comptime!(column * QUERIES + query) + 2 * lane.along;
            if lane.across == 0 {
                parts.tops[lane.warp * rows + row] = m[own] * LN_2;
                parts.totals[lane.warp * rows + row] = total;
            }
            let first = (lane.warp * rows + row) * comptime!(t.value_width);
            #[unroll]
            for tile in 0..comptime!(t.tiles()) {
                let x = o[comptime!(column * t.tiles() + tile)];
                // A lane has two adjacent elements of each tile of a load.
                let of_load = comptime!(t.tiles() / t.value_loads());
                let number = comptime!(tile / of_load * t.value_elements() + tile % of_load * 2)
                    + lane.across * comptime!(2 * of_load);
                let mut low = x.extract(query);
                let mut high = x.extract(comptime!(2 + query));
                if comptime!(t.scales_sums()) {
                    low *= unit_scale;
                    high *= unit_scale;
                }
                parts.outs[first + number] = low;
                parts.outs[first + number + 1] = high;
            }
        }
    }
}

/// Finds the page of a step, the same for all lanes of a warp. If pages are shorter than a step, finds instead, for each key that a lane loads, its
/// slot among those of all pages plus 1, or 0 if unused: two for keys, then four for values.
#[cube]
fn find(
    lists: &PageLists,
    pages: &CubePages,
    page: &mut Array<u32>,
    at: usize,
    #[comptime] t: MmaTile,
) {
    if comptime!(t.apart()) {
        // Each of sixteen lanes finds one.
        let lane = UNIT_POS % 32;
        let slot = at + (lane % 16) as usize;
        let found: Found = page_at(lists, pages, slot, comptime!(t.page_list_shape()));
        let within = slot % comptime!(t.page);
        let counts = found.id > 0u32 && within as u32 >= found.from && (within as u32) < found.to;
        let id = stored_page(pages, max(found.id, 1u32));
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
        let found: Found = page_at(lists, pages, at, comptime!(t.page_list_shape()));
        page[0] = found.id;
        page[1] = found.from;
        page[2] = found.to;
    }
}
