//! Backend trait of content-based selection.

use crate::selection::reference;
use crate::selection::values::{QueriesOfBlocks, QueryTiles, TopKBlocks, TopKLists, UniqueKeys};
use burn_blocksparse::internal::prelude::*;

/// Steps of content-based selection as backend operations, on tensors without autodiff. The public functions check the arguments.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait SelectionOps: Backend {
    /// Computes the means of blocks of adjacent rows of `[batch, heads, rows, width]`, with at least one row: f32 `[batch, heads, blocks, width]`.
    #[fusion(dtype = DType::F32, shape = [x[0], x[1], x[2].div_ceil(*block), x[3]].into())]
    fn block_means(x: FloatTensor<Self>, block: usize) -> FloatTensor<Self> {
        reference::block_means::<Self>(x, block)
    }

    /// Computes for each block the mean cosine of all pairs of its rows, after subtracting `less` `[batch, heads, 1, width]`: f32 `[batch, heads, blocks, 1]`.
    #[fusion(dtype = DType::F32, shape = [x[0], x[1], x[2].div_ceil(*block), 1].into())]
    fn block_self_similarity(
        x: FloatTensor<Self>,
        #[extension_type] less: OptFloat<Self>,
        block: usize,
    ) -> FloatTensor<Self> {
        reference::block_self_similarity::<Self>(x, less.into_option(), block)
    }

    /// Returns the highest-scoring blocks before the block of a row's own position: i32 `[batch, lists, rows, most]`, by `scores`
    /// `[batch, lists, rows, blocks]` in f32. In descending order of scores, ties in favor of the earlier block, NaN last, −1 where there are fewer.
    #[fusion(dtype = DType::I32, shape = [scores[0], scores[1], scores[2], call.most].into())]
    fn highest_blocks(scores: FloatTensor<Self>, call: TopKBlocks) -> IntTensor<Self> {
        reference::highest_blocks::<Self>(scores, &call)
    }

    /// Builds the inverse lists of selected blocks. The queries that selected a block have adjacent places, in order, which begin at the start of a tile.
    #[fusion(meta = meta::lists)]
    fn list_queries(picks: IntTensor<Self>, call: QueryTiles) -> QueriesOfBlocks<Self> {
        reference::list_queries::<Self>(picks, &call)
    }

    /// Returns the `most` highest elements of each row of `[groups, rows, columns]`. Ties go to the earlier column; NaN sorts last.
    #[fusion(meta = meta::highest)]
    fn topk_rows(numbers: FloatTensor<Self>, most: usize) -> TopKLists<Self> {
        reference::topk_rows::<Self>(numbers, most)
    }

    /// Returns the keys of lists `[batch, lists, queries, most]`, in any order, that a query sees: i32, ascending and unique, then −1.
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
