//! Numbers sorted by bucket, and the places of numbers in ascending lists.
//!
//! ```text
//! sort     a cube a group, some tokens at a time: how many of the same bucket are before each and behind it in the tile
//!          first pass: so many of each bucket; sums of those before; second pass: a token goes behind all of its bucket that came before
//!          of more than 1,024 buckets by their low bits first, then by the others
//! places   a unit a token and list: looks the token up in the list
//! ```
//!
//! Nothing is added up by atomics: the last token of a bucket in a tile writes for all of them.

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::args::{address_of, buffer, spread};
use crate::kernels::error::KernelError;

/// Units of a cube of a sort, at most.
const UNITS: usize = 256;
/// Bits that a pass sorts by.
const BITS: u32 = 10;
/// Units of a cube of places.
const PLACE_UNITS: u32 = 64;
/// The bucket of what is no token.
const NONE: u32 = 0xffff_ffff;

/// What is compiled into a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Pass {
    /// Units of a cube, a power of two up to 2 to the power of the bits.
    units: usize,
    /// Whether tokens are in their own order.
    first: bool,
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    groups: usize,
    length: usize,
    /// Buckets.
    count: u32,
    /// The lowest bit that is sorted by.
    shift: u32,
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

/// The token at place `at` of the order before, and what it is sorted by.
#[cube]
fn token_at(
    buckets: &[i32],
    before: &[i32],
    at: usize,
    first: usize,
    sizes: &Sizes,
    #[comptime] pass: Pass,
) -> (usize, u32) {
    let mut token = at;
    let mut digit = NONE.runtime();
    if at < sizes.length {
        if comptime!(!pass.first) {
            token = before[first + at] as usize;
        }
        let bucket = max(buckets[first + token], 0i32) as u32;
        let bucket = min(bucket, sizes.count - 1u32);
        digit = (bucket >> sizes.shift) & comptime!((1u32 << BITS) - 1);
    }
    (token, digit)
}

/// `order` is `[2, groups, length]`: the token at each place, and the place of each token.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sort(buckets: &[i32], before: &[i32], order: &mut [i32], sizes: Sizes, #[comptime] pass: Pass) {
    let digits = comptime!(1usize << BITS);
    let units = comptime!(pass.units);
    let mut starts = Shared::<[u32]>::new_slice(comptime!(1usize << BITS));
    let mut tile = Shared::<[u32]>::new_slice(comptime!(pass.units));
    // Cubes beyond the last group make it again.
    let group = CUBE_POS.min(sizes.groups - 1);
    let first = group * sizes.length;
    let all = sizes.groups * sizes.length;
    let unit = UNIT_POS as usize;
    let tiles = sizes.length.div_ceil(units);
    let own = comptime!((1usize << BITS) / pass.units);
    for i in 0..own {
        starts[unit * own + i] = 0u32.runtime();
    }
    sync_cube();
    for number in 0..tiles {
        let (_, digit) = token_at(buckets, before, number * units + unit, first, &sizes, pass);
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
        let (token, digit) = token_at(buckets, before, number * units + unit, first, &sizes, pass);
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
            order[first + place as usize] = token as i32;
            order[all + first + token] = place as i32;
        }
    }
}

/// The order of each group by buckets, of a bucket by number: `order`, i32 `[2, groups, length]`, is the token at each place, and behind all of those the
/// place of each token. `buckets` are i32 `[groups, length]`, contiguous, each below `count`; what is not counts as the nearest that is.
///
/// # Errors
/// [`KernelError`] if there are more buckets than 2³⁰, or more numbers than kernels index.
pub fn sort_buckets(
    client: &Client,
    [groups, length]: [usize; 2],
    count: usize,
    buckets: &Handle,
    order: &Handle,
) -> Result<(), KernelError> {
    if count > 1 << 30 {
        return Err(KernelError::limit(
            "the buckets of a sort",
            1u32 << 30,
            count,
        ));
    }
    let all = groups * length;
    if all * count == 0 {
        return Ok(());
    }
    // Places are counted in 32 bits.
    KernelError::check_u32("the numbers of a sort", 2 * all)?;
    let address = address_of(client, 2 * all)?;
    let cubes = spread(client, groups as u64)?;
    let hardware = &client.properties().hardware;
    let most = (hardware.max_units_per_cube as usize).min(hardware.max_cube_dim.0 as usize);
    let units = UNITS.min(1 << most.max(1).ilog2());
    let bits = (count - 1).checked_ilog2().map_or(1, |bits| bits + 1);
    let passes = bits.div_ceil(BITS);
    let mut before = buckets.clone();
    for number in 0..passes {
        let made = match number + 1 == passes {
            true => order.clone(),
            false => client.empty(2 * all * size_of::<i32>()),
        };
        // SAFETY: a cube reads and writes numbers of its own group; places are those of a permutation of its tokens, so below its length. The order before is
        // that of a pass before, or is not read.
        unsafe {
            sort::launch_unchecked(
                client,
                cubes.clone(),
                CubeDim::new_1d(units as u32),
                address,
                buffer(buckets, all),
                buffer(&before, all),
                buffer(&made, 2 * all),
                SizesLaunch::new(groups, length, count as u32, number * BITS),
                Pass {
                    units,
                    first: number == 0,
                },
            );
        }
        before = made;
    }
    Ok(())
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct ListSizes {
    lists: usize,
    width: usize,
    length: usize,
    count: usize,
}

/// The number that has the place `list · width + place in it`, or −1.
#[cube(launch_unchecked, address_type = "dynamic")]
fn places(lists: &[i32], places: &mut [i32], sizes: ListSizes) {
    let at = ABSOLUTE_POS;
    if at < sizes.count {
        let list = at % sizes.lists;
        let number = at / sizes.lists % sizes.length;
        let group = at / sizes.lists / sizes.length;
        let first = (group * sizes.lists + list) * sizes.width;
        let mut low = 0usize.runtime();
        let mut high = sizes.width;
        while low < high {
            let middle = (low + high) / 2;
            if lists[first + middle] < number as i32 {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let found = low < sizes.width && lists[first + low.min(sizes.width - 1)] == number as i32;
        let place = (list * sizes.width + low) as i32;
        places[at] = select(found, place, -1i32);
    }
}

/// Where each number below `length` stands in lists, `list · width` and its place in the list, −1 where it is not: i32 `[groups, length, lists]`, of i32
/// `[groups, lists, width]`, contiguous, ascending, each number once.
///
/// # Errors
/// [`KernelError`] if there are more numbers than kernels index.
pub fn places_in_lists(
    client: &Client,
    [groups, lists, width]: [usize; 3],
    length: usize,
    given: &Handle,
    made: &Handle,
) -> Result<(), KernelError> {
    let count = groups * length * lists;
    if count * width == 0 {
        return Ok(());
    }
    let all = groups * lists * width;
    let address = address_of(client, count.max(all))?;
    let cubes = spread(client, count.div_ceil(PLACE_UNITS as usize) as u64)?;
    // SAFETY: a unit writes its own number, below `count`, and reads the list that it asks for, below `all`.
    unsafe {
        places::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(PLACE_UNITS),
            address,
            buffer(given, all),
            buffer(made, count),
            ListSizesLaunch::new(lists, width, length, count),
        );
    }
    Ok(())
}
