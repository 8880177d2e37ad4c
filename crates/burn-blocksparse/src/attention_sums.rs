//! Weights summed over columns and diagonals, without the weights.

use std::ops::Range;

use blocksparse::BlockLayout;

use crate::attention::ops::BlockSparseOps;
use crate::attention::plan;
use crate::attention::tensors::AttentionTensors;
use crate::base::prelude::*;
use crate::base::values::AccumulatedInputs;
use crate::check::same_device;
use crate::options::AttentionOptions;
use crate::{check, upload};

/// Options of [`accumulated_attention`]. Build them from [`Default`].
#[derive(Clone, Debug, Default)]
#[must_use]
#[non_exhaustive]
pub struct AccumulatedAttentionOptions {
    /// Options of the attention.
    pub attention: AttentionOptions,
    /// Its further tensors.
    pub tensors: AttentionTensors,
    /// The queries that count; default all.
    pub queries: Option<Range<usize>>,
}

impl AccumulatedAttentionOptions {
    blocksparse::setters! {
        /// Sets what the attention was computed with: scale, softcap and ALiBi matter. Weights are those before dropout, and no product is
        /// rounded to tf32.
        attention: AttentionOptions,
        /// Sets the attention's further tensors: biases matter. Sinks are in its lse.
        tensors: AttentionTensors,
        /// Sets the queries that count. Blocks without one of them cost nothing.
        queries: Some(Range<usize>),
    }
}

/// Output of [`accumulated_attention`], in lse's dtype.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AccumulatedAttention {
    /// `[batch, heads, seq_kv]`: of each key, the sum over queries.
    pub columns: Tensor<3>,
    /// `[batch, heads, seq_q + seq_kv − 1]`: of each distance `i − j`, from `1 − seq_q` (keys ahead) on, the sum over the pairs at it.
    /// Element `seq_q − 1 + distance`; `i` and `j` are positions, and query row `r` sits at `r + seq_kv − seq_q`. Distances from 0 on begin at
    /// element `seq_q − 1`.
    pub diagonals: Tensor<3>,
}

/// Sums the attention of each key and of each distance: sums of `p[i, j] = exp(score[i, j] − lse[i])` over the allowed pairs, in O(n) memory and
/// a small multiple for kept blocks, without the weights. Keys that recent queries look at are what SnapKV keeps of a cache (Li et al., 2024);
/// the largest columns and diagonals of the last queries are MInference's vertical-slash pattern (Jiang et al., 2024, section 3), which
/// `burn-sparse-select`'s `vertical_slash_layout` takes.
///
/// Deterministic; not differentiable: the sums leave the autodiff graph.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{AccumulatedAttentionOptions, BlockLayout, LayoutShape, Pattern, SparseAttentionCall, accumulated_attention};
///
/// let [q, k, v] = [(); 3].map(|_| Tensor::<4>::random([1, 2, 256, 16], Distribution::Default, &Device::flex()));
/// // The last 64 queries also show where the others look.
/// let shape = LayoutShape { heads: 2, seq_q: 64, seq_kv: 256, block_size: 32 };
/// let window = BlockLayout::new(&Pattern::causal(), shape)?;
/// let last = q.clone().narrow(2, 192, 64);
/// let (_, lse) = SparseAttentionCall::new(last.clone(), k.clone(), v, &window).run_with_lse()?;
/// let sums = accumulated_attention(last, k, lse, &window, AccumulatedAttentionOptions::default())?;
/// let columns = sums.columns.argtopk(8, 2);
/// // Distances from 0 on.
/// let diagonals = sums.diagonals.narrow(2, 63, 256).argtopk(16, 2);
/// assert_eq!(columns.dims(), [1, 2, 8]);
/// # assert_eq!(diagonals.dims(), [1, 2, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `q`: `[batch, heads, seq_q, head_dim]`
/// - `k`: `[batch, kv_heads, seq_kv, head_dim]`; `kv_heads` divides `heads`
/// - `lse`: `[batch, heads, seq_q]`, as [`SparseAttentionCall::lse`](crate::SparseAttentionCall::lse) returned it for the same arguments
///
/// # Errors
/// [`OpError`] if shapes, dtypes, devices or options do not fit each other or the layout, or if the device cannot run the call.
pub fn accumulated_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    lse: Tensor<3>,
    layout: &BlockLayout,
    options: AccumulatedAttentionOptions,
) -> Result<AccumulatedAttention, OpError> {
    // Before the check, which would speak of a v.
    let ([.., head_dim], [.., k_dim]) = (q.dims(), k.dims());
    OpError::expect_same("k's head_dim", head_dim, "q's", k_dim)?;
    check::shapes(&q, &k, &k, layout)?;
    let AccumulatedAttentionOptions {
        attention: options,
        tensors,
        queries,
    } = options;
    options.validate(layout.heads(), q.dtype())?;
    tensors.check(&q, layout)?;
    let [batch, heads, seq_q, _] = q.dims();
    OpError::expect_same("lse's shape", [batch, heads, seq_q], "q's rows", lse.dims())?;
    let dtype = sums_of(q.dtype());
    OpError::expect_same("lse's dtype", dtype, "that of q's sums", lse.dtype())?;
    same_device("lse's device", &q.device(), "q's", &lse.device())?;
    let queries = queries.unwrap_or(0..seq_q);
    blocksparse::ensure! {
        OpError;
        queries.start < queries.end && queries.end <= seq_q
            => "options.queries", format!("a range within 0..{seq_q} that is not empty"), format!("{queries:?}");
    }
    let scores = tensors.scores(&q);
    let kernels = plan::sums_in_kernels(&q, &k, &scores, layout, &options)?;
    let layout = upload::layout_tensors(layout, &q.device(), kernels)?;
    let inputs = AccumulatedInputs {
        q: q.into_dispatch(),
        k: k.into_dispatch(),
        lse: lse.into_dispatch(),
        scores,
    };
    let sums =
        <Dispatch as BlockSparseOps>::accumulated_attention(inputs, layout, options, queries);
    Ok(AccumulatedAttention {
        columns: Tensor::from_dispatch(sums.columns),
        diagonals: Tensor::from_dispatch(sums.diagonals),
    })
}
