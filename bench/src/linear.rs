//! `bench-linear`: times the matmuls of layers on tensor cores at the shapes of a model, or compares them with sums in f64.

mod linear_blocks;
mod linear_epilogues;
mod linear_few;

use anyhow::{Result, anyhow, ensure};
use blocksparse_bench::compare::{ensure_sum, ensure_written, same_twice};
use blocksparse_bench::device::{self, poisoned, read};
use blocksparse_bench::numbers::{BF16, F32, decoded, half, rounding_of};
use blocksparse_bench::operand::Operand;
use blocksparse_bench::runner::{Shard, Tally, Timing, write_json};
use blocksparse_cubecl::rows::{Window, window_sums};
use burn_fused_ops::kernels::linear::{
    EpilogueTensors, MatrixView, ProductPlan, ProductRequest, multiply,
};
use clap::Parser;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::server::Handle;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

#[derive(Parser)]
#[command(
    about = "Times the products of layers on tensor cores, or compares them with sums in f64",
    version
)]
struct Args {
    /// Rows of activations; the paper's enwik8 model has 4 × 12,288.
    #[arg(long, default_value_t = 49_152)]
    rows: usize,
    #[command(flatten)]
    timing: Timing<15>,
    /// Compare results with sums in f64 and run twice, instead of timing.
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    shard: Shard,
    /// Of what is compared leave out what takes more multiplications: for the interpreter.
    #[arg(long, default_value_t = usize::MAX)]
    most: usize,
    /// Time so many of each product's plans, the best by the model first.
    #[arg(long, default_value_t = 1)]
    plans: usize,
    /// Only products of block-sparse weights.
    #[arg(long)]
    blocks: bool,
    /// Only products of few rows, as decoding has them.
    #[arg(long, conflicts_with = "blocks")]
    few: bool,
    /// Also write the numbers to this file.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
}

fn view(operand: &Operand) -> MatrixView {
    MatrixView::new(operand.handle.clone(), operand.shape, operand.strides)
}

/// Returns the plan of a product with rank `index`, if there is one.
fn plan(client: &Client, request: ProductRequest, index: usize) -> Result<Option<ProductPlan>> {
    let plans = ProductPlan::all(client, request).map_err(|why| anyhow!(why))?;
    Ok(plans.into_iter().nth(index))
}

/// Sums consecutive parts.
fn sum_parts(
    client: &Client,
    parts: &Handle,
    [count, width]: [usize; 2],
    out: &Handle,
) -> Result<()> {
    let window = Window {
        start: 0,
        width,
        pitch: width,
    };
    window_sums(client, (parts, F32), [count, 1], window, (out, F32))?;
    Ok(())
}

/// A product with its output.
struct Product {
    client: Client,
    plan: ProductPlan,
    request: ProductRequest,
    factors: [MatrixView; 2],
    out: Handle,
    /// The sum over parts, if there are any.
    sum: Handle,
}

impl Product {
    fn new(
        client: &Client,
        [a, b]: [&Operand; 2],
        wide: bool,
        parts: bool,
        index: usize,
    ) -> Result<Option<Self>> {
        let factors = [view(a), view(b)];
        let request = ProductRequest::of(a.element == BF16, factors.each_ref(), wide, parts)
            .map_err(|why| anyhow!(why))?;
        let Some(plan) = plan(client, request, index)? else {
            return Ok(None);
        };
        let count = request.batch * request.rows * request.cols;
        let element = element(&request);
        Ok(Some(Self {
            client: client.clone(),
            request,
            factors,
            out: poisoned(client, count * plan.parts(), element),
            sum: poisoned(client, if plan.parts() > 1 { count } else { 1 }, element),
            plan,
        }))
    }

    fn run(&self) -> Result<()> {
        let beside = EpilogueTensors::default();
        let factors = self.factors.each_ref();
        multiply(&self.client, &self.plan, factors, &self.out, &beside)?;
        let parts = self.plan.parts();
        if parts > 1 {
            ensure!(self.request.batch == 1, "parts are of one matrix");
            let width = self.request.rows * self.request.cols;
            sum_parts(&self.client, &self.out, [parts, width], &self.sum)?;
        }
        Ok(())
    }

    fn read(&self) -> Result<Vec<u8>> {
        let is_sum = self.plan.parts() > 1;
        read(&self.client, if is_sum { &self.sum } else { &self.out })
    }

    /// Checks that a result equals the sums in f64, is completely written, and has the same bits twice.
    fn check(&self, [a, b]: [&Operand; 2], seed: u64) -> Result<()> {
        let made = same_twice(|| {
            self.run()?;
            self.read()
        })?;
        let of = &self.request;
        let made: Vec<f64> = decoded(&made, element(of));
        let made = &made[..of.batch * of.rows * of.cols];
        ensure_written("the product", made)?;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..200 {
            let [z, i, j] = [of.batch, of.rows, of.cols].map(|length| rng.random_range(0..length));
            let terms = (0..of.depth).map(|k| a.at([z, i, k]) * b.at([z, k, j]));
            let got = made[(z * of.rows + i) * of.cols + j];
            let what = format_args!("[{z}, {i}, {j}]");
            ensure_sum(what, got, terms, rounding_of(element(of)))?;
        }
        Ok(())
    }
}

/// Returns the element type of the result.
fn element(request: &ProductRequest) -> ElemType {
    if request.wide {
        F32
    } else {
        half(request.bf16)
    }
}

struct Bench {
    client: Client,
    args: Args,
    results: Vec<Value>,
}

fn main() -> Result<()> {
    let mut bench = Bench {
        client: device::client()?,
        args: Args::parse(),
        results: Vec::new(),
    };
    let Args { few, blocks, .. } = bench.args;
    match (bench.args.verify, few, blocks) {
        (true, true, _) => linear_few::verify(&bench)?,
        (true, _, true) => linear_blocks::verify(&bench)?,
        (true, _, _) => bench.verify()?,
        (false, true, _) => linear_few::times(&mut bench)?,
        (false, _, true) => linear_blocks::times(&mut bench)?,
        (false, _, _) => bench.times()?,
    }
    write_json(bench.args.json.as_deref(), &bench.results)
}

impl Bench {
    fn times(&mut self) -> Result<()> {
        let rows = self.args.rows;
        let client = self.client.clone();
        let one = |shape, seed| Operand::random(&client, true, shape, false, seed);
        let [a, b] = [1, 2].map(|seed| one([1, 8192, 8192], seed));
        self.time("8192³", &a, &b, false)?;
        let mut total = 0.0;
        for [from, to] in [[512, 1536], [512, 512], [512, 2048], [2048, 512]] {
            let (x, dy) = (one([1, rows, from], 1), one([1, rows, to], 2));
            let weight = one([1, from, to], 3);
            let layer = format!("{from} -> {to}");
            total += self.time(&format!("forward {layer}"), &x, &weight, false)?;
            let turned = weight.transposed();
            total += self.time(&format!("dx      {layer}"), &dy, &turned, false)?;
            total += self.time(&format!("dW      {layer}"), &x.transposed(), &dy, true)?;
        }
        if !self.args.timing.enqueue_only {
            println!("all of 30 layers: {:.1} ms", 30.0 * total);
        }
        match linear_epilogues::refused(self) {
            None => linear_epilogues::times(self),
            Some(why) => {
                println!("no epilogues: {why}");
                Ok(())
            }
        }
    }

    /// Returns the median time of a product by its best plan, in ms. The gradient of a weight is f32 and may be in parts, whose summation is included.
    fn time(&mut self, name: &str, a: &Operand, b: &Operand, gradient: bool) -> Result<f64> {
        let mut first = 0.0;
        for index in 0..self.args.plans {
            let Some(product) = Product::new(&self.client, [a, b], gradient, gradient, index)?
            else {
                break;
            };
            let request = product.request;
            let Some(ms) = self.milliseconds(|| product.run())? else {
                continue;
            };
            let flops = 2.0 * (request.batch * request.rows * request.cols * request.depth) as f64;
            let rate = flops / ms / 1e9;
            println!(
                "{name:<24} {ms:>8.4} ms {rate:>7.1} TFLOP/s  {}",
                product.plan
            );
            self.results.push(json!({
                "name": name, "m": request.rows, "n": request.cols, "k": request.depth, "ms": ms, "tflops": rate,
                "plan": product.plan.to_string(),
            }));
            if index == 0 {
                first = ms;
            }
        }
        Ok(first)
    }

    /// Returns the median of a call's times by the device's clock, or `None` if it is only launched.
    fn milliseconds(&self, run: impl Fn() -> Result<()> + Sync) -> Result<Option<f64>> {
        let seconds = self.args.timing.seconds(&self.client, run)?;
        Ok(seconds.map(|seconds| seconds * 1e3))
    }

    /// Compares results with f64. They are NaN before every launch and must have the same bits twice.
    fn verify(&mut self) -> Result<()> {
        let (client, timing) = (self.client.clone(), &self.args.timing);
        let mut tally = Tally::new(self.args.shard)?;
        let shapes = [
            [1, 1, 8, 8],
            [1, 8, 8, 8],
            [1, 64, 64, 64],
            [1, 128, 256, 64],
            [1, 200, 264, 72],
            [1, 128, 256, 1024],
            [1, 136, 72, 1000],
            [3, 72, 40, 136],
            [2, 264, 512, 264],
            [1, 1000, 24, 512],
            [1, 512, 512, 4096],
            [1, 2176, 1536, 512],
            [1, 128, 2048, 12_288],
            [1, 201, 264, 77],
            [2, 67, 40, 133],
            [1, 1001, 24, 509],
        ];
        let mut number = 0u64;
        for [batch, m, n, k] in shapes {
            // Layout of the operands, element type, and whether results are f32.
            for kind in 0..16 {
                let [a_transposed, b_transposed, is_f16, wide] =
                    [4, 8, 1, 2].map(|bit| kind & bit != 0);
                if batch == 1 && wide && m * n > 1 << 20 {
                    continue;
                }
                number += 1;
                // Shards by kernel, since each process compiles its own.
                if !tally.has(kind) || batch * m * n * k > self.args.most {
                    continue;
                }
                let operand = |shape, transposed, seed| {
                    Operand::padded(&client, !is_f16, shape, transposed, seed)
                };
                let a = operand([batch, m, k], a_transposed, number);
                // Every second right operand is shared by the whole batch.
                let b_batch = if number.is_multiple_of(2) { 1 } else { batch };
                let b = operand([b_batch, k, n], b_transposed, !number);
                // The best plans and some others, with different tile widths and numbers of parts.
                for index in (0..4).chain([17, 51]) {
                    let parts = wide && batch == 1;
                    let Some(product) = Product::new(&client, [&a, &b], wide, parts, index)? else {
                        break;
                    };
                    let name = format!(
                        "{:?} transposed {a_transposed} {b_transposed}, bf16 {}, f32 {wide}, {}",
                        [batch, m, n, k],
                        !is_f16,
                        product.plan
                    );
                    let check = || product.check([&a, &b], number);
                    tally.compare((&client, timing), name, || product.run(), check);
                    if timing.enqueue_only {
                        break;
                    }
                }
            }
        }
        match linear_epilogues::refused(self) {
            None => linear_epilogues::verify(self, &mut tally)?,
            Some(why) => println!("no epilogues: {why}"),
        }
        tally.finish("products")
    }
}
