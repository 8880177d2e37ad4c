//! Projections to heads and from them, against the two operations that they fuse, which are compared with f64 elsewhere.

use burn::tensor::FloatDType;
use burn_fused_ops::{
    LinearOptions, fused_linear, join_heads, linear, out_proj, qkv_proj, split_heads,
};

use crate::prelude::*;
use crate::training::case::*;

/// Returns the options of a call by one fused operation or by the two. Dtypes of a case are those of x, the parameters and the results; the last is
/// requested if it differs from x's.
fn options(x: &Tensors) -> LinearOptions {
    let mut options = LinearOptions::default();
    options.dtype = (x.dtypes[0] != x.dtypes[2]).then(|| FloatDType::from(x.dtypes[2]));
    options
}

/// A projection to heads.
#[derive(Clone, Debug)]
struct ToHeads {
    /// Batch, positions and inputs.
    x: [usize; 3],
    parts: &'static [(usize, usize)],
    /// Whether one weight serves all parts.
    joined: bool,
    bias: bool,
    /// An unused part.
    unused: Option<usize>,
}

impl ToHeads {
    fn case(&self, fused: bool) -> Case<'_> {
        let [batch, seq, inputs] = self.x;
        let widths = self.parts.iter().map(|(heads, dim)| heads * dim);
        let width: usize = widths.clone().sum();
        let weights: Vec<usize> = match self.joined {
            true => vec![width],
            false => widths.collect(),
        };
        let count = weights.len();
        let call = move |x: &mut Tensors| {
            let options = options(x);
            let rows = x.take::<3>();
            let weights = (0..count).map(|_| x.take()).collect();
            let bias = self.bias.then(|| x.take());
            let parts = match fused {
                true => qkv_proj(rows, weights, bias, self.parts, &options),
                false => fused_linear(rows, weights, &options)
                    .and_then(|joined| split_heads(joined, bias, self.parts)),
            };
            parts.unwrap().into_iter().map(Made::from).collect()
        };
        let case = Case::unjudged(format!("{self:?}"), call);
        let case = case.input("x", 0, &self.x, 51);
        let case = (weights.iter().zip(52..)).fold(case, |case, (&out, seed)| {
            case.input("W", 1, &[inputs, out], seed)
        });
        let case = case.input_if(self.bias, "bias", 1, &[width], 56);
        (self.parts.iter().enumerate()).fold(case, |case, (part, &(heads, dim))| {
            let shape = [batch, heads, seq, dim];
            let grad = (self.unused != Some(part)).then_some(60 + part as u64);
            case.result("part", 2, &shape, grad)
        })
    }
}

fn plain(x: [usize; 3], parts: &'static [(usize, usize)], bias: bool) -> ToHeads {
    let (joined, unused) = (false, None);
    ToHeads {
        x,
        parts,
        joined,
        bias,
        unused,
    }
}

/// Parts of one width, of several, of several numbers of heads; a weight per part, and one for all. Shapes of the second half let a kernel write
/// heads.
fn to_heads() -> Vec<ToHeads> {
    vec![
        plain([1, 1, 1], &[(1, 1)], false),
        plain([2, 5, 7], &[(2, 3), (1, 5)], true),
        plain([0, 5, 7], &[(2, 3)], true),
        ToHeads {
            joined: true,
            ..plain([2, 9, 12], &[(2, 8), (1, 8)], true)
        },
        ToHeads {
            unused: Some(1),
            ..plain([2, 9, 16], &[(2, 8), (2, 8), (1, 8)], true)
        },
        plain([2, 128, 64], &[(2, 64), (2, 64), (2, 64)], true),
        plain([3, 40, 72], &[(4, 32), (2, 32), (2, 32)], false),
        plain([1, 256, 64], &[(2, 48)], true),
    ]
}

/// Makes a projection of heads: batch, heads, positions, width, outputs. x is a view of rows, like the output of attention.
fn from_heads([batch, heads, seq, dim, outputs]: [usize; 5], fused: bool) -> Case<'static> {
    let call = move |x: &mut Tensors| {
        let options = options(x);
        let (rows, weight) = (x.take::<4>().swap_dims(1, 2), x.take());
        let y = match fused {
            true => out_proj(rows, weight, &options),
            false => join_heads(rows).and_then(|rows| linear(rows, weight, &options)),
        };
        vec![y.unwrap().into()]
    };
    let width = heads * dim;
    Case::unjudged(format!("{:?}", [batch, heads, seq, dim, outputs]), call)
        .input("x", 0, &[batch, seq, heads, dim], 71)
        .input("W", 1, &[width, outputs], 72)
        .result("y", 2, &[batch, seq, outputs], 73)
}

/// Panics if two runs of a projection, with and without gradient checkpointing, differ in bits, or differ from its two operations by more than one
/// rounding: half precision is rounded once instead of twice.
fn check<'a>(devices: &[Device], case: impl Fn(bool) -> Case<'a>) {
    let f32 = DType::F32;
    for plain in devices {
        let exact = exact_dtypes(plain).into_iter().map(|(dtype, _)| [dtype; 3]);
        let halves = half_dtypes(plain).into_iter();
        let halves = halves.flat_map(|half| [half, f32].map(|x| [x, f32, half]));
        for dtypes in exact.chain(halves) {
            let parts = case(false).run_all(plain, &dtypes);
            for device in tracked(plain) {
                let run = || case(true).run_on(&device, &dtypes);
                let (what, got) = (format!("{device:?}, {dtypes:?}"), run());
                assert_found(&format!("{what}, twice"), &run(), &got, 0.0);
                assert_found(&what, &got, &parts, 4.0 * unit(dtypes[2]));
            }
        }
    }
}

/// Compared with `fused_linear` and `split_heads`.
pub fn projections_to_heads(devices: &[Device]) {
    for problem in some_of(to_heads(), 3) {
        check(devices, |fused| problem.case(fused));
    }
}

/// Compared with `join_heads` and `linear`. With sequences of 128 a kernel reads heads.
pub fn projections_from_heads(devices: &[Device]) {
    let small = [[1, 1, 1, 1, 1], [2, 3, 5, 4, 7], [0, 3, 5, 4, 7]];
    let large = [[2, 2, 128, 64, 72], [1, 3, 384, 64, 40], [2, 2, 40, 64, 16]];
    for problem in [small, large].concat() {
        check(devices, |fused| from_heads(problem, fused));
    }
}

/// Frozen inputs get no gradient, and change no other.
pub fn projections_constants(devices: &[Device]) {
    let problem = plain([2, 5, 8], &[(2, 4), (1, 4)], true);
    problem.case(true).has_constants(devices, 0.0);
    from_heads([2, 2, 5, 4, 3], true).has_constants(devices, 0.0);
}

/// Plans tell what runs, and why not one kernel.
pub fn projections_plans(devices: &[Device]) {
    for device in devices {
        let zeros = |shape| Tensor::<2>::zeros(shape, (device, DType::F32));
        let x = Tensor::<3>::zeros([2, 128, 64], (device, DType::F32));
        let options = LinearOptions::default();
        let plan = options.explain_to_heads(&x, &[zeros([64, 128])], None, &[(2, 64)]);
        let context = Tensor::<4>::zeros([2, 2, 128, 64], (device, DType::F32));
        let other = options.explain_from_heads(&context, &zeros([128, 64]));
        for plan in [plan.unwrap().to_string(), other.unwrap().to_string()] {
            let says_why = plan.contains("not as one: ");
            assert!(
                says_why || plan.starts_with("Burn's primitives on"),
                "{plan}"
            );
        }
    }
}
