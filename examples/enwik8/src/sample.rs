//! `enwik8 sample`: generates byte by byte with a KV cache.

mod output;
mod statistics;
mod writer;

use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use burn_paged_attention::generate::{PromptLookup, PromptLookupIndex, Sampling};
use burn_paged_attention::pool::{CachePolicy, KvPoolConfig};
use clap::Args;
use output::Output;
use statistics::Times;
use writer::Writer;

use crate::arguments::{self, MOST, MOST_AT_ONCE, ModelArgs};
use crate::data::thousands;
use crate::kept::{CACHE, KeptArgs};
use crate::progress::warn;
use crate::{files, model};

/// Generate text from a checkpoint
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 sample
  enwik8 sample --prompt '== History ==' --length 1000 --temperature 0.8 --top-k 40
  enwik8 sample --top-p 0.9 --repetition 1.1 --stop '</page>'
  enwik8 sample --prompt 'The ' --prompt '== See also ==' --batch 4 --length 200 --stats
  enwik8 sample --cache window:128,4 --kv-dtype f16 --stats
  enwik8 sample --temperature 0 --speculate 8 --stats
  enwik8 sample --run runs/dense --selection quest:16,64 --cache all --stats
  enwik8 sample --run runs/dense --prompt-file article.txt --selection-file heads.json
  enwik8 sample --run runs/dense --cache snapkv:64,32,5 --budget pyramid:20 --slack 64
  enwik8 sample --checkpoint runs/small/best.ckpt --length 100000 --output sample.bin

A sample may be longer than the context: when the context is full, its newest half is read again as the start of a \
new window.")]
pub struct SampleArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Prompt; repeat for several, which are continued at once. A prompt longer than the context is cut to its last
    /// context/2 bytes
    #[arg(long, value_name = "TEXT", default_value = "The ")]
    prompt: Vec<String>,
    /// Read the prompt from a file
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// Write N samples of each prompt at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = arguments::at_once)]
    batch: usize,
    /// Bytes to generate after the prompt
    #[arg(long, default_value_t = 500, value_parser = arguments::whole)]
    length: usize,
    /// 0 takes the likeliest byte, 1 samples from the model, above 1 is wilder
    #[arg(long, default_value_t = 1.0, value_parser = arguments::at_least_zero, help_heading = SAMPLING)]
    temperature: f64,
    /// Consider only the K likeliest bytes
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u16).range(1..=256), help_heading = SAMPLING)]
    top_k: Option<u16>,
    /// Consider the likeliest bytes whose probabilities add up to P
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = arguments::share, help_heading = SAMPLING)]
    top_p: f64,
    /// Consider bytes at least P times as likely as the likeliest
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = arguments::ratio, help_heading = SAMPLING)]
    min_p: f64,
    /// Repetition penalty: above 1, bytes of the prompt and generated ones become less likely
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = arguments::above_zero, help_heading = SAMPLING)]
    repetition: f64,
    /// End before this text; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = arguments::text)]
    stop: Vec<String>,
    /// End after S seconds
    #[arg(long, value_name = "S", value_parser = arguments::above_zero)]
    max_time: Option<f64>,
    #[command(flatten)]
    kept: KeptArgs,
    /// Page size of the cache in keys: 16, 32, 64 or 128 [default: 32, or the page of --selection]
    #[arg(long, value_name = "P", value_parser = page_size, help_heading = CACHE)]
    page_size: Option<usize>,
    /// Capture a step in a CUDA graph and replay it: the same bytes with less work of the host
    #[arg(long, help_heading = SPEED)]
    graph: bool,
    /// Speculative decoding by prompt lookup, up to K bytes a step: the same text in fewer steps
    #[arg(long, value_name = "K", value_parser = arguments::positive, help_heading = SPEED)]
    speculate: Option<usize>,
    /// Print the speed and the size of the cache to the standard error output
    #[arg(long, help_heading = OUTPUT)]
    stats: bool,
    /// Write the statistics to a file, as JSON
    #[arg(long, value_name = "FILE", help_heading = OUTPUT)]
    json: Option<PathBuf>,
    /// Seed of the sampling
    #[arg(long, default_value_t = 1, value_parser = arguments::seed, help_heading = SAMPLING)]
    seed: u64,
    /// Write the raw bytes, prompt included, to a file instead of text to the terminal
    #[arg(long, value_name = "FILE", help_heading = OUTPUT)]
    output: Option<PathBuf>,
}

const SAMPLING: &str = "Sampling";
const SPEED: &str = "Speed";
const OUTPUT: &str = "Output";

pub fn run(args: &SampleArgs) -> Result<()> {
    let prompts = args.prompts()?;
    ensure!(
        prompts.len() == 1 || args.output.is_none(),
        "--output takes one sample, not {}",
        prompts.len()
    );
    let kept = args.kept.kept()?.unwrap_or_default();
    let (device, path, checkpoint) = args.model.open()?;
    ensure!(
        checkpoint.header.config.model.pictures.is_none(),
        "{} was trained on images: use enwik8 sample-images",
        path.display()
    );
    model::check_cached(&checkpoint.header.config.model)?;
    if let Some(note) = (checkpoint.header.config).stage_note(checkpoint.header.step) {
        warn(note);
    }
    let config = &checkpoint.header.config.model;
    let model = (args.kept).chosen(model::restore(&checkpoint, &device.device)?, config)?;
    let lengths: Vec<usize> = (prompts.iter())
        .map(|prompt| prompt.len().saturating_add(args.length))
        .collect();
    let read = prompts.iter().map(Vec::len).max().unwrap_or(1);
    let pool = args.pool(kept, model.context(), &lengths, read);
    let mut writer = Writer::new(model, &pool, args.graph, args.speculate.unwrap_or(0))
        .map_err(|error| args.kept.explained(error, config))?;
    let rules = Rules {
        sampling: args.sampling(),
        stop: args.stop.iter().map(String::as_bytes).collect(),
        length: args.length,
        drafts: args.speculate.map(PromptLookup::new),
    };
    // A single text is written as it is generated, several when all are done.
    let mut output = match prompts.len() {
        1 => Some(Output::open(args.output.as_deref())?),
        _ => None,
    };
    if let Some(output) = &mut output {
        output.write(&prompts[0])?;
    }
    let texts = prompts.iter().enumerate();
    let texts = texts.map(|(number, prompt)| Sample::new(&rules, number, prompt));
    let mut texts: Vec<Sample> = texts.collect();
    let begun = Instant::now();
    let read: Vec<&[u8]> = prompts.iter().map(Vec::as_slice).collect();
    let mut rows: Vec<Vec<Vec<f32>>> = match args.length {
        0 => Vec::new(),
        _ => writer
            .begin(&read)
            .map_err(|error| args.kept.explained(error, config))?
            .into_iter()
            .map(|row| vec![row])
            .collect(),
    };
    let mut times = Times::new(begun.elapsed());
    let mut going_on: Vec<usize> = (0..texts.len()).filter(|_| args.length > 0).collect();
    let mut drafts: Vec<Vec<u8>> = vec![Vec::new(); texts.len()];
    while !going_on.is_empty() {
        let before = Instant::now();
        for ((&text, rows), draft) in going_on.iter().zip(&rows).zip(&drafts) {
            let accepted = texts[text].check(rows, draft)?;
            if accepted < draft.len() && texts[text].goes_on() {
                writer.take_back(text, draft.len() - accepted)?;
            }
            times.drafted += draft.len();
            times.accepted += accepted;
        }
        if let Some(output) = &mut output {
            output.write(texts[0].certain())?;
        }
        going_on.retain(|&text| texts[text].goes_on());
        let is_late = (args.max_time).is_some_and(|most| begun.elapsed().as_secs_f64() >= most);
        if going_on.is_empty() || is_late {
            times.steps.push(before.elapsed());
            break;
        }
        drafts = (going_on.iter())
            .map(|&text| texts[text].draft(writer.room(text)))
            .collect();
        let more = going_on.iter().zip(&drafts);
        let more: Vec<(usize, Vec<u8>)> = more
            .map(|(&text, draft)| (text, [texts[text].last(), draft].concat()))
            .collect();
        rows = writer.check(&more)?;
        times.steps.push(before.elapsed());
    }
    match output {
        Some(mut output) => {
            output.write(texts[0].rest())?;
            output.finish()?;
        }
        None => print(&prompts, &texts)?,
    }
    if args.stats || args.json.is_some() {
        let read = prompts.iter().map(Vec::len).sum();
        let written = texts.iter().map(|text| text.written.len()).sum();
        let statistics = times.statistics(read, written, writer.describe(), writer.usage()?);
        if args.stats {
            eprint!("{statistics}");
        }
        if let Some(path) = &args.json {
            files::write_json(path, &statistics)?;
        }
    }
    Ok(())
}

/// Prints texts under headings.
fn print(prompts: &[Vec<u8>], texts: &[Sample]) -> Result<()> {
    for (index, (prompt, text)) in prompts.iter().zip(texts).enumerate() {
        let mut output = Output::open(None)?;
        output.write(format!("--- {} ---\n", index + 1).as_bytes())?;
        output.write(prompt)?;
        output.write(&text.written)?;
        output.finish()?;
    }
    Ok(())
}

impl SampleArgs {
    /// Returns the prompt of each sample.
    fn prompts(&self) -> Result<Vec<Vec<u8>>> {
        let (flag, prompts) = match &self.prompt_file {
            Some(path) => {
                let flag = format!("--prompt-file {}", path.display());
                let prompt = fs::read(path)
                    .with_context(|| format!("--prompt-file: cannot read {}", path.display()))?;
                (flag, vec![prompt])
            }
            None => {
                let prompts = self.prompt.iter();
                let prompts = prompts.map(|prompt| prompt.clone().into_bytes()).collect();
                ("--prompt".to_owned(), prompts)
            }
        };
        ensure!(
            prompts.iter().all(|prompt| !prompt.is_empty()),
            "{flag} must not be empty: the model predicts bytes from earlier ones"
        );
        let texts = prompts.len().saturating_mul(self.batch);
        ensure!(
            texts <= MOST_AT_ONCE,
            "--batch must be at most {MOST_AT_ONCE} texts of all prompts, got {} of {} prompts",
            self.batch,
            prompts.len()
        );
        let bytes = prompts.iter().map(Vec::len).sum::<usize>();
        ensure!(
            bytes.saturating_mul(self.batch) <= MOST,
            "--batch must be at most {MOST} bytes of prompts, got {} times the {} bytes of {flag}",
            self.batch,
            thousands(bytes)
        );
        let each = |prompt: &Vec<u8>| std::iter::repeat_n(prompt.clone(), self.batch);
        Ok(prompts.iter().flat_map(each).collect())
    }

    fn sampling(&self) -> Sampling {
        Sampling::default()
            .temperature(self.temperature)
            .top_k(self.top_k.map(usize::from))
            .top_p(self.top_p)
            .min_p(self.min_p)
            .repetition(self.repetition)
            .seed(self.seed)
    }

    /// Configures the pool for texts of these lengths, which begin by reading up to `read` bytes.
    fn pool(
        &self,
        kept: CachePolicy,
        context: usize,
        lengths: &[usize],
        read: usize,
    ) -> KvPoolConfig {
        // A text that exceeds the context continues after the newest half of it.
        let read = match lengths.iter().all(|&length| length <= context) {
            true => read,
            false => read.max(context / 2),
        };
        let drafted = self.speculate.unwrap_or(0);
        let lengths = lengths.iter().map(|&length| length.clamp(1, context));
        let config = KvPoolConfig::for_lengths(lengths)
            .with_chunk(1 + drafted)
            .with_rollback(drafted);
        let longest = read.clamp(1, context).max(1 + drafted);
        let config = self.kept.pool(config, kept, longest);
        let config = match self.page_size {
            Some(page_size) => config.with_page_size(page_size),
            None => config,
        };
        match self.kept.selection_file {
            Some(_) => config.with_choosing_prompts(),
            None => config,
        }
    }
}

fn page_size(text: &str) -> Result<usize, String> {
    (text.parse().ok())
        .filter(|size| [16, 32, 64, 128].contains(size))
        .ok_or_else(|| "must be 16, 32, 64 or 128".to_owned())
}

/// Rules that all texts share.
struct Rules<'a> {
    sampling: Sampling,
    stop: Vec<&'a [u8]>,
    length: usize,
    drafts: Option<PromptLookup>,
}

/// Text that is being generated.
struct Sample<'a> {
    rules: &'a Rules<'a>,
    number: usize,
    /// Bytes that were read or written.
    seen: [bool; 256],
    written: Vec<u8>,
    /// Number of bytes already output. Later ones may be part of a stop text.
    given: usize,
    has_stopped: bool,
    /// Index of the prompt and what was written, with drafts.
    index: Option<PromptLookupIndex>,
}

impl<'a> Sample<'a> {
    fn new(rules: &'a Rules<'a>, number: usize, prompt: &[u8]) -> Self {
        let mut seen = [false; 256];
        (prompt.iter()).for_each(|&byte| seen[usize::from(byte)] = true);
        let index = rules.drafts.map(|drafts| {
            let mut index = PromptLookupIndex::new(drafts);
            index.extend(prompt.iter().map(|&byte| byte.into()));
            index
        });
        Self {
            rules,
            number,
            seen,
            written: Vec::new(),
            given: 0,
            has_stopped: false,
            index,
        }
    }

    fn goes_on(&self) -> bool {
        !self.has_stopped && self.written.len() < self.rules.length
    }

    /// Samples bytes while they equal the draft, and one more. Returns the number of accepted bytes.
    fn check(&mut self, rows: &[Vec<f32>], draft: &[u8]) -> Result<usize> {
        let mut accepted = 0;
        for logits in rows {
            let seen = |byte: u32| self.seen[byte as usize];
            let place = [self.number, self.written.len()];
            let next = self.rules.sampling.choose(logits, seen, place);
            let byte = next.context("the model's logits are not finite")? as u8;
            self.push(byte);
            if draft.get(accepted) != Some(&byte) {
                break;
            }
            accepted += 1;
            if !self.goes_on() {
                break;
            }
        }
        Ok(accepted)
    }

    /// Drafts the next bytes.
    fn draft(&self, room: usize) -> Vec<u8> {
        let draft = self.index.as_ref().map(PromptLookupIndex::draft);
        // One byte is sampled after a draft.
        let room = room.min(self.rules.length - self.written.len() - 1);
        let draft = draft.unwrap_or_default().into_iter();
        draft.take(room).map(|byte| byte as u8).collect()
    }

    fn push(&mut self, byte: u8) {
        self.seen[usize::from(byte)] = true;
        self.written.push(byte);
        if let Some(index) = &mut self.index {
            index.extend([byte.into()]);
        }
        let mut stop = self.rules.stop.iter();
        if let Some(stop) = stop.find(|stop| self.written.ends_with(stop)) {
            self.written.truncate(self.written.len() - stop.len());
            self.has_stopped = true;
        }
    }

    /// Returns the bytes that certainly belong to the text and were not output yet.
    fn certain(&mut self) -> &[u8] {
        let held = match self.has_stopped {
            true => 0,
            false => held_back(&self.written, &self.rules.stop),
        };
        self.up_to(self.written.len() - held)
    }

    /// Returns all bytes that were not output yet.
    fn rest(&mut self) -> &[u8] {
        self.up_to(self.written.len())
    }

    fn up_to(&mut self, certain: usize) -> &[u8] {
        let from = self.given.min(certain);
        self.given = certain.max(self.given);
        &self.written[from..certain]
    }

    fn last(&self) -> &[u8] {
        &self.written[self.written.len() - 1..]
    }
}

/// Returns how many of the last bytes may begin a stop text.
fn held_back(written: &[u8], stop: &[&[u8]]) -> usize {
    let longest = |stop: &&[u8]| {
        (1..stop.len())
            .rev()
            .find(|&len| written.ends_with(&stop[..len]))
    };
    stop.iter().filter_map(longest).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beginnings_of_stop_texts_are_held_back() {
        let stop: [&[u8]; 2] = [b"</page>", b"</s>"];
        for (written, held) in [
            ("abc<", 1),
            ("abc</", 2),
            ("abc</pag", 5),
            ("</s", 3),
            ("abc", 0),
            ("", 0),
        ] {
            assert_eq!(held_back(written.as_bytes(), &stop), held, "{written}");
        }
    }
}
