//! A device: grids of cubes, their warps, and the memories they reach.

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
mod pending;
mod races;
mod tensor_map;
#[cfg(test)]
mod tests;
mod warp;

pub use grid::run;
pub use launch::{Launch, Settings};
pub use memory::Regions;
pub use tensor_map::{BYTES as TENSOR_MAP_BYTES, Swizzle, TensorMap};

pub type Module = crate::ptx::Module<op::Op>;
pub type Kernel = crate::ptx::Kernel<op::Op>;
