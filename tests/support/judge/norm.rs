//! Residual norms in f64 loops, and the calls that are compared with them.

use burn::tensor::FloatDType;
use burn_fused_ops::{
    AddNormOptions, ElementDropout, NormKind, NormParams, Residual, add_norm, norm, residual_add,
};

use crate::prelude::*;
use crate::training::results::*;

/// Names of a call's results, in the order of [`Problem::solve`] and [`Problem::run`].
pub const NAMES: [&str; 7] = [
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
pub struct Types {
    pub stream: DType,
    pub branch: DType,
    pub params: DType,
    pub normed: DType,
}

impl Types {
    pub fn all(dtype: DType) -> Self {
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
pub struct Problem {
    pub shape: [usize; 3],
    /// None: the sum alone.
    pub norm: Option<NormKind>,
    pub epsilon: f64,
    pub dropout: Option<ElementDropout>,
    pub stream: Vec<f64>,
    pub branch: Option<Vec<f64>>,
    pub bias: Option<Vec<f64>>,
    pub gamma: Vec<f64>,
    pub beta: Option<Vec<f64>>,
    /// Of a loss by the stream and by h; None: not used.
    pub grad_sum: Option<Vec<f64>>,
    pub grad_normed: Option<Vec<f64>>,
}

impl Problem {
    /// A layer norm of a stream and a branch with a bias, all of whose outputs are used.
    pub fn new(shape: [usize; 3], seed: u64) -> Self {
        let mut rng = seeded(seed);
        let [a, b, width] = shape;
        let mut numbers = |count: usize, center: f64| -> Vec<f64> {
            let number = |_| center + 2.0 * rng.random::<f64>() - 1.0;
            (0..count).map(number).collect()
        };
        let count = a * b * width;
        Self {
            shape,
            norm: Some(NormKind::Layer),
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
    pub fn varied(mut self, index: usize) -> Self {
        if index % 2 == 1 {
            self.norm = Some(NormKind::Rms);
        }
        if !index.is_multiple_of(3) {
            self.dropout =
                Some(ElementDropout::new(0.3, index as u64 + (5 << 33), 7).with_first_row(3));
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
    pub fn rounded(mut self, types: Types) -> Self {
        let round = |numbers: Option<&mut Vec<f64>>, dtype: DType| {
            numbers
                .into_iter()
                .for_each(|numbers| round_to(numbers, dtype));
        };
        round(Some(&mut self.stream), types.stream);
        round(self.branch.as_mut(), types.branch);
        round(self.bias.as_mut(), types.params);
        round(Some(&mut self.gamma), types.params);
        round(self.beta.as_mut(), types.params);
        round(self.grad_sum.as_mut(), types.stream);
        round(self.grad_normed.as_mut(), types.normed);
        self
    }

    /// The largest of the terms whose differences the gradient by the stream is: r |ĝ|. A row of one number has an r of `ε^−½`, and a gradient of 0.
    pub fn largest_term(&self) -> f64 {
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
                Some(NormKind::Layer) => s.iter().sum::<f64>() / width as f64,
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

    /// The results, as far as there are.
    pub fn solve(&self) -> Judged<7> {
        let [a, b, width] = self.shape;
        let (rows, d) = (a * b, width as f64);
        let factor = |row: usize, column: usize| match self.dropout {
            None => 1.0,
            Some(dropout) if dropout.keeps(row, column) => dropout.factor(),
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
                Some(NormKind::Layer) => s.iter().sum::<f64>() / d,
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
                Some(NormKind::Layer) => ghat.iter().sum::<f64>() / d,
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

    pub fn options(&self, types: Types) -> AddNormOptions {
        let mut options = AddNormOptions::default()
            .norm(self.norm.unwrap_or_default())
            .epsilon(self.epsilon)
            .dtype(FloatDType::from(types.normed));
        options.dropout = self.dropout;
        options
    }

    pub fn inputs(&self, device: &Device, types: Types) -> Inputs {
        let [.., width] = self.shape;
        let row = |numbers: &Vec<f64>| tensor(numbers, [width], device, types.params);
        Inputs {
            stream: self.matrix(&self.stream, device, types.stream),
            branch: (self.branch.as_ref()).map(|x| self.matrix(x, device, types.branch)),
            bias: self.bias.as_ref().map(row),
            gamma: row(&self.gamma),
            beta: self.beta.as_ref().map(row),
        }
    }

    pub fn matrix(&self, numbers: &[f64], device: &Device, dtype: DType) -> Tensor<3> {
        tensor(numbers, self.shape, device, dtype)
    }

    /// The outputs of a call.
    pub fn call(&self, inputs: Inputs, types: Types) -> (Tensor<3>, Option<Tensor<3>>) {
        let branch = inputs.branch.map(|x| match inputs.bias {
            Some(bias) => Residual::new(x).bias(bias),
            None => Residual::new(x),
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
        let (sum, normed) = add_norm(inputs.stream, branch, params, &options).unwrap();
        (sum, Some(normed))
    }

    /// The results on a device, with autodiff.
    pub fn run(&self, device: &Device, types: Types) -> Given<7> {
        let inputs = self.inputs(device, types).require_grad();
        self.results(inputs.clone(), inputs, device, types)
    }

    /// As [`run`](Self::run), where the call is of `inputs`, made of `leaves`.
    pub fn results(
        &self,
        inputs: Inputs,
        leaves: Inputs,
        device: &Device,
        types: Types,
    ) -> Given<7> {
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
        [
            Some(sum.inner().into_data()),
            normed.map(|normed| normed.inner().into_data()),
            gradient(&leaves.stream, &grads),
            leaves.branch.as_ref().and_then(|x| gradient(x, &grads)),
            leaves.bias.as_ref().and_then(|x| gradient(x, &grads)),
            gradient(&leaves.gamma, &grads),
            leaves.beta.as_ref().and_then(|x| gradient(x, &grads)),
        ]
    }

    pub fn check(&self, what: &str, device: &Device, types: Types, tolerance: f64) {
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
        let what = format!("{what}, {device:?}, {types:?}");
        assert_results_near(&what, &NAMES, got, self.solve(), |index| {
            // By the stream, the branch and its bias.
            let terms = if (2..=4).contains(&index) {
                largest
            } else {
                0.0
            };
            (dtypes[index], tolerance, terms)
        });
    }
}

#[derive(Clone)]
pub struct Inputs {
    pub stream: Tensor<3>,
    pub branch: Option<Tensor<3>>,
    pub bias: Option<Tensor<1>>,
    pub gamma: Tensor<1>,
    pub beta: Option<Tensor<1>>,
}

impl Inputs {
    pub fn require_grad(self) -> Self {
        self.map(Tensor::require_grad, Tensor::require_grad)
    }

    pub fn map(
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
