//! Conversions between positions and blocks.

use crate::base::prelude::*;
use crate::upload::indices;

/// Converts `[batch, heads, seq, dim]` to `[tiles, b · dim]` for blocks of `b`, with the ragged end padded with zeros.
pub(crate) fn tile<B: Backend>(x: Array<B>, b: usize) -> Array<B> {
    let [batch, heads, seq, dim] = x.dims();
    let padded = seq.next_multiple_of(b);
    let x = pad(x, 2, padded);
    x.reshape([batch * heads * (padded / b), b * dim])
}

/// Pads a dimension with zeros at the end, to `length`.
pub(crate) fn pad<B: Backend>(x: Array<B>, dim: usize, length: usize) -> Array<B> {
    let mut shape = x.shape();
    if shape[dim] == length {
        return x;
    }
    shape[dim] = length - shape[dim];
    let padding = Array::zeros(shape, &x.0.device(), x.dtype());
    Array::cat([x, padding], dim)
}

/// Inverts [`tile`].
pub(crate) fn untile<B: Backend>(
    x: Array<B>,
    [batch, heads, seq]: [usize; 3],
    b: usize,
) -> Array<B> {
    let dim = x.shape()[1] / b;
    let padded = seq.next_multiple_of(b);
    let x = x.reshape([batch, heads, padded, dim]);
    match padded == seq {
        true => x,
        false => x.narrow(2, 0..seq),
    }
}

/// Rows that are computed in another order than they are stored in, and reordered at the end.
pub(crate) struct Scattered<B: Backend> {
    /// The first part is one row for places without a result.
    parts: Vec<Array<B>>,
    made: usize,
    row_of: Vec<i32>,
}

impl<B: Backend> Scattered<B> {
    /// Creates `rows` rows, which equal `none` where nothing is pushed.
    pub fn new(none: Array<B>, rows: usize) -> Self {
        Self {
            parts: vec![none],
            made: 1,
            row_of: vec![0; rows],
        }
    }

    /// Adds the rows of some places.
    pub fn push(&mut self, places: &[i32], rows: Array<B>) {
        for (row, &place) in (self.made..).zip(places) {
            self.row_of[place as usize] = row as i32;
        }
        self.made += places.len();
        self.parts.push(rows);
    }

    pub fn finish(self) -> Array<B> {
        let rows = Array::cat(self.parts, 0);
        let places = indices::<B>(&rows.0.device(), self.row_of);
        rows.select(0, places)
    }
}
