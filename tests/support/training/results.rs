//! Results of operations, of which some there may not be: comparisons, and what holds of every operation.

use burn_blocksparse::OpPlan;

use crate::gate;
use crate::prelude::*;

/// What an operation gives: results and gradients, as far as there are.
pub type Given<const N: usize> = [Option<TensorData>; N];

/// The same in f64.
pub type Judged<const N: usize> = [Option<Vec<f64>>; N];

/// The numbers of a gradient, if there is one.
pub fn gradient<const D: usize>(x: &Tensor<D>, grads: &Gradients) -> Option<TensorData> {
    x.grad(grads).map(Tensor::into_data)
}

/// Panics if results are others than the judge has, of other dtypes, or further away than they may be.
pub fn assert_results(
    what: &str,
    names: &[&str],
    got: impl IntoIterator<Item = Option<TensorData>>,
    expected: impl IntoIterator<Item = Option<Vec<f64>>>,
    within: impl Fn(usize) -> (DType, f64),
) {
    assert_results_near(what, names, got, expected, |index| {
        let (dtype, tolerance) = within(index);
        (dtype, tolerance, 0.0)
    });
}

/// The same of results that are differences of terms.
pub fn assert_results_near(
    what: &str,
    names: &[&str],
    got: impl IntoIterator<Item = Option<TensorData>>,
    expected: impl IntoIterator<Item = Option<Vec<f64>>>,
    within: impl Fn(usize) -> (DType, f64, f64),
) {
    let (mut got, mut expected) = (got.into_iter(), expected.into_iter());
    for (index, name) in names.iter().enumerate() {
        let what = format!("{what}: {name}");
        let (dtype, tolerance, terms) = within(index);
        match (got.next().flatten(), expected.next().flatten()) {
            (Some(got), Some(expected)) => {
                assert_eq!(got.dtype(), dtype, "{what}");
                assert_close_to(terms, &what, got, &expected, tolerance);
            }
            (None, None) => {}
            (got, _) => panic!("{what}: there is one: {}", got.is_some()),
        }
    }
    assert!(
        got.next().is_none() && expected.next().is_none(),
        "{what}: more than names"
    );
}

/// The dtype, the shape and the bits of a result, if there is one.
pub type Bits = Option<(DType, Vec<usize>, Vec<u8>)>;

pub fn bits<'a>(results: impl IntoIterator<Item = &'a Option<TensorData>>) -> Vec<Bits> {
    let bits = |data: &TensorData| {
        (
            data.dtype(),
            data.shape().to_vec(),
            data.as_bytes().to_vec(),
        )
    };
    let results = results.into_iter();
    results.map(|data| data.as_ref().map(bits)).collect()
}

/// Panics if there is not what is wanted of all results and nothing else, with the bits that it has among them.
pub fn assert_wanted<'a>(
    what: &str,
    some: impl IntoIterator<Item = &'a Option<TensorData>>,
    all: impl IntoIterator<Item = &'a Option<TensorData>>,
    wanted: impl IntoIterator<Item = bool>,
) {
    let all = bits(all).into_iter().zip(wanted);
    let expected: Vec<_> = all.map(|(data, wanted)| data.filter(|_| wanted)).collect();
    let some = bits(some);
    assert_eq!(some.len(), expected.len(), "{what}");

    for (index, (some, expected)) in some.into_iter().zip(expected).enumerate() {
        assert_eq!(some.is_some(), expected.is_some(), "{what}: result {index}");
        assert!(some == expected, "{what}: other bits of result {index}");
    }
}

/// All combinations of what is tracked but none.
pub fn some_tracked<const N: usize>() -> impl Iterator<Item = [bool; N]> {
    (1..1u32 << N).map(|bits| std::array::from_fn(|bit| bits >> bit & 1 != 0))
}

/// Kernels where there are some, and text that says so.
pub fn assert_plan(plan: &OpPlan, device: &Device) {
    let name = format!("{device:?}");
    let kernels = ["Wgpu", "Cuda"].iter().any(|kind| name.contains(kind)) && !uses_reference();
    assert_eq!(plan.is_kernels(), kernels, "{plan}");
    let text = plan.to_string();
    gate::note_plan(&text);
    let expected = if kernels {
        "units a cube"
    } else {
        "primitives"
    };
    assert!(text.contains(expected), "{text}");
}
