//! Orders on CubeCL devices.

use blocksparse::kernels::rows;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use super::cube::{empty, launched};
use super::paged::integers;
use crate::ops::OrderOps;

impl OrderOps for CubeBackend {
    fn sort_buckets(buckets: CubeTensor, count: usize) -> CubeTensor {
        let [groups, length] = buckets.meta.shape().dims();
        let buckets = integers(buckets);
        let order = empty(&buckets, [2, groups, length], DType::I32);
        launched(rows::sort_buckets(
            &buckets.client,
            [groups, length],
            count,
            &buckets.handle,
            &order.handle,
        ));
        order
    }

    fn places_in_lists(lists: CubeTensor, length: usize) -> CubeTensor {
        let [groups, count, width] = lists.meta.shape().dims();
        let lists = integers(lists);
        let places = empty(&lists, [groups, length, count], DType::I32);
        launched(rows::places_in_lists(
            &lists.client,
            [groups, count, width],
            length,
            &lists.handle,
            &places.handle,
        ));
        places
    }
}
