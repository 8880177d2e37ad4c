//! `llama bench`: times of prompts and of decoding, dense next to sparse.

use std::slice;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_blocksparse::graph::CapturedGraph;
use burn_paged_attention::pool::{GraphDecoder, KvPoolConfig, KvStep, PagedDecoder, SequenceId};
use burn_sparse_transformer::TransformerError;
use burn_sparse_transformer::decoder::Decoder;
use burn_sparse_transformer::llama::Llama;
use clap::Args;

use crate::attention::{Attention, Kind};
use crate::cache::CacheArgs;
use crate::checkpoint::ModelArgs;
use crate::device::memory;
use crate::rows::{Setting, settings};

/// Time prompts and decoding with each attention
#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Use random weights: only config.json is needed
    #[arg(long)]
    random: bool,
    /// dense, a pattern or a selection; repeat to compare
    #[arg(long, default_values = ["dense"])]
    attention: Vec<Attention>,
    /// Tokens of a prompt; several, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "2048")]
    prompts: Vec<usize>,
    /// Sequences at once
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Decoding steps after the prompt; 0 times prompts only
    #[arg(long, default_value_t = 16)]
    steps: usize,
    #[command(flatten)]
    cache: CacheArgs,
    /// Drafted tokens that each sequence reads in a step and rolls back
    #[arg(long, default_value_t = 0)]
    drafts: usize,
    /// Capture the prompt's pass in a CUDA graph and time its replays
    #[arg(long)]
    graph: bool,
    /// Repetitions of a prompt; their median counts
    #[arg(long, default_value_t = 3)]
    repeats: usize,
}

pub fn run(args: &BenchArgs) -> Result<()> {
    let device = args.model.device()?;
    let mut checkpoint = args.model.open()?;
    let longest = args.prompts.iter().max().copied().unwrap_or(1);
    let context = &mut checkpoint.config.context;
    *context = (*context).max(longest + written(args.steps) + args.drafts);
    ensure!(
        args.repeats > 0 && args.batch > 0,
        "--repeats and --batch must be above 0"
    );
    let model = match args.random {
        true => checkpoint.random(&device)?,
        false => checkpoint.load(&device)?,
    };
    println!(
        "{:<40} {:>8} {:>11} {:>10} {:>8} {:>9} {:>8} {:>10} {:>8}",
        "attention",
        "tokens",
        "prompt ms",
        "tokens/s",
        "× first",
        "step ms",
        "mean ms",
        "tokens/s",
        "GiB"
    );
    let caches = args.cache.caches()?;
    for &length in &args.prompts {
        let mut base = None;
        for attention in &args.attention {
            let model = attention.of(&model, args.model.block_size)?;
            let prompt = prompt_ms(&model, length, args, &device)?;
            let peak = memory(&device);
            let times = *base.get_or_insert(prompt) / prompt;
            let read = format!(
                "{prompt:>11.1} {:>10.0} {times:>8.2}",
                1e3 * length as f64 / prompt
            );
            let peak = peak.map_or("-".into(), |peak| format!("{peak:.1}"));
            let row = |name: &str, [step, mean, rate]: [String; 3]| {
                println!("{name:<40} {length:>8} {read} {step:>9} {mean:>8} {rate:>10} {peak:>8}");
            };
            if args.steps == 0 {
                row(&attention.to_string(), [(); 3].map(|()| "-".into()));
            }
            let settings = settings(slice::from_ref(attention), &caches).into_iter();
            for setting in settings.filter(|_| args.steps > 0) {
                let name = setting.label();
                let step = Steps::new(&model, setting, length, args, &device)?;
                let replayed = if step.reason.is_none() { "r" } else { "" };
                let median = format!("{:.2}{replayed}", step.median);
                let rate = format!("{:.0}", 1e3 * args.batch as f64 / step.mean);
                row(&name, [median, format!("{:.2}", step.mean), rate]);
                if let Some(reason) = step.reason {
                    println!("  one by one: {reason}");
                }
            }
            drop(model);
            device.sync()?;
        }
    }
    if args.steps > 0 {
        println!(
            "r: steps are replays of a CUDA graph; memory: what the device's pools hold after the prompt, or the process at most"
        );
    }
    Ok(())
}

fn tokens(vocab: usize, [batch, seq]: [usize; 2], device: &Device) -> Tensor<2, Int> {
    // Any tokens do: they affect times only where keys are chosen by content.
    let ids = (0..batch * seq).map(|at| (at * 7919 % vocab) as i32);
    let data = TensorData::new::<i32, _>(ids.collect(), [batch, seq]);
    Tensor::from_data(data, device)
}

/// Returns the milliseconds until the logits after a prompt are computed.
fn prompt_ms(model: &Llama, length: usize, args: &BenchArgs, device: &Device) -> Result<f64> {
    let prompt = tokens(model.vocab_size(), [1, length], device);
    let last = || last_logits(model, prompt.clone());
    if !args.graph {
        return Ok(median(times(args.repeats, 1, device, last)?));
    }
    let mut graph = CapturedGraph::new(device, last)?;
    let times = times(args.repeats, WARM_UPS, device, || graph.run().cloned())?;
    match graph.fallback_reason() {
        Some(reason) => bail!("--graph: {reason}"),
        None => Ok(median(times)),
    }
}

/// Returns the logits after the last token, `[batch, vocab_size]`.
fn last_logits(model: &Llama, tokens: Tensor<2, Int>) -> Result<Tensor<2>, TransformerError> {
    let hidden = model.try_forward_hidden(tokens)?;
    let [batch, seq, _] = hidden.dims();
    let logits = model.logits(hidden.narrow(1, seq - 1, 1))?;
    Ok(logits.reshape([batch, model.vocab_size()]))
}

/// Returns the milliseconds of each call until the device is done, after `first` calls that compile and record.
fn times<E>(
    repeats: usize,
    first: usize,
    device: &Device,
    mut call: impl FnMut() -> Result<Tensor<2>, E>,
) -> Result<Vec<f64>>
where
    anyhow::Error: From<E>,
{
    let mut once = || -> Result<f64> {
        device.sync()?;
        let begun = Instant::now();
        let logits = call()?;
        // Reading would not wait: data is fetched lazily.
        device.sync()?;
        let done = begun.elapsed().as_secs_f64() * 1e3;
        drop(logits);
        Ok(done)
    };
    for _ in 0..first {
        once()?;
    }
    (0..repeats).map(|_| once()).collect()
}

/// Milliseconds of decoding steps, and why they were not replayed, if so.
struct Steps {
    median: f64,
    mean: f64,
    reason: Option<String>,
}

impl Steps {
    fn new(
        model: &Llama,
        setting: Setting,
        length: usize,
        args: &BenchArgs,
        device: &Device,
    ) -> Result<Self> {
        let drafts = args.drafts;
        let most = length + written(args.steps) + drafts;
        let config = KvPoolConfig::new(args.batch, most).with_chunk(1 + drafts);
        let pool = model.new_pool(&setting.pool(config.with_rollback(drafts), length))?;
        let mut decoder = GraphDecoder::new(model.clone(), pool)?;
        let vocab = model.vocab_size();
        let mut ids = Vec::new();
        for _ in 0..args.batch {
            let id = decoder.pool_mut().join()?;
            let prompt: Vec<u32> = (0..length).map(|at| (at * 7919 % vocab) as u32).collect();
            drop(decoder.next_logits(&prompt, &[KvStep::new(id, length)])?);
            ids.push(id);
        }
        let times = times(args.steps, WARM_UPS, device, || {
            step(&mut decoder, &ids, drafts)
        })?;
        let why = || decoder.fallback_reason().unwrap_or("too few steps");
        let reason = (!decoder.is_recorded()).then(|| why().to_owned());
        if matches!(setting.attention.kind, Kind::Dense) && setting.cache.is_none() {
            check(&mut decoder, length, &ids, written(args.steps))?;
        }
        Ok(Self {
            mean: times.iter().sum::<f64>() / times.len() as f64,
            median: median(times),
            reason,
        })
    }
}

/// Takes a step of one token per sequence, plus a draft that is rolled back, and returns the logits after the token.
fn step(decoder: &mut GraphDecoder<Llama>, ids: &[SequenceId], drafts: usize) -> Result<Tensor<2>> {
    let steps: Vec<KvStep> = ids.iter().map(|&id| KvStep::new(id, 1 + drafts)).collect();
    let tokens = vec![NEXT; ids.len() * (1 + drafts)];
    if drafts == 0 {
        return Ok(decoder.next_logits(&tokens, &steps)?);
    }
    let logits = decoder.all_logits(&tokens, &steps)?;
    let [batch, _, vocab] = logits.dims();
    for &id in ids {
        let len = decoder.pool().len(id)?;
        decoder.pool_mut().truncate(id, len - drafts)?;
    }
    Ok(logits.narrow(1, 0, 1).reshape([batch, vocab]))
}

/// The generated token, and the number of untimed steps that compile and record.
const NEXT: u32 = 1;
const WARM_UPS: usize = 5;

/// Returns the tokens that a sequence gets after its prompt.
fn written(steps: usize) -> usize {
    WARM_UPS + steps + 1
}

/// Checks that one more step gives the same logits as the whole sequence.
fn check(
    decoder: &mut GraphDecoder<Llama>,
    length: usize,
    ids: &[SequenceId],
    read: usize,
) -> Result<()> {
    let step = step(decoder, ids, 0)?;
    let device = step.device();
    let model = decoder.model();
    let prompt = tokens(model.vocab_size(), [1, length], &device);
    let rest = Tensor::full([1, read], NEXT, &device);
    let whole = last_logits(model, Tensor::cat(vec![prompt, rest], 1))?;
    let largest = |x: Tensor<2>| x.abs().max().cast(FloatDType::F32).into_scalar::<f32>();
    let of = largest(whole.clone());
    let error = largest(step.narrow(0, 0, 1) - whole) / of;
    // Tolerance for bf16; a step that reads other keys differs by more.
    ensure!(
        error < 0.05,
        "a step differs by {error} of the largest logit from the whole sequence"
    );
    Ok(())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
