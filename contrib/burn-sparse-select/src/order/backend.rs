//! Orders on CubeCL devices.

use crate::kernels::rows;
use crate::kernels::rows::hashes::HashedRows;
use crate::kernels::rows::nearest::RowsOfMeans;
use crate::kernels::rows::order::Rounds;
use burn::backend::ops::IntTensorOps;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::tensor::CubeTensor;

use crate::order::ops::{OrderOps, SortedRounds, TopKLists, TopKPerCentroidLists};
use burn_blocksparse::internal::cube::{empty, integers, launched, typed};

impl OrderOps for CubeBackend {
    fn counting_argsort_rounds(
        buckets: CubeTensor,
        count: usize,
        room: usize,
    ) -> SortedRounds<Self> {
        let [lists, rounds, length] = buckets.meta.shape().dims();
        let buckets = integers(buckets);
        let by_place = || empty(&buckets, [lists, rounds, room], DType::I32);
        let (tokens, choices) = (by_place(), by_place());
        let places = empty(&buckets, [lists, length, rounds], DType::I32);
        launched(rows::counting_argsort_rounds(
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

    fn lsh_hash(x: CubeTensor, rotations: CubeTensor) -> CubeTensor {
        let [batch, heads, length, dim] = x.meta.shape().dims();
        let [rounds, _, half] = rotations.meta.shape().dims();
        let (x, rotations) = (into_contiguous(x), into_contiguous(rotations));
        let buckets = empty(&x, [batch, heads, rounds, length], DType::I32);
        let of = HashedRows::new([batch * heads, length, dim], [rounds, half]);
        let (rotations, made) = (&rotations.handle, &buckets.handle);
        launched(rows::lsh_hash(&x.client, &of, typed(&x), rotations, made));
        buckets
    }

    fn lsh_argsort(x: CubeTensor, rotations: CubeTensor, room: usize) -> SortedRounds<Self> {
        let [batch, heads, length, dim] = x.meta.shape().dims();
        let [rounds, _, half] = rotations.meta.shape().dims();
        let of = HashedRows::new([batch * heads, length, dim], [rounds, half]);
        let (x, rotations) = (into_contiguous(x), into_contiguous(rotations));
        if !rows::sorts_hashes(&x.client, &of, typed(&x).1) {
            let buckets = Self::lsh_hash(x, rotations);
            let shape = Shape::new([batch * heads, rounds, length]);
            return Self::counting_argsort_rounds(
                Self::int_reshape(buckets, shape),
                2 * half,
                room,
            );
        }
        let by_place = || empty(&x, [batch * heads, rounds, room], DType::I32);
        let (tokens, choices) = (by_place(), by_place());
        let places = empty(&x, [batch * heads, length, rounds], DType::I32);
        launched(rows::lsh_argsort(
            &x.client,
            &of,
            room,
            typed(&x),
            &rotations.handle,
            [&tokens.handle, &places.handle, &choices.handle],
        ));
        SortedRounds {
            tokens,
            places,
            choices,
        }
    }

    fn topk_rows(numbers: CubeTensor, most: usize) -> TopKLists<Self> {
        let [groups, rows, columns] = numbers.meta.shape().dims();
        let numbers = into_contiguous(cast(numbers, DType::F32));
        let lists = empty(&numbers, [groups, rows, most], DType::I32);
        let places = empty(&numbers, [groups, rows, columns], DType::I32);
        highest(&numbers, [groups, rows, columns], most, [&lists, &places]);
        TopKLists {
            columns: lists,
            places,
        }
    }

    fn topk_per_centroid(
        x: CubeTensor,
        means: CubeTensor,
        most: usize,
    ) -> TopKPerCentroidLists<Self> {
        let x = into_contiguous(x);
        let Compared {
            similarities,
            nearest,
        } = compared(&x, means);
        let [batch, heads, count, length] = similarities.meta.shape().dims();
        let lists = empty(&x, [batch, heads, count, most], DType::I32);
        let places = empty(&x, [batch, heads, count, length], DType::I32);
        let of = [batch * heads, count, length];
        highest(&similarities, of, most, [&lists, &places]);
        TopKPerCentroidLists {
            rows: lists,
            places,
            nearest,
        }
    }

    fn argmax_rows(numbers: CubeTensor) -> CubeTensor {
        let [batch, heads, all, columns] = numbers.meta.shape().dims();
        let numbers = into_contiguous(numbers);
        let found = empty(&numbers, [batch, heads, columns], DType::I32);
        let (given, made) = (typed(&numbers), &found.handle);
        let (of, sizes) = ([batch, heads], [all, columns]);
        launched(rows::argmax_rows(&numbers.client, of, sizes, given, made));
        found
    }
}

/// What [`compared`] gives.
pub(crate) struct Compared {
    /// Of each mean and row, f32: `[batch, heads, means, length]`.
    pub similarities: CubeTensor,
    /// The nearest mean of each row: `[batch, heads, length]`.
    pub nearest: CubeTensor,
}

/// How similar contiguous rows `[batch, heads, length, width]` are to the means of their heads.
pub(crate) fn compared(x: &CubeTensor, means: CubeTensor) -> Compared {
    let [batch, heads, length, width] = x.meta.shape().dims();
    let [_, count, _] = means.meta.shape().dims();
    let means = into_contiguous(cast(means, DType::F32));
    let similarities = empty(x, [batch, heads, count, length], DType::F32);
    let nearest = empty(x, [batch, heads, length], DType::I32);
    launched(rows::compare_with_means(
        &x.client,
        &RowsOfMeans::new([batch, heads, length, width], count),
        typed(x),
        &means.handle,
        [&similarities.handle, &nearest.handle],
    ));
    Compared {
        similarities,
        nearest,
    }
}

/// The `most` highest of each row of `[groups, rows, columns]`, in f32: by cubes that hold rows, or by those that read longer ones again.
fn highest(numbers: &CubeTensor, of: [usize; 3], most: usize, made: [&CubeTensor; 2]) {
    let (client, given) = (&numbers.client, &numbers.handle);
    let made = made.map(|made| &made.handle);
    let [.., columns] = of;
    launched(match rows::holds_rows(client, columns) {
        true => rows::highest_of_rows(client, of, most, given, made),
        false => rows::topk_rows(client, of, most, given, made),
    });
}
