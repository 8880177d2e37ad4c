//! Positions in blocks.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, Slice};

/// `[batch, heads, seq, dim]` to `[tiles, b · dim]` for blocks of `b`, the ragged end padded with zeros.
pub(crate) fn tile<B: Backend>(x: FloatTensor<B>, b: usize) -> FloatTensor<B> {
    let [batch, heads, seq, dim] = x.shape().dims::<4>();
    let padded = seq.next_multiple_of(b);
    let x = pad::<B>(x, 2, padded);
    B::float_reshape(x, Shape::new([batch * heads * (padded / b), b * dim]))
}

/// Zeros at the end of a dimension, so that it has `length`.
pub(crate) fn pad<B: Backend>(x: FloatTensor<B>, dim: usize, length: usize) -> FloatTensor<B> {
    let mut shape = x.shape();
    if shape[dim] == length {
        return x;
    }
    shape[dim] = length - shape[dim];
    let padding = B::float_zeros(shape, &x.device(), x.dtype().into());
    B::float_cat(vec![x, padding], dim)
}

/// The inverse of [`tile`].
pub(crate) fn untile<B: Backend>(
    x: FloatTensor<B>,
    [batch, heads, seq]: [usize; 3],
    b: usize,
) -> FloatTensor<B> {
    let dim = x.shape()[1] / b;
    let padded = seq.next_multiple_of(b);
    let x = B::float_reshape(x, Shape::new([batch, heads, padded, dim]));
    match padded == seq {
        true => x,
        false => {
            let rows = Slice::from(0..seq);
            B::float_slice(x, &[Slice::full(), Slice::full(), rows, Slice::full()])
        }
    }
}
