//! Block-sparse tensors against dense f64 arithmetic: every operator and its gradients.

use burn_blocksparse::BlockSparseTensor;

use crate::attention::cases::{Case, cases, table};
use crate::judge::operators::{Dense, Form};
use crate::prelude::*;

/// A layout and tensors for it.
pub struct Setup {
    what: String,
    form: Form,
    dense: Dense,
    /// `[batch, heads, seq_q, dim]`
    a: Vec<f64>,
    /// `[batch, kv_heads, seq_kv, dim]`
    b: Vec<f64>,
    w: Vec<f64>,
    dw: Vec<f64>,
    allowed: Vec<bool>,
}

impl Setup {
    pub fn new(
        what: &str,
        layout: &BlockLayout,
        [batch, kv_heads, dim]: [usize; 3],
        seed: u64,
    ) -> Self {
        let form = Form::new(layout, batch);
        let dense = Dense {
            batch,
            kv_heads,
            heads: layout.heads(),
            seq_q: layout.seq_q(),
            seq_kv: layout.seq_kv(),
            dim,
        };
        let (w, allowed) = form.random_dense(seed);
        let (dw, _) = form.random_dense(seed + 1);
        let mut rng = seeded(seed + 2);
        let mut random =
            |heads: usize, seq: usize| uniform(&mut rng, batch * heads * seq * dim, 1.0);
        Self {
            what: what.to_string(),
            a: random(dense.heads, dense.seq_q),
            b: random(kv_heads, dense.seq_kv),
            form,
            dense,
            w,
            dw,
            allowed,
        }
    }

    fn of_case(case: &Case, seed: u64) -> Self {
        let sizes = [case.batch, case.kv_heads, case.head_dim];
        Self::new(case.name, &case.layout(), sizes, seed)
    }

    fn rows(
        &self,
        values: &[f64],
        [heads, seq]: [usize; 2],
        device: &Device,
        dtype: DType,
    ) -> Tensor<4> {
        let Dense { batch, dim, .. } = self.dense;
        tensor(values, [batch, heads, seq, dim], device, dtype)
    }

    fn query_rows(&self, values: &[f64], device: &Device, dtype: DType) -> Tensor<4> {
        self.rows(values, [self.dense.heads, self.dense.seq_q], device, dtype)
    }

    fn key_rows(&self, values: &[f64], device: &Device, dtype: DType) -> Tensor<4> {
        let rows = [self.dense.kv_heads, self.dense.seq_kv];
        self.rows(values, rows, device, dtype)
    }

    /// Returns stored values; masked pairs have a value that must have no effect.
    fn values(&self, dense: &[f64], device: &Device, dtype: DType) -> Tensor<4> {
        let values = self.form.stored(dense, 7.0);
        tensor(&values, self.form.shape, device, dtype)
    }

    /// Returns whether the layout has blocks.
    pub fn has_blocks(&self) -> bool {
        self.form.shape[1] > 0
    }

    pub fn check(&self, device: &Device) {
        for (dtype, tolerance) in exact_dtypes(device) {
            let within = products_within(device, tolerance);
            self.check_dtype(&device.clone().autodiff(), dtype, within);
        }
    }

    fn check_dtype(&self, device: &Device, dtype: DType, tolerance: f64) {
        let (dense, layout) = (&self.dense, &self.form.layout);
        let kv_heads = dense.kv_heads;
        let close = |name: &str, got: Tensor<4>, expected: &[f64]| {
            let what = format!("{}, {device:?}, {dtype:?}: {name}", self.what);
            assert_close(&what, got.into_data(), expected, tolerance);
        };
        let stored = |dense: &[f64]| self.form.stored(dense, 0.0);
        let a = self.query_rows(&self.a, device, dtype).require_grad();
        let b = self.key_rows(&self.b, device, dtype).require_grad();
        let w = self.values(&self.w, device, dtype).require_grad();
        let dw = self.values(&self.dw, device, dtype);
        let sparse = || BlockSparseTensor::from_values(w.clone(), layout).unwrap();

        // Gradients arrive unmasked; those at masked pairs must have no effect.
        let product = BlockSparseTensor::nt(a.clone(), b.clone(), layout).unwrap();
        let grads = (product.values() * dw.clone()).sum().backward();
        let expected = dense.nt(&self.a, &self.b, &self.allowed, kv_heads);
        close("nt", product.values(), &stored(&expected));
        close("nt, dense", product.to_dense(), &expected);
        let [da, db] = [&a, &b].map(|x| x.grad(&grads).unwrap());
        close("nt, da", da, &dense.nn(&self.dw, &self.b, kv_heads));
        close("nt, db", db, &dense.tn(&self.dw, &self.a, kv_heads));

        let out = sparse().nn(b.clone()).unwrap();
        // `a` serves as the gradient because it has the right shape.
        let grads = (out.clone() * a.clone().detach()).sum().backward();
        close("nn", out, &dense.nn(&self.w, &self.b, kv_heads));
        let by_values = dense.nt(&self.a, &self.b, &self.allowed, kv_heads);
        let [dw_nn, db] = [&w, &b].map(|x| x.grad(&grads).unwrap());
        close("nn, dw", dw_nn, &stored(&by_values));
        close("nn, db", db, &dense.tn(&self.w, &self.a, kv_heads));

        let heads = dense.heads;
        let y = (0..dense.batch * heads * dense.seq_kv * dense.dim).map(|n| n * 37 % 101);
        let y: Vec<f64> = y.map(|n| n as f64 / 50.0 - 1.0).collect();
        let grad = self.rows(&y, [heads, dense.seq_kv], device, dtype);
        let out = sparse().tn(a.clone()).unwrap();
        let grads = (out.clone() * grad).sum().backward();
        close("tn", out, &dense.tn(&self.w, &self.a, heads));
        let [dw_tn, da] = [&w, &a].map(|x| x.grad(&grads).unwrap());
        let by_values = dense.nt(&self.a, &y, &self.allowed, heads);
        close("tn, dw", dw_tn, &stored(&by_values));
        close("tn, da", da, &dense.nn(&self.w, &y, heads));

        for scale in [1.7, -0.6] {
            let p = sparse().softmax(scale).unwrap();
            let grads = (p.values() * dw.clone()).sum().backward();
            let [expected, ds] = dense.softmax(&self.w, &self.dw, &self.allowed, scale);
            close("softmax", p.values(), &stored(&expected));
            close("softmax, dw", w.grad(&grads).unwrap(), &stored(&ds));
        }
    }
}

/// Returns the tolerance of products. On CUDA, Burn rounds factors of f32 products to tf32.
fn products_within(device: &Device, tolerance: f64) -> f64 {
    match is_cuda(device) && tolerance > 1e-9 {
        true => 5e-3,
        false => tolerance,
    }
}

/// Products, softmax and their gradients on the table; on GPUs, where Burn compiles products for each shape, on a third of it.
pub fn operators_equal_dense_f64(devices: &[Device]) {
    let mut ran = 0;
    for (index, case) in table() {
        let setup = Setup::of_case(&case, 9000 + index as u64);
        let takes = |device: &&Device| index % 3 == 1 || !is_cube(device);
        for device in devices.iter().filter(takes) {
            setup.check(device);
            ran += 1;
        }
    }
    assert_ran("operators_equal_dense_f64", ran);
}

/// Layouts per batch entry, some with fewer blocks or none.
pub fn operators_on_per_batch_layouts(devices: &[Device]) {
    let nothing = Pattern::from_fn("nothing", |_, _, _| false);
    let patterns = [Pattern::local(9), nothing, Pattern::dense()];
    let layouts = patterns.map(|pattern| pattern.layout(4, 44, 8).unwrap());
    let stacked = BlockLayout::stack_batch(&layouts).unwrap();
    let setup = Setup::new("per batch", &stacked, [3, 2, 5], 1);
    let empty = Setup::new("no block at all", &layouts[1], [2, 2, 5], 2);
    for device in devices {
        setup.check(device);
        // Not every backend supports empty tensors; the operators do.
        let device = device.clone();
        let a = empty.query_rows(&empty.a, &device, DType::F32);
        let b = empty.key_rows(&empty.b, &device, DType::F32);
        let w = BlockSparseTensor::nt(a.clone(), b.clone(), &layouts[1]).unwrap();
        assert_eq!(w.values().dims(), [2, 0, 8, 8]);
        let p = w.softmax(1.0).unwrap();
        let all = [p.to_dense(), p.clone().nn(b).unwrap(), p.tn(a).unwrap()];
        for zeros in all {
            assert!(to_f64(zeros.into_data()).iter().all(|&x| x == 0.0));
        }
    }
}

/// Computes `softmax(scale q · kᵀ) · v` from operators.
fn composed([q, k, v]: [&Tensor<4>; 3], layout: &BlockLayout, scale: f64) -> Tensor<4> {
    let scores = BlockSparseTensor::nt(q.clone(), k.clone(), layout).unwrap();
    scores.softmax(scale).unwrap().nn(v.clone()).unwrap()
}

/// The composition equals attention, and so do its gradients.
pub fn operators_compose_to_attention(devices: &[Device]) {
    let third = |(index, case): &(usize, Case)| index % 3 == 2 && case.softcap.is_none();
    let mut ran = 0;
    for (index, case) in table().into_iter().filter(third) {
        let (problem, layout) = (case.problem(index as u64), case.layout());
        let scale = case.scale.unwrap_or(1.0 / (case.head_dim as f64).sqrt());
        for device in devices {
            let exact = exact_dtypes(device).into_iter();
            let exact = exact.map(|(dtype, within)| (dtype, products_within(device, within)));
            let halves = half_dtypes(device).into_iter();
            let halves = halves.map(|dtype| (dtype, 8.0 * unit(dtype)));
            for (dtype, tolerance) in exact.chain(halves) {
                let tracked = device.clone().autodiff();
                let [q, k, v, grad] = inputs(&problem, &tracked, dtype);
                let leaves = [q, k, v].map(Tensor::require_grad);
                let of = |out: Tensor<4>| {
                    assert_eq!(out.dtype(), dtype);
                    with_gradients(out, grad.clone(), leaves.clone())
                };
                let got = of(composed(leaves.each_ref(), &layout, scale));
                let expected = of(attend(leaves.each_ref(), &layout, &case.options()));
                let what = format!("{}, {device:?}, {dtype:?}, of operators", case.name);
                assert_alike(&what, got, expected, tolerance);
                ran += 1;
            }
        }
    }
    assert_ran("operators_compose_to_attention", ran);
}

/// Large blocks and rows, so that products are computed in several chunks.
pub fn operators_in_several_chunks(devices: &[Device]) {
    let layout = Pattern::causal().layout(2, 1100, 128).unwrap();
    let setup = Setup::new("several chunks", &layout, [2, 2, 256], 6);
    for device in devices {
        let tracked = device.clone().autodiff();
        let q = setup.query_rows(&setup.a, &tracked, DType::F32);
        let k = setup.key_rows(&setup.b, &tracked, DType::F32);
        let [q, k, v] = [q, k.clone(), k].map(|x| x.detach().require_grad());
        let of = |out| with_gradients(out, q.clone().detach(), [&q, &k, &v].map(Clone::clone));
        let got = of(composed([&q, &k, &v], &layout, 0.1));
        let options = AttentionOptions::default().scale(0.1);
        let expected = of(attend([&q, &k, &v], &layout, &options));
        let what = format!("several chunks, {device:?}");
        assert_alike(&what, got, expected, products_within(device, 1e-5));
    }
}

/// Values of any size give a softmax without NaN; rows sum to 1, or to 0 without pairs.
pub fn softmax_of_large_values(devices: &[Device]) {
    let pattern = Pattern::from_fn("gaps", |_, i, j| !(11..29).contains(&i) && j <= i);
    let layout = pattern.layout(2, 44, 8).unwrap();
    let setup = Setup::new("large values", &layout, [2, 2, 1], 3);
    for device in devices {
        for size in [1e3, 1e30, 3e38] {
            for scale in [1.0, -1.0, 0.0, 5.0, 1e30] {
                let values = setup.values(&setup.w, device, DType::F32) * size;
                let values = values.clamp(-f32::MAX, f32::MAX);
                let w = BlockSparseTensor::from_values(values, &layout).unwrap();
                let p = w.softmax(scale).unwrap();
                let ones = Tensor::ones([2, 2, 44, 1], (device, DType::F32));
                let sums = to_f64(p.nn(ones).unwrap().into_data());
                for (row, sum) in sums.into_iter().enumerate() {
                    let expected = f64::from(!(11..29).contains(&(row % 44)));
                    let what = format!("{device:?}, {size} times {scale}, row {row}");
                    assert_near(&what, &[sum], &[expected], products_within(device, 1e-5));
                }
            }
        }
    }
}

/// Masked pairs stay 0 and get no gradient, even if the function or its derivative is not finite at 0.
pub fn functions_leave_masked_pairs_alone(devices: &[Device]) {
    let layout = Pattern::local(5).layout(2, 21, 8).unwrap();
    let setup = Setup::new("map", &layout, [2, 2, 1], 4);
    for device in devices {
        let tracked = device.clone().autodiff();
        let positive: Vec<f64> = setup.w.iter().map(|x| x.abs() + 0.5).collect();
        let w = setup.values(&positive, &tracked, DType::F32).require_grad();
        let sparse = BlockSparseTensor::from_values(w.clone(), &layout).unwrap();
        let logs = sparse.map(Tensor::log).unwrap();
        let grads = logs.values().sum().backward();
        let expected: Vec<f64> = positive.iter().map(|x| x.ln()).collect();
        let stored = |dense: &[f64]| setup.form.stored(dense, 0.0);
        assert_close("ln", logs.values().into_data(), &stored(&expected), 1e-5);
        let slopes: Vec<f64> = positive.iter().map(|x| 1.0 / x).collect();
        let grad = w.grad(&grads).unwrap().into_data();
        assert_close("derivative of ln", grad, &stored(&slopes), 1e-5);
    }
}

/// Equal inputs give equal bits, forward and backward, with and without gradient checkpointing.
pub fn operators_are_deterministic(devices: &[Device]) {
    let mut cases = cases().into_iter();
    let case = cases.find(|case| case.name == "grouped heads of several patterns");
    let case = case.unwrap();
    let setup = Setup::of_case(&case, 5);
    let layout = &setup.form.layout;
    for device in devices {
        let run = |device: Device| {
            let a = setup.query_rows(&setup.a, &device, DType::F32);
            let b = setup.key_rows(&setup.b, &device, DType::F32);
            let [a, b] = [a, b].map(Tensor::require_grad);
            let w = BlockSparseTensor::nt(a.clone(), b.clone(), layout).unwrap();
            let p = w.softmax(0.3).unwrap();
            let out = p.clone().nn(b.clone()).unwrap();
            let back = p.tn(out.clone() * a.clone()).unwrap();
            let grads = back.clone().powi_scalar(2).sum().backward();
            let [da, db] = [a, b].map(|x| x.grad(&grads).unwrap());
            [out, back, da, db].map(|x| x.into_data().to_vec::<f32>().unwrap())
        };
        let first = run(device.clone().autodiff());
        assert_eq!(first, run(device.clone().autodiff()), "{device:?}");
        let checkpointed = run(device.clone().autodiff().gradient_checkpointing());
        assert_eq!(first, checkpointed, "{device:?}, checkpointing");
    }
}
