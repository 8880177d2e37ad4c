//! Sampling.

use burn_paged_attention::sampling::{SampleOptions, sample_tokens};
use rstest::rstest;

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(sampling);

#[rstest]
#[case([2, 0], 2, [2, 0], SampleOptions::default(), "logits must be at least 1 and less than 2^24 columns, got 0")]
#[case([2, 5], 3, [2, 5], SampleOptions::default(), "draws' length must be 2, logits' rows, got 3")]
#[case([2, 5], 2, [5, 2], SampleOptions::default(), "seen's shape must be [2, 5], logits', got [5, 2]")]
#[case([2, 5], 2, [2, 5], SampleOptions::default().top_p(0.0), "top_p must be above 0 and at most 1, got 0")]
#[case([2, 5], 2, [2, 5], SampleOptions::default().temperature(-1.0), "temperature must be a number, at least 0, got -1")]
fn what_does_not_fit_is_refused(
    #[case] logits: [usize; 2],
    #[case] draws: usize,
    #[case] seen: [usize; 2],
    #[case] options: SampleOptions,
    #[case] message: &str,
) {
    for device in devices() {
        let seen = Tensor::<2, Int>::zeros(seen, &device);
        let (logits, draws) = (
            Tensor::zeros(logits, &device),
            Tensor::zeros([draws], &device),
        );
        refused! { sample_tokens(logits, draws, Some(seen), &options) => message; }
    }
}
