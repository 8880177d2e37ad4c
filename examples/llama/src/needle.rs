//! `llama needle`: retrieval of a number hidden in a long text.

use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_paged_attention::pool::{KvPoolConfig, KvStep, PagedDecoder};
use burn_sparse_transformer::decoder::Decoder;
use burn_sparse_transformer::llama::Llama;
use clap::Args;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;

use crate::attention::{Attention, Kind};
use crate::cache::CacheArgs;
use crate::checkpoint::{ModelArgs, read_text};
use crate::progress;
use crate::rows::{JsonArgs, Setting, settings};
use crate::text::Text;

/// Hide five digits in a text and ask for them, with each attention
#[derive(Args, Debug)]
pub struct NeedleArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A text in UTF-8 to hide them in
    #[arg(long)]
    text: PathBuf,
    /// dense, a pattern or a selection: a selection reads the prompt only, a pattern also the answer; repeat to compare
    #[arg(long, default_values = ["dense"])]
    attention: Vec<Attention>,
    /// Tokens of a prompt, at most
    #[arg(long, default_value_t = 2000)]
    tokens: usize,
    /// Number of depths, evenly from the beginning to the end
    #[arg(long, default_value_t = 10)]
    depths: usize,
    /// Seed of the hidden digits
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    json: JsonArgs,
}

/// Prompt, and the tokens that answer it.
struct Needle {
    prompt: Vec<u32>,
    answer: Vec<u32>,
}

pub fn run(args: &NeedleArgs) -> Result<()> {
    let device = args.model.device()?;
    let caches = args.cache.caches()?;
    let mut lines = args.json.lines()?;
    let checkpoint = args.model.open()?;
    let (text, model) = (checkpoint.text()?, checkpoint.load(&device)?);
    let sentences = sentences(&read_text(&args.text)?);
    let mut random = ChaCha8Rng::seed_from_u64(args.seed);
    let needles: Vec<Needle> = (0..args.depths)
        .map(|at| {
            let depth = (at as f64 + 0.5) / args.depths as f64;
            let number = random.random_range(10_000..100_000);
            needle(&text, &sentences, args.tokens, depth, number)
        })
        .collect::<Result<_>>()?;
    println!(
        "{:<44} {:>8} {:>12}  bits of the answer by depth, * found",
        "attention", "found", "mean bits"
    );
    let settings = settings(&args.attention, &caches);
    let progress = progress::bar(settings.len() * needles.len(), "needles");
    for setting in settings {
        let model = setting.attention.of(&model, args.model.block_size)?;
        let (mut found, mut sum, mut cells) = (0, 0.0, String::new());
        for needle in &needles {
            let (is_found, bits) = ask(&model, setting, needle, &device)?;
            found += usize::from(is_found);
            sum += bits;
            cells += &format!(" {bits:.1}{}", if is_found { "*" } else { "" });
            progress.inc(1);
        }
        let mean = sum / needles.len() as f64;
        let measured = json!({ "found": found, "needles": needles.len(), "mean_bits": mean });
        lines.push(setting, measured)?;
        progress.suspend(|| {
            let of = format!("{found} of {}", needles.len());
            println!("{:<44} {of:>8} {mean:>12.2} {cells}", setting.label());
        });
    }
    progress.finish_and_clear();
    Ok(())
}

/// Returns whether every token of the answer is the most likely one, and the answer's bits.
fn ask(model: &Llama, setting: Setting, needle: &Needle, device: &Device) -> Result<(bool, f64)> {
    let tokens = |ids: &[u32]| {
        let data: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
        Tensor::<2, Int>::from_data(TensorData::new(data, [1, ids.len()]), device)
    };
    let (prompt, answer) = (&needle.prompt, &needle.answer);
    // The cache applies from the prompt's last token on; the answer's last token is predicted, not read.
    let (first, behind) = prompt.split_at(prompt.len() - usize::from(setting.cache.is_some()));
    let behind = [behind, &answer[..answer.len() - 1]].concat();
    let config = KvPoolConfig::new(1, prompt.len() + answer.len()).with_chunk(answer.len());
    // Without a cache a selection applies to the prompt only.
    let mut pool = model.new_pool(&match (setting.cache, &setting.attention.kind) {
        (None, Kind::Selection(_)) => config.with_choosing_prompts(),
        _ => setting.pool(config, prompt.len()),
    })?;
    let id = pool.join()?;
    let last = model.next_logits(tokens(first), &[KvStep::new(id, first.len())], &mut pool)?;
    let last = setting.cache.is_none().then_some(last);
    let mut rows: Vec<_> = last.into_iter().collect();
    if !behind.is_empty() {
        let steps = [KvStep::new(id, behind.len())];
        let rest = model.try_forward_pool_end(tokens(&behind), &steps, &mut pool)?;
        rows.push(rest.reshape([behind.len(), model.vocab_size()]));
    }
    let logits = Tensor::cat(rows, 0);
    let logs = log_softmax(logits, 1);
    let expected = tokens(answer).reshape([answer.len(), 1]);
    let hits = logs.clone().argmax(1).equal(expected.clone()).int().sum();
    let is_found = hits.into_scalar::<i64>() as usize == answer.len();
    let log = f64::from(logs.gather(1, expected).sum().into_scalar::<f32>());
    Ok((is_found, -log / std::f64::consts::LN_2))
}

/// Returns plain sentences without digits, which could be taken for the hidden number.
fn sentences(text: &str) -> Vec<String> {
    let is_other = |c: char| "[]{}|=<>&;'*#".contains(c) || c.is_ascii_digit();
    let plain = text.replace(is_other, " ");
    let words: Vec<&str> = plain.split_whitespace().collect();
    let sentences = words.join(" ");
    let sentences = sentences.split(". ");
    let sentences = sentences.filter(|sentence| (40..300).contains(&sentence.len()));
    sentences.map(|sentence| format!("{sentence}.")).collect()
}

fn needle(
    text: &Text,
    sentences: &[String],
    tokens: usize,
    depth: f64,
    number: u32,
) -> Result<Needle> {
    let hidden = format!("The pass key is {number}. Remember it. {number} is the pass key.");
    let task = "There is an important pass key hidden inside a lot of irrelevant text. Find it and memorize it. I will ask you about it.";
    let prompt = |body: &str| -> Result<String> {
        let question = format!("{task}\n{body}\nWhat is the pass key?");
        let asked = match text.template {
            Some(_) => text.rendered(&question)?,
            None => format!("{question}\n"),
        };
        Ok(asked + "The pass key is")
    };
    let special = text.template.is_none();
    let mut used = text.encode(&prompt(&hidden)?, special)?.len() + 8;
    let mut body = Vec::new();
    for sentence in sentences {
        used += text.encode(&format!(" {sentence}"), false)?.len();
        if used > tokens {
            break;
        }
        body.push(sentence.as_str());
    }
    ensure!(
        used > tokens,
        "--text has sentences of {used} tokens only, and --tokens is {tokens}"
    );
    body.insert((depth * body.len() as f64) as usize, &hidden);
    let prompt = prompt(&body.join(" "))?;
    let whole = text.encode(&format!("{prompt} {number}"), special)?;
    // For some tokenizers the space before digits is its own token, for others it is part of them.
    for prompt in [format!("{prompt} "), prompt] {
        let prompt = text.encode(&prompt, special)?;
        if whole.starts_with(&prompt) {
            let answer = whole[prompt.len()..].to_vec();
            return Ok(Needle { prompt, answer });
        }
    }
    bail!("the tokenizer joins the prompt's end with the number")
}
