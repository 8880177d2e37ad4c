//! Gradients of attention as tensors that can be differentiated again, and Hessian-vector products.
//!
//! Burn's autodiff is first-order: a backward pass returns tensors without a graph, and an autodiff device cannot be wrapped a second time. A function
//! that is to be differentiated twice therefore computes its gradient as operations of the graph, which the graph's single backward pass differentiates. The
//! backward pass of the reference consists of Burn primitives, so it works on the autodiff backend as well as on the plain one.

use blocksparse::BlockLayout;

use crate::attention::ops::BlockSparseOps;
use crate::attention::plan::AttentionPlan;
use crate::attention::tensors::AttentionTensors;
use crate::attention::{call, scaled, shares_with};
use crate::base::prelude::*;
use crate::base::values::{AttentionInputs, AttentionOutput, NeedsGrad, OutputGrads, SavedTensors};
use crate::call_layout::Layout;
use crate::check::same_device;
use crate::merge::Shares;
use crate::options::{AttentionOptions, WeightsMode};
use crate::{check, upload};

/// Output of [`attention_gradients`]: the output of attention, and the gradients of `Σ out · grad_out`. All gradients have the shapes and dtypes of their
/// inputs.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AttentionGradients {
    /// `[batch, heads, seq_q, value_dim]`: the output of attention.
    pub out: Tensor<4>,
    /// `[batch, heads, seq_q, head_dim]`
    pub q: Tensor<4>,
    /// `[batch, kv_heads, seq_kv, head_dim]`
    pub k: Tensor<4>,
    /// `[batch, kv_heads, seq_kv, value_dim]`
    pub v: Tensor<4>,
    /// Gradients with respect to the optional tensors that are set.
    pub tensors: AttentionTensors,
}

/// Computes the gradients of `Σ out · grad_out` with respect to q, k, v and optional tensors in the forward pass. On a device with autodiff they are part of
/// its graph, and a backward pass through them gives second derivatives of attention, also with respect to `grad_out`.
///
/// Burn's autodiff differentiates once, so [`sparse_attention`](crate::sparse_attention) has no second derivatives. Use this function for losses that
/// contain a gradient, such as gradient penalties (Gulrajani et al., 2017, §4) and sharpness. [`attention_hvp`] computes the product of the Hessian and a
/// vector in one call. The rest of the model must compute its gradients in the same way.
///
/// The reference implementation computes them, on CPU backends only. The graph stores the weights of all kept blocks several times. Weights are recomputed
/// even with [`WeightsMode::Store`].
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{AttentionOptions, AttentionTensors, Pattern};
/// use burn_blocksparse::gradients::attention_gradients;
///
/// let device = Device::flex().autodiff();
/// let [q, k, v] = [(); 3].map(|_| {
///     Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &device).require_grad()
/// });
/// let layout = Pattern::local(16).layout(2, 64, 16)?;
/// let ones = Tensor::ones([1, 2, 64, 16], &device);
/// let (tensors, options) = (AttentionTensors::default(), AttentionOptions::default());
/// let gradients = attention_gradients(q.clone(), k, v, tensors, ones, &layout, options)?;
/// // A penalty on the size of the gradient with respect to the queries.
/// let penalty = gradients.q.powi_scalar(2).sum();
/// let grads = penalty.backward();
/// assert_eq!(q.grad(&grads).unwrap().dims(), [1, 2, 64, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `q`, `k`, `v`: as in [`sparse_attention`](crate::sparse_attention)
/// - `grad_out`: `[batch, heads, seq_q, value_dim]`, in the dtype of q
///
/// # Errors
/// [`OpError`] as for [`SparseAttentionCall`](crate::SparseAttentionCall); also if `grad_out` does not fit, or if the device runs kernels, which
/// have no second derivatives.
pub fn attention_gradients(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    tensors: AttentionTensors,
    grad_out: Tensor<4>,
    layout: &BlockLayout,
    options: AttentionOptions,
) -> Result<AttentionGradients, OpError> {
    check::call(&q, &k, &v, layout.into(), &options)?;
    tensors.check(&q, layout)?;
    let [batch, heads, seq_q, _] = q.dims();
    let expected = [batch, heads, seq_q, v.dims()[3]];
    let got = grad_out.dims();
    OpError::expect_same("grad_out's shape", expected, "the output's", got)?;
    OpError::expect_same("grad_out's dtype", q.dtype(), "q's", grad_out.dtype())?;
    let device = q.device();
    same_device("grad_out's device", &device, "q's", &grad_out.device())?;
    let mut options = options.weights(WeightsMode::Recompute);
    options.max_scores = false;
    let scores = tensors.clone().scores(&q);
    let host = Layout::Host(layout);
    let plan = AttentionPlan::choose(&q, &k, &v, &scores, host, &options)?.plan;
    blocksparse::ensure! {
        OpError;
        !plan.is_kernels()
            => "q's device",
            "one of the reference implementation (Flex or NdArray), because kernels have no second derivatives",
            format!("{device:?}");
    }

    let inputs = [q.clone(), k.clone(), v.clone()];
    let made = call(q, k, v, scores.clone(), None, host, options.clone())?;
    let own_out = Tensor::<4>::from_dispatch(made.out);
    let own_lse = Tensor::<3>::from_dispatch(made.lse);
    // With sinks the output is scaled by the share of the keys, which depends on lse.
    let (out, by_out, by_lse, by_sinks) = match tensors.sinks.clone() {
        None => (own_out.clone(), grad_out, None, None),
        Some(sinks) => {
            let Shares { a, b, .. } = shares_with(sinks.clone(), own_lse.clone());
            let product =
                own_out.clone().cast(own_lse.dtype()) * grad_out.clone().cast(own_lse.dtype());
            let by_share = product.sum_dim(3).reshape([batch, heads, seq_q]);
            let by_lse = by_share * a.clone() * b;
            let by_sinks = -by_lse.clone().sum_dim(2).sum_dim(0).reshape([heads]);
            let by_sinks = by_sinks.cast(sinks.dtype());
            let out = scaled(own_out.clone(), a.clone());
            (out, scaled(grad_out, a), Some(by_lse), Some(by_sinks))
        }
    };
    let [q, k, v] = inputs.map(Tensor::into_dispatch);
    let saved = SavedTensors {
        inputs: AttentionInputs { q, k, v, scores },
        output: AttentionOutput {
            out: own_out.into_dispatch(),
            lse: own_lse.into_dispatch(),
            weights: OptFloat::None,
            max_scores: OptFloat::None,
        },
    };
    let grads = OutputGrads {
        out: by_out.into_dispatch(),
        lse: by_lse.map(Tensor::into_dispatch).into(),
    };
    let wanted = NeedsGrad {
        bias: tensors.bias.is_some(),
        relative_bias: tensors.relative_bias.is_some(),
    };
    let uploaded = upload::layout_tensors(layout, &device, false)?;
    let made = <Dispatch as BlockSparseOps>::block_sparse_attention_backward(
        saved, grads, uploaded, options, wanted,
    );
    let bias = made.scores.bias.into_option();
    let relative = made.scores.relative_bias.into_option();
    let by_tensors = AttentionTensors {
        sinks: by_sinks,
        bias: bias.map(Tensor::from_dispatch),
        relative_bias: relative.map(|grad| {
            let grad = Tensor::<2>::from_dispatch(grad);
            let table = tensors.relative_bias.as_ref();
            table.map_or(grad.clone(), |table| grad.cast(table.dtype()))
        }),
    };
    Ok(AttentionGradients {
        out,
        q: Tensor::from_dispatch(made.q),
        k: Tensor::from_dispatch(made.k),
        v: Tensor::from_dispatch(made.v),
        tensors: by_tensors,
    })
}

/// Computes the product of the Hessian of `Σ out · grad_out` with respect to (q, k, v) and the vector `tangents`: for each of q, k and v, the derivative of its
/// gradient in the direction of `tangents`. Optional tensors are constants.
///
/// It is one backward pass through [`attention_gradients`], because the Hessian is symmetric. The Hessian itself is never built. The results have no graph.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{AttentionOptions, AttentionTensors, Pattern};
/// use burn_blocksparse::gradients::attention_hvp;
///
/// let device = Device::flex();
/// let [q, k, v, tq, tk, tv, grad_out] =
///     [(); 7].map(|_| Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &device));
/// let layout = Pattern::local(16).layout(2, 64, 16)?;
/// let (tensors, options) = (AttentionTensors::default(), AttentionOptions::default());
/// let [hq, _, _] = attention_hvp([q, k, v], tensors, [tq, tk, tv], grad_out, &layout, options)?;
/// assert_eq!(hq.dims(), [1, 2, 64, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `inputs`: q, k and v as in [`sparse_attention`](crate::sparse_attention); `tangents` and the results have the shapes and dtypes of their inputs
/// - `grad_out`: `[batch, heads, seq_q, value_dim]`
///
/// # Errors
/// As [`attention_gradients`], and if a tangent does not fit its input.
#[cfg(feature = "autodiff")]
pub fn attention_hvp(
    inputs: [Tensor<4>; 3],
    tensors: AttentionTensors,
    tangents: [Tensor<4>; 3],
    grad_out: Tensor<4>,
    layout: &BlockLayout,
    options: AttentionOptions,
) -> Result<[Tensor<4>; 3], OpError> {
    macro_rules! names {
        ($($of:literal)*) => {
            [$([concat!($of, " shape"), concat!($of, " dtype"), concat!($of, " device")],)*]
        };
    }
    let names = names!("q's tangent's" "k's tangent's" "v's tangent's");
    for ((input, tangent), [shape, dtype, device]) in inputs.iter().zip(&tangents).zip(names) {
        OpError::expect_same(shape, input.dims(), "its input's", tangent.dims())?;
        OpError::expect_same(dtype, input.dtype(), "its input's", tangent.dtype())?;
        same_device(device, &input.device(), "its input's", &tangent.device())?;
    }
    // Starts a new graph, independent of any graph of the arguments.
    let [q, k, v] = inputs.map(|x| x.without_autodiff().autodiff().require_grad());
    let constant = |x: Tensor<4>| x.without_autodiff();
    let constants = AttentionTensors {
        sinks: tensors.sinks.map(Tensor::without_autodiff),
        bias: tensors.bias.map(constant),
        relative_bias: tensors.relative_bias.map(Tensor::without_autodiff),
    };
    let gradients = attention_gradients(
        q.clone(),
        k.clone(),
        v.clone(),
        constants,
        constant(grad_out),
        layout,
        options,
    )?;
    let gradients = [gradients.q, gradients.k, gradients.v];
    let along = gradients
        .into_iter()
        .zip(tangents)
        .map(|(gradient, tangent)| (gradient * constant(tangent)).sum());
    let [dq, dk, dv] = [&q, &k, &v].map(|x| x.zeros_like().without_autodiff());
    let Some(sum) = along.reduce(|a, b| a + b) else {
        return Ok([dq, dk, dv]);
    };
    let grads = sum.backward();
    // An input that nothing depends on has no gradient: with one key per query, q has none.
    Ok([
        q.grad(&grads).unwrap_or(dq),
        k.grad(&grads).unwrap_or(dk),
        v.grad(&grads).unwrap_or(dv),
    ])
}
