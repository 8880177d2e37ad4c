//! Tokens sorted by bucket, those of a bucket by position.

use burn::tensor::{Int, Tensor};
use burn_sparse_select::internal::counting_argsort;

use super::counts::Counts;
use super::ones;
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
            None => Self::by_counting(buckets, count),
        })
    }

    /// In Burn's operations, which count in `count · length` numbers a group.
    fn by_counting(buckets: Tensor<2, Int>, count: usize) -> Self {
        let [groups, length] = buckets.dims();
        let device = buckets.device();
        let dims = [groups, count, length];
        let numbers = arange(count, &device);
        let all = numbers.clone().reshape([1, count, 1]).expand(dims);
        let of_tokens = buckets.clone().reshape([groups, 1, length]);
        let counts = Counts::new(ones(of_tokens.clone().expand(dims).equal(all)));
        let ranks = counts.up_to_each().gather(1, of_tokens) - 1;
        let totals = counts.totals();
        let ends = totals.clone().cumsum(1);
        let starts = ends.clone() - totals;
        let places = starts.clone().gather(1, buckets) + ranks.reshape([groups, length]);
        // As many buckets end at a place, or before it.
        let dims = [groups, length, count];
        let at = arange(length, &device).reshape([1, length]);
        let at = at.expand([groups, length]);
        let ends = ends.reshape([groups, 1, count]).expand(dims);
        let ended = ends.lower_equal(at.clone().reshape([groups, length, 1]).expand(dims));
        let bucket = ones(ended).sum_dim(2).reshape([groups, length]);
        let rank = at - starts.gather(1, bucket.clone());
        let tokens = counts.member(bucket, rank);
        Self { tokens, places }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, TensorData};

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
