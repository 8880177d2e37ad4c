//! `llama generate`: answers a question or continues a text.

use std::io::{Write, stdout};
use std::ops::ControlFlow;
use std::time::Instant;

use anyhow::Result;
use burn_paged_attention::generate::{GenerateOptions, Sampling, generate};
use burn_paged_attention::pool::CachePolicy;
use clap::Args;

use crate::attention::Attention;
use crate::cache::Store;
use crate::checkpoint::ModelArgs;
use crate::text::Stream;

/// Answer a question, or continue a text
#[derive(Args, Debug)]
pub struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The question
    #[arg(long, default_value = "What is the capital of France?")]
    prompt: String,
    /// Continue the prompt as it is, without the chat template
    #[arg(long)]
    raw: bool,
    /// dense, a pattern such as streaming:1024,4, or a selection such as quest:16,1024,first=1,local=2; selections other than quest and moba apply to the prompt only
    #[arg(long, default_value = "dense")]
    attention: Attention,
    /// Most tokens to generate
    #[arg(long, default_value_t = 256)]
    max_new: usize,
    /// 0 takes the likeliest token
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Consider the likeliest tokens whose probabilities add up to this
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// Consider only this many of the likeliest tokens
    #[arg(long)]
    top_k: Option<usize>,
    /// Seed of the sampling
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Dtype of stored keys and values
    #[arg(long, value_enum, default_value = "model")]
    kv_dtype: Store,
    /// Keys that the cache retains: all, reachable (those that later tokens attend to), window:W,S (the last W and the first S), or by attention, per layer
    /// and KV head, h2o:H,R, h2o-mean:H,R, tova:C, snapkv:C, key-norm:C or combined:S,R,H
    #[arg(long, default_value = "reachable", value_name = "POLICY")]
    cache: CachePolicy,
}

pub fn run(args: &GenerateArgs) -> Result<()> {
    let device = args.model.device()?;
    let checkpoint = args.model.open()?;
    let (text, model) = (checkpoint.text()?, checkpoint.load(&device)?);
    let model = args.attention.of(&model, args.model.block_size)?;
    let prompt = match args.raw {
        true => text.tokens(&args.prompt)?,
        false => text.chat(&args.prompt)?,
    };
    let sampling = Sampling::default()
        .temperature(args.temperature)
        .top_p(args.top_p)
        .top_k(args.top_k)
        .seed(args.seed);
    let options = GenerateOptions::default()
        .max_new(args.max_new)
        .sampling(sampling)
        .stop_tokens(text.stop.iter().copied())
        .policy(args.cache)
        .kv_dtype(args.kv_dtype);
    let options = match args.attention.reads_prompts_alone() {
        true => options.choosing_prompts(),
        false => options,
    };
    let begun = Instant::now();
    let (mut stream, mut first, mut failed) = (Stream::default(), None, None);
    if args.raw {
        print!("{}", args.prompt);
    }
    let read = prompt.len();
    let texts = generate(&model, &[prompt], &options, &mut |step| {
        first.get_or_insert(begun.elapsed());
        let printed = stream.push(step.token, &text).and_then(|new| {
            print!("{new}");
            Ok(stdout().flush()?)
        });
        match printed {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                failed = Some(error);
                ControlFlow::Break(())
            }
        }
    })?;
    println!();
    if let Some(error) = failed {
        return Err(error);
    }
    let written = texts[0].tokens.len();
    let first = first.unwrap_or_else(|| begun.elapsed()).as_secs_f64();
    let rest = begun.elapsed().as_secs_f64() - first;
    eprintln!(
        "{read} tokens read in {first:.2} s, {written} written, {:.1} tokens a second; ended by {:?}",
        (written.saturating_sub(1)) as f64 / rest.max(1e-9),
        texts[0].reason
    );
    Ok(())
}
