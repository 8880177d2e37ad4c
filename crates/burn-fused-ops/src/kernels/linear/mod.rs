//! Matmuls of layers: `a · b` of half-precision matrices with sums in f32. On wgmma and TMA on GPUs of compute capability 9.0, and on mma.sync and cp.async
//! on others from 8.0 on.
//!
//! ```text
//! view       matrices in memory
//! tile       the shape of a cube's work, and of shared memory
//! plan       which tile, how many cubes, in how many parts the depth is taken: or why not here
//! asm        the main loop in PTX
//! places     which of a result's tiles a number names
//! epilogue   what becomes of a tile's sums
//! log_sums   logarithms of sums of exponentials in their place, of what rows see
//! maxima     the highest of runs of columns in their place
//! highest    the columns of the highest scores in their place
//! line_sums  sums over columns and diagonals of their softmax in their place
//! product    the kernel
//! launch     its launch
//! blocks     products of block-sparse weights
//! mma        the kernel on mma.sync, with its tile
//! ```
//!
//! The product of a layer and both of its gradients read the same tensors in place: in either factor the depth or the other dimension may be contiguous. The
//! gradient with respect to a weight has few tiles and a long depth, so the depth is split into parts, each with an output of its own; the caller adds them
//! in order (`rows::window_sums`).

mod asm;
pub mod blocks;
mod epilogue;
mod highest;
mod launch;
mod line_sums;
mod log_sums;
mod maxima;
mod mma;
mod places;
mod plan;
mod product;
mod tile;
mod view;

pub use launch::{EpilogueTensors, multiply};
pub use line_sums::{LINE_GROUPS, LINE_ROWS, UNWANTED, line_elements};
pub use log_sums::SeenColumns;
pub(crate) use plan::ampere;
pub use plan::{ProductPlan, ProductRequest, available};
pub use tile::{Epilogue, Highest, MOST_HIGHEST, Order};
pub use view::{HEAD, HEAD_ROWS, MatrixView};
