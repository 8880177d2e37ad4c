//! `llama perplexity`: bits per byte of a text, dense next to sparse.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};
use burn::tensor::{Int, Tensor};
use burn_sparse_transformer::SparseMhaInput;
use burn_sparse_transformer::decoder::{Decoder, Positions};
use burn_sparse_transformer::llama::Llama;
use clap::Args;
use serde_json::json;

use crate::attention::Attention;
use crate::cache::CacheArgs;
use crate::checkpoint::{ModelArgs, read_text};
use crate::pooled::Ends;
use crate::progress;
use crate::rows::{JsonArgs, settings};
use crate::windows::{Bits, Windows};

/// Measure bits per byte of a text with each attention
#[derive(Args, Debug)]
pub struct PerplexityArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A text in UTF-8
    #[arg(long)]
    text: PathBuf,
    /// dense, a pattern such as streaming:1024,4, or a selection such as topk:32,ratio=0.25; repeat to compare
    #[arg(long, default_values = ["dense"])]
    attention: Vec<Attention>,
    /// Tokens of a window
    #[arg(long, default_value_t = 2048)]
    window: usize,
    /// Number of windows, one after the other
    #[arg(long, default_value_t = 4)]
    windows: usize,
    /// Tokens to skip at the beginning of the text
    #[arg(long, default_value_t = 0)]
    skip: usize,
    #[command(flatten)]
    cache: CacheArgs,
    /// With a cache: tokens of a window that are read in one call and not scored [default: half of it]
    #[arg(long)]
    prompt: Option<usize>,
    /// With a cache: tokens per call after the prompt
    #[arg(long, default_value_t = 16)]
    chunk: usize,
    /// With a cache: windows per batch
    #[arg(long, default_value_t = 8)]
    batch: usize,
    #[command(flatten)]
    json: JsonArgs,
}

pub fn run(args: &PerplexityArgs) -> Result<()> {
    let device = args.model.device()?;
    let checkpoint = args.model.open()?;
    let needed = args.skip + args.windows * args.window + 1;
    let (tokens, ends) = checkpoint
        .text()?
        .encode_with_ends(&read_text(&args.text)?, needed)?;
    ensure!(
        tokens.len() >= needed,
        "--text has {} tokens, and {} windows of {} after {} need {needed}",
        tokens.len(),
        args.windows,
        args.window,
        args.skip
    );
    let caches = args.cache.caches()?;
    let parts = Ends {
        prompt: args.prompt.unwrap_or(args.window / 2),
        chunk: args.chunk,
        batch: args.batch,
    };
    if !caches.is_empty() {
        parts.check(args.window)?;
    }
    let mut lines = args.json.lines()?;
    let model = checkpoint.load(&device)?;
    let windows = Windows {
        ids: &tokens,
        ends: &ends,
        starts: (0..args.windows)
            .map(|window| args.skip + window * args.window)
            .collect(),
        length: args.window,
        device: &device,
    };
    let of = ["of pairs", "of keys"][usize::from(!caches.is_empty())];
    println!(
        "{:<44} {of:>8} {:>10} {:>10} {:>9}",
        "attention", "bits/token", "bits/byte", "s/window"
    );
    let settings = settings(&args.attention, &caches);
    let progress = progress::bar(settings.len() * args.windows, "windows");
    for setting in settings {
        let model = setting.attention.of(&model, args.model.block_size)?;
        let begun = Instant::now();
        let mut found = match setting.cache {
            None => whole(&model, &windows, || progress.inc(1))?,
            Some(_) => parts.bits(&model, setting, &windows, |done| progress.inc(done as u64))?,
        };
        let seconds = begun.elapsed().as_secs_f64() / args.windows as f64;
        if let (None, Some(&first)) = (setting.cache, windows.starts.first()) {
            found.share = density(&model, windows.tokens(&[first], 0))?;
        }
        let of_tokens = found.bits / found.tokens as f64;
        let of_bytes = found.bits / found.bytes as f64;
        let measured = json!({
            "share": found.share,
            "bits_per_token": of_tokens,
            "bits_per_byte": of_bytes,
            "tokens": found.tokens,
            "seconds_per_window": seconds,
        });
        lines.push(setting, measured)?;
        let share = (found.share).map_or("-".into(), |share| format!("{:.1}%", 100.0 * share));
        progress.suspend(|| {
            println!(
                "{:<44} {share:>8} {of_tokens:>10.4} {of_bytes:>10.4} {seconds:>9.2}",
                setting.label()
            );
        });
    }
    progress.finish_and_clear();
    Ok(())
}

/// Scores all tokens of windows, each window in one call.
fn whole(model: &Llama, windows: &Windows, mut done: impl FnMut()) -> Result<Bits> {
    let mut found = Bits::default();
    for &start in &windows.starts {
        let [tokens, targets] = [0, 1].map(|shift| windows.tokens(&[start], shift));
        let loss = model.try_loss(tokens, targets)?.into_scalar::<f32>();
        found.bits += f64::from(loss) / std::f64::consts::LN_2 * windows.length as f64;
        found.tokens += windows.length;
        found.bytes += windows.bytes(start, 0);
        done();
    }
    Ok(found)
}

/// Returns the share of causal pairs that all layers attend to, if it can be counted.
fn density(model: &Llama, tokens: Tensor<2, Int>) -> Result<Option<f64>> {
    let (mut sum, mut counted) = (0.0, 0);
    model.hidden(tokens, &Positions::From(0), &mut |_, attention, x| {
        if let Ok(share) = attention.attention_density(SparseMhaInput::self_attn(x.clone())) {
            sum += share;
            counted += 1;
        }
        attention.forward_heads(x)
    })?;
    Ok((counted == model.layers.len()).then(|| sum / f64::from(counted as u32)))
}
