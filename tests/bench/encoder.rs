//! What `accelerate_matmul` does for a model that does not know of it: burn-nn's Transformer encoder, forward and backward, on the device that
//! `BURN_SPARSE_DEVICE` names. And whether products are right with it.

use std::process::ExitCode;
use std::time::Instant;

use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
use burn::tensor::{DType, Device, Distribution, FloatDType, IntDType, Tensor, TensorData};
use burn_blocksparse_tests::devices::devices;
use burn_fused_ops::{accelerate_matmul, accelerated_products};

const USAGE: &str = "usage: BURN_SPARSE_DEVICE=cuda bench-encoder COMMAND [accelerated]

COMMAND      time: milliseconds of an iteration of a 12-layer encoder of width 768 over 16 x 2,048 tokens in bf16
             small: the same of 2 layers of width 128 over 2 x 256 tokens
             verify: products of bf16 and f16 tensors of many shapes and strides against f64
accelerated  call accelerate_matmul first";

const REPEATS: usize = 7;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let accelerated = match args.get(1).map(String::as_str) {
        None => false,
        Some("accelerated") => true,
        Some(_) => return usage(),
    };
    if accelerated && let Err(error) = accelerate_matmul() {
        eprintln!("{error}");
        return ExitCode::FAILURE;
    }
    for device in devices() {
        match args.first().map(String::as_str) {
            Some("time") => time(device, [16, 2048], [12, 768, 12]),
            Some("small") => time(device, [2, 256], [2, 128, 2]),
            Some("verify") => {
                if !verify(&device) {
                    return ExitCode::FAILURE;
                }
            }
            _ => return usage(),
        }
    }
    println!("{} products accelerated", accelerated_products());
    ExitCode::SUCCESS
}

fn usage() -> ExitCode {
    eprintln!("{USAGE}");
    ExitCode::FAILURE
}

fn time(mut device: Device, [batch, seq]: [usize; 2], [layers, width, heads]: [usize; 3]) {
    if let Err(error) = device.configure((FloatDType::BF16, IntDType::I32)) {
        eprintln!("{error:?}");
        return;
    }
    let device = device.autodiff();
    let encoder = TransformerEncoderConfig::new(width, 4 * width, heads, layers)
        .with_dropout(0.0)
        .init(&device);
    let normal = Distribution::Normal(0.0, 1.0);
    let x: Tensor<3> = Tensor::random([batch, seq, width], normal, (&device, DType::BF16));
    let mut times = Vec::new();
    for repeat in 0..REPEATS + 2 {
        let start = Instant::now();
        let out = encoder.forward(TransformerEncoderInput::new(x.clone()));
        let loss = out.mul(x.clone()).mean();
        let gradients = loss.backward();
        let loss: f32 = loss
            .into_data()
            .convert::<f32>()
            .as_slice::<f32>()
            .map_or(f32::NAN, |x| x[0]);
        drop(gradients);
        let _ = device.sync();
        let ms = start.elapsed().as_secs_f64() * 1e3;
        if repeat < 2 {
            println!("warming up: {ms:.0} ms, mean {loss}");
        } else {
            times.push(ms);
        }
    }
    times.sort_by(f64::total_cmp);
    println!(
        "{layers} layers of {width}, {batch} x {seq} tokens, bf16: {:.1} ms an iteration (median of {REPEATS}, {:.1} to {:.1})",
        times[REPEATS / 2],
        times[0],
        times[REPEATS - 1]
    );
}

/// How a factor is made: contiguous, transposed, heads of a projection, one matrix for the batch.
#[derive(Clone, Copy, Debug)]
enum Form {
    Plain,
    Transposed,
    Heads,
    One,
}

fn factor(
    device: &Device,
    dtype: DType,
    form: Form,
    [outer, inner, rows, cols]: [usize; 4],
) -> Tensor<4> {
    let normal = Distribution::Normal(0.0, 1.0);
    let random =
        |shape: [usize; 4]| Tensor::<4>::random(shape, normal, (device, DType::F32)).cast(dtype);
    match form {
        Form::Plain => random([outer, inner, rows, cols]),
        Form::Transposed => random([outer, inner, cols, rows]).swap_dims(2, 3),
        Form::Heads => random([outer, rows, inner, cols]).swap_dims(1, 2),
        Form::One => random([1, 1, rows, cols]),
    }
}

fn numbers(data: TensorData) -> Vec<f64> {
    data.convert::<f64>().try_into_vec().unwrap_or_default()
}

fn verify(device: &Device) -> bool {
    let (mut checked, mut failed) = (0, 0);
    for dtype in [DType::BF16, DType::F16] {
        for [outer, inner, m, n, k] in [
            [1, 1, 128, 64, 64],
            [2, 3, 128, 96, 72],
            [2, 4, 200, 136, 64],
            [3, 1, 64, 768, 256],
            [1, 1, 1, 64, 64],
            [2, 2, 130, 33, 65],
        ] {
            for lhs in [Form::Plain, Form::Transposed, Form::Heads, Form::One] {
                for rhs in [Form::Plain, Form::Transposed, Form::Heads, Form::One] {
                    let a = factor(device, dtype, lhs, [outer, inner, m, k]);
                    let b = factor(device, dtype, rhs, [outer, inner, k, n]);
                    let dims = [a.dims(), b.dims()];
                    // Read before, since what is used once may be written over.
                    let (x, y) = (
                        numbers(a.clone().into_data()),
                        numbers(b.clone().into_data()),
                    );
                    let out = a.matmul(b);
                    let [_, heads, rows, cols] = out.dims();
                    let got = numbers(out.into_data());
                    checked += 1;
                    let mut worst: f64 = 0.0;
                    for (at, got) in got.into_iter().enumerate() {
                        let (i, j) = (at / cols % rows, at % cols);
                        let (z, h) = (at / cols / rows / heads, at / cols / rows % heads);
                        let matrix =
                            |of: [usize; 4]| (z % of[0] * of[1] + h % of[1]) * of[2] * of[3];
                        let (first, second) = (matrix(dims[0]), matrix(dims[1]));
                        let (mut sum, mut size) = (0.0, 0.0);
                        for t in 0..k {
                            let term = x[first + i * k + t] * y[second + t * n + j];
                            sum += term;
                            size += f64::abs(term);
                        }
                        let rounding = if dtype == DType::BF16 {
                            2f64.powi(-8)
                        } else {
                            2f64.powi(-11)
                        };
                        let bound = 1.01 * rounding * sum.abs() + size * 2f64.powi(-20) + 1e-6;
                        let error = (got - sum).abs() / bound;
                        worst = if error.is_nan() {
                            f64::INFINITY
                        } else {
                            worst.max(error)
                        };
                    }
                    if worst > 1.0 {
                        failed += 1;
                        println!(
                            "{dtype:?} {outer} x {inner} x [{m}, {k}] {lhs:?} · [{k}, {n}] {rhs:?}: {worst:.1} of the bound"
                        );
                    }
                }
            }
        }
    }
    println!("{checked} products, {failed} failed");
    failed == 0
}
