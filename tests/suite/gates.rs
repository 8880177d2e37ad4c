//! Sums of gated branches.

use burn_sparse_select::nsa::NsaBranches;
use rstest::rstest;

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(gates);

#[rstest]
#[case([1, 2, 5, 8], [1, 2, 5, 2], "gates' shape must be [1, 2, 5, 3], q's rows and 3, got [1, 2, 5, 2]")]
#[case([1, 2, 5, 8], [1, 1, 5, 3], "gates' shape must be [1, 2, 5, 3], q's rows and 3, got [1, 1, 5, 3]")]
#[case([1, 2, 5, 4], [1, 2, 5, 3], "a branch's shape must be [1, 2, 5, 8], the selected one's, got [1, 2, 5, 4]")]
fn errors(#[case] window: [usize; 4], #[case] gates: [usize; 4], #[case] message: &str) {
    for device in devices() {
        let zeros = |shape: [usize; 4]| Tensor::<4>::zeros(shape, (&device, DType::F32));
        let branches = NsaBranches::new(None, zeros([1, 2, 5, 8]), Some(zeros(window)));
        let gates = zeros(gates);
        refused! {
            branches.explain_gated(&gates) => message;
            branches.gated(gates) => message;
        }
    }
}

#[test]
fn branches_of_another_dtype() {
    for device in devices() {
        if !supports(&device, DType::F64) {
            continue;
        }
        let zeros = |dtype: DType| Tensor::<4>::zeros([1, 1, 2, 4], (&device, dtype));
        let branches = NsaBranches::new(Some(zeros(DType::F64)), zeros(DType::F32), None);
        let gates = Tensor::<4>::zeros([1, 1, 2, 3], (&device, DType::F32));
        refused! { branches.gated(gates) => "a branch's dtype must be F32, the selected one's, got F64"; }
    }
}

/// Kernels run wherever there are any.
#[test]
fn plans() {
    for device in devices() {
        let zeros = |width: usize| Tensor::<4>::zeros([1, 2, 5, width], (&device, DType::F32));
        for width in [1, 7, 128, 3000] {
            let plan = NsaBranches::new(None, zeros(width), None).explain_gated(&zeros(3));
            let plan = plan.unwrap();
            let name = format!("{device:?}");
            let kernels = name.contains("Wgpu") || name.contains("Cuda");
            assert_eq!(plan.is_kernels(), kernels, "{name}: {plan}");
        }
    }
}
