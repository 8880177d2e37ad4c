use std::fmt;

use burn::tensor::{Shape, TensorData};

/// Form of a parameter in a tensor of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Form {
    /// Unchanged.
    Same,
    /// Last two axes swapped: PyTorch's linear layers are `[outputs, inputs]`, Burn's `[inputs, outputs]`.
    Transposed,
    /// Like [`Self::Transposed`], for `heads` heads whose rotary embedding rotates channels i and i + width / 2, as in Hugging Face's checkpoints; this
    /// library rotates channels 2i and 2i + 1. A vector of heads is permuted but not transposed. Scores are unchanged if both queries and keys have this
    /// form.
    RotaryHalves {
        /// Number of heads along the outputs.
        heads: usize,
    },
    /// Part `index` of `count` equal parts along the last axis.
    Part {
        /// Index of the part, counted from 0.
        index: usize,
        /// Number of parts.
        count: usize,
    },
    /// Rows after the first `skipped` ones.
    Rows {
        /// Number of unused rows at the beginning.
        skipped: usize,
    },
    /// Not in the file: the parameter is 0.
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
    /// Returns the shape in the file of a parameter of `shape`; `None` if a parameter of this rank cannot have this form.
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

    /// Returns whether a parameter can be saved in this form.
    pub(super) fn is_reversible(self) -> bool {
        matches!(
            self,
            Self::Same | Self::Transposed | Self::RotaryHalves { .. }
        )
    }

    /// Converts a parameter to its tensor of a file, for a form that [`Self::is_reversible`].
    pub(super) fn put(self, data: TensorData) -> TensorData {
        match self {
            Self::RotaryHalves { heads } => permuted(transposed(data), heads, |at, half| {
                2 * (at % half) + at / half
            }),
            // These forms are their own inverses.
            _ => self.take(data),
        }
    }

    /// Extracts a parameter from a tensor of a file with the shape that [`Self::in_file`] returns.
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

/// Rebuilds a tensor from its bytes, its axes, which `make` may change, and the size of an element.
fn made(
    data: TensorData,
    make: impl FnOnce(&[u8], &mut Vec<usize>, usize) -> Vec<u8>,
) -> TensorData {
    let (bytes, shape, dtype) = data.into_parts();
    let mut dims: Vec<usize> = shape.iter().copied().collect();
    let bytes = make(&bytes, &mut dims, dtype.size());
    TensorData::from_bytes_vec(bytes, Shape::from(dims), dtype)
}

/// Returns the bytes of one entry of the first axis.
fn row(dims: &[usize], size: usize) -> usize {
    dims[1..].iter().product::<usize>() * size
}

/// Swaps the last two axes; leaves a vector unchanged.
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

/// Permutes the rows of each head: `from` returns the source of a row, given half a head's number of rows.
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
