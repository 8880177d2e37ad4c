//! Orders on CubeCL devices.

use blocksparse::kernels::paged;
use blocksparse::kernels::rows::{self, HashedRows, Rounds};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::tensor::CubeTensor;

use super::cube::{empty, launched, typed};
use super::paged::integers;
use crate::ops::{HighestLists, OrderOps, SortedRounds};

impl OrderOps for CubeBackend {
    fn sort_rounds(buckets: CubeTensor, count: usize, room: usize) -> SortedRounds<Self> {
        let [lists, rounds, length] = buckets.meta.shape().dims();
        let buckets = integers(buckets);
        let by_place = || empty(&buckets, [lists, rounds, room], DType::I32);
        let (tokens, choices) = (by_place(), by_place());
        let places = empty(&buckets, [lists, length, rounds], DType::I32);
        launched(rows::sort_rounds(
            &buckets.client,
            Rounds::new([lists, rounds, length], room),
            count,
            &buckets.handle,
            [&tokens.handle, &places.handle, &choices.handle],
        ));
        SortedRounds {
            tokens,
            places,
            choices,
        }
    }

    fn hash_rows(x: CubeTensor, rotations: CubeTensor) -> CubeTensor {
        let [batch, heads, length, dim] = x.meta.shape().dims();
        let [rounds, _, half] = rotations.meta.shape().dims();
        let (x, rotations) = (into_contiguous(x), into_contiguous(rotations));
        let buckets = empty(&x, [batch, heads, rounds, length], DType::I32);
        let of = HashedRows::new([batch * heads, length, dim], [rounds, half]);
        let (rotations, made) = (&rotations.handle, &buckets.handle);
        launched(rows::hash_rows(&x.client, &of, typed(&x), rotations, made));
        buckets
    }

    fn highest_in_rows(numbers: CubeTensor, most: usize) -> HighestLists<Self> {
        let [groups, rows, columns] = numbers.meta.shape().dims();
        let numbers = into_contiguous(cast(numbers, DType::F32));
        let lists = empty(&numbers, [groups, rows, most], DType::I32);
        let places = empty(&numbers, [groups, rows, columns], DType::I32);
        let (given, made) = (&numbers.handle, [&lists.handle, &places.handle]);
        let of = [groups, rows, columns];
        launched(paged::highest_in_rows(
            &numbers.client,
            of,
            most,
            given,
            made,
        ));
        HighestLists {
            columns: lists,
            places,
        }
    }

    fn highest_rows(numbers: CubeTensor) -> CubeTensor {
        let [batch, heads, all, columns] = numbers.meta.shape().dims();
        let numbers = into_contiguous(numbers);
        let found = empty(&numbers, [batch, heads, columns], DType::I32);
        let (given, made) = (typed(&numbers), &found.handle);
        let (of, sizes) = ([batch, heads], [all, columns]);
        launched(rows::highest_rows(&numbers.client, of, sizes, given, made));
        found
    }
}
