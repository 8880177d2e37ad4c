//! Inputs of a recording.

use std::cell::RefCell;
use std::rc::Rc;

use burn::tensor::Float;
use burn::tensor::kind::Basic;

use super::recording;
use crate::base::prelude::*;
use crate::graph::ops::StaticInputOps;

/// Kinds of tensors that [`StaticInput`] can hold: [`Float`] and [`Int`].
pub trait StaticInputKind: Basic + sealed::Overwrite {}

impl StaticInputKind for Float {}
impl StaticInputKind for Int {}

mod sealed {
    use super::*;

    pub trait Overwrite: Sized {
        fn is(dtype: DType) -> bool;
        const NAME: &'static str;
        fn overwritten(x: Tensor<1, Self>, data: TensorData) -> Tensor<1, Self>
        where
            Self: Basic;
    }

    impl Overwrite for Float {
        const NAME: &'static str = "a float dtype";

        fn is(dtype: DType) -> bool {
            dtype.is_float()
        }

        fn overwritten(x: Tensor<1>, data: TensorData) -> Tensor<1> {
            let x = x.into_dispatch();
            Tensor::from_dispatch(<Dispatch as StaticInputOps>::overwrite_float(x, data))
        }
    }

    impl Overwrite for Int {
        const NAME: &'static str = "an integer dtype";

        fn is(dtype: DType) -> bool {
            dtype.is_int() || dtype.is_uint()
        }

        fn overwritten(x: Tensor<1, Int>, data: TensorData) -> Tensor<1, Int> {
            let x = x.into_dispatch();
            Tensor::from_dispatch(<Dispatch as StaticInputOps>::overwrite_int(x, data))
        }
    }
}

/// A tensor that the host overwrites in place: an input of a [`CapturedGraph`](super::CapturedGraph), such as the tokens of a step.
///
/// A captured graph reads the buffers that it was recorded with. A new tensor has another buffer, so replays would keep using the first batch;
/// [`write`](Self::write) puts new elements into the same buffer. Clones refer to the same tensor. On CPUs, which do not capture, a write creates a new
/// tensor.
///
/// It cannot leave its thread: CubeCL orders the work of one thread, and a write from another one could run before or after a replay.
///
/// ```
/// use burn::tensor::{Device, Int, TensorData};
/// use burn_blocksparse::graph::StaticInput;
///
/// let tokens = StaticInput::<2, Int>::new(TensorData::from([[1, 2], [3, 4]]), &Device::flex())?;
/// tokens.write(TensorData::from([[5, 6], [7, 8]]))?;
/// assert_eq!(tokens.tensor().sum().into_scalar::<i32>(), 26);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
#[derive(Clone, Debug)]
pub struct StaticInput<const D: usize, K: StaticInputKind = Float> {
    /// One-dimensional, because a device may pad rows.
    flat: Rc<RefCell<Tensor<1, K>>>,
    shape: [usize; D],
}

impl<const D: usize, K: StaticInputKind> StaticInput<D, K> {
    /// Copies the data to the device, in its dtype.
    ///
    /// # Errors
    /// [`OpError`] if the data has another rank or kind, if the device is not served, or if this thread records.
    pub fn new(data: TensorData, device: &Device) -> Result<Self, OpError> {
        served(device)?;
        recording::ensure_not_capturing("an input of a recording")?;
        let rank = data.shape().num_dims();
        OpError::expect_same("data's rank", D, "that of the type", rank)?;
        check_kind::<K>(&data)?;
        let shape = data.shape().dims();
        let (dtype, elements) = (data.dtype(), data.num_elements());
        let flat = Tensor::from_data(flat(data, elements), (device, dtype));
        Ok(Self {
            flat: Rc::new(RefCell::new(flat)),
            shape,
        })
    }

    /// Returns the tensor. On devices that record, it has the values of the last write before each use.
    pub fn tensor(&self) -> Tensor<D, K> {
        self.flat.borrow().clone().reshape(self.shape)
    }

    /// Returns the dimensions.
    pub fn dims(&self) -> [usize; D] {
        self.shape
    }

    /// Overwrites the elements, after all work that this thread has enqueued.
    ///
    /// # Errors
    /// [`OpError`] if the data has another shape or dtype, or if this thread records: a replay would write the same data again.
    pub fn write(&self, data: TensorData) -> Result<(), OpError> {
        recording::ensure_not_capturing("an input of a recording")?;
        let shape = self.shape.to_vec();
        OpError::expect_same("data's shape", shape, "the tensor's", data.shape().to_vec())?;
        check_kind::<K>(&data)?;
        let mut held = self.flat.borrow_mut();
        OpError::expect_same("data's dtype", held.dtype(), "the tensor's", data.dtype())?;
        let elements = data.num_elements();
        // Fusion orders operations by data dependencies, and readers of the old elements do not depend on the write, so they are flushed first.
        let device = held.device().without_autodiff();
        Dispatch::flush(device.as_dispatch()).map_err(OpError::read)?;
        *held = K::overwritten(held.clone(), flat(data, elements));
        Ok(())
    }
}

fn check_kind<K: StaticInputKind>(data: &TensorData) -> Result<(), OpError> {
    blocksparse::ensure! { OpError; K::is(data.dtype()) => "data's dtype", K::NAME, format!("{:?}", data.dtype()); }
    Ok(())
}

fn flat(data: TensorData, elements: usize) -> TensorData {
    let (bytes, _, dtype) = data.into_parts();
    TensorData::from_bytes(bytes, [elements], dtype)
}
