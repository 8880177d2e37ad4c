//! Counters of a cube in shared memory, which units increment in any order.
//!
//! CubeCL's atomics use generic addresses, which are slow for shared memory. The PTX version states that the address is shared and that 1 is added, so that
//! units of a warp that increment the same counter do it in one step.

use cubecl::prelude::*;

use crate::arch::ptx::{shared_address, shared_count, shared_load, shared_store};

/// A cube's counters, in one of two kinds of shared memory.
#[derive(CubeType)]
pub struct Bins {
    counts: Shared<[Atomic<u32>]>,
    /// Shared-memory address for PTX.
    base: u32,
}

#[cube]
impl Bins {
    /// Allocates `len` counters, uninitialised.
    pub fn new(#[comptime] len: usize, #[comptime] ptx: bool) -> Bins {
        let counts = Shared::<[Atomic<u32>]>::new_slice(comptime!(if ptx { 1usize } else { len }));
        let mut base = 0u32.runtime();
        if comptime!(ptx) {
            let words: Shared<[u32]> = Shared::new_aligned_slice(len, 16usize);
            base = shared_address(&words);
        }
        Bins { counts, base }
    }

    pub fn clear(&self, bin: usize, #[comptime] ptx: bool) {
        if comptime!(ptx) {
            shared_store(self.base + bin as u32 * 4u32, 0u32.runtime());
        } else {
            self.counts[bin].store(0u32);
        }
    }

    /// Increments a counter.
    pub fn count(&self, bin: usize, #[comptime] ptx: bool) {
        if comptime!(ptx) {
            shared_count(self.base + bin as u32 * 4u32);
        } else {
            self.counts[bin].fetch_add(1u32);
        }
    }

    pub fn get(&self, bin: usize, #[comptime] ptx: bool) -> u32 {
        match comptime!(ptx) {
            true => shared_load(self.base + bin as u32 * 4u32),
            false => self.counts[bin].load(),
        }
    }
}
