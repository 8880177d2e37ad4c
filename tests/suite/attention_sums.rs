//! Weights summed over columns and diagonals.

use burn_blocksparse::{AccumulatedAttentionOptions, accumulated_attention};
use rstest::rstest;

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(attention_sums);

#[rstest]
#[case([1, 4, 31], DType::F32, 0..32, "lse's shape must be [1, 4, 32], q's rows, got [1, 4, 31]")]
#[case([1, 4, 32], DType::F64, 0..32, "lse's dtype must be F32, that of q's sums, got F64")]
#[case([1, 4, 32], DType::F32, 8..33, "options.queries must be a range within 0..32 that is not empty, got 8..33")]
#[case([1, 4, 32], DType::F32, 8..8, "options.queries must be a range within 0..32 that is not empty, got 8..8")]
fn errors(
    #[case] lse: [usize; 3],
    #[case] dtype: DType,
    #[case] queries: std::ops::Range<usize>,
    #[case] message: &str,
) {
    let layout = Pattern::causal().layout(4, 32, 8).unwrap();
    for device in devices() {
        if !supports(&device, dtype) {
            continue;
        }
        let q = Tensor::<4>::zeros([1, 4, 32, 8], (&device, DType::F32));
        let lse = Tensor::<3>::zeros(lse, (&device, dtype));
        let options = AccumulatedAttentionOptions::default().queries(queries.clone());
        refused! { accumulated_attention(q.clone(), q, lse, &layout, options) => message; }
    }
}
