//! Block-sparse tensors against dense f64 arithmetic: every operator and its gradients.

use burn_blocksparse::BlockSparseTensor;

use crate::attention::cases::{Case, table};
use crate::judge::operators::{Dense, Form};
use crate::prelude::*;

/// A layout, tensors for it, and the device and dtype they are on.
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
        self.rows(
            values,
            [self.dense.kv_heads, self.dense.seq_kv],
            device,
            dtype,
        )
    }

    /// Values whose masked pairs hold something that must not matter.
    fn values(&self, dense: &[f64], device: &Device, dtype: DType) -> Tensor<4> {
        self.form
            .tensor(self.form.stored(dense, 7.0), device, dtype)
    }

    /// Whether the layout keeps a block.
    pub fn has_blocks(&self) -> bool {
        self.form.shape[1] > 0
    }

    pub fn check(&self, device: &Device) {
        for (dtype, tolerance) in exact_dtypes(device) {
            self.check_dtype(
                &device.clone().autodiff(),
                dtype,
                products_within(device, tolerance),
            );
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
        let [a, w] = [
            self.query_rows(&self.a, device, dtype),
            self.values(&self.w, device, dtype),
        ]
        .map(Tensor::require_grad);
        let b = self.key_rows(&self.b, device, dtype).require_grad();
        let dw = self.values(&self.dw, device, dtype);
        let sparse = || BlockSparseTensor::from_values(w.clone(), layout).unwrap();

        // Gradients come in unmasked; those of masked pairs do not count.
        let product = BlockSparseTensor::nt(a.clone(), b.clone(), layout).unwrap();
        let grads = (product.values() * dw.clone()).sum().backward();
        let expected = dense.nt(&self.a, &self.b, &self.allowed, kv_heads);
        close("nt", product.values(), &stored(&expected));
        close("nt, dense", product.to_dense(), &expected);
        let [da, db] = [&a, &b].map(|x| x.grad(&grads).unwrap());
        close("nt, da", da, &dense.nn(&self.dw, &self.b, kv_heads));
        close("nt, db", db, &dense.tn(&self.dw, &self.a, kv_heads));

        let out = sparse().nn(b.clone()).unwrap();
        // a serves as the gradient: it has the shape.
        let grads = (out.clone() * a.clone().detach()).sum().backward();
        close("nn", out, &dense.nn(&self.w, &self.b, kv_heads));
        let by_values = dense.nt(&self.a, &self.b, &self.allowed, kv_heads);
        let [dw_nn, db] = [&w, &b].map(|x| x.grad(&grads).unwrap());
        close("nn, dw", dw_nn, &stored(&by_values));
        close("nn, db", db, &dense.tn(&self.w, &self.a, kv_heads));

        let heads = dense.heads;
        let y: Vec<f64> = (0..dense.batch * heads * dense.seq_kv * dense.dim)
            .map(|n| ((n * 37 % 101) as f64) / 50.0 - 1.0)
            .collect();
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

/// On CUDA, Burn rounds factors of f32 products to tf32.
fn products_within(device: &Device, tolerance: f64) -> f64 {
    match is_cuda(device) && tolerance > 1e-9 {
        true => 5e-3,
        false => tolerance,
    }
}

/// Products, softmax and their gradients over the table; on GPUs, where Burn compiles products for each shape, over a third of it.
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

/// Layouts per batch entry, some of whose entries keep fewer blocks or none.
pub fn operators_on_per_batch_layouts(devices: &[Device]) {
    let nothing = Pattern::from_fn("nothing", |_, _, _| false);
    let patterns = [Pattern::local(9), nothing.clone(), Pattern::dense()];
    let layouts: Vec<BlockLayout> = (patterns.iter())
        .map(|pattern| pattern.layout(4, 44, 8).unwrap())
        .collect();
    let stacked = BlockLayout::stack_batch(&layouts).unwrap();
    let setup = Setup::new("per batch", &stacked, [3, 2, 5], 1);
    let empty = Setup::new("no block at all", &layouts[1], [2, 2, 5], 2);
    for device in devices {
        setup.check(device);
        // Tensors without elements are not for every backend; the operators take them.
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

/// `softmax(q · kᵀ) · v` of operators is attention, and so are its gradients.
pub fn operators_compose_to_attention(devices: &[Device]) {
    let third = |(index, case): &(usize, Case)| index % 3 == 2 && case.softcap.is_none();
    let cases = table();
    let cases: Vec<_> = cases.iter().filter(|row| third(row)).collect();
    assert_ran("operators_compose_to_attention", cases.len());
    for (index, case) in cases {
        let (problem, layout) = (case.problem(*index as u64), case.layout());
        let scale = case.scale.unwrap_or(1.0 / (case.head_dim as f64).sqrt());
        for device in devices {
            let tracked = device.clone().autodiff();
            for dtype in exact_dtypes(device)
                .into_iter()
                .map(|(dtype, _)| dtype)
                .chain(half_dtypes(device))
            {
                let run = |by_operators: bool| {
                    let [q, k, v, grad] = inputs(&problem, &tracked, dtype);
                    let [q, k, v] = [q, k, v].map(Tensor::require_grad);
                    let out = match by_operators {
                        true => BlockSparseTensor::nt(q.clone(), k.clone(), &layout)
                            .and_then(|scores| scores.softmax(scale))
                            .and_then(|p| p.nn(v.clone())),
                        false => {
                            let (q, k, v) = (q.clone(), k.clone(), v.clone());
                            SparseAttentionCall::new(q, k, v, &layout)
                                .options(case.options())
                                .run()
                                .map(|output| output.out)
                        }
                    };
                    let out = out.unwrap();
                    assert_eq!(out.dtype(), dtype);
                    with_gradients(out, grad, [q, k, v])
                };
                let tolerance = match dtype {
                    DType::F64 => 1e-12,
                    DType::F32 => products_within(device, 1e-5),
                    DType::F16 => 4e-3,
                    _ => 3e-2,
                };
                let what = format!("{}, {device:?}, {dtype:?}, of operators", case.name);
                assert_alike(&what, run(true), run(false), tolerance);
            }
        }
    }
}

/// Large blocks and rows, so that the products are computed in several chunks.
pub fn operators_in_several_chunks(devices: &[Device]) {
    let layout = Pattern::causal().layout(2, 1100, 128).unwrap();
    let setup = Setup::new("several chunks", &layout, [2, 2, 256], 6);
    for device in devices {
        let tracked = device.clone().autodiff();
        let run = |by_operators: bool| {
            let q = setup.query_rows(&setup.a, &tracked, DType::F32);
            let k = setup.key_rows(&setup.b, &tracked, DType::F32);
            let [q, k] = [q, k].map(Tensor::require_grad);
            let out = match by_operators {
                true => BlockSparseTensor::nt(q.clone(), k.clone(), &layout)
                    .and_then(|scores| scores.softmax(0.1))
                    .and_then(|p| p.nn(k.clone())),
                false => {
                    let options = AttentionOptions::default().scale(0.1);
                    SparseAttentionCall::new(q.clone(), k.clone(), k.clone(), &layout)
                        .options(options)
                        .run()
                        .map(|output| output.out)
                }
            };
            let out = out.unwrap();
            let grads = (out.clone() * q.clone().detach()).sum().backward();
            let [dq, dk] = [q, k].map(|x| x.grad(&grads).unwrap());
            let names = ["out", "dq", "dk"].into_iter();
            names.zip([out, dq, dk].map(Tensor::into_data))
        };
        let what = format!("several chunks, {device:?}");
        assert_alike(&what, run(true), run(false), products_within(device, 1e-5));
    }
}

/// On random shapes and layouts the three products are adjoint to each other: `⟨a · bᵀ, w⟩ = ⟨a, w · b⟩ = ⟨wᵀ · a, b⟩`.
pub fn products_are_adjoint(devices: &[Device]) {
    let mut rng = seeded(11);
    for round in 0..24u64 {
        let block_size = [8, 16, 32][rng.random_range(0..3)];
        let kv_heads = rng.random_range(1..4);
        let shape = LayoutShape::new(
            kv_heads * rng.random_range(1..4),
            [rng.random_range(1..90), rng.random_range(1..90)],
            block_size,
        );
        let keep = rng.random_range(1..10);
        let pattern = Pattern::from_fn("random pairs", move |head, i, j| {
            let hash = (i * 7919 + j * 104_729 + head as i64 * 31 + i / 8 * (j / 8)) % 11;
            hash.rem_euclid(11) < keep
        });
        let layout = BlockLayout::new(&pattern, shape).unwrap();
        let [batch, dim] = [rng.random_range(1..4), rng.random_range(1..20)];
        let what = format!("round {round}: {shape:?}");
        let setup = Setup::new(&what, &layout, [batch, kv_heads, dim], 100 + round);
        for (device, dtype, tolerance) in exact(devices) {
            let a = setup.query_rows(&setup.a, device, dtype);
            let b = setup.key_rows(&setup.b, device, dtype);
            let values = setup.values(&setup.w, device, dtype);
            let w = BlockSparseTensor::from_values(values, &layout).unwrap();
            let group = shape.heads / kv_heads;
            let b_of_heads = b.clone().reshape([batch, kv_heads, 1, shape.seq_kv, dim]);
            let b_of_heads =
                b_of_heads
                    .repeat_dim(2, group)
                    .reshape([batch, shape.heads, shape.seq_kv, dim]);
            let product = BlockSparseTensor::nt(a.clone(), b.clone(), &layout).unwrap();
            let sums = [
                product.values() * w.values(),
                w.clone().nn(b).unwrap() * a.clone(),
                w.tn(a).unwrap() * b_of_heads,
            ]
            .map(|x| to_f64(x.into_data()));
            let size: f64 = sums[0].iter().map(|x| x.abs()).sum::<f64>().max(1.0);
            let [first, nn, tn] = sums.map(|x| x.iter().sum::<f64>() / size);
            for (name, got) in [("nn", nn), ("tn", tn)] {
                let (error, _) = relative_error(&[got], &[first]);
                let within = products_within(device, tolerance);
                assert!(
                    error <= within,
                    "{what}, {device:?}, {dtype:?}, {name}: {error}"
                );
            }
        }
    }
}

/// Values of any size give a softmax without NaN, whose rows sum to 1, or to 0 without pairs.
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
                    let what = format!("{device:?}, {size} times {scale}, row {row}: {sum}");
                    assert!(
                        (sum - expected).abs() < products_within(device, 1e-5),
                        "{what}"
                    );
                }
            }
        }
    }
}

/// Masked pairs stay 0 and get no gradient, also where the function or its derivative is not finite at 0.
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

/// The same input gives the same bits, forward and backward, with and without gradient checkpointing.
pub fn operators_are_deterministic(devices: &[Device]) {
    let case = (crate::attention::cases::cases().into_iter())
        .find(|case| case.name == "grouped heads of several patterns")
        .unwrap();
    let setup = Setup::of_case(&case, 5);
    let layout = &setup.form.layout;
    for device in devices {
        let run = |device: Device| {
            let a = setup
                .query_rows(&setup.a, &device, DType::F32)
                .require_grad();
            let b = setup.key_rows(&setup.b, &device, DType::F32).require_grad();
            let p = BlockSparseTensor::nt(a.clone(), b.clone(), layout)
                .and_then(|w| w.softmax(0.3))
                .unwrap();
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
