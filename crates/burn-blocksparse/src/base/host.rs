//! Elements of tensors on the host, which for CPUs is where they are.

use std::fmt::Debug;

use burn::backend::Backend;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{Element, TensorData, try_read_sync};

/// The elements of a tensor, on a device that can be waited for.
pub fn floats<B: Backend, E: Element>(x: FloatTensor<B>) -> Vec<E> {
    read(B::float_into_data(x)).iter().collect()
}

/// The same of integers.
pub fn ints<B: Backend, E: Element>(x: IntTensor<B>) -> Vec<E> {
    read(B::int_into_data(x)).iter().collect()
}

fn read<E: Debug>(data: impl Future<Output = Result<TensorData, E>>) -> TensorData {
    let data = try_read_sync(data).expect("a device that can be waited for");
    data.expect("a tensor that can be read")
}
