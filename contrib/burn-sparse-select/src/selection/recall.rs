//! How much of the attention a choice keeps.

use burn::tensor::Tensor;

use burn_blocksparse::{AttentionOptions, Layout, OpError, SparseAttentionCall};

/// The share of each query's full attention that the pairs of a layout have, `Σ p` over them `= exp(lse of the layout − lse of all)`: 1 where nothing that
/// matters is left out, 0 for a query without a pair. How far an output can be from that of full attention is bounded by it:
/// `‖o − o_full‖ ≤ 2 (1 − recall) · max‖v‖`.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{AttentionOptions, Pattern, SparseAttentionCall};
/// use burn_sparse_select::{EstimateInputs, Selection, recall};
///
/// let [q, k, v] = [(); 3]
///     .map(|_| Tensor::<4>::random([1, 2, 256, 16], Distribution::Default, &Device::flex()));
/// let selection: Selection = "topk:32,4".parse()?;
/// let layout = selection.choose(&EstimateInputs::new(q.clone(), k.clone()))?.layout;
/// let options = AttentionOptions::default();
/// let full = Pattern::causal().layout(2, 256, 32)?;
/// let call = SparseAttentionCall::new(q.clone(), k.clone(), v, &full);
/// let (_, lse) = call.options(options.clone()).run_with_lse()?;
/// let recall = recall(q, k, lse, &layout, options)?;
/// assert_eq!(recall.dims(), [1, 2, 256]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `q`: `[batch, heads, seq_q, head_dim]`, `k`: `[batch, kv_heads, seq_kv, head_dim]`
/// - `lse`: `[batch, heads, seq_q]`, of full attention with the same options
/// - result: as `lse`, without autodiff
///
/// # Errors
/// As [`sparse_attention`](burn_blocksparse::sparse_attention), and if `lse` does not fit.
pub fn recall<'a>(
    q: Tensor<4>,
    k: Tensor<4>,
    lse: Tensor<3>,
    layout: impl Into<Layout<'a>>,
    options: AttentionOptions,
) -> Result<Tensor<3>, OpError> {
    let (q, k) = (q.without_autodiff(), k.without_autodiff());
    let [batch, heads, rows, _] = q.dims();
    OpError::expect_same("lse's shape", [batch, heads, rows], "q's rows", lse.dims())?;
    let (_, chosen) = SparseAttentionCall::new(q, k.clone(), k, layout)
        .options(options)
        .run_with_lse()?;
    let lse = lse.without_autodiff().cast(chosen.dtype());
    let empty = lse.clone().equal_elem(f32::NEG_INFINITY);
    Ok((chosen - lse).exp().mask_fill(empty, 0.0))
}
