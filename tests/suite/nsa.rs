//! Native sparse attention.

use burn_sparse_select::Always;
use burn_sparse_select::nsa::{Nsa, NsaKeysValues, NsaOptions};

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(nsa);

#[test]
fn options_of_none() {
    let plain = NsaOptions::default;
    refused! {
        Nsa::new(plain().stride(0)) => "stride must be at least 1, got 0";
        Nsa::new(plain().stride(12)) => "block must be a multiple of stride, which is 12, got 32";
        Nsa::new(plain().block(48).stride(24)) => "selected_block must be a multiple of stride, which is 24, got 64";
        Nsa::new(plain().block(0)) => "block must be a multiple of stride, which is 16, got 0";
        Nsa::new(plain().selected_block(48)) => "selected_block must be 8, 16, 32, 64, 128 or a larger multiple of 128, got 48";
        Nsa::new(plain().keep(2)) => "keep must be at least 3, the forced blocks, got 2";
        Nsa::new(plain().forced(Always { first: 1, local: 0 })) => "forced.local must be at least 1, the query's own block, got 0";
        Nsa::new(plain().scale(f64::NAN)) => "scale must be finite, got NaN";
    }
}

#[test]
fn shapes_of_none() {
    let options = NsaOptions::default()
        .block(8)
        .stride(4)
        .selected_block(8)
        .keep(4)
        .window(8);
    let nsa = Nsa::new(options).unwrap();
    for device in devices() {
        let zeros = |shape: [usize; 4]| zeros(shape, &device);
        let (q, k, v) = (
            zeros([1, 4, 30, 8]),
            zeros([1, 2, 30, 8]),
            zeros([1, 2, 30, 4]),
        );
        let shared = NsaKeysValues::shared(k.clone(), v.clone());
        let whole = shared.clone().compressed_by_means(&nsa).unwrap();
        let gates = zeros([1, 4, 30, 3]);
        let message = |q: &Tensor<4>, keys_values: &NsaKeysValues, gates: &Tensor<4>| {
            let run = nsa.attention(q.clone(), keys_values.clone(), gates.clone());
            let error: OpError = run.unwrap_err();
            error.to_string()
        };
        assert_eq!(
            message(&q, &shared, &gates),
            "compressed keys must be 6, the blocks of so many keys that are compressed, got 0"
        );
        let expected = "gates' shape must be [1, 4, 30, 3], q's rows and 3, got [1, 4, 30, 2]";
        assert_eq!(message(&q, &whole, &zeros([1, 4, 30, 2])), expected);
        let expected = "k's kv_heads must be a divisor of the 3 heads of q, got 2";
        assert_eq!(message(&zeros([1, 3, 30, 8]), &whole, &gates), expected);
        let expected = "seq_q must be between 1 and seq_kv, which is 30, got 31";
        assert_eq!(message(&zeros([1, 4, 31, 8]), &whole, &gates), expected);
        let other = NsaKeysValues {
            window: [zeros([1, 2, 29, 8]), zeros([1, 2, 29, 4])],
            ..whole.clone()
        };
        let expected = "window's keys must be 30, the selected ones, got 29";
        assert_eq!(message(&q, &other, &gates), expected);
        let other = NsaKeysValues {
            window: [k.clone(), k.clone()],
            ..whole.clone()
        };
        let expected = "value_dim of a branch must be 4, the selected one's, got 8";
        assert_eq!(message(&q, &other, &gates), expected);
        refused! { nsa.means(zeros([1, 2, 0, 8])) => "x must be of one number at least, got [1, 2, 0, 8]"; }
    }
}
