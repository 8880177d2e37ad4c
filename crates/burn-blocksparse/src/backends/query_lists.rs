//! Lists of queries on each backend. Autodiff has none: selections hand over tensors that it does not follow.

#[cfg(any(feature = "flex", feature = "ndarray", feature = "cube"))]
use crate::ops::QueryListOps;

#[cfg(feature = "flex")]
impl QueryListOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl QueryListOps for burn::backend::NdArray {}

#[cfg(feature = "cube")]
mod kernels {
    use blocksparse::kernels::{self, ListBuffers, ListSizes, ScoredRows};
    use burn::tensor::{DType, IntDType};
    use burn_cubecl::CubeBackend;
    use burn_cubecl::kernel::{cast, into_contiguous};
    use burn_cubecl::tensor::CubeTensor;

    use super::QueryListOps;
    use crate::backends::cube::{empty, uses_reference};
    use crate::ops::{HighestBlocks, ListedQueries, QueryTiles};
    use crate::selection::list_reference;

    impl QueryListOps for CubeBackend {
        fn highest_blocks(scores: CubeTensor, call: HighestBlocks) -> CubeTensor {
            let [batch, lists, rows, blocks] = scores.meta.shape().dims();
            if uses_reference() || batch * lists * rows == 0 {
                return list_reference::highest_blocks::<Self>(scores, &call);
            }
            let scores = into_contiguous(cast(scores, DType::F32));
            let picks = empty(&scores, [batch, lists, rows, call.most], DType::I32);
            let of = ScoredRows::new(
                [batch * lists, rows],
                call.position,
                [blocks, call.block],
                call.most,
            );
            let result =
                kernels::highest_blocks(&scores.client, &of, &scores.handle, &picks.handle);
            match result {
                Ok(()) => picks,
                Err(_) => list_reference::highest_blocks::<Self>(scores, &call),
            }
        }

        fn list_queries(picks: CubeTensor, call: QueryTiles) -> ListedQueries<Self> {
            let dims @ [batch, lists, queries, most] = picks.meta.shape().dims();
            if uses_reference() || batch * lists * queries * most == 0 {
                return list_reference::list_queries::<Self>(picks, &call);
            }
            let picks = into_contiguous(cast(picks, IntDType::I32.into()));
            let sizes = ListSizes::new(
                [batch * lists, queries * most, call.blocks],
                [call.tiles, call.tile],
            );
            let places = empty(&picks, dims, DType::I32);
            let choices = empty(&picks, [batch, lists, call.tiles * call.tile], DType::I32);
            let tile_blocks = empty(&picks, [batch, lists, call.tiles], DType::I32);
            let result = kernels::list_queries(
                &picks.client,
                &sizes,
                &picks.handle,
                &ListBuffers {
                    places: &places.handle,
                    choices: &choices.handle,
                    tile_blocks: &tile_blocks.handle,
                },
            );
            match result {
                Ok(()) => ListedQueries::new(places, choices, tile_blocks),
                Err(_) => list_reference::list_queries::<Self>(picks, &call),
            }
        }
    }
}
