//! Gather lists of tiles, computed from the kept blocks.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::kernels::linear::tile::SLAB;
use crate::kernels::prelude::*;
use blocksparse::WeightLayout;
use blocksparse::internal::Slots;
use blocksparse_cubecl::device_key::{DeviceKey, device_key};
use blocksparse_cubecl::recording::refuse_upload;

/// Marks a missing cell.
pub const NONE: u32 = u32::MAX;
/// Outputs, or inputs, of a warpgroup.
pub const GROUP: usize = SLAB;

/// # Errors
/// The limit of the kernels that the layout exceeds.
fn check(layout: &WeightLayout) -> Result<(), &'static str> {
    let numbers = layout.len().checked_mul(layout.block() * layout.block());
    match numbers.is_some_and(|numbers| numbers < NONE as usize) {
        true => Ok(()),
        false => Err("the kept blocks have more numbers than are counted in 32 bits"),
    }
}

/// Returns the inputs and outputs of a cell, the unit that tiles are gathered from.
fn cell_of(layout: &WeightLayout) -> usize {
    layout.block().min(SLAB)
}

/// Lists the cells: index along the inputs and along the outputs, and offset in the weight, whose blocks are `[inputs, outputs]`.
fn cells(layout: &WeightLayout) -> impl Iterator<Item = (u32, u32, u32)> {
    let (block, cell) = (layout.block(), cell_of(layout));
    let side = block / cell;
    let blocks = layout.kept_blocks().enumerate();
    blocks.flat_map(move |(index, (input, output))| {
        (0..side * side).map(move |within| {
            let (row, column) = (within / side, within % side);
            let first = index * block * block + row * cell * block + column * cell;
            (
                input * side as u32 + row as u32,
                output * side as u32 + column as u32,
                first as u32,
            )
        })
    })
}

/// Direction of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// `x · W`: tiles of outputs, with inputs as the depth.
    Forward,
    /// `dy · Wᵀ`: tiles of inputs, with outputs as the depth.
    Backward,
}

/// Tables of a layout, by device.
type DeviceTables = Slots<DeviceKey, Option<Arc<BlockTables>>>;

/// Cells of 64 outputs (or inputs): for each column of cells that any of them keeps, the offsets of the cells.
type Union = BTreeMap<u32, Vec<u32>>;

/// Returns the union of each group of 64.
fn unions(layout: &WeightLayout, direction: Direction) -> Vec<Union> {
    let side = SLAB / cell_of(layout);
    let tall = match direction {
        Direction::Forward => layout.outputs(),
        Direction::Backward => layout.inputs(),
    };
    let mut unions = vec![Union::new(); tall.div_ceil(GROUP)];
    for (input, output, first) in cells(layout) {
        let (along, across) = match direction {
            Direction::Forward => (output, input),
            Direction::Backward => (input, output),
        };
        let (group, place) = (along as usize / side, along as usize % side);
        unions[group]
            .entry(across)
            .or_insert_with(|| vec![NONE; side])[place] = first;
    }
    unions
}

/// Gather lists of the tiles of a [`Direction`], on the host or on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TileLists<W = Vec<u32>> {
    /// Slab offset of each group, and the total.
    pub offsets: W,
    /// Columns of x at which the cells of each slab begin; x's width for a missing one.
    pub entries: W,
    /// Offset in the weight of each cell of each slab, in packed order, or [`NONE`].
    pub sources: W,
    pub slabs: usize,
    pub groups: usize,
}

impl TileLists {
    pub(crate) fn new(layout: &WeightLayout, direction: Direction) -> Self {
        let (cell, side) = (cell_of(layout), SLAB / cell_of(layout));
        let width = match direction {
            Direction::Forward => layout.inputs(),
            Direction::Backward => layout.outputs(),
        };
        let mut lists = Self {
            offsets: vec![0],
            entries: Vec::new(),
            sources: Vec::new(),
            slabs: 0,
            groups: 0,
        };
        for union in unions(layout, direction) {
            let nothing = vec![NONE; side];
            let of_none = (width as u32, &nothing);
            let mut columns: Vec<_> = union
                .iter()
                .map(|(across, firsts)| (*across * cell as u32, firsts))
                .collect();
            // A group that keeps nothing gets a slab of zeros, so that its sums are 0.
            columns.resize(columns.len().next_multiple_of(side).max(side), of_none);
            for slab in columns.chunks(side) {
                lists.entries.extend(slab.iter().map(|(first, _)| *first));
                // In the weight's order: rows are inputs.
                for row in 0..side {
                    for column in 0..side {
                        lists.sources.push(match direction {
                            Direction::Forward => slab[row].1[column],
                            Direction::Backward => slab[column].1[row],
                        });
                    }
                }
            }
            lists.slabs = lists.entries.len() / side;
            lists.groups += 1;
            lists.offsets.push(lists.slabs as u32);
        }
        lists
    }

    fn uploaded(&self, client: &Client) -> TileLists<Words> {
        TileLists {
            offsets: Words::new(client, &self.offsets),
            entries: Words::new(client, &self.entries),
            sources: Words::new(client, &self.sources),
            slabs: self.slabs,
            groups: self.groups,
        }
    }
}

/// Lists the offset among the kept blocks of each cell of every 64 × 64 tile of the dense weight, row by row, or [`NONE`].
fn dense_sources(layout: &WeightLayout) -> Vec<u32> {
    let side = SLAB / cell_of(layout);
    let [rows, columns] = [layout.inputs(), layout.outputs()].map(|width| width.div_ceil(SLAB));
    let mut sources = vec![NONE; rows * columns * side * side];
    for (input, output, first) in cells(layout) {
        let (input, output) = (input as usize, output as usize);
        let tile = input / side * columns + output / side;
        sources[(tile * side + input % side) * side + output % side] = first;
    }
    sources
}

/// Returns the share of a dense weight's tiles that is multiplied, in either direction.
fn shares(layout: &WeightLayout) -> [f64; 2] {
    let cell = cell_of(layout);
    [Direction::Forward, Direction::Backward].map(|direction| {
        let unions = unions(layout, direction);
        let width = match direction {
            Direction::Forward => layout.inputs(),
            Direction::Backward => layout.outputs(),
        };
        let cells: usize = unions.iter().map(Union::len).sum();
        (cells * cell) as f64 / (unions.len() * width) as f64
    })
}

/// Tiles of the gradient with respect to the weight, on the host or on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Targets<W = Vec<u32>> {
    /// Outputs of a warpgroup.
    pub cols: usize,
    pub tiles: usize,
    /// First input of each tile.
    pub starts: W,
    /// Outputs at which the cells of each tile begin, those of the first warpgroup first; the number of the weight's outputs for a missing one. With blocks
    /// of 128 both warpgroups have the same.
    pub entries: W,
    /// Offset in the weight of each cell of each column of cells of each warpgroup of a tile, or [`NONE`].
    pub targets: W,
}

/// Outputs of a warpgroup of the gradient with respect to the weight.
const COLS: [usize; 3] = [256, 128, 64];
/// Bytes per cycle that a multiprocessor reads if no other reads the same.
const READ_BYTES: usize = 28;

/// Returns the cycles of a slab of such a tile for both warpgroups: the larger of the tensor cores' and those of reading.
pub(crate) fn slab_cycles(cols: usize, bytes: usize) -> usize {
    (4 * cols).max(bytes / READ_BYTES)
}

impl Targets {
    /// Returns the fastest tiles. With blocks of 128 each warpgroup has half of the inputs, else half of the outputs.
    pub(crate) fn new(layout: &WeightLayout) -> Self {
        let (cell, side) = (cell_of(layout), SLAB / cell_of(layout));
        let unions = unions(layout, Direction::Backward);
        let halves = layout.block() / cell;
        // Columns of cells of a tile.
        let wide = |cols: usize| {
            if halves == 2 {
                cols / cell
            } else {
                2 * cols / cell
            }
        };
        let cycles = |cols: usize| -> usize {
            let tiles = |union: &Union| union.len().div_ceil(wide(cols));
            let bytes = 128 * (halves * GROUP + wide(cols) * cell);
            let count: usize = unions.iter().step_by(halves).map(tiles).sum();
            count * slab_cycles(cols, bytes)
        };
        let cols = (COLS.into_iter())
            .min_by_key(|cols| cycles(*cols))
            .unwrap_or(COLS[0]);
        let mut made = Self {
            cols,
            tiles: 0,
            starts: Vec::new(),
            entries: Vec::new(),
            targets: Vec::new(),
        };
        for group in (0..unions.len()).step_by(halves) {
            let columns: Vec<_> = unions[group].keys().copied().collect();
            for tile in columns.chunks(wide(cols)) {
                made.tiles += 1;
                made.starts.push((group * GROUP) as u32);
                let missing = wide(cols) - tile.len();
                let of_tile = tile.iter().map(|across| across * cell as u32);
                made.entries.extend(of_tile);
                made.entries.extend(vec![layout.outputs() as u32; missing]);
                for union in &unions[group..group + halves] {
                    made.targets
                        .extend(tile.iter().flat_map(|across| &union[across]));
                    made.targets.extend(vec![NONE; missing * side]);
                }
            }
        }
        made
    }

    fn uploaded(&self, client: &Client) -> Targets<Words> {
        Targets {
            starts: Words::new(client, &self.starts),
            entries: Words::new(client, &self.entries),
            targets: Words::new(client, &self.targets),
            cols: self.cols,
            tiles: self.tiles,
        }
    }
}

/// Words on a device.
#[derive(Clone, Debug)]
pub(crate) struct Words {
    pub handle: Handle,
    pub len: usize,
}

impl Words {
    fn new(client: &Client, words: &[u32]) -> Self {
        // An empty buffer cannot be bound.
        let words = if words.is_empty() { &[NONE] } else { words };
        Self {
            handle: client.create_from_slice(bytemuck::cast_slice(words)),
            len: words.len(),
        }
    }
}

/// Gather lists of a layout on a device.
#[derive(Clone, Debug)]
pub struct BlockTables {
    pub(crate) block: usize,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) numbers: usize,
    tile_lists: [TileLists<Words>; 2],
    pub(crate) dense: Words,
    shares: [f64; 2],
    pub(crate) targets: Targets<Words>,
}

impl BlockTables {
    /// Returns the tables of a layout, built and uploaded once for each device.
    ///
    /// # Errors
    /// The limit of the kernels that the layout exceeds.
    pub fn of(client: &Client, layout: &WeightLayout) -> Result<Arc<Self>, &'static str> {
        let known = layout.attachment(DeviceTables::default);
        let new = || Ok(Arc::new(Self::new(client, layout)?));
        known.get_or_try_make(device_key(client), new)
    }

    fn new(client: &Client, layout: &WeightLayout) -> Result<Self, &'static str> {
        check(layout)?;
        refuse_upload(client, "").map_err(|_| "no tables of kept blocks are uploaded inside a recording: make the same call once before")?;
        let tile_lists = [Direction::Forward, Direction::Backward]
            .map(|direction| TileLists::new(layout, direction).uploaded(client));
        Ok(Self {
            block: layout.block(),
            inputs: layout.inputs(),
            outputs: layout.outputs(),
            numbers: layout.len() * layout.block() * layout.block(),
            tile_lists,
            dense: Words::new(client, &dense_sources(layout)),
            shares: shares(layout),
            targets: Targets::new(layout).uploaded(client),
        })
    }

    /// Returns whether a product of a direction is faster gathered than with a dense weight that is zero outside the kept blocks. Ratios are measured: reads
    /// decide, and boxes of few columns are read slowly.
    pub fn is_gathered(&self, direction: Direction) -> bool {
        let slowness = match self.block {
            16 => 2.7,
            32 | 64 => 1.85,
            _ => 1.6,
        };
        self.shares[direction as usize] * slowness < 1.0
    }

    /// Returns the same for the gradient with respect to the weight, which has the tiles of the product with its transpose.
    pub fn is_gradient_gathered(&self) -> bool {
        let slowness = match self.block {
            16 => 5.0,
            32 | 64 => 3.0,
            _ => 1.6,
        };
        self.shares[Direction::Backward as usize] * slowness < 1.0
    }

    pub(crate) fn lists(&self, direction: Direction) -> &TileLists<Words> {
        &self.tile_lists[direction as usize]
    }

    pub(crate) fn cell(&self) -> usize {
        self.block.min(SLAB)
    }

    /// Returns the inputs and outputs of the weight.
    pub fn widths(&self) -> [usize; 2] {
        [self.inputs, self.outputs]
    }

    /// Returns the widths of the input and of the result.
    pub(crate) fn ends(&self, direction: Direction) -> [usize; 2] {
        match direction {
            Direction::Forward => [self.inputs, self.outputs],
            Direction::Backward => [self.outputs, self.inputs],
        }
    }

    /// Returns the elements of the weight packed for products of a direction.
    pub fn packed_elements(&self, direction: Direction) -> usize {
        self.lists(direction).slabs * SLAB * GROUP
    }

    /// Returns the elements of the kept blocks.
    pub fn elements(&self) -> usize {
        self.numbers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the layout that keeps these blocks, in this order.
    fn kept(block: usize, [ins, outs]: [usize; 2], places: &[(u32, u32)]) -> WeightLayout {
        let mut mask = vec![false; ins * outs];
        for (input, output) in places {
            mask[*input as usize * outs + *output as usize] = true;
        }
        let layout = WeightLayout::from_mask([ins * block, outs * block], block, &mask).unwrap();
        assert!(layout.kept_blocks().eq(places.iter().copied()));
        layout
    }

    #[test]
    fn blocks_of_32_share_slabs() {
        // Outputs 0 and 1 form a group; 2 forms one alone.
        let places = [(0, 0), (3, 0), (3, 1), (1, 2)];
        let of = kept(32, [4, 3], &places);
        assert_eq!(check(&of), Ok(()));
        let lists = TileLists::new(&of, Direction::Forward);
        assert_eq!(lists.offsets, [0, 1, 2]);
        assert_eq!(lists.entries, [0, 96, 32, 128]);
        let at = |index: u32| index * 1024;
        assert_eq!(
            lists.sources,
            [at(0), NONE, at(1), at(2), at(3), NONE, NONE, NONE]
        );
        let lists = TileLists::new(&of, Direction::Backward);
        assert_eq!(lists.offsets, [0, 1, 2]);
        assert_eq!(lists.entries, [0, 64, 0, 32]);
        assert_eq!(
            lists.sources,
            [at(0), NONE, NONE, at(3), NONE, NONE, at(1), at(2)]
        );
        let targets = Targets::new(&of);
        assert_eq!(targets.starts, [0, 64]);
        assert_eq!(targets.cols, 64);
        assert_eq!(targets.entries, [0, 64, 96, 96, 0, 32, 96, 96]);
        let none = [NONE; 4];
        let first = [at(0), NONE, NONE, at(3)];
        let second = [NONE, at(1), NONE, at(2)];
        assert_eq!(targets.targets, [first, none, second, none].concat());
    }

    #[test]
    fn blocks_of_128_are_two_groups() {
        let places = [(1, 0)];
        let of = kept(128, [2, 1], &places);
        let lists = TileLists::new(&of, Direction::Forward);
        assert_eq!(lists.offsets, [0, 2, 4]);
        assert_eq!(lists.entries, [128, 192, 128, 192]);
        assert_eq!(lists.sources, [0, 64 * 128, 64, 64 * 128 + 64]);
        let lists = TileLists::new(&of, Direction::Backward);
        // The first inputs keep nothing: a slab of zeros each.
        assert_eq!(lists.offsets, [0, 1, 2, 4, 6]);
        assert_eq!(lists.entries, [128, 128, 0, 64, 0, 64]);
        assert_eq!(lists.sources, [NONE, NONE, 0, 64, 64 * 128, 64 * 128 + 64]);
        let targets = Targets::new(&of);
        assert_eq!(targets.starts, [128]);
        assert_eq!(targets.cols, 128);
        assert_eq!(targets.entries, [0, 64]);
        assert_eq!(targets.targets, [0, 64, 64 * 128, 64 * 128 + 64]);
    }

    #[test]
    fn every_cell_is_listed_once() {
        for block in [16, 32, 64, 128] {
            let places: Vec<(u32, u32)> = (0..9)
                .flat_map(|output| (0..7).map(move |input| (input, output)))
                .filter(|(input, output)| (input * 5 + output * 3) % 4 == 0)
                .collect();
            let of = kept(block, [7, 9], &places);
            let mut expected: Vec<u32> = cells(&of).map(|(_, _, first)| first).collect();
            expected.sort_unstable();
            let sorted = |words: Vec<u32>| {
                let mut found: Vec<u32> = words.into_iter().filter(|word| *word != NONE).collect();
                found.sort_unstable();
                found
            };
            for direction in [Direction::Forward, Direction::Backward] {
                assert_eq!(sorted(TileLists::new(&of, direction).sources), expected);
            }
            let targets = Targets::new(&of);
            let found = targets.targets.clone();
            assert_eq!(sorted(found), expected);
        }
    }

    #[test]
    fn the_dense_weight_has_every_cell_once() {
        let places = [(0, 0), (3, 0), (3, 1), (1, 2)];
        let of = kept(32, [4, 3], &places);
        let at = |index: u32| index * 1024;
        // Two tiles along the inputs and two along the outputs; the last one's second column is beyond the weight.
        assert_eq!(
            dense_sources(&of),
            [
                [at(0), NONE, NONE, NONE],
                [NONE, NONE, at(3), NONE],
                [NONE, NONE, at(1), at(2)],
                [NONE; 4],
            ]
            .concat()
        );
        assert_eq!(shares(&of), [3.0 / 8.0, 4.0 / 6.0]);
    }
}
