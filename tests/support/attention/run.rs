//! Calls of attention on a device: a problem's tensors, and outputs and gradients by name.

use crate::prelude::*;

/// Results of a call, by name.
pub type Results = Vec<(&'static str, TensorData)>;

/// Returns q, k, v and the gradient with respect to out.
pub fn inputs(problem: &Problem, device: &Device, dtype: DType) -> [Tensor<4>; 4] {
    let sizes = problem.sizes;
    [
        tensor(&problem.q, sizes.q(), device, dtype),
        tensor(&problem.k, sizes.k(), device, dtype),
        tensor(&problem.v, sizes.v(), device, dtype),
        tensor(&problem.grad_out, sizes.out(), device, dtype),
    ]
}

/// Returns a problem's tensors besides q, k and v.
pub fn tensors(problem: &Problem, device: &Device, dtype: DType) -> AttentionTensors {
    let (sinks, bias) = (problem.sinks.as_ref(), problem.bias.as_ref());
    let table = problem.relative.as_ref();
    let mut tensors = AttentionTensors::default();
    tensors.sinks = sinks.map(|values| tensor(values, [values.len()], device, dtype));
    tensors.bias = bias.map(|bias| tensor(&bias.values, bias.shape, device, dtype));
    tensors.relative_bias = table.map(|table| tensor(&table.values, table.shape, device, dtype));
    tensors
}

pub fn require_grad(mut tensors: AttentionTensors) -> AttentionTensors {
    tensors.sinks = tensors.sinks.map(Tensor::require_grad);
    tensors.bias = tensors.bias.map(Tensor::require_grad);
    tensors.relative_bias = tensors.relative_bias.map(Tensor::require_grad);
    tensors
}

pub fn call_of<'a>(
    [q, k, v]: [&Tensor<4>; 3],
    layout: impl Into<Layout<'a>>,
    options: &AttentionOptions,
) -> SparseAttentionCall<'a> {
    let call = SparseAttentionCall::new(q.clone(), k.clone(), v.clone(), layout);
    call.options(options.clone())
}

pub fn attend<'a>(
    qkv: [&Tensor<4>; 3],
    layout: impl Into<Layout<'a>>,
    options: &AttentionOptions,
) -> Tensor<4> {
    call_of(qkv, layout, options).run().unwrap().out
}

/// Returns out and lse.
pub fn attend_with_lse<'a>(
    qkv: [&Tensor<4>; 3],
    layout: impl Into<Layout<'a>>,
    options: &AttentionOptions,
) -> (Tensor<4>, Tensor<3>) {
    call_of(qkv, layout, options).run_with_lse().unwrap()
}

/// Returns out and lse by name.
pub fn outputs((out, lse): (Tensor<4>, Tensor<3>)) -> Results {
    vec![("out", out.into_data()), ("lse", lse.into_data())]
}

/// Returns the text of a call's plan.
pub fn plan_of<'a>(
    qkv: [&Tensor<4>; 3],
    layout: impl Into<Layout<'a>>,
    options: &AttentionOptions,
) -> String {
    let plan = call_of(qkv, layout, options).explain();
    plan.unwrap().to_string()
}

/// Returns out, and the gradients of `sum(out · grad_out)` with respect to q, k and v.
pub fn with_gradients(out: Tensor<4>, grad_out: Tensor<4>, leaves: [Tensor<4>; 3]) -> Results {
    let grads = (out.clone() * grad_out).sum().backward();
    let [dq, dk, dv] = leaves.map(|x| x.grad(&grads).unwrap().into_data());
    vec![("out", out.into_data()), ("dq", dq), ("dk", dk), ("dv", dv)]
}

/// Returns the loss of a problem, `sum(out · grad_out) + sum(lse · grad_lse)`; without `grad_out` the first term is omitted.
pub fn loss_of(
    problem: &Problem,
    (out, grad_out): (&Tensor<4>, Option<Tensor<4>>),
    lse: &Tensor<3>,
) -> Tensor<1> {
    let grad_lse = tensor(&problem.grad_lse, lse.dims(), &lse.device(), lse.dtype());
    let loss = (lse.clone() * grad_lse).sum();
    match grad_out {
        Some(grad_out) => loss.clone() + (out.clone() * grad_out).sum().cast(loss.dtype()),
        None => loss,
    }
}

/// Returns outputs, and the gradients with respect to q, k, v and the further tensors.
pub fn by_name(
    made: (Tensor<4>, Tensor<3>),
    qkv: [Tensor<4>; 3],
    tensors: &AttentionTensors,
    grads: &Gradients,
) -> Results {
    let [dq, dk, dv] = qkv.map(|x| x.grad(grads).unwrap().into_data());
    let (sinks, bias) = (tensors.sinks.iter(), tensors.bias.iter());
    let table = tensors.relative_bias.iter();
    let mut results = outputs(made);
    results.extend([("dq", dq), ("dk", dk), ("dv", dv)]);
    results.extend(sinks.map(|x| ("dsinks", x.grad(grads).unwrap().into_data())));
    results.extend(bias.map(|x| ("dbias", x.grad(grads).unwrap().into_data())));
    results.extend(table.map(|x| ("drelative", x.grad(grads).unwrap().into_data())));
    results
}

/// Returns out, lse and the gradients of a problem's loss with respect to q, k and v.
pub fn differentiated(
    problem: &Problem,
    device: &Device,
    dtype: DType,
    attend: impl Fn(Tensor<4>, Tensor<4>, Tensor<4>) -> (Tensor<4>, Tensor<3>),
) -> Results {
    let [q, k, v, grad_out] = inputs(problem, device, dtype);
    let [q, k, v] = [q, k, v].map(Tensor::require_grad);
    let (out, lse) = attend(q.clone(), k.clone(), v.clone());
    let grads = loss_of(problem, (&out, Some(grad_out)), &lse).backward();
    by_name((out, lse), [q, k, v], &AttentionTensors::default(), &grads)
}

/// Returns the output and the gradients with respect to q, k and v.
pub fn run<'a>(
    problem: &Problem,
    layout: impl Into<Layout<'a>>,
    device: &Device,
    dtype: DType,
) -> Results {
    run_with(problem, layout, problem.asked(), device, dtype)
}

/// Like [`run`], with other options than the problem's.
pub fn run_with<'a>(
    problem: &Problem,
    layout: impl Into<Layout<'a>>,
    options: AttentionOptions,
    device: &Device,
    dtype: DType,
) -> Results {
    let [q, k, v, grad_out] = inputs(problem, device, dtype);
    let [q, k, v] = [q, k, v].map(Tensor::require_grad);
    let out = attend([&q, &k, &v], layout, &options);
    with_gradients(out, grad_out, [q, k, v])
}

/// Rounds a problem to a dtype, and panics if the error of a row of out or of a gradient exceeds the bound of its roundings.
pub fn check_rows<'a>(
    what: &str,
    problem: &mut Problem,
    layout: impl Into<Layout<'a>>,
    device: &Device,
    dtype: DType,
) {
    problem.round_to(dtype);
    let what = format!("{what}, {device:?}, {dtype:?}");
    let got = run(problem, layout, &device.clone().autodiff(), dtype);
    problem.solve().assert(&what, got, &[Near::Rows(dtype)]);
}

/// A call with loss `sum(out · grad_out) + sum(lse · grad_lse)`.
pub struct Call<'a, L = BlockLayout> {
    pub what: String,
    pub problem: &'a Problem,
    pub layout: L,
    pub mode: WeightsMode,
    /// Whether out is in the loss.
    pub use_out: bool,
}

impl<'a, L> Call<'a, L>
where
    for<'l> &'l L: Into<Layout<'l>>,
{
    pub fn new(what: impl Into<String>, problem: &'a Problem, layout: L) -> Self {
        Self {
            what: what.into(),
            problem,
            layout,
            mode: WeightsMode::default(),
            use_out: true,
        }
    }

    /// Sets what is stored for the backward pass.
    pub fn weights(self, mode: WeightsMode) -> Self {
        Self { mode, ..self }
    }

    /// Replaces the layout.
    pub fn over<M>(self, layout: M) -> Call<'a, M> {
        Call {
            what: self.what,
            problem: self.problem,
            layout,
            mode: self.mode,
            use_out: self.use_out,
        }
    }

    /// Compares everything in the exact dtypes of a device.
    pub fn check(&self, device: &Device) {
        for (dtype, tolerance) in exact_dtypes(device) {
            self.check_dtype(device, dtype, tolerance);
        }
    }

    pub fn check_dtype(&self, device: &Device, dtype: DType, tolerance: f64) {
        let answer = self.problem.solve();
        for (name, got) in self.run(device, dtype) {
            let expected = answer.result(name);
            // The gradients of a row sum to 0, so the error is relative to its terms.
            let terms = match name {
                "drelative" => expected.terms,
                _ => 0.0,
            };
            let what = format!("{}, {device:?}, {dtype:?}: {name}", self.what);
            assert_close_to(terms, &what, got.clone(), expected.values, tolerance);
            assert_rows(&what, got, &expected, dtype);
        }
    }

    /// Returns every output and every gradient, by name.
    pub fn run(&self, device: &Device, dtype: DType) -> Results {
        let (problem, device) = (self.problem, &device.clone().autodiff());
        let [q, k, v, grad_out] = inputs(problem, device, dtype);
        let [q, k, v] = [q, k, v].map(Tensor::require_grad);
        let tensors = require_grad(tensors(problem, device, dtype));
        let options = problem.asked().weights(self.mode);
        let call = call_of([&q, &k, &v], &self.layout, &options).tensors(tensors.clone());
        let (out, lse) = call.run_with_lse().unwrap();
        let grad_out = self.use_out.then_some(grad_out);
        let grads = loss_of(problem, (&out, grad_out), &lse).backward();
        by_name((out, lse), [q, k, v], &tensors, &grads)
    }
}

/// Returns the tolerance of half-precision results for inputs of size 1: some roundings of the largest value.
pub fn half_tolerance(dtype: DType) -> f64 {
    if dtype == DType::F16 { 1e-2 } else { 8e-2 }
}

/// Returns the half-precision dtypes of a device, each with [`half_tolerance`].
pub fn half_bounds(device: &Device) -> Vec<(DType, f64)> {
    let dtypes = half_dtypes(device).into_iter();
    dtypes.map(|dtype| (dtype, half_tolerance(dtype))).collect()
}

/// Returns a predicate of a host layout's pairs, by batch entry, head, query and key.
pub fn pairs_of(layout: &BlockLayout) -> impl Fn(usize, usize, usize, usize) -> bool + use<> {
    let (entries, heads) = (layout.batch().unwrap_or(1), layout.heads());
    let all = (0..entries).flat_map(|entry| (0..heads).map(move |head| (entry, head)));
    let dense: Vec<_> = all.map(|(e, h)| layout.to_dense_batch(e, h)).collect();
    move |batch, head, i, j| dense[batch.min(entries - 1) * heads + head][i][j]
}

/// Panics if a difference of results exceeds `tolerance`, relative to the largest one.
pub fn assert_alike<A>(what: &str, got: A, expected: A, tolerance: f64)
where
    A: IntoIterator<Item = (&'static str, TensorData)>,
{
    for ((name, got), (_, expected)) in got.into_iter().zip(expected) {
        let what = format!("{what}: {name}");
        assert_close(&what, got, &to_f64(expected), tolerance);
    }
}

/// Panics if results differ in bits.
pub fn assert_same_bits<A: AsRef<[(&'static str, TensorData)]>>(what: &str, a: A, b: A) {
    let (a, b) = (a.as_ref(), b.as_ref());
    assert_eq!(a.len(), b.len(), "{what}");
    for ((name, a), (_, b)) in a.iter().zip(b) {
        let alike = (a.dtype(), a.shape()) == (b.dtype(), b.shape());
        let is_right = alike && a.as_bytes() == b.as_bytes();
        assert!(is_right, "{what}: other bits of {name}");
    }
}
