//! Replaces single operations of Burn's fusion by our kernels, before Burn's own are tried.

use std::marker::PhantomData;

use burn::backend::fusion::stream::Context;
use burn::backend::fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn::backend::ir::{BackendIr, OperationIr, TensorHandle, TensorIr};
use burn::serde::Serialize;
use burn::serde::de::DeserializeOwned;
use burn_cubecl::fusion::{
    CubeFuser, CubeFusionHandle, CubeOptimization, FallbackOperation, FusedOperation,
    OptimizationProvider, register,
};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};

use crate::error::OpError;

/// A kind of operation that kernels replace.
pub trait Taken: Clone + Send + Sync + 'static {
    /// Name of the optimization.
    const NAME: &'static str;

    /// An operation, whose tensors are identified as in Burn's graph.
    type Call: Clone + Send + Serialize + DeserializeOwned + 'static;

    /// Returns the operation, if it is of this kind and the device has kernels for it.
    fn call(operation: &OperationIr, device: &CubeDevice) -> Option<Self::Call>;

    /// Returns the result and its id, if kernels support the call. No tensor is consumed: Burn frees unused tensors after the operation.
    fn run(call: &Self::Call, context: &TakenContext) -> Option<(TensorIr, CubeTensor)>;
}

/// Tensors by id.
pub type TakenContext = Context<CubeFusionHandle>;

/// Returns a tensor of a call.
pub fn tensor(of: &TensorIr, context: &TakenContext) -> Option<CubeTensor> {
    let of = context.tensors.get(&of.id)?;
    let handle = context.handles.get_handle_ref(&of.id)?.clone();
    let shape = of.shape.clone();
    Some(CubeBackend::float_tensor(TensorHandle { handle, shape }))
}

/// Registers this kind of operation with Burn's fusion.
///
/// # Errors
/// [`OpError::Registry`] if it is called after the first tensor operation or a second time.
pub fn take<T: Taken>() -> Result<(), OpError> {
    register(Provider::<T>(PhantomData)).map_err(|error| OpError::Registry(error.to_string()))
}

struct Provider<T>(PhantomData<T>);

impl<T: Taken> OptimizationProvider for Provider<T> {
    type Operation = Operation<T>;

    fn fuser(&self, device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(Fuser::<T> {
            device: device.clone(),
            found: None,
            closed: false,
        })
    }
}

/// A fuser that takes one call and nothing else.
#[derive(Clone)]
struct Fuser<T: Taken> {
    device: CubeDevice,
    found: Option<T::Call>,
    closed: bool,
}

/// Higher than the score of anything that Burn fuses.
const SCORE: u64 = 1 << 40;

impl<T: Taken> OperationFuser<CubeOptimization> for Fuser<T> {
    fn fuse(&mut self, operation: &OperationIr) {
        if !self.closed {
            self.closed = true;
            self.found = T::call(operation, &self.device);
        }
    }

    fn finish(&mut self) -> CubeOptimization {
        let call = self.found.clone();
        let call = call.expect("a fuser without an operation is not ready");
        CubeOptimization::new(Operation::<T> { call })
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

struct Operation<T: Taken> {
    call: T::Call,
}

impl<T: Taken> FusedOperation for Operation<T> {
    const NAME: &'static str = T::NAME;

    type State = T::Call;

    fn num_ops_fused(&self) -> usize {
        1
    }

    fn run(
        &mut self,
        context: &mut TakenContext,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        match T::run(&self.call, context) {
            Some((out, tensor)) => context.handles.register_handle(out.id, tensor.into()),
            None => fallback(0).run(context),
        }
    }

    fn to_state(&self) -> T::Call {
        self.call.clone()
    }

    fn from_state(_device: &CubeDevice, call: T::Call) -> Self {
        Self { call }
    }
}
