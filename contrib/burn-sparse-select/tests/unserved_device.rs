//! Like the test of this name in `burn-blocksparse`: a device whose backend `burn` has, but whose feature is off here.
#![cfg(not(feature = "flex"))]

use burn::tensor::{Device, Distribution, Tensor};
use burn_blocksparse::layout::TopKOptions;
use burn_sparse_select::{top_k_blocks, top_k_blocks_on_device};

#[test]
fn choices_on_the_device_name_the_feature() {
    let q = Tensor::<4>::random([1, 1, 16, 4], Distribution::Default, &Device::flex());
    let error = top_k_blocks_on_device(q.clone(), q, TopKOptions::new(8, 1)).err();
    let error = error.expect("the device is not served").to_string();
    assert!(error.contains("turn on its feature `flex`"), "{error}");
}

/// Selections made of Burn's operations alone run on every backend of Burn.
#[test]
fn choices_on_the_host_need_no_feature() {
    let q = Tensor::<4>::random([1, 1, 16, 4], Distribution::Default, &Device::flex());
    let layout = top_k_blocks(q.clone(), q, TopKOptions::new(8, 2)).unwrap();
    assert_eq!(layout.seq_q(), 16);
}
