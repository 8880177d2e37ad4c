//! Our product kernel under Burn's own `matmul`: an optimization of Burn's fusion, which is tried before Burn's kernels.

use std::sync::atomic::{AtomicU64, Ordering};

use blocksparse_cubecl::Tuning;
use burn::backend::ir::{FloatOperationIr, MatmulOpIr, OperationIr, TensorIr};

use crate::linear::wgmma;
use burn_blocksparse::internal::cube::*;
use burn_blocksparse::internal::prelude::*;
use burn_blocksparse::internal::taken::{Taken, TakenContext, take, tensor};

/// Number of products that ran on our kernel.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// Runs the matrix products of **every** model of this program in our kernel where it is faster than Burn's: products of bf16 or f16 tensors
/// (`Tensor::matmul`, burn-nn's `Linear`, attention, their gradients) on GPUs of compute capability 9.0, with any shapes and strides that TMA can read. Sums
/// are f32, rounded once. All other products and devices are unaffected. Call it once, before the first tensor of the program:
///
/// ```no_run
/// burn_fused_ops::accelerate_matmul()?;
/// // Anything that Burn does.
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// It works through Burn's fusion, which is on by default, and only for devices with fusion (`Device::cuda`). Burn fuses a product with the element-wise
/// operations after it; with this, those become a launch of their own (fused with adjacent operations as before).
///
/// # Errors
/// [`OpError::Registry`] after the first tensor operation, or on a second call; [`OpError::Kernel`] if an environment variable of the kernels has an invalid
/// value.
pub fn accelerate_matmul() -> Result<(), OpError> {
    Tuning::of_process()?;
    take::<Product>()
}

/// Returns the number of matmuls of this program that ran in our kernel because of [`accelerate_matmul`]. Launches are lazy: a matmul counts once its result
/// is needed.
pub fn accelerated_products() -> u64 {
    TAKEN.load(Ordering::Relaxed)
}

#[derive(Clone)]
struct Product;

fn is_half(tensor: &TensorIr) -> bool {
    matches!(tensor.dtype, DType::BF16 | DType::F16)
}

impl Taken for Product {
    const NAME: &'static str = "burn-blocksparse matmul";

    type Call = MatmulOpIr;

    fn call(operation: &OperationIr, device: &CubeDevice) -> Option<MatmulOpIr> {
        let OperationIr::Float(_, FloatOperationIr::Matmul(op)) = operation else {
            return None;
        };
        let same = op.lhs.dtype == op.rhs.dtype && op.lhs.dtype == op.out.dtype;
        // Without the kernel, Burn's fusion stays free to fuse the product.
        (same && is_half(&op.out) && wgmma::available(device)).then(|| op.clone())
    }

    fn run(op: &MatmulOpIr, context: &TakenContext) -> Option<(TensorIr, CubeTensor)> {
        let (lhs, rhs) = (tensor(&op.lhs, context)?, tensor(&op.rhs, context)?);
        let out = context.tensors.get(&op.out.id)?.clone();
        let made = wgmma::matmul(&lhs, &rhs, &out.shape)?;
        TAKEN.fetch_add(1, Ordering::Relaxed);
        Some((out, made))
    }
}
