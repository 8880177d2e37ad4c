//! Products whose sums become something else: their times, and equality to what the row kernels make of the plain product.

use anyhow::{Result, anyhow, ensure};
use blocksparse_cubecl::rows::ActivationKind;
use blocksparse_cubecl::rows::column_sums;
use burn_fused_ops::kernels::linear::Epilogue;
use burn_fused_ops::kernels::linear::EpilogueTensors;
use burn_fused_ops::kernels::linear::HEAD;
use burn_fused_ops::kernels::linear::MatrixView;
use burn_fused_ops::kernels::linear::Order;
use burn_fused_ops::kernels::linear::ProductPlan;
use burn_fused_ops::kernels::linear::ProductRequest;
use burn_fused_ops::kernels::linear::multiply;
use burn_fused_ops::kernels::rows::ActivationBackward;
use burn_fused_ops::kernels::rows::HeadsPart;
use burn_fused_ops::kernels::rows::bias_activation;
use burn_fused_ops::kernels::rows::bias_activation_backward;
use burn_fused_ops::kernels::rows::split_heads;
use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::server::Handle;
use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;

use super::{Bench, F32, Operand};

/// A product with an epilogue, and what that reads and writes.
struct Case {
    client: Client,
    epilogue: Epilogue,
    request: ProductRequest,
    factors: [MatrixView; 2],
    bias: Option<Handle>,
    /// Batch entries and the heads of each part.
    heads: [usize; 4],
    before: Handle,
    out: Handle,
    second: Option<Handle>,
    totals: Handle,
    sums: Handle,
}

/// Why the device's tier has no epilogues, if it has none.
pub(super) fn refused(bench: &Bench) -> Option<&'static str> {
    let request = ProductRequest {
        bf16: true,
        batch: 1,
        rows: 128,
        cols: 128,
        depth: 128,
        orders: [Order::Depth, Order::Across],
        wide: false,
        parts: false,
        epilogue: Epilogue::Activation(ActivationKind::GeluSigmoid),
        by_heads: false,
    };
    ProductPlan::new(&bench.client, request).err()
}

/// What a case writes.
struct Written {
    out: Vec<u8>,
    second: Vec<u8>,
    sums: Vec<u8>,
}

impl Case {
    fn new(
        client: &Client,
        [a, b]: [&Operand; 2],
        epilogue: Epilogue,
        [has_bias, has_second]: [bool; 2],
        heads: [usize; 4],
        seed: u64,
    ) -> Result<Self> {
        let plain = ProductRequest::of(a.bf16, [&a.view, &b.view], false, false)
            .map_err(|why| anyhow!(why))?;
        let request = plain.with(epilogue);
        let (rows, cols) = (request.rows, request.cols);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let bias: Vec<u8> = (0..cols)
            .flat_map(|_| rng.random_range(-1f32..1.0).to_le_bytes())
            .collect();
        let poisoned = |bytes: usize| client.create_from_slice(&vec![0xff; bytes]);
        let before = Operand::random(client, a.bf16, [1, rows, cols], false, !seed);
        Ok(Self {
            client: client.clone(),
            epilogue,
            request,
            factors: [a.view.clone(), b.view.clone()],
            bias: has_bias.then(|| client.create_from_slice(&bias)),
            heads,
            before: before.view.handle,
            out: poisoned(request.batch * rows * cols * 2),
            second: has_second.then(|| poisoned(request.batch * rows * cols * 2)),
            totals: poisoned(2 * rows.div_ceil(128) * cols * 4),
            sums: poisoned(cols * 4),
        })
    }

    fn element(&self) -> ElemType {
        ElemType::Float(match self.request.bf16 {
            true => FloatKind::BF16,
            false => FloatKind::F16,
        })
    }

    fn seq(&self) -> usize {
        self.request.rows / self.heads[0]
    }

    /// The plan with so many better ones, if there is one.
    fn plan(&self, index: usize) -> Result<Option<ProductPlan>> {
        let plans = ProductPlan::all(&self.client, self.request).map_err(|why| anyhow!(why))?;
        Ok(plans.into_iter().nth(index))
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

    /// The same with the plain product and a row kernel; with `copy` also what is the product itself.
    fn apart(&self, copy: bool) -> Result<()> {
        let [a, b] = &self.factors;
        let plain = self.request.with(Epilogue::Plain);
        let plan = ProductPlan::new(&self.client, plain).map_err(|why| anyhow!(why))?;
        let (rows, cols) = (self.request.batch * self.request.rows, self.request.cols);
        let element = self.element();
        let made = self.client.empty(rows * cols * 2);
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
                let shape = [rows, cols];
                bias_activation(
                    &self.client,
                    (&made, element),
                    bias,
                    &self.out,
                    shape,
                    activation,
                )?;
                // It is what would be kept.
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
            // Sums of exponentials and of weights are no part of a layer.
            Epilogue::Plain
            | Epilogue::LogSums { .. }
            | Epilogue::LineSums
            | Epilogue::Highest(_) => {}
        }
        Ok(())
    }

    fn read(&self) -> Result<Written> {
        let bytes = |handle: &Handle| -> Result<Vec<u8>> {
            let bytes =
                (self.client.read_one(handle.clone())).map_err(|error| anyhow!("{error:?}"))?;
            Ok(bytes.to_vec())
        };
        Ok(Written {
            out: bytes(&self.out)?,
            second: (self.second.as_ref()).map_or(Ok(Vec::new()), bytes)?,
            sums: bytes(&self.sums)?,
        })
    }

    fn check(&self, plan: &ProductPlan) -> Result<()> {
        self.fused(plan)?;
        let first = self.read()?;
        self.fused(plan)?;
        let again = self.read()?;
        ensure!(
            first.out == again.out && first.second == again.second && first.sums == again.sums,
            "other bits the second time"
        );
        self.apart(true)?;
        let apart = self.read()?;
        let half = |bytes: &[u8]| -> Vec<f64> {
            let pairs = bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
            match self.request.bf16 {
                true => pairs
                    .map(|pair| bf16::from_le_bytes(pair).to_f64())
                    .collect(),
                false => pairs
                    .map(|pair| f16::from_le_bytes(pair).to_f64())
                    .collect(),
            }
        };
        let wide = |bytes: &[u8]| -> Vec<f64> {
            let fours = bytes
                .chunks_exact(4)
                .map(|four| [four[0], four[1], four[2], four[3]]);
            fours
                .map(|four| f64::from(f32::from_le_bytes(four)))
                .collect()
        };
        // Both round once, heads apart from each other twice: two units of the last place, where the sum with the bias may be small.
        let unit = if self.request.bf16 {
            2f64.powi(-7)
        } else {
            2f64.powi(-10)
        };
        let small = match self.epilogue {
            Epilogue::Heads { .. } => (self.request.depth as f64).sqrt() * unit,
            _ => unit * unit,
        };
        compare("result", &half(&first.out), &half(&apart.out), unit, small)?;
        compare(
            "second result",
            &half(&first.second),
            &half(&apart.second),
            unit,
            unit * unit,
        )?;
        if matches!(self.epilogue, Epilogue::Gradient { sums: true, .. }) {
            let size = 1e-4 * (self.request.rows as f64) * (self.request.depth as f64).sqrt();
            compare(
                "sums",
                &wide(&first.sums),
                &wide(&apart.sums),
                1e-4,
                1e-2 * size,
            )?;
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
    // What is compared is not all the same number.
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

/// Equality on many shapes; how many were compared and how many failed.
pub(super) fn verify(bench: &Bench) -> Result<(usize, usize)> {
    use ActivationKind::{GeluErf, GeluSigmoid, GeluTanh, None as Linear, Relu, Silu};
    let (mut checked, mut failed) = (0, 0);
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
            if (index as u64 * 4 + u64::from(is_bf16) * 2 + u64::from(transposed)) % bench.args.of
                != bench.args.shard
            {
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
                    // One part, two, or three of unlike numbers of heads.
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
                    checked += 1;
                    if bench.args.enqueue_only {
                        case.fused(&plan)?;
                        client.flush().map_err(|error| anyhow!("{error}"))?;
                        continue;
                    }
                    if let Err(error) = case.check(&plan) {
                        failed += 1;
                        println!(
                            "{rows} × {cols} × {depth}, heads {heads:?}, bf16 {is_bf16}, transposed {transposed}, bias and second {has:?}, {plan}: {error}"
                        );
                    }
                }
            }
        }
    }
    let (more, wrong) = verify_heads(bench)?;
    Ok((checked + more, failed + wrong))
}

/// A left factor that lies by heads gives the bits of the same as rows.
fn verify_heads(bench: &Bench) -> Result<(usize, usize)> {
    let (mut checked, mut failed) = (0, 0);
    let client = &bench.client;
    for (number, [batch, heads, seq, cols]) in [
        [1, 1, 128, 64],
        [2, 8, 256, 264],
        [3, 5, 384, 512],
        [4, 2, 1280, 72],
    ]
    .into_iter()
    .enumerate()
    {
        for (kind, transposed) in [(0, false), (1, true), (2, false), (3, true)] {
            let elsewhere = (number * 4 + kind) as u64 % bench.args.of != bench.args.shard;
            if elsewhere || batch * seq * heads * HEAD * cols > bench.args.most {
                continue;
            }
            let is_bf16 = kind < 2;
            let seed = (number * 4 + kind) as u64;
            let [rows, width] = [batch * seq, heads * HEAD];
            let by_heads = Operand::random(client, is_bf16, [1, rows * heads, HEAD], false, seed);
            let mut numbers = Vec::with_capacity(rows * width);
            for row in 0..rows {
                for col in 0..width {
                    let (batch, place) = (row / seq, row % seq);
                    let (head, within) = (col / HEAD, col % HEAD);
                    numbers.push(
                        by_heads.numbers[((batch * heads + head) * seq + place) * HEAD + within],
                    );
                }
            }
            let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
            let rows_view = MatrixView {
                handle: client.create_from_slice(&bytes),
                shape: [1, rows, width],
                strides: [rows * width, width, 1],
                outer: [1, 0],
                seq: None,
            };
            let heads_view =
                MatrixView::by_heads(by_heads.view.handle.clone(), [batch, heads, seq]);
            let depth = if transposed { rows } else { width };
            let right = Operand::random(client, is_bf16, [1, depth, cols], false, !seed);
            let run = |view: MatrixView, index: usize| -> Result<Option<(String, Vec<u8>)>> {
                let a = if transposed { view.transposed() } else { view };
                let request =
                    ProductRequest::of(is_bf16, [&a, &right.view], transposed, transposed)
                        .map_err(|why| anyhow!(why))?;
                let plans = ProductPlan::all(client, request).map_err(|why| anyhow!(why))?;
                let Some(plan) = plans.into_iter().nth(index) else {
                    return Ok(None);
                };
                let count =
                    request.rows * request.cols * plan.parts() * if transposed { 4 } else { 2 };
                let out = client.create_from_slice(&vec![0xff; count]);
                multiply(
                    client,
                    &plan,
                    [&a, &right.view],
                    &out,
                    &EpilogueTensors::default(),
                )?;
                if bench.args.enqueue_only {
                    client.flush().map_err(|error| anyhow!("{error}"))?;
                    return Ok(None);
                }
                let bytes = client.read_one(out).map_err(|error| anyhow!("{error:?}"))?;
                Ok(Some((plan.to_string(), bytes.to_vec())))
            };
            for index in 0..3 {
                let (got, expected) = (
                    run(heads_view.clone(), index)?,
                    run(rows_view.clone(), index)?,
                );
                let (Some((plan, got)), Some((_, expected))) = (got, expected) else {
                    break;
                };
                checked += 1;
                let differ = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
                if differ > 0 || got.iter().all(|byte| *byte == 0xff) {
                    failed += 1;
                    println!(
                        "{batch} × {heads} heads × {seq}, {cols} columns, bf16 {is_bf16}, transposed {transposed}, {plan}: {differ} bytes differ"
                    );
                }
            }
        }
    }
    Ok((checked, failed))
}

/// The model's products with their epilogues, and the same apart.
pub(super) fn times(bench: &mut Bench) -> Result<()> {
    let rows = bench.args.rows;
    let client = bench.client.clone();
    let activation = ActivationKind::GeluSigmoid;
    let gradient = Epilogue::Gradient {
        activation,
        sums: true,
    };
    let heads = Epilogue::Heads { dim: 64 };
    for (name, depth, cols, transposed, epilogue, parts, has) in [
        (
            "q, k, v by heads",
            512,
            1536,
            false,
            heads,
            [4, 8, 8, 8],
            [true, false],
        ),
        (
            "gradient by heads",
            512,
            512,
            true,
            heads,
            [4, 8, 0, 0],
            [false, false],
        ),
        (
            "u and f(u)",
            512,
            2048,
            false,
            Epilogue::Activation(activation),
            [1, 8, 0, 0],
            [true, true],
        ),
        (
            "du and f(u)",
            512,
            2048,
            true,
            gradient,
            [1, 8, 0, 0],
            [true, true],
        ),
    ] {
        let a = Operand::random(&client, true, [1, rows, depth], false, 1);
        let b = Operand::random(&client, true, [1, depth, cols], transposed, 2);
        let case = Case::new(&client, [&a, &b], epilogue, has, parts, 3)?;
        for index in 0..bench.args.plans {
            let Some(plan) = case.plan(index)? else {
                break;
            };
            if bench.args.enqueue_only {
                case.fused(&plan)?;
                client.flush().map_err(|error| anyhow!("{error}"))?;
                continue;
            }
            let fused = bench.median(|| case.fused(&plan))?;
            let apart = bench.median(|| case.apart(false))?;
            println!("{name:<24} {fused:>8.4} ms, apart {apart:.4} ms  {plan}");
            bench.results.push(json!({
                "name": name, "m": rows, "n": cols, "k": depth, "ms": fused, "apart_ms": apart, "plan": plan.to_string(),
            }));
        }
    }
    Ok(())
}
