//! Our product kernel beneath Burn's own `matmul`: an optimization of Burn's fusion, which is asked before Burn's kernels are.

use std::sync::atomic::{AtomicU64, Ordering};

use blocksparse_cubecl::Tuning;
use burn::tensor::DType;
use burn_cubecl::CubeDevice;
use burn_cubecl::fusion::{
    CubeFuser, CubeFusionHandle, CubeOptimization, FallbackOperation, FusedOperation,
    OptimizationProvider, register,
};
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::stream::Context;
use burn_fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn_ir::{BackendIr, FloatOperationIr, MatmulOpIr, OperationIr, TensorHandle, TensorIr};

use burn_blocksparse::OpError;

/// Products that ran on our kernel.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// Runs the matrix products of **every** model of this program in our kernel, where it is faster than Burn's: products of bf16 or f16 tensors
/// (`Tensor::matmul`, burn-nn's `Linear`, attention, their gradients) on GPUs of compute capability 9.0, at any shapes and strides that TMA can read. Sums
/// are f32, rounded once. All other products, and all other devices, go on as before. Call it once, before the first tensor of the program:
///
/// ```no_run
/// burn_fused_ops::accelerate_matmul()?;
/// // Anything that Burn does.
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// It works through Burn's fusion, which an application has by default, and only for devices with it (`Device::cuda`). Burn fuses a product with
/// what is computed element by element behind it; with this, that becomes a launch of its own (fused with its neighbours as before).
///
/// # Errors
/// [`OpError::Registry`] after the first tensor operation, or the second time; [`OpError::Kernel`] if an environment variable of the kernels has a wrong value.
pub fn accelerate_matmul() -> Result<(), OpError> {
    Tuning::of_process()?;
    register(Provider).map_err(|error| OpError::Registry(error.to_string()))
}

/// How many products of this program have run in our kernel because of [`accelerate_matmul`]: launches are lazy, so those that something has been read from.
pub fn accelerated_products() -> u64 {
    TAKEN.load(Ordering::Relaxed)
}

struct Provider;

impl OptimizationProvider for Provider {
    type Operation = Product;

    fn fuser(&self, device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(ProductFuser {
            device: device.clone(),
            found: None,
            closed: false,
        })
    }
}

/// Takes one product and nothing else.
#[derive(Clone)]
struct ProductFuser {
    device: CubeDevice,
    found: Option<MatmulOpIr>,
    closed: bool,
}

/// More than anything that Burn fuses: it is the only other one that begins with a product, and its kernels are slower.
const SCORE: u64 = 1 << 40;

fn is_half(tensor: &TensorIr) -> bool {
    matches!(tensor.dtype, DType::BF16 | DType::F16)
}

impl OperationFuser<CubeOptimization> for ProductFuser {
    fn fuse(&mut self, operation: &OperationIr) {
        if self.closed {
            return;
        }
        self.closed = true;
        if let OperationIr::Float(_, FloatOperationIr::Matmul(op)) = operation {
            let same = op.lhs.dtype == op.rhs.dtype && op.lhs.dtype == op.out.dtype;
            if same && is_half(&op.out) && takes(&self.device) {
                self.found = Some(op.clone());
            }
        }
    }

    fn finish(&mut self) -> CubeOptimization {
        let op = self.found.clone();
        CubeOptimization::new(Product {
            op: op.expect("a fuser without an operation is not ready"),
        })
    }

    fn reset(&mut self) {
        self.found = None;
        self.closed = false;
    }

    fn status(&self) -> FuserStatus {
        match self.closed {
            true => FuserStatus::Closed,
            false => FuserStatus::Open,
        }
    }

    fn properties(&self) -> FuserProperties {
        let ready = self.found.is_some();
        FuserProperties {
            score: if ready { SCORE } else { 0 },
            ready,
        }
    }

    fn len(&self) -> usize {
        usize::from(self.found.is_some())
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

/// Whether the kernel runs on the device at all: where it does not, Burn's fusion is not kept from anything.
fn takes(device: &CubeDevice) -> bool {
    #[cfg(feature = "cuda")]
    return crate::linear::wgmma::available(device);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = device;
        false
    }
}

/// A product, whose tensors are named as in Burn's graph.
struct Product {
    op: MatmulOpIr,
}

impl FusedOperation for Product {
    const NAME: &'static str = "burn-blocksparse matmul";

    type State = MatmulOpIr;

    fn num_ops_fused(&self) -> usize {
        1
    }

    fn run(
        &mut self,
        context: &mut Context<CubeFusionHandle>,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        match self.multiply(context) {
            Some((out, tensor)) => {
                TAKEN.fetch_add(1, Ordering::Relaxed);
                context.handles.register_handle(out.id, tensor.into());
            }
            None => fallback(0).run(context),
        }
    }

    fn to_state(&self) -> MatmulOpIr {
        self.op.clone()
    }

    fn from_state(_device: &CubeDevice, op: MatmulOpIr) -> Self {
        Self { op }
    }
}

impl Product {
    /// The result, if the kernel takes the factors. Nothing is consumed: Burn frees what is not used any more behind the operation.
    fn multiply(&self, context: &Context<CubeFusionHandle>) -> Option<(TensorIr, CubeTensor)> {
        let factor = |of: &TensorIr| {
            let of = context.tensors.get(&of.id)?;
            let handle = context.handles.get_handle_ref(&of.id)?.clone();
            let shape = of.shape.clone();
            Some(burn_cubecl::CubeBackend::float_tensor(TensorHandle {
                handle,
                shape,
            }))
        };
        let (lhs, rhs) = (factor(&self.op.lhs)?, factor(&self.op.rhs)?);
        let out = context.tensors.get(&self.op.out.id)?.clone();
        #[cfg(feature = "cuda")]
        return crate::linear::wgmma::matmul(&lhs, &rhs, &out.shape).map(|made| (out, made));
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (lhs, rhs, out);
            None
        }
    }
}
