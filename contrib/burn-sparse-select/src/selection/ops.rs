//! The backend trait of choices by content, and what crosses it.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};
#[cfg(feature = "fusion")]
use burn::tensor::DType;

use crate::selection::reference;
use crate::selection::token_sparse::reference::unique_keys;
use burn_blocksparse::internal::values::OptFloat;
use burn_blocksparse::reference_backends;

/// Which blocks queries take, of the scores of some of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopKBlocks {
    /// The position of the first query of the scores; the first key's is 0.
    pub position: i64,
    /// Keys of a block.
    pub block: usize,
    /// Blocks that a query takes, at most.
    pub most: usize,
}

/// Which of the keys that queries list they see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UniqueKeys {
    /// Keys that there are.
    pub seq_kv: usize,
    /// Whether a query sees none behind its own position; the last query sits at the last key.
    pub causal: bool,
}

impl UniqueKeys {
    /// So many keys a query of `seq_q` sees, from the first on.
    pub fn seen(&self, query: usize, seq_q: usize) -> usize {
        match self.causal {
            true => (query + 1 + self.seq_kv)
                .saturating_sub(seq_q)
                .min(self.seq_kv),
            false => self.seq_kv,
        }
    }
}

/// The sizes of lists of queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueryTiles {
    /// Blocks of keys.
    pub blocks: usize,
    /// Tiles of a list, as many as all choices need.
    pub tiles: usize,
    /// Places of a tile.
    pub tile: usize,
}

/// Queries by the blocks that they chose: i32, −1 for none.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct QueriesOfBlocks<B: Backend> {
    /// The place of each choice: `[batch, lists, queries, most]`.
    pub places: IntTensor<B>,
    /// The choice at each place: `[batch, lists, tiles · tile]`.
    pub choices: IntTensor<B>,
    /// The block of each tile: `[batch, lists, tiles]`.
    pub tile_blocks: IntTensor<B>,
}

/// Steps of choices by content as backend operations, on tensors that are not on an autodiff device. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait SelectionOps: Backend {
    /// The means of blocks of neighbouring rows of `[batch, heads, rows, width]`, with at least one row: `[batch, heads, blocks, width]`, f32.
    #[fusion(dtype = DType::F32, shape = [x[0], x[1], x[2].div_ceil(*block), x[3]].into())]
    fn block_means(x: FloatTensor<Self>, block: usize) -> FloatTensor<Self> {
        reference::block_means::<Self>(x, block)
    }

    /// The means of the cosines of all pairs of rows of such blocks, of rows less `less` `[batch, heads, 1, width]`: `[batch, heads, blocks, 1]`, f32.
    #[fusion(dtype = DType::F32, shape = [x[0], x[1], x[2].div_ceil(*block), 1].into())]
    fn block_likeness(
        x: FloatTensor<Self>,
        #[extension_type] less: OptFloat<Self>,
        block: usize,
    ) -> FloatTensor<Self> {
        reference::block_likeness::<Self>(x, less.into_option(), block)
    }

    /// The blocks of the highest of `scores` `[batch, lists, rows, blocks]`, f32, before the block that a row's own position lies in, by falling score;
    /// of equal ones the earlier, and NaN is the lowest: `[batch, lists, rows, most]`, i32, −1 where there are fewer.
    #[fusion(dtype = DType::I32, shape = [scores[0], scores[1], scores[2], call.most].into())]
    fn highest_blocks(scores: FloatTensor<Self>, call: TopKBlocks) -> IntTensor<Self> {
        reference::highest_blocks::<Self>(scores, &call)
    }

    /// The lists of such blocks: the queries that chose a block have neighbouring places, in order, from the first place of a tile on.
    #[fusion(meta = meta::lists)]
    fn list_queries(picks: IntTensor<Self>, call: QueryTiles) -> QueriesOfBlocks<Self> {
        reference::list_queries::<Self>(picks, &call)
    }

    /// Lists of keys `[batch, lists, queries, most]`, in any order: those that a query sees, ascending, each once, and −1 behind the last. i32.
    #[fusion(dtype = DType::I32, shape = keys)]
    fn unique_keys(keys: IntTensor<Self>, call: UniqueKeys) -> IntTensor<Self> {
        unique_keys::<Self>(keys, &call)
    }
}

reference_backends!(SelectionOps);

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;

    pub fn lists(picks: &TensorSpec, call: &QueryTiles) -> QueriesOfBlocksMetadata {
        let [batch, lists, ..] = picks.shape.dims::<4>();
        QueriesOfBlocksMetadata {
            places: TensorSpec::new(picks.shape.clone(), DType::I32),
            choices: TensorSpec::new([batch, lists, call.tiles * call.tile].into(), DType::I32),
            tile_blocks: TensorSpec::new([batch, lists, call.tiles].into(), DType::I32),
        }
    }
}
