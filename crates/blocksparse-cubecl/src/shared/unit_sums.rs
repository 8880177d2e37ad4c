//! Prefix sums over the units of a cube, with the total.

// Slices in kernels do not have the methods that Clippy suggests.
#![allow(clippy::needless_range_loop)]

use cubecl::ir::features::Plane;
use cubecl::prelude::*;

/// Units whose values are added up as a group, without planes.
const TOGETHER: usize = 16;

/// Method of prefix sums over units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnitSums {
    /// Units per cube: a power of two, at least a group.
    units: usize,
    /// Units per plane, 1 on a device without plane operations.
    plane: usize,
}

impl UnitSums {
    pub fn new(properties: &DeviceProperties, units: usize) -> Self {
        let hardware = &properties.hardware;
        let plane = hardware.plane_size_min as usize;
        let has_planes = properties.features.plane.contains(Plane::Ops)
            && hardware.plane_size_min == hardware.plane_size_max
            && plane.is_power_of_two()
            // A single plane adds up the totals of all planes.
            && units <= plane * plane
            && plane <= units;
        Self {
            units,
            plane: if has_planes { plane } else { 1 },
        }
    }

    pub fn by_planes(&self) -> bool {
        self.plane > 1
    }

    /// Words of shared memory for the exchange.
    pub fn partial(&self) -> usize {
        match self.by_planes() {
            true => 2 * self.units / self.plane,
            false => self.units + self.units / TOGETHER,
        }
    }
}

/// Returns the inclusive prefix sum within a plane.
#[cube]
fn up_to(x: u32, lane: usize, #[comptime] plane: usize) -> u32 {
    let mut sum = x;
    #[unroll]
    for step in 0..comptime!(plane.ilog2()) {
        let before = plane_shuffle_up(sum, comptime!(1u32 << step));
        sum += select(lane >= comptime!(1usize << step), before, 0u32);
    }
    sum
}

/// Returns the sum over the units before this one, and over all. With planes, even and odd `step`s use a half of `partial` each, so that no unit overwrites
/// what another still reads.
#[cube]
pub fn before_and_all(
    x: u32,
    partial: &mut [u32],
    step: usize,
    #[comptime] t: UnitSums,
) -> (u32, u32) {
    let unit = UNIT_POS as usize;
    let mut before = 0u32.runtime();
    let mut all = 0u32.runtime();
    if comptime!(t.by_planes()) {
        let planes = comptime!(t.units / t.plane);
        let lane = unit % comptime!(t.plane);
        let plane = unit / comptime!(t.plane);
        let half = step % 2 * planes;
        let sum = up_to(x, lane, t.plane);
        if lane == comptime!(t.plane - 1) {
            partial[half + plane] = sum;
        }
        sync_cube();
        let of_plane = select(
            lane < planes,
            partial[half + lane.min(comptime!(planes - 1))],
            0u32,
        );
        let sums = up_to(of_plane, lane, t.plane);
        all = plane_shuffle(sums, comptime!(planes as u32 - 1));
        before = plane_shuffle(sums - of_plane, plane as u32) + sum - x;
    } else {
        let groups = comptime!(t.units / TOGETHER);
        let group = unit / comptime!(TOGETHER);
        partial[unit] = x;
        sync_cube();
        if unit < groups {
            let mut sum = 0u32.runtime();
            for other in 0..comptime!(TOGETHER) {
                sum += partial[unit * comptime!(TOGETHER) + other];
            }
            partial[comptime!(t.units) + unit] = sum;
        }
        sync_cube();
        for other in 0..groups {
            let sum = partial[comptime!(t.units) + other];
            all += sum;
            before += select(other < group, sum, 0u32);
        }
        for other in group * comptime!(TOGETHER)..unit {
            before += partial[other];
        }
        sync_cube();
    }
    (before, all)
}
