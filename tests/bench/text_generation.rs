//! A model of the sizes of Burn's example `text-generation`, trained: its encoder as burn-nn has it, with `SparseAttention` in place of the lines of attention
//! alone, and as `SparseTransformerEncoder`. Each in a process of its own, so that its memory is its own, on the device that `BURN_SPARSE_DEVICE` names.

use std::error::Error;
use std::process::{Command, ExitCode};
use std::time::Instant;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::attention::{MultiHeadAttention, generate_autoregressive_mask};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_blocksparse_tests::devices::devices;
use burn_fused_ops::{CrossEntropyOptions, linear_cross_entropy};
use burn_sparse_transformer::{
    Pattern, Precision, SparseAttention, SparseAttentionConfig, SparseTransformerEncoder,
    SparseTransformerEncoderInput,
};

#[path = "program.rs"]
mod program;

use program::{median, number};

const USAGE: &str = "usage: BURN_SPARSE_DEVICE=cuda bench-text-generation [LAYERS HEADS BATCH SEQ STEPS WIDTH VOCAB]

LAYERS HEADS   of the encoder, 12 and 6 (Burn's example has 6 and 12)
BATCH SEQ      tokens of a step, 8 and 512
STEPS          that are timed, 20
WIDTH VOCAB    384 and 50257";

const DEFAULTS: [usize; 7] = [12, 6, 8, 512, 20, 384, 50_257];

/// Steps that compile, and are not timed.
const WARM_UPS: usize = 3;

/// What is trained: what computes the encoder, its precision, and the largest difference of a loss.
const ROWS: [(&str, Precision, f64); 5] = [
    (BURN, Precision::F32, 0.0),
    (ATTENTION, Precision::F32, 5e-3),
    (ENCODER, Precision::F32, 5e-3),
    (ATTENTION, Precision::Bf16, 5e-2),
    (ENCODER, Precision::Bf16, 5e-2),
];
const BURN: &str = "burn-nn";
const ATTENTION: &str = "SparseAttention";
const ENCODER: &str = "SparseTransformerEncoder";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.split_first() {
        Some((row, sizes)) if row == "row" => child(sizes),
        _ => parent(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn sizes(args: &[String]) -> Result<[usize; 7], Box<dyn Error>> {
    let mut sizes = DEFAULTS;
    for (place, size) in sizes.iter_mut().enumerate() {
        *size = number(args, place, *size).ok_or(USAGE)?;
    }
    match args.len() > sizes.len() {
        true => Err(USAGE.into()),
        false => Ok(sizes),
    }
}

/// Runs a process for each row, and compares their losses.
fn parent(args: &[String]) -> Result<(), Box<dyn Error>> {
    let sizes = sizes(args)?;
    let [layers, heads, batch, seq, ..] = sizes;
    println!("{layers} layers, {heads} heads, {batch} x {seq} tokens, AdamW");
    println!(
        "{:<32} {:>9} {:>9} {:>10} {:>10} {:>11}",
        "encoder", "ms/step", "GiB", "first loss", "last loss", "difference"
    );
    let mut dense: Option<Vec<f64>> = None;
    let mut failed = Vec::new();
    for (at, (name, precision, most)) in ROWS.into_iter().enumerate() {
        let mut row = Command::new(std::env::current_exe()?);
        row.args(["row".into(), at.to_string()]);
        let output = row.args(sizes.map(|size| size.to_string())).output()?;
        let printed = String::from_utf8(output.stdout)?;
        let label = format!("{name}, {precision:?}");
        let Some(line) = printed.lines().find_map(|line| line.strip_prefix("row ")) else {
            let reason = String::from_utf8_lossy(&output.stderr);
            let reason = reason.lines().last().unwrap_or("no reason");
            println!("{label:<32} {reason}");
            failed.push(format!("{label}: {reason}"));
            continue;
        };
        let numbers = line.split(' ').map(str::parse);
        let numbers: Vec<f64> = numbers.collect::<Result<_, _>>()?;
        let [ms, gib, losses @ ..] = numbers.as_slice() else {
            return Err(format!("a row of {line}").into());
        };
        let (first, last) = (losses[0], losses[losses.len() - 1]);
        let dense = dense.get_or_insert_with(|| losses.to_vec());
        let differences = dense.iter().zip(losses).map(|(a, b)| (a - b).abs());
        let difference = differences.max_by(f64::total_cmp).unwrap_or(f64::NAN);
        println!("{label:<32} {ms:>9.1} {gib:>9.2} {first:>10.4} {last:>10.4} {difference:>11.1e}");
        if difference.is_nan() || difference > most {
            failed.push(format!(
                "{label}: losses differ by {difference:e}, above {most:e}"
            ));
        }
    }
    println!("difference: of the losses of all steps from the first row's, the largest");
    match failed.is_empty() {
        true => Ok(()),
        false => Err(failed.join("\n").into()),
    }
}

/// Trains a row's model and prints milliseconds, GiB and losses.
fn child(args: &[String]) -> Result<(), Box<dyn Error>> {
    let (row, args) = args.split_first().ok_or(USAGE)?;
    let (name, precision, _) = *ROWS.get(row.parse::<usize>()?).ok_or(USAGE)?;
    let sizes = sizes(args)?;
    let device = devices().into_iter().next().ok_or("no device")?;
    let [_, _, batch, seq, steps, _, vocab] = sizes;
    // Any tokens do, the same in all rows.
    let tokens: Vec<i32> = (0..batch * (seq + 1))
        .map(|at| ((at * at * 31 + at * 7919) % vocab) as i32)
        .collect();
    let data = TensorData::new(tokens, [batch, seq + 1]);
    let tokens = Tensor::<2, Int>::from_data(data, &device.clone().autodiff());
    let [read, next] = [0, 1].map(|from| tokens.clone().narrow(1, from, seq));
    let mut model = Model::new(name, precision, sizes, &device.clone().autodiff())?;
    let mut optimizer = AdamWConfig::new().init();
    let (mut times, mut losses) = (Vec::new(), Vec::new());
    for step in 0..WARM_UPS + steps {
        device.sync()?;
        let begun = Instant::now();
        let loss = model.loss(read.clone(), next.clone())?;
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(3e-4, model, gradients);
        device.sync()?;
        if step >= WARM_UPS {
            times.push(begun.elapsed().as_secs_f64() * 1e3);
        }
        losses.push(f64::from(loss.into_scalar::<f32>()));
    }
    let losses: Vec<String> = losses.iter().map(f64::to_string).collect();
    let gib = memory(&device).unwrap_or(f64::NAN);
    println!("row {} {gib} {}", median(times), losses.join(" "));
    Ok(())
}

/// GiB that the device's pools reserved, or else this process's peak.
fn memory(device: &Device) -> Option<f64> {
    let reserved = device.memory_pool_usage().map(|usage| usage.bytes_reserved);
    let bytes = reserved.or_else(|| {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let mut lines = status.lines();
        let peak = lines.find_map(|line| line.strip_prefix("VmHWM:"))?;
        Some(peak.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
    })?;
    Some(bytes as f64 / f64::from(1 << 30))
}

/// An encoder between embeddings and logits.
#[derive(Module, Debug)]
struct Model {
    tokens: Embedding,
    positions: Embedding,
    encoder: Encoder,
    /// What burn-nn's layers attend by, if it is not burn-nn.
    attention: Option<SparseAttention>,
    output: Linear,
}

#[derive(Module, Debug)]
enum Encoder {
    Burn(TransformerEncoder),
    Ours(SparseTransformerEncoder),
}

/// burn-nn's layers, whose queries, keys and values go to `attention`.
fn forward(encoder: &TransformerEncoder, attention: &SparseAttention, x: Tensor<3>) -> Tensor<3> {
    let mut x = x;
    for layer in &encoder.layers {
        x = x.clone() + attend(&layer.mha, attention, layer.norm_2.forward(x));
        x = x.clone() + layer.pwff.forward(layer.norm_1.forward(x));
    }
    x
}

fn attend(mha: &MultiHeadAttention, attention: &SparseAttention, x: Tensor<3>) -> Tensor<3> {
    let [batch, seq, width] = x.dims();
    let heads = |linear: &Linear| {
        let heads = linear.forward(x.clone());
        let heads = heads.reshape([batch, seq, mha.n_heads, width / mha.n_heads]);
        heads.swap_dims(1, 2)
    };
    let [q, k, v] = [&mha.query, &mha.key, &mha.value].map(heads);
    let out = attention.forward(q, k, v).swap_dims(1, 2);
    mha.output.forward(out.reshape([batch, seq, width]))
}

/// Parameters are drawn when they are first read: here, in the same order in all rows.
struct Draw;

impl ModuleMapper for Draw {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        drop(param.val());
        param
    }
}

impl Model {
    fn new(
        name: &str,
        precision: Precision,
        [layers, heads, _, seq, _, width, vocab]: [usize; 7],
        device: &Device,
    ) -> Result<Self, Box<dyn Error>> {
        device.seed(1);
        let encoder = TransformerEncoderConfig::new(width, 4 * width, heads, layers)
            .with_norm_first(true)
            .with_dropout(0.0)
            .init(device);
        let encoder = encoder.map(&mut Draw);
        let attention = SparseAttentionConfig::new(Pattern::causal())
            .with_block_size(64)
            .with_precision(precision);
        let attention = match name {
            ATTENTION => Some(attention.try_init(device)?),
            _ => None,
        };
        let encoder = match name {
            ENCODER => {
                let ours = SparseTransformerEncoder::from_dense(&encoder, Pattern::causal(), 64)?;
                Encoder::Ours(ours.with_precision(precision)?)
            }
            _ => Encoder::Burn(encoder),
        };
        Ok(Self {
            tokens: EmbeddingConfig::new(vocab, width).init(device),
            positions: EmbeddingConfig::new(seq, width).init(device),
            encoder,
            attention,
            output: LinearConfig::new(width, vocab)
                .with_bias(false)
                .init(device),
        })
    }

    fn loss(
        &self,
        tokens: Tensor<2, Int>,
        next: Tensor<2, Int>,
    ) -> Result<Tensor<1>, Box<dyn Error>> {
        let [batch, seq] = tokens.dims();
        let device = tokens.device();
        let positions = Tensor::arange(0..seq as i64, &device).reshape([1, seq]);
        let positions = self.positions.forward(positions);
        let x = (self.tokens.forward(tokens) + positions) / 2;
        let next = next.reshape([batch * seq]);
        let x = match (&self.encoder, &self.attention) {
            (Encoder::Burn(encoder), Some(attention)) => forward(encoder, attention, x),
            (Encoder::Burn(encoder), None) => {
                let mask = generate_autoregressive_mask(batch, seq, &device);
                encoder.forward(TransformerEncoderInput::new(x).mask_attn(mask))
            }
            (Encoder::Ours(encoder), _) => {
                let x = encoder.try_forward(SparseTransformerEncoderInput::new(x))?;
                let [_, _, width] = x.dims();
                // It stores no logits.
                return Ok(linear_cross_entropy(
                    x.reshape([batch * seq, width]),
                    self.output.weight.val(),
                    next.without_autodiff(),
                    &CrossEntropyOptions::default().check_targets(false),
                )?);
            }
        };
        let logits = self.output.forward(x);
        let [_, _, vocab] = logits.dims();
        let logits = logits.reshape([batch * seq, vocab]);
        let loss = CrossEntropyLossConfig::new().init(&device);
        Ok(loss.forward(logits, next))
    }
}
