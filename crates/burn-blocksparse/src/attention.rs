//! The public functions: checks, defaults, and the step from tensors to the backend trait.

use blocksparse::BlockLayout;
use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::ops::{AttentionInputs, AttentionOutput, BlockSparseOps, MaybeFloat};
use crate::pack::packed;
use crate::tensors::Biases;
use crate::{
    AttentionError, AttentionOptions, AttentionPlan, BlockSparseTensor, Layout, WeightsMode, upload,
};

/// Softmax attention over the pairs that `layout` allows:
/// `out[i] = Σ_j p[i, j] · v[j]`, `p[i, ·] = softmax over the allowed j of scale · q[i] · k[j]`.
///
/// `layout` is a [`BlockLayout`], built on the host, or a [`DeviceLayout`](crate::DeviceLayout), made on the device of tensors.
///
/// Exact, differentiable (once) in `q`, `k` and `v`, deterministic. Rows with no allowed key give zeros
/// and zero gradients.
///
/// # Shapes
/// - `q`: `[batch, heads, seq_q, head_dim]`
/// - `k`: `[batch, kv_heads, seq_kv, head_dim]`; `kv_heads` divides `heads`, and query head `h` uses
///   key head `h / (heads / kv_heads)` (grouped-query attention)
/// - `v`: `[batch, kv_heads, seq_kv, value_dim]`
/// - returns `[batch, heads, seq_q, value_dim]` in the inputs' dtype
///
/// # Errors
/// [`AttentionError`] if shapes, dtypes, devices or options do not fit each other or the layout, or if the
/// device cannot run the call ([`AttentionPlan`] says what it runs).
pub fn attention<'a>(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    layout: impl Into<Layout<'a>>,
    options: AttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    let output = call(q, k, v, Biases::default(), layout.into(), options)?;
    Ok(Tensor::from_dispatch(output.out))
}

/// [`attention`], and `lse[i] = ln Σ_j exp(score[i, j])` over the allowed keys.
///
/// `lse`: `[batch, heads, seq_q]`, in f32 (f64 for f64 inputs), −∞ for a row with no allowed key. With two
/// disjoint layouts over the same queries it is what merges two outputs into the attention over their union:
/// [`merge_attention`](crate::merge_attention). It is differentiable, as the output is, and both take one backward pass.
///
/// # Errors
/// As [`attention`].
pub fn attention_with_lse<'a>(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    layout: impl Into<Layout<'a>>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let output = call(q, k, v, Biases::default(), layout.into(), options)?;
    Ok((
        Tensor::from_dispatch(output.out),
        Tensor::from_dispatch(output.lse),
    ))
}

/// [`attention`], and its weights `p` in block-sparse form. Implies [`WeightsMode::Store`].
/// No gradient flows through the weights. With biases or sinks:
/// [`attention_with_tensors_and_weights`](crate::attention_with_tensors_and_weights).
///
/// # Errors
/// As [`attention`].
pub fn attention_with_weights(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    layout: &BlockLayout,
    options: AttentionOptions,
) -> Result<(Tensor<4>, BlockSparseTensor), AttentionError> {
    let (out, _, weights) = call_with_weights(q, k, v, Biases::default(), layout, options)?;
    Ok((out, weights))
}

/// The output, lse and the weights.
pub(crate) fn call_with_weights(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    biases: Biases,
    layout: &BlockLayout,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>, BlockSparseTensor), AttentionError> {
    let options = options.weights(WeightsMode::Store);
    let output = call(q, k, v, biases, layout.into(), options)?;
    let MaybeFloat::Some(weights) = output.weights else {
        unreachable!("WeightsMode::Store returns the weights")
    };
    let values = Tensor::from_dispatch(weights);
    Ok((
        Tensor::from_dispatch(output.out),
        Tensor::from_dispatch(output.lse),
        BlockSparseTensor::new(values, layout.clone()),
    ))
}

pub(crate) fn call(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    biases: Biases,
    layout: Layout,
    options: AttentionOptions,
) -> Result<AttentionOutput<Dispatch>, AttentionError> {
    check_call(&q, &k, &v, layout, &options)?;
    let plan = AttentionPlan::choose(&q, &k, &v, &biases, layout, &options)?;
    let [batch, heads, seq_q, head_dim] = q.dims();
    let kv_heads = k.dims()[1];
    // The reference walks what the host knows.
    let read = match layout {
        Layout::Device(layout) if !plan.is_kernels() => Some(layout.to_host()?),
        _ => None,
    };
    let host = read.as_ref().unwrap_or(layout.sizes());
    let packed = match plan.is_kernels() {
        true => packed(host, kv_heads, biases.kinds().contains(&true), &options),
        false => None,
    };
    // The same memory: heads that share a key head are neighbours.
    let own = match &packed {
        Some(packed) => q.reshape([batch, kv_heads, packed.seq_q(), head_dim]),
        None => q,
    };
    let host = packed.as_ref().unwrap_or(host);
    let mut tensors = upload::layout_tensors(host, &own.device(), plan.is_kernels());
    if let (Layout::Device(layout), None) = (layout, &read) {
        tensors.choice = layout.chooser();
    }
    let [bias, relative_bias] = biases.into_dispatch();
    let inputs = AttentionInputs {
        q: own.into_dispatch(),
        k: k.into_dispatch(),
        v: v.into_dispatch(),
        bias,
        relative_bias,
    };
    let mut output = <Dispatch as BlockSparseOps>::block_sparse_attention(inputs, tensors, options);
    if packed.is_some() {
        let out = Tensor::<4>::from_dispatch(output.out);
        let value_dim = out.dims()[3];
        let out = out.reshape([batch, heads, seq_q, value_dim]);
        let lse = Tensor::<3>::from_dispatch(output.lse).reshape([batch, heads, seq_q]);
        output.out = out.into_dispatch();
        output.lse = lse.into_dispatch();
    }
    Ok(output)
}

/// Checks everything but tensors that are options.
pub(crate) fn check_call(
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    layout: Layout,
    options: &AttentionOptions,
) -> Result<(), AttentionError> {
    check(q, k, v, layout.sizes())?;
    options.validate(layout.sizes().heads(), q.dtype())?;
    let Layout::Device(layout) = layout else {
        return Ok(());
    };
    AttentionError::expect_same("layout's device", q.device(), "q's", layout.device())?;
    match options.weights {
        WeightsMode::Recompute => Ok(()),
        WeightsMode::Store => Err(AttentionError::argument(
            "options.weights",
            "Recompute for a layout that is made on the device",
            "Store",
        )),
    }
}

pub(crate) fn check(
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    layout: &BlockLayout,
) -> Result<(), AttentionError> {
    let equal = |argument, expected: usize, whose: &str, got: usize| match expected == got {
        true => Ok(()),
        false => Err(AttentionError::argument(
            argument,
            format!("{expected}, {whose}"),
            got,
        )),
    };
    let [batch, heads, seq_q, head_dim] = q.dims();
    let [k_batch, kv_heads, seq_kv, k_dim] = k.dims();
    let [v_batch, v_heads, v_seq, value_dim] = v.dims();
    if batch == 0 {
        return Err(AttentionError::argument("q's batch", "at least 1", batch));
    }
    if head_dim == 0 {
        return Err(AttentionError::argument("q's head_dim", "at least 1", 0));
    }
    if value_dim == 0 {
        return Err(AttentionError::argument("v's value_dim", "at least 1", 0));
    }
    if let Some(layout_batch) = layout.batch() {
        equal("q's batch", layout_batch, "the layout's", batch)?;
    }
    equal("q's heads", layout.heads(), "the layout's", heads)?;
    equal("q's seq_q", layout.seq_q(), "the layout's", seq_q)?;
    equal("k's seq_kv", layout.seq_kv(), "the layout's", seq_kv)?;
    equal("k's batch", batch, "q's", k_batch)?;
    equal("k's head_dim", head_dim, "q's", k_dim)?;
    equal("v's batch", batch, "q's", v_batch)?;
    equal("v's kv_heads", kv_heads, "k's", v_heads)?;
    equal("v's seq_kv", seq_kv, "k's", v_seq)?;
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(AttentionError::argument(
            "k's kv_heads",
            format!("a divisor of the {heads} heads of q"),
            kv_heads,
        ));
    }
    for (dtype, device, tensor) in [
        ("k's dtype", "k's device", k),
        ("v's dtype", "v's device", v),
    ] {
        AttentionError::expect_same(dtype, q.dtype(), "q's", tensor.dtype())?;
        AttentionError::expect_same(device, q.device(), "q's", tensor.device())?;
    }
    Ok(())
}
