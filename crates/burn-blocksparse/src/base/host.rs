//! Reads elements of tensors on the host. On CPU backends this is where they are.

use std::fmt::Debug;

use burn::backend::Backend;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{Element, TensorData, try_read_sync};

/// Returns the elements of a float tensor. The device must support blocking reads.
pub fn floats<B: Backend, E: Element>(x: FloatTensor<B>) -> Vec<E> {
    read(B::float_into_data(x)).iter().collect()
}

/// Returns the elements of an integer tensor. The device must support blocking reads.
pub fn ints<B: Backend, E: Element>(x: IntTensor<B>) -> Vec<E> {
    read(B::int_into_data(x)).iter().collect()
}

fn read<E: Debug>(data: impl Future<Output = Result<TensorData, E>>) -> TensorData {
    let data = try_read_sync(data).expect("a device that can be waited for");
    data.expect("a tensor that can be read")
}
