//! What the 32 units of a plane do together.
//!
//! CubeCL asks in each operation which units are there, and those then wait for each other. PTX is told that all are, and adds up in one instruction.

use cubecl::prelude::*;

use crate::arch::ptx::{ballot, highest_across, lowest_across, shuffle_xor, total_across};
use crate::call::check_ampere;

/// Units of a plane.
pub const LANES: usize = 32;

/// Whether a device has planes of 32 units, and no others.
pub fn are_there(properties: &DeviceProperties) -> bool {
    use cubecl::ir::features::Plane;

    let hardware = &properties.hardware;
    properties.features.plane.contains(Plane::Ops)
        && hardware.plane_size_min == LANES as u32
        && hardware.plane_size_max == LANES as u32
}

/// Whether its kernels may have what PTX has.
pub fn have_ptx(properties: &DeviceProperties) -> bool {
    check_ampere(properties).is_ok()
}

/// The units for which it is so, as bits.
#[cube]
pub fn votes(is_so: bool, #[comptime] ptx: bool) -> u32 {
    match comptime!(ptx) {
        true => ballot(is_so),
        false => plane_ballot(is_so).extract(0usize),
    }
}

/// The sum of whole numbers, in all units.
#[cube]
pub fn total(x: u32, #[comptime] ptx: bool) -> u32 {
    let mut result = x;
    if comptime!(ptx) {
        result = total_across(x);
    } else {
        #[unroll]
        for step in 0..comptime!(LANES.ilog2()) {
            result += plane_shuffle_xor(result, comptime!(1u32 << step));
        }
    }
    result
}

/// The highest of whole numbers, in all units.
#[cube]
pub fn highest(x: u32, #[comptime] ptx: bool) -> u32 {
    let mut result = x;
    if comptime!(ptx) {
        result = highest_across(x);
    } else {
        #[unroll]
        for step in 0..comptime!(LANES.ilog2()) {
            result = result.max(plane_shuffle_xor(result, comptime!(1u32 << step)));
        }
    }
    result
}

/// The lowest of whole numbers, in all units.
#[cube]
pub fn lowest(x: u32, #[comptime] ptx: bool) -> u32 {
    let mut result = x;
    if comptime!(ptx) {
        result = lowest_across(x);
    } else {
        #[unroll]
        for step in 0..comptime!(LANES.ilog2()) {
            result = result.min(plane_shuffle_xor(result, comptime!(1u32 << step)));
        }
    }
    result
}

/// The number of the unit whose place differs in the bits of `mask`.
#[cube]
pub fn traded(x: f32, #[comptime] mask: u32, #[comptime] ptx: bool) -> f32 {
    match comptime!(ptx) {
        true => shuffle_xor(x, mask),
        false => plane_shuffle_xor(x, mask),
    }
}
