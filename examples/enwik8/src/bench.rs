//! `enwik8 bench`: training speed and memory, sparse against dense.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use burn::tensor::{Device, Tensor};
use burn_sparse_transformer::{Precision, Recompute};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::config::RunConfig;
use crate::data::{Corpus, Sampler, Split, thousands};
use crate::memory::peak_resident_bytes;
use crate::overrides::Overrides;
use crate::presets::{AttentionKind, Preset};
use crate::progress::say;
use crate::report::median;
use crate::step::{Batch, Steps};
use crate::table::table;
use crate::{arguments, device, files, model};

/// Time training iterations with sparse and with dense attention
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 bench
  enwik8 bench --context 2048 --batch 2
  enwik8 bench --preset small --precision bf16 --device cuda --peak-tflops 989 --json small.json
  enwik8 bench --preset paper --attention sparse --batch 4 --recompute none --device cuda
  enwik8 bench --preset paper --attention sparse --precision bf16 --dropout 0 --batch 1 \\
    --context 1_048_576 --pattern fixed:1024,32 --block 32 --recompute segment:2+attention \\
    --data FILE --iterations 1 --untimed 1 --parts 0 --device cuda

An iteration is what training does: forward, backward, clipping and the optimizer's step. Each kind of attention runs \
in a process of its own, so that the peaks of memory do not mix. Memory after the first and the last iteration shows \
whether training stays within what it has: --iterations 10000.")]
pub struct BenchArgs {
    /// Model and recipe
    #[arg(long, value_enum, default_value = "tiny")]
    preset: Preset,
    /// Iterations to time
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,
    /// Iterations before them that are not timed [default: 2, with --graph 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    untimed: Option<u32>,
    /// Iterations after them that wait for the device after each part; 0 leaves the parts out
    #[arg(long, default_value_t = 3, value_name = "N")]
    parts: u32,
    /// File of raw bytes, whose first 90% are longer than the context [default: the embedded start of enwik8]
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Peak rate of the device in the run's precision, in 10¹² operations per second, for the model-flops utilisation
    #[arg(long, value_parser = arguments::above_zero, value_name = "PEAK")]
    peak_tflops: Option<f64>,
    /// flex, ndarray, wgpu, cuda or cuda:INDEX [default: the best that is compiled in]
    #[arg(long)]
    device: Option<String>,
    /// Also write the results to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Capture an iteration in a CUDA graph and replay it
    #[arg(long)]
    graph: bool,
    /// Measure in this process and print the result as JSON
    #[arg(long, hide = true)]
    measure: Option<String>,
    #[command(flatten)]
    overrides: Overrides,
}

/// Values of `--measure`.
const SPARSE: &str = "sparse";
const DENSE: &str = "dense";

/// Measurements of one process. Times are medians over the iterations, in milliseconds.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Measurement {
    attention: String,
    /// Allowed pairs of the first layer as a share of the causal ones.
    share_of_causal: f64,
    precision: Precision,
    batch: usize,
    context: usize,
    recompute: Recompute,
    dropout: f64,
    /// With --graph, how iterations run.
    graph: Option<String>,
    ms: f64,
    /// Time until everything is in the device's queue.
    host_ms: f64,
    /// Times of iterations that wait for the device after each part, so that their sum exceeds `ms`; absent with `--parts 0`.
    parts: Option<Parts>,
    /// Time to build the model, and of the first iteration and the kernels it compiles.
    start_up_s: f64,
    tokens_per_s: f64,
    /// Operations of an iteration that the model needs, in 10¹². Recomputed and masked ones do not count.
    model_tflop: f64,
    /// `model_tflop` per second over `--peak-tflops`.
    utilisation: Option<f64>,
    /// Loss of the last iteration, in nats. Two precisions that differ here by more than rounding do not train alike.
    loss: f64,
    /// Peak resident memory of the process.
    host_bytes: Option<u64>,
    /// Memory the backend has reserved on its device after the last iteration.
    device_bytes: Option<u64>,
    /// Breakdown of that memory.
    memory: Option<Memory>,
}

/// Parts of an iteration, in milliseconds.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct Parts {
    gradients: f64,
    /// Includes clipping.
    optimizer: f64,
}

/// Breakdown of a device's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Memory {
    /// Bytes in use after the model is created.
    parameters: u64,
    /// Bytes that the first iteration adds: moments, and layouts.
    optimizer: u64,
    /// Bytes that a forward pass stores for the backward pass; unknown with recomputation.
    kept: Option<u64>,
    /// Rest of the memory reserved at the peak: gradients, intermediate results, and gaps between allocations.
    transient: u64,
    /// Usage after the first timed iteration.
    first: Usage,
    /// Usage after the last timed iteration.
    last: Usage,
}

/// A device's memory at one time, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Usage {
    in_use: u64,
    reserved: u64,
}

impl Usage {
    /// Returns the usage of a device that reports it.
    fn of(device: &Device) -> Option<Self> {
        let usage = device.memory_pool_usage()?;
        Some(Self {
            in_use: usage.bytes_in_use,
            reserved: usage.bytes_reserved,
        })
    }
}

pub fn run(args: &BenchArgs) -> Result<()> {
    if let Some(attention) = &args.measure {
        let measurement = measure(args, attention == DENSE)?;
        say(serde_json::to_string(&measurement)?);
        return Ok(());
    }
    let config = RunConfig::new(args.preset, &args.overrides)?;
    config.check_graph(args.graph)?;
    let kinds = match args.overrides.changes.attention {
        Some(AttentionKind::Sparse | AttentionKind::Content(_)) => vec![SPARSE],
        Some(AttentionKind::Dense) => vec![DENSE],
        None => vec![SPARSE, DENSE],
    };
    let named = device::open(args.device.as_deref())?;
    config.check_memory(Some(&named))?;
    say(format!(
        "preset {}: {}, batch {}, {}{}, on {}",
        args.preset,
        config.model.sizes(),
        config.recipe.batch,
        config.model.precision,
        match config.recipe.recompute {
            Recompute::None => String::new(),
            Recompute::SegmentsSavingAttention(blocks) => {
                let mode = Recompute::Segments(blocks);
                format!(", {mode} recomputed but for attention")
            }
            mode => format!(", {mode} recomputed"),
        },
        named.name
    ));
    if config.model.chooses() {
        say("with --selection, shares and TFLOP/s count all that it chooses from");
    }
    let mut rows = Vec::new();
    for kind in kinds {
        let row = in_child_process(kind)?;
        let parts = row.parts.as_ref().map(|parts| {
            let [gradients, optimizer] = [parts.gradients, parts.optimizer];
            format!("gradients {gradients:.1} ms, clipping and optimizer {optimizer:.1} ms; ")
        });
        // A CPU has no queue.
        let queued = (!named.is_cpu()).then(|| format!("queued after {:.1} ms; ", row.host_ms));
        say(format!(
            "{}: {}{}start-up {:.1} s",
            row.attention,
            parts.unwrap_or_default(),
            queued.unwrap_or_default(),
            row.start_up_s
        ));
        if let Some(how) = &row.graph {
            say(format!("{}: {how}", row.attention));
        }
        rows.push(row);
    }
    say(format!("\n{}", speed_table(&rows)));
    if rows.iter().any(|row| row.memory.is_some()) {
        say(format!("\n{}", memory_table(&rows)));
    }
    if let Some(path) = &args.json {
        files::write_json(path, &rows)?;
    }
    Ok(())
}

fn in_child_process(kind: &str) -> Result<Measurement> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let output = Command::new(program)
        .args(std::env::args_os().skip(1))
        .args(["--measure", kind])
        .output()
        .context("cannot start a process to measure in")?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        bail!(
            "measuring {kind} attention failed: {}",
            reason.trim().trim_start_matches("error: ")
        );
    }
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("cannot read the result of {kind} attention"))
}

fn measure(args: &BenchArgs, is_dense: bool) -> Result<Measurement> {
    let overrides = match is_dense {
        true => args.overrides.dense()?,
        false => args.overrides.clone(),
    };
    let config = RunConfig::new(args.preset, &overrides)?;
    let device = device::open(args.device.as_deref())?.device;
    let began = Instant::now();
    let mut trainer = Trainer::new(&config, &device, args)?;
    trainer.sync()?;
    let made = Usage::of(&device);
    trainer.iterate()?;
    trainer.sync()?;
    let stepped = Usage::of(&device);
    let start_up_s = began.elapsed().as_secs_f64();
    // With --graph the fourth iteration is recorded; timing begins later.
    let untimed = args.untimed.unwrap_or(if args.graph { 5 } else { 2 });
    for _ in 1..untimed {
        trainer.iterate()?;
        trainer.sync()?;
    }
    let graph = trainer.training.describe();

    let (mut times, mut host_times) = (Vec::new(), Vec::new());
    let mut loss = 0.0;
    let (mut first, mut last_usage) = (None, None);
    for _ in 0..args.iterations {
        let began = Instant::now();
        let last = trainer.iterate()?;
        host_times.push(milliseconds(began));
        trainer.sync()?;
        times.push(milliseconds(began));
        loss = last.narrow(0, 0, 1).into_scalar::<f64>();
        last_usage = Usage::of(&device);
        first = first.or(last_usage);
    }
    let (model_tflop, share_of_causal) = trainer.sizes()?;
    let ms = median(times);
    let rate = model_tflop / (ms / 1_000.0);
    let factorization = model::factorization(&config.model)?;
    let parts = trainer.parts(args.parts)?;
    let peak = Usage::of(&device);
    // Last, because it may need more memory than an iteration.
    let kept = match peak.is_some() && config.recipe.recompute == Recompute::None {
        true => trainer.kept()?,
        false => None,
    };
    let memory = || {
        let parameters = made?.in_use;
        let optimizer = stepped?.in_use.saturating_sub(parameters);
        let named = parameters + optimizer + kept.unwrap_or(0);
        Some(Memory {
            parameters,
            optimizer,
            kept,
            transient: peak?.reserved.saturating_sub(named),
            first: first?,
            last: last_usage?,
        })
    };
    Ok(Measurement {
        attention: match &config.model.content {
            _ if is_dense => "dense causal".to_owned(),
            Some(content) if content.is_whole_layer() => content.to_string(),
            Some(content) => format!("{factorization} and {content}"),
            None => factorization.to_string(),
        },
        share_of_causal,
        precision: config.model.precision,
        batch: config.recipe.batch,
        context: config.model.context,
        recompute: config.recipe.recompute,
        dropout: config.model.dropout,
        graph,
        ms,
        host_ms: median(host_times),
        parts,
        start_up_s,
        tokens_per_s: config.tokens_per_step() as f64 / (ms / 1_000.0),
        model_tflop,
        utilisation: args.peak_tflops.map(|peak| rate / peak),
        loss,
        host_bytes: peak_resident_bytes(),
        device_bytes: peak.map(|usage| usage.reserved),
        memory: memory(),
    })
}

/// Training state without a run folder.
struct Trainer<'a> {
    config: &'a RunConfig,
    device: &'a Device,
    corpus: Corpus,
    sampler: Sampler,
    training: Steps,
    iteration: u64,
}

impl<'a> Trainer<'a> {
    fn new(config: &'a RunConfig, device: &'a Device, args: &BenchArgs) -> Result<Self> {
        let corpus = Corpus::open(args.data.as_deref(), config.model.pictures)?;
        let bytes = corpus.split_for(Split::Train, config.model.context)?.len();
        let model = model::new(
            &config.model,
            config.recipe.seed,
            &device.clone().autodiff(),
        )?;
        Ok(Trainer {
            config,
            device,
            sampler: Sampler::new(bytes, config.model.cut(), config.recipe.seed),
            corpus,
            training: Steps::new(
                model,
                model::optimizer(&config.recipe),
                device,
                config.recipe.recompute,
                args.graph,
            ),
            iteration: 0,
        })
    }

    fn batch(&mut self) -> Batch {
        let RunConfig { recipe, .. } = self.config;
        let bytes = self.corpus.split(Split::Train);
        let [tokens, targets] = self.sampler.batch(bytes, recipe.batch);
        self.iteration += 1;
        Batch {
            tokens,
            targets,
            dropout_seed: self.iteration - 1,
            learning_rate: recipe.learning_rate,
        }
    }

    /// Takes one training step. The loss and the gradients' norm stay on the device.
    fn iterate(&mut self) -> Result<Tensor<1>> {
        let batch = self.batch();
        self.training.take(batch)
    }

    fn sync(&self) -> Result<()> {
        (self.device.sync()).map_err(|error| anyhow!("{error:?}"))
    }

    /// Returns medians over iterations that wait after each part.
    fn parts(&mut self, iterations: u32) -> Result<Option<Parts>> {
        if iterations == 0 {
            return Ok(None);
        }
        let mut times = [const { Vec::new() }; 2];
        for _ in 0..iterations {
            let batch = self.batch();
            let mut began = Instant::now();
            self.training.one(batch, || {
                self.sync()?;
                times[0].push(milliseconds(began));
                began = Instant::now();
                Ok(())
            })?;
            self.sync()?;
            times[1].push(milliseconds(began));
        }
        let [gradients, optimizer] = times.map(median);
        Ok(Some(Parts {
            gradients,
            optimizer,
        }))
    }

    /// Returns the bytes that a forward pass stores for its backward pass, on a device that reports its memory.
    fn kept(&mut self) -> Result<Option<u64>> {
        let Batch {
            tokens, targets, ..
        } = self.batch();
        let [tokens, targets] = [tokens, targets].map(|data| Tensor::from_data(data, self.device));
        self.sync()?;
        let before = Usage::of(self.device);
        let model = self.training.model()?;
        let loss = model.try_loss(tokens, targets)?;
        self.sync()?;
        let during = Usage::of(self.device);
        drop(loss);
        let growth = |(before, during): (Usage, Usage)| during.in_use.saturating_sub(before.in_use);
        Ok(before.zip(during).map(growth))
    }

    /// Returns the operations of an iteration in 10¹² (a backward pass has twice those of a forward pass), and the share of causal pairs that the first layer
    /// computes.
    fn sizes(&self) -> Result<(f64, f64)> {
        let model = self.training.model()?;
        let context = self.config.model.context;
        let tflop = model::step_tflop(&model, self.config)?;
        let mha = &model.blocks[0].mha;
        let causal = context as f64 * (context + 1) as f64 / 2.0;
        if mha.content.is_some() {
            let dense = 4.0 * self.config.model.d_model as f64 * causal;
            let share = mha.attention_flops(context)? as f64 / dense;
            return Ok((tflop, share));
        }
        let layout = mha.layout(context, context)?;
        let share = layout.density() * (context as f64).powi(2) / causal;
        Ok((tflop, share))
    }
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1_000.0
}

fn speed_table(rows: &[Measurement]) -> String {
    let names = "attention  share of causal  ms/iteration  tokens/s  TFLOP/s  of peak  loss  peak memory  device memory";
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    let cells = rows.iter().map(|row| {
        [
            row.attention.clone(),
            percent(row.share_of_causal),
            format!("{:.1}", row.ms),
            thousands(row.tokens_per_s as usize),
            format!("{:.3}", row.model_tflop / (row.ms / 1_000.0)),
            row.utilisation.map_or(String::new(), percent),
            format!("{:.4}", row.loss),
            mebibytes(row.host_bytes),
            mebibytes(row.device_bytes),
        ]
    });
    table(names, &cells.collect::<Vec<_>>())
}

/// Formats the device's memory by part, and at the first and the last timed iteration.
fn memory_table(rows: &[Measurement]) -> String {
    let names = "device memory  parameters  optimizer  kept  transient  in use, first  last  reserved, first  last";
    let cells = rows.iter().map(|row| {
        let part = |of: fn(&Memory) -> Option<u64>| mebibytes(row.memory.as_ref().and_then(of));
        [
            row.attention.clone(),
            part(|memory| Some(memory.parameters)),
            part(|memory| Some(memory.optimizer)),
            part(|memory| memory.kept),
            part(|memory| Some(memory.transient)),
            part(|memory| Some(memory.first.in_use)),
            part(|memory| Some(memory.last.in_use)),
            part(|memory| Some(memory.first.reserved)),
            part(|memory| Some(memory.last.reserved)),
        ]
    });
    table(names, &cells.collect::<Vec<_>>())
}

/// Formats a size in MiB; empty if the device does not report it.
fn mebibytes(bytes: Option<u64>) -> String {
    bytes.map_or(String::new(), |bytes| {
        format!("{} MiB", thousands(bytes.div_ceil(1 << 20) as usize))
    })
}
