//! Products with epilogues: times, and comparison with row kernels applied to the plain product.

use anyhow::{Result, anyhow, ensure};
use blocksparse_bench::compare::same_twice;
use blocksparse_bench::device::{empty, flush, poisoned, read, upload};
use blocksparse_bench::numbers::{BF16, F32, decoded, half, rounding_of, uniform};
use blocksparse_bench::operand::Operand;
use blocksparse_bench::runner::Tally;
use blocksparse_cubecl::rows::{ActivationKind, column_sums};
use burn_fused_ops::kernels::linear::{
    Epilogue, EpilogueTensors, HEAD, MatrixView, ProductPlan, ProductRequest, multiply,
};
use burn_fused_ops::kernels::rows::{
    ActivationBackward, HeadsPart, bias_activation, bias_activation_backward, split_heads,
};
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::server::Handle;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::json;

use super::{Bench, element, plan, view};

/// A product with an epilogue, and the tensors that it reads and writes.
struct Case {
    client: Client,
    epilogue: Epilogue,
    request: ProductRequest,
    factors: [MatrixView; 2],
    bias: Option<Handle>,
    /// Batch entries, and the heads of each part.
    heads: [usize; 4],
    before: Handle,
    out: Handle,
    second: Option<Handle>,
    totals: Handle,
    sums: Handle,
}

/// Returns the reason if the device's tier has no epilogues.
pub(super) fn refused(bench: &Bench) -> Option<&'static str> {
    let activation = Epilogue::Activation(ActivationKind::GeluSigmoid);
    let request = ProductRequest::plain(true, [128; 3]).with(activation);
    ProductPlan::new(&bench.client, request).err()
}

/// Outputs of a case: the result, the second result and the sums.
type Written = [Vec<u8>; 3];

impl Case {
    fn new(
        client: &Client,
        [a, b]: [&Operand; 2],
        epilogue: Epilogue,
        [has_bias, has_second]: [bool; 2],
        heads: [usize; 4],
        seed: u64,
    ) -> Result<Self> {
        let is_bf16 = a.element == BF16;
        let factors = [view(a), view(b)];
        let plain = ProductRequest::of(is_bf16, factors.each_ref(), false, false)
            .map_err(|why| anyhow!(why))?;
        let request = plain.with(epilogue);
        let (rows, cols) = (request.rows, request.cols);
        let bias = uniform(cols, 1.0, F32, &mut ChaCha8Rng::seed_from_u64(seed));
        let matrix = || poisoned(client, request.batch * rows * cols, half(is_bf16));
        Ok(Self {
            client: client.clone(),
            epilogue,
            request,
            factors,
            bias: has_bias.then(|| upload(client, &bias, F32)),
            heads,
            before: Operand::random(client, is_bf16, [1, rows, cols], false, !seed).handle,
            out: matrix(),
            second: has_second.then(matrix),
            totals: poisoned(client, 2 * rows.div_ceil(128) * cols, F32),
            sums: poisoned(client, cols, F32),
        })
    }

    fn element(&self) -> ElemType {
        half(self.request.bf16)
    }

    fn seq(&self) -> usize {
        self.request.rows / self.heads[0]
    }

    fn plan(&self, index: usize) -> Result<Option<ProductPlan>> {
        plan(&self.client, self.request, index)
    }

    fn fused(&self, plan: &ProductPlan) -> Result<()> {
        let [a, b] = &self.factors;
        let mut beside = EpilogueTensors {
            bias: self.bias.as_ref(),
            second: self.second.as_ref(),
            ..EpilogueTensors::default()
        };
        let mut has_sums = false;
        match self.epilogue {
            Epilogue::Heads { .. } => {
                let [_, heads @ ..] = self.heads;
                beside.heads = Some((self.seq(), heads));
            }
            Epilogue::Gradient { sums, .. } => {
                beside.before = Some(&self.before);
                has_sums = sums;
                beside.totals = sums.then_some(&self.totals);
            }
            _ => {}
        }
        multiply(&self.client, plan, [a, b], &self.out, &beside)?;
        if has_sums {
            let matrix = [plan.total_rows(), self.request.cols];
            column_sums(&self.client, (&self.totals, F32), matrix, (&self.sums, F32))?;
        }
        Ok(())
    }

    /// Computes the case with the plain product and a row kernel. With `copy`, also writes results that are the product itself.
    fn apart(&self, copy: bool) -> Result<()> {
        let [a, b] = &self.factors;
        let plain = self.request.with(Epilogue::Plain);
        let plan = ProductPlan::new(&self.client, plain).map_err(|why| anyhow!(why))?;
        let (rows, cols) = (self.request.batch * self.request.rows, self.request.cols);
        let element = self.element();
        let made = empty(&self.client, rows * cols, element);
        let beside = EpilogueTensors::default();
        multiply(&self.client, &plan, [a, b], &made, &beside)?;
        let bias = self.bias.as_ref().map(|bias| (bias, F32));
        match self.epilogue {
            Epilogue::Heads { dim } => {
                let [_, heads @ ..] = self.heads;
                let mut start = 0;
                let mut parts = Vec::new();
                for heads in heads.into_iter().filter(|heads| *heads > 0) {
                    let bytes = (rows * heads * dim * 2) as u64;
                    let left = self.out.size_in_used() - start - bytes;
                    let part = self.out.clone().offset_start(start).offset_end(left);
                    start += bytes;
                    parts.push((HeadsPart { heads, dim }, part));
                }
                let parts: Vec<_> = parts.iter().map(|(part, handle)| (*part, handle)).collect();
                let shape = [rows, self.seq()];
                split_heads(&self.client, (&made, element), bias, shape, &parts)?;
            }
            Epilogue::Activation(activation) => {
                let (x, out, shape) = ((&made, element), &self.out, [rows, cols]);
                bias_activation(&self.client, x, bias, out, shape, activation)?;
                // The plain product is the result that would be stored.
                if let Some(second) = &self.second
                    && copy
                {
                    multiply(&self.client, &plan, [a, b], second, &beside)?;
                }
            }
            Epilogue::Gradient { activation, sums } => {
                let pass = ActivationBackward {
                    activation,
                    x: Some(&self.before),
                    bias,
                    dy: (&made, element),
                    dx: Some(&self.out),
                    y: self.second.as_ref(),
                    sums: sums.then_some((&self.sums, F32)),
                };
                bias_activation_backward(&self.client, [rows, cols], &pass)?;
            }
            // Sums of exponentials and of weights do not occur in layers.
            Epilogue::Plain
            | Epilogue::LogSums { .. }
            | Epilogue::Maxima { .. }
            | Epilogue::LineSums
            | Epilogue::Highest(_) => {}
        }
        Ok(())
    }

    fn read(&self) -> Result<Written> {
        let bytes = |handle| read(&self.client, handle);
        let second = self.second.as_ref().map_or(Ok(Vec::new()), bytes)?;
        Ok([bytes(&self.out)?, second, bytes(&self.sums)?])
    }

    fn check(&self, plan: &ProductPlan) -> Result<()> {
        let [out, second, sums] = same_twice(|| {
            self.fused(plan)?;
            self.read()
        })?;
        self.apart(true)?;
        let [out_apart, second_apart, sums_apart] = self.read()?;
        // Both round once, but the separate computation of heads rounds twice: two units in the last place, where the sum with the bias may be small.
        let unit = 2.0 * rounding_of(self.element());
        let (rows, depth) = (self.request.rows as f64, self.request.depth as f64);
        let small = match self.epilogue {
            Epilogue::Heads { .. } => depth.sqrt() * unit,
            _ => unit * unit,
        };
        let halves = |bytes: &[u8]| decoded(bytes, self.element());
        let [out, out_apart] = [&out, &out_apart].map(|bytes| halves(bytes));
        compare("result", &out, &out_apart, unit, small)?;
        let [second, second_apart] = [&second, &second_apart].map(|bytes| halves(bytes));
        compare("second result", &second, &second_apart, unit, unit * unit)?;
        if matches!(self.epilogue, Epilogue::Gradient { sums: true, .. }) {
            let [sums, sums_apart] = [&sums, &sums_apart].map(|bytes| decoded(bytes, F32));
            compare("sums", &sums, &sums_apart, 1e-4, 1e-6 * rows * depth.sqrt())?;
        }
        Ok(())
    }
}

fn compare(name: &str, got: &[f64], expected: &[f64], relative: f64, absolute: f64) -> Result<()> {
    ensure!(got.len() == expected.len(), "{name}: lengths");
    let mut others = 0;
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        others += usize::from(got != expected);
        ensure!(
            (got - expected).abs() <= relative * expected.abs() + absolute,
            "{name}: number {at} is {got}, and apart {expected}"
        );
    }
    // The compared values must not all be equal.
    ensure!(
        expected.len() < 64 || expected.iter().any(|x| *x != expected[0]),
        "{name}: nothing was written"
    );
    ensure!(
        name == "sums" || name == "result" || others * 50 <= got.len(),
        "{name}: {others} of {} differ",
        got.len()
    );
    Ok(())
}

/// Compares results on many shapes.
pub(super) fn verify(bench: &Bench, tally: &mut Tally) -> Result<()> {
    use ActivationKind::{GeluErf, GeluSigmoid, GeluTanh, None as Linear, Relu, Silu};
    let mut number = 0u64;
    let gradient = |activation, sums| Epilogue::Gradient { activation, sums };
    let epilogues = [
        Epilogue::Heads { dim: 64 },
        Epilogue::Heads { dim: 24 },
        Epilogue::Activation(GeluSigmoid),
        Epilogue::Activation(Relu),
        Epilogue::Activation(GeluTanh),
        Epilogue::Activation(GeluErf),
        Epilogue::Activation(Silu),
        Epilogue::Activation(Linear),
        gradient(GeluSigmoid, true),
        gradient(GeluSigmoid, false),
        gradient(Relu, true),
        gradient(GeluTanh, true),
        gradient(GeluErf, true),
        gradient(Silu, true),
        gradient(Linear, true),
    ];
    for (index, epilogue) in epilogues.into_iter().enumerate() {
        for (is_bf16, transposed) in [(true, false), (true, true), (false, false), (false, true)] {
            if !tally.has(index * 4 + usize::from(is_bf16) * 2 + usize::from(transposed)) {
                continue;
            }
            for (batch, rows, depth, width) in [
                (1, 8, 8, 1),
                (3, 24, 72, 3),
                (2, 200, 136, 5),
                (4, 256, 512, 8),
                (1, 1000, 64, 4),
            ] {
                number += 1;
                let seed = number + 1000 * index as u64;
                let (dim, heads) = match epilogue {
                    // One part, two, or three with different numbers of heads.
                    Epilogue::Heads { dim } => match number % 3 {
                        0 => (dim, [batch, width, 0, 0]),
                        1 => (dim, [batch, width, 2, 0]),
                        _ => (dim, [batch, width + 1, 1, 2]),
                    },
                    _ => (40, [1, width, 0, 0]),
                };
                let cols = dim * heads[1..].iter().sum::<usize>();
                let rows = batch * rows;
                if rows * depth * cols > bench.args.most {
                    continue;
                }
                let client = &bench.client;
                let a = Operand::random(client, is_bf16, [1, rows, depth], false, seed);
                let b = Operand::random(client, is_bf16, [1, depth, cols], transposed, !seed);
                let has = match epilogue {
                    Epilogue::Heads { .. } => [number.is_multiple_of(2), false],
                    _ => [number.is_multiple_of(2), !number.is_multiple_of(3)],
                };
                for plan in 0..3 {
                    let case = Case::new(client, [&a, &b], epilogue, has, heads, seed)?;
                    let Some(plan) = case.plan(plan)? else { break };
                    let name = format!(
                        "{rows} × {cols} × {depth}, heads {heads:?}, bf16 {is_bf16}, transposed {transposed}, bias and second {has:?}, {plan}"
                    );
                    let by = (client, &bench.args.timing);
                    tally.compare(by, name, || case.fused(&plan), || case.check(&plan));
                }
            }
        }
    }
    verify_heads(bench, tally)
}

/// Checks that a left operand stored by heads gives the same bits as one stored by rows.
fn verify_heads(bench: &Bench, tally: &mut Tally) -> Result<()> {
    let client = &bench.client;
    let shapes = [
        [1, 1, 128, 64],
        [2, 8, 256, 264],
        [3, 5, 384, 512],
        [4, 2, 1280, 72],
    ];
    for (number, [batch, heads, seq, cols]) in shapes.into_iter().enumerate() {
        for (kind, transposed) in [(0, false), (1, true), (2, false), (3, true)] {
            let number = number * 4 + kind;
            if !tally.has(number) || batch * seq * heads * HEAD * cols > bench.args.most {
                continue;
            }
            let (is_bf16, seed) = (kind < 2, number as u64);
            let [rows, width] = [batch * seq, heads * HEAD];
            let by_heads = Operand::random(client, is_bf16, [1, rows * heads, HEAD], false, seed);
            let place = |row: usize, col: usize| {
                let (batch, place) = (row / seq, row % seq);
                let (head, within) = (col / HEAD, col % HEAD);
                by_heads.numbers[((batch * heads + head) * seq + place) * HEAD + within]
            };
            let numbers: Vec<f32> = (0..rows * width)
                .map(|at| place(at / width, at % width))
                .collect();
            let handle = upload(client, &numbers, by_heads.element);
            let rows_view = MatrixView::new(handle, [1, rows, width], [rows * width, width, 1]);
            let heads_view = MatrixView::by_heads(by_heads.handle.clone(), [batch, heads, seq]);
            let depth = if transposed { rows } else { width };
            let right = [1, depth, cols];
            let right = view(&Operand::random(client, is_bf16, right, false, !seed));
            let run = |view: &MatrixView, index: usize| -> Result<Option<(String, Vec<u8>)>> {
                let a = match transposed {
                    true => view.clone().transposed(),
                    false => view.clone(),
                };
                let request = ProductRequest::of(is_bf16, [&a, &right], transposed, transposed)
                    .map_err(|why| anyhow!(why))?;
                let Some(plan) = plan(client, request, index)? else {
                    return Ok(None);
                };
                let count = request.rows * request.cols * plan.parts();
                let out = poisoned(client, count, element(&request));
                let beside = EpilogueTensors::default();
                multiply(client, &plan, [&a, &right], &out, &beside)?;
                if bench.args.timing.enqueue_only {
                    flush(client)?;
                    return Ok(None);
                }
                Ok(Some((plan.to_string(), read(client, &out)?)))
            };
            for index in 0..3 {
                let (got, expected) = (run(&heads_view, index)?, run(&rows_view, index)?);
                let (Some((plan, got)), Some((_, expected))) = (got, expected) else {
                    break;
                };
                let differ = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
                let is_right = differ == 0 && got.iter().any(|byte| *byte != 0xff);
                let name = format!(
                    "{batch} × {heads} heads × {seq}, {cols} columns, bf16 {is_bf16}, transposed {transposed}, {plan}"
                );
                let found = is_right.then_some(());
                tally.count(name, found.ok_or_else(|| anyhow!("{differ} bytes differ")));
            }
        }
    }
    Ok(())
}

/// Times the model's products with their epilogues, fused and separate.
pub(super) fn times(bench: &mut Bench) -> Result<()> {
    let rows = bench.args.rows;
    let client = bench.client.clone();
    let activation = ActivationKind::GeluSigmoid;
    let gradient = Epilogue::Gradient {
        activation,
        sums: true,
    };
    let heads = Epilogue::Heads { dim: 64 };
    let up = Epilogue::Activation(activation);
    let (three, whole, one) = ([4, 8, 8, 8], [4, 8, 0, 0], [1, 8, 0, 0]);
    // Names, columns, epilogues, whether the weight is transposed, heads of parts, and whether there are a bias and a second result.
    for (name, cols, epilogue, transposed, parts, has) in [
        ("q, k, v by heads", 1536, heads, false, three, [true, false]),
        ("gradient by heads", 512, heads, true, whole, [false; 2]),
        ("u and f(u)", 2048, up, false, one, [true; 2]),
        ("du and f(u)", 2048, gradient, true, one, [true; 2]),
    ] {
        let depth = 512;
        let a = Operand::random(&client, true, [1, rows, depth], false, 1);
        let b = Operand::random(&client, true, [1, depth, cols], transposed, 2);
        let case = Case::new(&client, [&a, &b], epilogue, has, parts, 3)?;
        for index in 0..bench.args.plans {
            let Some(plan) = case.plan(index)? else {
                break;
            };
            let Some(fused) = bench.milliseconds(|| case.fused(&plan))? else {
                continue;
            };
            let apart = bench.milliseconds(|| case.apart(false))?;
            let apart = apart.unwrap_or(f64::NAN);
            println!("{name:<24} {fused:>8.4} ms, apart {apart:.4} ms  {plan}");
            bench.results.push(json!({
                "name": name, "m": rows, "n": cols, "k": depth, "ms": fused, "apart_ms": apart, "plan": plan.to_string(),
            }));
        }
    }
    Ok(())
}
