//! Rotary position embedding.

use burn::tensor::FloatDType;
use burn_fused_ops::{RopePositions, rope, rope_pair};
use rstest::rstest;

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(rope);

#[rstest]
#[case([9, 6, 2], Some(0), 0, "table's shape must be [context, 4, 2], of x's even width, got [9, 6, 2]")]
#[case([9, 4, 2], Some(5), 0, "positions must be below 9, the table's rows, got 9")]
#[case([9, 4, 2], Some(usize::MAX), 0, "positions must be below 9, the table's rows, got 18446744073709551614")]
#[case([9, 4, 2], None, 9, "positions must be one for each of 2 · 5 rows, got 9")]
fn errors(
    #[case] table: [usize; 3],
    #[case] first: Option<usize>,
    #[case] places: usize,
    #[case] message: &str,
) {
    for device in devices() {
        let x = Tensor::<4>::zeros([2, 3, 5, 4], (&device, DType::F32));
        let table = Tensor::<3>::zeros(table, (&device, DType::F32));
        let positions = match first {
            Some(first) => RopePositions::From(first),
            None => RopePositions::Of(Box::new(Tensor::zeros([places], &device))),
        };
        refused! { rope(x, table, positions, FloatDType::F32, false) => message; }
    }
}

#[rstest]
#[case([2, 1, 4, 4], DType::F32, "key's shape must be [2, 1, 5, 4], as the queries', got [2, 1, 4, 4]")]
#[case([2, 1, 5, 4], DType::F64, "key's dtype must be F32, the queries', got F64")]
fn errors_of_pairs(#[case] key: [usize; 4], #[case] dtype: DType, #[case] message: &str) {
    for device in devices() {
        if !device.supports_dtype(dtype) {
            continue;
        }
        let query = Tensor::<4>::zeros([2, 3, 5, 4], (&device, DType::F32));
        let key = Tensor::<4>::zeros(key, (&device, dtype));
        let table = Tensor::<3>::zeros([9, 4, 2], (&device, DType::F32));
        let positions = RopePositions::From(0);
        refused! { rope_pair(query, key, table, positions, FloatDType::F32, false) => message; }
    }
}
