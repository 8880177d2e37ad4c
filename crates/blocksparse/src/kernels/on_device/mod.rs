//! Launch plans of layouts whose blocks a tensor chooses: made on its device, in buffers whose sizes follow from the layout's sizes.
//!
//! The tensor becomes bits ([`bits`]), the bits become the words of a plan ([`words`]), and kernels walk it as they walk any other. Where every query
//! chooses for itself, [`query_lists`] packs those that chose the same block.

mod at_once;
pub(super) mod bits;
pub(super) mod keep;
mod keep_planes;
mod query_lists;
mod words;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, PoisonError};

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::args::buffer;
use super::device_key::{DeviceKey, device_key};
use super::error::KernelError;
use super::uploaded::DevicePlan;
use crate::layout::TALLEST;
use crate::plan::{Sections, Tiling, Walk};
use crate::{BlockLayout, ChosenBy, DeviceChoice, LayoutShape};
use at_once::Once;
use bits::GridLaunch;
use keep_planes::ByPlanes;
pub(super) use keep::key;
pub use query_lists::{ListBuffers, ListSizes, ScoredRows, highest_blocks, list_queries};
use words::{Cut, ExtentLaunch, HeadsLaunch, PlacesLaunch};

/// Units of a cube of kernels whose units work alone.
const UNITS: u32 = 64;

/// The tensor that chooses a layout's blocks, contiguous.
#[derive(Clone, Debug)]
pub struct ChoiceTensor {
    /// The buffer, beginning at the first element.
    pub handle: Handle,
    /// Type of the elements: of a mask any integers, 0 for what is not chosen; of indices i32; of scores f32.
    pub dtype: ElemType,
}

/// The bits of a layout's blocks on devices.
#[derive(Default)]
struct Bits(Mutex<HashMap<DeviceKey, ByWalk>>);

/// Bits by rows, and by columns from when they are walked.
struct ByWalk {
    rows: Handle,
    columns: Option<Handle>,
}

/// Gives a layout the tensor that chooses its blocks: `[batch or 1, heads or 1, q_blocks, n]`, `n` being `kv_blocks` or the indices of a
/// row, as its [`DeviceChoice`] says. A layout that was given one on this device keeps it. Nothing is read back.
///
/// # Errors
/// [`KernelError`] if the device lacks the tensor's type, or the pairs of blocks are more than 32 bits count.
pub fn choose_blocks(
    client: &Client,
    layout: &BlockLayout,
    tensor: &ChoiceTensor,
) -> Result<(), KernelError> {
    let Some(choice) = layout.device_choice() else {
        return Ok(());
    };
    if !client.properties().supports_type(tensor.dtype) {
        return Err(KernelError::Dtype {
            dtype: tensor.dtype.to_string(),
        });
    }
    let known = layout.attachment(Bits::default);
    let mut known = known.0.lock().unwrap_or_else(PoisonError::into_inner);
    if let Entry::Vacant(entry) = known.entry(device_key(client)) {
        entry.insert(ByWalk {
            rows: row_bits(client, layout, choice, tensor)?,
            columns: None,
        });
    }
    Ok(())
}

fn patterns(choice: &DeviceChoice) -> usize {
    choice.patterns.iter().product()
}

fn grid(layout: &BlockLayout) -> GridLaunch {
    GridLaunch::new(
        layout.q_blocks(),
        layout.kv_blocks(),
        layout.kv_blocks().div_ceil(32),
        layout.block_size(),
        layout.block_size(),
        layout.seq_q(),
        offset(layout.shape()),
    )
}

/// Position of the first query.
fn offset(shape: &LayoutShape) -> i32 {
    shape.seq_kv as i32 - shape.seq_q as i32
}

fn row_bits(
    client: &Client,
    layout: &BlockLayout,
    choice: &DeviceChoice,
    tensor: &ChoiceTensor,
) -> Result<Handle, KernelError> {
    let rows = patterns(choice) * layout.q_blocks();
    let width = match choice.by {
        ChosenBy::Indices { most } => most,
        ChosenBy::Mask | ChosenBy::Scores(_) => layout.kv_blocks(),
    };
    let elements = rows * width.max(layout.kv_blocks());
    if u32::try_from(elements).is_err() {
        let what = "the pairs of blocks of a layout";
        return Err(KernelError::limit(what, u32::MAX, elements));
    }
    let len = rows * layout.kv_blocks().div_ceil(32);
    let made = client.empty(len * size_of::<u32>());
    let address = AddressType::U32;
    let input = buffer(&tensor.handle, rows * width);
    let output = buffer(&made, len);
    let (grid, causal) = (grid(layout), choice.causal);
    match choice.by {
        // SAFETY: a unit writes its own word of bits, below `len`, and reads as many elements of that row.
        ChosenBy::Mask => unsafe {
            let cubes = units(client, len);
            let (dim, dtype) = (CubeDim::new_1d(UNITS), tensor.dtype);
            bits::from_mask::launch_unchecked(
                client, cubes, dim, address, input, output, grid, causal, dtype,
            );
        },
        // SAFETY: a unit writes the bits of its own row, below `rows`, and reads that row's indices.
        ChosenBy::Indices { most } => unsafe {
            let (cubes, dim) = (units(client, rows), CubeDim::new_1d(UNITS));
            bits::from_indices::launch_unchecked(
                client, cubes, dim, address, input, output, grid, most, rows, causal,
            );
        },
        ChosenBy::Scores(rule) => {
            let most = layout.kv_blocks();
            let numbers = keep::numbers(&rule, most);
            match ByPlanes::new(client.properties(), &rule, most, causal) {
                // SAFETY: likewise a plane, of the row's scores.
                Some(planes) => unsafe {
                    let cubes = cubes(client, rows.div_ceil(planes.rows()));
                    let dim = CubeDim::new_1d(planes.units());
                    keep_planes::from_scores_by_planes::launch_unchecked(
                        client, cubes, dim, address, input, output, grid, numbers, rows, planes,
                    );
                },
                // SAFETY: likewise a cube.
                None => unsafe {
                    let chosen = keep::Chosen::new(client.properties(), &rule, most, causal)?;
                    let (cubes, dim) = (cubes(client, rows), CubeDim::new_1d(chosen.units()));
                    keep::from_scores::launch_unchecked(
                        client, cubes, dim, address, input, output, grid, numbers, rows, chosen,
                    );
                },
            }
        }
    }
    Ok(made)
}

fn column_bits(
    client: &Client,
    layout: &BlockLayout,
    choice: &DeviceChoice,
    rows: &Handle,
) -> Handle {
    let row_len = patterns(choice) * layout.q_blocks() * layout.kv_blocks().div_ceil(32);
    let words = layout.q_blocks().div_ceil(32);
    let len = patterns(choice) * layout.kv_blocks() * words;
    let made = client.empty(len * size_of::<u32>());
    // SAFETY: a unit writes its own word, below `len`, of 32 rows' bits.
    unsafe {
        bits::transpose::launch_unchecked(
            client,
            units(client, len),
            CubeDim::new_1d(UNITS),
            AddressType::U32,
            buffer(rows, row_len),
            buffer(&made, len),
            grid(layout),
            words,
        );
    }
    made
}

/// The size of everything in a plan.
struct Room {
    cut: Cut,
    patterns: usize,
    /// Tiles of a pattern.
    tiles: usize,
    /// Block rows of a pattern.
    lines: usize,
    /// Words of a block row's bits.
    words: usize,
    /// Entries of a pattern, at most.
    entries: usize,
    sections: Sections,
    len: usize,
}

impl Room {
    fn new(layout: &BlockLayout, choice: &DeviceChoice, tiling: Tiling) -> Self {
        let shape = layout.shape();
        let b = shape.block_size;
        let group = tiling.cols.min(b);
        let cut = Cut {
            walk: tiling.walk,
            rows: tiling.rows,
            per_step: tiling.cols / group,
            group,
            block: b,
            causal: choice.causal,
        };
        let (length, lines, others) = match tiling.walk {
            Walk::Rows => (shape.seq_q, layout.q_blocks(), layout.kv_blocks()),
            Walk::Columns => (shape.seq_kv, layout.kv_blocks(), layout.q_blocks()),
        };
        let tiles = length.div_ceil(tiling.rows);
        let most = choice.most_blocks(shape);
        let step = cut.per_step;
        let entries = match tiling.walk {
            Walk::Rows => {
                let blocks = (most * cut.height()).min(others);
                tiles * (blocks * cut.parts()).next_multiple_of(step)
            }
            // A column may have all rows, but all columns together have no more blocks than all rows; a tile lower than a block has its
            // blocks for itself.
            Walk::Columns => {
                let tiles_of_block = (b / tiling.rows).max(1);
                let all = layout.q_blocks() * most * cut.parts() * tiles_of_block;
                let by_tile = (others * cut.parts()).next_multiple_of(step);
                (all + tiles * (step - 1)).min(tiles * by_tile)
            }
        };
        let patterns = patterns(choice);
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
        let room = section(patterns * entries * 2);
        let masks = section(cut.masks() * cut.rows * cut.mask_words());
        let sections = Sections {
            heads,
            // Nothing is stored: read, and not used.
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
            sections,
            len,
        }
    }
}

/// Checks that the device has room for a plan.
///
/// # Errors
/// [`KernelError`] if it has not.
pub fn check(
    layout: &BlockLayout,
    tiling: Tiling,
    properties: &DeviceProperties,
) -> Result<(), KernelError> {
    let Some(choice) = layout.device_choice() else {
        return Ok(());
    };
    let height = tiling.rows / layout.block_size();
    if height > TALLEST {
        let what = "the block rows of a tile of a layout that is made on the device";
        return Err(KernelError::limit(what, TALLEST as u64, height));
    }
    let bytes = Room::new(layout, choice, tiling).len * size_of::<u32>();
    let most = properties.memory.max_page_size.min(u64::from(u32::MAX) * 4);
    match bytes as u64 <= most {
        true => Ok(()),
        false => Err(KernelError::limit(
            "the bytes of a launch plan",
            most,
            bytes,
        )),
    }
}

/// The plan of a layout under a tiling, made of its bits.
///
/// # Panics
/// If [`choose_blocks`] was not called before.
pub fn plan(
    client: &Client,
    layout: &BlockLayout,
    choice: &DeviceChoice,
    tiling: Tiling,
) -> DevicePlan {
    assert!(
        !(tiling.places || tiling.visits || tiling.clustered),
        "a plan that is made on the device has neither places, visits nor clusters"
    );
    let bits = layout.attachment(Bits::default);
    let mut bits = bits.0.lock().unwrap_or_else(PoisonError::into_inner);
    let bits = bits.get_mut(&device_key(client));
    let ByWalk { rows, columns } = bits.expect("a layout has its blocks before a launch");
    let bits = match tiling.walk {
        Walk::Rows => rows,
        Walk::Columns => columns.get_or_insert_with(|| column_bits(client, layout, choice, rows)),
    };
    let making = Making {
        client,
        layout,
        choice,
        tiling,
        bits: bits.clone(),
        room: Room::new(layout, choice, tiling),
    };
    let words = client.empty(making.room.len * size_of::<u32>());
    match Once::new(client.properties(), making.room.tiles) {
        Some(once) => making.at_once(&words, once),
        None => {
            making.list(&words);
            making.tables(&words);
        }
    }
    let Room {
        len,
        sections,
        tiles,
        ..
    } = making.room;
    DevicePlan {
        words,
        len,
        sections,
        tiles,
    }
}

/// A plan being made.
struct Making<'a> {
    client: &'a Client,
    layout: &'a BlockLayout,
    choice: &'a DeviceChoice,
    tiling: Tiling,
    /// Those of the walk.
    bits: Handle,
    room: Room,
}

impl Making<'_> {
    fn extent(&self) -> ExtentLaunch {
        let (layout, room) = (self.layout, &self.room);
        let [row_len, col_len] = match self.tiling.walk {
            Walk::Rows => [layout.seq_q(), layout.seq_kv()],
            Walk::Columns => [layout.seq_kv(), layout.seq_q()],
        };
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
        let Sections {
            heads,
            order,
            tiles,
            masks,
            entries,
            ..
        } = self.room.sections;
        PlacesLaunch::new(heads, order, tiles, masks, entries)
    }

    fn bits(&self) -> BufferArg {
        let Room {
            patterns,
            lines,
            words,
            ..
        } = self.room;
        buffer(&self.bits, patterns * lines * words)
    }

    /// Heads of all batch entries, and words of the masks and of those heads.
    fn table_words(&self) -> [usize; 2] {
        let cut = self.room.cut;
        let heads = self.layout.batch().unwrap_or(1) * self.layout.heads();
        [heads, cut.masks() * cut.rows * cut.mask_words() + heads]
    }

    fn heads(&self, heads: usize) -> HeadsLaunch {
        HeadsLaunch::new(heads, self.layout.heads(), self.choice.patterns[1])
    }

    /// All of it in one launch.
    fn at_once(&self, words: &Handle, once: Once) {
        let (client, cut, patterns) = (self.client, self.room.cut, self.room.patterns);
        let [heads, tables] = self.table_words();
        // SAFETY: a cube writes what belongs to the tiles of its pattern, below `patterns`, and words of the tables, where `Room` has room for them.
        unsafe {
            at_once::at_once::launch_unchecked(
                client,
                cubes(client, patterns),
                CubeDim::new_1d(once.units as u32),
                AddressType::U32,
                self.bits(),
                buffer(words, self.room.len),
                self.extent(),
                self.places(),
                self.heads(heads),
                patterns,
                tables,
                cut,
                once,
            );
        }
    }

    /// The tiles, their order and their entries.
    fn list(&self, words: &Handle) {
        let (client, cut, patterns) = (self.client, self.room.cut, self.room.patterns);
        let all = patterns * self.room.tiles;
        let (dim, address) = (CubeDim::new_1d(UNITS), AddressType::U32);
        let made = || buffer(words, self.room.len);
        // SAFETY: a unit, or a cube of offsets, writes what belongs to its tile, below `all`, or its pattern, where `Room` has room for it.
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
            words::offsets::launch_unchecked(
                client,
                cubes(client, patterns),
                CubeDim::new_1d(words::OFFSET_UNITS as u32),
                address,
                made(),
                self.extent(),
                self.places(),
                patterns,
                cut.per_step,
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

    /// The masks, and the first tile of each head.
    fn tables(&self, words: &Handle) {
        let (client, cut) = (self.client, self.room.cut);
        let [heads, tables] = self.table_words();
        // SAFETY: a unit writes its own word of the two sections.
        unsafe {
            words::tables::launch_unchecked(
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

/// Cubes of [`UNITS`] for so many units.
fn units(client: &Client, units: usize) -> CubeCount {
    cubes(client, units.div_ceil(UNITS as usize))
}

/// So many cubes, or some more, over the first two dimensions of a launch: less than 2³² always fit.
fn cubes(client: &Client, cubes: usize) -> CubeCount {
    let (most, ..) = client.properties().hardware.max_cube_count;
    let x = cubes.clamp(1, most as usize);
    CubeCount::Static(x as u32, cubes.div_ceil(x).max(1) as u32, 1)
}
