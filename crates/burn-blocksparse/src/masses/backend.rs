//! Sums of weights on each backend.

#[cfg(any(
    feature = "flex",
    feature = "ndarray",
    feature = "cube",
    feature = "autodiff"
))]
use crate::masses::ops::AccumulatedAttentionOps;

#[cfg(feature = "flex")]
impl AccumulatedAttentionOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl AccumulatedAttentionOps for burn::backend::NdArray {}

#[cfg(feature = "cube")]
mod kernels {
    use std::ops::Range;

    use blocksparse_cubecl::{MassOutputs, ScoreOptions};
    use burn_cubecl::CubeBackend;
    use burn_cubecl::kernel::into_contiguous;

    use super::AccumulatedAttentionOps;
    use crate::attention::backend::request;
    use crate::attention::reference;
    use crate::base::cube::{
        bias_view, checked, contiguous, empty, launched, readable, table_view, uses_reference, view,
    };
    use crate::base::values::{AccumulatedInputs, AccumulatedOutput, LayoutTensors};
    use crate::options::AttentionOptions;

    impl AccumulatedAttentionOps for CubeBackend {
        fn accumulated_attention(
            inputs: AccumulatedInputs<Self>,
            layout: LayoutTensors<Self>,
            options: AttentionOptions,
            queries: Range<usize>,
        ) -> AccumulatedOutput<Self> {
            if uses_reference() {
                return reference::masses::<Self>(inputs, &layout, &options, queries);
            }
            let layout = layout.host;
            let AccumulatedInputs { q, k, lse, scores } = inputs;
            let kinds = scores.kinds();
            let [bias, relative] = scores.into_list().map(contiguous);
            let [q, k] = [q, k].map(|input| readable(input, 1));
            let lse = into_contiguous(lse);
            let [batch, kv_heads, seq_kv, head_dim] = k.meta.shape().dims();
            let dims = [batch, kv_heads, head_dim, head_dim];
            let request = checked(request(dims, q.dtype, &options, kinds));
            let (heads, seq_q) = (layout.heads(), layout.seq_q());
            let columns = empty(&q, [batch, heads, seq_kv], lse.dtype);
            let diagonals = empty(&q, [batch, heads, seq_q + seq_kv - 1], lse.dtype);
            let outputs = MassOutputs {
                queries,
                columns: columns.handle.clone(),
                diagonals: diagonals.handle.clone(),
            };
            let mut scores = ScoreOptions::new(options.scale_for(head_dim));
            scores.softcap = options.softcap;
            scores.slopes = options.alibi.clone();
            scores.bias = bias.as_ref().map(bias_view);
            scores.relative = relative.as_ref().map(table_view);
            let views = [&q, &k].map(view);
            let result = blocksparse_cubecl::masses(
                &q.client,
                &layout,
                &request,
                [&views[0], &views[1]],
                &lse.handle,
                &scores,
                &outputs,
            );
            launched(result);
            AccumulatedOutput { columns, diagonals }
        }
    }
}

#[cfg(feature = "autodiff")]
mod constants {
    use std::ops::Range;

    use burn::backend::AutodiffBackend;
    use burn::backend::autodiff::Autodiff;
    use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

    use super::AccumulatedAttentionOps;
    use crate::attention::autodiff::{inner_layout, inner_scores};
    use crate::base::values::{AccumulatedInputs, AccumulatedOutput, LayoutTensors};
    use crate::options::AttentionOptions;

    /// The sums leave the graph.
    impl<B: AccumulatedAttentionOps, C: CheckpointStrategy> AccumulatedAttentionOps for Autodiff<B, C> {
        fn accumulated_attention(
            inputs: AccumulatedInputs<Self>,
            layout: LayoutTensors<Self>,
            options: AttentionOptions,
            queries: Range<usize>,
        ) -> AccumulatedOutput<Self> {
            let inputs = AccumulatedInputs {
                q: inputs.q.into_primitive(),
                k: inputs.k.into_primitive(),
                lse: inputs.lse.into_primitive(),
                scores: inner_scores(inputs.scores),
            };
            let sums = B::accumulated_attention(inputs, inner_layout(layout), options, queries);
            AccumulatedOutput {
                columns: <Self as AutodiffBackend>::from_inner(sums.columns),
                diagonals: <Self as AutodiffBackend>::from_inner(sums.diagonals),
            }
        }
    }
}
