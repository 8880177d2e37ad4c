//! Burn's signature of attention: every kind of mask and bias against f64 loops, with gradients with respect to q, k, v and bias.

use burn::tensor::module::attention_fallback;
use burn::tensor::ops::AttentionModuleOptions;
use burn_blocksparse::module::{attention, mask_layout, try_attention};
use burn_blocksparse_tests::judge::attention::Bias;

use burn_blocksparse_tests::prelude::*;

type Function = fn(
    Tensor<4>,
    Tensor<4>,
    Tensor<4>,
    Option<Tensor<4, Bool>>,
    Option<Tensor<4>>,
    AttentionModuleOptions,
) -> Tensor<4>;

/// Within a block, ragged, more queries or more keys; equal and fewer KV heads.
pub(super) const SIZES: [Sizes; 4] = [
    Sizes::new([2, 3, 3], [70, 70], [12, 12]),
    Sizes::new([2, 3, 3], [40, 90], [20, 20]),
    Sizes::new([2, 4, 2], [90, 40], [12, 12]),
    Sizes::new([2, 2, 2], [5, 7], [6, 10]),
];

/// Dimensions in which a mask or a bias has size 1.
pub(super) type Shared = [bool; 4];

pub(super) const MASKS: [Option<Shared>; 6] = [
    None,
    Some([false, false, false, false]),
    Some([false, true, true, false]),
    Some([true, true, false, false]),
    Some([true, false, true, false]),
    Some([false, true, false, true]),
];

pub(super) const BIASES: [Option<[bool; 3]>; 4] = [
    None,
    Some([false, false, false]),
    Some([true, false, false]),
    Some([false, true, true]),
];

/// Burn's gradient of a division uses 1 / softcap in f32, which is exact for a power of 2.
pub(super) const OPTIONS: [AttentionModuleOptions; 4] = [
    options(None, None, false),
    options(None, None, true),
    options(Some(0.3), Some(2.0), false),
    options(Some(0.3), Some(2.0), true),
];

const fn options(
    scale: Option<f64>,
    softcap: Option<f64>,
    is_causal: bool,
) -> AttentionModuleOptions {
    AttentionModuleOptions {
        scale,
        softcap,
        is_causal,
    }
}

/// A mask in Burn's convention: true is masked out.
#[derive(Clone)]
pub(super) struct Mask {
    dims: [usize; 4],
    masked: Vec<bool>,
}

impl Mask {
    /// Masks a third of the pairs and, with a row per query, all of every fifth row.
    pub(super) fn random(seed: u64, sizes: Sizes, shared: Shared) -> Self {
        let mut dims = [sizes.batch, sizes.heads, sizes.seq_q, sizes.seq_kv];
        for (length, shared) in dims.iter_mut().zip(shared) {
            *length = if shared { 1 } else { *length };
        }
        let mut rng = seeded(seed);
        let masked = (0..dims.iter().product())
            .map(|at| {
                let whole = dims[2] > 1 && at / dims[3] % 5 == 3;
                whole || rng.random_range(0..3) == 0
            })
            .collect();
        Self { dims, masked }
    }

    fn at(&self, place: [usize; 4]) -> bool {
        let place = place.iter().zip(self.dims);
        self.masked[place.fold(0, |at, (&i, length)| at * length + i.min(length - 1))]
    }

    pub(super) fn tensor(&self, device: &Device) -> Tensor<4, Bool> {
        bools(&self.masked, self.dims, device)
    }
}

/// Makes the problem that f64 loops solve.
pub(super) fn problem(
    seed: u64,
    sizes: Sizes,
    mask: Option<&Mask>,
    bias: Option<[bool; 3]>,
    options: AttentionModuleOptions,
) -> Problem {
    let mask = mask.cloned();
    let allowed = move |batch: usize, head: usize, i: usize, j: usize| {
        let masked = (mask.as_ref()).is_some_and(|mask| mask.at([batch, head, i, j]));
        !masked && (!options.is_causal || j + sizes.seq_q <= i + sizes.seq_kv)
    };
    let problem = Problem::random(sizes, seed, allowed).options(options.scale, options.softcap);
    match bias {
        Some(shared) => problem.with_bias(seed, shared),
        None => problem,
    }
}

/// Returns the output, and the gradients of `sum(out · grad_out)` with respect to q, k, v and bias.
fn run(
    function: Function,
    problem: &Problem,
    mask: Option<&Mask>,
    options: AttentionModuleOptions,
    device: &Device,
    dtype: DType,
) -> Results {
    let device = device.clone().autodiff();
    let [q, k, v, grad_out] = inputs(problem, &device, dtype);
    let [q, k, v] = [q, k, v].map(Tensor::require_grad);
    let bias = tensors(problem, &device, dtype).bias;
    let bias = bias.map(Tensor::require_grad);
    let mask = mask.map(|mask| mask.tensor(&device));
    let (of_q, of_k, of_v) = (q.clone(), k.clone(), v.clone());
    let out = function(of_q, of_k, of_v, mask, bias.clone(), options);
    let grads = (out.clone() * grad_out).sum().backward();
    let leaves = ["dq", "dk", "dv", "dbias"]
        .into_iter()
        .zip([q, k, v].into_iter().chain(bias));
    let grads = leaves.map(|(name, x)| (name, x.grad(&grads).expect(name).into_data()));
    let out = [("out", out.into_data())];
    out.into_iter().chain(grads).collect()
}

fn bounds(dtype: DType, tolerance: f64) -> [Near; 2] {
    [Near::Terms(tolerance), Near::Rows(dtype)]
}

#[test]
fn every_mask_and_bias_equals_f64() {
    let rows = SIZES.into_iter().flat_map(|sizes| {
        let masked = MASKS.into_iter().map(move |mask| (sizes, mask));
        masked.flat_map(|(sizes, mask)| BIASES.map(|bias| (sizes, mask, bias)))
    });
    let rows = (7000..).zip(rows.flat_map(|row| OPTIONS.map(|options| (row, options))));
    for (seed, ((sizes, shared, bias), options)) in some_of(rows, 23) {
        let mask = shared.map(|shared| Mask::random(seed, sizes, shared));
        let problem = problem(seed, sizes, mask.as_ref(), bias, options);
        let answer = problem.solve();
        for device in devices() {
            for (dtype, tolerance) in exact_dtypes(&device) {
                let what = format!(
                    "{sizes:?}, mask {shared:?}, bias {bias:?}, {options:?}, {device:?}, {dtype:?}"
                );
                let got = run(attention, &problem, mask.as_ref(), options, &device, dtype);
                answer.assert(&what, got, &bounds(dtype, tolerance));
            }
        }
    }
}

#[test]
fn masks_and_biases_in_half_precision() {
    let sizes = SIZES[1];
    for (seed, shared) in (7500..).zip(MASKS) {
        let options = OPTIONS[seed as usize % 4];
        let mask = shared.map(|shared| Mask::random(seed, sizes, shared));
        for device in devices() {
            for dtype in half_dtypes(&device) {
                let bias = BIASES[seed as usize % 3];
                let mut problem = problem(seed, sizes, mask.as_ref(), bias, options);
                problem.round_to(dtype);
                let what =
                    format!("mask {shared:?}, bias {bias:?}, {options:?}, {device:?}, {dtype:?}");
                let got = run(attention, &problem, mask.as_ref(), options, &device, dtype);
                let bounds = bounds(dtype, half_tolerance(dtype));
                problem.solve().assert(&what, got, &bounds);
            }
        }
    }
}

/// The semantics are Burn's: the order of scale, softcap, masks and bias, the alignment of causality, and rows without a pair.
#[test]
fn equals_burns_fallback() {
    let exact = Device::flex();
    for (seed, sizes) in (7600..).zip([SIZES[0], SIZES[1], SIZES[3]]) {
        for shared in MASKS {
            for options in OPTIONS {
                let mask = shared.map(|shared| Mask::random(seed, sizes, shared));
                let mask = mask.as_ref();
                let mut problem = problem(seed, sizes, mask, BIASES[2], options);
                // Burn divides gradients of rows without a pair by the smallest normal number; they must not overflow.
                problem.grad_out.iter_mut().for_each(|grad| *grad /= 64.0);
                let run = |function| run(function, &problem, mask, options, &exact, DType::F64);
                let what = format!("{sizes:?}, mask {shared:?}, {options:?}");
                assert_alike(&what, run(attention), run(attention_fallback), 1e-12);
            }
        }
    }
}

/// Rows that are masked entirely, by each possible way, give zeros, and gradients as if they did not exist.
#[test]
fn rows_without_a_pair_are_zeros() {
    for (of_keys, by_bias) in [(false, false), (true, false), (false, true)] {
        check_empty_rows(of_keys, by_bias);
    }
}

fn check_empty_rows(of_keys: bool, by_bias: bool) {
    let sizes = SIZES[1];
    let shared = [false, true, of_keys, false];
    let mut mask = Mask::random(7700, sizes, shared);
    // All of the second batch entry.
    let half = mask.masked.len() / 2;
    mask.masked[half..].fill(true);
    for options in OPTIONS {
        for device in devices() {
            for (dtype, tolerance) in exact_dtypes(&device) {
                let what = format!("{of_keys}, {by_bias}, {options:?}, {device:?}, {dtype:?}");
                let mut problem = problem(7700, sizes, Some(&mask), None, options);
                let given = if by_bias {
                    // Burn's users write −∞ for masked pairs.
                    let value = |masked: bool| if masked { f64::NEG_INFINITY } else { 0.5 };
                    let values = mask.masked.iter().copied().map(value).collect();
                    let shape = mask.dims;
                    problem.bias = Some(Bias { shape, values });
                    None
                } else {
                    Some(&mask)
                };
                let got = run(attention, &problem, given, options, &device, dtype);
                let out = to_f64(got[0].1.clone());
                assert!(out[out.len() / 2..].iter().all(|&x| x == 0.0), "{what}");
                let bounds = bounds(dtype, tolerance);
                problem.solve().assert(&what, got, &bounds);
            }
        }
    }
}

/// A constant added to a row's scores changes nothing, and its gradient is only rounding.
#[test]
fn a_bias_of_rows_changes_nothing() {
    let (sizes, options) = (SIZES[0], OPTIONS[1]);
    let problem = problem(7800, sizes, None, None, options);
    for device in devices() {
        let autodiff = device.clone().autodiff();
        let [q, k, v, grad_out] = inputs(&problem, &autodiff, DType::F32);
        let shape = [sizes.batch, 1, sizes.seq_q, 1];
        let values = numbers(7801, shape.iter().product());
        let bias = tensor(&values, shape, &autodiff, DType::F32).require_grad();
        let out = attention(q, k, v, None, Some(bias.clone()), options);
        let grads = (out.clone() * grad_out).sum().backward();
        let answer = problem.solve();
        assert_close("out", out.into_data(), &answer.out, 1e-5);
        let none = vec![0.0; values.len()];
        assert_close("dbias", bias.grad(&grads).unwrap().into_data(), &none, 1e-4);
    }
}

#[test]
fn a_mask_read_once_gives_the_same() {
    let sizes = SIZES[0];
    let mask = Mask::random(7900, sizes, [false, true, false, false]);
    let problem = problem(7900, sizes, None, None, OPTIONS[1]);
    for device in devices() {
        let [q, k, v, _] = inputs(&problem, &device, DType::F32);
        let mask = mask.tensor(&device);
        let lengths = [sizes.seq_q, sizes.seq_kv];
        let layout = mask_layout(mask.clone(), sizes.heads, lengths, true).unwrap();
        let kept = attend([&q, &k, &v], &layout, &AttentionOptions::default());
        let read = attention(q, k, v, Some(mask), None, OPTIONS[1]);
        let [kept, read] = [kept, read].map(|out| [("out", out.into_data())]);
        assert_same_bits("a kept layout", kept, read);
    }
}

/// Makes a call with a mask and a bias of these sizes.
fn call_of(
    qkv: [[usize; 4]; 3],
    mask: Option<[usize; 4]>,
    bias: Option<[usize; 4]>,
) -> Result<Tensor<4>, OpError> {
    let device = &devices()[0];
    let [q, k, v] = qkv.map(|dims| zeros(dims, device));
    let mask = mask.map(|dims| bools(&vec![false; dims.iter().product()], dims, device));
    let bias = bias.map(|dims| zeros(dims, device));
    try_attention(q, k, v, mask, bias, OPTIONS[0])
}

#[test]
fn masks_and_biases_that_do_not_fit_are_named() {
    let qkv = [[2, 4, 8, 16], [2, 4, 9, 16], [2, 4, 9, 16]];
    for (dims, text) in [
        ([3, 1, 8, 9], "mask's batch must be 2 or 1, got 3"),
        ([1, 2, 8, 9], "mask's heads must be 4 or 1, got 2"),
        ([1, 1, 7, 9], "mask's seq_q must be 8 or 1, got 7"),
        ([1, 1, 8, 8], "mask's seq_kv must be 9 or 1, got 8"),
    ] {
        refused! {
            call_of(qkv, Some(dims), None) => text;
            call_of(qkv, None, Some(dims)) => text.replace("mask", "attn_bias");
        }
    }
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let call = |qkv| call_of(qkv, None, None);
    refused! {
        call([[2, 4, 0, 8], [2, 4, 9, 8], [2, 4, 9, 8]]) => "seq_q must be between 1 and 1073741824, got 0";
        call([[2, 4, 8, 8], [2, 4, 0, 8], [2, 4, 0, 8]]) => "seq_kv must be between 1 and 1073741824, got 0";
        call([[2, 4, 8, 8], [2, 4, 9, 6], [2, 4, 9, 8]]) => "k's head_dim must be 8, q's, got 6";
        call([[2, 4, 8, 8], [2, 3, 9, 8], [2, 3, 9, 8]]) => "k's kv_heads must be a divisor of the 4 heads of q, got 3";
        call([[2, 4, 8, 8], [2, 4, 9, 8], [2, 4, 8, 8]]) => "v's seq_kv must be 9, k's, got 8";
    }
}

#[test]
fn other_arguments_are_named() {
    let device = &devices()[0];
    let x = Tensor::<4>::zeros([1, 2, 8, 16], (device, DType::F32));
    let call = |bias, options| {
        let (q, k, v) = (x.clone(), x.clone(), x.clone());
        try_attention(q, k, v, None, bias, options)
    };
    refused! { call(None, options(None, Some(-1.0), false)) => "…softcap must be positive…"; }
    let bias = |device: &Device, dtype| Some(Tensor::zeros([1, 1, 8, 8], (device, dtype)));
    if let Some((dtype, _)) = exact_dtypes(device).get(1) {
        refused! { call(bias(device, *dtype), OPTIONS[0]) => "…attn_bias's dtype must be F32…"; }
    }
    let other = two_devices().and_then(|two| two.into_iter().find(|other| other != device));
    if let Some(other) = other {
        refused! { call(bias(&other, DType::F32), OPTIONS[0]) => "…attn_bias's device…"; }
    }
}
