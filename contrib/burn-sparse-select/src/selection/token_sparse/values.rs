//! What crosses backends of queries that list what they see.

// What crosses backends holds its tensors itself, also where the macro makes it.
#![allow(clippy::large_enum_variant)]

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, ExtensionType};

use burn_blocksparse::internal::values::LayoutTensors;
use burn_blocksparse::op_values;

/// What the numbers of lists name, with the sizes that are in none of their shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sparsity {
    /// Single keys.
    Tokens {
        /// True if no query lists a key after its own position.
        causal: bool,
    },
    /// Blocks of keys.
    Blocks {
        /// Keys of a block.
        block: usize,
        /// Places of a tile of queries.
        tile: usize,
    },
}

/// Parameters of a call over lists, besides its tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct TokenSparseCall {
    /// Kind of the lists.
    pub sparsity: Sparsity,
    /// Factor of the scores.
    pub scale: f64,
    /// The share that the lists of adjacent queries are expected to have in common, from 0 to 1.
    pub overlap: f64,
    /// True if kernels gather by the lists.
    pub dispatch: bool,
}

/// Lists of queries: i32, for each head of keys, on the device.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub enum QueryLists<B: Backend> {
    /// The keys that each query sees: `[batch, kv_heads, seq_q, most]`, ascending, each once, −1 after the last.
    Tokens(IntTensor<B>),
    /// The blocks that each query sees whole beside a layout. They are computed in kernels only where a plan of kernels says so: elsewhere the same is composed of other
    /// operations.
    Blocks(#[extension_type] BlockLists<B>),
}

op_values! {
    /// Lists of blocks, by queries and by blocks, as [`SelectedBlocks`](crate::selection::SelectedBlocks) has them.
    pub struct BlockLists {
        /// The blocks of each query: `[batch, kv_heads, seq_q, most]`, negative for none.
        pub blocks: IntTensor,
        /// The query at each place: `[batch, kv_heads, places]`,
        pub queries: IntTensor,
        /// and the block of each tile of places: `[batch, kv_heads, tiles]`.
        pub tile_blocks: IntTensor,
        /// The place of each choice: `[batch, kv_heads, seq_q, most]`, negative for none.
        pub places: IntTensor,
        /// Layout of what queries see in addition to their lists.
        pub near: LayoutTensors,
    }

    /// Inputs of attention over lists.
    pub struct TokenSparseInputs {
        /// `[batch, heads, seq_q, head_dim]`
        pub q: FloatTensor,
        /// `[batch, kv_heads, seq_kv, head_dim]`
        pub k: FloatTensor,
        /// `[batch, kv_heads, seq_kv, value_dim]`
        pub v: FloatTensor,
        /// Lists of the queries.
        pub lists: QueryLists,
    }

    /// Out and lse, over all keys that queries see.
    pub struct TokenSparseOutput {
        /// `[batch, heads, seq_q, value_dim]`, in the inputs' dtype.
        pub out: FloatTensor,
        /// `[batch, heads, seq_q]`, in the dtype of sums.
        pub lse: FloatTensor,
    }

    /// Tensors saved for the backward pass.
    pub struct TokenSparseSaved {
        /// Its inputs.
        pub inputs: TokenSparseInputs,
        /// Its output.
        pub output: TokenSparseOutput,
    }

    /// Gradients, each of its input's shape and dtype.
    pub struct TokenSparseGrads {
        /// `[batch, heads, seq_q, head_dim]`
        pub q: FloatTensor,
        /// `[batch, kv_heads, seq_kv, head_dim]`
        pub k: FloatTensor,
        /// `[batch, kv_heads, seq_kv, value_dim]`
        pub v: FloatTensor,
    }
}
