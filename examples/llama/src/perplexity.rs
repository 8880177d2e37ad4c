//! `llama perplexity`: bits a byte of a text, dense and sparse beside each other.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};
use burn::tensor::{Int, Tensor, TensorData};
use burn_sparse_transformer::SparseMhaInput;
use burn_sparse_transformer::decoder::{Decoder, Positions};
use burn_sparse_transformer::llama::Llama;
use clap::Args;

use crate::attention::Attention;
use crate::checkpoint::{ModelArgs, read_text};
use crate::progress;

/// Measures bits a byte of a text under each attention
#[derive(Args, Debug)]
pub struct PerplexityArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A text in UTF-8
    #[arg(long)]
    text: PathBuf,
    /// dense, a pattern as streaming:1024,4, or a selection as topk:32,ratio=0.25; once for each that is measured
    #[arg(long, default_values = ["dense"])]
    attention: Vec<Attention>,
    /// Tokens of a window
    #[arg(long, default_value_t = 2048)]
    window: usize,
    /// Windows, one behind the other
    #[arg(long, default_value_t = 4)]
    windows: usize,
    /// Tokens at the beginning of the text that are left out
    #[arg(long, default_value_t = 0)]
    skip: usize,
}

/// # Errors
/// If the model cannot be loaded, does not take an attention, or the text is too short.
pub fn run(args: &PerplexityArgs) -> Result<()> {
    let device = args.model.device()?;
    let text = args.model.text()?;
    let config = args.model.config()?;
    let needed = args.skip + args.windows * args.window + 1;
    let (tokens, ends) = text.encode_with_ends(&read_text(&args.text)?)?;
    ensure!(
        tokens.len() >= needed,
        "--text has {} tokens, and {} windows of {} behind {} need {needed}",
        tokens.len(),
        args.windows,
        args.window,
        args.skip
    );
    let model = args.model.load(&config, &device)?;
    let of = |from: usize| {
        let ids = tokens[from..from + args.window].iter().map(|&id| id as i32);
        let data = TensorData::new(ids.collect::<Vec<_>>(), [1, args.window]);
        Tensor::<2, Int>::from_data(data, &device)
    };
    println!(
        "{:<44} {:>8} {:>10} {:>10} {:>9}",
        "attention", "of pairs", "bits/token", "bits/byte", "s/window"
    );
    let progress = progress::bar(args.attention.len() * args.windows, "windows");
    for attention in &args.attention {
        let model = attention.of(&model, args.model.block_size)?;
        let (mut bits, mut bytes, mut share) = (0.0, 0, None);
        let begun = Instant::now();
        for window in 0..args.windows {
            let first = args.skip + window * args.window;
            let loss = model
                .try_loss(of(first), of(first + 1))?
                .into_scalar::<f32>();
            bits += f64::from(loss) / std::f64::consts::LN_2 * args.window as f64;
            bytes += ends[first + args.window] - ends[first];
            progress.inc(1);
        }
        let seconds = begun.elapsed().as_secs_f64() / args.windows as f64;
        if args.windows > 0 {
            share = density(&model, of(args.skip))?;
        }
        let share = share.map_or("-".into(), |share| format!("{:.1}%", 100.0 * share));
        let counted = (args.windows * args.window) as f64;
        progress.suspend(|| {
            println!(
                "{:<44} {share:>8} {:>10.4} {:>10.4} {seconds:>9.2}",
                attention.to_string(),
                bits / counted,
                bits / bytes as f64
            );
        });
    }
    progress.finish_and_clear();
    Ok(())
}

/// The share of causal pairs that all layers attend to, where it can be counted.
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
