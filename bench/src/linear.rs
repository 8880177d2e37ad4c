//! `bench-linear`: the products of layers on tensor cores, at the shapes of a model: times, and equality to sums in f64.

mod device_time;
mod linear_blocks;
mod linear_epilogues;

use anyhow::{Context, Result, anyhow, ensure};
use blocksparse_cubecl::rows::{Window, window_sums};
use burn_fused_ops::kernels::linear::EpilogueTensors;
use burn_fused_ops::kernels::linear::MatrixView;
use burn_fused_ops::kernels::linear::ProductPlan;
use burn_fused_ops::kernels::linear::ProductRequest;
use burn_fused_ops::kernels::linear::multiply;
use clap::Parser;
use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::server::Handle;
use half::{bf16, f16};
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
    /// Timed runs; the median is reported.
    #[arg(long, default_value_t = 15)]
    repeats: usize,
    /// Compare results with sums in f64 and run twice, instead of timing.
    #[arg(long)]
    verify: bool,
    /// Of what is compared only every `of`-th, from this on: for several processes side by side.
    #[arg(long, default_value_t = 0)]
    shard: u64,
    /// See `--shard`.
    #[arg(long, default_value_t = 1)]
    of: u64,
    /// Of what is compared leave out what takes more multiplications: for the interpreter.
    #[arg(long, default_value_t = usize::MAX)]
    most: usize,
    /// Time so many of each product's plans, the best by the model first.
    #[arg(long, default_value_t = 1)]
    plans: usize,
    /// Only products of block-sparse weights.
    #[arg(long)]
    blocks: bool,
    /// Cycles by which the second warpgroup begins later.
    #[arg(long)]
    stagger: Option<u32>,
    /// Also write the numbers to this file.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// Launch every kernel once and wait for nothing: for looking at what is compiled.
    #[arg(long)]
    enqueue_only: bool,
}

const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Numbers in half precision on the device and here.
struct Operand {
    view: MatrixView,
    bf16: bool,
    numbers: Vec<u16>,
}

impl Operand {
    /// Between −1 and 1. `across` says that columns are what is contiguous.
    fn random(
        client: &Client,
        bf16_: bool,
        shape: [usize; 3],
        transposed: bool,
        seed: u64,
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let count = shape.iter().product();
        let numbers: Vec<u16> = (0..count)
            .map(|_| {
                let x: f32 = rng.random_range(-1.0..1.0);
                match bf16_ {
                    true => bf16::from_f32(x).to_bits(),
                    false => f16::from_f32(x).to_bits(),
                }
            })
            .collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        let [_, rows, cols] = shape;
        let strides = match transposed {
            true => [rows * cols, 1, rows],
            false => [rows * cols, cols, 1],
        };
        let view = MatrixView {
            handle: client.create_from_slice(&bytes),
            shape,
            strides,
            outer: [1, 0],
            seq: None,
        };
        Self {
            view,
            bf16: bf16_,
            numbers,
        }
    }

    /// The same of a buffer whose rows begin at multiples of 16 bytes, whatever their length is.
    fn padded(
        client: &Client,
        bf16_: bool,
        shape: [usize; 3],
        transposed: bool,
        seed: u64,
    ) -> Self {
        let [batch, rows, cols] = shape;
        let [rows, cols] = [rows, cols].map(|length| length.next_multiple_of(8));
        let mut whole = Self::random(client, bf16_, [batch, rows, cols], transposed, seed);
        whole.view.shape = shape;
        whole
    }

    fn at(&self, place: [usize; 3]) -> f64 {
        let at =
            (0..3).map(|dim| place[dim].min(self.view.shape[dim] - 1) * self.view.strides[dim]);
        let bits = self.numbers[at.sum::<usize>()];
        match self.bf16 {
            true => bf16::from_bits(bits).to_f64(),
            false => f16::from_bits(bits).to_f64(),
        }
    }

    fn transposed(&self) -> Self {
        Self {
            view: self.view.clone().transposed(),
            bf16: self.bf16,
            numbers: self.numbers.clone(),
        }
    }
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
        let factors = [&a.view, &b.view];
        let request =
            ProductRequest::of(a.bf16, factors, wide, parts).map_err(|why| anyhow!(why))?;
        let plans = ProductPlan::all(client, request).map_err(|why| anyhow!(why))?;
        let Some(plan) = plans.into_iter().nth(index) else {
            return Ok(None);
        };
        let count = request.batch * request.rows * request.cols;
        let bytes = if wide { 4 } else { 2 };
        // All bits set are NaN.
        let poisoned = |count: usize| client.create_from_slice(&vec![0xff; count]);
        Ok(Some(Self {
            client: client.clone(),
            plan,
            request,
            factors: factors.map(Clone::clone),
            out: poisoned(count * plan.parts() * bytes),
            sum: poisoned(if plan.parts() > 1 { count * bytes } else { 4 }),
        }))
    }

    fn run(&self) -> Result<()> {
        let [a, b] = &self.factors;
        let beside = EpilogueTensors::default();
        multiply(&self.client, &self.plan, [a, b], &self.out, &beside)?;
        let parts = self.plan.parts();
        if parts > 1 {
            ensure!(self.request.batch == 1, "parts are of one matrix");
            let width = self.request.rows * self.request.cols;
            let window = Window {
                start: 0,
                width,
                pitch: width,
            };
            window_sums(
                &self.client,
                (&self.out, F32),
                [parts, 1],
                window,
                (&self.sum, F32),
            )?;
        }
        Ok(())
    }

    /// The result's bytes.
    fn read(&self) -> Result<Vec<u8>> {
        let handle = if self.plan.parts() > 1 {
            &self.sum
        } else {
            &self.out
        };
        let bytes = self
            .client
            .read_one(handle.clone())
            .map_err(|error| anyhow!("{error:?}"))?;
        Ok(bytes.to_vec())
    }

    fn number(&self, bytes: &[u8], at: usize) -> f64 {
        match (self.request.wide, self.request.bf16) {
            (true, _) => f64::from(f32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[4 * at + i]))),
            (_, true) => bf16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f64(),
            _ => f16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f64(),
        }
    }
}

struct Bench {
    client: Client,
    args: Args,
    results: Vec<Value>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let client = device().client();
    let mut bench = Bench {
        client,
        args,
        results: Vec::new(),
    };
    match (bench.args.verify, bench.args.blocks) {
        (true, true) => linear_blocks::verify(&bench)?,
        (true, false) => bench.verify()?,
        (false, true) => linear_blocks::times(&mut bench)?,
        (false, false) => bench.times()?,
    }
    if let Some(path) = &bench.args.json {
        let text = serde_json::to_string_pretty(&bench.results)?;
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

fn device() -> cubecl::Device {
    #[cfg(feature = "cuda")]
    return cubecl::Device::Cuda(Default::default());
    #[cfg(not(feature = "cuda"))]
    return cubecl::Device::Wgpu(Default::default());
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
            total += self.time(
                &format!("dx      {layer}"),
                &dy,
                &weight.transposed(),
                false,
            )?;
            total += self.time(&format!("dW      {layer}"), &x.transposed(), &dy, true)?;
        }
        if !self.args.enqueue_only {
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

    /// The median of a product by the best plan, in ms. A weight's gradient is f32, and may be in parts, whose sum is in the time.
    fn time(&mut self, name: &str, a: &Operand, b: &Operand, gradient: bool) -> Result<f64> {
        let mut first = 0.0;
        for index in 0..self.args.plans {
            let Some(product) = Product::new(&self.client, [a, b], gradient, gradient, index)?
            else {
                break;
            };
            let product = match self.args.stagger {
                Some(cycles) => Product {
                    plan: product.plan.with_stagger(cycles),
                    ..product
                },
                None => product,
            };
            let request = product.request;
            if self.args.enqueue_only {
                product.run()?;
                self.client.flush().map_err(|error| anyhow!("{error}"))?;
                continue;
            }
            let ms = self.median(|| product.run())?;
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

    /// The median of a call's times by the device's clock, in ms.
    fn median(&self, run: impl Fn() -> Result<()> + Sync) -> Result<f64> {
        Ok(device_time::median(&self.client, self.args.repeats, run)? * 1e3)
    }

    /// Results against f64, NaN before every launch, and the same bits twice.
    fn verify(&mut self) -> Result<()> {
        let client = self.client.clone();
        let (mut failed, mut checked) = (0, 0);
        let mut number = 0u64;
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
        for shape in shapes {
            for lies in 0..4u64 {
                let [a_transposed, b_transposed] = [lies & 1 != 0, lies & 2 != 0];
                for kind in 0..4u64 {
                    let (is_bf16, wide) = (kind & 1 == 0, kind & 2 != 0);
                    let [batch, m, n, k] = shape;
                    if batch == 1 && kind > 1 && m * n > 1 << 20 {
                        continue;
                    }
                    number += 1;
                    // Shards by kernel: each compiles its own.
                    let elsewhere = (lies * 4 + kind) % self.args.of != self.args.shard;
                    if elsewhere || batch * m * n * k > self.args.most {
                        continue;
                    }
                    let a = Operand::padded(&client, is_bf16, [batch, m, k], a_transposed, number);
                    // Every second right factor goes with the whole batch.
                    let b_batch = if number.is_multiple_of(2) { 1 } else { batch };
                    let b =
                        Operand::padded(&client, is_bf16, [b_batch, k, n], b_transposed, !number);
                    // The best plans, and some of the others: columns of a tile, numbers of parts.
                    for index in (0..4).chain([17, 51]) {
                        let parts = wide && batch == 1;
                        let Some(product) = Product::new(&client, [&a, &b], wide, parts, index)?
                        else {
                            break;
                        };
                        checked += 1;
                        if let Err(error) = self.check(&product, [&a, &b], number) {
                            failed += 1;
                            println!(
                                "{shape:?} transposed {a_transposed} {b_transposed}, bf16 {is_bf16}, f32 {wide}, {}: {error}",
                                product.plan
                            );
                        }
                        if self.args.enqueue_only {
                            break;
                        }
                    }
                }
            }
        }
        match linear_epilogues::refused(self) {
            None => {
                let (more, wrong) = linear_epilogues::verify(self)?;
                (checked, failed) = (checked + more, failed + wrong);
            }
            Some(why) => println!("no epilogues: {why}"),
        }
        println!("{checked} products, {failed} failed");
        ensure!(failed == 0, "{failed} products are wrong");
        Ok(())
    }

    fn check(&self, product: &Product, [a, b]: [&Operand; 2], seed: u64) -> Result<()> {
        product.run()?;
        if self.args.enqueue_only {
            return self.client.flush().map_err(|error| anyhow!("{error}"));
        }
        let first = product.read()?;
        product.run()?;
        ensure!(product.read()? == first, "other bits the second time");
        let ProductRequest {
            batch,
            rows,
            cols,
            depth,
            wide,
            bf16,
            ..
        } = product.request;
        let count = batch * rows * cols;
        for at in 0..count {
            ensure!(
                !product.number(&first, at).is_nan(),
                "number {at} of {count} was not written"
            );
        }
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let rounding = match (wide, bf16) {
            (true, _) => 0.0,
            (_, true) => 2f64.powi(-8),
            _ => 2f64.powi(-11),
        };
        for _ in 0..200 {
            let [z, i, j] = [batch, rows, cols].map(|length| rng.random_range(0..length));
            let terms = (0..depth).map(|k| a.at([z, i, k]) * b.at([z, k, j]));
            let (sum, size) =
                terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + f64::abs(x)));
            let got = product.number(&first, (z * rows + i) * cols + j);
            // Sums are f32 and truncated by tensor cores.
            let bound = 1.01 * rounding * f64::abs(sum) + size * 2f64.powi(-21) + 1e-7;
            ensure!(
                (got - sum).abs() <= bound,
                "[{z}, {i}, {j}] is {got}, and {sum} in f64: {:.1} of the bound",
                (got - sum).abs() / bound
            );
        }
        Ok(())
    }
}
