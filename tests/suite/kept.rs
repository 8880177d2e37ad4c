//! Attention from residuals of another pass.

use burn_blocksparse::internal::AttentionResiduals;

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(kept);

/// Makes a call with 32 queries of 4 heads, and values of width 16.
fn given(
    kept: AttentionResiduals,
    options: AttentionOptions,
    device: &Device,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let (x, v) = (zeros([1, 4, 32, 8], device), zeros([1, 4, 32, 16], device));
    let layout = Pattern::causal().layout(4, 32, 8).unwrap();
    let call = SparseAttentionCall::new(x.clone(), x, v, &layout);
    call.options(options).run_from_residuals(kept)
}

#[test]
fn kept_shapes() {
    for device in &devices() {
        let call = |out, lse: [usize; 3]| {
            let kept = AttentionResiduals::new(zeros(out, device), Tensor::zeros(lse, device));
            given(kept, AttentionOptions::default(), device)
        };
        refused! {
            call([1, 4, 31, 16], [1, 4, 32]) => "kept.out's shape must be [1, 4, 32, 16], q's and v's, got [1, 4, 31, 16]";
            call([1, 4, 32, 8], [1, 4, 32]) => "kept.out's shape must be [1, 4, 32, 16], q's and v's, got [1, 4, 32, 8]";
            call([2, 4, 32, 16], [1, 4, 32]) => "kept.out's shape must be [1, 4, 32, 16], q's and v's, got [2, 4, 32, 16]";
            call([1, 4, 32, 16], [1, 2, 64]) => "kept.lse's shape must be [1, 4, 32], q's rows, got [1, 2, 64]";
        }
    }
}

#[test]
fn kept_dtypes_and_options() {
    for device in devices() {
        let (out, lse) = (
            zeros([1, 4, 32, 16], &device),
            Tensor::<3>::zeros([1, 4, 32], (&device, DType::F32)),
        );
        let other = [DType::F64, DType::F16, DType::BF16]
            .into_iter()
            .find(|&dtype| device.supports_dtype(dtype));
        let other = other.unwrap_or_else(|| panic!("{device:?} has a second float dtype"));
        let given = |out: Tensor<4>, lse: Tensor<3>, options| {
            given(AttentionResiduals::new(out, lse), options, &device)
        };
        let plain = AttentionOptions::default;
        refused! {
            given(out.clone().cast(other), lse.clone(), plain()) => format!("kept.out's dtype must be F32, q's, got {other:?}");
            given(out.clone(), lse.clone().cast(other), plain()) => format!("kept.lse's dtype must be F32, that of q's sums, got {other:?}");
        }
        for (options, expected) in [
            (
                plain().weights(WeightsMode::Store),
                "options.weights must be Recompute where the output is kept, got Store",
            ),
            (
                plain().max_scores(true),
                "options.max_scores must be false where the output is kept, got true",
            ),
        ] {
            refused! { given(out.clone(), lse.clone(), options.clone()) => expected; }
            let x = zeros([1, 4, 32, 8], &device);
            let (k, v) = (x.clone(), x.clone());
            let layout = Pattern::causal().layout(4, 32, 8).unwrap();
            let call = SparseAttentionCall::new(x, k, v, &layout).options(options);
            refused! { call.run_with_residuals() => expected; }
        }
    }
}

#[test]
fn kept_on_other_devices() {
    let Some([device, other]) = two_devices() else {
        return;
    };
    for (name, places) in [("out", [&other, &device]), ("lse", [&device, &other])] {
        let out = zeros([1, 4, 32, 16], places[0]);
        let lse = Tensor::<3>::zeros([1, 4, 32], places[1]);
        let kept = AttentionResiduals::new(out, lse);
        let error = given(kept, AttentionOptions::default(), &device).unwrap_err();
        let expected = format!("kept.{name}'s device must be {device:?}, q's, got {other:?}");
        assert_eq!(error.to_string(), expected);
    }
}
