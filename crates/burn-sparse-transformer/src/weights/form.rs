use std::fmt;

use burn::tensor::{Shape, TensorData};

/// Form of a parameter in a file's tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Form {
    /// As it is.
    Same,
    /// With its last two axes exchanged: PyTorch's linear layers are `[outputs, inputs]`, Burn's `[inputs, outputs]`.
    Transposed,
    /// As [`Self::Transposed`], of `heads` heads whose rotary embedding turns channels i and i + width / 2, as in Hugging Face's checkpoints; this library's turns
    /// channels 2i and 2i + 1. A vector of so many heads is not transposed. Scores are the same if queries and keys both lie so.
    RotaryHalves {
        /// Heads along the outputs.
        heads: usize,
    },
    /// Part `index` of `count` equal ones along the last axis.
    Part {
        /// Counted from 0.
        index: usize,
        /// Number of parts.
        count: usize,
    },
    /// After `skipped` rows that are not used.
    Rows {
        /// Rows before the first that is used.
        skipped: usize,
    },
    /// Not at all: the parameter is 0.
    Zeros,
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Same => f.write_str("a tensor"),
            Self::Transposed => f.write_str("a transposed tensor"),
            Self::RotaryHalves { heads } => write!(f, "a tensor of {heads} heads in halves"),
            Self::Part { index, count } => write!(f, "part {index} of {count} of a tensor"),
            Self::Rows { skipped } => write!(f, "a tensor without its first {skipped} rows"),
            Self::Zeros => f.write_str("in no tensor"),
        }
    }
}

impl Form {
    /// The shape in the file of a parameter of `shape`; none if no parameter of this rank has this form.
    pub(super) fn in_file(self, shape: &[usize]) -> Option<Vec<usize>> {
        let mut shape = shape.to_vec();
        let rank = shape.len();
        match self {
            Self::Same | Self::Zeros => {}
            Self::Transposed if rank < 2 => return None,
            Self::Transposed => shape.swap(rank - 2, rank - 1),
            Self::RotaryHalves { heads } => {
                let outputs = *shape.last()?;
                if rank > 2 || heads == 0 || !outputs.is_multiple_of(2 * heads) {
                    return None;
                }
                shape.reverse();
            }
            Self::Part { count, .. } => *shape.last_mut()? *= count,
            Self::Rows { skipped } => *shape.first_mut()? += skipped,
        }
        Some(shape)
    }

    /// Returns whether a parameter can be written in this form.
    pub(super) fn is_reversible(self) -> bool {
        matches!(
            self,
            Self::Same | Self::Transposed | Self::RotaryHalves { .. }
        )
    }

    /// The tensor of a file that a parameter is; of a form that [`Self::is_reversible`].
    pub(super) fn put(self, data: TensorData) -> TensorData {
        match self {
            Self::RotaryHalves { heads } => permuted(transposed(data), heads, |at, half| {
                2 * (at % half) + at / half
            }),
            // It is its own inverse.
            _ => self.take(data),
        }
    }

    /// The parameter in a tensor of a file, of the shape that [`Self::in_file`] says.
    pub(super) fn take(self, data: TensorData) -> TensorData {
        match self {
            Self::Same | Self::Zeros => data,
            Self::Transposed => transposed(data),
            Self::RotaryHalves { heads } => {
                transposed(permuted(data, heads, |at, half| at / 2 + at % 2 * half))
            }
            Self::Part { index, count } => made(data, |bytes, dims, size| {
                let last = dims.len() - 1;
                let part = dims[last] / count * size;
                dims[last] /= count;
                let rows = bytes.chunks_exact((part * count).max(1));
                let taken = rows.flat_map(|row| &row[index * part..(index + 1) * part]);
                taken.copied().collect()
            }),
            Self::Rows { skipped } => made(data, |bytes, dims, size| {
                dims[0] -= skipped;
                bytes[skipped * row(dims, size)..].to_vec()
            }),
        }
    }
}

/// What is made of a tensor's bytes, its axes, which it may change, and an element's size.
fn made(
    data: TensorData,
    make: impl FnOnce(&[u8], &mut Vec<usize>, usize) -> Vec<u8>,
) -> TensorData {
    let (bytes, shape, dtype) = data.into_parts();
    let mut dims: Vec<usize> = shape.iter().copied().collect();
    let bytes = make(&bytes, &mut dims, dtype.size());
    TensorData::from_bytes_vec(bytes, Shape::from(dims), dtype)
}

/// The bytes of all behind the first axis.
fn row(dims: &[usize], size: usize) -> usize {
    dims[1..].iter().product::<usize>() * size
}

/// With the last two axes exchanged; a vector as it is.
fn transposed(data: TensorData) -> TensorData {
    made(data, |bytes, dims, size| {
        let [.., rows, columns] = &mut dims[..] else {
            return bytes.to_vec();
        };
        let mut taken = Vec::with_capacity(bytes.len());
        for matrix in bytes.chunks_exact((*rows * *columns * size).max(1)) {
            for column in 0..*columns {
                for row in 0..*rows {
                    let at = (row * *columns + column) * size;
                    taken.extend_from_slice(&matrix[at..at + size]);
                }
            }
        }
        std::mem::swap(rows, columns);
        taken
    })
}

/// The rows of each head in another order: `from` says which row, with half a head's rows, comes to a place.
fn permuted(data: TensorData, heads: usize, from: impl Fn(usize, usize) -> usize) -> TensorData {
    made(data, |bytes, dims, size| {
        let (row, width) = (row(dims, size), dims[0] / heads);
        let rows = (0..dims[0]).flat_map(|at| {
            let (head, own) = (at / width, at % width);
            let at = (head * width + from(own, width / 2)) * row;
            &bytes[at..at + row]
        });
        rows.copied().collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_taken_out_of_tensors() {
        let data = || TensorData::new((0..12).map(|i| i as f32).collect(), [2, 6]);
        let taken = |form: Form| {
            let data = form.take(data());
            let dims: Vec<usize> = data.shape().iter().copied().collect();
            assert_eq!(form.in_file(&dims), Some(vec![2, 6]), "{form:?}");
            (dims, data.try_to_vec::<f32>().unwrap())
        };
        let (dims, numbers) = taken(Form::Transposed);
        assert_eq!(dims, [6, 2]);
        assert_eq!(numbers[..4], [0.0, 6.0, 1.0, 7.0]);
        let halves = TensorData::new((0..8).map(|i| i as f32).collect(), [8]);
        let form = Form::RotaryHalves { heads: 2 };
        let pairs = form.take(halves.clone());
        let numbers = pairs.clone().try_to_vec::<f32>().unwrap();
        assert_eq!(numbers, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
        form.put(pairs).assert_eq(&halves, true);
        let matrix = TensorData::new((0..24).map(|i| i as f32).collect(), [8, 3]);
        let taken_of = form.take(matrix.clone());
        assert_eq!(form.in_file(&[3, 8]), Some(vec![8, 3]));
        assert_eq!(form.in_file(&[3, 6]), None);
        let numbers = taken_of.clone().try_to_vec::<f32>().unwrap();
        assert_eq!(numbers[..8], [0.0, 6.0, 3.0, 9.0, 12.0, 18.0, 15.0, 21.0]);
        form.put(taken_of).assert_eq(&matrix, true);
        let (dims, numbers) = taken(Form::Part { index: 1, count: 3 });
        assert_eq!((dims, numbers), (vec![2, 2], vec![2.0, 3.0, 8.0, 9.0]));
        let (dims, numbers) = taken(Form::Rows { skipped: 1 });
        assert_eq!(dims, [1, 6]);
        assert_eq!(numbers[0], 6.0);
    }
}
