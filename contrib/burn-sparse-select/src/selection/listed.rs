//! Queries that attend to the blocks they chose, by kernels that take single queries: where a device has them and they take the call.

use blocksparse::BlockLayout;
use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::selection::query_lists::{ListsShape, SelectedBlocks};
use crate::selection::token_sparse::backend::{gathers, plan};
use crate::selection::token_sparse::ops::TokenSparseOps;
use crate::selection::token_sparse::values::{
    BlockLists, QueryLists, Sparsity, TokenSparseCall, TokenSparseInputs,
};
use burn_blocksparse::internal::Chosen;
use burn_blocksparse::internal::upload::layout_tensors;
use burn_blocksparse::internal::values::ScoreTensors;
use burn_blocksparse::{AttentionOptions, AttentionPlan, OpError, WeightsMode};

/// What a call that kernels take runs.
pub(crate) struct ListedKernels {
    /// For what queries see besides their lists.
    near: AttentionPlan,
    /// As plans print it.
    text: String,
}

/// What runs, or why queries are packed by block instead.
pub(crate) fn choose(
    [q, k, v]: [&Tensor<4>; 3],
    near: &BlockLayout,
    shape: ListsShape,
    options: &AttentionOptions,
) -> Result<Result<ListedKernels, String>, OpError> {
    let why = |text: &str| Ok(Err(text.to_string()));
    if let Err(text) = gathers(q, options) {
        return why(text);
    }
    let plain = options.softcap.is_none()
        && options.alibi.is_none()
        && options.active_dropout().is_none()
        && options.weights == WeightsMode::Recompute
        && options.softmax_threshold.is_none()
        && !options.max_scores;
    if !plain {
        return why("the options ask for more than scaled scores");
    }
    if shape.lists != k.dims()[1] {
        return why("heads that share keys choose each for itself");
    }
    let rows = q.dims()[1] / k.dims()[1];
    if is_faster_packed(shape.block, rows) {
        return why(
            "a list of so few heads reads long blocks for itself, and packed queries share them",
        );
    }
    let call = call(shape, options.scale_for(q.dims()[3]));
    let text = match plan([q, k, v], [shape.most, shape.tiles], &call) {
        Ok(text) => text,
        Err(text) => return why(text),
    };
    let scores = ScoreTensors::default();
    let Chosen { plan: near, packed } =
        AttentionPlan::choose(q, k, v, &scores, near.into(), options)?;
    if packed.is_some() {
        return why("heads of so few queries are packed");
    }
    Ok(Ok(ListedKernels { near, text }))
}

/// A call of lists of these sizes.
fn call(shape: ListsShape, scale: f64) -> TokenSparseCall {
    let ListsShape { block, tile, .. } = shape;
    TokenSparseCall {
        sparsity: Sparsity::Blocks { block, tile },
        scale,
        overlap: shape.overlap,
        dispatch: true,
    }
}

/// Returns whether queries that are packed by block are estimated to be faster than mainloops over lists that `rows` heads share.
///
/// A mainloop over a list reads a key of width w for each list that names it, 2 · w bytes from the L2 cache. Packed, it costs 2 · w · `rows` operations, and each
/// listed block some passes over `rows` queries and as many outputs, which are copied, written in parts and merged. All rates are of one H100, of
/// the calls in docs/benchmarks.md: those of 64 · 16 are 21 ms query by query and 38 packed. Backward mainloops are further ahead, 59 ms for both passes where packed
/// ones take 146, so packing has to be well ahead.
fn is_faster_packed(block: usize, rows: usize) -> bool {
    const BYTES_OF_CACHE: f64 = 5.2e12;
    const OPERATIONS: f64 = 450e12;
    const BYTES_OF_MEMORY: f64 = 3.3e12;
    const PASSES: f64 = 4.5;
    const AHEAD: f64 = 1.2;
    let (block, rows) = (block as f64, rows as f64);
    let by_query = 2.0 * block / BYTES_OF_CACHE;
    let packed = 2.0 * block * rows / OPERATIONS + 2.0 * PASSES * rows / BYTES_OF_MEMORY;
    AHEAD * packed < by_query
}

impl ListedKernels {
    /// As plans print it.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Attention over a layout and over lists beside it: out and lse. The arguments were checked.
    pub(crate) fn attend(
        self,
        [q, k, v]: [Tensor<4>; 3],
        near: &BlockLayout,
        lists: SelectedBlocks,
        options: &AttentionOptions,
    ) -> Result<(Tensor<4>, Tensor<3>), OpError> {
        let mut layout = layout_tensors(near, &q.device(), true)?;
        layout.plan = self.near.kernels();
        let call = call(lists.shape(), options.scale_for(q.dims()[3]));
        let inputs = TokenSparseInputs {
            q: q.into_dispatch(),
            k: k.into_dispatch(),
            v: v.into_dispatch(),
            lists: QueryLists::Blocks(BlockLists {
                blocks: lists.blocks.into_dispatch(),
                queries: lists.queries.into_dispatch(),
                tile_blocks: lists.tile_blocks.into_dispatch(),
                places: lists.places.into_dispatch(),
                near: layout,
            }),
        };
        let output = <Dispatch as TokenSparseOps>::token_sparse_attention(inputs, call);
        let (out, lse) = (output.out, output.lse);
        Ok((Tensor::from_dispatch(out), Tensor::from_dispatch(lse)))
    }
}
