//! A device whose backend `burn` has, but whose feature is off in this crate, gives an error instead of a panic.
//! `cargo test -p burn-blocksparse --no-default-features --features autodiff --test unserved_device` builds `burn` with Flex and this crate without;
//! in other builds both have it, and there is nothing to test.
#![cfg(not(feature = "flex"))]

#[macro_use]
#[path = "../../blocksparse/tests/all/refused.rs"]
mod refused;

use burn::tensor::{Bool, Device, Distribution, Int, Tensor};
use burn_blocksparse::layout::{DeviceLayoutOptions, TopKOptions};
use burn_blocksparse::{
    AccumulatedAttentionOptions, AttentionOptions, AttentionTensors, BlockLayout,
    BlockSparseTensor, DeviceLayout, LayoutShape, Pattern, SparseAttentionCall,
    accumulated_attention, check_device, merge_attention,
};

const MESSAGE: &str = "the device's backend must be one that a feature of burn-blocksparse turns on, got Flex(Cpu): turn on its feature `flex`, \
                       besides `burn`'s";

fn layout() -> BlockLayout {
    Pattern::local(8).layout(1, 16, 8).unwrap()
}

fn random(device: &Device) -> Tensor<4> {
    Tensor::random([1, 1, 16, 4], Distribution::Default, device)
}

#[test]
fn attention_names_the_feature() {
    let layout = layout();
    for device in devices() {
        let q = random(&device);
        let call = || SparseAttentionCall::new(q.clone(), q.clone(), q.clone(), &layout);
        let plain = || call().options(AttentionOptions::default());
        let tensors = || plain().tensors(AttentionTensors::default());
        let lse = Tensor::zeros([1, 1, 16], &device);
        let options = AccumulatedAttentionOptions::default();
        refused! {
            plain().run() => MESSAGE;
            plain().run_with_lse() => MESSAGE;
            plain().weights().run() => MESSAGE;
            tensors().run_with_lse() => MESSAGE;
            tensors().lse().weights().run() => MESSAGE;
            plain().explain() => MESSAGE;
            check_device(&device) => MESSAGE;
            accumulated_attention(q.clone(), q.clone(), lse, &layout, options) => MESSAGE;
        }
    }
}

#[test]
fn operators_name_the_feature() {
    let layout = layout();
    for device in devices() {
        let a = random(&device);
        let values = Tensor::zeros([1, 2, 8, 8], &device);
        refused! {
            BlockSparseTensor::nt(a.clone(), a, &layout) => MESSAGE;
            BlockSparseTensor::from_values(values, &layout) => MESSAGE;
        }
    }
}

#[test]
fn layouts_of_tensors_name_the_feature() {
    let shape = LayoutShape::square(1, 16, 8);
    // Without autodiff, as required for the tensors of a layout.
    let device = &Device::flex();
    let options = DeviceLayoutOptions::new(shape);
    let mask = Tensor::<4, Bool>::from_data([[[[true, false], [true, true]]]], device);
    let indices = Tensor::<4, Int>::from_data([[[[0, 0], [0, 1]]]], device);
    let counts = Tensor::<3, Int>::from_data([[[1, 2]]], device);
    let scores = Tensor::<4>::zeros([1, 1, 2, 2], device);
    refused! {
        DeviceLayout::from_block_mask(mask, options.clone()) => MESSAGE;
        DeviceLayout::from_block_indices(indices, counts, options) => MESSAGE;
        DeviceLayout::from_block_scores(scores, shape, TopKOptions::new(8, 1)) => MESSAGE;
    }
}

/// Calls made of Burn's operations alone run on every backend of Burn.
#[test]
fn burns_own_operations_need_no_feature() {
    let device = Device::flex();
    let q = random(&device);
    let lse = Tensor::<3>::zeros([1, 1, 16], &device);
    let (out, _) = merge_attention(q.clone(), lse.clone(), q.clone(), lse).unwrap();
    let error = (out - q).abs().max().into_scalar::<f32>();
    assert!(error < 1e-6, "{error}");
}

/// Returns the device with and without autodiff.
fn devices() -> Vec<Device> {
    let device = Device::flex();
    let mut devices = vec![device.clone()];
    if cfg!(feature = "autodiff") {
        devices.push(device.autodiff());
    }
    devices
}
