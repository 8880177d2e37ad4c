//! Attention within the clusters that means attract, by kernels that gather rows themselves, where a device has them.
#[cfg(feature = "cuda")]
pub(crate) mod backend;
#[cfg(feature = "cuda")]
#[doc(hidden)]
pub mod ops;

#[cfg(not(feature = "cuda"))]
use std::convert::Infallible;
use std::fmt::Display;

use burn::tensor::Tensor;

use crate::order::check_attraction;
use burn_blocksparse::OpError;
use burn_blocksparse::internal::check::same_device;

/// What the Routing Transformer's heads compute (Roy et al., 2021, §4), without a gradient: each mean attracts the `window` rows of `x` most similar to it, as
/// [`topk_per_centroid`](crate::order::topk_per_centroid) finds them; a row sees the earlier ones of its cluster, the first itself; and of what clusters have of a row the
/// mean is taken, 0 where it is in none.
///
/// ```text
/// score(i, j) = scale · x[i] · x[j] / √max(|x[j]|², 10⁻²⁴)
/// ```
///
/// Four launches, in which rows go from where they are to where they are multiplied, and of 32 rows a cluster has a word that says which of them it has: no
/// row is gathered in memory, and no list of places is made. Keys are not rounded in between.
///
/// `None` where no kernels do it, and [`routed_attention_plan`] says why: they take bf16 and f16 on GPUs of compute capability 9.0, widths of 64, 128, 192 and
/// 256, as many as 32,768 rows, and clusters that fit the memory of a multiprocessor; and no tensors of an autodiff device. Elsewhere the same is
/// [`topk_per_centroid`](crate::order::topk_per_centroid), [`gather_qkv`](burn_blocksparse::internal::gather_qkv), [`sparse_attention`](burn_blocksparse::sparse_attention) and [`segment_mean`](burn_blocksparse::internal::segment_mean).
///
/// # Shapes
/// - `x`: `[batch, heads, length, head_dim]`
/// - `value`: `[batch, heads, length, value_dim]`, in the dtype of `x`
/// - `means`: `[heads, clusters, head_dim]`, read in f32
/// - result: as `value`
///
/// # Errors
/// [`OpError`] if shapes, dtypes or devices do not fit each other, one is empty, `window` is not from 1 to the length, the scale is not positive, or no feature of
/// this crate serves the device.
pub fn routed_attention(
    x: Tensor<4>,
    value: Tensor<4>,
    means: Tensor<3>,
    window: usize,
    scale: f64,
) -> Result<Option<Tensor<4>>, OpError> {
    check(&x, &value, &means, window, scale)?;
    let runs = planned(&x, &value, &means, window).is_ok();
    Ok(runs.then(|| attend(x, value, means, window, scale)))
}

/// What [`routed_attention`] runs, or why no kernels take the call.
///
/// # Errors
/// As [`routed_attention`].
pub fn routed_attention_plan(
    x: &Tensor<4>,
    value: &Tensor<4>,
    means: &Tensor<3>,
    window: usize,
    scale: f64,
) -> Result<Result<String, String>, OpError> {
    check(x, value, means, window, scale)?;
    let plan = planned(x, value, means, window);
    Ok(plan.map(|plan| plan.to_string()).map_err(String::from))
}

fn check(
    x: &Tensor<4>,
    value: &Tensor<4>,
    means: &Tensor<3>,
    window: usize,
    scale: f64,
) -> Result<(), OpError> {
    check_attraction(x, means, ("window", window))?;
    let [batch, heads, length, _] = x.dims();
    let [value_batch, value_heads, value_rows, value_dim] = value.dims();
    let own = [batch, heads, length];
    let got = [value_batch, value_heads, value_rows];
    OpError::expect_same("value's rows", own, "x's", got)?;
    OpError::expect_same("value's dtype", x.dtype(), "x's", value.dtype())?;
    same_device("value's device", &x.device(), "x's", &value.device())?;
    if value_dim == 0 {
        return Err(OpError::argument("value", "not empty", 0));
    }
    if scale <= 0.0 || !(scale as f32).is_normal() {
        return Err(OpError::argument("scale", "positive and finite", scale));
    }
    Ok(())
}

/// What runs, or why nothing does.
fn planned(
    x: &Tensor<4>,
    value: &Tensor<4>,
    means: &Tensor<3>,
    window: usize,
) -> Result<impl Display + use<>, &'static str> {
    if x.is_autodiff() || value.is_autodiff() || means.is_autodiff() {
        return Err("it has no backward pass");
    }
    plan_of_kernels(x, value, means, window)
}

#[cfg(not(feature = "cuda"))]
fn plan_of_kernels(
    _x: &Tensor<4>,
    _value: &Tensor<4>,
    _means: &Tensor<3>,
    _window: usize,
) -> Result<Infallible, &'static str> {
    Err("the crate's feature cuda is off")
}

#[cfg(feature = "cuda")]
fn plan_of_kernels(
    x: &Tensor<4>,
    value: &Tensor<4>,
    means: &Tensor<3>,
    window: usize,
) -> Result<impl Display + use<>, &'static str> {
    use crate::clusters::backend::{plan, sizes};

    let inner = burn_blocksparse::internal::device::cube::of(&x.device())
        .ok_or("the device has no kernels")?;
    if burn_blocksparse::internal::cube::uses_reference() {
        return Err("BLOCKSPARSE_REFERENCE is set");
    }
    let sizes = sizes(x.dims(), value.dims(), means.dims(), window);
    plan(&inner.client(), sizes, x.dtype()).ok_or("no kernels of this device take these rows")
}

#[cfg(not(feature = "cuda"))]
fn attend(
    _x: Tensor<4>,
    _value: Tensor<4>,
    _means: Tensor<3>,
    _window: usize,
    _scale: f64,
) -> Tensor<4> {
    unreachable!("kernels for it need the feature cuda")
}

#[cfg(feature = "cuda")]
fn attend(
    x: Tensor<4>,
    value: Tensor<4>,
    means: Tensor<3>,
    window: usize,
    scale: f64,
) -> Tensor<4> {
    use burn::backend::Dispatch;

    use crate::clusters::ops::ClusterOps;

    let out = <Dispatch as ClusterOps>::routed_attention(
        x.into_dispatch(),
        value.into_dispatch(),
        means.into_dispatch(),
        window,
        scale,
    );
    Tensor::from_dispatch(out)
}
