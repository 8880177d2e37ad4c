//! Dropout of a tensor.

use burn_fused_ops::{ElementDropout, dropout};

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(stream_dropout);

#[test]
fn errors() {
    for device in devices() {
        for probability in [1.0, -0.5, f64::NAN] {
            let x = Tensor::<2>::ones([2, 3], &device);
            let error = dropout(x, &ElementDropout::new(probability, 0, 0)).unwrap_err();
            let message = format!(
                "dropout's probability must be at least 0 and less than 1, got {probability}"
            );
            assert_eq!(error.to_string(), message);
        }
    }
}
