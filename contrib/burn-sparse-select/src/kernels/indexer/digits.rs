//! Digits of numbers by which the highest are found, and lists of what is above them.

// A kernel's numbers have no such methods.
#![allow(clippy::needless_range_loop)]

use cubecl::prelude::*;

use blocksparse_cubecl::arch::planes;
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::on_device::keep::WANTED;
use blocksparse_cubecl::shared::order_key::key;
use blocksparse_cubecl::shared::unit_sums::{UnitSums, before_and_all};

/// Units of a query, at least and at most.
const UNITS: [usize; 2] = [128, 512];
/// Numbers of a unit where units are between these.
const UNIT_NUMBERS: usize = 16;
/// Bits of a digit, of which the last has what is left of 32.
const BITS: u32 = 11;
/// Values of a digit.
pub(crate) const BINS: usize = 1 << BITS;
/// Digits of a number.
pub(crate) const DIGITS: u32 = 32u32.div_ceil(BITS);
/// Vectors that a unit loads at once where digits are counted.
pub(crate) const AHEAD: usize = 4;
/// Neighbouring vectors that a unit lists at once.
const RUN: usize = 2;
/// Where a count of equal numbers begins in a word, below which there is one of numbers above: neither is as many as a cube's numbers.
const HALF: u32 = 16;

/// Bits below a digit.
pub(crate) fn shift_of(level: u32) -> u32 {
    32u32.saturating_sub(BITS * (level + 1))
}

/// The bits of a digit, as the lowest.
pub(crate) fn mask_of(level: u32) -> u32 {
    (1u32 << BITS.min(32 - BITS * level)) - 1
}

/// Words of a digit that was found: itself, how many numbers are above it, and how many have it.
pub(crate) const FOUND: usize = 3;

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Picked {
    /// Units of a cube, a power of two that divides [`BINS`].
    pub units: usize,
    /// How they add up what each has.
    pub sums: UnitSums,
    /// Whether units count by PTX.
    pub ptx: bool,
}

impl Picked {
    pub fn new(client: &Client, columns: usize) -> Result<Self, KernelError> {
        let properties = client.properties();
        let hardware = &properties.hardware;
        let most = (hardware.max_units_per_cube as usize).min(hardware.max_cube_dim.0 as usize);
        let [low, high] = UNITS;
        if most < low {
            let what = "units of a cube that picks keys";
            return Err(KernelError::limit(what, most as u32, low));
        }
        let units = columns.div_ceil(UNIT_NUMBERS).next_power_of_two();
        let units = units.clamp(low, high.min(1 << most.ilog2()));
        Ok(Self {
            units,
            sums: UnitSums::new(properties, units),
            ptx: planes::have_ptx(properties),
        })
    }

    /// Values of a digit that a unit has.
    pub fn own_bins(&self) -> usize {
        BINS / self.units
    }
}

/// Finds the digit with which so many numbers are `left`, from the highest down, of what all units have of their digits' counts: from the unit's highest digit
/// down. Nothing is found if all `is_done`.
#[cube]
pub(crate) fn find_digit(
    counts: &Array<u32>,
    left: u32,
    is_done: bool,
    found: &mut [u32],
    partial: &mut [u32],
    step: usize,
    #[comptime] t: Picked,
) {
    let top = comptime!(BINS - 1) - UNIT_POS as usize * comptime!(t.own_bins());
    let mut own = 0u32.runtime();
    #[unroll]
    for i in 0..comptime!(t.own_bins()) {
        own += counts[i];
    }
    let (before, _) = before_and_all(own, partial, step, t.sums);
    if !is_done && before < left && before + own >= left {
        let mut above = before;
        #[unroll]
        for i in 0..comptime!(t.own_bins()) {
            let count = counts[i];
            if above < left && above + count >= left {
                found[0] = (top - i) as u32;
                found[1] = above;
                found[2] = count;
            }
            above += count;
        }
    }
    sync_cube();
}

/// A number's place among those of the row.
#[cube]
pub(crate) fn number_key(score: f32, at: usize, first_near: usize) -> u32 {
    select(at >= first_near, WANTED, key(u32::reinterpret(score)))
}

/// Numbers of a row that are listed one after the other.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Run {
    /// The row's first vector.
    pub start: usize,
    /// The first number, with which a vector begins, and the one behind the last that there is.
    pub begin: usize,
    pub end: usize,
    /// Numbers that are looked at.
    pub listed: usize,
    /// The row's last vector that has a number.
    pub last_vector: usize,
    /// From which number on all count as the highest.
    pub first_near: usize,
    /// The digits of the last that is kept, and which bits they are.
    pub digits: u32,
    pub known: u32,
    /// How many of those that have these digits are kept.
    pub left: u32,
    /// Numbers of the row before these that are above, and that are equal.
    pub above: u32,
    pub equal: u32,
    /// Where the row's list begins.
    pub into: usize,
}

/// Lists the numbers of a run that are above, and the first that are equal, in tiles of neighbours.
#[cube]
pub(crate) fn list_numbers<N: Size>(
    scores: &[Vector<f32, N>],
    lists: &mut [i32],
    partial: &mut [u32],
    run: &Run,
    #[comptime] t: Picked,
) {
    let units = comptime!(t.units);
    let width = N::value();
    let unit = UNIT_POS as usize;
    let own_numbers = width * comptime!(RUN);
    let tiles = run.listed.div_ceil(own_numbers * units);
    let first_vector = run.begin / width;
    let mut above_tile = run.above;
    let mut equal_tile = run.equal;
    let mut next = Array::<Vector<f32, N>>::new(comptime!(RUN));
    #[unroll]
    for i in 0..comptime!(RUN) {
        let vector = first_vector + unit * comptime!(RUN) + i;
        next[i] = scores[run.start + vector.min(run.last_vector)];
    }
    for tile in 0..tiles {
        let first = first_vector + (tile * units + unit) * comptime!(RUN);
        let mut loaded = Array::<Vector<f32, N>>::new(comptime!(RUN));
        #[unroll]
        for i in 0..comptime!(RUN) {
            loaded[i] = next[i];
            let vector = first + comptime!(units * RUN) + i;
            next[i] = scores[run.start + vector.min(run.last_vector)];
        }
        // Two bits a number.
        let mut is_above = 0u32.runtime();
        let mut is_equal = 0u32.runtime();
        #[unroll]
        for i in 0..comptime!(RUN) {
            #[unroll]
            for j in 0..width {
                let at = (first + i) * width + j;
                let number = number_key(loaded[i].extract(j), at, run.first_near) & run.known;
                let bit = comptime!(1u32 << (i * width + j));
                is_above |= select(at < run.end && number > run.digits, bit, 0u32);
                is_equal |= select(at < run.end && number == run.digits, bit, 0u32);
            }
        }
        let count = is_above.count_ones() | (is_equal.count_ones() << comptime!(HALF));
        let (before, all) = before_and_all(count, partial, tile, t.sums);
        let mut above = above_tile + (before & comptime!((1u32 << HALF) - 1));
        let mut equal = equal_tile + (before >> comptime!(HALF));
        if count != 0u32 {
            #[unroll]
            for i in 0..comptime!(RUN) {
                #[unroll]
                for j in 0..width {
                    let at = (first + i) * width + j;
                    let bit = comptime!(i * width + j);
                    let above_too = (is_above >> comptime!(bit as u32)) & 1u32;
                    let equal_too = (is_equal >> comptime!(bit as u32)) & 1u32;
                    if above_too == 1u32 || (equal_too == 1u32 && equal < run.left) {
                        lists[run.into + (above + min(equal, run.left)) as usize] = at as i32;
                    }
                    above += above_too;
                    equal += equal_too;
                }
            }
        }
        above_tile += all & comptime!((1u32 << HALF) - 1);
        equal_tile += all >> comptime!(HALF);
    }
}
