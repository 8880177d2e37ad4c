//! Projections to heads and from them, against the two operations that each is made of, which are compared with f64 by themselves.

use burn::tensor::FloatDType;
use burn_fused_ops::{
    LinearOptions, fused_linear, join_heads, linear, out_proj, qkv_proj, split_heads,
};

use crate::prelude::*;
use crate::training::results::*;

/// The dtypes of x, the weights and the bias, and that of the product.
#[derive(Clone, Copy, Debug)]
struct Dtypes {
    x: DType,
    params: DType,
    product: Option<FloatDType>,
}

impl Dtypes {
    fn all(device: &Device) -> Vec<Self> {
        let exact = exact_dtypes(device).into_iter().map(|(dtype, _)| dtype);
        let exact = exact.map(|dtype| Self {
            x: dtype,
            params: dtype,
            product: None,
        });
        let halves = half_dtypes(device).into_iter();
        let halves = halves.flat_map(|half| {
            let (params, product) = (DType::F32, Some(half.into()));
            [half, DType::F32].map(|x| Self { x, params, product })
        });
        exact.chain(halves).collect()
    }

    fn options(&self) -> LinearOptions {
        let mut options = LinearOptions::default();
        options.dtype = self.product;
        options
    }

    fn result(&self) -> DType {
        self.product.map_or(self.x, DType::from)
    }

    /// How far results may be apart: both are rounded, to half precision once and twice.
    fn tolerance(&self) -> f64 {
        4.0 * unit(self.result())
    }
}

type Given = Vec<Option<TensorData>>;

fn compare(what: &str, got: Given, expected: Given, tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (index, (got, expected)) in got.into_iter().zip(expected).enumerate() {
        let what = format!("{what}, result {index}");
        assert_eq!(got.is_some(), expected.is_some(), "{what}");
        let (Some(got), Some(expected)) = (got, expected) else {
            continue;
        };
        assert_eq!(
            (got.shape(), got.dtype()),
            (expected.shape(), expected.dtype()),
            "{what}"
        );
        match tolerance == 0.0 {
            true => assert_eq!(got.as_bytes(), expected.as_bytes(), "{what}"),
            false => assert_close(&what, got, &to_f64(expected), tolerance),
        }
    }
}

/// A projection to heads.
#[derive(Clone, Debug)]
struct ToHeads {
    batch: usize,
    seq: usize,
    inputs: usize,
    parts: Vec<(usize, usize)>,
    /// The columns of each weight.
    weights: Vec<usize>,
    bias: bool,
    /// A part that nobody uses.
    unused: Option<usize>,
}

impl ToHeads {
    fn new([batch, seq, inputs]: [usize; 3], parts: &[(usize, usize)], bias: bool) -> Self {
        Self {
            batch,
            seq,
            inputs,
            parts: parts.to_vec(),
            weights: parts.iter().map(|(heads, dim)| heads * dim).collect(),
            bias,
            unused: None,
        }
    }

    /// The results, and the gradients by x, the weights and the bias: x, the weights and the bias as `tracked` says.
    fn run(&self, device: &Device, dtypes: Dtypes, tracked: [bool; 3], fused: bool) -> Given {
        let width: usize = self.weights.iter().sum();
        let shape = [self.batch, self.seq, self.inputs];
        let values = numbers(51, shape.iter().product());
        let x = tensor::<3>(&values, shape, device, dtypes.x).set_require_grad(tracked[0]);
        let weights: Vec<Tensor<2>> = (self.weights.iter().enumerate())
            .map(|(index, out)| {
                let values = numbers(52 + index as u64, self.inputs * out);
                tensor(&values, [self.inputs, *out], device, dtypes.params)
                    .set_require_grad(tracked[1])
            })
            .collect();
        let bias: Option<Tensor<1>> = self.bias.then(|| {
            tensor(&numbers(56, width), [width], device, dtypes.params).set_require_grad(tracked[2])
        });
        let options = dtypes.options();
        let parts = match fused {
            true => {
                let (x, weights) = (x.clone(), weights.clone());
                qkv_proj(x, weights, bias.clone(), &self.parts, &options).unwrap()
            }
            false => {
                let joined = fused_linear(x.clone(), weights.clone(), &options).unwrap();
                split_heads(joined, bias.clone(), &self.parts).unwrap()
            }
        };
        let mut results: Given = (parts.iter())
            .map(|part| Some(read(part.clone())))
            .collect();
        for (part, (heads, dim)) in parts.iter().zip(&self.parts) {
            assert_eq!(part.dims(), [self.batch, *heads, self.seq, *dim]);
            assert_eq!(part.dtype(), dtypes.result());
        }
        if tracked.contains(&true) {
            let mut loss = Tensor::<1>::zeros([1], (device, dtypes.result()));
            for (index, part) in parts.into_iter().enumerate() {
                if self.unused != Some(index) {
                    let shape = part.dims();
                    let values = numbers(60 + index as u64, shape.iter().product());
                    loss = loss + (part * tensor(&values, shape, device, dtypes.result())).sum();
                }
            }
            let all = loss.backward();
            results.push(gradient(&x, &all));
            results.extend(weights.iter().map(|weight| gradient(weight, &all)));
            results.extend(bias.map(|bias| gradient(&bias, &all)));
        }
        results
    }
}

/// Parts of one width, of several, of several numbers of heads; weights as many as parts, and one for all of them. The shapes of the second half are such
/// that a kernel writes heads.
fn to_heads() -> Vec<ToHeads> {
    let mut joined = ToHeads::new([2, 9, 12], &[(2, 8), (1, 8)], true);
    joined.weights = vec![24];
    let mut unused = ToHeads::new([2, 9, 16], &[(2, 8), (2, 8), (1, 8)], true);
    unused.unused = Some(1);
    vec![
        ToHeads::new([1, 1, 1], &[(1, 1)], false),
        ToHeads::new([2, 5, 7], &[(2, 3), (1, 5)], true),
        ToHeads::new([0, 5, 7], &[(2, 3)], true),
        joined,
        unused,
        ToHeads::new([2, 128, 64], &[(2, 64), (2, 64), (2, 64)], true),
        ToHeads::new([3, 40, 72], &[(4, 32), (2, 32), (2, 32)], false),
        ToHeads::new([1, 256, 64], &[(2, 48)], true),
    ]
}

/// Panics if a projection twice, with and without gradient checkpointing, has other bits, or others than its two operations, or than what a rounding less
/// makes of them.
fn check(devices: &[Device], what: &str, run: impl Fn(&Device, Dtypes, bool) -> Given) {
    for plain in devices {
        for dtypes in Dtypes::all(plain) {
            let parts = run(&plain.clone().autodiff(), dtypes, false);
            for device in tracked(plain) {
                let (got, again) = (run(&device, dtypes, true), run(&device, dtypes, true));
                let what = format!("{plain:?}, {what}, {dtypes:?}");
                compare(&format!("{what}, twice"), got.clone(), again, 0.0);
                compare(&what, got, parts.clone(), dtypes.tolerance());
            }
        }
    }
}

/// As `fused_linear` and `split_heads`.
pub fn projections_to_heads(devices: &[Device]) {
    for problem in to_heads() {
        check(devices, &format!("{problem:?}"), |device, dtypes, fused| {
            problem.run(device, dtypes, [true; 3], fused)
        });
    }
}

/// A projection of heads: batch, heads, positions, width, outputs.
type FromHeads = [usize; 5];

/// The result, and the gradients by x and the weight.
fn from_heads(
    problem: FromHeads,
    device: &Device,
    dtypes: Dtypes,
    tracked: [bool; 2],
    fused: bool,
) -> Given {
    let [batch, heads, seq, dim, outputs] = problem;
    // As attention returns it, and as a view of rows.
    let shape = [batch, seq, heads, dim];
    let values = numbers(71, shape.iter().product());
    let x = tensor::<4>(&values, shape, device, dtypes.x);
    let x = x.swap_dims(1, 2).detach().set_require_grad(tracked[0]);
    let values = numbers(72, heads * dim * outputs);
    let weight = tensor::<2>(&values, [heads * dim, outputs], device, dtypes.params);
    let weight = weight.set_require_grad(tracked[1]);
    let options = dtypes.options();
    let y = match fused {
        true => out_proj(x.clone(), weight.clone(), &options).unwrap(),
        false => linear(join_heads(x.clone()).unwrap(), weight.clone(), &options).unwrap(),
    };
    assert_eq!(y.dims(), [batch, seq, outputs]);
    assert_eq!(y.dtype(), dtypes.result());
    let mut results = vec![Some(read(y.clone()))];
    if tracked.contains(&true) {
        let values = numbers(73, batch * seq * outputs);
        let grad = tensor(&values, [batch, seq, outputs], device, dtypes.result());
        let all = (y * grad).sum().backward();
        results.extend([gradient(&x, &all), gradient(&weight, &all)]);
    }
    results
}

/// As `join_heads` and `linear`. Sequences of 128 are such that a kernel reads heads.
pub fn projections_from_heads(devices: &[Device]) {
    for problem in [
        [1, 1, 1, 1, 1],
        [2, 3, 5, 4, 7],
        [0, 3, 5, 4, 7],
        [2, 2, 128, 64, 72],
        [1, 3, 384, 64, 40],
        [2, 2, 40, 64, 16],
    ] {
        check(devices, &format!("{problem:?}"), |device, dtypes, fused| {
            from_heads(problem, device, dtypes, [true; 2], fused)
        });
    }
}

/// What is frozen gets no gradient, and changes no other: all combinations.
pub fn projections_constants(devices: &[Device]) {
    for plain in devices {
        let device = plain.clone().autodiff();
        let dtypes = Dtypes {
            x: DType::F32,
            params: DType::F32,
            product: None,
        };
        let problem = ToHeads::new([2, 5, 8], &[(2, 4), (1, 4)], true);
        let all = problem.run(&device, dtypes, [true; 3], true);
        for tracked in some_tracked() {
            let [x, weights, bias] = tracked;
            let wanted = [true, true, x, weights, weights, bias];
            let got = problem.run(&device, dtypes, tracked, true);
            assert_wanted(&format!("{plain:?}, {tracked:?}"), &got, &all, wanted);
        }
        let untracked = problem.run(plain, dtypes, [false; 3], true);
        compare("plain", untracked, all[..2].to_vec(), 0.0);
        let all = from_heads([2, 2, 5, 4, 3], &device, dtypes, [true; 2], true);
        for tracked in [[true, false], [false, true]] {
            let got = from_heads([2, 2, 5, 4, 3], &device, dtypes, tracked, true);
            let wanted = [true, tracked[0], tracked[1]];
            assert_wanted(&format!("{plain:?}, {tracked:?}"), &got, &all, wanted);
        }
        let untracked = from_heads([2, 2, 5, 4, 3], plain, dtypes, [false; 2], true);
        compare("plain", untracked, all[..1].to_vec(), 0.0);
    }
}

/// Plans say what runs, and why not in one kernel.
pub fn projections_plans(devices: &[Device]) {
    for device in devices {
        let zeros = |shape| Tensor::<2>::zeros(shape, (device, DType::F32));
        let x = Tensor::<3>::zeros([2, 128, 64], (device, DType::F32));
        let options = LinearOptions::default();
        let plan = options.explain_to_heads(&x, &[zeros([64, 128])], None, &[(2, 64)]);
        let context = Tensor::<4>::zeros([2, 2, 128, 64], (device, DType::F32));
        let other = options.explain_from_heads(&context, &zeros([128, 64]));
        for plan in [plan.unwrap().to_string(), other.unwrap().to_string()] {
            assert!(
                plan.contains("not as one: ") || plan.starts_with("Burn's primitives on"),
                "{plan}"
            );
        }
    }
}
