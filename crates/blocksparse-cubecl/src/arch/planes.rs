//! Collective operations of the 32 units of a plane.
//!
//! CubeCL's operations first find out which units are active, and those then wait for each other. The PTX versions assume that all are active and reduce in
//! one instruction.

use cubecl::prelude::*;

use crate::arch::ptx::{ballot, highest_across, lowest_across, shuffle_xor, total_across};
use crate::call::check_ampere;

/// Units per plane.
pub const LANES: usize = 32;

/// Whether all planes of a device have 32 units.
pub fn are_there(properties: &DeviceProperties) -> bool {
    use cubecl::ir::features::Plane;

    let hardware = &properties.hardware;
    properties.features.plane.contains(Plane::Ops)
        && hardware.plane_size_min == LANES as u32
        && hardware.plane_size_max == LANES as u32
}

/// Whether kernels on the device may use PTX.
pub fn have_ptx(properties: &DeviceProperties) -> bool {
    check_ampere(properties).is_ok()
}

/// Returns the units whose `is_so` is true, one bit each.
#[cube]
pub fn votes(is_so: bool, #[comptime] ptx: bool) -> u32 {
    match comptime!(ptx) {
        true => ballot(is_so),
        false => plane_ballot(is_so).extract(0usize),
    }
}

/// Returns the sum over the plane's units, in all units.
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

/// Returns the maximum over the plane's units, in all units.
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

/// Returns the minimum over the plane's units, in all units.
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

/// Returns `x` of the unit whose index differs in the bits of `mask`.
#[cube]
pub fn traded(x: f32, #[comptime] mask: u32, #[comptime] ptx: bool) -> f32 {
    match comptime!(ptx) {
        true => shuffle_xor(x, mask),
        false => plane_shuffle_xor(x, mask),
    }
}
