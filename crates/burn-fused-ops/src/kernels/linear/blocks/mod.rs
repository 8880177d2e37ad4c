//! Products of which a factor is a block-sparse weight, on wgmma and TMA (the line of OpenAI's blocksparse, Gray et al., 2017).
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
//! Forward, a warpgroup has 64 outputs of `cols` rows, transposed: `Wᵀ · xᵀ`. So the narrow side of the tile is the weight's, and blocks of any width keep
//! the tensor cores as busy as the other side lets them. The depth is what any of the 64 outputs keeps, in slabs of 64 that are gathered from columns of x:
//! a box of TMA for each block. Weights of blocks narrower than 64 are zero where an output does not keep what its neighbours do. The gradient by
//! x is the same over the gradient by the result. The gradient by the weight has 64 inputs and the outputs that any of them keeps, gathered likewise, over all rows in
//! parts that are added up in order.

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
