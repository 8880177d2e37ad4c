//! Sums of attention weights over columns and diagonals, computed without storing the weights.

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
    /// Optional tensors of the attention.
    pub tensors: AttentionTensors,
    /// Queries that are included; default all.
    pub queries: Option<Range<usize>>,
}

impl AccumulatedAttentionOptions {
    blocksparse::setters! {
        /// Sets the options of the attention: scale, softcap and ALiBi matter. The weights are those before dropout, and no product is
        /// rounded to tf32.
        attention: AttentionOptions,
        /// Sets the optional tensors of the attention: biases matter. Sinks are included through lse.
        tensors: AttentionTensors,
        /// Sets the queries that are included. Blocks without any of them cost nothing.
        queries: Some(Range<usize>),
    }
}

/// Output of [`accumulated_attention`], in the dtype of lse.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AccumulatedAttention {
    /// `[batch, heads, seq_kv]`: the sum over queries of each key.
    pub columns: Tensor<3>,
    /// `[batch, heads, seq_q + seq_kv − 1]`: the sum over the pairs at each distance `i − j`, from `1 − seq_q` (later keys) on. The index is `seq_q − 1 +
    /// distance`, so distances from 0 on start at `seq_q − 1`. `i` and `j` are positions, and query row `r` has position `r + seq_kv − seq_q`.
    pub diagonals: Tensor<3>,
}

/// Sums the attention of each key and of each distance: sums of `p[i, j] = exp(score[i, j] − lse[i])` over the allowed pairs. Memory is O(n) plus
/// a small multiple of the number of kept blocks; the weights are not stored. SnapKV keeps the keys of a cache that recent queries attend to (Li et al., 2024).
/// The largest columns and diagonals of the last queries are MInference's vertical-slash pattern (Jiang et al., 2024, section 3), the input of
/// `burn-sparse-select`'s `vertical_slash_layout`.
///
/// Deterministic and not differentiable: the sums are detached from the autodiff graph.
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
    // Before the shape check, whose errors would name a v.
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
