//! `enwik8 sample`: one byte after the other, with a key/value cache.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_sparse_transformer::{Precision, Sampling, SparseTransformer, SparseTransformerCache};
use clap::Args;

use crate::progress::warn;
use crate::{arguments, device, model, run};

/// Let a checkpoint write bytes
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 sample
  enwik8 sample --prompt '== History ==' --length 1000 --temperature 0.8 --top-k 40
  enwik8 sample --top-p 0.9 --repetition 1.1 --stop '</page>'
  enwik8 sample --checkpoint runs/small/best.ckpt --length 100000 --output sample.bin --stats

A sample longer than the model's context goes on: when the context is full, its newest half is kept and the model
reads it again as the beginning of a new window.")]
pub struct SampleArgs {
    /// A checkpoint file, or a run folder, whose best checkpoint is taken
    #[arg(long, value_name = "PATH", default_value = "runs/tiny")]
    checkpoint: PathBuf,
    /// What the bytes follow; of a prompt longer than the context the newest half context is read
    #[arg(long, value_name = "TEXT", default_value = "The ")]
    prompt: String,
    /// Bytes to write after the prompt
    #[arg(long, default_value_t = 500, value_parser = arguments::whole::<usize>)]
    length: usize,
    /// 0 takes the likeliest byte, 1 samples from the model, above 1 is wilder
    #[arg(long, default_value_t = 1.0, value_parser = arguments::at_least_zero)]
    temperature: f64,
    /// Consider only the K likeliest bytes
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u16).range(1..=256))]
    top_k: Option<u16>,
    /// Consider the likeliest bytes that make up P
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = arguments::share)]
    top_p: f64,
    /// Consider bytes at least P times as likely as the likeliest
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = arguments::ratio)]
    min_p: f64,
    /// Above 1 bytes of the prompt, and those written, are less likely
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = arguments::above_zero)]
    repetition: f64,
    /// End before this text; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = arguments::text)]
    stop: Vec<String>,
    /// Print the speed to the standard error output
    #[arg(long)]
    stats: bool,
    /// Seed of the choice
    #[arg(long, default_value_t = 1, value_parser = arguments::whole::<u64>)]
    seed: u64,
    /// Write the raw bytes, prompt included, to a file instead of text to the terminal
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// f32, tf32 or bf16 [default: the run's]
    #[arg(long, value_parser = arguments::precision, value_name = "f32|tf32|bf16")]
    precision: Option<Precision>,
    /// flex, ndarray, wgpu, cuda or cuda:INDEX [default: the best that is compiled in]
    #[arg(long)]
    device: Option<String>,
}

/// Runs `enwik8 sample`.
pub fn run(args: &SampleArgs) -> Result<()> {
    ensure!(
        !args.prompt.is_empty(),
        "--prompt must not be empty: the model predicts bytes from earlier ones"
    );
    let device = device::open(args.device.as_deref())?;
    let (_, mut checkpoint) = run::open_checkpoint(&args.checkpoint, warn)?;
    let context = checkpoint.header.config.model.context;
    if let Some(precision) = args.precision {
        checkpoint.header.config.model.precision = precision;
    }
    let model = model::restore(&checkpoint, &device.device)?;
    let mut writer = Writer::new(model, device.device, context);
    let sampling = args.sampling();
    let stop: Vec<&[u8]> = args.stop.iter().map(String::as_bytes).collect();
    let mut output = Output::open(args)?;
    let prompt = args.prompt.as_bytes();
    output.write(prompt)?;
    let mut seen = [false; 256];
    prompt
        .iter()
        .for_each(|&byte| seen[usize::from(byte)] = true);
    let mut logits = writer.read(prompt)?;
    let mut written = Vec::with_capacity(args.length);
    // Bytes that are on the output: those before what may become a stop text.
    let mut given = 0;
    let begun = Instant::now();
    for index in 0..args.length {
        let next = sampling.choose(&logits, |byte| seen[byte as usize], [0, index]);
        let byte = next.context("the model's logits are not finite")? as u8;
        seen[usize::from(byte)] = true;
        written.push(byte);
        if let Some(stop) = stop.iter().find(|stop| written.ends_with(stop)) {
            written.truncate(written.len() - stop.len());
            break;
        }
        let certain = written.len() - held_back(&written, &stop);
        output.write(&written[given.min(certain)..certain])?;
        given = given.max(certain);
        if index + 1 < args.length {
            logits = writer.read(&[byte])?;
        }
    }
    output.write(&written[given.min(written.len())..])?;
    output.finish()?;
    if args.stats {
        let (bytes, seconds) = (written.len(), begun.elapsed().as_secs_f64());
        eprintln!(
            "{bytes} bytes in {seconds:.1} s: {:.1} bytes/s, {:.2} ms a byte",
            bytes as f64 / seconds,
            1e3 * seconds / bytes.max(1) as f64
        );
    }
    Ok(())
}

impl SampleArgs {
    fn sampling(&self) -> Sampling {
        Sampling::default()
            .temperature(self.temperature)
            .top_k(self.top_k.map(usize::from))
            .top_p(self.top_p)
            .min_p(self.min_p)
            .repetition(self.repetition)
            .seed(self.seed)
    }
}

/// How many of the last bytes may be the beginning of a stop text.
fn held_back(written: &[u8], stop: &[&[u8]]) -> usize {
    let longest = |stop: &&[u8]| {
        (1..stop.len())
            .rev()
            .find(|&len| written.ends_with(&stop[..len]))
    };
    stop.iter().filter_map(longest).max().unwrap_or(0)
}

/// A model, what it has read, and the cache of it.
struct Writer {
    model: SparseTransformer,
    device: Device,
    context: usize,
    cache: SparseTransformerCache,
    /// The bytes in the cache.
    window: Vec<u8>,
}

impl Writer {
    fn new(model: SparseTransformer, device: Device, context: usize) -> Self {
        Writer {
            cache: model.new_cache(),
            model,
            device,
            context,
            window: Vec::new(),
        }
    }

    /// Reads more bytes and returns the logits of the next one.
    fn read(&mut self, bytes: &[u8]) -> Result<Vec<f32>> {
        if self.window.len() + bytes.len() <= self.context {
            self.window.extend(bytes);
            return self.forward(bytes);
        }
        // Positions are absolute, so the cache cannot slide: the newest half is read again from position 0.
        let all = [self.window.as_slice(), bytes].concat();
        let kept = &all[all.len() - (self.context / 2).max(1)..];
        self.cache = self.model.new_cache();
        self.window = kept.to_vec();
        self.forward(kept)
    }

    fn forward(&mut self, bytes: &[u8]) -> Result<Vec<f32>> {
        let values: Vec<i32> = bytes.iter().map(|&byte| i32::from(byte)).collect();
        let data = TensorData::new(values, [1, bytes.len()]);
        let tokens = Tensor::<2, Int>::from_data(data, &self.device);
        let logits = self.model.forward_cache(tokens, &mut self.cache)?;
        let last = logits.narrow(1, bytes.len() - 1, 1);
        last.try_into_vec_as().map_err(|error| anyhow!("{error:?}"))
    }
}

/// Raw bytes to a file, or text to the terminal as it comes.
enum Output {
    File(io::BufWriter<File>),
    Terminal(Text),
}

impl Output {
    fn open(args: &SampleArgs) -> Result<Self> {
        Ok(match &args.output {
            None => Output::Terminal(Text::default()),
            Some(path) => {
                let file = File::create(path)
                    .with_context(|| format!("cannot write {}", path.display()))?;
                Output::File(io::BufWriter::new(file))
            }
        })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Output::File(file) => file.write_all(bytes)?,
            Output::Terminal(text) => {
                let mut terminal = io::stdout().lock();
                terminal.write_all(text.push(bytes).as_bytes())?;
                terminal.flush()?;
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<()> {
        match self {
            Output::File(mut file) => file.flush()?,
            Output::Terminal(mut text) => writeln!(io::stdout(), "{}", text.rest())?,
        }
        Ok(())
    }
}

/// Bytes as UTF-8: whole characters as soon as they are complete, `�` for what is none.
#[derive(Default)]
struct Text {
    pending: Vec<u8>,
}

impl Text {
    fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend(bytes);
        let incomplete = match str::from_utf8(&self.pending) {
            // An error without a length is a character that more bytes may complete.
            Err(_) => self.pending.utf8_chunks().last().map_or(0, |chunk| {
                let bytes = chunk.invalid();
                match str::from_utf8(bytes) {
                    Err(error) if error.error_len().is_none() => bytes.len(),
                    _ => 0,
                }
            }),
            Ok(_) => 0,
        };
        let complete: Vec<u8> = self
            .pending
            .drain(..self.pending.len() - incomplete)
            .collect();
        String::from_utf8_lossy(&complete).into_owned()
    }

    fn rest(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_printed_once_they_are_whole() {
        let mut text = Text::default();
        let printed: Vec<String> = "aé€".bytes().map(|byte| text.push(&[byte])).collect();
        assert_eq!(printed, ["a", "", "é", "", "", "€"]);
        assert_eq!(text.push(&[b'x', 0xff, b'y', 0xe2]), "x\u{fffd}y");
        assert_eq!(text.rest(), "\u{fffd}");
    }

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
