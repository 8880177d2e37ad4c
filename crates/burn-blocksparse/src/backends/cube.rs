//! CubeCL devices: the kernels of `blocksparse-cubecl`.

use std::sync::Arc;

use blocksparse::{BlockLayout, Dropout, Seed};
use blocksparse_cubecl as kernels;
use blocksparse_cubecl::rows::Typed;
use blocksparse_cubecl::{
    AttentionPlan, BiasView, ChoiceTensor, Gradients, KernelError, Outputs, Readable, Request,
    ScoreKind, ScoreOptions, TableView, TensorView, Tuning,
};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, full_device_dtype};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl::client::Client;
use cubecl::prelude::InputScalar;

use crate::backend::BlockSparseOps;
use crate::options::{AttentionOptions, ProductPrecision, WeightsMode};
use crate::values::{
    AttentionGrads, AttentionInputs, AttentionOutput, DynamicBlocks, LayoutTensors, NeedsGrad,
    OptFloat, OutputGrads, SCORE_TENSORS, SavedTensors, ScoreTensors,
};
use crate::{reference, weights};

/// What a call on `device` will run.
pub(crate) fn plan(
    device: &CubeDevice,
    layout: &BlockLayout,
    request: Request,
) -> Result<Arc<AttentionPlan>, KernelError> {
    AttentionPlan::new(&device.client(), layout, request)
}

/// Whether `device` can sum the weights of a call.
pub(crate) fn check_masses(
    device: &CubeDevice,
    layout: &BlockLayout,
    request: &Request,
) -> Result<(), KernelError> {
    kernels::check_masses(&device.client(), layout, request)
}

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
    let tf32 = options.precision == ProductPrecision::Tf32 && dtype == DType::F32;
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
            seeds: matches!(
                options.active_dropout(),
                Some(Dropout {
                    seed: Seed::Place(_),
                    ..
                })
            ),
            bias,
            relative,
        })
        .with_scale(options.scale_for(head_dim))
        .with_stored_weights(options.weights == WeightsMode::Store)
        .with_max_scores(options.max_scores)
        .with_tf32(tf32))
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
        // Autodiff may hand over what another op made of them.
        let [out, lse] = [output.out, output.lse].map(into_contiguous);
        let [stored, grad_lse] = [output.weights, grads.lse].map(contiguous);
        let grad_out = view(&readable_as(grads.out, call.plan.gradient()));

        let dq = call.empty([batch, heads, seq_q, head_dim], call.dtype);
        // dK and dV share a buffer; dV begins where a binding may.
        let element = call.dtype.size();
        let align = call.client.properties().memory.alignment as usize;
        let k_bytes = batch * kv_heads * seq_kv * head_dim * element;
        let v_start = k_bytes.next_multiple_of(align.max(4 * element));
        let v_bytes = batch * kv_heads * seq_kv * value_dim * element;
        let dkv = call
            .empty([(v_start + v_bytes) / element], call.dtype)
            .handle;
        // Sums over batch entries, heads or queries that share a bias.
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
}

/// Whether the reference runs instead of the kernels (`BLOCKSPARSE_REFERENCE=1`), to compare the two.
pub(crate) fn uses_reference() -> bool {
    Tuning::or_default().reference
}

/// What both passes need.
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
        let [bias, relative] = scores.into_list().map(contiguous);
        let [batch, kv_heads, _, head_dim] = k.meta.shape().dims();
        let value_dim = v.meta.shape()[3];
        let dtype = q.dtype;
        let request = checked(request(
            [batch, kv_heads, head_dim, value_dim],
            dtype,
            &options,
            kinds,
        ));
        let (client, device) = (q.client.clone(), q.device.clone());
        // Only a direct call of the trait comes without.
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
        let mut scores = ScoreOptions::new(self.options.scale_for(self.request.head_dim));
        scores.softcap = self.options.softcap;
        scores.slopes = self.options.alibi.clone();
        scores.dropout = self.options.active_dropout();
        scores.bias = self.bias.as_ref().map(bias_view);
        scores.relative = self.relative.as_ref().map(table_view);
        scores
    }

    fn accumulator(&self) -> DType {
        match self.dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    fn empty<const D: usize>(&self, shape: [usize; D], dtype: DType) -> CubeTensor {
        empty(&self.inputs[0], shape, dtype)
    }

    fn filled<const D: usize>(&self, shape: [usize; D], value: f64, dtype: DType) -> CubeTensor {
        filled(&self.inputs[0], shape, value, dtype)
    }
}

/// A tensor to be written, on the device of another.
pub(super) fn empty<const D: usize>(
    like: &CubeTensor,
    shape: [usize; D],
    dtype: DType,
) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    match Tuning::or_default().poison {
        // Integers have no NaN.
        true if dtype.is_int() => filled(like, shape, f64::from(i32::MIN), dtype),
        true => filled(like, shape, f64::NAN, dtype),
        false => empty_device_contiguous_dtype(client, device, Shape::new(shape), dtype),
    }
}

/// Filled as one row, because Burn may put gaps between the rows of a tensor that it fills.
pub(super) fn filled<const D: usize>(
    like: &CubeTensor,
    shape: [usize; D],
    value: f64,
    dtype: DType,
) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    let value = InputScalar::new(value, dtype_to_elem_type(dtype));
    // A tensor without elements still gets a buffer.
    let elements = shape.iter().product::<usize>().max(1);
    let row = Shape::new([elements]);
    let row = full_device_dtype(client.clone(), row, device.clone(), value, dtype);
    CubeTensor::new_contiguous(client, device, Shape::new(shape), row.handle, dtype)
}

/// A contiguous tensor to be written, on the device of another.
pub(super) fn shaped(like: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    // A tensor without elements still gets a buffer.
    let CubeTensor { handle, .. } = empty(like, [shape.num_elements().max(1)], dtype);
    CubeTensor::new_contiguous(
        like.client.clone(),
        like.device.clone(),
        shape,
        handle,
        dtype,
    )
}

/// A contiguous tensor as row kernels get it.
pub(super) fn typed(tensor: &CubeTensor) -> Typed<'_> {
    (&tensor.handle, dtype_to_elem_type(tensor.dtype))
}

/// The rows of a shape, and their width.
pub(super) fn matrix(shape: &Shape) -> [usize; 2] {
    let width = shape[shape.num_dims() - 1];
    [shape.iter().rev().skip(1).product(), width]
}

/// A contiguous tensor as the matrix of its rows.
#[cfg(feature = "cuda")]
pub(super) fn as_matrix(x: CubeTensor) -> CubeTensor {
    let [rows, width] = matrix(x.meta.shape());
    let shape = Shape::new([rows, width]);
    CubeTensor::new_contiguous(x.client, x.device, shape, x.handle, x.dtype)
}

pub(super) fn contiguous(tensor: OptFloat<CubeBackend>) -> Option<CubeTensor> {
    tensor.into_option().map(into_contiguous)
}

pub(super) fn table_view(table: &CubeTensor) -> TableView {
    TableView {
        handle: table.handle.clone(),
        shape: table.meta.shape().dims(),
    }
}

pub(super) fn bias_view(bias: &CubeTensor) -> BiasView {
    BiasView {
        handle: bias.handle.clone(),
        shape: bias.meta.shape().dims(),
    }
}

/// Gives a layout that is made on the device the tensor that chooses its blocks.
pub(super) fn choose_blocks(
    client: &Client,
    layout: &BlockLayout,
    choice: DynamicBlocks<CubeBackend>,
) {
    let tensor = match choice {
        DynamicBlocks::Host => return,
        DynamicBlocks::Mask(tensor)
        | DynamicBlocks::Indices(tensor)
        | DynamicBlocks::Scores(tensor)
        | DynamicBlocks::Positions(tensor)
        | DynamicBlocks::Keys(tensor) => into_contiguous(tensor),
    };
    let tensor = ChoiceTensor {
        dtype: dtype_to_elem_type(tensor.dtype),
        handle: tensor.handle,
    };
    launched(kernels::choose_blocks(client, layout, &tensor));
}

/// The kernels take any strides but of the last dimension, as long as they are multiples of `alignment` elements.
pub(super) fn readable(tensor: CubeTensor, alignment: usize) -> CubeTensor {
    let reach = usize::MAX;
    readable_as(tensor, Readable { alignment, reach })
}

/// The tensor, or a contiguous copy where launches do not read it as it lies.
pub(super) fn readable_as(tensor: CubeTensor, readable: Readable) -> CubeTensor {
    let start = |tensor: &CubeTensor| {
        tensor.handle.offset_start.unwrap_or(0) as usize / tensor.dtype.size()
    };
    let lies_well = || {
        let TensorView { shape, strides, .. } = view(&tensor);
        readable.takes(shape, strides, start(&tensor))
    };
    if !tensor.meta.is_tiled() && tensor.qparams.is_none() && lies_well() {
        return tensor;
    }
    let tensor = into_contiguous(tensor);
    if start(&tensor).is_multiple_of(readable.alignment) {
        return tensor;
    }
    // It was contiguous before, and began elsewhere.
    let (client, device, dtype) = (tensor.client.clone(), tensor.device.clone(), tensor.dtype);
    let shape = tensor.meta.shape().clone();
    let element = dtype_to_elem_type(dtype);
    let copy = cubecl::std::tensor::into_contiguous(&client, tensor.binding(), element);
    CubeTensor::new_contiguous(client, device, shape, copy.handle, dtype)
}

pub(super) fn view(tensor: &CubeTensor) -> TensorView {
    TensorView {
        handle: tensor.handle.clone(),
        shape: tensor.meta.shape().dims(),
        strides: std::array::from_fn(|dim| tensor.meta.strides()[dim]),
    }
}

/// As [`checked`], of launches. One that a recording refuses is kept with the recording, which then fails as a whole: the thread that launches has nobody to
/// return it to.
pub(super) fn launched(result: Result<(), KernelError>) {
    match result {
        Err(KernelError::Recording { .. }) => {}
        result => checked(result),
    }
}

/// The public functions checked the plan; only a direct call of the trait can get here with what cannot run.
pub(super) fn checked<T>(result: Result<T, KernelError>) -> T {
    result.unwrap_or_else(|error| panic!("block-sparse attention: {error}"))
}
