//! Times the attention kernels on a device, by the device's own clock.
//!
//! Without arguments it runs the workloads of the benchmark page; `--pattern` and the sizes run any other. Flops count allowed pairs: 2 · (head_dim +
//! value_dim) per pair forward, 2.5 times that backward, so computing masked pairs gains nothing.

mod problem;
mod stress;
mod workload;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use blocksparse_bench::device;
use blocksparse_bench::numbers::Dtype;
use blocksparse_bench::runner::{Timing, write_json};
use blocksparse_cubecl::AttentionPlan;
use clap::{Parser, ValueEnum};
use problem::{Case, Outputs, Problem};
use serde_json::{Map, Value};
use workload::{PatternArg, Workload};

#[derive(Parser)]
#[command(
    about = "Times the block-sparse attention kernels on a device",
    version
)]
struct Args {
    /// Run only the workloads whose names contain one of these (comma-separated).
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Run this pattern, e.g. local:256 or fixed:128,32 (`enwik8 patterns` lists the notation), random:PERCENT (blocks of the
    /// block size, per head, causal) or gaps:PERCENT (likewise, anywhere).
    #[arg(long, group = "custom")]
    pattern: Option<PatternArg>,
    /// Run this layout, a `BlockLayout` as serde_json writes it: heads, length and block size are the file's. Strided
    /// heads run class by class if the file was written with their parts.
    #[arg(long, value_name = "FILE.json", group = "custom", conflicts_with_all = ["heads", "n", "block", "per_batch"])]
    layout: Option<PathBuf>,
    /// Batch entries; as many as the layout of a file has if it has any, 1 otherwise.
    #[arg(long, requires = "custom")]
    batch: Option<usize>,
    #[arg(long, default_value_t = 8, requires = "pattern")]
    heads: usize,
    /// Heads of keys and values; as many as query heads by default.
    #[arg(long, requires = "custom")]
    kv_heads: Option<usize>,
    /// Sequence length.
    #[arg(long, short, default_value_t = 8192, requires = "pattern")]
    n: usize,
    #[arg(long, default_value_t = 64, requires = "custom")]
    head_dim: usize,
    /// Width of values; that of queries by default.
    #[arg(long, requires = "custom")]
    value_dim: Option<usize>,
    /// A layout of its own for every batch entry.
    #[arg(long, requires = "pattern")]
    per_batch: bool,
    /// Let products of f32 tensors be of tf32.
    #[arg(long)]
    tf32: bool,
    /// Let products of the forward pass be of FP8, E4M3.
    #[arg(long, requires = "forward_only", conflicts_with = "tf32")]
    fp8: bool,
    /// Factor of the products; 1 / √head_dim by default.
    #[arg(long, allow_negative_numbers = true)]
    scale: Option<f64>,
    /// Softcap of the scores.
    #[arg(long)]
    softcap: Option<f64>,
    /// Skip tiles whose scores are below the largest ones of their rows by more than this.
    #[arg(long)]
    softmax_threshold: Option<f64>,
    /// ALiBi biases: slopes from 1/2 down to 1/256.
    #[arg(long)]
    alibi: bool,
    /// Drop weights with this probability.
    #[arg(long)]
    dropout: Option<f64>,
    /// A bias of the scores, which all batch entries and heads share by default. Its gradient is made only to compare results, or with
    /// --bias-gradient.
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "shared")]
    bias: Option<BiasShape>,
    /// Make the gradient of the bias in the backward pass.
    #[arg(long, requires = "bias")]
    bias_gradient: bool,
    /// Biases of distances up to REACH, for each head. Their gradient is made only to compare results.
    #[arg(long, value_name = "REACH")]
    relative: Option<usize>,
    /// All heads share these biases.
    #[arg(long, requires = "relative")]
    relative_shared: bool,
    /// Also write each row's largest score. With --verify it is compared with the scores of all pairs, too, made on the host.
    #[arg(long)]
    max_scores: bool,
    /// Lay tensors out as [seq, heads, batch], rows 8 elements apart.
    #[arg(long)]
    permuted: bool,
    /// Block size.
    #[arg(long, default_value_t = 32, requires = "pattern")]
    block: usize,
    /// Run random blocks of several sizes at densities from 1% to 50%, for `plot density`.
    #[arg(long, conflicts_with_all = ["custom", "only"])]
    densities: bool,
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    #[command(flatten)]
    timing: Timing<15>,
    /// Also write the numbers to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Print what every launch runs.
    #[arg(long)]
    plan: bool,
    /// Compare all results with those of the simt tier instead of timing.
    #[arg(long)]
    verify: bool,
    /// Run the backward pass so many times instead of timing it, and compare hashes of its gradients.
    #[arg(long, value_name = "PASSES", conflicts_with_all = ["verify", "forward_only"])]
    stress: Option<usize>,
    /// Leave the backward pass out.
    #[arg(long)]
    forward_only: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum BiasShape {
    /// `[batch, heads, n, n]`
    Full,
    /// `[1, heads, n, n]`
    Heads,
    /// `[1, 1, n, n]`
    Shared,
    /// `[batch, 1, 1, n]`
    Keys,
}

impl BiasShape {
    fn of(self, workload: &Workload) -> [usize; 4] {
        let (batch, heads, n) = (workload.batch, workload.heads, workload.n);
        match self {
            BiasShape::Full => [batch, heads, n, n],
            BiasShape::Heads => [1, heads, n, n],
            BiasShape::Shared => [1, 1, n, n],
            BiasShape::Keys => [batch, 1, 1, n],
        }
    }
}

impl Args {
    /// Returns the shape of the relative bias, if there is one.
    fn relative_shape(&self, workload: &Workload) -> Option<[usize; 2]> {
        let heads = if self.relative_shared {
            1
        } else {
            workload.heads
        };
        self.relative.map(|reach| [heads, 2 * reach + 1])
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let client = device::client()?;
    println!(
        "{} on {}, {} repeats",
        client.properties().identity.name,
        client.name(),
        args.timing.repeats
    );
    let workloads: Vec<Workload> = match custom(&args)? {
        Some(workload) => vec![workload],
        None if args.densities => workload::densities(),
        None => (workload::anchors().into_iter())
            .filter(|w| {
                args.only.is_empty() || args.only.iter().any(|o| w.name.contains(o.as_str()))
            })
            .collect(),
    };
    if workloads.is_empty() {
        bail!("no workload is named like {:?}", args.only);
    }
    let mut results = Map::new();
    println!(
        "{:<30} {:>8} {:>10} {:>8} {:>10} {:>8} {:>9}",
        "workload", "density", "fwd ms", "TFLOP/s", "bwd ms", "TFLOP/s", "host us"
    );
    for workload in workloads {
        let case = Case {
            client: &client,
            workload: &workload,
            args: &args,
        };
        let result = run(case).with_context(|| workload.name.to_string())?;
        results.insert(workload.name.to_string(), result);
    }
    write_json(args.json.as_deref(), &results)
}

/// Returns the workload that `--pattern` or `--layout` select.
fn custom(args: &Args) -> Result<Option<Workload>> {
    let (pattern, batch, [heads, n, block]) = match (&args.layout, &args.pattern) {
        (Some(path), _) => {
            let layout = workload::read_layout(path)?;
            let sizes = [layout.heads(), layout.seq_q(), layout.block_size()];
            (PatternArg::File(path.clone()), layout.batch(), sizes)
        }
        (None, Some(pattern)) => (pattern.clone(), None, [args.heads, args.n, args.block]),
        (None, None) => return Ok(None),
    };
    Ok(Some(Workload {
        name: "custom".to_string(),
        pattern,
        batch: args.batch.or(batch).unwrap_or(1),
        heads,
        kv_heads: args.kv_heads.unwrap_or(heads),
        n,
        head_dim: args.head_dim,
        value_dim: args.value_dim.unwrap_or(args.head_dim),
        block,
        per_batch: args.per_batch,
    }))
}

fn run(case: Case) -> Result<Value> {
    let (client, workload, args) = (case.client, case.workload, case.args);
    let layout = workload.layout()?;
    let start = std::time::Instant::now();
    let plan = AttentionPlan::new(client, &layout, case.request())?;
    if args.plan {
        print!("{plan}");
        println!("  chosen in {:.1} ms", start.elapsed().as_secs_f64() * 1e3);
    }
    let problem = Problem::new(case, layout);
    if args.verify {
        problem.verify(&plan)?;
        return Ok(Value::Null);
    }
    let outputs = Outputs::new(case);
    let is_launched = args.timing.launched(client, || {
        problem.forward(&plan, &outputs)?;
        problem.backward(&plan, &outputs)
    })?;
    match args.stress {
        _ if is_launched => Ok(Value::Null),
        Some(passes) => problem.stress(&plan, &outputs, passes),
        None => problem.time(&plan, &outputs),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn arguments_go_together() {
        Args::command().debug_assert();
        let parse = |arguments: &str| {
            Args::try_parse_from(["bench-kernels"].into_iter().chain(arguments.split(' ')))
        };
        assert!(parse("--pattern local:8 --n 64 --batch 2 --head-dim 32").is_ok());
        assert!(parse("--layout a.json --batch 2 --kv-heads 1 --value-dim 32").is_ok());
        for wrong in [
            "--layout a.json --pattern causal",
            "--layout a.json --n 64",
            "--layout a.json --block 64",
            "--layout a.json --densities",
            "--batch 2",
            "--relative-shared",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
