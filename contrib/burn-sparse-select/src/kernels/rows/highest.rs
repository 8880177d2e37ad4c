//! The highest numbers of rows that a cube holds.
//!
//! ```text
//! v                               the `most`th highest number in its order (`key`), or a lower one that as many reach: digit by digit (highest_digits), or
//!                                 bit by bit: v + bit, if at least `most` numbers reach it
//! words                           32 neighbouring numbers each: bits of those above v, and of those that equal it
//! a unit a word                   those above, and of those that equal v the first, up to `most`; so many are in words before
//! ```
//!
//! A cube has a row, whose units hold every so many numbers of it: neighbours load, count and write neighbours. A count is a sum of planes, and one barrier;
//! places in the list are bits that are counted. Nothing is sorted. Rows that are longer than a cube holds are [`topk_rows`]'s of pages.
//!
//! [`topk_rows`]: crate::kernels::rows::topk_rows

// What is known at compile time stays apart from what is not.
#![allow(clippy::collapsible_if)]

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::rows::highest_digits::{Digits, bound_by_digits};
use blocksparse_cubecl::arch::planes;
use blocksparse_cubecl::args::{address_of, buffer, spread};
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::rows::norm_shape::check_buffers;
use blocksparse_cubecl::shared::order_key::key;
use blocksparse_cubecl::shared::unit_sums::{UnitSums, before_and_all};
use blocksparse_cubecl::tuning::Tuning;

/// Numbers of a word, and of a unit at most: so there are no more words than units.
const WORD: usize = 32;
/// Units of a cube, at least and at most.
const UNITS: [usize; 2] = [64, 1024];
/// Units that are added up together in a search by bits where there are no planes.
const TOGETHER: usize = 16;

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Held {
    /// Units of a cube, a power of two.
    units: usize,
    /// Numbers of a unit.
    held: usize,
    /// Whether units are added up by planes of 32.
    by_planes: bool,
    /// Whether those have PTX.
    ptx: bool,
    /// How units add up what each has.
    sums: UnitSums,
    /// How digits are counted, if they are.
    digits: Option<Digits>,
    /// No unit's numbers end before another's.
    is_full: bool,
    /// What is written of each number beside the lists.
    index: Index,
}

/// What says of a number where it stands in the list of its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Index {
    /// Its place, or −1.
    Places,
    /// A bit: see [`highest_flags_of_rows`].
    Flags,
}

impl Held {
    /// `None` if a row is longer than a cube holds.
    fn new(properties: &DeviceProperties, columns: usize, index: Index) -> Option<Self> {
        let hardware = &properties.hardware;
        let most = (hardware.max_units_per_cube).min(hardware.max_cube_dim.0) as usize;
        let [low, high] = UNITS;
        let units = columns.div_ceil(WORD).next_power_of_two().max(low);
        let by_planes = planes::are_there(properties);
        let ptx = by_planes && planes::have_ptx(properties);
        // `BLOCKSPARSE_ROW_DIGITS=0` searches bit by bit on devices that count digits, too: for comparing.
        let by_digits = ptx && Tuning::or_default().row_digits;
        let held = Self {
            units,
            held: columns.div_ceil(units),
            by_planes,
            ptx,
            sums: UnitSums::new(properties, units),
            digits: by_digits.then_some(Digits { units }),
            is_full: columns.is_multiple_of(units),
            index,
        };
        let bytes = held.shared() * size_of::<u32>();
        let fits = units <= high.min(most) && bytes <= hardware.max_shared_memory_size;
        fits.then_some(held)
    }

    /// Units that are added up together first, and how many such there are.
    fn together(&self) -> usize {
        match self.by_planes {
            true => planes::LANES,
            false => TOGETHER,
        }
    }

    fn groups(&self) -> usize {
        self.units / self.together()
    }

    /// Words that are left for others where digits are not counted.
    fn partial(&self) -> usize {
        self.sums.partial().max(match self.by_planes {
            true => 2 * self.groups(),
            false => self.units + 2 * self.groups(),
        })
    }

    /// Counts of digits.
    fn bins(&self) -> usize {
        self.digits.map_or(1, |digits| digits.bins())
    }

    /// Numbers that a cube shares.
    fn shared(&self) -> usize {
        2 * self.units + self.partial() + self.bins() + Digits::WORDS
    }
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    rows: usize,
    of_group: usize,
    columns: usize,
    most: u32,
}

/// The number of row `row` at `column` in the order of numbers, 0 behind the last: numbers have more.
#[cube]
fn key_at(numbers: &[f32], row: usize, column: usize, sizes: &Sizes, #[comptime] h: Held) -> u32 {
    let exists = is_there(column, sizes, h);
    let number = numbers[row * sizes.columns + select(exists, column, 0usize)];
    select(exists, key(u32::reinterpret(number)), 0u32)
}

#[cube]
fn is_there(column: usize, sizes: &Sizes, #[comptime] h: Held) -> bool {
    match comptime!(h.is_full) {
        true => true.runtime(),
        false => column < sizes.columns,
    }
}

/// The sum of all units' counts, in all of them. `partial` has a half for even steps and one for odd ones, so that none overwrites what another still reads.
#[cube]
fn across_units(count: u32, partial: &mut Shared<[u32]>, step: u32, #[comptime] h: Held) -> u32 {
    let unit = UNIT_POS as usize;
    let groups = comptime!(h.groups());
    let half = step as usize % 2 * groups;
    let mut sum = 0u32.runtime();
    if comptime!(h.by_planes) {
        let lane = unit % comptime!(planes::LANES);
        let of_plane = planes::total(count, comptime!(h.ptx));
        if lane == 0 {
            partial[half + unit / comptime!(planes::LANES)] = of_plane;
        }
        sync_cube();
        // No more planes than a plane has units.
        let total = partial[half + lane.min(comptime!(groups - 1))];
        sum = planes::total(select(lane < groups, total, 0u32), comptime!(h.ptx));
    } else {
        let of_units = comptime!(2 * groups);
        partial[of_units + unit] = count;
        sync_cube();
        if unit < groups {
            let mut of_group = 0u32.runtime();
            for other in 0..comptime!(TOGETHER) {
                of_group += partial[of_units + unit * comptime!(TOGETHER) + other];
            }
            partial[half + unit] = of_group;
        }
        sync_cube();
        for group in 0..groups {
            sum += partial[half + group];
        }
    }
    sum
}

/// How many of a unit's numbers reach a bound.
#[cube]
fn reached(own: &Array<u32>, bound: u32, #[comptime] h: Held) -> u32 {
    let mut count = 0u32.runtime();
    #[unroll]
    for i in 0..comptime!(h.held) {
        count += select(own[i] >= bound, 1u32, 0u32);
    }
    count
}

/// The highest bound that at least `most` numbers reach, or a lower one that as many do. Keys are above 0, and a bit at least is set: what is behind the last
/// number reaches none.
#[cube]
fn bound_by_bits(
    own: &Array<u32>,
    partial: &mut Shared<[u32]>,
    most: u32,
    #[comptime] h: Held,
) -> u32 {
    let mut bound = 0u32.runtime();
    if comptime!(h.by_planes) {
        let mut step = 0u32.runtime();
        while step < 32u32 {
            let next = bound | (0x8000_0000u32 >> step);
            let count = reached(own, next, h);
            let count = across_units(count, partial, step, h);
            bound = select(count >= most, next, bound);
            step += 1u32;
            // Those that reach it are the ones: all units know.
            step = select(count == most, 32u32, step);
        }
    } else {
        for step in 0..32u32 {
            let next = bound | (0x8000_0000u32 >> step);
            let count = reached(own, next, h);
            let count = across_units(count, partial, step, h);
            bound = select(count >= most, next, bound);
        }
    }
    sync_cube();
    bound
}

/// A bound that so many reach, and the step of [`before_and_all`] that comes next.
#[cube]
fn bound_of(
    own: &Array<u32>,
    partial: &mut Shared<[u32]>,
    most: u32,
    #[comptime] h: Held,
) -> (u32, usize) {
    match comptime!(h.digits) {
        Some(digits) => bound_by_digits(own, partial, most, h.held, digits, h.sums),
        None => (bound_by_bits(own, partial, most, h), 0usize.runtime()),
    }
}

/// What a word has of the numbers above a bound, and of those that equal it.
#[derive(CubeType, Clone, Copy)]
struct Word {
    above: u32,
    equal: u32,
}

/// The word of a unit: of planes' votes on what they hold, or of the numbers themselves.
#[cube]
fn own_word(
    numbers: &[f32],
    own: &Array<u32>,
    row: usize,
    bound: u32,
    words: &mut Shared<[u32]>,
    equals: &mut Shared<[u32]>,
    sizes: &Sizes,
    #[comptime] h: Held,
) -> Word {
    let unit = UNIT_POS as usize;
    let mut above = 0u32.runtime();
    let mut equal = 0u32.runtime();
    if comptime!(h.by_planes) {
        // A lane has a word of its plane.
        let lane = unit % comptime!(planes::LANES);
        #[unroll]
        for i in 0..comptime!(h.held) {
            let is_above = planes::votes(own[i] > bound, comptime!(h.ptx));
            let is_equal = planes::votes(own[i] == bound, comptime!(h.ptx));
            above = select(lane == i, is_above, above);
            equal = select(lane == i, is_equal, equal);
        }
        if lane < comptime!(h.held) {
            let word = lane * comptime!(h.units / WORD) + unit / comptime!(WORD);
            words[word] = above;
            equals[word] = equal;
        }
        sync_cube();
        above = 0u32.runtime();
        equal = 0u32.runtime();
        if unit < comptime!(h.held * h.units / WORD) {
            above = words[unit];
            equal = equals[unit];
        }
        // Words become those of what is kept.
        sync_cube();
    } else {
        for bit in 0..comptime!(WORD) {
            let column = unit * comptime!(WORD) + bit;
            let exists = column < sizes.columns;
            let number = numbers[row * sizes.columns + select(exists, column, 0usize)];
            let key = select(exists, key(u32::reinterpret(number)), 0u32);
            above |= select(key > bound, 1u32, 0u32) << bit as u32;
            equal |= select(key == bound, 1u32, 0u32) << bit as u32;
        }
    }
    Word { above, equal }
}

/// So many of the lowest bits of a word that are set.
#[cube]
fn lowest_bits(word: u32, count: u32) -> u32 {
    let mut rest = word;
    for _ in 0..count {
        rest &= rest - 1u32;
    }
    word ^ rest
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn highest(
    numbers: &[f32],
    lists: &mut [i32],
    // Places of numbers, or flags.
    index: &mut [i32],
    sizes: Sizes,
    #[comptime] h: Held,
) {
    let mut words = Shared::<[u32]>::new_slice(comptime!(h.units));
    let mut firsts = Shared::<[u32]>::new_slice(comptime!(h.units));
    let mut partial = Shared::<[u32]>::new_slice(comptime!(h.partial()));
    // Cubes beyond the last row make it again.
    let row = CUBE_POS.min(sizes.rows - 1);
    let unit = UNIT_POS as usize;
    let mut own = Array::<u32>::new(comptime!(h.held));
    #[unroll]
    for i in 0..comptime!(h.held) {
        own[i] = key_at(numbers, row, comptime!(i * h.units) + unit, &sizes, h);
    }
    let (bound, step) = bound_of(&own, &mut partial, sizes.most, h);
    let word = own_word(
        numbers,
        &own,
        row,
        bound,
        &mut words,
        &mut firsts,
        &sizes,
        h,
    );
    // Two counts in one number: neither is above 2¹⁵.
    let own_counts = word.above.count_ones() | (word.equal.count_ones() << 16u32);
    let (before, all) = before_and_all(own_counts, &mut partial, step, h.sums);
    // Of those that equal the bound so many are kept: the first.
    let left = sizes.most - min(all & 0xffffu32, sizes.most);
    let equal_before = min(before >> 16u32, left);
    let taken = min(left - equal_before, word.equal.count_ones());
    words[unit] = word.above | lowest_bits(word.equal, taken);
    firsts[unit] = (before & 0xffffu32) + equal_before;
    sync_cube();
    let first = (row % sizes.of_group) as u32 * sizes.most;
    let into = row * sizes.most as usize;
    let out = row * sizes.columns;
    if comptime!(h.index == Index::Flags) {
        let all = sizes.columns.div_ceil(comptime!(WORD));
        if unit < all {
            let at = 2 * (row * all + unit);
            index[at] = i32::reinterpret(words[unit]);
            index[at + 1] = firsts[unit] as i32;
        }
    }
    let bit = 1u32 << (unit % comptime!(WORD)) as u32;
    #[unroll]
    for i in 0..comptime!(h.held) {
        let column = comptime!(i * h.units) + unit;
        let at = comptime!(i * h.units / WORD) + unit / comptime!(WORD);
        let kept = words[at];
        let mut own_place = (-1i32).runtime();
        if kept & bit != 0u32 {
            let place = firsts[at] + (kept & (bit - 1u32)).count_ones();
            if place < sizes.most {
                own_place = (first + place) as i32;
                lists[into + place as usize] = column as i32;
            }
        }
        if comptime!(h.index == Index::Places) {
            if is_there(column, &sizes, h) {
                index[out + column] = own_place;
            }
        }
    }
}

/// Whether [`highest_of_rows`] takes rows of so many numbers.
pub fn holds_rows(client: &Client, columns: usize) -> bool {
    Held::new(client.properties(), columns, Index::Places).is_some()
}

/// The columns of the `most` highest numbers of each row, as [`topk_rows`](crate::kernels::rows::topk_rows) gives them: `lists` are i32
/// `[groups, rows, most]`, ascending, of f32 `numbers` `[groups, rows, columns]`; `places`, i32 as `numbers`, are `row · most` and a number's place in the list of
/// its row, or −1. Of equal numbers the earlier, NaN is the lowest. Contiguous, `most` at most as many as there are columns.
///
/// # Errors
/// [`KernelError`] if a cube does not [hold](holds_rows) a row, or the device does not index as many numbers.
pub fn highest_of_rows(
    client: &Client,
    of: [usize; 3],
    most: usize,
    numbers: &Handle,
    made: [&Handle; 2],
) -> Result<(), KernelError> {
    launch(client, of, most, numbers, made, Index::Places)
}

/// [`highest_of_rows`] with flags in place of places: `flags` i32 `[groups, rows, words, 2]` are, of each 32 numbers, a bit for each that is in the list, and how many
/// the list has of those before.
///
/// # Errors
/// As [`highest_of_rows`].
pub fn highest_flags_of_rows(
    client: &Client,
    of: [usize; 3],
    most: usize,
    numbers: &Handle,
    [lists, flags]: [&Handle; 2],
) -> Result<(), KernelError> {
    launch(client, of, most, numbers, [lists, flags], Index::Flags)
}

/// Words of 32 numbers of a row.
pub fn words_of_flags(columns: usize) -> usize {
    columns.div_ceil(WORD)
}

fn launch(
    client: &Client,
    [groups, of_group, columns]: [usize; 3],
    most: usize,
    numbers: &Handle,
    [lists, index]: [&Handle; 2],
    form: Index,
) -> Result<(), KernelError> {
    let Some(held) = Held::new(client.properties(), columns, form) else {
        let [_, high] = UNITS;
        let limit = (high * WORD) as u32;
        return Err(KernelError::limit("numbers of a row", limit, columns));
    };
    check_buffers(client, 3)?;
    let rows = groups * of_group;
    KernelError::check_u32("the places of a group", of_group * most)?;
    let address = address_of(client, rows * columns.max(most))?;
    let cubes = spread(client, rows as u64)?;
    if rows * columns * most == 0 {
        return Ok(());
    }
    let indices = match form {
        Index::Places => columns,
        Index::Flags => 2 * words_of_flags(columns),
    };
    // SAFETY: a cube reads the numbers of its row below `columns`, and writes its list below `most` and its row's places, or words.
    unsafe {
        highest::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(held.units as u32),
            address,
            buffer(numbers, rows * columns),
            buffer(lists, rows * most),
            buffer(index, rows * indices),
            SizesLaunch::new(rows, of_group, columns, most as u32),
            held,
        );
    }
    Ok(())
}
