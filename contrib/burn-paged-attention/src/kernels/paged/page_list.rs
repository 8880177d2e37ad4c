//! Slots that a cube reads: its share of a page list, and the pages of the share.

// Kernels have no iterators over shared memory.
#![allow(clippy::needless_range_loop)]

use cubecl::prelude::*;

/// Comptime properties of page lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageListShape {
    /// Units of a cube.
    pub units: usize,
    /// Slots of a page, a power of two.
    pub page: usize,
    /// Whether table entries are selected.
    pub selected: bool,
}

/// Runtime sizes of a call.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Sizes {
    /// Table rows of all sequences.
    pub page_lists: usize,
    /// Table rows of a sequence.
    pub tables: usize,
    /// KV heads that share a table row.
    pub shared_heads: usize,
    /// Entries of a table row.
    pub entries: usize,
    /// Number of selected entries.
    pub selected: usize,
    /// Pages of the pool.
    pub pages: usize,
    /// Queries of a KV head.
    pub group_rows: usize,
    /// Queries of a head.
    pub rows: usize,
    /// Cubes that split the queries of a KV head.
    pub row_blocks: usize,
    /// Number of shares besides one per page list; the most in total if `wave` is set.
    pub work: usize,
    /// Shares that the device computes at a time, if cubes choose the length of shares. Otherwise 0.
    pub wave: usize,
    /// Pages of a share; 0: derived from `work`.
    pub split: usize,
    /// Offset of the shares of page lists in the statistics, after every lse.
    pub info: usize,
}

/// Page lists of a call.
#[derive(CubeType, CubeLaunch)]
pub struct PageLists {
    /// `[batch, tables, entries]`
    pub table: Box<[i32]>,
    /// `[batch, tables, 4]`
    pub spans: Box<[i32]>,
    pub visibility: ComptimeOption<Visibility>,
    /// `[batch, kv_heads, selected]`
    pub selected: ComptimeOption<Box<[i32]>>,
    pub sizes: Sizes,
}

/// Positions of slots and of the last queries that see them, `[pages of the table, page]`, and of the first query of each sequence.
#[derive(CubeType, CubeLaunch)]
pub struct Visibility {
    pub positions: Box<[i32]>,
    pub last: Box<[i32]>,
    pub queries: Box<[i32]>,
}

/// Scales of keys and values, `[pages, page]`, f32.
#[derive(CubeType, CubeLaunch)]
pub struct Scales {
    pub keys: Box<[f32]>,
    pub values: Box<[f32]>,
}

/// Coordinates of a cube.
#[derive(CubeType, Clone, Copy)]
pub struct Cube {
    /// Index of the share.
    pub item: usize,
    /// Head among those that share a table entry.
    pub shared_head: usize,
    /// Block of queries.
    pub block: usize,
}

/// Returns the coordinates of this cube. Queries are innermost, then heads, so that adjacent cubes read the same pages.
#[cube]
pub fn cube_of(sizes: &Sizes) -> Cube {
    Cube {
        item: CUBE_POS / sizes.row_blocks / sizes.shared_heads,
        shared_head: CUBE_POS / sizes.row_blocks % sizes.shared_heads,
        block: CUBE_POS % sizes.row_blocks,
    }
}

/// A share of a page list: pages `first .. first + pages`.
#[derive(CubeType, Clone, Copy)]
pub struct Share {
    /// Table row; the number of all rows if the cube has no share.
    pub page_list: usize,
    pub first: usize,
    pub pages: usize,
    /// Index of the page list's first share.
    pub first_item: usize,
    /// Number of shares of the page list.
    pub items: usize,
}

/// Counts the pages of a page list.
#[cube]
fn pages_of(spans: &[i32], page_list: usize, sizes: &Sizes, #[comptime] t: PageListShape) -> usize {
    let mut pages = sizes.selected;
    if comptime!(!t.selected) {
        let span = span_of(spans, page_list, t);
        let timed = (span.end + comptime!(t.page - 1)) / comptime!(t.page) - span.first_page;
        pages = span.permanent_pages + select(span.end > span.start, timed, 0usize);
        // Slots beyond the table have no pages.
        pages = min(pages, sizes.entries);
    }
    pages
}

/// Number of share lengths that cubes choose from.
pub const CANDIDATES: usize = 32;
/// Number of slots that take as long as the beginning and end of a share.
const SHARE_SLOTS: usize = 96;

/// Returns the number of units that evaluate one candidate each.
fn candidates(t: &PageListShape) -> usize {
    CANDIDATES.min(t.units)
}

/// Chooses the pages of a share so that waves of shares are full: the candidate number of shares, up to `work`, that takes the least time. There are
/// no more page lists than units; `own` is the number of pages of the unit's list.
///
/// ```text
/// length = max(⌈Σ pages / (work · (c + 1) / candidates)⌉, least)        c = 0 .. candidates
/// time = ⌈Σ ⌈pages / length⌉ / wave⌉ · (slots of length + SHARE_SLOTS)
/// ```
#[cube]
fn chosen_length(
    total: usize,
    own: usize,
    sizes: &Sizes,
    shared: &mut [u32],
    #[comptime] t: PageListShape,
) -> usize {
    let units = comptime!(t.units);
    let candidates = comptime!(candidates(&t));
    let parts = comptime!(t.units / candidates);
    let unit = UNIT_POS as usize;
    let length = candidate_length(total, unit % candidates, sizes, t);
    shared[unit] = own as u32;
    sync_cube();
    // Several units count each candidate's shares.
    let mut items = 0usize;
    let mut page_list = unit / candidates;
    if page_list < parts {
        while page_list < sizes.page_lists {
            items += max((shared[page_list] as usize).div_ceil(length), 1usize);
            page_list += parts;
        }
    }
    shared[units + unit] = items as u32;
    sync_cube();
    if unit < candidates {
        let mut items = 0usize;
        #[unroll]
        for part in 0..parts {
            items += shared[units + part * candidates + unit] as usize;
        }
        let waves = items.div_ceil(sizes.wave);
        let slots = length * comptime!(t.page) + comptime!(SHARE_SLOTS);
        let time = select(
            items <= sizes.work,
            waves as f32 * slots as f32,
            f32::new(f32::MAX),
        );
        // Positive floats are ordered like their bits.
        shared[unit] = u32::reinterpret(time);
    }
    sync_cube();
    let mut best = 0usize;
    let mut least_time = shared[0];
    for candidate in 1..candidates {
        if shared[candidate] < least_time {
            least_time = shared[candidate];
            best = candidate;
        }
    }
    sync_cube();
    candidate_length(total, best, sizes, t)
}

#[cube]
fn candidate_length(
    total: usize,
    candidate: usize,
    sizes: &Sizes,
    #[comptime] t: PageListShape,
) -> usize {
    let candidates = comptime!(candidates(&t));
    let length = (total * candidates).div_ceil(sizes.work * (candidate + 1));
    max(length, comptime!(least_pages(t.page)))
}

/// Finds share `item` of all page lists, in order. All units of the cube must call it; `shared` has two elements per unit.
///
/// ```text
/// most = max(⌈Σ pages / work⌉, least)        pages of a share, or [`chosen_length`]; `split`, if it is given
/// items = max(⌈pages / most⌉, 1)             shares of a page list, all of them as long:  Σ items ≤ page_lists + work
/// ```
#[cube]
pub fn share_of(
    lists: &PageLists,
    item: usize,
    shared: &mut [u32],
    #[comptime] t: PageListShape,
) -> Share {
    let spans = &lists.spans;
    let sizes = &lists.sizes;
    let units = comptime!(t.units);
    let unit = UNIT_POS as usize;
    let rounds = sizes.page_lists.div_ceil(units);
    let least = comptime!(least_pages(t.page));
    let mut most = sizes.split;
    let mut own = 0usize;
    if sizes.split == 0 {
        let mut total = 0usize;
        // Round 0 comes last, so that `own` ends as the length of the unit's own list.
        for round in 0..rounds {
            let start = (rounds - 1 - round) * units;
            own = 0usize;
            if start + unit < sizes.page_lists {
                own = pages_of(spans, start + unit, sizes, t);
            }
            shared[unit] = own as u32;
            sync_cube();
            for other in 0..min(units, sizes.page_lists - start) {
                total += shared[other] as usize;
            }
            sync_cube();
        }
        most = max(total.div_ceil(sizes.work), least);
        if sizes.wave > 0 {
            most = chosen_length(total, own, sizes, shared, t);
        }
    } else {
        if unit < sizes.page_lists {
            own = pages_of(spans, unit, sizes, t);
        }
    }
    let mut share = Share {
        page_list: sizes.page_lists,
        first: 0usize,
        pages: 0usize,
        first_item: 0usize,
        items: 0usize,
    };
    let mut before = 0usize;
    for round in 0..rounds {
        let start = round * units;
        if round > 0 {
            own = 0usize;
            if start + unit < sizes.page_lists {
                own = pages_of(spans, start + unit, sizes, t);
            }
        }
        shared[unit] = own as u32;
        shared[units + unit] = max(own.div_ceil(most), 1usize) as u32;
        sync_cube();
        for other in 0..min(units, sizes.page_lists - start) {
            let items = shared[units + other] as usize;
            if item >= before && item < before + items {
                share.page_list = start + other;
                share.pages = shared[other] as usize;
                share.first_item = before;
                share.items = items;
            }
            before += items;
        }
        sync_cube();
    }
    if share.items > 0 {
        // Equally long, in whole steps of a cube.
        let mut length = share.pages.div_ceil(share.items);
        if sizes.split > 0 {
            length = sizes.split;
        } else {
            length = length.div_ceil(least) * least;
        }
        share.first = min((item - share.first_item) * length, share.pages);
        share.pages = min(length, share.pages - share.first);
    }
    share
}

/// Returns the least number of pages of a share: 64 slots.
pub fn least_pages(page: usize) -> usize {
    (64 / page).max(1)
}

/// Regions of a page list.
#[derive(CubeType, Clone, Copy)]
pub struct Span {
    pub permanent: usize,
    pub permanent_pages: usize,
    /// Entry of the first page of region two.
    pub entry: usize,
    /// First slot of region two.
    pub start: usize,
    /// End of the slots of region two.
    pub end: usize,
    /// First page of region two with a used slot.
    pub first_page: usize,
}

#[cube]
pub fn span_of(spans: &[i32], page_list: usize, #[comptime] t: PageListShape) -> Span {
    let permanent = max(spans[page_list * 4], 0i32) as usize;
    let entry = max(spans[page_list * 4 + 1], 0i32) as usize;
    let start = max(spans[page_list * 4 + 2], 0i32) as usize;
    let timed = max(spans[page_list * 4 + 3], 0i32) as usize;
    Span {
        permanent,
        permanent_pages: (permanent + comptime!(t.page - 1)) / comptime!(t.page),
        entry,
        start,
        end: start + timed,
        first_page: start / comptime!(t.page),
    }
}

/// A page of a page list, with its used slots `from .. to`.
#[derive(CubeType, Clone, Copy)]
pub struct Place {
    /// Whether the page exists and has used slots.
    pub exists: bool,
    /// Its index in the pool's table space.
    pub id: usize,
    /// First slot.
    pub from: usize,
    /// End of the slots.
    pub to: usize,
}

/// Location of a page list.
#[derive(CubeType, Clone, Copy)]
pub struct PageList {
    pub span: Span,
    /// Offset of its first entry in the table.
    pub table: usize,
    /// Offset of its first selected entry.
    pub selected: usize,
}

/// Returns page `page` of a page list.
#[cube]
pub fn place_of(
    lists: &PageLists,
    page_list: &PageList,
    page: usize,
    #[comptime] t: PageListShape,
) -> Place {
    let sizes = &lists.sizes;
    let span = &page_list.span;
    let mut entry = page;
    let mut exists = true;
    if comptime!(t.selected) {
        let listed = lists.selected.as_ref().unwrap()[page_list.selected + page];
        exists = listed >= 0i32;
        entry = max(listed, 0i32) as usize;
    } else if page >= span.permanent_pages {
        entry = span.entry + span.first_page + (page - span.permanent_pages);
    }
    let mut first = entry * comptime!(t.page);
    let mut from = 0usize;
    let mut to = span.permanent;
    if entry >= span.permanent_pages {
        exists = exists && entry >= span.entry;
        // The bound avoids wrapping before region two; `exists` is false there.
        first = (max(entry, span.entry) - span.entry) * comptime!(t.page);
        from = max(span.start, first) - first;
        to = span.end;
    }
    to = min(max(to, first) - first, comptime!(t.page));
    exists = exists && from < to && entry < sizes.entries;
    let mut id = 0usize;
    if exists {
        let listed = lists.table[page_list.table + entry];
        exists = listed >= 0i32;
        id = max(listed, 0i32) as usize;
        exists = exists && (id + 1) * sizes.shared_heads <= sizes.pages;
    }
    Place {
        exists,
        id,
        from,
        to,
    }
}

/// Region that a cube reads.
#[derive(CubeType, Clone, Copy)]
pub struct CubePages {
    pub page_list: PageList,
    /// First page of the share.
    pub first_page: usize,
    /// Slots of the share.
    pub slots: usize,
    /// Head among those that share an entry, and their number.
    pub shared_head: usize,
    pub shared_heads: usize,
    /// Sequence, and KV head counted over all sequences.
    pub batch: usize,
    pub head: usize,
    /// First query of the cube within the head.
    pub first_row: usize,
}

/// Returns the region that a cube of `rows` queries reads.
#[cube]
pub fn pages_of_cube(
    lists: &PageLists,
    cube: &Cube,
    share: &Share,
    #[comptime] rows: usize,
    #[comptime] t: PageListShape,
) -> CubePages {
    let sizes = &lists.sizes;
    let batch = share.page_list / sizes.tables;
    let kv_heads = sizes.tables * sizes.shared_heads;
    let head =
        batch * kv_heads + share.page_list % sizes.tables * sizes.shared_heads + cube.shared_head;
    let first_row = cube.block * rows;
    CubePages {
        page_list: PageList {
            span: span_of(&lists.spans, share.page_list, t),
            table: share.page_list * sizes.entries,
            selected: head * sizes.selected,
        },
        first_page: share.first,
        slots: share.pages * comptime!(t.page),
        shared_head: cube.shared_head,
        shared_heads: sizes.shared_heads,
        batch,
        head,
        first_row,
    }
}

/// Returns the stored page of the cube's head for a table entry; `id` is the entry plus 1.
#[cube]
pub fn stored_page(pages: &CubePages, id: u32) -> usize {
    (id - 1u32) as usize * pages.shared_heads + pages.shared_head
}

/// Returns a row of queries of the head, clamped to the last one.
#[cube]
pub fn query_row(row: usize, pages: &CubePages, sizes: &Sizes) -> usize {
    min(pages.first_row + row, sizes.group_rows - 1)
}

/// Position of a slot, and of the last query that sees it.
#[derive(CubeType, Clone, Copy)]
pub struct Sight {
    pub from: i32,
    pub to: i32,
}

/// Reads the visibility of a slot of a page; slots with `counts` false may be invalid.
#[cube]
pub fn sight_of(
    visibility: &ComptimeOption<Visibility>,
    id: u32,
    in_page: u32,
    counts: bool,
    #[comptime] page: usize,
) -> Sight {
    let visibility = visibility.as_ref().unwrap();
    let slot = (max(id, 1u32) - 1u32) as usize * page + in_page as usize;
    let slot = select(counts, slot, 0usize);
    Sight {
        from: visibility.positions[slot],
        to: visibility.last[slot],
    }
}

/// A page of a step.
#[derive(CubeType, Clone, Copy)]
pub struct Found {
    /// Its table entry plus 1; 0: none.
    pub id: u32,
    /// First used slot.
    pub from: u32,
    /// End of the used slots.
    pub to: u32,
}

/// Returns the page of a slot of the share.
#[cube]
pub fn page_at(
    lists: &PageLists,
    cube_pages: &CubePages,
    slot: usize,
    #[comptime] t: PageListShape,
) -> Found {
    let mut found = Found {
        id: 0u32,
        from: 0u32,
        to: 0u32,
    };
    if slot < cube_pages.slots {
        let page = cube_pages.first_page + slot / comptime!(t.page);
        let place = place_of(lists, &cube_pages.page_list, page, t);
        if place.exists {
            found.id = place.id as u32 + 1u32;
            found.from = place.from as u32;
            found.to = place.to as u32;
        }
    }
    found
}
