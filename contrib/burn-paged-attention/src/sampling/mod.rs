//! Sampling of tokens from logits on the device: temperature, top-k, top-p, min-p and repetition penalty.
pub(crate) mod backend;
#[doc(hidden)]
pub mod ops;

use crate::paged::values::OptInt;
pub use crate::sample_options::SampleOptions;
use crate::sampling::ops::SamplingOps;
use burn_blocksparse::internal::prelude::*;

/// Samples a token from each row of logits. [`SampleOptions`] select the candidates. The token is the first, by descending probability, whose
/// cumulative probability exceeds the row's element of `draws`. It is −1 if no logit is finite.
///
/// Nothing is read back, so the tokens can be embedded directly, or the call captured in a graph. Kernels sum in f32 and sort nothing; CPUs sum in
/// f64. A draw within rounding of the boundary between two tokens may give either.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_paged_attention::sampling::{SampleOptions, sample_tokens};
///
/// let device = Device::flex();
/// let logits = Tensor::<2>::from_data([[2.0, 1.5, 1.0, 0.2, -0.5, -1.0]; 2], &device);
/// let options = SampleOptions::default().temperature(0.8).top_k(Some(4)).top_p(0.9);
/// let draws = Tensor::<1>::from_data([0.3, 0.95], &device);
/// let tokens = sample_tokens(logits, draws, None, &options)?;
/// assert_eq!(tokens.into_data().iter::<i32>().collect::<Vec<_>>(), [0, 2]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// - `logits`: `[rows, vocab]`; sums are f32 whatever the dtype
/// - `draws`: `[rows]`, in `[0, 1)`
/// - `seen`: `[rows, vocab]`, i32, nonzero for seen tokens; used if [`SampleOptions::repetition`] is not 1
/// - result: `[rows]`, i32, without autodiff
///
/// # Errors
/// [`OpError`] if shapes or devices do not match, the vocabulary is empty, an option is out of range, or no feature of this crate serves the device.
pub fn sample_tokens(
    logits: Tensor<2>,
    draws: Tensor<1>,
    seen: Option<Tensor<2, Int>>,
    options: &SampleOptions,
) -> Result<Tensor<1, Int>, OpError> {
    check(&logits, options)?;
    let [rows, _] = logits.dims();
    OpError::expect_same("draws' length", rows, "logits' rows", draws.dims()[0])?;
    same_device(
        "draws' device",
        &logits.device(),
        "logits'",
        &draws.device(),
    )?;
    if let Some(seen) = &seen {
        OpError::expect_same("seen's shape", logits.dims(), "logits'", seen.dims())?;
        same_device("seen's device", &logits.device(), "logits'", &seen.device())?;
    }
    let seen = seen.filter(|_| options.repetition != 1.0);
    let seen = seen.map(|seen| seen.without_autodiff().cast(burn::tensor::IntDType::I32));
    let float = |tensor: Tensor<2>| tensor.without_autodiff().cast(FloatDType::F32);
    let draws = draws.without_autodiff().cast(FloatDType::F32);
    let tokens = <Dispatch as SamplingOps>::sample_tokens(
        float(logits).into_dispatch(),
        draws.into_dispatch(),
        OptInt::from(seen.map(Tensor::into_dispatch)),
        *options,
    );
    Ok(Tensor::from_dispatch(tokens))
}

impl SampleOptions {
    /// Returns the plan of [`sample_tokens`].
    ///
    /// # Errors
    /// Those of [`sample_tokens`].
    #[cfg_attr(not(feature = "cube"), allow(unused_variables))]
    pub fn explain(&self, logits: &Tensor<2>) -> Result<OpPlan, OpError> {
        check(logits, self)?;
        let [_, vocab] = logits.dims();
        Ok(burn_blocksparse::op_plan!(&logits.device(), |device| {
            crate::sampling::backend::text(device, vocab, self)
        }))
    }
}

fn check(logits: &Tensor<2>, options: &SampleOptions) -> Result<(), OpError> {
    served(&logits.device())?;
    options.check()?;
    let [_, vocab] = logits.dims();
    // The bound 2^24 lets counts of tokens be exact in f32.
    blocksparse::ensure! { OpError; (1..1 << 24).contains(&vocab) => "logits", "at least 1 and less than 2^24 columns", vocab; }
    Ok(())
}
