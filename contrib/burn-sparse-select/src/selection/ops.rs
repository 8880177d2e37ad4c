//! The backend trait of choices by content.

use crate::selection::reference;
use crate::selection::values::{QueriesOfBlocks, QueryTiles, TopKBlocks, TopKLists, UniqueKeys};
use burn_blocksparse::internal::prelude::*;

/// Steps of choices by content as backend operations, on tensors that are not on an autodiff device. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait SelectionOps: Backend {
    /// The means of blocks of adjacent rows of `[batch, heads, rows, width]`, with at least one row: `[batch, heads, blocks, width]`, f32.
    #[fusion(dtype = DType::F32, shape = [x[0], x[1], x[2].div_ceil(*block), x[3]].into())]
    fn block_means(x: FloatTensor<Self>, block: usize) -> FloatTensor<Self> {
        reference::block_means::<Self>(x, block)
    }

    /// The means of the cosines of all pairs of rows of such blocks, of rows less `less` `[batch, heads, 1, width]`: `[batch, heads, blocks, 1]`, f32.
    #[fusion(dtype = DType::F32, shape = [x[0], x[1], x[2].div_ceil(*block), 1].into())]
    fn block_self_similarity(
        x: FloatTensor<Self>,
        #[extension_type] less: OptFloat<Self>,
        block: usize,
    ) -> FloatTensor<Self> {
        reference::block_self_similarity::<Self>(x, less.into_option(), block)
    }

    /// The blocks of the highest of `scores` `[batch, lists, rows, blocks]`, f32, before the block that a row's own position lies in, by falling score;
    /// ties go to the earlier, NaN sorts last: `[batch, lists, rows, most]`, i32, −1 where there are fewer.
    #[fusion(dtype = DType::I32, shape = [scores[0], scores[1], scores[2], call.most].into())]
    fn highest_blocks(scores: FloatTensor<Self>, call: TopKBlocks) -> IntTensor<Self> {
        reference::highest_blocks::<Self>(scores, &call)
    }

    /// The lists of such blocks: the queries that chose a block have adjacent places, in order, from the first place of a tile on.
    #[fusion(meta = meta::lists)]
    fn list_queries(picks: IntTensor<Self>, call: QueryTiles) -> QueriesOfBlocks<Self> {
        reference::list_queries::<Self>(picks, &call)
    }

    /// The `most` highest of each row of `[groups, rows, columns]`: ties go to the earlier, NaN sorts last.
    #[fusion(meta = meta::highest)]
    fn topk_rows(numbers: FloatTensor<Self>, most: usize) -> TopKLists<Self> {
        reference::topk_rows::<Self>(numbers, most)
    }

    /// Lists of keys `[batch, lists, queries, most]`, in any order: those that a query sees, ascending, each once, and −1 after the last. i32.
    #[fusion(dtype = DType::I32, shape = keys)]
    fn unique_keys(keys: IntTensor<Self>, call: UniqueKeys) -> IntTensor<Self> {
        reference::unique_keys::<Self>(keys, &call)
    }
}

reference_backends!(SelectionOps);

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use super::*;
    use crate::selection::values::{QueriesOfBlocksMetadata, TopKListsMetadata};

    pub fn highest(numbers: &TensorSpec, most: &usize) -> TopKListsMetadata {
        let [groups, rows, _] = numbers.shape.dims::<3>();
        TopKListsMetadata {
            columns: TensorSpec::new([groups, rows, *most].into(), DType::I32),
            places: TensorSpec::new(numbers.shape.clone(), DType::I32),
        }
    }

    pub fn lists(picks: &TensorSpec, call: &QueryTiles) -> QueriesOfBlocksMetadata {
        let [batch, lists, ..] = picks.shape.dims::<4>();
        QueriesOfBlocksMetadata {
            places: TensorSpec::new(picks.shape.clone(), DType::I32),
            choices: TensorSpec::new([batch, lists, call.tiles * call.tile].into(), DType::I32),
            tile_blocks: TensorSpec::new([batch, lists, call.tiles].into(), DType::I32),
        }
    }
}
