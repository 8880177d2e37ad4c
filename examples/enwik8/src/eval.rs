//! `enwik8 eval`: bits per byte of a model on held-out bytes.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor};
use burn_paged_attention::pool::{
    CachePolicy, KvDtype, KvPoolConfig, KvStep, KvUsage, PagedDecoder,
};
use burn_sparse_transformer::SparseTransformer;
use clap::Args;
use indicatif::ProgressBar;

use crate::arguments::{self, ModelArgs};
use crate::data::{Corpus, Split, thousands};
use crate::flags::ensure_all;
use crate::kept::{CACHE, KeptArgs};
use crate::log::Validated;
use crate::model::{self, bits, numbers};
use crate::presets::Task;
use crate::progress::{plain_bar, say, warn};
use crate::windows::{Cut, Window};

/// Measure bits per byte of a checkpoint
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 eval
  enwik8 eval --run runs/tiny --split test --min-context 128
  enwik8 eval --checkpoint runs/paper/best.ckpt --min-context 12160 --device cuda
  enwik8 eval --run runs/dense --cache tova:64 --slack 32 --windows 100
  enwik8 eval --run runs/dense --selection-file heads.json

With --cache or --kv-dtype, windows are read through a cache of keys and values, --chunk bytes a call: between \
calls keys are evicted.")]
pub struct EvalArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Part of the data
    #[arg(long, value_enum, default_value = "validation")]
    split: Split,
    /// Bytes of context that every byte after the first window has at least. The window moves by
    /// context − MIN bytes, so a large MIN is slower and scores better
    #[arg(long, value_name = "MIN", default_value_t = 0, value_parser = arguments::whole)]
    min_context: usize,
    /// Windows per forward pass [default: the run's batch]
    #[arg(long, value_parser = arguments::positive)]
    batch: Option<usize>,
    /// Only N windows, spread evenly; --min-context is then 0
    #[arg(long, value_name = "N", value_parser = arguments::positive, conflicts_with = "min_context")]
    windows: Option<usize>,
    #[command(flatten)]
    kept: KeptArgs,
    /// Bytes of a call, with --cache or --kv-dtype
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = arguments::positive, help_heading = CACHE)]
    chunk: usize,
    /// Other raw bytes than the run's
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
}

pub fn run(args: &EvalArgs) -> Result<()> {
    let dtype = args.kept.kv_dtype;
    let reachable = || (dtype != KvDtype::Model).then_some(CachePolicy::default());
    let kept = args.kept.kept()?.or_else(reachable);
    ensure_all! {
        kept.is_some() || args.kept.selection.is_empty() => "--selection needs --cache all";
        kept.is_none() || args.kept.selection_file.is_none() =>
            "--selection-file is of windows that are read at once; leave out --cache and --kv-dtype";
    }
    let (device, path, checkpoint) = args.model.open()?;
    let config = &checkpoint.header.config;
    let context = config.model.context;
    ensure_all! {
        args.min_context < context =>
            "--min-context must be below the model's context of {context}, got {}", args.min_context;
        args.min_context == 0 || config.model.task() == Task::Text =>
            "--min-context moves a window over text, and each picture is a sequence of its own; leave it out";
    }
    let cut = config.model.cut();
    let pictures = config.model.pictures;
    let corpus = Corpus::reopen(&checkpoint.header.data, args.data.as_deref(), pictures)?;
    let bytes = corpus.split_for(args.split, context)?;
    if kept.is_some() {
        model::check_cached(&config.model)?;
    }
    let model = model::restore(&checkpoint, &device.device)?;
    let model = match kept.is_some() || args.kept.selection_file.is_some() {
        true => args.kept.chosen(model, &config.model)?,
        false => model,
    };
    say(format!(
        "{}: step {}, context {context}, on {}",
        path.display(),
        thousands(checkpoint.header.step),
        device.name
    ));
    if let Some(note) = (checkpoint.header.config).stage_note(checkpoint.header.step) {
        warn(note);
    }
    let windows = match args.windows {
        Some(count) => cut.spread(bytes.len(), count),
        None => cut.all(bytes.len(), args.min_context),
    };
    let evaluator = Evaluator {
        model: &model,
        device: &device.device,
        cut,
        batch: args.batch.unwrap_or(config.recipe.batch),
    };
    let bar = plain_bar("evaluating");
    let evaluation = match kept {
        None => evaluator.run(bytes, &windows, &bar)?,
        Some(kept) => {
            let mut most = KvUsage::default();
            let chunk = args.chunk.min(context);
            let pool = |windows| {
                let config = KvPoolConfig::new(windows, context).with_chunk(chunk);
                args.kept.pool(config, kept, chunk)
            };
            let losses = |part: &[Window]| {
                evaluator.cached(bytes, part, (pool(part.len()), chunk), &mut most)
            };
            let evaluation = (evaluator.sum(&windows, &bar, losses))
                .map_err(|error| args.kept.explained(error, &config.model))?;
            say(format!(
                "the cache of a window takes {} bytes, all keys {}; scores of keys {}",
                thousands(most.live_bytes),
                thousands(most.all_bytes),
                thousands(most.score_bytes)
            ));
            evaluation
        }
    };
    ensure!(
        evaluation.nats.is_finite(),
        "the loss of {} is not finite, got {} over {} bytes: its weights or its activations are not",
        path.display(),
        evaluation.nats,
        thousands(evaluation.bytes)
    );
    let behind = match config.model.task() {
        Task::Text => format!(
            ", with at least {} bytes of context after the first window",
            args.min_context
        ),
        Task::Images => format!(": {} pictures", thousands(windows.len())),
    };
    say(format!(
        "{:.4} {} over {} bytes of the {} split{behind}",
        evaluation.bits_per_byte(),
        config.model.unit(),
        thousands(evaluation.bytes),
        args.split.name(),
    ));
    Ok(())
}

/// Sum of losses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Sum over the predicted bytes.
    pub nats: f64,
    /// Number of predicted bytes.
    pub bytes: usize,
}

impl Evaluation {
    pub fn loss(&self) -> f64 {
        self.nats / self.bytes as f64
    }

    pub fn bits_per_byte(&self) -> f64 {
        bits(self.loss())
    }

    /// Returns a log entry for a model after `step` steps.
    pub fn after(&self, step: usize) -> Validated {
        Validated {
            step,
            loss: self.loss(),
            bits_per_byte: self.bits_per_byte(),
            bytes: self.bytes,
        }
    }
}

/// Runs windows through a model.
pub struct Evaluator<'a> {
    /// Model, without autodiff.
    pub model: &'a SparseTransformer,
    /// Device of the model, without autodiff.
    pub device: &'a Device,
    /// Cut of the bytes into windows.
    pub cut: Cut,
    /// Windows per forward pass.
    pub batch: usize,
}

impl Evaluator<'_> {
    /// Sums the losses of all counted predictions.
    pub fn run(&self, bytes: &[u8], plan: &[Window], bar: &ProgressBar) -> Result<Evaluation> {
        self.sum(plan, bar, |part| self.losses(bytes, part))
    }

    fn sum(
        &self,
        plan: &[Window],
        bar: &ProgressBar,
        mut losses: impl FnMut(&[Window]) -> Result<Vec<f32>>,
    ) -> Result<Evaluation> {
        let mut total = Evaluation {
            nats: 0.0,
            bytes: 0,
        };
        bar.set_length(plan.len() as u64);
        for part in plan.chunks(self.batch) {
            let losses = losses(part)?;
            for (window, row) in part.iter().zip(losses.chunks(self.cut.context())) {
                let counted = &row[window.first..];
                total.nats += counted.iter().map(|&loss| f64::from(loss)).sum::<f64>();
                total.bytes += counted.len();
            }
            bar.inc(part.len() as u64);
        }
        bar.finish_and_clear();
        Ok(total)
    }

    /// Returns −log p of each byte, `[windows · context]`.
    fn losses(&self, bytes: &[u8], part: &[Window]) -> Result<Vec<f32>> {
        let starts: Vec<usize> = part.iter().map(|window| window.start).collect();
        let [tokens, targets] = self.cut.tensors(bytes, &starts, self.device);
        numbers(losses_of(self.model.try_forward(tokens)?, targets))
    }

    /// [`Self::losses`] through a pool, `chunk` bytes per call; `usage` is the maximum over the windows so far.
    fn cached(
        &self,
        bytes: &[u8],
        part: &[Window],
        (pool, chunk): (KvPoolConfig, usize),
        usage: &mut KvUsage,
    ) -> Result<Vec<f32>> {
        let starts: Vec<usize> = part.iter().map(|window| window.start).collect();
        let context = self.cut.context();
        let [tokens, targets] = self.cut.tensors(bytes, &starts, self.device);
        let mut pool = self.model.new_pool(&pool)?;
        let ids = (part.iter().map(|_| pool.join())).collect::<Result<Vec<_>, _>>()?;
        let mut losses = Vec::new();
        for first in (0..context).step_by(chunk) {
            let count = chunk.min(context - first);
            let steps: Vec<KvStep> = ids.iter().map(|&id| KvStep::new(id, count)).collect();
            let rows = |x: &Tensor<2, Int>| x.clone().narrow(1, first, count);
            let logits = self
                .model
                .try_forward_pool(rows(&tokens), &steps, &mut pool)?;
            losses.push(losses_of(logits, rows(&targets)));
        }
        for id in ids {
            let now = pool.usage(id)?;
            if now.live_bytes > usage.live_bytes {
                *usage = now;
            }
        }
        numbers(Tensor::cat(losses, 1))
    }
}

/// Returns −log p of each byte, `[windows, bytes, 1]`.
fn losses_of(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<3> {
    let log_probabilities = log_softmax(logits, 2);
    log_probabilities.gather(2, targets.unsqueeze_dim(2)).neg()
}
