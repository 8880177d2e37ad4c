//! Losses of logits, computed in chunks so that the logits never exist all at once.
#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
mod backend;
#[doc(hidden)]
pub mod ops;

pub(crate) mod compute;
#[doc(hidden)]
pub mod values;

use burn::tensor::{IntDType, Transaction};

use crate::linear::supported;
use crate::loss::ops::LossOps;
use burn_blocksparse::internal::prelude::*;
pub use values::Reduction;
use values::{LossInputs, LossTask};

/// Most logits that exist at once: 64 MiB of f32.
const CHUNK_ELEMENTS: usize = 1 << 24;

/// Options of [`linear_cross_entropy`]. Build them from [`Default`].
#[derive(Clone, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct CrossEntropyOptions {
    /// Reduction of the losses of positions; default their mean.
    pub reduction: Reduction,
    /// Target that is ignored, for padding: it counts neither in the sum nor in the mean's divisor; default none.
    pub ignore_index: Option<i64>,
    /// Share of the target's probability that is spread over the whole vocabulary (Szegedy et al., 2016, section 7); default 0.
    pub label_smoothing: f64,
    /// True if targets are read from the device and checked before the loss; default `true`. The check waits for the device. Without it, a target out of
    /// range makes the loss NaN.
    pub check_targets: bool,
    /// Most logits that exist at once, though at least one row.
    #[doc(hidden)]
    pub chunk_elements: usize,
}

impl Default for CrossEntropyOptions {
    fn default() -> Self {
        Self {
            reduction: Reduction::Mean,
            ignore_index: None,
            label_smoothing: 0.0,
            check_targets: true,
            chunk_elements: CHUNK_ELEMENTS,
        }
    }
}

impl CrossEntropyOptions {
    blocksparse::setters! {
        /// Sets the reduction of the losses of positions.
        reduction: Reduction,
        /// Sets the target that is ignored.
        ignore_index: Some(i64),
        /// Sets the share of the target's probability that is spread over the whole vocabulary: at least 0 and less than 1.
        label_smoothing: f64,
        /// Sets whether targets are read from the device and checked before the loss.
        check_targets: bool,
    }

    #[doc(hidden)]
    pub fn chunk_elements(mut self, elements: usize) -> Self {
        self.chunk_elements = elements;
        self
    }
}

/// Cross entropy of the logits `x · weight` with targets, in nats: `−log softmax(x · W)[target]`. The logits never exist all at once: positions are processed
/// in chunks, each with its logits, their softmax and their part of the gradients. They take 64 MiB (or one row) whatever the vocabulary.
///
/// The forward pass computes and stores the gradients with respect to x and weight; the backward pass multiplies them by the gradient of the loss (as
/// Liger-Kernel does: Hsu et al., 2024, section 3.2). So call it without autodiff where only the loss is wanted. The stored gradients are those of the sum,
/// x's in its dtype and the weight's in f32: those of the mean would be too small for f16. Logits and sums are f32, f64 for f64; the weight is rounded to x's
/// dtype. Deterministic.
///
/// With [`Reduction::None`] each loss has its own gradient, which the forward pass does not know. The backward pass then computes the logits again in chunks,
/// and both gradients from them.
///
/// ```
/// use burn::tensor::{Device, Distribution, Int, Tensor};
/// use burn_fused_ops::{CrossEntropyOptions, linear_cross_entropy};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<3>::random([2, 3, 4], Distribution::Default, &device).require_grad();
/// let weight = Tensor::<2>::random([4, 10], Distribution::Default, &device).require_grad();
/// let targets = Tensor::<2, Int>::from_data([[1, 9, -1], [0, -1, -1]], &device);
/// let options = CrossEntropyOptions::default().ignore_index(-1);
/// let loss = linear_cross_entropy(x.clone(), weight, targets, &options)?;
/// let gradients = loss.backward();
/// assert_eq!(x.grad(&gradients).unwrap().dims(), [2, 3, 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `x`: `[.., width]`
/// - `weight`: `[width, vocab]`, f32 or of x's dtype
/// - `targets`: `[..]`, or flattened: one for each row of `x`, at least 0 and below `vocab`, or `options.ignore_index`
/// - result: `[1]`, or `[positions]` with [`Reduction::None`], positions in the order of x's rows; f32, f64 for f64
///
/// If no target counts, the mean and the gradients are 0.
///
/// # Errors
/// [`OpError`] if shapes, dtypes, devices or options do not match, or a target is out of range (see [`CrossEntropyOptions::check_targets`]).
pub fn linear_cross_entropy<const D: usize, const T: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    targets: Tensor<T, Int>,
    options: &CrossEntropyOptions,
) -> Result<Tensor<1>, OpError> {
    let targets = check(&x, &weight, targets, options)?;
    let [width, vocab] = weight.dims();
    let [positions] = targets.dims();
    if options.check_targets && positions > 0 {
        check_targets(targets.clone(), vocab, options.ignore_index)?;
    }
    let inputs = LossInputs {
        x: x.reshape([positions, width]).into_dispatch(),
        weight: weight.into_dispatch(),
        targets: targets.into_dispatch(),
    };
    let output = <Dispatch as LossOps>::linear_cross_entropy(inputs, task(options));
    Ok(Tensor::from_dispatch(output.loss))
}

impl CrossEntropyOptions {
    /// Returns the plan of [`linear_cross_entropy`]. Targets are not read.
    ///
    /// # Errors
    /// Those of that call, except for targets out of range.
    pub fn explain<const D: usize, const T: usize>(
        &self,
        x: &Tensor<D>,
        weight: &Tensor<2>,
        targets: &Tensor<T, Int>,
    ) -> Result<OpPlan, OpError> {
        let targets = check(x, weight, targets.clone(), self)?;
        let [_, vocab] = weight.dims();
        let [positions] = targets.dims();
        let mut task = task(self);
        task.by_x = x.device().is_autodiff();
        task.by_weight = weight.device().is_autodiff();
        let rows = compute::chunk_rows(positions, vocab, task.chunk_elements);
        Ok(burn_blocksparse::op_plan!(&x.device(), |device| {
            let dtypes = [x.dtype(), targets.dtype()];
            backend::plan(device, dtypes, vocab, &task).map(|kernel| {
                let again = match task.reduction == Reduction::None && (task.by_x || task.by_weight)
                {
                    true => ", again in the backward pass",
                    false => "",
                };
                format!(
                    "{} chunks of {rows} positions{again}, products by Burn's matmul; {kernel}",
                    positions.div_ceil(rows)
                )
            })
        }))
    }
}

fn task(options: &CrossEntropyOptions) -> LossTask {
    LossTask {
        reduction: options.reduction,
        ignore_index: options.ignore_index,
        smoothing: options.label_smoothing,
        chunk_elements: options.chunk_elements,
        by_x: false,
        by_weight: false,
    }
}

/// Checks the arguments and returns the targets flattened, i32 or i64.
fn check<const D: usize, const T: usize>(
    x: &Tensor<D>,
    weight: &Tensor<2>,
    targets: Tensor<T, Int>,
    options: &CrossEntropyOptions,
) -> Result<Tensor<1, Int>, OpError> {
    let device = x.device();
    served(&device)?;
    let dims = x.dims();
    let (leading, width) = (&dims[..D - 1], dims[D - 1]);
    let [inputs, vocab] = weight.dims();
    blocksparse::ensure! { OpError; inputs == width => "weight's width", format!("{width}, x's last dimension"), inputs; }
    let positions: usize = leading.iter().product();
    let shape = targets.dims();
    blocksparse::ensure! {
        OpError;
        shape[..] == *leading || shape[..] == [positions]
            => "targets' shape", format!("{leading:?} or [{positions}], x's positions"), format!("{shape:?}");
    }
    OpError::ensure_positive("weight's vocab", vocab)?;
    supported("x's dtype", &device, x.dtype())?;
    blocksparse::ensure! {
        OpError;
        [DType::F32, x.dtype()].contains(&weight.dtype())
            => "weight's dtype", format!("F32 or {:?}, x's", x.dtype()), format!("{:?}", weight.dtype());
    }
    same_device("weight's device", &device, "x's", &weight.device())?;
    same_device("targets' device", &device, "x's", &targets.device())?;
    let smoothing = options.label_smoothing;
    blocksparse::ensure! { OpError; (0.0..1.0).contains(&smoothing) => "options.label_smoothing", "at least 0 and less than 1", smoothing; }
    let targets = targets.reshape([positions]);
    Ok(match targets.dtype() {
        DType::I32 | DType::I64 => targets,
        _ if device.supports_dtype(DType::I64) => targets.cast(IntDType::I64),
        _ => targets.cast(IntDType::I32),
    })
}

/// Reads the smallest and the largest target and checks that they are in range.
fn check_targets(
    targets: Tensor<1, Int>,
    vocab: usize,
    ignore_index: Option<i64>,
) -> Result<(), OpError> {
    let counting = match compute::ignored_in(targets.dtype(), ignore_index) {
        Some(ignored) => {
            let mask = targets.clone().equal_elem(ignored);
            targets.mask_fill(mask, 0)
        }
        None => targets,
    };
    let ends = Transaction::default()
        .register(counting.clone().min())
        .register(counting.max());
    let ends = ends.try_execute().map_err(OpError::read)?;
    for end in ends.iter().flat_map(|end| end.iter::<i64>()) {
        blocksparse::ensure! {
            OpError;
            usize::try_from(end).is_ok_and(|target| target < vocab) => "targets", format!("at least 0 and less than {vocab}, weight's vocab"), end;
        }
    }
    Ok(())
}
