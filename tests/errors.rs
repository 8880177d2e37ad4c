//! Bad input is a typed error that names the argument, what was expected and what came.

use burn::tensor::{DType, Device, Tensor};
use burn_blocksparse::{
    AttentionOptions, AttentionPlan, AttentionTensors, BlockLayout, Dropout, Pattern, attention,
    attention_with_tensors, merge_attention,
};
use burn_blocksparse_tests::devices::devices;
use rstest::rstest;

fn layout() -> BlockLayout {
    Pattern::causal().layout(4, 32, 8).unwrap()
}

fn zeros(shape: [usize; 4], device: &Device) -> Tensor<4> {
    Tensor::zeros(shape, (device, DType::F32))
}

#[rstest]
#[case([1, 3, 32, 8], [1, 4, 32, 8], [1, 4, 32, 8], "q's heads must be 4, the layout's, got 3")]
#[case([1, 4, 31, 8], [1, 4, 32, 8], [1, 4, 32, 8], "q's seq_q must be 32, the layout's, got 31")]
#[case([1, 4, 32, 8], [1, 4, 40, 8], [1, 4, 40, 8], "k's seq_kv must be 32, the layout's, got 40")]
#[case([1, 4, 32, 8], [2, 4, 32, 8], [1, 4, 32, 8], "k's batch must be 1, q's, got 2")]
#[case([1, 4, 32, 8], [1, 4, 32, 16], [1, 4, 32, 8], "k's head_dim must be 8, q's, got 16")]
#[case([1, 4, 32, 8], [1, 3, 32, 8], [1, 3, 32, 8], "k's kv_heads must be a divisor of the 4 heads of q, got 3")]
#[case([1, 4, 32, 8], [1, 2, 32, 8], [1, 4, 32, 8], "v's kv_heads must be 2, k's, got 4")]
#[case([1, 4, 32, 8], [1, 4, 32, 8], [1, 4, 16, 8], "v's seq_kv must be 32, k's, got 16")]
#[case([1, 4, 32, 8], [1, 4, 32, 8], [3, 4, 32, 8], "v's batch must be 1, q's, got 3")]
fn shapes(
    #[case] q: [usize; 4],
    #[case] k: [usize; 4],
    #[case] v: [usize; 4],
    #[case] message: &str,
) {
    for device in devices() {
        let [q, k, v] = [q, k, v].map(|shape| zeros(shape, &device));
        let error = attention(q, k, v, &layout(), AttentionOptions::default()).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
}

#[rstest]
#[case(AttentionOptions::default().scale(f64::NAN), "options.scale must be finite, got NaN")]
#[case(AttentionOptions::default().softcap(0.0), "options.softcap must be positive and finite, got 0")]
#[case(AttentionOptions::default().alibi([0.5]), "options.alibi's slopes must be 4, the layout's heads, got 1")]
#[case(AttentionOptions::default().alibi([0.5, 0.5, f64::NAN, 0.5]), "options.alibi's slopes must be finite, got NaN")]
#[case(AttentionOptions::default().dropout(Dropout::new(1.0, 0)), "options.dropout's probability must be at least 0 and less than 1, got 1")]
#[case(AttentionOptions::default().dropout(Dropout::new(-0.1, 0)), "options.dropout's probability must be at least 0 and less than 1, got -0.1")]
#[case(AttentionOptions::default().softcap(-1.0), "options.softcap must be positive and finite, got -1")]
fn option_values(#[case] options: AttentionOptions, #[case] message: &str) {
    for device in devices() {
        let x = zeros([1, 4, 32, 8], &device);
        let error = attention(x.clone(), x.clone(), x, &layout(), options.clone()).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
}

#[test]
fn dtypes() {
    for device in devices() {
        if !device.supports_dtype(DType::F64) {
            continue;
        }
        let x = zeros([1, 4, 32, 8], &device);
        let k = x.clone().cast(DType::F64);
        let error = attention(x.clone(), k, x, &layout(), AttentionOptions::default()).unwrap_err();
        assert_eq!(error.to_string(), "k's dtype must be F32, q's, got F64");
    }
}

#[test]
fn batches() {
    let layout = BlockLayout::stack_batch(&[layout(), layout()]).unwrap();
    for device in devices() {
        let x = zeros([3, 4, 32, 8], &device);
        let options = AttentionOptions::default();
        let error = attention(x.clone(), x.clone(), x, &layout, options).unwrap_err();
        assert_eq!(
            error.to_string(),
            "q's batch must be 2, the layout's, got 3"
        );
    }
}

#[cfg(all(feature = "flex", feature = "ndarray"))]
#[test]
#[allow(deprecated)]
fn different_devices() {
    let x = zeros([1, 4, 32, 8], &Device::flex());
    let k = zeros([1, 4, 32, 8], &Device::ndarray());
    let error = attention(x.clone(), k, x, &layout(), AttentionOptions::default()).unwrap_err();
    assert!(
        error.to_string().starts_with("k's device must be"),
        "{error}"
    );
}

#[test]
fn sinks() {
    for device in devices() {
        let x = zeros([1, 4, 32, 8], &device);
        let tensors = AttentionTensors::default().sinks(Tensor::zeros([3], &device));
        let options = AttentionOptions::default();
        let error = attention_with_tensors(x.clone(), x.clone(), x, tensors, &layout(), options);
        assert_eq!(
            error.unwrap_err().to_string(),
            "sinks' heads must be 4, the layout's, got 3"
        );
    }
}

#[rstest]
#[case([3, 4, 32, 32], "bias's batch must be 1 or 1, got 3")]
#[case([1, 3, 32, 32], "bias's heads must be 4 or 1, got 3")]
#[case([1, 4, 31, 32], "bias's seq_q must be 32 or 1, got 31")]
#[case([1, 4, 32, 1], "bias's seq_kv must be 32, the layout's, got 1")]
fn biases(#[case] shape: [usize; 4], #[case] message: &str) {
    for device in devices() {
        let x = zeros([1, 4, 32, 8], &device);
        let tensors = AttentionTensors::default().bias(zeros(shape, &device));
        let options = AttentionOptions::default();
        let error = attention_with_tensors(x.clone(), x.clone(), x, tensors, &layout(), options);
        assert_eq!(error.unwrap_err().to_string(), message);
    }
}

#[test]
fn merged_parts() {
    for device in devices() {
        let (out, lse) = (
            zeros([1, 4, 32, 8], &device),
            Tensor::<3>::zeros([1, 4, 32], &device),
        );
        let fewer = zeros([1, 4, 31, 8], &device);
        let error = merge_attention(out.clone(), lse.clone(), fewer, lse.clone()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "out_b's shape must be [1, 4, 32, 8], out_a's, got [1, 4, 31, 8]"
        );
        let short = Tensor::<3>::zeros([1, 4, 31], &device);
        let error = merge_attention(out.clone(), lse, out, short).unwrap_err();
        assert_eq!(
            error.to_string(),
            "lse_b's shape must be [1, 4, 32], out_a's rows, got [1, 4, 31]"
        );
    }
}

/// What a call runs is known before it runs, and says so.
#[test]
fn plans_print_the_tier() {
    for device in devices() {
        let x = zeros([1, 4, 32, 8], &device);
        let options = AttentionOptions::default();
        let plan = AttentionPlan::new(&x, &x, &x, &layout(), &options).unwrap();
        let text = plan.to_string();
        let kernels = format!("{device:?}").contains("Cube");
        assert_eq!(plan.is_kernels(), kernels, "{text}");
        assert!(
            text.contains(if kernels { "simt" } else { "reference" }),
            "{text}"
        );
    }
}

/// What a device cannot run is refused before anything is launched.
#[test]
fn limits_of_a_device() {
    for device in devices() {
        if !format!("{device:?}").contains("Wgpu") {
            continue;
        }
        let options = AttentionOptions::default();
        let wide = zeros([1, 4, 32, 4096], &device);
        let error = attention(wide.clone(), wide.clone(), wide, &layout(), options.clone());
        let message = error.unwrap_err().to_string();
        assert!(
            message.starts_with("head_dim and value_dim must fit tiles in"),
            "{message}"
        );
        assert!(message.ends_with("got 4096 and 4096"), "{message}");
        if device.supports_dtype(DType::F64) {
            let x = zeros([1, 4, 32, 8], &device).cast(DType::F64);
            let error = attention(x.clone(), x.clone(), x, &layout(), options).unwrap_err();
            assert_eq!(
                error.to_string(),
                "dtype must be a float type of the device, got f64"
            );
        }
    }
}
