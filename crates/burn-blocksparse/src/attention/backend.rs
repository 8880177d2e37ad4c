//! Attention with kernels.

use crate::attention::ops::BlockSparseOps;
use crate::attention::reference;
use crate::base::values::{
    AccumulatedInputs, AccumulatedOutput, AttentionGrads, AttentionInputs, AttentionOutput,
    LayoutTensors, NeedsGrad, OutputGrads, SCORE_TENSORS, SavedTensors, ScoreTensors,
};
use crate::options::{AttentionOptions, WeightsMode};
use crate::weights;
use ::blocksparse_cubecl as kernels;
use blocksparse::{BlockLayout, Seed};
use blocksparse_cubecl::{
    AttentionPlan, AttentionSumOutputs, Gradients, Outputs, Request, ScoreKind, ScoreOptions,
    TensorView,
};
use cubecl::client::Client;
use std::ops::Range;
use std::sync::Arc;

use crate::base::cube::*;
use crate::base::prelude::*;

pub(crate) fn request(
    [batch, kv_heads, head_dim, value_dim]: [usize; 4],
    dtype: DType,
    options: &AttentionOptions,
    [bias, relative]: [bool; SCORE_TENSORS],
) -> Result<Request, KernelError> {
    if !dtype.is_float() {
        return Err(KernelError::Dtype {
            dtype: format!("{dtype:?}"),
        });
    }
    let request = Request::new(
        [batch, kv_heads],
        [head_dim, value_dim],
        dtype_to_elem_type(dtype),
    );
    Ok(request
        .with_score(ScoreKind {
            softcap: options.softcap.is_some(),
            alibi: options.alibi.is_some(),
            dropout: options.active_dropout().is_some(),
            seeds: (options.active_dropout())
                .is_some_and(|dropout| matches!(dropout.seed, Seed::Place(_))),
            bias,
            relative,
            threshold: options.softmax_threshold.is_some(),
        })
        .with_scale(options.scale_for(head_dim))
        .with_stored_weights(options.weights == WeightsMode::Store)
        .with_max_scores(options.max_scores)
        .with_precision(options.precision))
}

impl BlockSparseOps for CubeBackend {
    fn block_sparse_attention(
        inputs: AttentionInputs<Self>,
        layout: LayoutTensors<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        if uses_reference() {
            return reference::forward::<Self>(inputs, &layout, &options);
        }
        let call = Call::new(inputs, layout, options);
        let (heads, seq_q) = (call.layout.heads(), call.layout.seq_q());
        let batch = call.request.batch;
        let out = call.empty([batch, heads, seq_q, call.request.value_dim], call.dtype);
        let lse = call.empty([batch, heads, seq_q], call.accumulator());
        let stored = (call.options.weights == WeightsMode::Store).then(|| {
            let shape = weights::shape(&call.layout, batch);
            call.filled(shape, 0.0, call.accumulator())
        });
        let max_scores = (call.options.max_scores)
            .then(|| call.empty([batch, heads, seq_q], call.accumulator()));
        let views = call.views();
        let result = kernels::forward(
            &call.client,
            &call.plan,
            &call.layout,
            [&views[0], &views[1], &views[2]],
            Outputs::new(&out.handle, &lse.handle)
                .with_weights(stored.as_ref().map(|weights| &weights.handle))
                .with_max_scores(max_scores.as_ref().map(|scores| &scores.handle)),
            &call.score_options(),
        );
        launched(result);
        AttentionOutput {
            out,
            lse,
            weights: stored.into(),
            max_scores: max_scores.into(),
        }
    }

    fn block_sparse_attention_backward(
        saved: SavedTensors<Self>,
        grads: OutputGrads<Self>,
        layout: LayoutTensors<Self>,
        options: AttentionOptions,
        wanted: NeedsGrad,
    ) -> AttentionGrads<Self> {
        if uses_reference() {
            return reference::backward::<Self>(saved, grads, &layout, &options, wanted);
        }
        let SavedTensors { inputs, output } = saved;
        let call = Call::new(inputs, layout, options);
        let (heads, seq_q, seq_kv) = (
            call.layout.heads(),
            call.layout.seq_q(),
            call.layout.seq_kv(),
        );
        let Request {
            batch,
            kv_heads,
            head_dim,
            value_dim,
            ..
        } = call.request;
        // Autodiff may pass tensors that another op computed from these.
        let [out, lse] = [output.out, output.lse].map(into_contiguous);
        let [stored, grad_lse] = [output.weights, grads.lse].map(contiguous);
        let grad_out = view(&readable_as(grads.out, call.plan.gradient()));

        let dq = call.empty([batch, heads, seq_q, head_dim], call.dtype);
        // dK and dV share a buffer. dV starts at an offset with the required alignment.
        let element = call.dtype.size();
        let align = call.client.properties().memory.alignment as usize;
        let k_bytes = batch * kv_heads * seq_kv * head_dim * element;
        let v_start = k_bytes.next_multiple_of(align.max(4 * element));
        let v_bytes = batch * kv_heads * seq_kv * value_dim * element;
        let dkv = call
            .empty([(v_start + v_bytes) / element], call.dtype)
            .handle;
        // Sums over the batch entries, heads or queries that share a bias.
        let bias_sums = (call.bias.as_ref().filter(|_| wanted.bias)).map(|bias| {
            let shape = bias.meta.shape().dims::<4>();
            call.filled(shape, 0.0, call.accumulator())
        });
        let table = (call.relative.as_ref().filter(|_| wanted.relative_bias)).map(|table| {
            let shape = table.meta.shape().dims::<2>();
            call.empty(shape, call.accumulator())
        });
        let mut gradients = Gradients::new(dq.handle.clone(), dkv.clone(), v_start / element);
        gradients.bias = bias_sums.as_ref().map(|sums| sums.handle.clone());
        gradients.relative = table.as_ref().map(|table| table.handle.clone());
        let views = call.views();
        let result = kernels::backward(
            &call.client,
            &call.plan,
            &call.layout,
            [&views[0], &views[1], &views[2]],
            Outputs::new(&out.handle, &lse.handle)
                .with_weights(stored.as_ref().map(|weights| &weights.handle)),
            kernels::OutputGrads {
                out: &grad_out,
                lse: grad_lse.as_ref().map(|grad| &grad.handle),
            },
            &gradients,
            &call.score_options(),
        );
        launched(result);
        let part = |handle, dim| {
            CubeTensor::new_contiguous(
                call.client.clone(),
                call.device.clone(),
                Shape::new([batch, kv_heads, seq_kv, dim]),
                handle,
                call.dtype,
            )
        };
        let behind_k = (v_start + v_bytes - k_bytes) as u64;
        AttentionGrads {
            q: dq,
            k: part(dkv.clone().offset_end(behind_k), head_dim),
            v: part(dkv.offset_start(v_start as u64), value_dim),
            scores: ScoreTensors {
                bias: bias_sums.map(|sums| cast(sums, call.dtype)).into(),
                relative_bias: table.into(),
            },
        }
    }

    fn accumulated_attention(
        inputs: AccumulatedInputs<Self>,
        layout: LayoutTensors<Self>,
        options: AttentionOptions,
        queries: Range<usize>,
    ) -> AccumulatedOutput<Self> {
        if uses_reference() {
            return reference::attention_sums::<Self>(inputs, &layout, &options, queries);
        }
        let layout = layout.host;
        let AccumulatedInputs { q, k, lse, scores } = inputs;
        let kinds = scores.kinds();
        let [bias, relative] = scores.into_list().map(|x| x.map(into_contiguous));
        let [q, k] = [q, k].map(|input| readable(input, 1));
        let lse = into_contiguous(lse);
        let [batch, kv_heads, seq_kv, head_dim] = k.meta.shape().dims();
        let dims = [batch, kv_heads, head_dim, head_dim];
        let request = checked(request(dims, q.dtype, &options, kinds));
        let (heads, seq_q) = (layout.heads(), layout.seq_q());
        let columns = empty(&q, [batch, heads, seq_kv], lse.dtype);
        let diagonals = empty(&q, [batch, heads, seq_q + seq_kv - 1], lse.dtype);
        let outputs = AttentionSumOutputs {
            queries,
            columns: columns.handle.clone(),
            diagonals: diagonals.handle.clone(),
        };
        let scores = score_options(&options, head_dim, [&bias, &relative]);
        let views = [&q, &k].map(view);
        let result = kernels::attention_sums(
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

/// Returns the options of the scores before dropout.
fn score_options(
    options: &AttentionOptions,
    head_dim: usize,
    [bias, relative]: [&Option<CubeTensor>; SCORE_TENSORS],
) -> ScoreOptions {
    let mut scores = ScoreOptions::new(options.scale_for(head_dim));
    scores.softcap = options.softcap;
    scores.slopes = options.alibi.clone();
    scores.bias = bias.as_ref().map(bias_view);
    scores.relative = relative.as_ref().map(table_view);
    scores
}

/// State that the forward and the backward pass share.
struct Call {
    client: Client,
    device: CubeDevice,
    dtype: DType,
    request: Request,
    plan: Arc<AttentionPlan>,
    layout: BlockLayout,
    options: AttentionOptions,
    inputs: [CubeTensor; 3],
    bias: Option<CubeTensor>,
    relative: Option<CubeTensor>,
}

impl Call {
    fn new(
        inputs: AttentionInputs<CubeBackend>,
        layout: LayoutTensors<CubeBackend>,
        options: AttentionOptions,
    ) -> Self {
        let AttentionInputs { q, k, v, scores } = inputs;
        let kinds = scores.kinds();
        let [bias, relative] = scores.into_list().map(|x| x.map(into_contiguous));
        let [batch, kv_heads, _, head_dim] = k.meta.shape().dims();
        let value_dim = v.meta.shape()[3];
        let dtype = q.dtype;
        let sizes = [batch, kv_heads, head_dim, value_dim];
        let request = checked(request(sizes, dtype, &options, kinds));
        let (client, device) = (q.client.clone(), q.device.clone());
        // Only a direct call of the trait has no plan.
        let plan = (layout.plan.plan)
            .unwrap_or_else(|| checked(AttentionPlan::new(&client, &layout.host, request)));
        choose_blocks(&client, &layout.host, layout.choice);
        let readable = plan.inputs();
        Self {
            client,
            device,
            dtype,
            request,
            plan,
            layout: layout.host,
            options,
            inputs: [q, k, v].map(|input| readable_as(input, readable)),
            bias,
            relative,
        }
    }

    fn views(&self) -> [TensorView; 3] {
        [0, 1, 2].map(|input| view(&self.inputs[input]))
    }

    fn score_options(&self) -> ScoreOptions {
        let tensors = [&self.bias, &self.relative];
        let mut scores = score_options(&self.options, self.request.head_dim, tensors);
        scores.dropout = self.options.active_dropout();
        scores.threshold = self.options.softmax_threshold;
        scores
    }

    fn accumulator(&self) -> DType {
        sums_of(self.dtype)
    }

    fn empty<const D: usize>(&self, shape: [usize; D], dtype: DType) -> CubeTensor {
        empty(&self.inputs[0], shape, dtype)
    }

    fn filled<const D: usize>(&self, shape: [usize; D], value: f64, dtype: DType) -> CubeTensor {
        filled(&self.inputs[0], shape, value, dtype)
    }
}
