//! Residual norms against f64 loops.

use burn::tensor::FloatDType;
use burn_fused_ops::{
    AddNormOptions, ElementDropout, NormKind, NormParams, Residual, add_norm, norm, residual_add,
};

use crate::prelude::*;
use crate::training::case::*;

/// Parts of a call.
#[derive(Clone)]
struct Kind {
    /// None: the sum alone.
    norm: Option<NormKind>,
    dropout: Option<ElementDropout>,
    branch: bool,
    bias: bool,
    beta: bool,
    /// Which of the results, the sum and the norm, are used.
    used: [bool; 2],
}

/// A layer norm of a stream and a branch with a bias; all outputs are used.
const WHOLE: Kind = Kind {
    norm: Some(NormKind::Layer),
    dropout: None,
    branch: true,
    bias: true,
    beta: true,
    used: [true; 2],
};

/// Returns one of the kinds of calls.
fn kind(index: usize) -> Kind {
    let mut kind = WHOLE;
    if index % 2 == 1 {
        kind.norm = Some(NormKind::Rms);
    }
    if !index.is_multiple_of(3) {
        let dropout = ElementDropout::new(0.3, index as u64 + (5 << 33), 7);
        kind.dropout = Some(dropout.with_first_row(3));
    }
    (kind.bias, kind.beta) = (index % 4 != 1, index % 3 != 1);
    match index % 7 {
        2 => kind.used = [false, true],
        3 => kind.used = [true, false],
        4 => (kind.branch, kind.bias) = (false, false),
        5 => (kind.norm, kind.used, kind.beta) = (None, [true, false], false),
        6 => (kind.branch, kind.bias, kind.used) = (false, false, [false, true]),
        _ => {}
    }
    kind
}

const EPSILON: f64 = 1e-3;

/// Returns the mean to subtract and the factor of a row.
fn moments(row: &[f64], norm: Option<NormKind>) -> [f64; 2] {
    let width = row.len() as f64;
    let mean = match norm {
        Some(NormKind::Layer) => row.iter().sum::<f64>() / width,
        _ => 0.0,
    };
    let variance = row.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / width;
    [mean, (variance + EPSILON).powf(-0.5)]
}

impl Kind {
    /// Returns the results of a call.
    fn call(&self, x: &mut Tensors) -> [Option<Tensor<3>>; 2] {
        let (stream, branch) = (x.take::<3>(), self.branch.then(|| x.take::<3>()));
        let bias = self.bias.then(|| x.take());
        let branch = branch.map(|x| match bias {
            Some(bias) => Residual::new(x).bias(bias),
            None => Residual::new(x),
        });
        let Some(norm_kind) = self.norm else {
            let branch = branch.expect("a branch to be added");
            let sum = residual_add(stream, branch, self.dropout);
            return [Some(sum.unwrap()), None];
        };
        let mut params = NormParams::new(x.take());
        params.beta = self.beta.then(|| x.take());
        let mut options = AddNormOptions::default()
            .norm(norm_kind)
            .epsilon(EPSILON)
            .dtype(FloatDType::from(x.dtypes[3]));
        options.dropout = self.dropout;
        if branch.is_none() && !self.used[0] {
            return [None, Some(norm(stream, params, &options).unwrap())];
        }
        let (sum, normed) = add_norm(stream, branch, params, &options).unwrap();
        [Some(sum), Some(normed)]
    }

    /// Returns whether there is a sum, and whether there is a norm.
    fn results(&self) -> [bool; 2] {
        [self.branch || self.used[0], self.norm.is_some()]
    }

    /// Returns the results, and the gradients with respect to inputs.
    fn solve(&self, width: usize, x: &[Vec<f64>], grads: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let mut inputs = x.iter();
        let mut next = |is_there: bool| is_there.then(|| inputs.next().unwrap());
        let (stream, branch, bias) = (next(true).unwrap(), next(self.branch), next(self.bias));
        let (gamma, beta) = (next(self.norm.is_some()), next(self.beta));
        let [has_sum, has_norm] = self.results();
        let by_sum = has_sum.then(|| &grads[0]);
        let by_norm = has_norm.then(|| &grads[usize::from(has_sum)]);
        let factor = |row: usize, column: usize| match self.dropout {
            None => 1.0,
            Some(dropout) if dropout.keeps(row, column) => dropout.factor(),
            Some(_) => 0.0,
        };
        let mut sum = stream.clone();
        let [mut h, mut ds, mut da] = [(); 3].map(|()| vec![0.0; sum.len()]);
        let [mut dbias, mut dgamma, mut dbeta] = [(); 3].map(|()| vec![0.0; width]);
        for (row, start) in (0..sum.len()).step_by(width).enumerate() {
            let columns = || (0..width).map(|j| (j, start + j));
            for (j, at) in columns().filter(|_| self.branch) {
                let bias = bias.map_or(0.0, |bias| bias[j]);
                sum[at] += factor(row, j) * (branch.unwrap()[at] + bias);
            }
            let s = &sum[start..][..width];
            let [mean, r] = moments(s, self.norm);
            let xhat: Vec<f64> = s.iter().map(|s| (s - mean) * r).collect();
            let grad = |at: usize| by_norm.map_or(0.0, |grad| grad[at]);
            let gamma = |j: usize| gamma.map_or(0.0, |gamma| gamma[j]);
            let ghat: Vec<f64> = columns().map(|(j, at)| gamma(j) * grad(at)).collect();
            let average = match self.norm {
                Some(NormKind::Layer) => ghat.iter().sum::<f64>() / width as f64,
                _ => 0.0,
            };
            let product = dot(&ghat, &xhat) / width as f64;
            for (j, at) in columns() {
                h[at] = gamma(j) * xhat[j] + beta.map_or(0.0, |beta| beta[j]);
                ds[at] = by_sum.map_or(0.0, |grad| grad[at])
                    + r * (ghat[j] - average - xhat[j] * product);
                da[at] = factor(row, j) * ds[at];
                dbias[j] += da[at];
                dgamma[j] += grad(at) * xhat[j];
                dbeta[j] += grad(at);
            }
        }
        let all = [
            (has_sum, sum),
            (has_norm, h),
            (true, ds),
            (self.branch, da),
            (self.bias, dbias),
            (has_norm, dgamma),
            (self.beta, dbeta),
        ];
        let there = all.into_iter().filter(|(is_there, _)| *is_there);
        there.map(|(_, values)| values).collect()
    }
}

/// Makes a case, with dtypes of the stream, the branch, the parameters and the norm.
fn case(kind: Kind, shape: [usize; 3], seed: u64) -> Case<'static> {
    let [a, b, width] = shape;
    let mut rng = seeded(seed);
    let mut numbers = |count: usize, center: f64| -> Vec<f64> {
        let numbers = uniform(&mut rng, count, 1.0).into_iter();
        numbers.map(|x| center + x).collect()
    };
    let (rows, row) = (a * b * width, [width]);
    let [stream, branch, bias] =
        [(rows, 0.5), (rows, 0.0), (width, 0.0)].map(|(n, c)| numbers(n, c));
    let [gamma, beta, by_sum, by_norm] =
        [(width, 1.0), (width, 0.0), (rows, 0.0), (rows, 0.0)].map(|(n, c)| numbers(n, c));
    let has_norm = kind.norm.is_some();
    let (call, judge) = (kind.clone(), kind.clone());
    let case = Case::new(
        format!("{shape:?}, seed {seed}"),
        move |x| call.call(x).into_iter().flatten().map(Made::from).collect(),
        move |x, grads| judge.solve(width, x, grads),
    );
    let case = case
        .input("stream", 0, &shape, stream)
        .input_if(kind.branch, "branch", 1, &shape, branch)
        .input_if(kind.bias, "bias", 2, &row, bias)
        .input_if(has_norm, "gamma", 2, &row, gamma)
        .input_if(kind.beta, "beta", 2, &row, beta);
    let case = match kind.results()[0] {
        true => case.result("sum", 0, &shape, kind.used[0].then_some(by_sum)),
        false => case,
    };
    match has_norm {
        true => case.result("h", 3, &shape, kind.used[1].then_some(by_norm)),
        false => case,
    }
}

/// Compares a call. The gradients with respect to the stream, the branch and its bias are differences of terms of up to `r |ĝ|`: a row of one
/// element has r = `ε^−½`, and gradient 0.
fn check(
    kind: &Kind,
    case: &Case<'_>,
    width: usize,
    device: &Device,
    dtypes: [DType; 4],
    tolerance: f64,
) {
    let compared = case.compared(device, &dtypes);
    let [has_sum, has_norm] = kind.results();
    let first = usize::from(has_sum) + usize::from(has_norm);
    let differences = first..first + 1 + usize::from(kind.branch) + usize::from(kind.bias);
    let terms = match kind.used[1] && has_norm {
        true => case.numbers(&dtypes, |x, grads| {
            let of_results = kind.solve(width, x, grads);
            let sum = if has_sum { &of_results[0] } else { &x[0] };
            let gamma = &x[1 + usize::from(kind.branch) + usize::from(kind.bias)];
            let grad = &grads[usize::from(has_sum)];
            let rows = sum.chunks(width).zip(grad.chunks(width));
            let terms = rows.map(|(s, grad)| {
                let terms: Vec<f64> = grad.iter().zip(gamma).map(|(g, gamma)| g * gamma).collect();
                largest(&terms) * moments(s, kind.norm)[1]
            });
            terms.fold(0.0, f64::max)
        }),
        false => 0.0,
    };
    for (index, (what, got, expected)) in compared.into_iter().enumerate() {
        let terms = terms * f64::from(differences.contains(&index));
        assert_close_to(terms, &what, got, &expected, tolerance);
    }
}

/// Shapes with many numbers of rows and widths: single, ragged, wider than a plane's registers, more rows than one step of all cubes, and wider than
/// a cube's registers, where the reference runs.
const SHAPES: [[usize; 3]; 13] = [
    [1, 1, 1],
    [7, 1, 3],
    [3, 100, 33],
    [1, 7, 130],
    [2, 150, 64],
    [1, 7, 1000],
    [2, 3, 512],
    [1, 5, 2500],
    [5, 1000, 20],
    [1, 3, 1031],
    [2, 1, 16_384],
    [1, 9000, 12],
    [1, 2, 40_000],
];

/// Outputs and all gradients: both norms, with and without branch, bias, beta and dropout, with one output used and both.
pub fn residual_norm_equals_f64(devices: &[Device]) {
    for (index, shape) in SHAPES.into_iter().enumerate() {
        for index in [2 * index, 2 * index + 1] {
            let kind = kind(index);
            let case = case(kind.clone(), shape, 900 + index as u64);
            for (device, dtype, tolerance) in exact(devices) {
                check(&kind, &case, shape[2], device, [dtype; 4], tolerance);
            }
        }
    }
}

/// Without rows outputs are empty, and sums over rows are 0.
pub fn residual_norm_without_rows(devices: &[Device]) {
    for index in 0..7 {
        let case = case(kind(index), [2, 0, 6], 1);
        for device in devices {
            case.check_in(device, DType::F32, 0.0);
        }
    }
}

/// Half precision, and tensors of different dtypes, within the rounding of the rounded ones.
pub fn residual_norm_in_half_precision(devices: &[Device]) {
    let f32 = DType::F32;
    for (device, half) in halves(devices) {
        let [a, b, c] = [
            [f32, half, f32, half],
            [f32, half, half, f32],
            [half, f32, f32, f32],
        ];
        let calls = [[half; 4], a, b, c];
        for (index, dtypes) in calls.into_iter().enumerate() {
            for shape in [[2, 20, 136], [1, 30, 33]] {
                let kind = kind(index + 7);
                let case = case(kind.clone(), shape, 70 + index as u64);
                check(&kind, &case, shape[2], device, dtypes, 3.0 * unit(half));
            }
        }
    }
    // A stream in f64 with parameters and a norm in f32.
    for device in with(devices, DType::F64) {
        let (kind, shape) = (kind(1), [1, 30, 36]);
        let case = case(kind.clone(), shape, 5);
        check(&kind, &case, 36, device, [DType::F64, f32, f32, f32], 1e-6);
    }
}

/// Equal bits whatever the strides, and frozen inputs; compilers may contract other products in those kernels.
pub fn residual_norm_bits_and_constants(devices: &[Device]) {
    for index in [0, 2, 8, 12] {
        case(kind(index), [6, 50, 24], 3).gives_the_same_bits(devices, 0.0);
    }
    for kind in [WHOLE, kind(5)] {
        case(kind, [2, 9, 10], 4).has_constants(devices, 1e-6);
    }
}

/// A chain of three, like in a model: each takes the stream of the one before, with and without gradient checkpointing.
pub fn residual_norms_in_a_chain(devices: &[Device]) {
    let shape = [2, 3, 5];
    let stream = numbers(8, 30);
    let mut ran = 0;
    for (plain, dtype, _) in exact(devices) {
        ran += 1;
        let loss = |device: &Device, stream: Tensor<3>| {
            let row = |seed| tensor::<1>(&numbers(seed, 5), [5], device, dtype);
            let branch = tensor::<3>(&numbers(9, 30), shape, device, dtype);
            let (mut stream, mut branch) = (stream, branch);
            let mut total = Tensor::<1>::zeros([1], (device, dtype));
            for index in 0..3 {
                let dropout = ElementDropout::new(0.2, 3, index);
                let params = NormParams::new(row(11) + 1.0).beta(row(12));
                let mut options = AddNormOptions::default().epsilon(EPSILON);
                options.dropout = Some(dropout);
                let residual = Some(Residual::new(branch).bias(row(10)));
                let (sum, normed) = add_norm(stream, residual, params, &options).unwrap();
                total = total + normed.clone().powi_scalar(3).sum();
                (stream, branch) = (sum, normed.tanh());
            }
            total + stream.powi_scalar(2).sum()
        };
        let [found, checkpointed] = tracked(plain).map(|device| {
            let leaf = tensor(&stream, shape, &device, dtype).require_grad();
            let grads = loss(&device, leaf.clone()).backward();
            read(leaf.grad(&grads).unwrap())
        });
        // Burn's fusion fuses other operations around the norms if some are recomputed.
        assert_close("recomputed", found, &to_f64(checkpointed), 1e-5);
    }
    assert_ran("residual_norms_in_a_chain", ran);
}

/// Plans describe in words what will run.
pub fn residual_norm_plans(devices: &[Device]) {
    for device in devices {
        let stream = Tensor::<2>::zeros([300, 512], device);
        let params = NormParams::new(Tensor::ones([512], device));
        let branch = Residual::new(stream.clone());
        let options = AddNormOptions::default();
        let plan = options.explain(&stream, Some(&branch), &params).unwrap();
        let wide = Tensor::<2>::zeros([2, 40_000], device);
        let of_wide = NormParams::new(Tensor::ones([40_000], device));
        let of_wide = options.explain(&wide, None, &of_wide).unwrap();
        assert!(!of_wide.is_kernels(), "{of_wide}");
        let kernels = is_cube(device) && !uses_reference();
        assert_eq!(plan.is_kernels(), kernels, "{plan}");
        let says_why = of_wide.to_string().contains("a row's numbers");
        assert!(!kernels || says_why, "{of_wide}");
        let words = ["primitives", "cubes"][usize::from(kernels)];
        assert!(plan.to_string().contains(words), "{plan}");
    }
}
