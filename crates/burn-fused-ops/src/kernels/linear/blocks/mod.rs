//! Products with a block-sparse weight on wgmma and TMA (as in OpenAI's blocksparse, Gray et al., 2017).
//!
//! ```text
//! tables     what is kept, as lists of what each tile reads
//! pack       kept blocks as tiles of 64 × 64, rounded
//! tile       the shape of a cube's work, and of shared memory
//! plan       how a product is cut, or why not here
//! product    the kernel, and what becomes of its sums
//! launch     its launch
//! ```
//!
//! In the forward pass, a warpgroup computes 64 outputs of `cols` rows, transposed: `Wᵀ · xᵀ`. So the narrow side of the tile is the weight's, and narrow
//! blocks keep the tensor cores as busy as wide ones. The depth is the union of the inputs that the 64 outputs keep, in slabs of 64 that are gathered from
//! columns of x: one TMA box per block. For blocks narrower than 64, the packed weight is zero where an output does not keep a block that a neighbour keeps.
//! The gradient with respect to x is computed in the same way from the gradient with respect to the result. The gradient with respect to the weight has tiles
//! of 64 inputs and the union of the outputs that they keep, gathered likewise; its depth is all rows, in parts that are added in order.

mod launch;
mod pack;
mod plan;
mod product;
mod tables;
mod tile;

pub use launch::{block_gradient, multiply_blocks};
pub use pack::{blocks_of_dense, dense_of_blocks, pack_blocks};
pub use plan::{BlockGradientPlan, BlockProductPlan};
pub use tables::{BlockTables, Direction};
