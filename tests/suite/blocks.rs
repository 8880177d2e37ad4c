//! The operators on block-sparse tensors against dense f64 arithmetic, and their errors.

use burn_blocksparse::BlockSparseTensor;

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(blocks);

fn layout() -> BlockLayout {
    Pattern::causal().layout(4, 30, 8).unwrap()
}

/// Returns weights with ten blocks per head.
fn weights(device: &Device) -> BlockSparseTensor {
    BlockSparseTensor::from_values(zeros([2, 40, 8, 8], device), &layout()).unwrap()
}

#[test]
fn factors() {
    for device in &devices() {
        let x = |shape| zeros(shape, device);
        let nt = |a, b| BlockSparseTensor::nt(x(a), x(b), &layout());
        let nn = |b| weights(device).nn(x(b));
        let tn = |a| weights(device).tn(x(a));
        refused! {
            nt([0, 4, 30, 3], [0, 4, 30, 3]) => "a's batch must be at least 1, got 0";
            nt([1, 3, 30, 3], [1, 4, 30, 3]) => "a's heads must be 4, the layout's, got 3";
            nt([1, 4, 32, 3], [1, 4, 30, 3]) => "a's seq_q must be 30, the layout's, got 32";
            nt([1, 4, 30, 0], [1, 4, 30, 0]) => "a's dim must be at least 1, got 0";
            nt([1, 4, 30, 3], [2, 4, 30, 3]) => "b's batch must be 1, a's, got 2";
            nt([1, 4, 30, 3], [1, 3, 30, 3]) => "b's kv_heads must be a divisor of the 4 heads of the layout, got 3";
            nt([1, 4, 30, 3], [1, 0, 30, 3]) => "b's kv_heads must be a divisor of the 4 heads of the layout, got 0";
            nt([1, 4, 30, 3], [1, 4, 31, 3]) => "b's seq_kv must be 30, the layout's, got 31";
            nt([1, 4, 30, 3], [1, 4, 30, 4]) => "b's dim must be 3, a's, got 4";
            nn([1, 4, 30, 3]) => "b's batch must be 2, the values', got 1";
            nn([2, 3, 30, 3]) => "b's kv_heads must be a divisor of the 4 heads of the layout, got 3";
            nn([2, 4, 32, 3]) => "b's seq_kv must be 30, the layout's, got 32";
            tn([1, 4, 30, 3]) => "a's batch must be 2, the values', got 1";
            tn([2, 2, 30, 3]) => "a's heads must be 4, the layout's, got 2";
            tn([2, 4, 32, 3]) => "a's seq_q must be 30, the layout's, got 32";
        }
    }
}

#[test]
fn values_and_scales() {
    for device in devices() {
        let values = zeros([2, 39, 8, 8], &device);
        refused! { BlockSparseTensor::from_values(values, &layout()) => "values' shape must be [2, 40, 8, 8], the layout's, got [2, 39, 8, 8]"; }
        let stacked = BlockLayout::stack_batch(&[layout(), layout(), layout()]).unwrap();
        let values = zeros([2, 40, 8, 8], &device);
        refused! {
            BlockSparseTensor::from_values(values, &stacked) => "values' batch must be 3, the layout's, got 2";
            weights(&device).softmax(f64::INFINITY) => "scale must be finite, got inf";
        }
        let sliced = weights(&device).map(|values| values.narrow(0, 0, 1));
        refused! { sliced => "the function's shape must be [2, 40, 8, 8], its input's, got [1, 40, 8, 8]"; }
    }
}

#[test]
fn dtypes() {
    for device in devices() {
        if !supports(&device, DType::F64) {
            continue;
        }
        let b = zeros([2, 4, 30, 3], &device).cast(DType::F64);
        refused! { weights(&device).nn(b.clone()) => "b's dtype must be one that is summed in F32, the values', got F64"; }
        let a = zeros([2, 4, 30, 3], &device);
        refused! { BlockSparseTensor::nt(a, b, &layout()) => "b's dtype must be F32, a's, got F64"; }
    }
}

#[test]
fn different_devices() {
    let Some([device, other]) = two_devices() else {
        return;
    };
    let a = zeros([2, 4, 30, 3], &other);
    refused! {
        weights(&device).tn(a) => "a's device must be…";
        weights(&device).map(|values| values.to_device(&other)) => "the function's device must be…";
    }
}
