//! `bench-choice`: the kernels that choose blocks, one by one, by the device's own clock. `check-device` compares what they give.

mod choice_lines;
mod choice_rules;

use anyhow::Result;
use blocksparse::{Budget, LayoutShape};
use blocksparse_bench::device::{self, empty, upload};
use blocksparse_bench::device_time::{host, median};
use blocksparse_bench::numbers::{BF16, F32, sixteenths};
use blocksparse_bench::runner::Timing;
use burn_sparse_select::kernels::rows::{Beside, Blocked, RowBlocks, block_means};
use burn_sparse_select::kernels::selection::{
    Antidiagonals, FlexLimits, GateSizes, Kept, LineSizes, LinesPlan, MeanProducts, RowsView,
    RunMaxima, SeenRows, antidiagonal_attention_sums, line_sums, mean_products, query_picks,
};
use clap::Parser;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use choice_lines::{Chosen, HalfKept};
use choice_rules::Ruled;

/// Queries of which all products with keys are made.
const LAST: usize = 2048;

/// Keys of a block that single queries choose.
const GATE_BLOCK: usize = 512;

#[derive(Parser)]
#[command(about = "Times the kernels that choose blocks", version)]
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
    /// Only what has this in its name.
    #[arg(long, default_value = "")]
    only: String,
    #[command(flatten)]
    timing: Timing<15>,
    /// Time how long calls keep the host instead.
    #[arg(long)]
    host: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let client = &device::client()?;
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
    let [q, k] = lists.map(|lists| {
        let numbers = sixteenths(lists * n * head_dim, rng);
        upload(client, &numbers, BF16)
    });
    let [q, k] = [&q, &k];
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
        let sums = empty(client, heads * of.rows.len() * n.div_ceil(block), F32);
        time(&format!("antidiagonals, stride {stride}"), &|| {
            Ok(antidiagonal_attention_sums(
                client,
                BF16,
                [q, k],
                &of,
                &sums,
            )?)
        })?;
    }
    let of_blocks = RowBlocks::new(heads, [n, head_dim], block);
    let blocks = of_blocks.blocks();
    let means = empty(client, heads * blocks * head_dim, F32);
    time("means of blocks of queries", &|| {
        let blocked = Blocked {
            x: q,
            of: &of_blocks,
            means: &means,
        };
        Ok(block_means(client, BF16, blocked, Beside::default())?)
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
        Ok(mean_products(
            client,
            [&means; 2],
            &products,
            None,
            &scores,
        )?)
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
    if of.is_served(client, BF16) {
        let highest = empty(client, heads * of.rows[1] * of.columns / of.run, F32);
        let view = |x, lists: usize, first: usize, rows: usize| {
            RowsView::new(x, [lists, n, head_dim]).rows(first, rows, BF16.size())
        };
        let queries = view(q, heads, n - of.rows[1], of.rows[1]);
        let keys = view(k, args.kv_heads, 0, of.columns);
        let seconds = time("highest of blocks, of the last queries", &|| {
            Ok(of.launch(client, BF16, [&queries, &keys], &highest)?)
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
        let of = last(queries);
        println!(
            "{queries} queries: {}",
            LinesPlan::new(client, BF16, [q, k], &of)
        );
        let sums = empty(client, heads * 2 * n, F32);
        let name = format!("sums of {queries} queries by keys and distances");
        time(&name, &|| Ok(line_sums(client, BF16, [q, k], &of, &sums)?))?;
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
