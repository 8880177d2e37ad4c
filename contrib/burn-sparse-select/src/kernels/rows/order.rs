//! Numbers sorted by bucket, and the highest of columns.
//!
//! ```text
//! sort     a cube a group, some tokens at a time: how many of the same bucket are before each and behind it in the tile
//!          first pass: so many of each bucket; sums of those before; second pass: a token goes behind all of its bucket that came before
//!          of more than 1,024 buckets by their low bits first, then by the others; where units of planes vote (order_planes) of more than 256
//! rounds   groups are the rounds of a list, whose places are one behind the other
//! columns  a unit a column: the row of its highest number
//! ```
//!
//! Nothing is added up by atomics: the last token of a bucket in a tile writes for all of them.

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::rows::order_places::{NONE, Sizes, SizesLaunch, fill, put, token_at};
use crate::kernels::rows::order_planes;
use crate::kernels::rows::order_planes::ByPlanes;
use blocksparse_cubecl::args::{address_of, buffer, spread};
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::limits::most_units;
use blocksparse_cubecl::rows::typed::Typed;

/// Units of a cube of a sort, at most.
const UNITS: usize = 256;
/// Bits that a pass sorts by.
const BITS: u32 = 10;
/// Units of a cube of columns.
const COLUMN_UNITS: u32 = 64;

/// What is compiled into a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Pass {
    /// Units of a cube, a power of two up to 2 to the power of the bits.
    units: usize,
    /// Whether tokens are in their own order.
    first: bool,
}

/// What a tile has of the bucket of its token `unit`: before it, and behind it.
#[derive(CubeType, Clone, Copy)]
struct Alike {
    before: u32,
    behind: u32,
}

#[cube]
fn alike(tile: &Shared<[u32]>, own: u32, unit: usize, #[comptime] pass: Pass) -> Alike {
    let mut before = 0u32.runtime();
    let mut behind = 0u32.runtime();
    for other in 0..comptime!(pass.units) {
        let same = select(tile[other] == own, 1u32, 0u32);
        before += select(other < unit, same, 0u32);
        behind += select(other > unit, same, 0u32);
    }
    Alike { before, behind }
}

/// The tokens at places, the places of tokens, and at each place the number of its token among those; of the order before, tokens without what fills up.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sort(
    buckets: &[i32],
    before: &[i32],
    tokens: &mut [i32],
    places: &mut [i32],
    choices: &mut [i32],
    sizes: Sizes,
    #[comptime] pass: Pass,
) {
    let digits = comptime!(1usize << BITS);
    let units = comptime!(pass.units);
    let mut starts = Shared::<[u32]>::new_slice(comptime!(1usize << BITS));
    let mut tile = Shared::<[u32]>::new_slice(comptime!(pass.units));
    // Cubes beyond the last group make it again.
    let group = CUBE_POS.min(sizes.groups - 1);
    let unit = UNIT_POS as usize;
    let tiles = sizes.length.div_ceil(units);
    let own = comptime!((1usize << BITS) / pass.units);
    for i in 0..own {
        starts[unit * own + i] = 0u32.runtime();
    }
    sync_cube();
    for number in 0..tiles {
        let at = number * units + unit;
        let (_, digit) = token_at(
            buckets,
            before,
            at,
            group,
            &sizes,
            BITS,
            comptime!(pass.first),
        );
        tile[unit] = digit;
        sync_cube();
        let alike = alike(&tile, digit, unit, pass);
        if digit != NONE && alike.behind == 0u32 {
            starts[digit as usize] += alike.before + 1u32;
        }
        sync_cube();
    }
    // So many are in the buckets of units before, and in those of the unit before each.
    let mut sum = 0u32.runtime();
    for i in 0..own {
        sum += starts[unit * own + i];
    }
    tile[unit] = sum;
    sync_cube();
    let mut start = 0u32.runtime();
    for other in 0..unit {
        start += tile[other];
    }
    for i in 0..own {
        let count = starts[unit * own + i];
        starts[unit * own + i] = start;
        start += count;
    }
    sync_cube();
    for number in 0..tiles {
        let at = number * units + unit;
        let (token, digit) = token_at(
            buckets,
            before,
            at,
            group,
            &sizes,
            BITS,
            comptime!(pass.first),
        );
        tile[unit] = digit;
        sync_cube();
        let alike = alike(&tile, digit, unit, pass);
        let mut place = alike.before;
        if digit != NONE {
            place += starts[min(digit as usize, digits - 1)];
        }
        sync_cube();
        if digit != NONE {
            if alike.behind == 0u32 {
                starts[digit as usize] = place + 1u32;
            }
            put(tokens, places, choices, group, token, place, &sizes);
        }
    }
    fill(tokens, choices, group, units, &sizes);
}

/// Lists that are sorted once in each round, by other buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rounds {
    /// How many lists.
    pub lists: usize,
    /// Rounds of each.
    pub rounds: usize,
    /// Tokens of a list.
    pub length: usize,
    /// Places of a round, no fewer: those behind the last token have none.
    pub room: usize,
}

impl Rounds {
    /// Lists of so many tokens, and places of a round.
    pub fn new([lists, rounds, length]: [usize; 3], room: usize) -> Self {
        Self {
            lists,
            rounds,
            length,
            room,
        }
    }
}

/// The order of each list by the buckets of each round, of a bucket by number: of i32 `buckets` `[lists, rounds, length]`, each below `count` (what is not
/// counts as the nearest that is),
///
/// - `tokens` `[lists, rounds, room]`: the token at each place, −1 behind the last;
/// - `places` `[lists, length, rounds]`: the place of each token in each round, counted through all rounds of a list;
/// - `choices` `[lists, rounds, room]`: of the token at each place the number of that place among its places, `token · rounds + round`, or a negative number.
///
/// Contiguous.
///
/// # Errors
/// [`KernelError`] if there are more buckets than 2³⁰, or more numbers than kernels index.
pub fn counting_argsort_rounds(
    client: &Client,
    of: Rounds,
    count: usize,
    buckets: &Handle,
    [tokens, places, choices]: [&Handle; 3],
) -> Result<(), KernelError> {
    if count > 1 << 30 {
        return Err(KernelError::limit(
            "the buckets of a sort",
            1u32 << 30,
            count,
        ));
    }
    let Rounds {
        lists,
        rounds,
        length,
        room,
    } = of;
    let groups = lists * rounds;
    let (all, rooms) = (groups * length, groups * room);
    if all * count == 0 {
        return Ok(());
    }
    // Places are counted in 32 bits.
    KernelError::check_u32("the numbers of a sort", 2 * all.max(rooms))?;
    let address = address_of(client, all.max(rooms))?;
    let cubes = spread(client, groups as u64)?;
    let most = most_units(client.properties());
    let by_planes = ByPlanes::new(client.properties());
    let units = match by_planes {
        Some(by) => by.units(),
        None => UNITS.min(1 << most.ilog2()),
    };
    let of_pass = by_planes.map_or(BITS, |_| order_planes::BITS);
    let bits = (count - 1).checked_ilog2().map_or(1, |bits| bits + 1);
    let passes = bits.div_ceil(of_pass);
    let mut before = buckets.clone();
    for number in 0..passes {
        let is_last = number + 1 == passes;
        // On the way no places are left out, and all that is read again are tokens.
        let made = match is_last {
            true => [tokens.clone(), places.clone(), choices.clone()],
            false => [(); 3].map(|_| client.empty(all * size_of::<i32>())),
        };
        let (room, rooms) = if is_last {
            (room, rooms)
        } else {
            (length, all)
        };
        let sizes = SizesLaunch::new(groups, length, rounds, room, count as u32, number * of_pass);
        let (dim, first) = (CubeDim::new_1d(units as u32), number == 0);
        macro_rules! launch {
            ($kernel:path, $pass:expr) => {
                // SAFETY: a cube reads and writes numbers of its own group; places are those of a permutation of its tokens, so below its length. The order
                // before is that of a pass before, or is not read.
                unsafe {
                    $kernel(
                        client,
                        cubes.clone(),
                        dim,
                        address,
                        buffer(buckets, all),
                        buffer(&before, all),
                        buffer(&made[0], rooms),
                        buffer(&made[1], all),
                        buffer(&made[2], rooms),
                        sizes,
                        $pass,
                    )
                }
            };
        }
        match by_planes {
            Some(by) => launch!(
                order_planes::sort_by_planes::launch_unchecked,
                ByPlanes { first, ..by }
            ),
            None => launch!(sort::launch_unchecked, Pass { units, first }),
        }
        let [tokens, ..] = made;
        before = tokens;
    }
    Ok(())
}

/// Numbers `[groups, rows, columns]`.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct ColumnSizes {
    rows: usize,
    columns: usize,
    /// Groups whose rows are counted through.
    heads: usize,
    count: usize,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn highest_row<E: Float>(
    numbers: &[E],
    found: &mut [i32],
    sizes: ColumnSizes,
    #[define(E)] _element: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < sizes.count {
        let group = at / sizes.columns;
        let first = group * sizes.rows * sizes.columns + at % sizes.columns;
        let mut highest = numbers[first];
        let mut row = 0usize.runtime();
        for other in 1..sizes.rows {
            let number = numbers[first + other * sizes.columns];
            let is_higher = number > highest;
            highest = select(is_higher, number, highest);
            row = select(is_higher, other, row);
        }
        found[at] = (group % sizes.heads * sizes.rows + row) as i32;
    }
}

/// Of each column of `[batch · heads, rows, columns]` the row of its highest number, of equal ones the first, counted through the rows of all heads: i32
/// `[batch · heads, columns]`, contiguous.
///
/// # Errors
/// [`KernelError`] if there are more numbers than kernels index.
pub fn argmax_rows(
    client: &Client,
    [batch, heads]: [usize; 2],
    [rows, columns]: [usize; 2],
    (numbers, element): Typed,
    found: &Handle,
) -> Result<(), KernelError> {
    let count = batch * heads * columns;
    if count * rows == 0 {
        return Ok(());
    }
    let address = address_of(client, count * rows)?;
    let cubes = spread(client, count.div_ceil(COLUMN_UNITS as usize) as u64)?;
    // SAFETY: a unit writes its own number, below `count`, and reads its column.
    unsafe {
        highest_row::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(COLUMN_UNITS),
            address,
            buffer(numbers, count * rows),
            buffer(found, count),
            ColumnSizesLaunch::new(rows, columns, heads, count),
            element,
        );
    }
    Ok(())
}
