//! `llama bench`: times of reading prompts and of writing, dense and sparse beside each other.

use std::time::Instant;

use anyhow::{Result, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_paged_attention::pool::{GraphDecoder, KvPoolConfig, KvStep, PagedDecoder};
use burn_sparse_transformer::decoder::Decoder;
use burn_sparse_transformer::llama::Llama;
use clap::Args;

use crate::attention::Attention;
use crate::checkpoint::ModelArgs;
use crate::device::memory;

/// Times prompts and decoding under each attention
#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Draw the weights: for a checkpoint of which there is only config.json
    #[arg(long)]
    random: bool,
    /// dense, a pattern or a selection; once for each that is measured
    #[arg(long, default_values = ["dense"])]
    attention: Vec<Attention>,
    /// Tokens of a prompt; several with commas
    #[arg(long, value_delimiter = ',', default_value = "2048")]
    prompts: Vec<usize>,
    /// Sequences that write at once
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Tokens that each writes, behind a prompt; 0 times prompts alone
    #[arg(long, default_value_t = 16)]
    steps: usize,
    /// Times that a prompt is read, of which the median counts
    #[arg(long, default_value_t = 3)]
    repeats: usize,
}

/// # Errors
/// If the model cannot be loaded, or does not take an attention.
pub fn run(args: &BenchArgs) -> Result<()> {
    let device = args.model.device()?;
    let mut config = args.model.config()?;
    let longest = args.prompts.iter().max().copied().unwrap_or(1);
    config.context = config.context.max(longest + args.steps + 1);
    ensure!(
        args.repeats > 0 && args.batch > 0,
        "--repeats and --batch must be above 0"
    );
    let model = match args.random {
        true => args.model.random(&config, &device)?,
        false => args.model.load(&config, &device)?,
    };
    println!(
        "{:<40} {:>8} {:>11} {:>10} {:>8} {:>9} {:>10} {:>8}",
        "attention", "tokens", "prompt ms", "tokens/s", "× first", "step ms", "tokens/s", "GiB"
    );
    for &length in &args.prompts {
        let mut base = None;
        for attention in &args.attention {
            let model = attention.of(&model, args.model.block_size)?;
            let prompt = prompt_ms(&model, length, args.repeats, &device)?;
            let peak = memory(&device);
            let times = *base.get_or_insert(prompt) / prompt;
            let (step, rate) = match args.steps {
                0 => ("-".into(), "-".into()),
                _ => {
                    let (step, how) = step_ms(&model, attention, length, args, &device)?;
                    (
                        format!("{step:.2}{how}"),
                        format!("{:.0}", 1e3 * args.batch as f64 / step),
                    )
                }
            };
            println!(
                "{:<40} {length:>8} {prompt:>11.1} {:>10.0} {times:>8.2} {step:>9} {rate:>10} {:>8}",
                attention.to_string(),
                1e3 * length as f64 / prompt,
                peak.map_or("-".into(), |peak| format!("{peak:.1}")),
            );
            drop(model);
            device.sync()?;
        }
    }
    if args.steps > 0 {
        println!(
            "r: steps are replays of a CUDA graph; memory: what the device's pools hold behind the prompt, or the process at most"
        );
    }
    Ok(())
}

fn tokens(vocab: usize, [batch, seq]: [usize; 2], device: &Device) -> Tensor<2, Int> {
    // Any tokens do: what they are changes no time but where keys are chosen by content.
    let ids = (0..batch * seq).map(|at| (at * 7919 % vocab) as i32);
    Tensor::from_data(
        TensorData::new(ids.collect::<Vec<_>>(), [batch, seq]),
        device,
    )
}

/// Milliseconds until the logits behind a prompt are there.
fn prompt_ms(model: &Llama, length: usize, repeats: usize, device: &Device) -> Result<f64> {
    let prompt = tokens(model.vocab_size(), [1, length], device);
    let once = || -> Result<f64> {
        device.sync()?;
        let begun = Instant::now();
        let hidden = model.try_forward_hidden(prompt.clone())?;
        let last = model.logits(hidden.narrow(1, length - 1, 1))?;
        drop(last.into_data());
        Ok(begun.elapsed().as_secs_f64() * 1e3)
    };
    once()?;
    median((0..repeats).map(|_| once()).collect::<Result<_>>()?)
}

/// Milliseconds of a step of decoding, and how it ran.
fn step_ms(
    model: &Llama,
    attention: &Attention,
    length: usize,
    args: &BenchArgs,
    device: &Device,
) -> Result<(f64, &'static str)> {
    let config = KvPoolConfig::new(args.batch, length + args.steps + 4);
    let pool = model.new_pool(&match attention.reads_prompts_alone() {
        true => config.with_choosing_prompts(),
        false => config,
    })?;
    let mut decoder = GraphDecoder::new(model.clone(), pool)?;
    let vocab = model.vocab_size();
    let mut steps = Vec::new();
    for _ in 0..args.batch {
        let id = decoder.pool_mut().join()?;
        let prompt: Vec<u32> = (0..length).map(|at| (at * 7919 % vocab) as u32).collect();
        drop(decoder.next_logits(&prompt, &[KvStep::new(id, length)])?);
        steps.push(KvStep::new(id, 1));
    }
    let next = vec![1; args.batch];
    let mut once = || -> Result<f64> {
        device.sync()?;
        let begun = Instant::now();
        drop(decoder.next_logits(&next, &steps)?.argmax(1).into_data());
        Ok(begun.elapsed().as_secs_f64() * 1e3)
    };
    // The first steps compile, and record.
    for _ in 0..3 {
        once()?;
    }
    let times = (0..args.steps).map(|_| once()).collect::<Result<_>>()?;
    let how = if decoder.is_recorded() { "r" } else { "" };
    Ok((median(times)?, how))
}

fn median(mut times: Vec<f64>) -> Result<f64> {
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
