//! Launches and their settings.

use super::Kernel;
use super::memory::Regions;

/// Scheduling of cubes and warps.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Seed of the order of warps and copies.
    pub seed: u64,
    /// Number of cubes that run at a time.
    pub resident: usize,
    /// Number of instructions of a warp before another may run.
    pub turn: u32,
    /// Number of instructions without any store, arrival or end after which a launch is aborted.
    pub patience: u64,
    /// True if races in shared memory stop a kernel.
    pub watches_races: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            seed: 0,
            resident: 4,
            turn: 256,
            patience: 50_000_000,
            watches_races: false,
        }
    }
}

pub struct Launch<'a> {
    pub kernel: &'a Kernel,
    pub cubes: [u32; 3],
    pub threads: [u32; 3],
    pub dynamic_shared: usize,
    pub parameters: Vec<u8>,
    pub regions: &'a Regions,
}
