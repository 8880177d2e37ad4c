//! Residual norms against f64 loops.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_blocksparse::{
    Branch, Norm, NormParams, ResidualNormOptions, StreamDropout, norm, residual_add,
    residual_norm, residual_norm_plan,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::compare::{assert_close, assert_close_to, to_f64};
use crate::devices::{assert_ran, exact_dtypes, half_dtypes, supports};

/// Names of a call's results, in the order of [`Problem::solve`] and [`Problem::run`].
const NAMES: [&str; 7] = [
    "the stream",
    "h",
    "dstream",
    "dbranch",
    "dbias",
    "dgamma",
    "dbeta",
];

/// The dtypes of a call.
#[derive(Clone, Copy, Debug)]
struct Types {
    stream: DType,
    branch: DType,
    params: DType,
    normed: DType,
}

impl Types {
    fn all(dtype: DType) -> Self {
        Self {
            stream: dtype,
            branch: dtype,
            params: dtype,
            normed: dtype,
        }
    }
}

/// A call, with numbers in f64.
#[derive(Clone, Debug)]
struct Problem {
    shape: [usize; 3],
    /// None: the sum alone.
    norm: Option<Norm>,
    epsilon: f64,
    dropout: Option<StreamDropout>,
    stream: Vec<f64>,
    branch: Option<Vec<f64>>,
    bias: Option<Vec<f64>>,
    gamma: Vec<f64>,
    beta: Option<Vec<f64>>,
    /// Of a loss by the stream and by h; None: not used.
    grad_sum: Option<Vec<f64>>,
    grad_normed: Option<Vec<f64>>,
}

impl Problem {
    /// A layer norm of a stream and a branch with a bias, all of whose outputs are used.
    fn new(shape: [usize; 3], seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let [a, b, width] = shape;
        let mut numbers = |count: usize, center: f64| -> Vec<f64> {
            let mut number = || center + 2.0 * rng.random::<f64>() - 1.0;
            (0..count).map(|_| number()).collect()
        };
        let count = a * b * width;
        Self {
            shape,
            norm: Some(Norm::Layer),
            epsilon: 1e-3,
            dropout: None,
            stream: numbers(count, 0.5),
            branch: Some(numbers(count, 0.0)),
            bias: Some(numbers(width, 0.0)),
            gamma: numbers(width, 1.0),
            beta: Some(numbers(width, 0.0)),
            grad_sum: Some(numbers(count, 0.0)),
            grad_normed: Some(numbers(count, 0.0)),
        }
    }

    /// Another of the calls that there are.
    fn varied(mut self, index: usize) -> Self {
        if index % 2 == 1 {
            self.norm = Some(Norm::Rms);
        }
        if !index.is_multiple_of(3) {
            self.dropout = Some(StreamDropout::new(0.3, index as u64 + (5 << 33), 7));
        }
        if index % 4 == 1 {
            self.bias = None;
        }
        if index % 3 == 1 {
            self.beta = None;
        }
        match index % 7 {
            2 => self.grad_sum = None,
            3 => self.grad_normed = None,
            4 => (self.branch, self.bias) = (None, None),
            5 => (self.norm, self.grad_normed, self.beta) = (None, None, None),
            6 => (self.branch, self.bias, self.grad_sum) = (None, None, None),
            _ => {}
        }
        self
    }

    /// Rounds all numbers to the dtypes they will be in.
    fn rounded(mut self, types: Types) -> Self {
        let round = |numbers: Vec<f64>, dtype: DType| -> Vec<f64> {
            let count = numbers.len();
            to_f64(TensorData::new(numbers, [count]).convert_dtype(dtype))
        };
        self.stream = round(self.stream, types.stream);
        self.branch = self.branch.map(|branch| round(branch, types.branch));
        self.bias = self.bias.map(|bias| round(bias, types.params));
        self.gamma = round(self.gamma, types.params);
        self.beta = self.beta.map(|beta| round(beta, types.params));
        self.grad_sum = self.grad_sum.map(|grad| round(grad, types.stream));
        self.grad_normed = self.grad_normed.map(|grad| round(grad, types.normed));
        self
    }

    /// The results, as far as there are.
    /// The largest of the terms whose differences the gradient by the stream is: r |ĝ|. A row of one number has an r of `ε^−½`, and a gradient of 0.
    fn largest_term(&self) -> f64 {
        let [_, _, width] = self.shape;
        let Some(grad) = self.grad_normed.as_ref().filter(|_| self.norm.is_some()) else {
            return 0.0;
        };
        let [Some(sum), ..] = self.solve() else {
            return 0.0;
        };
        let rows = sum.chunks(width.max(1)).zip(grad.chunks(width.max(1)));
        rows.map(|(s, grad)| {
            let mean = match self.norm {
                Some(Norm::Layer) => s.iter().sum::<f64>() / width as f64,
                _ => 0.0,
            };
            let variance = s.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / width as f64;
            let terms = grad.iter().zip(&self.gamma);
            let largest = terms
                .map(|(g, gamma)| (g * gamma).abs())
                .fold(0.0, f64::max);
            largest * (variance + self.epsilon).powf(-0.5)
        })
        .fold(0.0, f64::max)
    }

    fn solve(&self) -> [Option<Vec<f64>>; 7] {
        let [a, b, width] = self.shape;
        let (rows, d) = (a * b, width as f64);
        let factor = |row: usize, column: usize| match self.dropout {
            None => 1.0,
            Some(dropout) if dropout.keeps(row, column) => 1.0 / (1.0 - dropout.probability),
            Some(_) => 0.0,
        };
        let mut sum = self.stream.clone();
        let (mut h, mut ds) = (vec![0.0; rows * width], vec![0.0; rows * width]);
        let mut da = ds.clone();
        let [mut dbias, mut dgamma, mut dbeta] = [(); 3].map(|_| vec![0.0; width]);
        for row in 0..rows {
            let of_row = row * width..(row + 1) * width;
            if let Some(branch) = &self.branch {
                for (j, at) in of_row.clone().enumerate() {
                    let bias = self.bias.as_ref().map_or(0.0, |bias| bias[j]);
                    sum[at] += factor(row, j) * (branch[at] + bias);
                }
            }
            let s = &sum[of_row.clone()];
            let mean = match self.norm {
                Some(Norm::Layer) => s.iter().sum::<f64>() / d,
                _ => 0.0,
            };
            let variance = s.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / d;
            let r = (variance + self.epsilon).powf(-0.5);
            let xhat: Vec<f64> = s.iter().map(|s| (s - mean) * r).collect();
            let grad = |at: usize| self.grad_normed.as_ref().map_or(0.0, |grad| grad[at]);
            let ghat: Vec<f64> = (of_row.clone().enumerate())
                .map(|(j, at)| self.gamma[j] * grad(at))
                .collect();
            let average = match self.norm {
                Some(Norm::Layer) => ghat.iter().sum::<f64>() / d,
                _ => 0.0,
            };
            let product = ghat.iter().zip(&xhat).map(|(g, x)| g * x).sum::<f64>() / d;
            for (j, at) in of_row.enumerate() {
                let beta = self.beta.as_ref().map_or(0.0, |beta| beta[j]);
                h[at] = self.gamma[j] * xhat[j] + beta;
                ds[at] = self.grad_sum.as_ref().map_or(0.0, |grad| grad[at])
                    + r * (ghat[j] - average - xhat[j] * product);
                da[at] = factor(row, j) * ds[at];
                dbias[j] += da[at];
                dgamma[j] += grad(at) * xhat[j];
                dbeta[j] += grad(at);
            }
        }
        let norm = self.norm.is_some();
        [
            Some(sum),
            norm.then_some(h),
            Some(ds),
            self.branch.as_ref().map(|_| da),
            self.bias.as_ref().map(|_| dbias),
            norm.then_some(dgamma),
            self.beta.as_ref().map(|_| dbeta),
        ]
    }

    fn options(&self, types: Types) -> ResidualNormOptions {
        let mut options = ResidualNormOptions::default()
            .norm(self.norm.unwrap_or_default())
            .epsilon(self.epsilon)
            .dtype(FloatDType::from(types.normed));
        options.dropout = self.dropout;
        options
    }

    fn inputs(&self, device: &Device, types: Types) -> Inputs {
        let [.., width] = self.shape;
        let row = |numbers: &Vec<f64>| {
            let data = TensorData::new(numbers.clone(), [width]);
            Tensor::<1>::from_data(data, (device, types.params))
        };
        Inputs {
            stream: self.matrix(&self.stream, device, types.stream),
            branch: (self.branch.as_ref()).map(|x| self.matrix(x, device, types.branch)),
            bias: self.bias.as_ref().map(row),
            gamma: row(&self.gamma),
            beta: self.beta.as_ref().map(row),
        }
    }

    fn matrix(&self, numbers: &[f64], device: &Device, dtype: DType) -> Tensor<3> {
        let data = TensorData::new(numbers.to_vec(), self.shape);
        Tensor::from_data(data, (device, dtype))
    }

    /// The outputs of a call.
    fn call(&self, inputs: Inputs, types: Types) -> (Tensor<3>, Option<Tensor<3>>) {
        let branch = inputs.branch.map(|x| match inputs.bias {
            Some(bias) => Branch::new(x).bias(bias),
            None => Branch::new(x),
        });
        if self.norm.is_none() {
            let branch = branch.expect("a branch to be added");
            let sum = residual_add(inputs.stream, branch, self.dropout);
            return (sum.unwrap(), None);
        }
        let mut params = NormParams::new(inputs.gamma);
        params.beta = inputs.beta;
        let options = self.options(types);
        if branch.is_none() && self.grad_sum.is_none() {
            let stream = inputs.stream.clone();
            return (stream, Some(norm(inputs.stream, params, &options).unwrap()));
        }
        let (sum, normed) = residual_norm(inputs.stream, branch, params, &options).unwrap();
        (sum, Some(normed))
    }

    /// The results on a device, with autodiff.
    fn run(&self, device: &Device, types: Types) -> [Option<TensorData>; 7] {
        let inputs = self.inputs(device, types).require_grad();
        self.results(inputs.clone(), inputs, device, types)
    }

    /// As [`run`](Self::run), where the call is of `inputs`, made of `leaves`.
    fn results(
        &self,
        inputs: Inputs,
        leaves: Inputs,
        device: &Device,
        types: Types,
    ) -> [Option<TensorData>; 7] {
        let (sum, normed) = self.call(inputs, types);
        let sums = match types.stream {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let by = |x: &Tensor<3>, grad: &Option<Vec<f64>>, dtype: DType| {
            let grad = self.matrix(grad.as_ref()?, device, dtype);
            Some((x.clone() * grad).sum().cast(sums))
        };
        let by_sum = by(&sum, &self.grad_sum, types.stream);
        let by_normed =
            (normed.as_ref()).and_then(|normed| by(normed, &self.grad_normed, types.normed));
        let loss = match (by_sum, by_normed) {
            (Some(a), Some(b)) => a + b,
            (a, b) => a.or(b).expect("an output that is used"),
        };
        let grads = loss.backward();
        let of = |x: &Tensor<3>| x.grad(&grads).map(Tensor::into_data);
        let of_row = |x: &Tensor<1>| x.grad(&grads).map(Tensor::into_data);
        [
            Some(sum.inner().into_data()),
            normed.map(|normed| normed.inner().into_data()),
            of(&leaves.stream),
            leaves.branch.as_ref().and_then(of),
            leaves.bias.as_ref().and_then(of_row),
            of_row(&leaves.gamma),
            leaves.beta.as_ref().and_then(of_row),
        ]
    }

    fn check(&self, what: &str, device: &Device, types: Types, tolerance: f64) {
        let device = device.clone().autodiff();
        let got = self.run(&device, types);
        let dtypes = [
            types.stream,
            types.normed,
            types.stream,
            types.branch,
            types.params,
            types.params,
            types.params,
        ];
        let largest = self.largest_term();
        for (index, (got, expected)) in got.into_iter().zip(self.solve()).enumerate() {
            let what = format!("{what}, {device:?}, {types:?}: {}", NAMES[index]);
            // By the stream, the branch and its bias.
            let terms = if (2..=4).contains(&index) {
                largest
            } else {
                0.0
            };
            match (got, expected) {
                (Some(got), Some(expected)) => {
                    assert_eq!(got.dtype(), dtypes[index], "{what}");
                    assert_close_to(terms, &what, got, &expected, tolerance);
                }
                (None, None) => {}
                (got, _) => panic!("{what}: there is one: {}", got.is_some()),
            }
        }
    }
}

#[derive(Clone)]
struct Inputs {
    stream: Tensor<3>,
    branch: Option<Tensor<3>>,
    bias: Option<Tensor<1>>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
}

impl Inputs {
    fn require_grad(self) -> Self {
        self.map(Tensor::require_grad, Tensor::require_grad)
    }

    fn map(
        self,
        matrix: impl Fn(Tensor<3>) -> Tensor<3>,
        row: impl Fn(Tensor<1>) -> Tensor<1>,
    ) -> Self {
        Self {
            stream: matrix(self.stream),
            branch: self.branch.map(&matrix),
            bias: self.bias.map(&row),
            gamma: row(self.gamma),
            beta: self.beta.map(&row),
        }
    }
}

/// Shapes with rows and widths of all kinds: single, ragged, wider than a plane's registers, more rows than one step of all cubes,
/// and wider than a cube's registers, where the reference runs.
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
        for half in 0..2 {
            let index = 2 * index + half;
            let problem = Problem::new(shape, 900 + index as u64).varied(index);
            for device in devices {
                for (dtype, tolerance) in exact_dtypes(device) {
                    let what = format!("{index}, {shape:?}");
                    problem.check(&what, device, Types::all(dtype), tolerance);
                }
            }
        }
    }
}

/// Rows that there are not: outputs are empty, and sums over rows 0.
pub fn residual_norm_without_rows(devices: &[Device]) {
    for index in 0..7 {
        let problem = Problem::new([2, 0, 6], 1).varied(index);
        for device in devices {
            problem.check("no rows", device, Types::all(DType::F32), 0.0);
        }
    }
}

/// Half precision, and tensors of different dtypes, within the rounding of what is rounded.
pub fn residual_norm_in_half_precision(devices: &[Device]) {
    for device in devices {
        for half in half_dtypes(device) {
            let unit = match half {
                DType::BF16 => 2f64.powi(-8),
                _ => 2f64.powi(-11),
            };
            let f32 = DType::F32;
            let mixed = |stream, branch, params, normed| Types {
                stream,
                branch,
                params,
                normed,
            };
            let calls = [
                Types::all(half),
                mixed(f32, half, f32, half),
                mixed(f32, half, half, f32),
                mixed(half, f32, f32, f32),
            ];
            for (index, types) in calls.into_iter().enumerate() {
                for shape in [[2, 20, 136], [1, 30, 33]] {
                    let problem = Problem::new(shape, 70 + index as u64).varied(index + 7);
                    let problem = problem.rounded(types);
                    problem.check("half", device, types, 3.0 * unit);
                }
            }
        }
        // A stream in f64 beside parameters and a norm in f32.
        if supports(device, DType::F64) {
            let types = Types {
                stream: DType::F64,
                ..Types::all(DType::F32)
            };
            let problem = Problem::new([1, 30, 36], 5).varied(1).rounded(types);
            problem.check("f64 stream", device, types, 1e-6);
        }
    }
}

/// The same bits twice, whatever the strides of the inputs, and with gradient checkpointing through steps that it computes again.
pub fn residual_norm_gives_the_same_bits(devices: &[Device]) {
    let types = Types::all(DType::F32);
    let bytes = |results: [Option<TensorData>; 7]| {
        results.map(|data| data.map(|data| data.as_bytes().to_vec()))
    };
    for index in [0, 2, 8, 12] {
        let problem = Problem::new([6, 50, 24], 3).varied(index);
        for plain in devices {
            let device = plain.clone().autodiff();
            let first = bytes(problem.run(&device, types));
            assert_eq!(first, bytes(problem.run(&device, types)), "{plain:?}");
            let checkpointing = plain.clone().autodiff().gradient_checkpointing();
            for device in [device, checkpointing] {
                let leaves = problem.inputs(&device, types).require_grad();
                let inputs = leaves.clone().map(
                    |x| {
                        let stored = (x * 2.0).swap_dims(0, 2).reshape([24, 50, 6]);
                        stored.swap_dims(0, 2) * 0.5
                    },
                    |row| row * 2.0 * 0.5,
                );
                let again = problem.results(inputs, leaves, &device, types);
                assert_eq!(first, bytes(again), "{device:?}, {index}");
            }
        }
    }
}

/// Inputs that are not tracked get no gradient, and change no other; the stream is used on behind the norm, so that it meets both gradients.
pub fn residual_norm_constants(devices: &[Device]) {
    let types = Types::all(DType::F32);
    for plain in devices {
        let device = plain.clone().autodiff();
        for problem in [
            Problem::new([2, 9, 10], 4),
            Problem::new([2, 9, 10], 4).varied(5),
        ] {
            let all = problem.run(&device, types);
            for bits in 1u32..31 {
                let track = |bit: u32| bits >> bit & 1 == 1;
                let (tracked, constants) = (
                    problem.inputs(&device, types).require_grad(),
                    problem.inputs(plain, types),
                );
                let inputs = Inputs {
                    stream: [constants.stream, tracked.stream][usize::from(track(0))].clone(),
                    branch: [constants.branch, tracked.branch][usize::from(track(1))].clone(),
                    bias: [constants.bias, tracked.bias][usize::from(track(2))].clone(),
                    gamma: [constants.gamma, tracked.gamma][usize::from(track(3))].clone(),
                    beta: [constants.beta, tracked.beta][usize::from(track(4))].clone(),
                };
                // A sum without a bias: stream and branch.
                if problem.norm.is_none() && bits & 3 == 0 {
                    continue;
                }
                let some = problem.results(inputs.clone(), inputs, &device, types);
                for (index, (some, all)) in some.into_iter().zip(&all).enumerate() {
                    let expected = all
                        .as_ref()
                        .filter(|_| index < 2 || track(index as u32 - 2));
                    let what = format!("{bits:b}: {}", NAMES[index]);
                    match (some, expected) {
                        // Another kernel, whose compiler may contract other products.
                        (Some(some), Some(expected)) => {
                            assert_close(&what, some, &to_f64(expected.clone()), 1e-6);
                        }
                        (some, expected) => {
                            assert_eq!(some.is_some(), expected.is_some(), "{what}");
                        }
                    }
                }
            }
        }
        // Nothing tracked: nothing to be differentiated.
        let problem = Problem::new([2, 9, 10], 4);
        let (sum, normed) = problem.call(problem.inputs(&device, types), types);
        assert!(!sum.is_require_grad() && !normed.unwrap().is_require_grad());
        let (sum, normed) = problem.call(problem.inputs(plain, types), types);
        assert!(!sum.device().is_autodiff() && !normed.unwrap().device().is_autodiff());
    }
}

/// A chain of three, as a model has it: each takes the stream of the one before, with and without gradient checkpointing, and f64 differences.
pub fn residual_norms_in_a_chain(devices: &[Device]) {
    let mut ran = 0;
    for plain in devices {
        for (dtype, tolerance) in [(DType::F64, 1e-6), (DType::F32, 1e-5)] {
            if !supports(plain, dtype) {
                continue;
            }
            ran += 1;
            let types = Types::all(dtype);
            let problem = Problem::new([2, 3, 5], 8);
            let loss = |device: &Device, inputs: Inputs| {
                let mut inputs = inputs;
                let mut total = Tensor::<1>::zeros([1], (device, dtype));
                for index in 0..3 {
                    let mut call = problem.clone();
                    call.dropout = Some(StreamDropout::new(0.2, 3, index));
                    let (sum, normed) = call.call(inputs.clone(), types);
                    let normed = normed.unwrap();
                    total = total + normed.clone().powi_scalar(3).sum();
                    inputs.stream = sum;
                    inputs.branch = Some(normed.tanh());
                }
                total + inputs.stream.powi_scalar(2).sum()
            };
            let grads = |device: Device| {
                let leaves = problem.inputs(&device, types).require_grad();
                let grads = loss(&device, leaves.clone()).backward();
                to_f64(leaves.stream.grad(&grads).unwrap().into_data())
            };
            let found = grads(plain.clone().autodiff());
            let checkpointed = grads(plain.clone().autodiff().gradient_checkpointing());
            assert_eq!(found, checkpointed);
            if dtype != DType::F64 {
                continue;
            }
            let mut differences = Vec::new();
            for index in 0..problem.stream.len() {
                let at = |step: f64| {
                    let mut moved = problem.clone();
                    moved.stream[index] += step;
                    let inputs = moved.inputs(plain, types);
                    to_f64(loss(plain, inputs).into_data())[0]
                };
                differences.push((at(1e-5) - at(-1e-5)) / 2e-5);
            }
            let data = TensorData::new(found, [problem.stream.len()]);
            assert_close("a chain", data, &differences, tolerance);
        }
    }
    assert_ran("residual_norms_in_a_chain", ran);
}

/// What will run is said before, in words.
pub fn residual_norm_plans(devices: &[Device]) {
    for device in devices {
        let stream = Tensor::<2>::zeros([300, 512], device);
        let params = NormParams::new(Tensor::ones([512], device));
        let branch = Branch::new(stream.clone());
        let options = ResidualNormOptions::default();
        let plan = residual_norm_plan(&stream, Some(&branch), &params, &options).unwrap();
        let wide = Tensor::<2>::zeros([2, 40_000], device);
        let of_wide = NormParams::new(Tensor::ones([40_000], device));
        let of_wide = residual_norm_plan(&wide, None, &of_wide, &options).unwrap();
        assert!(!of_wide.is_kernels(), "{of_wide}");
        let name = format!("{device:?}");
        let kernels = ["Wgpu", "Cuda"].iter().any(|kind| name.contains(kind));
        assert!(
            plan.is_kernels() == kernels
                || std::env::var_os("BURN_BLOCKSPARSE_REFERENCE").is_some()
        );
        let text = plan.to_string();
        assert!(
            !plan.is_kernels() || of_wide.to_string().contains("a row's numbers"),
            "{of_wide}"
        );
        assert!(
            text.contains(if plan.is_kernels() {
                "cubes"
            } else {
                "primitives"
            }),
            "{text}"
        );
    }
}
