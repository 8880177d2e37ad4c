//! Attention within clusters of tokens, by a kernel that gathers their rows itself, where a device has it.

use burn::tensor::{Int, Tensor};

use crate::check::same_device;
use crate::device::served;
use crate::error::OpError;

/// What [`attention_in_clusters`] gives, by place: cluster by cluster, in the order of their tokens.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClusterAttention {
    /// `[batch, heads, clusters · width, value_dim]`, in the dtype of `value`.
    pub out: Tensor<4>,
    /// The logarithm of each place's sum of exponentials: `[batch, heads, clusters · width]`, f32.
    pub lse: Tensor<3>,
}

/// Causal attention within clusters of tokens whose queries are keys, too, as the Routing Transformer has them (Roy et al., 2021, §4): a key is the query at its
/// place made as long as 1, as [`keyed_rows_at`](crate::keyed_rows_at) makes it, and a token sees the earlier ones of its cluster, the first itself. The rows
/// of `x` and `value` go from where they are into one launch, so nothing is gathered in memory; products are not rounded in between.
///
/// `None` where no kernel does it: it takes bf16 and f16 on GPUs of compute capability 9.0, of widths 64, 128, 192 and 256, as long as a cluster fits the memory
/// of a multiprocessor, and has no backward pass, so it takes no tensor of an autodiff device. Gather rows with [`keyed_rows_at`](crate::keyed_rows_at)
/// then, and use [`attention`](crate::attention). [`attention_in_clusters_plan`] says which.
///
/// # Shapes
/// - `x`: `[batch, heads, length, head_dim]`
/// - `value`: `[batch, heads, length, value_dim]`, in the dtype of `x`
/// - `tokens`: `[batch, heads, clusters, width]`, ascending in each cluster; those that are not below the length count as zeros
///
/// # Errors
/// [`OpError`] if shapes, dtypes or devices do not fit each other, one is empty, the scale is not positive, or no feature of this crate serves the device.
pub fn attention_in_clusters(
    x: Tensor<4>,
    value: Tensor<4>,
    tokens: Tensor<4, Int>,
    scale: f64,
) -> Result<Option<ClusterAttention>, OpError> {
    if attention_in_clusters_plan(&x, &value, &tokens, scale)?.is_err() {
        return Ok(None);
    }
    Ok(Some(attend(x, value, tokens.without_autodiff(), scale)))
}

/// What [`attention_in_clusters`] runs, or why no kernel takes the call.
///
/// # Errors
/// As [`attention_in_clusters`].
pub fn attention_in_clusters_plan(
    x: &Tensor<4>,
    value: &Tensor<4>,
    tokens: &Tensor<4, Int>,
    scale: f64,
) -> Result<Result<String, String>, OpError> {
    check(x, value, tokens, scale)?;
    if x.is_autodiff() || value.is_autodiff() {
        return Ok(Err("it has no backward pass".into()));
    }
    Ok(planned(x, value, tokens))
}

fn check(
    x: &Tensor<4>,
    value: &Tensor<4>,
    tokens: &Tensor<4, Int>,
    scale: f64,
) -> Result<(), OpError> {
    served(&x.device())?;
    let [batch, heads, length, head_dim] = x.dims();
    let [value_batch, value_heads, value_rows, value_dim] = value.dims();
    let own = [batch, heads, length];
    let got = [value_batch, value_heads, value_rows];
    OpError::expect_same("value's rows", own, "x's", got)?;
    OpError::expect_same("value's dtype", x.dtype(), "x's", value.dtype())?;
    let [of_batch, of_heads, clusters, width] = tokens.dims();
    let got = [of_batch, of_heads];
    OpError::expect_same("tokens' heads", [batch, heads], "x's", got)?;
    same_device("value's device", &x.device(), "x's", &value.device())?;
    same_device("tokens' device", &x.device(), "x's", &tokens.device())?;
    for (argument, numbers) in [
        ("x", batch * heads * length * head_dim),
        ("value", value_dim),
        ("tokens", clusters * width),
    ] {
        if numbers == 0 {
            return Err(OpError::argument(argument, "not empty", 0));
        }
    }
    if scale <= 0.0 || !(scale as f32).is_normal() {
        return Err(OpError::argument("scale", "positive and finite", scale));
    }
    Ok(())
}

/// What runs, or why nothing does.
#[cfg(not(feature = "cuda"))]
fn planned(_x: &Tensor<4>, _value: &Tensor<4>, _tokens: &Tensor<4, Int>) -> Result<String, String> {
    Err("the crate's feature cuda is off".into())
}

/// What runs, or why nothing does.
#[cfg(feature = "cuda")]
fn planned(x: &Tensor<4>, value: &Tensor<4>, tokens: &Tensor<4, Int>) -> Result<String, String> {
    let device = x.device();
    let Some(inner) = &crate::device::cube::of(&device) else {
        return Err("the device has no kernels".into());
    };
    if crate::backends::cube::uses_reference() {
        return Err("BURN_BLOCKSPARSE_REFERENCE is set".into());
    }
    let sizes = crate::backends::clusters::sizes(x.dims(), value.dims(), tokens.dims());
    match crate::backends::clusters::plan(&inner.client(), sizes, x.dtype()) {
        Some(plan) => Ok(plan.to_string()),
        None => Err("no kernel of this device takes these rows".into()),
    }
}

#[cfg(not(feature = "cuda"))]
fn attend(
    _x: Tensor<4>,
    _value: Tensor<4>,
    _tokens: Tensor<4, Int>,
    _scale: f64,
) -> ClusterAttention {
    unreachable!("kernels for it need the feature cuda")
}

#[cfg(feature = "cuda")]
fn attend(x: Tensor<4>, value: Tensor<4>, tokens: Tensor<4, Int>, scale: f64) -> ClusterAttention {
    use burn::backend::Dispatch;

    use crate::ops::ClusterOps;

    let made = <Dispatch as ClusterOps>::attention_in_clusters(
        x.into_dispatch(),
        value.into_dispatch(),
        tokens.into_dispatch(),
        scale,
    );
    ClusterAttention {
        out: Tensor::from_dispatch(made.out),
        lse: Tensor::from_dispatch(made.lse),
    }
}
