//! `enwik8 bench`: training speed and memory, sparse against dense.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use burn::tensor::Device;
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::clip::clip_global_norm;
use crate::data::{Corpus, Sampler, Split, thousands};
use crate::device;
use crate::model::{self, windows};
use crate::presets::{Attention, Overrides, Preset, RunConfig};
use crate::progress::say;

/// Time training iterations with sparse and with dense attention
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 bench
  enwik8 bench --context 2048 --batch 2
  enwik8 bench --preset paper --batch 1 --device cuda --iterations 5

An iteration is what training does: forward, backward, clipping and the optimizer's step. Each kind of attention runs
in a process of its own, so that the peaks of memory do not mix.")]
pub struct BenchArgs {
    /// Model and recipe
    #[arg(long, value_enum, default_value = "tiny")]
    preset: Preset,
    /// Iterations to time, after two that are not
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,
    /// Measure one kind of attention only
    #[arg(long, value_enum)]
    only: Option<Attention>,
    /// flex, ndarray, wgpu, cuda or cuda:INDEX [default: the best that is compiled in]
    #[arg(long)]
    device: Option<String>,
    /// Measure in this process and print the result as JSON
    #[arg(long, hide = true, requires = "only")]
    json: bool,
    #[command(flatten)]
    overrides: Overrides,
}

/// What one process measures.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Measurement {
    attention: String,
    /// Allowed pairs of the first layer as a share of the causal ones.
    share_of_causal: f64,
    /// Median over the iterations.
    ms: f64,
    tokens_per_s: f64,
    /// Peak resident memory of the process.
    host_bytes: Option<u64>,
    /// Memory the backend has reserved on its device after the last iteration.
    device_bytes: Option<u64>,
}

/// Runs `enwik8 bench`.
pub fn run(args: &BenchArgs) -> Result<()> {
    if let (Some(attention), true) = (args.only, args.json) {
        let measurement = measure(args, attention)?;
        say(serde_json::to_string(&measurement)?);
        return Ok(());
    }
    let config = RunConfig::new(args.preset, &args.overrides)?;
    let kinds = match args.only {
        Some(kind) => vec![kind],
        None => vec![Attention::Sparse, Attention::Dense],
    };
    let named = device::open(args.device.as_deref())?;
    say(format!(
        "preset {}: {} layers, {} heads, d_model {}, context {}, batch {}, on {}",
        args.preset,
        config.model.layers,
        config.model.heads,
        config.model.d_model,
        thousands(config.model.context),
        config.recipe.batch,
        named.name
    ));
    say(format!(
        "{:<28} {:>15} {:>13} {:>12} {:>12} {:>14}",
        "attention", "share of causal", "ms/iteration", "tokens/s", "peak memory", "device memory"
    ));
    for kind in kinds {
        let row = in_child_process(kind)?;
        say(format!(
            "{:<28} {:>13.1} % {:>13.1} {:>12} {:>12} {:>14}",
            row.attention,
            row.share_of_causal * 100.0,
            row.ms,
            thousands(row.tokens_per_s as usize),
            mebibytes(row.host_bytes),
            mebibytes(row.device_bytes),
        ));
    }
    Ok(())
}

fn in_child_process(kind: Attention) -> Result<Measurement> {
    let kind = match kind {
        Attention::Sparse => "sparse",
        Attention::Dense => "dense",
    };
    let program = std::env::current_exe().context("cannot find this program")?;
    // `--only` may be there already; the last one counts.
    let output = Command::new(program)
        .args(std::env::args_os().skip(1))
        .args(["--only", kind, "--json"])
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

fn measure(args: &BenchArgs, attention: Attention) -> Result<Measurement> {
    let mut overrides = args.overrides.clone();
    if attention == Attention::Dense {
        overrides.pattern.clear();
        overrides.attention = Some(attention);
    }
    let config = RunConfig::new(args.preset, &overrides)?;
    let device = device::open(args.device.as_deref())?.device;
    let mut times = iterations(&config, &device, args.iterations)?;
    times.sort_by(f64::total_cmp);
    let ms = times[times.len() / 2];

    let factorization = model::factorization(&config.model)?;
    let layout = factorization.pattern(0)?.layout(
        config.model.heads,
        config.model.context,
        config.model.block_size,
    )?;
    let context = config.model.context as f64;
    Ok(Measurement {
        attention: match attention {
            Attention::Sparse => factorization.to_string(),
            Attention::Dense => "dense causal".to_owned(),
        },
        share_of_causal: layout.density() * context * context / (context * (context + 1.0) / 2.0),
        ms,
        tokens_per_s: config.tokens_per_step() as f64 / (ms / 1_000.0),
        host_bytes: peak_resident_bytes(),
        device_bytes: device.memory_pool_usage().map(|usage| usage.bytes_reserved),
    })
}

/// Milliseconds of each iteration.
fn iterations(config: &RunConfig, device: &Device, count: u32) -> Result<Vec<f64>> {
    const WARM_UP: u32 = 2;
    let recipe = &config.recipe;
    let context = config.model.context;
    let corpus = Corpus::open(None)?;
    let bytes = corpus.split_for(Split::Train, context)?;
    let mut sampler = Sampler::new(bytes.len(), context, recipe.seed);
    let mut model = model::new(&config.model, recipe.seed, &device.clone().autodiff())?;
    let mut optimizer = model::optimizer(recipe);

    let mut times = Vec::new();
    for iteration in 0..WARM_UP + count {
        let starts: Vec<usize> = (0..recipe.batch).map(|_| sampler.next_start()).collect();
        let began = Instant::now();
        let (tokens, targets) = windows(bytes, &starts, context, device);
        let (_, gradients) =
            model.loss_and_gradients(tokens, targets, u64::from(iteration), recipe.recompute)?;
        let (gradients, _) = clip_global_norm(&model, gradients, recipe.clip);
        model = optimizer.step(recipe.learning_rate, model, gradients);
        device.sync().map_err(|error| anyhow!("{error:?}"))?;
        if iteration >= WARM_UP {
            times.push(began.elapsed().as_secs_f64() * 1_000.0);
        }
    }
    Ok(times)
}

/// `VmHWM` of this process; nothing where there is no `/proc`.
fn peak_resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kibibytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kibibytes * 1024)
}

fn mebibytes(bytes: Option<u64>) -> String {
    match bytes {
        Some(bytes) => format!("{} MiB", thousands(bytes.div_ceil(1 << 20) as usize)),
        None => "n/a".to_owned(),
    }
}
