//! Attention of queries to the blocks that each of them selected. Kernels attend query by query to its list; otherwise queries are packed by block, a part of
//! the heads at a time.

use std::ops::Range;

use blocksparse::{BlockLayout, LayoutShape};

use crate::selection::parts::in_steps;
use crate::selection::query_lists::{ListsShape, SelectedBlocks};
use crate::selection::token_sparse::backend::{gathers, plan};
use crate::selection::token_sparse::ops::{
    BlockLists, QueryLists, Sparsity, TokenSparseCall, TokenSparseInputs, TokenSparseOps,
};
use burn_blocksparse::internal::prelude::*;
use burn_blocksparse::internal::upload::layout_tensors;
use burn_blocksparse::internal::values::ScoreTensors;
use burn_blocksparse::internal::{Chosen, check, gather_rows, merge_parts};
use burn_blocksparse::layout::DeviceLayoutOptions;
use burn_blocksparse::{
    AttentionOptions, AttentionPlan, DeviceLayout, SparseAttentionCall, WeightsMode,
};

/// Upper bound of the elements of packed queries and outputs in memory at a time. A single head may exceed it.
const PACKED: usize = 1 << 31;

/// Computes attention over a layout and, in addition, over whole blocks that each query lists. Returns out and lse over all of them. A pair counts twice if
/// both contain it, or if a query lists a block twice; this is not checked, because lists are not read back. Differentiable in q, k and v.
///
/// On GPUs with kernels for it ([`SelectedBlocks::explain`]) each query attends to its own list, and the heads that share the list are the rows of a matrix.
/// Elsewhere queries are packed by block.
///
/// ```
/// use burn::tensor::{Device, Distribution, Int, Tensor};
/// use burn_blocksparse::{AttentionOptions, Pattern};
/// use burn_sparse_select::{SelectedBlocks, selected_blocks_attention};
///
/// let device = Device::flex();
/// let q = Tensor::<4>::random([1, 4, 64, 16], Distribution::Default, &device);
/// let [k, v] = [(); 2].map(|_| Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &device));
/// // The own block of 16 keys, and for queries of the last block the first one.
/// let near = Pattern::chunked(16).and_causal().layout(4, 64, 16)?;
/// let rows = (0..2 * 64).map(|row| if row % 64 < 48 { -1 } else { 0 });
/// let blocks = Tensor::<1, Int>::from_data(rows.collect::<Vec<i32>>().as_slice(), &device);
/// let lists = SelectedBlocks::of_blocks(blocks.reshape([1, 2, 64, 1]), 64, 16)?;
/// let (out, lse) = selected_blocks_attention(q, k, v, &near, lists, AttentionOptions::default())?;
/// assert_eq!((out.dims(), lse.dims()), ([1, 4, 64, 16], [1, 4, 64]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// Those of [`sparse_attention`](burn_blocksparse::sparse_attention). The lists are per query head or per KV head.
///
/// # Errors
/// Those of [`sparse_attention`](burn_blocksparse::sparse_attention). Also if the lists have other sizes or another device, and for ALiBi, dropout and stored
/// weights.
pub fn selected_blocks_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    near: &BlockLayout,
    lists: SelectedBlocks,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    check_lists([&q, &k, &v], near, &lists, &options)?;
    attention_of_lists([q, k, v], near, lists, &options)
}

impl SelectedBlocks {
    /// Returns the plan of [`selected_blocks_attention`] for these arguments. [`attention_selected`](crate::selection::attention_selected()) and
    /// [`Nsa`](crate::nsa::Nsa) run the same plan for lists of these sizes.
    ///
    /// # Errors
    /// Those of [`selected_blocks_attention`].
    pub fn explain(
        &self,
        q: &Tensor<4>,
        k: &Tensor<4>,
        v: &Tensor<4>,
        near: &BlockLayout,
        options: &AttentionOptions,
    ) -> Result<OpPlan, OpError> {
        check_lists([q, k, v], near, self, options)?;
        let kernels = listed_kernels([q, k, v], near, self.shape(), options)?;
        Ok(OpPlan::new::<OpError>(&q.device(), |_| {
            Ok(match &kernels {
                Ok(kernels) => kernels.text().to_string(),
                Err(why) => format!("packed  queries by the block that they chose, because {why}"),
            })
        }))
    }
}

/// Rejects options that depend on a query's position or on stored weights: queries may be packed elsewhere.
pub(crate) fn check_options(options: &AttentionOptions) -> Result<(), OpError> {
    let expected = "none where every query chooses for itself";
    blocksparse::ensure! { OpError; options.alibi.is_none() => "options.alibi", expected, "slopes"; }
    if let Some(dropout) = options.active_dropout() {
        let got = dropout.probability;
        return Err(OpError::argument("options.dropout", expected, got));
    }
    blocksparse::ensure! {
        OpError;
        options.weights == WeightsMode::Recompute => "options.weights", "Recompute where every query chooses for itself", "Store";
    }
    Ok(())
}

fn check_lists(
    [q, k, v]: [&Tensor<4>; 3],
    near: &BlockLayout,
    lists: &SelectedBlocks,
    options: &AttentionOptions,
) -> Result<(), OpError> {
    check::call(q, k, v, near.into(), options)?;
    check_options(options)?;
    let ([batch, heads, seq_q, _], kv_heads) = (q.dims(), k.dims()[1]);
    let [list_batch, of_heads, queries, _] = lists.blocks.dims();
    OpError::expect_same("lists' batch", batch, "q's", list_batch)?;
    OpError::expect_same("lists' queries", seq_q, "q's", queries)?;
    blocksparse::ensure! {
        OpError;
        of_heads == heads || of_heads == kv_heads => "lists' heads", format!("{heads} or {kv_heads}, those of q or k"), of_heads;
    }
    let device = lists.blocks.device();
    check::same_device("lists' device", &q.device(), "q's", &device)
}

/// Computes attention over a layout, which is the same for all heads, and over the blocks that queries selected in addition: out and lse.
///
/// Where kernels take single queries, these attend to their lists. Elsewhere heads are computed in parts, which bounds the memory of packed queries. With
/// autodiff a part is never smaller than the heads of a KV head: the gradient of a part is as large as that of the whole.
pub(crate) fn attention_of_choice(
    x: [Tensor<4>; 3],
    near: &BlockLayout,
    lists: Option<SelectedBlocks>,
    options: &AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let Some(lists) = lists else {
        return in_parts(x, near, None, options, PACKED);
    };
    let [q, k, v] = &x;
    check::call(q, k, v, near.into(), options)?;
    attention_of_lists(x, near, lists, options)
}

/// Computes [`attention_of_choice`] with lists, of checked arguments.
fn attention_of_lists(
    x: [Tensor<4>; 3],
    near: &BlockLayout,
    lists: SelectedBlocks,
    options: &AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let [q, k, v] = &x;
    match listed_kernels([q, k, v], near, lists.shape(), options)? {
        Ok(kernels) => kernels.attend(x, near, lists, options),
        Err(_) => in_parts(x, near, Some(lists), options, PACKED),
    }
}

/// Computes [`attention_of_choice`] without kernels over lists, with up to `packed` elements of packed queries and outputs at a time.
fn in_parts(
    [q, k, v]: [Tensor<4>; 3],
    near: &BlockLayout,
    lists: Option<SelectedBlocks>,
    options: &AttentionOptions,
    packed: usize,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let all = [q.clone(), k.clone(), v.clone()];
    let (out, lse) = {
        let [q, k, v] = all;
        SparseAttentionCall::new(q, k, v, near)
            .options(options.clone())
            .run_with_lse()?
    };
    let Some(lists) = lists else {
        return Ok((out, lse));
    };
    let [batch, heads, _, head_dim] = q.dims();
    let ([_, kv_heads, ..], [.., value_dim]) = (k.dims(), v.dims());
    let group = heads / kv_heads;
    let of_head = batch * lists.queries.dims()[2] * (head_dim + value_dim);
    let fitting = (packed / of_head.max(1)).max(1);
    let members = match q.is_autodiff() || k.is_autodiff() || v.is_autodiff() {
        true => group,
        // Parts of equal size, or one head less.
        false => group.div_ceil(group.div_ceil(fitting)),
    };
    if fitting >= heads || members == heads {
        let lists = lists.for_heads(heads);
        return with_lists([q, k, v], (out, lse), lists, options);
    }
    let parts = parts_of(kv_heads, group, members, fitting);
    let mut found = (Vec::new(), Vec::new());
    for part in parts {
        let of_keys = part.start / group..part.end.div_ceil(group);
        let x = [
            q.clone().slice_dim(1, part.clone()),
            k.clone().slice_dim(1, of_keys.clone()),
            v.clone().slice_dim(1, of_keys),
        ];
        let near = (
            out.clone().slice_dim(1, part.clone()),
            lse.clone().slice_dim(1, part.clone()),
        );
        let (out, lse) = with_lists(x, near, lists.of_heads(heads, part), options)?;
        found.0.push(out);
        found.1.push(lse);
    }
    Ok((Tensor::cat(found.0, 1), Tensor::cat(found.1, 1)))
}

/// Splits the heads into ranges. With `members < group` a range has at most `members` heads of one group; otherwise it has whole groups, at most `fitting`
/// heads but at least one group.
fn parts_of(kv_heads: usize, group: usize, members: usize, fitting: usize) -> Vec<Range<usize>> {
    if members < group {
        let groups = (0..kv_heads).map(|kv_head| kv_head * group);
        let parts = groups.flat_map(|first| in_steps(first..first + group, members));
        return parts.collect();
    }
    let heads = kv_heads * group;
    let step = (fitting / group).max(1) * group;
    in_steps(0..heads, step).collect()
}

/// Merges the attention over the layout (`near`) with attention over the lists, in which queries are packed by block.
fn with_lists(
    [q, k, v]: [Tensor<4>; 3],
    near: (Tensor<4>, Tensor<3>),
    lists: SelectedBlocks,
    options: &AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let layout = layout_of(&lists, k.dims()[2])?;
    let packed = gather_rows(q, lists.queries.clone(), lists.places.clone())?;
    let far = SparseAttentionCall::new(packed, k, v, &layout)
        .options(options.clone())
        .run_with_lse()?;
    Ok(merge_parts(near, far, lists.places, lists.choices))
}

/// Returns the layout of the tiles of packed queries. A tile sees one selected block, which is several blocks of the layout.
fn layout_of(lists: &SelectedBlocks, seq_kv: usize) -> Result<DeviceLayout, OpError> {
    let [batch, heads, tiles] = lists.tile_blocks.dims();
    let device = lists.tile_blocks.device();
    let parts = lists.block / lists.tile;
    let dims = [batch, heads, tiles, parts];
    let part = Tensor::<1, Int>::arange(0..parts as i64, (&device, DType::I32));
    let part = part.reshape([1, 1, 1, parts]).expand(dims);
    // Parts of block −1 are negative as well, so they stay absent.
    let blocks = lists.tile_blocks.clone().unsqueeze_dim::<4>(3);
    let indices = blocks.mul_scalar(parts as i32).expand(dims) + part;
    let counts = Tensor::<3, Int>::full([batch, heads, tiles], parts as i32, (&device, DType::I32));
    let shape = LayoutShape::new(heads, [tiles * lists.tile, seq_kv], lists.tile);
    DeviceLayout::from_block_indices(indices, counts, DeviceLayoutOptions::new(shape))
}

/// Kernels of a call that attends query by query.
pub(crate) struct ListedKernels {
    /// Plan of the attention over the layout.
    near: AttentionPlan,
    /// Text of the plan.
    text: String,
}

/// Returns the kernels of the call, or the reason why queries are packed by block instead.
pub(crate) fn listed_kernels(
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

/// Returns the backend call of lists of these sizes.
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
/// A mainloop over a list reads a key of w channels once per list that names it: 2 · w bytes from the L2 cache. Packed, a key costs 2 · w · `rows` operations,
/// and each listed block some passes over `rows` queries and as many outputs, which are copied, written in parts and merged. The rates are of one H100 and the
/// calls in docs/benchmarks.md: blocks of 64 keys with 16 rows take 21 ms query by query and 38 packed. Backward mainloops are further ahead, 59 ms for both
/// passes against 146 packed, so packing must win by a margin.
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
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Computes attention over a layout and the lists: out and lse. Expects checked arguments.
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

#[cfg(test)]
mod tests {
    use blocksparse::Pattern;

    use super::*;
    use crate::selection::{EstimateInputs, Selection};

    #[test]
    fn parts_are_of_whole_groups_or_within_one() {
        assert_eq!(parts_of(2, 4, 3, 3), [0..3, 3..4, 4..7, 7..8]);
        assert_eq!(parts_of(3, 2, 2, 5), [0..4, 4..6]);
        assert_eq!(parts_of(3, 1, 1, 2), [0..2, 2..3]);
        // At least one group.
        assert_eq!(parts_of(2, 4, 4, 1), [0..4, 4..8]);
    }

    /// The number of heads per part does not change results, with lists per head or per group.
    #[cfg(feature = "flex")]
    #[test]
    fn parts_give_what_the_whole_gives() {
        use burn::tensor::{Device, Distribution};
        let device = Device::flex();
        let random = |heads| Tensor::<4>::random([2, heads, 60, 4], Distribution::Default, &device);
        let [q, k, v] = [random(6), random(2), random(2)];
        let near = Pattern::chunked(8).and_causal().layout(6, 60, 8).unwrap();
        for text in ["moba:8,3", "moba:8,3,share=sum"] {
            let selection: Selection = text.parse().unwrap();
            let lists = selection.query_lists(&EstimateInputs::new(q.clone(), k.clone()));
            let lists = lists.unwrap().unwrap();
            let of_head = 2 * lists.queries.dims()[2] * 8;
            let run = |q: &Tensor<4>, heads: usize| {
                let x = [q.clone(), k.clone(), v.clone()];
                let options = AttentionOptions::default();
                let lists = Some(lists.clone());
                let (out, lse) = in_parts(x, &near, lists, &options, heads * of_head).unwrap();
                (out.into_data(), lse.into_data())
            };
            let whole = run(&q, 6);
            for heads in [0, 1, 2, 3, 4, 5] {
                assert!(run(&q, heads) == whole, "{text}, {heads} heads at a time");
                #[cfg(feature = "autodiff")]
                assert!(
                    run(&q.clone().autodiff(), heads) == whole,
                    "{text}, {heads} heads"
                );
            }
        }
    }
}
