//! Weights summed over columns and diagonals, against f64.

use burn_blocksparse::{AccumulatedAttentionOptions, accumulated_attention};

use crate::attention::cases::{cases, per_batch, table};
use crate::attention::options::SHARED;
use crate::prelude::*;

/// Returns the sums over columns and diagonals of the weights of `queries`.
fn expected(problem: &Problem, answer: &Answer, queries: std::ops::Range<usize>) -> [Vec<f64>; 2] {
    let Sizes {
        batch,
        heads,
        seq_q,
        seq_kv,
        ..
    } = problem.sizes;
    let (rows, lines) = (batch * heads, seq_q + seq_kv - 1);
    let (mut columns, mut diagonals) = (vec![0.0; rows * seq_kv], vec![0.0; rows * lines]);
    for row in 0..rows {
        for i in queries.clone() {
            for j in 0..seq_kv {
                let p = answer.weights[(row * seq_q + i) * seq_kv + j];
                columns[row * seq_kv + j] += p;
                // Distances of positions: queries are aligned with the last keys.
                let distance = (i + seq_kv) as i64 - seq_q as i64 - j as i64;
                diagonals[row * lines + (seq_q as i64 - 1 + distance) as usize] += p;
            }
        }
    }
    [columns, diagonals]
}

pub struct Call<'a> {
    pub what: String,
    pub problem: &'a Problem,
    pub layout: BlockLayout,
    pub queries: Option<std::ops::Range<usize>>,
}

impl Call<'_> {
    fn options(&self, device: &Device, dtype: DType) -> AccumulatedAttentionOptions {
        let mut tensors = tensors(self.problem, device, dtype);
        tensors.sinks = None;
        let options = AccumulatedAttentionOptions::default()
            .attention(self.problem.asked())
            .tensors(tensors);
        match &self.queries {
            Some(queries) => options.queries(queries.clone()),
            None => options,
        }
    }

    fn run(&self, answer: &Answer, device: &Device, dtype: DType) -> [TensorData; 2] {
        let [q, k, ..] = inputs(self.problem, device, dtype);
        let sums = [DType::F32, dtype][usize::from(dtype == DType::F64)];
        let [batch, heads, seq_q, _] = q.dims();
        let lse = tensor(&answer.lse, [batch, heads, seq_q], device, sums);
        let made = accumulated_attention(q, k, lse, &self.layout, self.options(device, dtype));
        let made = made.unwrap();
        [made.columns, made.diagonals].map(Tensor::into_data)
    }

    pub fn check(&self, device: &Device, dtype: DType, tolerance: f64) {
        let queries = self.queries.clone().unwrap_or(0..self.problem.sizes.seq_q);
        let answer = self.problem.solve();
        let expected = expected(self.problem, &answer, queries);
        let got = self.run(&answer, device, dtype).into_iter();
        for ((got, expected), name) in got.zip(expected).zip(["columns", "diagonals"]) {
            let what = format!("{}, {device:?}, {dtype:?}: {name}", self.what);
            assert_close(&what, got, &expected, tolerance);
        }
    }
}

/// The table, with ALiBi, biases and ranges of queries in turn. In half precision, products have rounded factors and sums are f32.
pub fn attention_sums_equal_f64(devices: &[Device]) {
    for (index, case) in table() {
        let seed = 7000 + index as u64;
        let mut problem = case.problem(seed);
        if index % 3 == 1 {
            let slopes = (0..case.heads).map(|head| 0.2 - 0.1 * head as f64);
            problem = problem.with_slopes(slopes.collect());
        }
        if index % 4 == 1 {
            problem = problem.with_bias(seed, SHARED[index / 4 % SHARED.len()]);
        }
        if index % 5 == 1 {
            problem = problem.with_relative(seed, 17, index.is_multiple_of(2));
        }
        let queries = match index % 3 {
            0 => None,
            1 => Some(case.seq_q - case.seq_q.div_ceil(3)..case.seq_q),
            _ => Some(case.seq_q / 4..case.seq_q / 4 + case.seq_q.div_ceil(2)),
        };
        let mut call = |round: Option<DType>, device: &Device, dtype: DType, tolerance: f64| {
            if let Some(dtype) = round {
                problem.round_to(dtype);
            }
            let call = Call {
                what: format!("{}, {queries:?}", case.name),
                problem: &problem,
                layout: case.layout(),
                queries: queries.clone(),
            };
            call.check(device, dtype, tolerance);
        };
        for (device, dtype, tolerance) in exact(devices) {
            call(None, device, dtype, tolerance);
        }
        for device in devices.iter().filter(|_| index % 3 == 1) {
            for dtype in half_dtypes(device) {
                call(Some(dtype), device, dtype, 1e-5);
            }
        }
    }
}

/// Long lines, which are cut; layouts per batch entry, whose lines differ in length; lse with sinks; on an autodiff device.
pub fn attention_sums_of_long_lines(devices: &[Device]) {
    let sizes = Sizes::new([2, 2, 1], [700, 700], [12, 4]);
    let patterns = [Pattern::causal(), Pattern::streaming(300, 9)];
    let (layout, problem) = per_batch(&patterns, sizes, 8, 9);
    let problem = problem.with_sinks(4);
    let expected = expected(&problem, &problem.solve(), 0..700);
    for device in devices {
        let device = device.clone().autodiff();
        let [q, k, v, _] = inputs(&problem, &device, DType::F32);
        let q = q.require_grad();
        let tensors = tensors(&problem, &device, DType::F32);
        let call = SparseAttentionCall::new(q.clone(), k.clone(), v, &layout);
        let (_, lse) = call.tensors(tensors.clone()).run_with_lse().unwrap();
        let options = AccumulatedAttentionOptions::default().tensors(tensors);
        let attention_sums = accumulated_attention(q, k, lse, &layout, options).unwrap();
        let is_right = !attention_sums.columns.is_require_grad();
        assert!(is_right, "the sums leave the graph");
        for (got, expected) in [attention_sums.columns, attention_sums.diagonals]
            .into_iter()
            .zip(&expected)
        {
            assert_close("long lines", got.into_data(), expected, 1e-5);
        }
    }
}

/// Two runs give equal bits, whatever the strides of the inputs.
pub fn attention_sums_give_the_same_bits(devices: &[Device]) {
    let case = &cases()[37];
    let problem = case.problem(3);
    let lse = problem.solve().lse;
    for device in devices {
        let [q, k, ..] = inputs(&problem, device, DType::F32);
        let [batch, heads, seq_q, _] = q.dims();
        let lse = tensor(&lse, [batch, heads, seq_q], device, DType::F32);
        let permuted = |x: &Tensor<4>| stored_swapped(x, 1, 2);
        let call = |q: Tensor<4>, k: Tensor<4>| {
            let (layout, options) = (case.layout(), AccumulatedAttentionOptions::default());
            let attention_sums =
                accumulated_attention(q, k, lse.clone(), &layout, options).unwrap();
            [attention_sums.columns, attention_sums.diagonals].map(Tensor::into_data)
        };
        let first = call(q.clone(), k.clone());
        for again in [call(q.clone(), k.clone()), call(permuted(&q), permuted(&k))] {
            for (a, b) in first.iter().zip(&again) {
                assert_eq!(a.as_bytes(), b.as_bytes(), "{}", case.name);
            }
        }
        assert!(to_f64(first[0].clone()).iter().any(|&sum| sum > 0.0));
    }
}
