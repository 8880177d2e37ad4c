//! Memory spaces: windows of the generic space, bounds and alignment.

use crate::error::Fault;
use crate::ptx::Space;

/// Splits an address into its space and its offset there.
pub fn placed(space: Space, address: u64) -> (Space, u64) {
    if space != Space::Generic && address >> 56 == 0 {
        return (space, address);
    }
    let place = address & ((1 << 56) - 1);
    match address >> 56 {
        1 => (Space::Shared, place),
        2 => (Space::Local, place),
        3 => (Space::Param, place),
        _ => (Space::Global, place),
    }
}

/// The parts of host memory that serve as device memory.
pub struct Regions {
    /// Start and end of each region, sorted.
    sorted: Vec<(u64, u64)>,
}

impl Regions {
    pub fn new(mut regions: Vec<(u64, u64)>) -> Self {
        regions.sort_unstable();
        Self { sorted: regions }
    }

    pub fn holds(&self, address: u64, bytes: usize) -> bool {
        let after = self.sorted.partition_point(|&(start, _)| start <= address);
        after > 0 && address + bytes as u64 <= self.sorted[after - 1].1
    }
}

pub fn name(space: Space) -> &'static str {
    match space {
        Space::Generic | Space::Global => "global",
        Space::Shared => "shared",
        Space::Local => "local",
        Space::Param => "parameter",
    }
}

pub fn out_of_bounds(space: Space, address: u64, bytes: usize) -> Fault {
    Fault::OutOfBounds {
        space: name(space),
        address,
        bytes,
    }
}

/// # Errors
///
/// [`Fault::Misaligned`] if `address` is not a multiple of `bytes`.
pub fn check_alignment(space: Space, address: u64, bytes: usize) -> Result<(), Fault> {
    if address.is_multiple_of(bytes as u64) {
        return Ok(());
    }
    Err(Fault::Misaligned {
        space: name(space),
        address,
        bytes,
    })
}

/// Returns a pointer to `bytes` bytes of `held` at an offset.
///
/// # Errors
///
/// [`Fault::OutOfBounds`] beyond the end.
pub fn part(held: &mut [u8], space: Space, offset: u64, bytes: usize) -> Result<*mut u8, Fault> {
    let end = offset.checked_add(bytes as u64);
    match end.is_some_and(|end| end <= held.len() as u64) {
        true => Ok(held[offset as usize..].as_mut_ptr()),
        false => Err(out_of_bounds(space, offset, bytes)),
    }
}

/// # Safety
///
/// `size` bytes, at most 8, can be read there.
pub unsafe fn read(place: *const u8, size: usize) -> u64 {
    let mut bytes = [0; 8];
    // SAFETY: guaranteed by the caller.
    unsafe { std::ptr::copy_nonoverlapping(place, bytes.as_mut_ptr(), size) };
    u64::from_le_bytes(bytes)
}

/// # Safety
///
/// `size` bytes, at most 8, can be written there.
pub unsafe fn write(place: *mut u8, size: usize, value: u64) {
    // SAFETY: guaranteed by the caller.
    unsafe { std::ptr::copy_nonoverlapping(value.to_le_bytes().as_ptr(), place, size) };
}
