//! Launch plans of layouts whose blocks a tensor chooses, made on the tensor's device, in buffers whose sizes follow from the layout's.
//!
//! The tensor becomes bits ([`bits`]), and the bits become the words of a plan (`words`), which kernels run like any other. If every query chooses for
//! itself, `query_lists` packs the queries that choose the same block. If blocks are chosen from those of a host layout, the plan has a subset of that
//! layout's entries (`within`). If only masks depend on the device, on positions or on bits of pairs, the plan has all of its entries (`pairs`).

mod at_once;
pub mod bits;
mod budget;
mod budget_search;
mod budget_tile;
mod chosen;
mod key_lists;
mod neighbours;
#[doc(hidden)]
pub mod pair_places;
mod pairs;
mod query_lists;
mod tables;
mod within;
mod words;

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::args::buffer;
use super::error::KernelError;
use super::uploaded::DevicePlan;
use at_once::Once;
use blocksparse::internal::TALLEST;
use blocksparse::plan::{Mainloop, Sections, Tiling};
use blocksparse::{BlockLayout, DeviceChoice};
pub use chosen::{ChoiceTensor, choose_blocks, count_blocks};
use chosen::{offset, patterns};
pub use key_lists::Queries;
pub use key_lists::{KeyListSizes, unique_keys};
pub use neighbours::{NeighbourLists, Uniting, most_of_neighbours, neighbour_lists};
pub use pair_places::{BitsOfKeys, PairPlaces, pair_places, places_of};
use pairs::Seen;
pub use query_lists::{ListBuffers, ListSizes, ScoredRows, highest_blocks, list_queries};
use tables::HeadsLaunch;
use within::{WholeLaunch, WholeSizes};
use words::{Cut, ExtentLaunch, PlacesLaunch};

/// Units per cube of kernels whose units are independent.
const UNITS: u32 = 64;

/// Sizes of the parts of a plan.
struct Room {
    cut: Cut,
    patterns: usize,
    /// Tiles per pattern.
    tiles: usize,
    /// Block rows per pattern.
    lines: usize,
    /// Words of a block row's bits.
    words: usize,
    /// Largest number of entries per pattern.
    entries: usize,
    /// Words of the masks.
    mask_words: usize,
    sections: Sections,
    len: usize,
}

impl Room {
    fn new(layout: &BlockLayout, choice: &DeviceChoice, tiling: Tiling) -> Self {
        let shape = layout.shape();
        let b = shape.block_size;
        let group = tiling.cols.min(b);
        let cut = Cut {
            mainloop: tiling.mainloop,
            rows: tiling.rows,
            per_step: tiling.cols / group,
            group,
            block: b,
            causal: choice.causal,
        };
        let [length, _] = tiling.mainloop.sides(shape.seq_q, shape.seq_kv);
        let [lines, others] = (tiling.mainloop).sides(layout.q_blocks(), layout.kv_blocks());
        let tiles = length.div_ceil(tiling.rows);
        let most = choice.most_blocks(shape);
        let step = cut.per_step;
        let entries = match tiling.mainloop {
            Mainloop::Rows => {
                let blocks = (most * cut.height()).min(others);
                tiles * (blocks * cut.parts()).next_multiple_of(step)
            }
            // A column may have all rows, but all columns together have no more blocks than all rows. A tile lower than a block does not share its blocks
            // with other tiles.
            Mainloop::Columns => {
                let tiles_of_block = (b / tiling.rows).max(1);
                let all = layout.q_blocks() * most * cut.parts() * tiles_of_block;
                let by_tile = (others * cut.parts()).next_multiple_of(step);
                (all + tiles * (step - 1)).min(tiles * by_tile)
            }
        };
        let whole = layout.within().map(|whole| WholeSizes::new(whole, tiling));
        let entries = whole.map_or(entries, |whole| entries.min(whole.entries));
        let patterns = patterns(choice);
        let masks = match (choice.by, whole) {
            // The full and the empty mask, and one for each entry.
            (by, _) if by.has_all_blocks() => 2 + patterns * entries,
            (_, Some(whole)) => whole.table(cut.height()),
            (_, None) => cut.masks(),
        };
        let mask_words = masks * cut.rows * cut.mask_words();
        let heads = layout.batch().unwrap_or(1) * layout.heads();
        let mut len = 0;
        let mut section = |words: usize| {
            let start = len;
            len += words;
            start
        };
        let heads = section(heads);
        let order = section(patterns * tiles * 4);
        let records = section(patterns * tiles * 3);
        let room = section(patterns * entries * tiling.entry_words());
        let masks = section(mask_words);
        let sections = Sections {
            heads,
            // A placeholder, because weights are not stored: read, but not used.
            places: heads,
            order,
            rows: order,
            tiles: records,
            entries: room,
            masks,
        };
        Self {
            cut,
            patterns,
            tiles,
            lines,
            words: others.div_ceil(32),
            entries,
            mask_words,
            sections,
            len,
        }
    }
}

/// Checks that the device has memory for a plan.
///
/// # Errors
/// [`KernelError`] if it does not.
pub fn check(
    layout: &BlockLayout,
    tiling: Tiling,
    properties: &DeviceProperties,
) -> Result<(), KernelError> {
    let Some(choice) = layout.device_choice() else {
        return Ok(());
    };
    let what = "the block rows of a tile of a layout that is made on the device";
    KernelError::check(what, TALLEST as u64, tiling.rows / layout.block_size())?;
    let bytes = Room::new(layout, choice, tiling).len * size_of::<u32>();
    let most = properties.memory.max_page_size.min(u64::from(u32::MAX) * 4);
    KernelError::check("the bytes of a launch plan", most, bytes)
}

/// Makes the plan of a layout under a tiling from its bits. `whole` is the plan of the layout that blocks are chosen from, if there is one.
///
/// # Errors
/// [`KernelError`] if it has more words than kernels can index.
///
/// # Panics
/// If [`choose_blocks`] was not called before.
pub fn plan(
    client: &Client,
    layout: &BlockLayout,
    choice: &DeviceChoice,
    tiling: Tiling,
    whole: Option<&DevicePlan>,
) -> Result<DevicePlan, KernelError> {
    let visits = tiling.visits && layout.places().is_none();
    assert!(
        !(tiling.places || visits || tiling.clustered),
        "a plan that is made on the device has neither places nor clusters, and visits where its blocks are known"
    );
    let bits = chosen::bits_of(client, layout, choice, tiling.mainloop);
    let making = Making {
        client,
        layout,
        choice,
        tiling,
        bits,
        room: Room::new(layout, choice, tiling),
    };
    let words = client.empty(making.room.len * size_of::<u32>());
    match layout.within().zip(whole) {
        Some((whole, plan)) => match Seen::by(choice.by) {
            Some(seen) => making.list_pairs(&words, whole, plan, seen),
            None => making.list_within(&words, whole, plan),
        },
        None => match Once::new(client.properties(), making.room.tiles) {
            Some(once) => making.at_once(&words, once),
            None => {
                making.list(&words);
                making.tables(&words);
            }
        },
    }
    let (len, sections) = (making.room.len, making.room.sections);
    let tiles = making.room.tiles;
    // Tiles share queries as in the plan whose entries it has.
    let same = layout.places().and(whole);
    let [apart, between] = same.map_or([0; 2], |whole| [whole.apart, whole.between]);
    Ok(DevicePlan {
        words,
        len,
        sections,
        tiles,
        apart,
        between,
        complete: same.is_some_and(|whole| whole.complete),
        steps: Vec::new(),
    })
}

/// A plan under construction.
struct Making<'a> {
    client: &'a Client,
    layout: &'a BlockLayout,
    choice: &'a DeviceChoice,
    tiling: Tiling,
    /// Bits by rows or by columns, as the loop needs, or positions.
    bits: Handle,
    room: Room,
}

impl Making<'_> {
    fn extent(&self) -> ExtentLaunch {
        let (layout, room) = (self.layout, &self.room);
        let [row_len, col_len] = self.tiling.mainloop.sides(layout.seq_q(), layout.seq_kv());
        ExtentLaunch::new(
            room.tiles,
            room.lines,
            room.words,
            row_len as i32,
            col_len as i32,
            offset(layout.shape()),
            room.entries,
        )
    }

    fn places(&self) -> PlacesLaunch {
        let (heads, order) = (self.room.sections.heads, self.room.sections.order);
        let (tiles, masks) = (self.room.sections.tiles, self.room.sections.masks);
        let entries = self.room.sections.entries;
        PlacesLaunch::new(heads, order, tiles, masks, entries)
    }

    fn bits(&self) -> BufferArg {
        let (patterns, lines) = (self.room.patterns, self.room.lines);
        let words = self.room.words;
        buffer(&self.bits, patterns * lines * words)
    }

    /// Returns the number of heads of all batch entries, and the number of words of the masks and of those heads.
    fn table_words(&self) -> [usize; 2] {
        let heads = self.layout.batch().unwrap_or(1) * self.layout.heads();
        [heads, self.room.mask_words + heads]
    }

    fn heads(&self, heads: usize) -> HeadsLaunch {
        HeadsLaunch::new(heads, self.layout.heads(), self.choice.patterns[1])
    }

    /// Makes the whole plan in one launch.
    fn at_once(&self, words: &Handle, once: Once) {
        let (client, cut, patterns) = (self.client, self.room.cut, self.room.patterns);
        let [heads, tables] = self.table_words();
        let shares = Once::shares(client.properties(), patterns, self.room.tiles);
        // SAFETY: a cube writes the words of its share of the tiles of its pattern, below `patterns`, and words of the tables, within the sections of
        // `Room`.
        unsafe {
            at_once::at_once::launch_unchecked(
                client,
                cubes(client, patterns * shares),
                CubeDim::new_1d(once.units as u32),
                AddressType::U32,
                self.bits(),
                buffer(words, self.room.len),
                self.extent(),
                self.places(),
                self.heads(heads),
                patterns,
                shares,
                tables,
                cut,
                once,
            );
        }
    }

    /// Makes the tiles, their order and their entries.
    fn list(&self, words: &Handle) {
        let (client, cut) = (self.client, self.room.cut);
        let all = self.room.patterns * self.room.tiles;
        let (dim, address) = (CubeDim::new_1d(UNITS), AddressType::U32);
        let made = || buffer(words, self.room.len);
        // SAFETY: a unit writes the words of its tile, below `all`, and a cube of offsets those of its pattern, within the sections of `Room`.
        unsafe {
            words::count::launch_unchecked(
                client,
                units(client, all),
                dim,
                address,
                self.bits(),
                made(),
                self.extent(),
                self.places(),
                all,
                cut,
            );
            self.order(words);
            words::entries::launch_unchecked(
                client,
                units(client, all),
                dim,
                address,
                self.bits(),
                made(),
                self.extent(),
                self.places(),
                all,
                cut,
            );
        }
    }

    /// Computes the first entry of each tile, and the order of tiles by decreasing work, after their entries are counted.
    ///
    /// # Safety
    /// `words` must have the length of the plan.
    unsafe fn order(&self, words: &Handle) {
        let (client, patterns) = (self.client, self.room.patterns);
        let all = patterns * self.room.tiles;
        let (dim, address) = (CubeDim::new_1d(UNITS), AddressType::U32);
        let made = || buffer(words, self.room.len);
        // SAFETY: a cube of offsets writes the words of its pattern, and a unit those of its tile, below `all`.
        unsafe {
            words::offsets::launch_unchecked(
                client,
                cubes(client, patterns),
                CubeDim::new_1d(words::OFFSET_UNITS as u32),
                address,
                made(),
                self.extent(),
                self.places(),
                patterns,
                self.room.cut.per_step,
            );
            words::rank::launch_unchecked(
                client,
                units(client, all),
                dim,
                address,
                made(),
                self.extent(),
                self.places(),
                all,
            );
        }
    }

    /// Makes the whole plan of blocks chosen from those of a layout with a plan.
    fn list_within(&self, words: &Handle, layout: &BlockLayout, whole: &DevicePlan) {
        let (client, cut) = (self.client, self.room.cut);
        let all = self.room.patterns * self.room.tiles;
        let (dim, address) = (CubeDim::new_1d(UNITS), AddressType::U32);
        let made = || buffer(words, self.room.len);
        let given = || buffer(&whole.words, whole.len);
        let at = whole.sections;
        let mask_count = (whole.len - at.masks) / (cut.rows * cut.mask_words());
        let of = || {
            WholeLaunch::new(
                at.heads,
                at.tiles,
                at.entries,
                at.masks,
                mask_count as u32,
                layout.batch().unwrap_or(1) - 1,
                layout.heads(),
                self.choice.patterns[1],
            )
        };
        let [heads, tables] = self.table_words();
        // SAFETY: a unit writes the words of its tile, below `all`, or its own word of the two tables, within the sections of `Room`. It reads the records,
        // entries and masks of the whole plan, which has all patterns, tiles and masks.
        unsafe {
            within::count::launch_unchecked(
                client,
                units(client, all),
                dim,
                address,
                self.bits(),
                given(),
                made(),
                self.extent(),
                self.places(),
                of(),
                all,
                cut,
            );
            self.order(words);
            within::entries::launch_unchecked(
                client,
                units(client, all),
                dim,
                address,
                self.bits(),
                given(),
                made(),
                self.extent(),
                self.places(),
                of(),
                all,
                cut,
            );
            within::tables::launch_unchecked(
                client,
                units(client, tables),
                dim,
                address,
                given(),
                made(),
                self.extent(),
                self.places(),
                self.heads(heads),
                of(),
                self.room.mask_words,
                cut,
            );
        }
    }

    /// Makes the whole plan with every entry of another plan, and masks of its own.
    fn list_pairs(&self, words: &Handle, layout: &BlockLayout, whole: &DevicePlan, seen: Seen) {
        let (client, cut) = (self.client, self.room.cut);
        let all = self.room.patterns * self.room.tiles;
        let at = whole.sections;
        let [heads, _] = self.table_words();
        let (numbers, [rows, cols]) = self.numbers();
        let most = client.properties().hardware.max_units_per_cube;
        let units = pairs::UNITS.min(most);
        // SAFETY: a cube writes the record, the entries and the masks of one tile, below `all`, and words of two masks and of heads, within the sections of
        // `Room`. It reads the same parts of the whole plan, and elements of its pattern.
        unsafe {
            pairs::of_pairs::launch_unchecked(
                client,
                cubes(client, all),
                CubeDim::new_1d(units),
                AddressType::U32,
                buffer(&self.bits, self.room.patterns * numbers),
                buffer(&whole.words, whole.len),
                buffer(words, self.room.len),
                self.extent(),
                self.places(),
                self.heads(heads),
                pairs::GivenLaunch::new(
                    at.heads,
                    at.order,
                    at.tiles,
                    at.entries,
                    at.masks,
                    layout.batch().unwrap_or(1) - 1,
                    rows,
                    cols,
                    numbers,
                ),
                all,
                cut,
                self.tiling.entry_words(),
                seen,
                units as usize,
            );
        }
    }

    /// Returns the elements per pattern in the tensor that determines the pairs, and the offsets of the loop's rows and columns among them. For bits, the
    /// second offset is the words per row instead.
    fn numbers(&self) -> (usize, [usize; 2]) {
        let shape = self.layout.shape();
        let turned = |[queries, keys]: [usize; 2]| self.tiling.mainloop.sides(queries, keys);
        match self.choice.positions(shape) {
            Some([numbers, keys]) => (numbers, turned([0, keys])),
            None => {
                let [rows, cols] = turned([shape.seq_q, shape.seq_kv]);
                let words = cols.div_ceil(32);
                (rows * words, [0, words])
            }
        }
    }

    /// Makes the masks, and the first tile of each head.
    fn tables(&self, words: &Handle) {
        let (client, cut) = (self.client, self.room.cut);
        let [heads, tables] = self.table_words();
        // SAFETY: a unit writes its own word of the two sections.
        unsafe {
            tables::tables::launch_unchecked(
                client,
                units(client, tables),
                CubeDim::new_1d(UNITS),
                AddressType::U32,
                buffer(words, self.room.len),
                self.extent(),
                self.places(),
                self.heads(heads),
                cut,
            );
        }
    }
}

/// Returns the cubes of [`UNITS`] units for `units` units.
fn units(client: &Client, units: usize) -> CubeCount {
    cubes(client, units.div_ceil(UNITS as usize))
}

/// Spreads at least `cubes` cubes over the first two dimensions of a launch. Fewer than 2³² always fit.
fn cubes(client: &Client, cubes: usize) -> CubeCount {
    let (most, ..) = client.properties().hardware.max_cube_count;
    let x = cubes.clamp(1, most as usize);
    CubeCount::Static(x as u32, cubes.div_ceil(x).max(1) as u32, 1)
}
