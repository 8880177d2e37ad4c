//! Environment variables of the kernels: an invalid one makes every op on a device with kernels an error. They are read once per process, so each
//! has its own.

use std::process::Command;

use burn_blocksparse::internal::gather_rows;
use burn_blocksparse::layout::{DeviceLayoutOptions, TopKOptions};
use burn_blocksparse::{
    AccumulatedAttentionOptions, accumulated_attention, check_device, sparse_attention,
};
use burn_fused_ops::{
    Activation, AddNormOptions, CrossEntropyOptions, ElementDropout, LinearOptions, MlpOptions,
    MlpParams, NormParams, bias_activation, dropout, embedding, linear, linear_cross_entropy, mlp,
    norm, qkv_proj, split_heads,
};
use burn_paged_attention::sampling::{SampleOptions, sample_tokens};
use burn_sparse_select::internal::{sort_by_bucket, topk_rows};
use burn_sparse_select::{TokenIndices, top_k_blocks_on_device};

use burn_blocksparse_tests::prelude::*;

/// Invalid variable for the process with the calls.
const SAID: &str = "BURN_SPARSE_WRONG_VARIABLE";

macro_rules! calls {
    ($($name:literal => $call:expr;)+) => {
        vec![$(($name, $call.map(drop))),+]
    };
}

/// Returns a call of each kind, by name.
fn calls(device: &Device) -> Vec<(&'static str, Result<(), OpError>)> {
    let x4 = || Tensor::<4>::zeros([1, 2, 32, 8], (device, DType::F32));
    let x3 = || Tensor::<3>::zeros([1, 32, 16], (device, DType::F32));
    let x2 = |shape: [usize; 2]| Tensor::<2>::zeros(shape, (device, DType::F32));
    let x1 = |length: usize| Tensor::<1>::zeros([length], (device, DType::F32));
    let ids = |shape: [usize; 2]| Tensor::<2, Int>::zeros(shape, device);
    let layout = Pattern::causal().layout(2, 32, 8).unwrap();
    let kept = Tensor::<4, Bool>::full([1, 1, 4, 4], true, device);
    let shape = LayoutShape::new(2, [32, 32], 8);
    let keys = TokenIndices::new(Tensor::zeros([1, 2, 32, 4], device), 32, true);
    let params = MlpParams::new(x2([16, 32]), x2([32, 16]));
    let no_linear = LinearOptions::default();
    calls! {
        "check_device" => check_device(device);
        "attention" => sparse_attention(x4(), x4(), x4(), &layout);
        "accumulated_attention" => accumulated_attention(x4(), x4(), Tensor::zeros([1, 2, 32], (device, DType::F32)), &layout, AccumulatedAttentionOptions::default());
        "DeviceLayout::from_block_mask" => DeviceLayout::from_block_mask(kept, DeviceLayoutOptions::new(shape));
        "KeyLists::new" => keys;
        "top_k_blocks_on_device" => top_k_blocks_on_device(x4(), x4(), TopKOptions::new(8, 2));
        "bias_activation" => bias_activation(x2([4, 8]), Some(x1(8)), Activation::default());
        "dropout" => dropout(x2([4, 8]), &ElementDropout::new(0.1, 0, 0));
        "norm" => norm(x2([4, 8]), NormParams::new(x1(8)), &AddNormOptions::default());
        "linear" => linear(x2([4, 8]), x2([8, 8]), &no_linear);
        "mlp" => mlp(x2([4, 16]), params, Activation::default(), &MlpOptions::default());
        "linear_to_heads" => qkv_proj(x3(), vec![x2([16, 16])], None, &[(2, 8)], &no_linear);
        "split_heads" => split_heads(x3(), None, &[(2, 8)]);
        "embedding" => embedding(x2([8, 8]), ids([1, 4]));
        "linear_cross_entropy" => linear_cross_entropy(x2([4, 8]), x2([8, 16]), Tensor::<1, Int>::zeros([4], device), &CrossEntropyOptions::default());
        "sample_tokens" => sample_tokens(x2([2, 16]), x1(2), None, &SampleOptions::default());
        "sort_by_bucket" => sort_by_bucket(Tensor::zeros([1, 2, 8], device), 2, 8);
        "highest_in_rows" => topk_rows(x3(), 2);
        "rows_at" => gather_rows(x4(), Tensor::zeros([1, 2, 4], device), Tensor::zeros([1, 2, 32, 1], device));
    }
}

#[test]
#[ignore = "wrong_variables_are_errors_of_every_op runs it in processes of its own"]
fn calls_in_a_process_of_their_own() {
    let said = std::env::var(SAID).expect("what is wrong");
    for device in devices() {
        let has_kernels = is_cube(&device);
        let refused = |result: &Result<(), OpError>| {
            (result.as_ref()).is_err_and(|error| error.to_string() == said)
        };
        let mut calls = calls(&device);
        calls.retain(|(_, result)| refused(result) != has_kernels);
        assert!(calls.is_empty(), "{calls:?}");
    }
}

#[test]
fn wrong_variables_are_errors_of_every_op() {
    for (variable, value, said) in [
        (
            "BLOCKSPARSE_TIER",
            "hoper",
            "BLOCKSPARSE_TIER must be simt, simt-unfused, simt-fused, mma, hopper-forward, hopper-unfused, hopper-alone or mma-bias, got \"hoper\"",
        ),
        (
            "BLOCKSPARSE_COARSE",
            "no",
            "BLOCKSPARSE_COARSE must be 0 or 1, got \"no\"",
        ),
    ] {
        let name = "tuning::calls_in_a_process_of_their_own";
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", name, "--nocapture"])
            .env(SAID, said)
            .env(variable, value)
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{told}\n{errors}");
        assert!(told.contains("1 passed"), "{told}\n{errors}");
    }
}
