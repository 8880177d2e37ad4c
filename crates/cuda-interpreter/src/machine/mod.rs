//! The machine: grids of cubes, their warps, and memory.

mod bulk;
mod copies;
mod counted;
mod cube;
mod decode;
mod exchange;
mod fragments;
mod grid;
mod launch;
mod matrix;
mod memory;
mod op;
mod parse;
mod pending;
mod races;
mod tensor_map;
#[cfg(test)]
mod tests;
mod warp;

use std::collections::HashMap;

use crate::ptx::{Slot, Special};

pub use grid::run;
pub use launch::{Launch, Settings};
pub use memory::Regions;
pub use tensor_map::{BYTES as TENSOR_MAP_BYTES, Swizzle, TensorMap};

pub struct Module {
    pub kernels: Vec<Kernel>,
    /// Arrays in global memory.
    pub arrays: Vec<Box<[u8]>>,
}

/// An entry point of a module.
pub struct Kernel {
    pub name: String,
    pub parameters: Vec<Parameter>,
    code: Vec<Instruction>,
    slots: Slot,
    constants: HashMap<u64, Slot>,
    specials: Vec<(Slot, Special)>,
    /// Bytes of shared memory before the dynamic part.
    static_shared: usize,
    local_bytes: usize,
}

pub struct Parameter {
    pub offset: usize,
    pub bytes: usize,
}

struct Instruction {
    op: op::Op,
    /// The predicate that selects participating lanes, and whether it is negated.
    guard: Option<(Slot, bool)>,
    line: u32,
}
