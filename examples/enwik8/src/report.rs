//! `report.md`: a run on one page. Training writes it at its end; `enwik8 report` writes it for any run.

use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use burn::module::Module;
use burn_paged_attention::generate::{GenerateOptions, Sampling, generate};
use burn_sparse_transformer::SparseTransformer;
use clap::Args;

use crate::arguments::{self, ModelArgs};
use crate::checkpoint::Checkpoint;
use crate::config::RunConfig;
use crate::data::{Corpus, Split, thousands};
use crate::device::NamedDevice;
use crate::files::write_whole;
use crate::images::format::Pictures;
use crate::images::{grid, sample as images};
use crate::log::{self, Row, Validated};
use crate::memory::Resources;
use crate::model::{self, attention_text};
use crate::plot::{self, Axis, Frame};
use crate::plot_recall;
use crate::presets::Task;
use crate::progress::{clock, program, say, warn};
use crate::recall::{self, LayerRecall};
use crate::run;

/// Number of sample texts.
const SAMPLES: usize = 3;
/// Most bytes that the model reads, and writes, for a sample text.
const PROMPT: usize = 64;
const WRITTEN: usize = 320;
/// Number of sample images.
const PICTURES: usize = 9;
const TEMPERATURE: f64 = 0.8;
/// Most rows of the table of validations.
const VALIDATIONS: usize = 10;

/// Write a run's report: curves, speed, memory and samples on one page
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 report
  enwik8 report --run runs/small --device cuda --peak-tflops 989

Training writes the same page at its end. It is DIR/report.md, with the pictures beside it; what is there is replaced.")]
pub struct ReportArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Where the run's data are now
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Peak rate of the run's device in its precision, in 10¹² operations per second, for the model-flops utilisation
    #[arg(long, value_name = "TFLOPS", value_parser = arguments::above_zero)]
    peak_tflops: Option<f64>,
}

pub fn run(args: &ReportArgs) -> Result<()> {
    let (device, path, checkpoint) = args.model.open()?;
    let folder = path.parent().unwrap_or(&path);
    let pictures = checkpoint.header.config.model.pictures;
    let corpus = Corpus::reopen(&checkpoint.header.data, args.data.as_deref(), pictures);
    let corpus = corpus.inspect_err(|error| {
        warn(format!(
            "{error:#}: prompts and the entropy of the data are left out"
        ));
    });
    let path = Report {
        folder,
        checkpoint: &checkpoint,
        device: &device,
        corpus: corpus.as_ref().ok(),
        peak_tflops: args.peak_tflops,
    }
    .write()?;
    say(format!("wrote {}", path.display()));
    Ok(())
}

/// Inputs of a report.
pub struct Report<'a> {
    pub folder: &'a Path,
    /// Checkpoint that generates the samples.
    pub checkpoint: &'a Checkpoint,
    /// Device of the checkpoint.
    pub device: &'a NamedDevice,
    /// The run's data, if available.
    pub corpus: Option<&'a Corpus>,
    pub peak_tflops: Option<f64>,
}

impl Report<'_> {
    /// Writes the page and its images, and returns its path.
    pub fn write(&self) -> Result<PathBuf> {
        let rows = log::read(&self.folder.join(run::LOG))?;
        let (config, axes) = (&self.checkpoint.header.config, [Axis::Steps, Axis::Time]);
        draw(self.folder, config, self.entropy(), &rows, &axes)?;
        let model = model::restore(self.checkpoint, &self.device.device)?;
        let text = [
            self.facts(&rows, &model)?,
            self.curves(&rows),
            self.recall(&rows),
            self.samples(model)?,
            self.commands(),
        ]
        .concat();
        let path = self.folder.join(run::REPORT);
        write_whole(&path, text)?;
        Ok(path)
    }

    fn entropy(&self) -> Option<f64> {
        self.corpus.map(Corpus::order_0_entropy)
    }

    /// Returns the rows of the page's table: configuration, results and cost, as far as they are known.
    fn facts(&self, rows: &[Row], model: &SparseTransformer) -> Result<String> {
        let header = &self.checkpoint.header;
        let config = &header.config;
        let (shape, unit) = (&config.model, config.model.unit());
        let speed = Speed::of(rows);
        let whole = rows.iter().rev().find_map(|row| match row {
            Row::Final(of) => Some(of),
            _ => None,
        });
        let mut facts = vec![
            Some(format!(
                "model | {} parameters: {}, {}",
                thousands(model.num_params()),
                shape.sizes(),
                shape.precision
            )),
            Some(format!(
                "attention | `{}`, blocks of {}",
                attention_text(shape),
                shape.block_size
            )),
            Some(format!(
                "data | {} bytes, CRC-32 `{:08x}`",
                thousands(header.data.bytes),
                header.data.crc32
            )),
            Some(format!(
                "recipe | batch {}, {}",
                config.recipe.batch,
                config.rates()
            )),
            (config.describe_indexers()).map(|text| format!("indexers | {text}")),
            Some(format!(
                "length | {} steps, {} bytes",
                thousands(speed.steps),
                thousands(speed.steps * config.tokens_per_step())
            )),
            header.best.map(|best| {
                let (step, bits) = (thousands(best.step), best.bits_per_byte);
                format!("best validation | {bits:.4} {unit} after step {step}")
            }),
            whole.map(|of| {
                let (bits, bytes) = (of.bits_per_byte, thousands(of.bytes));
                format!("whole validation split | {bits:.4} {unit} over {bytes} bytes")
            }),
            (self.entropy())
                .map(|entropy| format!("order-0 entropy of the data | {entropy:.4} {unit}")),
        ];
        facts.extend(self.cost(&speed, model)?);
        let mut text = format!("# {}\n\n| | |\n|---|---|\n", title(config));
        for (name, value) in (facts.iter().flatten()).filter_map(|fact| fact.split_once(" | ")) {
            // A pipe would begin a column.
            let _ = writeln!(text, "| {name} | {} |", value.replace('|', "\\|"));
        }
        Ok(text)
    }

    /// Returns the rows for time, speed and memory.
    fn cost(&self, speed: &Speed, model: &SparseTransformer) -> Result<Vec<Option<String>>> {
        let resources = Resources::read(&self.folder.join(run::RESOURCES));
        let tflop = model::step_tflop(model, &self.checkpoint.header.config)?;
        let rate = tflop / (speed.median_ms / 1_000.0);
        let share = match self.peak_tflops {
            Some(peak) => format!(", {:.1} % of {peak}", 100.0 * rate / peak),
            None => " (`--peak-tflops` makes that a utilisation)".to_owned(),
        };
        let timed = |text: String| (speed.steps > 0).then_some(text);
        let peak = |of: &str, bytes: Option<u64>| {
            let mebibytes = thousands((bytes? >> 20) as usize);
            Some(format!("peak memory of the {of} | {mebibytes} MiB"))
        };
        let device = (resources.as_ref()).map(|of| format!("device | {}", of.device));
        let of = resources.unwrap_or_default();
        Ok(vec![
            device,
            timed(format!(
                "time in steps | {}",
                clock(Duration::from_secs_f64(speed.seconds))
            )),
            timed(format!(
                "speed | {} tokens per second, {:.1} ms a step (medians)",
                thousands(speed.bytes_per_s as usize),
                speed.median_ms
            )),
            timed(format!(
                "operations of the model | {tflop:.4} · 10¹² a step, {rate:.3} · 10¹² per second{share}"
            )),
            peak("process", of.process_bytes),
            peak("device", of.device_bytes),
        ])
    }

    /// Returns the recall of selections, if it was measured.
    fn recall(&self, rows: &[Row]) -> String {
        let last = rows.iter().rev().find_map(|row| match row {
            Row::Selection { step, layers } if !layers.is_empty() => Some((*step, layers)),
            _ => None,
        });
        let Some((step, layers)) = last else {
            return String::new();
        };
        let mut text = format!(
            "\n## Choice of keys\n\nOf the full attention to what layers see, on one window of the validation split; the best choice has as many \
             blocks.\n\n![recall by layer over steps]({})\n\n| after step {} | recall | ratio to the best choice | density |\n|---|---|---|---|\n",
            run::RECALL,
            thousands(step)
        );
        let mut line = |what: String, of: &LayerRecall| {
            let numbers = [of.recall, of.ratio, of.density].map(|x| format!("{x:.4}"));
            let _ = writeln!(text, "| {what} | {} |", numbers.join(" | "));
        };
        for layer in layers {
            line(format!("layer {}", layer.layer), layer);
        }
        line("mean".to_owned(), &recall::mean(layers));
        text
    }

    fn curves(&self, rows: &[Row]) -> String {
        let unit = self.checkpoint.header.config.model.unit();
        let mut text = "\n## Curves\n\n".to_owned();
        if rows.is_empty() {
            return text + "The log has no steps.\n";
        }
        for (name, over) in [(run::PLOT, "steps"), (run::TIME_PLOT, "time")] {
            let _ = write!(text, "![{unit} over {over}]({name})\n\n");
        }
        let validations: Vec<Validated> = (rows.iter())
            .filter_map(|row| match row {
                Row::Validation(of) => Some(*of),
                _ => None,
            })
            .collect();
        if !validations.is_empty() {
            text += "| step | validation |\n|---|---|\n";
        }
        for of in thinned(&validations) {
            let _ = writeln!(text, "| {} | {:.4} |", thousands(of.step), of.bits_per_byte);
        }
        text
    }

    fn samples(&self, model: SparseTransformer) -> Result<String> {
        let header = &self.checkpoint.header;
        let mut text = "\n## Samples\n\n".to_owned();
        if let Err(reason) = model::check_cached(&header.config.model) {
            let _ = writeln!(text, "None: {reason}.");
            return Ok(text);
        }
        let model = model::without_selections(model)?;
        text += &match header.config.model.pictures {
            None => self.texts(&model)?,
            Some(pictures) => self.pictures(model, pictures)?,
        };
        Ok(text)
    }

    /// Generates an image of each class, or of some.
    fn pictures(&self, model: SparseTransformer, pictures: Pictures) -> Result<String> {
        let classes = images::classes(&[], pictures.classes.min(PICTURES), pictures);
        let sampling = Sampling::default().temperature(images::TEMPERATURE).seed(1);
        let drawn = images::draw(model, pictures, &classes, &sampling, false)?;
        let path = self.folder.join(run::SAMPLES);
        let (columns, zoom) = (images::columns(drawn.len()), images::zoom(pictures));
        grid::save(&path, pictures, &drawn, columns, zoom)?;
        let listed: Vec<String> = classes.iter().map(u8::to_string).collect();
        Ok(format!(
            "By the model after step {}, at temperature {}; of the classes {}.\n\n![samples]({})\n",
            thousands(self.checkpoint.header.step),
            images::TEMPERATURE,
            listed.join(", "),
            run::SAMPLES
        ))
    }

    fn texts(&self, model: &SparseTransformer) -> Result<String> {
        let context = model.context();
        let prompts = self.prompts(context);
        let read = prompts.iter().map(Vec::len).max().unwrap_or(1);
        let options = GenerateOptions::default()
            .max_new(WRITTEN.min(context.saturating_sub(read)))
            .sampling(Sampling::default().temperature(TEMPERATURE).seed(1));
        let tokens: Vec<Vec<u32>> = prompts
            .iter()
            .map(|prompt| prompt.iter().map(|&byte| u32::from(byte)).collect())
            .collect();
        let written = generate(model, &tokens, &options, &mut |_| ControlFlow::Continue(()))?;
        let from = match self.corpus {
            Some(_) => "from the validation split",
            None => "of ours, as the data are gone",
        };
        let step = thousands(self.checkpoint.header.step);
        let mut text = format!(
            "By the model after step {step}, at temperature {TEMPERATURE}; prompts are {from}.\n"
        );
        for (prompt, sample) in prompts.iter().zip(written) {
            let sample: Vec<u8> = sample.tokens.iter().map(|&token| token as u8).collect();
            let _ = write!(
                text,
                "\nAfter\n\n{}\nthe model writes\n\n{}",
                fenced(prompt),
                fenced(&sample)
            );
        }
        Ok(text)
    }

    /// Returns evenly spaced prompts from held-out data.
    fn prompts(&self, context: usize) -> Vec<Vec<u8>> {
        let bytes = self.corpus.map(|corpus| corpus.split(Split::Validation));
        let length = PROMPT.min(context / 2).max(1);
        let Some(bytes) = bytes.filter(|bytes| bytes.len() >= length * SAMPLES) else {
            return vec![b"The "[..length.min(4)].to_vec(); SAMPLES];
        };
        (0..SAMPLES)
            .map(|index| {
                let start = index * (bytes.len() / SAMPLES);
                bytes[start..start + length].to_vec()
            })
            .collect()
    }

    fn commands(&self) -> String {
        let (program, folder) = (program(), self.folder.display());
        let sample = match self.checkpoint.header.config.model.task() {
            Task::Text => "sample",
            Task::Images => "sample-images",
        };
        format!(
            "\n## Go on\n\n```sh\n{program} train --resume --run {folder} --steps N\n{program} {sample} --checkpoint {folder}\n\
             {program} eval --checkpoint {folder} --split test\n{program} report --run {folder}\n```\n"
        )
    }
}

/// Draws the plots of a run's log.
pub fn draw(
    folder: &Path,
    config: &RunConfig,
    entropy: Option<f64>,
    rows: &[Row],
    axes: &[Axis],
) -> Result<()> {
    let title = title(config);
    for &axis in axes {
        let frame = Frame {
            title: &title,
            unit: config.model.unit(),
            entropy,
            axis,
        };
        let name = match axis {
            Axis::Steps => run::PLOT,
            Axis::Time => run::TIME_PLOT,
        };
        plot::draw(&folder.join(name), &frame, rows)?;
    }
    plot_recall::draw(&folder.join(run::RECALL), &title, rows)
}

/// Returns the title of the page and its plots.
fn title(config: &RunConfig) -> String {
    format!(
        "enwik8, preset {}: {}",
        config.preset,
        attention_text(&config.model)
    )
}

/// Thins out values; the last one is kept.
fn thinned<T: Copy>(values: &[T]) -> Vec<T> {
    let every = values.len().div_ceil(VALIDATIONS).max(1);
    let mut thinned: Vec<_> = values.iter().rev().step_by(every).copied().collect();
    thinned.reverse();
    thinned
}

/// Speed of the steps.
struct Speed {
    steps: usize,
    seconds: f64,
    median_ms: f64,
    bytes_per_s: f64,
}

impl Speed {
    fn of(rows: &[Row]) -> Self {
        let measured = rows.iter().filter_map(|row| match row {
            Row::Train(of) => Some((of.ms, of.tokens_per_s)),
            _ => None,
        });
        let (times, rates): (Vec<f64>, Vec<f64>) = measured.unzip();
        Self {
            steps: times.len(),
            seconds: times.iter().sum::<f64>() / 1_000.0,
            median_ms: median(times),
            bytes_per_s: median(rates),
        }
    }
}

/// Returns the median, 0 for no values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Formats arbitrary bytes as a code block.
fn fenced(bytes: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(bytes)
        .chars()
        .map(|c| match c.is_control() && c != '\n' {
            true => '\u{fffd}',
            false => c,
        })
        .collect();
    let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat((longest + 1).max(3));
    format!("{fence}text\n{}\n{fence}\n", text.trim_end_matches('\n'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_blocks_hold_any_bytes() {
        assert_eq!(fenced(b"a\x00b\n"), "```text\na\u{fffd}b\n```\n");
        assert_eq!(fenced(b"````"), "`````text\n````\n`````\n");
        assert_eq!(fenced(b"\xff"), "```text\n\u{fffd}\n```\n");
    }

    #[test]
    fn many_validations_are_thinned_to_the_last_one() {
        let steps: Vec<usize> = (1..=95).collect();
        assert_eq!(thinned(&steps), [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]);
        assert_eq!(thinned(&steps[..3]), steps[..3]);
    }
}
