//! Steps of content-based selection on each backend. Autodiff has none: selections pass tensors without autodiff.

#[cfg(feature = "cube")]
mod kernels {
    use crate::kernels::rows;
    use crate::kernels::rows::blocks::{Beside, Blocked, RowBlocks};
    use crate::kernels::selection::highest;
    use blocksparse_cubecl as kernels;
    use blocksparse_cubecl::error::KernelError;
    use blocksparse_cubecl::{KeyListSizes, ListBuffers, ListSizes, ScoredRows};
    use burn::backend::cubecl::dtype_to_elem_type;
    use burn::tensor::{DType, IntDType};
    use burn_cubecl::CubeBackend;
    use burn_cubecl::kernel::{cast, into_contiguous};
    use burn_cubecl::tensor::CubeTensor;
    use cubecl::prelude::Client;
    use cubecl::server::Handle;

    use crate::selection::ops::SelectionOps;
    use crate::selection::reference;
    use crate::selection::values::{
        QueriesOfBlocks, QueryTiles, TopKBlocks, TopKLists, UniqueKeys,
    };
    use burn_blocksparse::internal::cube::{empty, uses_reference};

    /// Selects the highest-scoring blocks, one row per warp on devices with warps.
    fn chosen(
        client: &Client,
        of: &ScoredRows,
        [scores, picks]: [&Handle; 2],
    ) -> Result<(), KernelError> {
        if highest::is_served(client, of) {
            return highest::highest_of_rows(client, of, scores, picks);
        }
        kernels::highest_blocks(client, of, scores, picks)
    }

    impl SelectionOps for CubeBackend {
        fn block_means(x: CubeTensor, block: usize) -> CubeTensor {
            let [batch, heads, rows, width] = x.meta.shape().dims();
            let x = into_contiguous(x);
            let means = empty(&x, [batch, heads, rows.div_ceil(block), width], DType::F32);
            let element = dtype_to_elem_type(x.dtype);
            let of = RowBlocks::new(batch * heads, [rows, width], block);
            let blocked = Blocked {
                x: &x.handle,
                of: &of,
                means: &means.handle,
            };
            let result = match uses_reference() {
                true => None,
                false => rows::block_means(&x.client, element, blocked, Beside::default()).ok(),
            };
            match result {
                Some(()) => means,
                None => reference::block_means::<Self>(x, block),
            }
        }

        fn highest_blocks(scores: CubeTensor, call: TopKBlocks) -> CubeTensor {
            let [batch, lists, rows, blocks] = scores.meta.shape().dims();
            if uses_reference() || batch * lists * rows == 0 {
                return reference::highest_blocks::<Self>(scores, &call);
            }
            let scores = into_contiguous(cast(scores, DType::F32));
            let picks = empty(&scores, [batch, lists, rows, call.most], DType::I32);
            let of = ScoredRows::new(
                [batch * lists, rows],
                call.position,
                [blocks, call.block],
                call.most,
            );
            match chosen(&scores.client, &of, [&scores.handle, &picks.handle]) {
                Ok(()) => picks,
                Err(_) => reference::highest_blocks::<Self>(scores, &call),
            }
        }

        fn topk_rows(numbers: CubeTensor, most: usize) -> TopKLists<Self> {
            let dims @ [groups, rows, columns] = numbers.meta.shape().dims();
            if uses_reference() {
                return reference::topk_rows::<Self>(numbers, most);
            }
            let numbers = into_contiguous(cast(numbers, DType::F32));
            let lists = empty(&numbers, [groups, rows, most], DType::I32);
            let places = empty(&numbers, dims, DType::I32);
            let made = [&lists.handle, &places.handle];
            let of = [groups, rows, columns];
            match rows::topk_rows(&numbers.client, of, most, &numbers.handle, made) {
                Ok(()) => TopKLists {
                    columns: lists,
                    places,
                },
                Err(_) => reference::topk_rows::<Self>(numbers, most),
            }
        }

        fn unique_keys(keys: CubeTensor, call: UniqueKeys) -> CubeTensor {
            let dims @ [batch, lists, queries, most] = keys.meta.shape().dims();
            if uses_reference() {
                return reference::unique_keys::<Self>(keys, &call);
            }
            let keys = into_contiguous(cast(keys, IntDType::I32.into()));
            let unique = empty(&keys, dims, DType::I32);
            let sizes = KeyListSizes::new(batch * lists, [queries, call.seq_kv], most);
            let result = kernels::unique_keys(
                &keys.client,
                &sizes,
                &keys.handle,
                call.causal,
                &unique.handle,
            );
            match result {
                Ok(()) => unique,
                Err(_) => reference::unique_keys::<Self>(keys, &call),
            }
        }

        fn list_queries(picks: CubeTensor, call: QueryTiles) -> QueriesOfBlocks<Self> {
            let dims @ [batch, lists, queries, most] = picks.meta.shape().dims();
            if uses_reference() || batch * lists * queries * most == 0 {
                return reference::list_queries::<Self>(picks, &call);
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
                Ok(()) => QueriesOfBlocks {
                    places,
                    choices,
                    tile_blocks,
                },
                Err(_) => reference::list_queries::<Self>(picks, &call),
            }
        }
    }
}
