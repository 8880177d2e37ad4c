//! Tokens sorted by bucket, those of a bucket by position.

use burn::tensor::{DType, Int, Tensor};
use burn_sparse_select::internal::counting_argsort;

use crate::TransformerError;
use crate::arange::arange;

/// Where tokens are in the order of their buckets. All are i32 tensors on the device, without autodiff.
pub(super) struct Sorted {
    /// The token at each place: `[groups, length]`.
    pub tokens: Tensor<2, Int>,
    /// The place of each token: `[groups, length]`.
    pub places: Tensor<2, Int>,
}

impl Sorted {
    /// Of buckets `[groups, length]`, each below `count`.
    pub fn new(buckets: Tensor<2, Int>, count: usize) -> Result<Self, TransformerError> {
        Ok(match counting_argsort(buckets.clone(), count)? {
            Some([tokens, places]) => Self { tokens, places },
            None => Self::by_sort(buckets),
        })
    }

    fn by_sort(buckets: Tensor<2, Int>) -> Self {
        let tokens = positions_sorted(buckets);
        let places = tokens.clone().argsort(1).cast(DType::I32);
        Self { tokens, places }
    }
}

/// The order of numbers along the last dimension, of equal ones the earlier first, i32: by Burn's sort, which is not known to be stable.
pub(super) fn positions_sorted<const D: usize>(numbers: Tensor<D, Int>) -> Tensor<D, Int> {
    let dims = numbers.dims();
    let length = dims[D - 1];
    let mut last = [1; D];
    last[D - 1] = length;
    let positions = arange(length, &numbers.device()).cast(DType::I64);
    let numbers = numbers.cast(DType::I64) * length as i64;
    let unique = numbers + positions.reshape(last).expand(dims);
    unique.argsort(D - 1).cast(DType::I32)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    #[test]
    fn the_order_is_that_of_a_stable_sort() {
        let device = Device::flex();
        for (groups, length, count) in [(1, 1, 2), (2, 16, 4), (3, 130, 7), (2, 65, 2)] {
            let numbers =
                (0..groups * length).map(|i| ((i * i * 31 + i * 7) % 1009 % count) as i32);
            let buckets: Vec<i32> = numbers.collect();
            let data = TensorData::new(buckets.clone(), [groups, length]);
            let sorted =
                Sorted::new(Tensor::from_data(data, (&device, DType::I32)), count).unwrap();
            let tokens: Vec<i32> = sorted.tokens.into_data().iter().collect();
            let places: Vec<i32> = sorted.places.into_data().iter().collect();
            for group in 0..groups {
                let of = |x: &[i32]| x[group * length..][..length].to_vec();
                let buckets = of(&buckets);
                let mut expected: Vec<i32> = (0..length as i32).collect();
                expected.sort_by_key(|&token| buckets[token as usize]);
                assert_eq!(of(&tokens), expected);
                for (place, &token) in expected.iter().enumerate() {
                    assert_eq!(of(&places)[token as usize], place as i32);
                }
            }
        }
    }
}
