//! Blocks of neighbouring rows: their means, and how alike their rows are.

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::norm_shape::{LANE_NUMBERS, has, place, sum_of, tile_of, widest};
use super::only::{OnlyLists, is_wanted, numbers_of};
use super::tile::{Combine, RowTile, across_lanes};
use super::typed::Typed;
use crate::kernels::args::{address_of, buffer, optional, spread};
use crate::kernels::error::KernelError;

/// Shorter rows have no direction.
const SHORTEST: f32 = 1e-18;

/// Rows that a unit loads before it adds the first of them: what is in flight is what memory's speed depends on.
const AT_A_TIME: usize = 4;

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct BlockKind {
    tile: RowTile,
    /// Whether the squared lengths of the means of directions are wanted, not the means.
    alike: bool,
    /// Whether lists are wanted that have at least a limit, where not all are.
    above: bool,
}

/// Lists of rows, and how they are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RowBlocks {
    /// Sequences.
    pub lists: usize,
    /// Rows of each, at least one.
    pub rows: usize,
    /// Numbers of a row.
    pub width: usize,
    /// Rows of a block; a sequence's last may have fewer.
    pub block: usize,
}

impl RowBlocks {
    /// Of so many lists of rows of a width.
    pub fn new(lists: usize, [rows, width]: [usize; 2], block: usize) -> Self {
        Self {
            lists,
            rows,
            width,
            block,
        }
    }

    /// Blocks of a sequence.
    pub fn blocks(&self) -> usize {
        self.rows.div_ceil(self.block)
    }
}

/// Sizes of a tensor's blocks.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// Of a list.
    rows: usize,
    blocks: usize,
    /// Blocks of all lists.
    count: usize,
}

/// A cube has a block: `output` `[lists, blocks, width]`, or `[lists, blocks]`. Those behind the last have blocks of the second tensor, if there is one, whose
/// rows and blocks are as wide.
#[cube(launch_unchecked, address_type = "dynamic")]
fn of_blocks<E: Float, N: Size>(
    x: &[Vector<E, N>],
    second: ComptimeOption<Box<[Vector<E, N>]>>,
    less: ComptimeOption<Box<[Vector<f32, N>]>>,
    only: ComptimeOption<Box<[f32]>>,
    output: &mut [f32],
    second_output: ComptimeOption<Box<[f32]>>,
    sizes: Sizes,
    second_sizes: Sizes,
    block: usize,
    limit: f32,
    #[comptime] c: BlockKind,
    #[define(E)] _element: ElemType,
) {
    let tile = comptime!(c.tile);
    let vectors = comptime!(tile.lane_vectors());
    let row_vectors = comptime!(tile.row_vectors);
    let zero = Vector::<f32, N>::zeroed();
    let is_second = comptime!(second.is_some()) && CUBE_POS >= sizes.count;
    let rows = select(is_second, second_sizes.rows, sizes.rows);
    let blocks = select(is_second, second_sizes.blocks, sizes.blocks);
    let count = select(is_second, second_sizes.count, sizes.count);
    // Cubes beyond the last block do it again.
    let at_block = (CUBE_POS - select(is_second, sizes.count, 0usize)).min(count - 1);
    let list = at_block / blocks;
    let first = at_block % blocks * block;
    let members = min(block, rows - first);
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(tile.lanes);
    let group = unit / comptime!(tile.lanes);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(tile.shared()));
    let mut sums = Array::<Vector<f32, N>>::new(vectors);
    #[unroll]
    for i in 0..vectors {
        sums[i] = zero;
    }
    // Every unit meets every barrier: groups behind the last row have it again, and it counts for nothing.
    let mut own = Array::<Vector<E, N>>::new(comptime!(AT_A_TIME * vectors));
    let mut steps = members.div_ceil(comptime!(AT_A_TIME * tile.rows));
    if !is_wanted(&only, list, limit, comptime!(c.above)) {
        steps = 0usize.runtime();
    }
    for step in 0..steps {
        let first_row = step * comptime!(AT_A_TIME * tile.rows) + group;
        #[unroll]
        for r in 0..comptime!(AT_A_TIME) {
            let row = first_row + comptime!(r * tile.rows);
            let start = (list * rows + first + min(row, members - 1)) * row_vectors;
            #[unroll]
            for i in 0..vectors {
                let at = start + place(lane, i, tile);
                let into = comptime!(r * vectors + i);
                #[comptime]
                match &second {
                    ComptimeOption::Some(second) => {
                        if is_second {
                            own[into] = second[at];
                        } else {
                            own[into] = x[at];
                        }
                    }
                    ComptimeOption::None => {
                        own[into] = x[at];
                    }
                }
            }
        }
        #[unroll]
        for r in 0..comptime!(AT_A_TIME) {
            let row = first_row + comptime!(r * tile.rows);
            let mut factor = select(row < members, 1.0f32, 0.0f32);
            let mut values = Array::<Vector<f32, N>>::new(vectors);
            #[unroll]
            for i in 0..vectors {
                let mut value = Vector::<f32, N>::cast_from(own[comptime!(r * vectors + i)]);
                #[comptime]
                match &less {
                    ComptimeOption::Some(less) => {
                        value -= less[list * row_vectors + place(lane, i, tile)];
                    }
                    ComptimeOption::None => {}
                }
                values[i] = select(has(lane, i, tile), value, zero);
            }
            if comptime!(c.alike) {
                let mut total = zero;
                #[unroll]
                for i in 0..vectors {
                    total += values[i] * values[i];
                }
                let square =
                    across_lanes::<f32>(sum_of::<f32, N>(total), &mut shared, tile, Combine::Sum);
                factor /= max(square.sqrt(), comptime!(SHORTEST).runtime());
            }
            #[unroll]
            for i in 0..vectors {
                sums[i] += values[i] * Vector::<f32, N>::empty().fill(factor);
            }
        }
    }
    let part = 1.0f32 / f32::cast_from(members);
    if comptime!(c.alike) {
        let mut groups = Shared::<[Vector<f32, N>]>::new_slice(comptime!(tile.units() * vectors));
        #[unroll]
        for i in 0..vectors {
            groups[unit * vectors + i] = sums[i];
        }
        sync_cube();
        // All groups have the same sums then, added in the same order.
        let mut total = zero;
        #[unroll]
        for i in 0..vectors {
            let mut sum = groups[lane * vectors + i];
            for other in 1..comptime!(tile.rows) {
                sum += groups[(other * comptime!(tile.lanes) + lane) * vectors + i];
            }
            let mean = sum * Vector::<f32, N>::empty().fill(part);
            total += mean * mean;
        }
        let square = across_lanes::<f32>(sum_of::<f32, N>(total), &mut shared, tile, Combine::Sum);
        if unit == 0 {
            output[at_block] = square;
        }
    } else {
        let width = row_vectors * N::value();
        let mut numbers =
            Shared::<[f32]>::new_slice(comptime!(tile.rows * tile.row_vectors * tile.vector));
        #[unroll]
        for i in 0..vectors {
            if has(lane, i, tile) {
                let at = group * width + place(lane, i, tile) * N::value();
                #[unroll]
                for n in 0..N::value() {
                    numbers[at + n] = sums[i].extract(n);
                }
            }
        }
        sync_cube();
        let first = at_block * width;
        #[comptime]
        match second_output {
            ComptimeOption::Some(mut second_output) => {
                if is_second {
                    write_means(&numbers, &mut second_output, first, part, width, tile);
                } else {
                    write_means(&numbers, output, first, part, width, tile);
                }
            }
            ComptimeOption::None => {
                write_means(&numbers, output, first, part, width, tile);
            }
        }
    }
}

/// A unit adds up a channel of all groups' sums, and writes `part` of it.
#[cube]
fn write_means(
    numbers: &Shared<[f32]>,
    output: &mut [f32],
    first: usize,
    part: f32,
    width: usize,
    #[comptime] tile: RowTile,
) {
    let mut channel = UNIT_POS as usize;
    while channel < width {
        let mut sum = numbers[channel];
        for other in 1..comptime!(tile.rows) {
            sum += numbers[channel + other * width];
        }
        output[first + channel] = sum * part;
        channel += comptime!(tile.units());
    }
}

/// The mean of each block of rows: `means` `[lists, blocks, width]`, f32. `x` is contiguous `[lists, rows, width]`; sums are f32.
///
/// # Errors
/// [`KernelError`] if the device does not index as many numbers, or has no cube for a row.
pub fn block_means(
    client: &Client,
    x: Typed,
    of: &RowBlocks,
    means: &Handle,
) -> Result<(), KernelError> {
    block_means_of_lists(client, x, of, None, means)
}

/// [`block_means`], where only some lists are wanted: the rows of others are not read, and their means are 0.
///
/// # Errors
/// As [`block_means`].
pub(in crate::kernels) fn block_means_of_lists(
    client: &Client,
    x: Typed,
    of: &RowBlocks,
    only: Option<OnlyLists>,
    means: &Handle,
) -> Result<(), KernelError> {
    let beside = Beside {
        only,
        ..Beside::default()
    };
    launch(client, x.1, (x.0, of, means), beside, false)
}

/// [`block_means`] of two tensors of one type by one launch: of the second, `[lists, rows, width]`, with blocks of as many rows.
///
/// # Errors
/// As [`block_means`].
pub fn block_means_of_two(
    client: &Client,
    element: ElemType,
    (x, of, means): (&Handle, &RowBlocks, &Handle),
    (second, [lists, rows], second_means): (&Handle, [usize; 2], &Handle),
) -> Result<(), KernelError> {
    let of_second = RowBlocks { lists, rows, ..*of };
    let (first, second) = ((x, of, means), (second, &of_second, second_means));
    if of.lists * of.rows * lists * rows == 0 {
        launch(client, element, first, Beside::default(), false)?;
        return launch(client, element, second, Beside::default(), false);
    }
    let beside = Beside {
        second: Some(second),
        ..Beside::default()
    };
    launch(client, element, first, beside, false)
}

/// The mean of the cosines of all pairs of rows of each block, which is the square of the length of their directions' mean: `alike` `[lists, blocks]`, f32.
/// Rows are taken less `less` `[lists, width]`, f32, if there is one.
///
/// # Errors
/// As [`block_means`].
pub fn block_likeness(
    client: &Client,
    x: Typed,
    of: &RowBlocks,
    less: Option<&Handle>,
    alike: &Handle,
) -> Result<(), KernelError> {
    let beside = Beside {
        less,
        ..Beside::default()
    };
    launch(client, x.1, (x.0, of, alike), beside, true)
}

/// Rows, how they are cut, and where results go.
type Blocked<'a> = (&'a Handle, &'a RowBlocks, &'a Handle);

/// What a launch may have beside its rows.
#[derive(Default)]
struct Beside<'a> {
    second: Option<Blocked<'a>>,
    less: Option<&'a Handle>,
    only: Option<OnlyLists<'a>>,
}

fn launch(
    client: &Client,
    element: ElemType,
    (x, of, output): Blocked,
    beside: Beside,
    alike: bool,
) -> Result<(), KernelError> {
    let Beside { second, less, only } = beside;
    let f32 = less.map(|_| ElemType::Float(FloatKind::F32));
    let widest = widest(f32.into_iter().chain([element]));
    let tile = tile_of(client.properties(), of.width, widest, LANE_NUMBERS)?;
    let width = if alike { 1 } else { of.width };
    let above = only.is_some_and(|only| only.above);
    let tensors = || {
        [Some(of), second.map(|(_, of, _)| of)]
            .into_iter()
            .flatten()
    };
    let numbers = |of: &RowBlocks| of.lists * of.rows * of.width;
    let address = address_of(client, tensors().map(numbers).max().unwrap_or(0))?;
    let count = |of: &RowBlocks| of.lists * of.blocks();
    let all = tensors().map(count).sum::<usize>();
    let cubes = spread(client, all as u64)?;
    if all == 0 {
        return Ok(());
    }
    let vectors = |of: &RowBlocks| of.lists * of.rows * tile.row_vectors;
    let sizes = |of: &RowBlocks| SizesLaunch::new(of.rows, of.blocks(), count(of));
    let of_second = second.map_or(of, |(_, of, _)| of);
    // SAFETY: a unit reads its vectors of rows of its block, which are below `rows`, and of its list; one unit writes each number of a block.
    unsafe {
        of_blocks::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(tile.units() as u32),
            address,
            tile.vector,
            buffer(x, vectors(of)),
            optional(second.map(|(x, ..)| x), vectors(of_second)),
            optional(less, of.lists * tile.row_vectors),
            numbers_of(only),
            buffer(output, count(of) * width),
            optional(second.map(|(.., output)| output), count(of_second) * width),
            sizes(of),
            sizes(of_second),
            of.block,
            only.map_or(0.0, |only| only.limit),
            BlockKind { tile, alike, above },
            element,
        );
    }
    Ok(())
}
