//! A sort by bucket where the units of a plane vote on their buckets.
//!
//! Each plane has neighbouring tokens, as many at a time as it has units. Those of the same digit are found by a vote on each of its bits; the first of them
//! counts for all. A plane's tokens of a digit go behind all of lower digits, and of this one behind those of planes before.

use cubecl::ir::features::Plane;
use cubecl::prelude::*;

use crate::kernels::rows::order_places::{NONE, Sizes, fill, put, token_at};
use blocksparse_cubecl::arch::planes;
use blocksparse_cubecl::limits::most_units;

/// Bits that a pass sorts by.
pub(crate) const BITS: u32 = 8;
const DIGITS: usize = 1 << BITS;
/// Planes of a cube, at most.
const PLANES: usize = 16;
/// Units of a plane whose votes are one word.
const MOST_LANES: usize = 32;

/// What is compiled into a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ByPlanes {
    pub lanes: usize,
    pub planes: usize,
    /// Whether units vote by PTX.
    pub ptx: bool,
    /// Whether tokens are in their own order.
    pub first: bool,
}

impl ByPlanes {
    /// `None` if the device has other planes.
    pub fn new(properties: &DeviceProperties) -> Option<Self> {
        let hardware = &properties.hardware;
        let lanes = hardware.plane_size_min as usize;
        let fits = properties.features.plane.contains(Plane::Ops)
            && hardware.plane_size_min == hardware.plane_size_max
            && lanes.is_power_of_two()
            && (4..=MOST_LANES).contains(&lanes);
        let planes = PLANES.min(most_units(properties) / lanes.max(1));
        let shared = (planes + 1) * DIGITS * size_of::<u32>();
        (fits && planes > 0 && shared <= hardware.max_shared_memory_size).then_some(Self {
            lanes,
            planes,
            ptx: lanes == planes::LANES && planes::have_ptx(properties),
            first: true,
        })
    }

    pub fn units(&self) -> usize {
        self.lanes * self.planes
    }
}

/// Which units of a plane have the digit of a unit, as bits.
#[cube]
fn alike(digit: u32, exists: bool, #[comptime] by: ByPlanes) -> u32 {
    let mut alike = planes::votes(exists, comptime!(by.ptx));
    #[unroll]
    for bit in 0..comptime!(BITS) {
        let is_set = (digit >> comptime!(bit)) & 1u32 == 1u32;
        let set = planes::votes(is_set, comptime!(by.ptx));
        alike &= select(is_set, set, !set);
    }
    alike
}

/// As [`sort`](crate::kernels::rows::order::sort).
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn sort_by_planes(
    buckets: &[i32],
    before: &[i32],
    tokens: &mut [i32],
    places: &mut [i32],
    choices: &mut [i32],
    sizes: Sizes,
    #[comptime] by: ByPlanes,
) {
    let lanes = comptime!(by.lanes);
    let units = comptime!(by.lanes * by.planes);
    let mut starts = Shared::<[u32]>::new_slice(comptime!(by.planes * DIGITS));
    let mut totals = Shared::<[u32]>::new_slice(comptime!(DIGITS));
    // Cubes beyond the last group make it again.
    let group = CUBE_POS.min(sizes.groups - 1);
    let unit = UNIT_POS as usize;
    let lane = unit % lanes;
    let plane = unit / lanes;
    let before_lane = (1u32 << lane as u32) - 1u32;
    let steps = sizes.length.div_ceil(units);
    let own = plane * steps * lanes + lane;
    let mut i = unit;
    while i < comptime!(by.planes * DIGITS) {
        starts[i] = 0u32;
        i += units;
    }
    sync_cube();
    for step in 0..steps {
        let at = own + step * lanes;
        let (_, digit) = token_at(
            buckets,
            before,
            at,
            group,
            &sizes,
            BITS,
            comptime!(by.first),
        );
        let exists = digit != NONE;
        let digit = digit & comptime!(DIGITS as u32 - 1);
        let same = alike(digit, exists, by);
        if exists && same & before_lane == 0u32 {
            starts[plane * comptime!(DIGITS) + digit as usize] += same.count_ones();
        }
        sync_cube();
    }
    let mut digit = unit;
    while digit < comptime!(DIGITS) {
        let mut sum = 0u32.runtime();
        for other in 0..comptime!(by.planes) {
            sum += starts[other * comptime!(DIGITS) + digit];
        }
        totals[digit] = sum;
        digit += units;
    }
    sync_cube();
    let mut digit = unit;
    while digit < comptime!(DIGITS) {
        let mut start = 0u32.runtime();
        for other in 0..digit {
            start += totals[other];
        }
        for other in 0..comptime!(by.planes) {
            let at = other * comptime!(DIGITS) + digit;
            let count = starts[at];
            starts[at] = start;
            start += count;
        }
        digit += units;
    }
    sync_cube();
    for step in 0..steps {
        let at = own + step * lanes;
        let (token, digit) = token_at(
            buckets,
            before,
            at,
            group,
            &sizes,
            BITS,
            comptime!(by.first),
        );
        let exists = digit != NONE;
        let digit = digit & comptime!(DIGITS as u32 - 1);
        let same = alike(digit, exists, by);
        let earlier = (same & before_lane).count_ones();
        let start = plane * comptime!(DIGITS) + digit as usize;
        let place = starts[start] + earlier;
        sync_cube();
        if exists {
            if earlier == 0u32 {
                starts[start] = place + same.count_ones();
            }
            put(tokens, places, choices, group, token, place, &sizes);
        }
        sync_cube();
    }
    fill(tokens, choices, group, units, &sizes);
}
