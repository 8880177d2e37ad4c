//! Means of blocks of adjacent rows, and the self-similarity of these blocks.

use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::rows::norm_shape::{LANE_NUMBERS, has, place, sum_of, tile_of};
use blocksparse_cubecl::shared::row_tile::{Combine, RowTile, across_lanes};

/// Lower bound of a row's norm, which avoids division by zero.
const SHORTEST: f32 = 1e-18;

/// Number of rows that a unit loads before it adds the first of them: for blocks with enough rows, and for others. Memory throughput depends on the number of
/// loads in flight.
const AT_A_TIME: [usize; 2] = [8, 4];

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct BlockKind {
    tile: RowTile,
    /// Number of rows that a unit loads at a time.
    rows: usize,
    /// True if only lists at or above a limit are computed, instead of those below it.
    above: bool,
}

/// Sizes of a tensor of lists of rows, and of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RowBlocks {
    /// Number of lists.
    pub lists: usize,
    /// Number of rows of a list, at least one.
    pub rows: usize,
    /// Number of elements of a row.
    pub width: usize,
    /// Number of rows of a block; a list's last block may have fewer.
    pub block: usize,
}

impl RowBlocks {
    /// Creates the sizes of `lists` lists.
    pub fn new(lists: usize, [rows, width]: [usize; 2], block: usize) -> Self {
        Self {
            lists,
            rows,
            width,
            block,
        }
    }

    /// Returns the number of blocks of a list.
    pub fn blocks(&self) -> usize {
        self.rows.div_ceil(self.block)
    }
}

/// Sizes of a tensor's blocks.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// Number of rows of a list.
    rows: usize,
    blocks: usize,
    /// Number of blocks of all lists.
    count: usize,
}

/// Computes for each block, one per cube, its mean in `means` `[lists, blocks, width]` and optionally the squared length of its mean direction in `alike`
/// `[lists, blocks]`. Cubes after those of the first tensor process an optional second tensor of the same row width and block size. `less` applies to the first
/// tensor.
#[cube(launch_unchecked, address_type = "dynamic")]
fn of_blocks<E: Float, N: Size>(
    x: &[Vector<E, N>],
    second: ComptimeOption<Box<[Vector<E, N>]>>,
    less: ComptimeOption<Box<[f32]>>,
    only: ComptimeOption<Box<[f32]>>,
    means: &mut [f32],
    second_means: ComptimeOption<Box<[f32]>>,
    alike: ComptimeOption<Box<[f32]>>,
    second_alike: ComptimeOption<Box<[f32]>>,
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
    let by_direction = comptime!(alike.is_some());
    let zero = Vector::<f32, N>::zeroed();
    let is_second = comptime!(second.is_some()) && CUBE_POS >= sizes.count;
    let rows = select(is_second, second_sizes.rows, sizes.rows);
    let blocks = select(is_second, second_sizes.blocks, sizes.blocks);
    let count = select(is_second, second_sizes.count, sizes.count);
    // Surplus cubes repeat the last block.
    let at_block = (CUBE_POS - select(is_second, sizes.count, 0usize)).min(count - 1);
    let list = at_block / blocks;
    let first = at_block % blocks * block;
    let members = min(block, rows - first);
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(tile.lanes);
    let group = unit / comptime!(tile.lanes);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(tile.shared()));
    let mut sums = Array::<Vector<f32, N>>::new(vectors);
    let mut directions = Array::<Vector<f32, N>>::new(vectors);
    let mut lower = Array::<Vector<f32, N>>::new(vectors);
    #[unroll]
    for i in 0..vectors {
        sums[i] = zero;
        directions[i] = zero;
        lower[i] = zero;
        #[comptime]
        match &less {
            ComptimeOption::Some(less) => {
                if !is_second {
                    let start = (list * row_vectors + place(lane, i, tile)) * N::value();
                    let mut vector = zero;
                    #[unroll]
                    for n in 0..N::value() {
                        vector.insert(n, less[start + n]);
                    }
                    lower[i] = vector;
                }
            }
            ComptimeOption::None => {}
        }
    }
    // Every unit must reach every barrier: groups after the last row repeat it with weight 0.
    let mut own = Array::<Vector<E, N>>::new(comptime!(c.rows * vectors));
    let mut steps = members.div_ceil(comptime!(c.rows * tile.rows));
    if !is_wanted(&only, list, limit, comptime!(c.above)) {
        steps = 0usize.runtime();
    }
    for step in 0..steps {
        let first_row = step * comptime!(c.rows * tile.rows) + group;
        #[unroll]
        for r in 0..comptime!(c.rows) {
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
        for r in 0..comptime!(c.rows) {
            let row = first_row + comptime!(r * tile.rows);
            let factor = select(row < members, 1.0f32, 0.0f32);
            let mut values = Array::<Vector<f32, N>>::new(vectors);
            #[unroll]
            for i in 0..vectors {
                let mut value = Vector::<f32, N>::cast_from(own[comptime!(r * vectors + i)]);
                #[comptime]
                match &less {
                    ComptimeOption::Some(_) => value -= lower[i],
                    ComptimeOption::None => {}
                }
                values[i] = select(has(lane, i, tile), value, zero);
                sums[i] += values[i] * Vector::<f32, N>::empty().fill(factor);
            }
            if comptime!(by_direction) {
                let mut total = zero;
                #[unroll]
                for i in 0..vectors {
                    total += values[i] * values[i];
                }
                let square =
                    across_lanes::<f32>(sum_of::<f32, N>(total), &mut shared, tile, Combine::Sum);
                let part = min(square.inverse_sqrt(), comptime!(1.0 / SHORTEST).runtime());
                let factor = Vector::<f32, N>::empty().fill(factor * part);
                #[unroll]
                for i in 0..vectors {
                    directions[i] += values[i] * factor;
                }
            }
        }
    }
    let part = 1.0f32 / f32::cast_from(members);
    let width = row_vectors * N::value();
    let mut numbers =
        Shared::<[f32]>::new_slice(comptime!(tile.rows * tile.row_vectors * tile.vector));
    share_sums::<N>(&sums, &mut numbers, tile);
    sync_cube();
    let first = at_block * width;
    #[comptime]
    match second_means {
        ComptimeOption::Some(mut second_means) => {
            if is_second {
                write_means(&numbers, &mut second_means, first, part, width, tile);
            } else {
                write_means(&numbers, means, first, part, width, tile);
            }
        }
        ComptimeOption::None => {
            write_means(&numbers, means, first, part, width, tile);
        }
    }
    if comptime!(by_direction) {
        sync_cube();
        share_sums::<N>(&directions, &mut numbers, tile);
        sync_cube();
        let mut square = 0.0f32.runtime();
        let mut channel = unit;
        while channel < width {
            let mean = sum_of_channel(&numbers, channel, width, tile) * part;
            square += mean * mean;
            channel += comptime!(tile.units());
        }
        let mut squares = Shared::<[f32]>::new_slice(comptime!(tile.units()));
        squares[unit] = square;
        sync_cube();
        let mut total = 0.0f32.runtime();
        for row in 0..comptime!(tile.rows) {
            total += squares[row * comptime!(tile.lanes) + lane];
        }
        let square = across_lanes::<f32>(total, &mut shared, tile, Combine::Sum);
        if unit == 0 {
            #[comptime]
            match alike {
                ComptimeOption::Some(mut alike) =>
                {
                    #[comptime]
                    match second_alike {
                        ComptimeOption::Some(mut second_alike) => {
                            if is_second {
                                second_alike[at_block] = square;
                            } else {
                                alike[at_block] = square;
                            }
                        }
                        ComptimeOption::None => {
                            alike[at_block] = square;
                        }
                    }
                }
                ComptimeOption::None => {}
            }
        }
    }
}

/// Writes a unit's sums to its group's row in shared memory.
#[cube]
fn share_sums<N: Size>(
    sums: &Array<Vector<f32, N>>,
    numbers: &mut Shared<[f32]>,
    #[comptime] tile: RowTile,
) {
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(tile.lanes);
    let group = unit / comptime!(tile.lanes);
    #[unroll]
    for i in 0..comptime!(tile.lane_vectors()) {
        if has(lane, i, tile) {
            let vector = group * comptime!(tile.row_vectors) + place(lane, i, tile);
            #[unroll]
            for n in 0..N::value() {
                numbers[vector * N::value() + n] = sums[i].extract(n);
            }
        }
    }
}

/// Sums a channel over all groups.
#[cube]
fn sum_of_channel(
    numbers: &Shared<[f32]>,
    channel: usize,
    width: usize,
    #[comptime] tile: RowTile,
) -> f32 {
    let mut sum = numbers[channel];
    for other in 1..comptime!(tile.rows) {
        sum += numbers[channel + other * width];
    }
    sum
}
/// Sums the channels over all groups and writes each times `part`.
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
        output[first + channel] = sum_of_channel(numbers, channel, width, tile) * part;
        channel += comptime!(tile.units());
    }
}

/// Rows in blocks, and the destination of their means.
#[derive(Clone, Copy, Debug)]
pub struct Blocked<'a> {
    /// Contiguous `[lists, rows, width]`.
    pub x: &'a Handle,
    /// Sizes of the rows and blocks.
    pub of: &'a RowBlocks,
    /// `[lists, blocks, width]`, f32.
    pub means: &'a Handle,
}

/// Optional inputs and outputs of [`block_means`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Beside<'a> {
    /// A second tensor with the same dtype, block size and row width.
    pub second: Option<Blocked<'a>>,
    /// Destinations of the mean cosine of all pairs of a block's rows, which equals the squared length of their mean direction: `[lists, blocks]`, f32, one per
    /// tensor.
    pub alike: Option<[&'a Handle; 2]>,
    /// Vectors to subtract from the rows of the first tensor: `[lists, width]`, f32.
    pub less: Option<&'a Handle>,
    /// Lists of the first tensor to compute. Rows of other lists are not read, and their means are 0.
    pub only: Option<OnlyLists<'a>>,
}

/// Computes the mean of each block of rows, and the optional outputs; sums are f32.
///
/// # Errors
/// [`KernelError`] if the device cannot index the elements, or a row is too wide for a cube.
pub fn block_means(
    client: &Client,
    element: ElemType,
    first: Blocked,
    beside: Beside,
) -> Result<(), KernelError> {
    let Beside {
        second,
        alike,
        less,
        only,
    } = beside;
    let Blocked { x, of, means } = first;
    let tile = tile_of(client.properties(), of.width, element, LANE_NUMBERS)?;
    let [most, least] = AT_A_TIME;
    let rows = if of.block >= most * tile.rows {
        most
    } else {
        least
    };
    let above = only.is_some_and(|only| only.above);
    let of_second = second.map_or(RowBlocks { lists: 0, ..*of }, |second| *second.of);
    let both = [*of, of_second];
    let numbers = both.map(|of| of.lists * of.rows * of.width);
    let address = address_of(client, numbers[0].max(numbers[1]))?;
    let count = both.map(|of| of.lists * of.blocks());
    let cubes = spread(client, (count[0] + count[1]) as u64)?;
    let second = second.filter(|_| count[1] > 0);
    match (count[0], second) {
        (0, None) => return Ok(()),
        (0, Some(second)) => {
            let beside = Beside {
                alike: alike.map(|[_, alike]| [alike; 2]),
                ..Beside::default()
            };
            return block_means(client, element, second, beside);
        }
        _ => {}
    }
    let vectors = both.map(|of| of.lists * of.rows * tile.row_vectors);
    let sizes = |i: usize| SizesLaunch::new(both[i].rows, both[i].blocks(), count[i]);
    // SAFETY: a unit reads vectors of rows of its own block, which are below `rows` and in its list; each element of a block has one writer.
    unsafe {
        of_blocks::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(tile.units() as u32),
            address,
            tile.vector,
            buffer(x, vectors[0]),
            optional(second.map(|second| second.x), vectors[1]),
            optional(less, of.lists * of.width),
            numbers_of(only),
            buffer(means, count[0] * of.width),
            optional(second.map(|second| second.means), count[1] * of.width),
            optional(alike.map(|[alike, _]| alike), count[0]),
            optional(second.and(alike.map(|[_, alike]| alike)), count[1]),
            sizes(0),
            sizes(1),
            of.block,
            only.map_or(0.0, |only| only.limit),
            BlockKind { tile, rows, above },
            element,
        );
    }
    Ok(())
}

/// Condition that selects lists.
#[derive(Clone, Copy, Debug)]
pub struct OnlyLists<'a> {
    /// One number per list: `[lists]`, f32.
    pub numbers: &'a Handle,
    pub lists: usize,
    pub limit: f32,
    /// True to select lists whose number is at least the limit, false for all others.
    pub above: bool,
}

/// Returns the lists' numbers as a launch argument.
pub(crate) fn numbers_of<T: LaunchArg<RuntimeArg = BufferArg>>(
    only: Option<OnlyLists>,
) -> ComptimeOptionArgs<T> {
    optional(
        only.map(|only| only.numbers),
        only.map_or(0, |only| only.lists),
    )
}

/// Returns whether a list is selected. Without numbers every list is.
#[cube]
pub(crate) fn is_wanted(
    only: &ComptimeOption<Box<[f32]>>,
    list: usize,
    limit: f32,
    #[comptime] above: bool,
) -> bool {
    let mut wanted = true.runtime();
    #[comptime]
    match only {
        ComptimeOption::Some(numbers) => {
            let is_above = numbers[list] >= limit;
            wanted = match comptime!(above) {
                true => is_above,
                false => !is_above,
            };
        }
        ComptimeOption::None => {}
    }
    wanted
}
