//! `bench-choice`: the kernels that choose blocks, one by one, by the device's own clock; and their equality to loops in f64.

mod choice_attention_sums;
mod choice_lines;
mod choice_lists;
mod choice_maxima;
mod choice_picks;
mod choice_rules;

use anyhow::{Result, ensure};
use blocksparse::{Budget, LayoutShape};
use blocksparse_bench::device::{self, empty};
use blocksparse_bench::device_time::{host, median};
use blocksparse_bench::numbers::{BF16, F32};
use blocksparse_bench::runner::{Shard, Tally, Timing};
use burn_sparse_select::kernels::rows::{Blocked, RowBlocks, block_means};
use burn_sparse_select::kernels::selection::{
    Antidiagonals, FlexLimits, GateSizes, Kept, LineSizes, MeanProducts, RunMaxima, SeenRows,
    mean_products, query_picks,
};
use clap::Parser;
use cubecl::client::Client;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use choice_attention_sums::AttentionSums;
use choice_lines::{Chosen, HalfKept, Lines};
use choice_lists::Lists;
use choice_maxima::Maxima;
use choice_rules::Ruled;

/// Queries of which all products with keys are made.
const LAST: usize = 2048;

/// Keys of a block that single queries choose.
const GATE_BLOCK: usize = 512;

#[derive(Parser)]
#[command(
    about = "Times the kernels that choose blocks, or compares them with loops in f64",
    version
)]
struct Args {
    /// Queries and keys.
    #[arg(long, short, default_value_t = 65_536)]
    n: usize,
    #[arg(long, default_value_t = 32)]
    heads: usize,
    #[arg(long, default_value_t = 8)]
    kv_heads: usize,
    #[arg(long, default_value_t = 128)]
    head_dim: usize,
    /// Queries and keys of a block.
    #[arg(long, default_value_t = 128)]
    block: usize,
    /// Only what has this in its name, of what is timed; with --verify, "lines" compares sums over keys and distances, "picks" what queries pick, and "maxima" highest products by blocks, alone.
    #[arg(long, default_value = "")]
    only: String,
    #[command(flatten)]
    timing: Timing<15>,
    /// Time how long calls keep the host instead.
    #[arg(long)]
    host: bool,
    /// Compare results with loops in f64, of small calls, instead of timing.
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    shard: Shard,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let client = device::client()?;
    match args.verify {
        true => verify(&client, &args),
        false => times(&client, &args),
    }
}

fn verify(client: &Client, args: &Args) -> Result<()> {
    let tally = &mut Tally::new(args.shard)?;
    let rng = &mut ChaCha8Rng::seed_from_u64(7);
    let is_asked = |name: &str| [name, ""].contains(&args.only.as_str());
    if is_asked("picks") || args.only == "lines" {
        choice_picks::verify(client, rng, tally)?;
    }
    if is_asked("lines") {
        choice_lines::verify(client, rng, tally)?;
        choice_lines::verify_least(client, rng, tally)?;
    }
    if is_asked("") {
        choice_attention_sums::verify(client, rng, tally)?;
        choice_rules::verify(client, rng, tally)?;
    }
    if is_asked("maxima") {
        choice_maxima::verify(client, rng, tally)?;
    }
    let (compared, Shard { shard, of }) = (tally.compared, args.shard);
    println!("{compared} calls equal loops in f64");
    ensure!(compared > 0, "--shard {shard} of {of} has no call");
    Ok(())
}

fn times(client: &Client, args: &Args) -> Result<()> {
    let (n, head_dim, block) = (args.n, args.head_dim, args.block);
    let (heads, lists) = (args.heads, [args.heads, args.kv_heads]);
    let rng = &mut ChaCha8Rng::seed_from_u64(1);
    let time = |name: &str, run: &(dyn Fn() -> Result<()> + Sync)| -> Result<f64> {
        if !name.contains(&args.only) || args.timing.launched(client, run)? {
            return Ok(f64::NAN);
        }
        let seconds = match args.host {
            true => host(client, args.timing.repeats, run)?,
            false => median(client, args.timing.repeats, run)?,
        };
        println!("{name:<48} {:>9.1} µs", seconds * 1e6);
        Ok(seconds)
    };
    for stride in [16, 8].into_iter().filter(|&stride| block % stride == 0) {
        let of = Antidiagonals {
            lists,
            seq: [n; 2],
            width: head_dim,
            block,
            stride,
            causal: true,
            factor: 1.0 / (stride as f64 * (head_dim as f64).sqrt()),
            rows: 0..n.div_ceil(block),
        };
        let attention_sums = AttentionSums::new(client, of, rng);
        let name = format!("antidiagonals, stride {stride}");
        time(&name, &|| attention_sums.run(client))?;
    }
    let inputs = Lists::new(client, lists, [n; 2], head_dim, rng);
    let [q, k] = inputs.handles();
    let of_blocks = RowBlocks::new(heads, [n, head_dim], block);
    let blocks = of_blocks.blocks();
    let means = empty(client, heads * blocks * head_dim, F32);
    time("means of blocks of queries", &|| {
        let blocked = Blocked {
            x: q,
            of: &of_blocks,
            means: &means,
        };
        Ok(block_means(client, BF16, blocked)?)
    })?;
    let products = MeanProducts {
        lists: [heads; 2],
        rows: blocks,
        blocks,
        width: head_dim,
        factor: 1.0,
        seen: Some(SeenRows {
            seq: [n; 2],
            block,
            first: 0,
        }),
    };
    let scores = empty(client, heads * blocks.pow(2), F32);
    time("products of means", &|| {
        Ok(mean_products(client, [&means; 2], &products, &scores)?)
    })?;
    let gate = GateSizes {
        lists,
        seq: [n; 2],
        width: head_dim,
        block: GATE_BLOCK,
        most: 2,
    };
    let picks = empty(client, heads * n * gate.most, F32);
    time("two blocks of 512 for each query", &|| {
        Ok(query_picks(client, BF16, [q, k], &gate, &picks)?)
    })?;
    let of = RunMaxima {
        rows: [heads, LAST.min(n)],
        columns: n / block * block,
        width: head_dim,
        run: block,
    };
    let maxima = Maxima::new(client, lists, [n; 2], of, rng);
    if maxima.is_served(client) {
        let seconds = time("highest of blocks, of the last queries", &|| {
            maxima.run(client)
        })?;
        let numbers = heads * of.rows[1] * of.columns * head_dim;
        let rate = 2.0 * numbers as f64 / seconds / 1e12;
        println!("{:<48} {rate:>9.1} TFLOP/s", "");
    }
    let last = |queries: usize| LineSizes {
        lists,
        seq: [queries, n],
        width: head_dim,
        factor: 1.0 / (head_dim as f64).sqrt(),
    };
    for queries in [64, 128].into_iter().filter(|&queries| queries <= n) {
        // As many queries of any place cost the same.
        let lines = Lines::new(client, last(queries), rng);
        println!("{queries} queries: {}", lines.plan(client));
        let name = format!("sums of {queries} queries by keys and distances");
        time(&name, &|| lines.run(client))?;
    }
    // All lists by lines, all by means, and all by lines with a least.
    for (name, threshold, blocks) in [
        ("flexprefill: estimate, all by lines", 0.0, 0),
        ("flexprefill: estimate, all by means", 2.0, 0),
        ("flexprefill: estimate, with a least", 0.0, 1024 / block),
    ] {
        let limits = Some(FlexLimits { threshold, blocks });
        let kept = Kept::Share(0.5);
        let chosen = Chosen::new(client, last(block.min(n)), [block, n], kept, limits);
        time(name, &|| chosen.run(client, [q, k]))?;
    }
    let kept = Kept::Count {
        all: [1000, 200],
        forced: [30, 100],
    };
    let chosen = Chosen::new(client, last(64.min(n)), [64, n], kept, None);
    time("minference: estimate", &|| chosen.run(client, [q, k]))?;
    let shape = LayoutShape::square(heads, n, block);
    for keep in [Budget::TopK(16), Budget::top_p(0.2)] {
        let ruled = Ruled::new(client, shape, keep, 16, rng);
        let name = |what: &str| format!("{keep:?}: {what}");
        time(&name("rule"), &|| ruled.choose(client, &ruled.layout()?))?;
        let known = ruled.layout()?;
        ruled.choose(client, &known)?;
        let over = time(&name("attention over known blocks"), &|| {
            ruled.attend(client, &known)
        })?;
        let all = time(&name("rule, plan and attention"), &|| {
            let layout = ruled.layout()?;
            ruled.choose(client, &layout)?;
            ruled.attend(client, &layout)
        })?;
        if !args.timing.enqueue_only {
            let name = name("rule and plan");
            println!("{name:<48} {:>9.1} µs", (all - over) * 1e6);
        }
    }
    let blocks = n.div_ceil(block);
    for (name, lines_of) in [
        ("keys and distances", [2 * heads, n]),
        ("whole rows of blocks", [heads, blocks * blocks]),
    ] {
        let lines = HalfKept::new(client, lines_of, rng);
        time(&format!("least kept of {name}"), &|| lines.run(client))?;
    }
    device::flush(client)
}
