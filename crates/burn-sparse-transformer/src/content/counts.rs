//! Ranks of the members of lists, and members by their rank.

use burn::tensor::{DType, Int, Tensor};

use super::ones;
use crate::arange::arange;

/// Places of a part that ranks are counted in: Burn's running sums on GPUs read all that comes before, for every number.
const PART: usize = 64;

/// How many members each list has up to every place.
pub(super) struct Counts {
    /// Inclusive: `[groups, lists, parts, PART]`, i32. Places beyond the length have no members.
    counts: Tensor<4, Int>,
    length: usize,
}

impl Counts {
    /// Of lists of 1 where there is a member, and 0: `[groups, lists, length]`, i32.
    pub fn new(members: Tensor<3, Int>) -> Self {
        let [groups, lists, length] = members.dims();
        let device = members.device();
        let parts = length.div_ceil(PART);
        let members = match parts * PART - length {
            0 => members,
            missing => {
                let zeros = Tensor::zeros([groups, lists, missing], (&device, DType::I32));
                Tensor::cat(vec![members, zeros], 2)
            }
        };
        let members = members.reshape([groups, lists, parts, PART]);
        let sums = members.clone().sum_dim(3);
        let before = sums.clone().cumsum(2) - sums;
        let counts = members.cumsum(3) + before;
        Self { counts, length }
    }

    /// Members up to every place, itself included: `[groups, lists, length]`.
    pub fn up_to_each(&self) -> Tensor<3, Int> {
        let [groups, lists, parts, _] = self.counts.dims();
        let counts = self.counts.clone().reshape([groups, lists, parts * PART]);
        counts.slice_dim(2, 0..self.length)
    }

    /// Members of each list: `[groups, lists]`.
    pub fn totals(&self) -> Tensor<2, Int> {
        let [groups, lists, parts, _] = self.counts.dims();
        let last = self.counts.clone().slice_dim(2, parts - 1..parts);
        last.slice_dim(3, PART - 1..PART).reshape([groups, lists])
    }

    /// The place of the member of rank `rank`, counted from 0, of list `list`, each `[groups, asked]`. What a list does not have is at some place.
    pub fn member(&self, list: Tensor<2, Int>, rank: Tensor<2, Int>) -> Tensor<2, Int> {
        let [groups, lists, parts, _] = self.counts.dims();
        let [_, asked] = list.dims();
        let all = groups * asked;
        let first = arange(groups, &list.device()).mul_scalar(lists as i32);
        let first = first.reshape([groups, 1]).expand([groups, asked]);
        let list = (list + first).reshape([all]);
        let rank = rank.reshape([all, 1]);
        // As many parts, and then as many places of a part, end before the member.
        let ends = self.counts.clone().slice_dim(3, PART - 1..PART);
        let ends = ends
            .reshape([groups * lists, parts])
            .select(0, list.clone());
        let before = ends.lower_equal(rank.clone().expand([all, parts]));
        let part = ones(before).sum_dim(1).reshape([all]);
        let part = part.clamp_max(parts as i32 - 1);
        let counts = (self.counts.clone()).reshape([groups * lists * parts, PART]);
        let within = counts.select(0, list.mul_scalar(parts as i32) + part.clone());
        let before = ones(within.lower_equal(rank.expand([all, PART]))).sum_dim(1);
        let place = part.mul_scalar(PART as i32) + before.reshape([all]);
        place
            .clamp_max(self.length as i32 - 1)
            .reshape([groups, asked])
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    #[test]
    fn ranks_and_members_are_those_of_lists() {
        for length in [1, 5, 64, 65, 200] {
            let [groups, lists] = [2, 3];
            let is_member = |group: usize, list: usize, at: usize| {
                (at * at + 5 * at + 3 * list + 7 * group).is_multiple_of(list + 2)
            };
            let mut numbers = Vec::new();
            let (mut asked, mut expected) = ([Vec::new(), Vec::new()], Vec::new());
            for group in 0..groups {
                for list in 0..lists {
                    let of_list = (0..length).filter(|&at| is_member(group, list, at));
                    for (rank, at) in of_list.enumerate() {
                        numbers.push((group, list, at));
                        asked[0].push(list as i32);
                        asked[1].push(rank as i32);
                        expected.push((group, at as i32));
                    }
                }
            }
            let mut members = vec![0; groups * lists * length];
            for (group, list, at) in numbers {
                members[(group * lists + list) * length + at] = 1;
            }
            let device = Device::flex();
            let data = TensorData::new(members.clone(), [groups, lists, length]);
            let counts = Counts::new(Tensor::from_data(data, (&device, DType::I32)));
            let up_to: Vec<i32> = counts.up_to_each().into_data().iter().collect();
            let totals: Vec<i32> = counts.totals().into_data().iter().collect();
            for (list, row) in members.chunks(length).enumerate() {
                let mut sum = 0;
                for (at, member) in row.iter().enumerate() {
                    sum += member;
                    assert_eq!(up_to[list * length + at], sum, "{length}");
                }
                assert_eq!(totals[list], sum);
            }
            // Every group is asked for all, and has to be right about its own.
            let count = expected.len();
            let ask = |numbers: &[i32]| {
                let data = TensorData::new(numbers.repeat(groups), [groups, count]);
                Tensor::<2, Int>::from_data(data, (&device, DType::I32))
            };
            let found = counts.member(ask(&asked[0]), ask(&asked[1]));
            let found: Vec<i32> = found.into_data().iter().collect();
            for (at, (group, place)) in expected.into_iter().enumerate() {
                assert_eq!(found[group * count + at], place, "{length}");
            }
        }
    }
}
