//! What is launched, and how it runs.

use super::Kernel;
use super::memory::Regions;

/// How cubes and warps take turns.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Of the order in which warps and copies go on.
    pub seed: u64,
    /// Cubes that run side by side.
    pub resident: usize,
    /// Instructions of a warp before another may go on.
    pub turn: u32,
    /// Instructions without any store, arrival or end after which a launch is given up.
    pub patience: u64,
    /// Whether races for shared memory stop a kernel.
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
