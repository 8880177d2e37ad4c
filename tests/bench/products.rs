//! Times Burn's own matrix products at the shapes of the paper's enwik8 model, on the device that `BURN_SPARSE_DEVICE` names: what a layer's
//! products cost, and in which form they cost least.

mod program;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_blocksparse_tests::devices::devices;
use program::{median, number};

const USAGE: &str = "usage: BURN_SPARSE_DEVICE=cuda bench-products [DTYPE] [ROWS] [SECONDS]

DTYPE    bf16 (default), f16 or f32
ROWS     rows of activations (default 49152)
SECONDS  how long to go on: forms that it has no time for are left out (default 300)";

/// Inputs and outputs of the products.
const LAYERS: [[usize; 2]; 4] = [[512, 1536], [512, 512], [512, 2048], [2048, 512]];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let dtype = match args.first().map(String::as_str) {
        None | Some("bf16") => Some(DType::BF16),
        Some("f16") => Some(DType::F16),
        Some("f32") => Some(DType::F32),
        _ => None,
    };
    let (Some(dtype), Some(rows), Some(seconds), 0..=3) = (
        dtype,
        number(&args, 1, 49_152),
        number(&args, 2, 300),
        args.len(),
    ) else {
        eprintln!("{USAGE}");
        return ExitCode::FAILURE;
    };
    for device in devices() {
        println!("{device:?}, {dtype:?}, {rows} rows");
        println!(
            "{:<10} {:<14} {:<26} {:>9} {:>9} {:>9}",
            "product", "layer", "form", "ms", "TFLOP/s", "first, s"
        );
        let bench = Bench {
            end: Instant::now() + Duration::from_secs(seconds as u64),
            device,
            dtype,
            rows,
        };
        bench.run();
    }
    ExitCode::SUCCESS
}

struct Bench {
    end: Instant,
    device: Device,
    dtype: DType,
    rows: usize,
}

impl Bench {
    fn random<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        let normal = Distribution::Normal(0.0, 1.0);
        let x: Tensor<D> = Tensor::random(shape, normal, (&self.device, DType::F32));
        x.cast(self.dtype)
    }

    /// The most promising form of each product first.
    fn run(&self) {
        let rows = self.rows;
        self.yardstick();
        for grouped in [0, 1024, 4096, 12_288, 256] {
            if !rows.is_multiple_of(grouped.max(1)) {
                continue;
            }
            for [from, to] in LAYERS {
                let layer = format!("{from} -> {to}");
                // One tall product, or one for each group of rows.
                let (groups, each) = match grouped {
                    0 => (1, rows),
                    each => (rows / each, each),
                };
                let form = format!("{groups} of {each} rows");
                let x = self.random([groups, each, from]);
                let dy = self.random([groups, each, to]);
                let weight = self.random([1, from, to]);
                if grouped != 256 {
                    self.time("forward", &layer, &form, [from, to], || {
                        x.clone().matmul(weight.clone())
                    });
                    self.time("dgrad", &layer, &form, [from, to], || {
                        dy.clone().matmul(weight.clone().swap_dims(1, 2))
                    });
                }
                self.time("wgrad", &layer, &form, [from, to], || {
                    x.clone().swap_dims(1, 2).matmul(dy.clone())
                });
            }
        }
    }

    fn yardstick(&self) {
        let [a, b] = [(); 2].map(|_| self.random([1, 8192, 8192]));
        let ms = self.measure(|| a.clone().matmul(b.clone()));
        let rate = 2.0 * 8192f64.powi(3) / ms.0 / 1e9;
        println!("8192³: {:.3} ms, {rate:.0} TFLOP/s", ms.0);
    }

    fn time(
        &self,
        product: &str,
        layer: &str,
        form: &str,
        [from, to]: [usize; 2],
        call: impl Fn() -> Tensor<3>,
    ) {
        if Instant::now() > self.end {
            return;
        }
        let (ms, first) = self.measure(call);
        let rate = 2.0 * (self.rows * from * to) as f64 / ms / 1e9;
        println!("{product:<10} {layer:<14} {form:<26} {ms:>9.4} {rate:>9.1} {first:>9.1}");
    }

    /// The median of five rounds of ten calls each, in ms, and seconds of the first call.
    fn measure(&self, call: impl Fn() -> Tensor<3>) -> (f64, f64) {
        const CALLS: u32 = 10;
        let began = Instant::now();
        let result = call();
        self.sync();
        let first = began.elapsed().as_secs_f64();
        // A kernel that failed to launch says so when its result is read.
        let [a, b, _] = result.dims();
        let last = result.slice([a - 1..a, b - 1..b]).cast(DType::F32).abs();
        assert!(last.sum().into_scalar::<f32>() > 0.0, "no product");
        let rounds = (0..5).map(|_| {
            let began = Instant::now();
            (0..CALLS).for_each(|_| drop(call()));
            self.sync();
            began.elapsed().as_secs_f64() * 1e3 / f64::from(CALLS)
        });
        (median(rounds.collect()), first)
    }

    fn sync(&self) {
        self.device.sync().expect("the device works");
    }
}
