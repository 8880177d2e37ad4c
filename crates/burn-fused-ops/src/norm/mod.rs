//! Residual addition and norm, fused.
#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
mod backend;
#[doc(hidden)]
pub mod ops;

pub(crate) mod reference;
#[doc(hidden)]
pub mod values;

use blocksparse::ElementDropout;

use crate::norm::ops::NormOps;
use burn_blocksparse::graph::seeds;
use burn_blocksparse::internal::prelude::*;
use values::{NormCall, NormInputs};

/// Kind of normalization.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// Subtracts the row's mean and divides by its standard deviation: layer normalization (Ba et al., 2016, section 3).
    #[default]
    Layer,
    /// Divides by the row's root mean square (Zhang and Sennrich, 2019, equation 4).
    Rms,
}

/// Options of [`add_norm`]. Build them from [`Default`]:
///
/// ```
/// use burn_fused_ops::{NormKind, AddNormOptions};
///
/// let options = AddNormOptions::default().norm(NormKind::Rms).epsilon(1e-6);
/// assert_eq!(options.epsilon, 1e-6);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct AddNormOptions {
    /// Kind of norm; default layer normalization.
    pub norm: NormKind,
    /// Term added to the variance; default 1e-5.
    pub epsilon: f64,
    /// Dropout of the branch.
    pub dropout: Option<ElementDropout>,
    /// Dtype of the normed stream; default the stream's.
    pub dtype: Option<FloatDType>,
}

impl Default for AddNormOptions {
    fn default() -> Self {
        Self {
            norm: NormKind::Layer,
            epsilon: 1e-5,
            dropout: None,
            dtype: None,
        }
    }
}

impl AddNormOptions {
    blocksparse::setters! {
        /// Sets the kind of norm.
        norm: NormKind,
        /// Sets the term added to the variance.
        epsilon: f64,
        /// Sets the dropout of the branch, applied after its bias. Give every training step its own seed, and every place in a model its own site.
        dropout: Some(ElementDropout),
        /// Sets the dtype of the normed stream. The tensor stored for the backward pass has it too.
        dtype: Some(FloatDType),
    }
}

/// Scale and shift of a norm.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NormParams {
    /// Scale, `[width]`.
    pub gamma: Tensor<1>,
    /// Shift, `[width]`.
    pub beta: Option<Tensor<1>>,
}

impl NormParams {
    /// Returns the parameters of a norm without a shift.
    pub fn new(gamma: Tensor<1>) -> Self {
        Self { gamma, beta: None }
    }

    blocksparse::setters! {
        /// Sets the shift.
        beta: Some(Tensor<1>),
    }
}

/// Branch added to a residual stream.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Residual<const D: usize> {
    /// The branch, of the stream's shape.
    pub x: Tensor<D>,
    /// Bias added to the branch, `[width]`.
    pub bias: Option<Tensor<1>>,
}

impl<const D: usize> Residual<D> {
    /// Returns a branch without a bias.
    pub fn new(x: Tensor<D>) -> Self {
        Self { x, bias: None }
    }

    blocksparse::setters! {
        /// Sets the bias.
        bias: Some(Tensor<1>),
    }
}

/// Adds a branch to a residual stream and norms the sum in one operation. Returns `(s', h)`, both of the stream's shape, `[.., width]`.
///
/// ```text
/// s' = stream + m ∘ (branch + bias)      m = kept / (1 − probability) with dropout
/// h = γ ∘ (s' − μ) / √(σ² + ε) + β       μ and σ² of the row; with `Norm::Rms` μ = 0
/// ```
///
/// Stream, branch, gamma, beta, bias and h may have different dtypes; s' has the stream's, and h is the norm of s' as it is returned. Sums are f32, or f64
/// for f64 streams. Without a branch s' is the stream.
///
/// Both outputs are differentiable. Use s' instead of the stream after the call, with or without a branch: the stream then has one consumer, and one kernel
/// computes its gradient without adding whole streams. The graph stores the normed stream before gamma and beta, in h's dtype, and one number per row; the
/// dropout mask is recomputed from its seed ([`ElementDropout`]).
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fused_ops::{Residual, NormParams, AddNormOptions, add_norm};
///
/// let device = Device::flex().autodiff();
/// let [stream, x] = [(); 2].map(|_| Tensor::<3>::random([2, 5, 8], Distribution::Default, &device).require_grad());
/// let params = NormParams::new(Tensor::ones([8], &device)).beta(Tensor::zeros([8], &device));
/// let options = AddNormOptions::default();
/// let (sum, normed) = add_norm(stream.clone(), Some(Residual::new(x)), params, &options)?;
/// assert!(normed.clone().mean().into_scalar::<f32>().abs() < 1e-5);
/// let gradients = (sum + normed).sum().backward();
/// assert_eq!(stream.grad(&gradients).unwrap().dims(), [2, 5, 8]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Errors
/// [`OpError`] if shapes or devices do not match the stream's, rows are empty, the dropout's probability is not in `[0, 1)`, epsilon is negative or not
/// finite, or the device does not support the dtype of h.
pub fn add_norm<const D: usize>(
    stream: Tensor<D>,
    branch: Option<Residual<D>>,
    params: NormParams,
    options: &AddNormOptions,
) -> Result<(Tensor<D>, Tensor<D>), OpError> {
    let call = check(&stream, branch.as_ref(), Some(&params), options)?;
    let (sum, normed) = run(stream, branch, Some(params), call);
    Ok((sum, normed.expect("a norm of a call with one")))
}

/// Norms `x`, `[.., width]`: [`add_norm`] without a branch, for a stream that is not used afterwards.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fused_ops::{NormKind, NormParams, AddNormOptions, norm};
///
/// let device = Device::flex();
/// let x = Tensor::<2>::from_data([[3.0, 4.0]], &device);
/// let params = NormParams::new(Tensor::ones([2], &device));
/// let normed = norm(x, params, &AddNormOptions::default().norm(NormKind::Rms))?;
/// assert!((normed.slice([0..1, 0..1]).into_scalar::<f32>() - 3.0 / 12.5f32.sqrt()).abs() < 1e-5);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Errors
/// Those of [`add_norm`].
pub fn norm<const D: usize>(
    x: Tensor<D>,
    params: NormParams,
    options: &AddNormOptions,
) -> Result<Tensor<D>, OpError> {
    let (_, normed) = add_norm(x, None, params, options)?;
    Ok(normed)
}

/// Returns `stream + m ∘ (branch + bias)`, of the stream's shape and dtype: the s' of [`add_norm`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fused_ops::{Residual, residual_add};
///
/// let device = Device::flex();
/// let [stream, x] = [Tensor::<2>::ones([3, 4], &device), Tensor::ones([3, 4], &device)];
/// let sum = residual_add(stream, Residual::new(x).bias(Tensor::ones([4], &device)), None)?;
/// assert_eq!(sum.max().into_scalar::<f32>(), 3.0);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Errors
/// Those of [`add_norm`].
pub fn residual_add<const D: usize>(
    stream: Tensor<D>,
    branch: Residual<D>,
    dropout: Option<ElementDropout>,
) -> Result<Tensor<D>, OpError> {
    let options = AddNormOptions {
        dropout,
        ..Default::default()
    };
    let call = check(&stream, Some(&branch), None, &options)?;
    let (sum, _) = run(stream, Some(branch), None, call);
    Ok(sum)
}

impl AddNormOptions {
    /// Returns the plan of [`add_norm`] for these arguments.
    ///
    /// # Errors
    /// Those of [`add_norm`].
    pub fn explain<const D: usize>(
        &self,
        stream: &Tensor<D>,
        branch: Option<&Residual<D>>,
        params: &NormParams,
    ) -> Result<OpPlan, OpError> {
        let call = check(stream, branch, Some(params), self)?;
        let mut dtypes = vec![stream.dtype(), params.gamma.dtype(), call.dtype.into()];
        dtypes.extend(branch.map(|branch| branch.x.dtype()));
        let [rows, width] = matrix(&stream.shape());
        Ok(burn_blocksparse::op_plan!(&stream.device(), |device| {
            use crate::kernels::rows::norm_backward::residual_norm_text;
            use burn::backend::cubecl::dtype_to_elem_type;

            let elements: Vec<_> = dtypes.into_iter().map(dtype_to_elem_type).collect();
            residual_norm_text(&device.client(), [rows, width], &elements)
        }))
    }
}

fn run<const D: usize>(
    stream: Tensor<D>,
    branch: Option<Residual<D>>,
    params: Option<NormParams>,
    call: NormCall,
) -> (Tensor<D>, Option<Tensor<D>>) {
    let (x, bias) = branch.map_or((None, None), |branch| (Some(branch.x), branch.bias));
    let (gamma, beta) = params.map_or((None, None), |params| (Some(params.gamma), params.beta));
    let row = |x: Option<Tensor<1>>| OptFloat::from(x.map(Tensor::into_dispatch));
    let inputs = NormInputs {
        stream: stream.clone().into_dispatch(),
        branch: x.map(Tensor::into_dispatch).into(),
        bias: row(bias),
        gamma: row(gamma),
        beta: row(beta),
    };
    let made = <Dispatch as NormOps>::add_norm(inputs, call);
    let sum = (made.stream.into_option()).map_or(stream, Tensor::from_dispatch);
    let normed = made.normed;
    (sum, normed.into_option().map(Tensor::from_dispatch))
}

/// Checks that a dropout's probability is in `[0, 1)`.
pub(crate) fn check_dropout(
    argument: &'static str,
    dropout: Option<&ElementDropout>,
    device: &Device,
) -> Result<(), OpError> {
    match dropout {
        Some(dropout) if !(0.0..1.0).contains(&dropout.probability) => Err(OpError::argument(
            argument,
            "at least 0 and less than 1",
            dropout.probability,
        )),
        Some(dropout) if dropout.probability > 0.0 => seeds::check(dropout.seed, device),
        _ => Ok(()),
    }
}

fn check<const D: usize>(
    stream: &Tensor<D>,
    branch: Option<&Residual<D>>,
    params: Option<&NormParams>,
    options: &AddNormOptions,
) -> Result<NormCall, OpError> {
    let device = stream.device();
    served(&device)?;
    let dims = stream.dims();
    let width = dims[D - 1];
    OpError::ensure_positive("stream's width", width)?;
    if let Some(branch) = branch {
        OpError::expect_same("branch's shape", dims, "the stream's", branch.x.dims())?;
        let own = branch.x.device();
        same_device("branch's device", &device, "the stream's", &own)?;
    }
    let rows = [
        branch.and_then(|branch| branch.bias.as_ref()),
        params.map(|params| &params.gamma),
        params.and_then(|params| params.beta.as_ref()),
    ];
    let names = [
        ["bias's shape", "bias's device"],
        ["gamma's shape", "gamma's device"],
        ["beta's shape", "beta's device"],
    ];
    for ([shape, at], row) in names.into_iter().zip(rows) {
        let Some(row) = row else { continue };
        OpError::expect_same(shape, [width], "the stream's width", row.dims())?;
        same_device(at, &device, "the stream's", &row.device())?;
    }
    blocksparse::ensure! {
        OpError;
        options.epsilon.is_finite() && options.epsilon >= 0.0 => "options.epsilon", "finite and at least 0", options.epsilon;
    }
    let dropout = options.dropout.as_ref();
    check_dropout("options.dropout's probability", dropout, &device)?;
    let dtype = options.dtype.unwrap_or_else(|| stream.dtype().into());
    has_dtype(&device, dtype)?;
    Ok(NormCall {
        norm: params.map(|_| options.norm),
        epsilon: options.epsilon,
        dropout: (options.dropout).filter(|dropout| dropout.probability > 0.0),
        dtype,
        keep: false,
    })
}

fn has_dtype(device: &Device, dtype: FloatDType) -> Result<(), OpError> {
    blocksparse::ensure! { OpError; device.supports_dtype(dtype) => "options.dtype", "a dtype of the device", format!("{dtype:?}"); }
    Ok(())
}
