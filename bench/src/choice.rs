//! `bench-choice`: the kernels that choose blocks, one by one, by the device's own clock; and their equality to loops in f64.

mod choice_lines;
mod choice_picks;
mod device_time;

use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use blocksparse::{
    Always, BlockLayout, BlockSource, Budget, DeviceChoice, EstimateKind, LayoutShape, Rule,
    ScoreGrid,
};
use blocksparse_cubecl::{
    AttentionPlan, ChoiceTensor, Outputs, Request, ScoreOptions, TensorView, choose_blocks,
    count_blocks, forward,
};
use burn_sparse_select::kernels::rows::Blocked;
use burn_sparse_select::kernels::rows::RowBlocks;
use burn_sparse_select::kernels::rows::block_means;
use burn_sparse_select::kernels::selection::Antidiagonals;
use burn_sparse_select::kernels::selection::FlexLimits;
use burn_sparse_select::kernels::selection::GateSizes;
use burn_sparse_select::kernels::selection::Kept;
use burn_sparse_select::kernels::selection::LineSizes;
use burn_sparse_select::kernels::selection::MeanProducts;
use burn_sparse_select::kernels::selection::SeenRows;
use burn_sparse_select::kernels::selection::antidiagonal_masses;
use burn_sparse_select::kernels::selection::least_kept;
use burn_sparse_select::kernels::selection::mean_products;
use burn_sparse_select::kernels::selection::query_picks;
use clap::Parser;
use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::server::Handle;
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use choice_lines::{Chosen, Lines, dot, random_lines};
use device_time::median;

const BF16: ElemType = ElemType::Float(FloatKind::BF16);
const F32: ElemType = ElemType::Float(FloatKind::F32);

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
    /// Only what has this in its name, of what is timed; with --verify, "lines" compares sums over keys and distances, and "picks" what queries pick, alone.
    #[arg(long, default_value = "")]
    only: String,
    /// Timed runs; the median is reported.
    #[arg(long, default_value_t = 15)]
    repeats: usize,
    /// Time how long calls keep the host instead.
    #[arg(long)]
    host: bool,
    /// Compare results with loops in f64, of small calls, instead of timing.
    #[arg(long)]
    verify: bool,
    /// Of so many parts of what is to be compared, only this one.
    #[arg(long, default_value_t = 0, requires = "verify")]
    shard: usize,
    /// Parts of what is to be compared.
    #[arg(long, default_value_t = 1, requires = "verify")]
    of: usize,
    /// Launch every kernel once and wait for nothing: for looking at what is compiled.
    #[arg(long)]
    enqueue_only: bool,
}

/// Numbers that bf16 and loops have exactly.
fn numbers(count: usize, rng: &mut ChaCha8Rng) -> Vec<f32> {
    (0..count)
        .map(|_| rng.random_range(-24..25) as f32 / 16.0)
        .collect()
}

fn halves(client: &Client, numbers: &[f32]) -> Handle {
    let halves: Vec<u8> = (numbers.iter())
        .flat_map(|&number| bf16::from_f32(number).to_le_bytes())
        .collect();
    client.create_from_slice(&halves)
}

fn singles(client: &Client, numbers: &[f32]) -> Handle {
    let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    client.create_from_slice(&bytes)
}

fn read(client: &Client, handle: &Handle) -> Result<Vec<[u8; 4]>> {
    let bytes = client
        .read_one(handle.clone())
        .map_err(|error| anyhow!("{error:?}"))?;
    let words = bytes.chunks_exact(4);
    Ok(words
        .map(|word| [word[0], word[1], word[2], word[3]])
        .collect())
}

fn read_f32(client: &Client, handle: &Handle) -> Result<Vec<f32>> {
    Ok(read(client, handle)?
        .into_iter()
        .map(f32::from_le_bytes)
        .collect())
}

/// Sums over antidiagonals.
struct Sums {
    of: Antidiagonals,
    q: Handle,
    k: Handle,
    out: Handle,
    numbers: [Vec<f32>; 2],
}

impl Sums {
    fn new(client: &Client, of: Antidiagonals, rng: &mut ChaCha8Rng) -> Self {
        let numbers = [0, 1].map(|which| numbers(of.lists[which] * of.seq[which] * of.width, rng));
        let blocks = of.seq[1].div_ceil(of.block);
        let written = of.lists[0] * of.rows.len() * blocks;
        Self {
            q: halves(client, &numbers[0]),
            k: halves(client, &numbers[1]),
            out: singles(client, &vec![f32::NAN; written]),
            numbers,
            of,
        }
    }

    fn run(&self, client: &Client) -> Result<()> {
        antidiagonal_masses(client, BF16, [&self.q, &self.k], &self.of, &self.out)?;
        Ok(())
    }

    /// The masses of a row of blocks, by loops.
    fn row(&self, list: usize, row: usize) -> Vec<f64> {
        let Antidiagonals {
            lists,
            seq: [seq_q, seq_kv],
            width,
            block,
            stride,
            causal,
            factor,
            ..
        } = self.of;
        let kv_list = list / (lists[0] / lists[1]);
        let q = &self.numbers[0][list * seq_q * width..][..seq_q * width];
        let k = &self.numbers[1][kv_list * seq_kv * width..][..seq_kv * width];
        let mut masses = vec![0.0; seq_kv.div_ceil(block)];
        let groups = row * block / stride..((row + 1) * block).min(seq_q).div_ceil(stride);
        for group in groups {
            let last = ((group + 1) * stride).min(seq_q) as i64 - 1 + seq_kv as i64 - seq_q as i64;
            let seen = |keys: usize| !causal || (keys * stride) as i64 <= last;
            let score = |keys: usize| -> f64 {
                let pairs =
                    (0..stride).map(|u| [group * stride + stride - 1 - u, keys * stride + u]);
                let pairs = pairs.filter(|[i, j]| *i < seq_q && *j < seq_kv);
                let products =
                    pairs.map(|[i, j]| dot(&q[i * width..][..width], &k[j * width..][..width]));
                products.sum::<f64>() * factor
            };
            let keys: Vec<usize> = (0..seq_kv.div_ceil(stride))
                .filter(|&keys| seen(keys))
                .collect();
            let scores: Vec<f64> = keys.iter().map(|&keys| score(keys)).collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let whole: f64 = scores.iter().map(|score| (score - top).exp()).sum();
            for (keys, score) in keys.into_iter().zip(scores) {
                masses[keys * stride / block] += (score - top).exp() / whole;
            }
        }
        masses
    }

    fn verify(&self, client: &Client) -> Result<()> {
        self.run(client)?;
        let got = read_f32(client, &self.out)?;
        let (of, blocks) = (&self.of, self.of.seq[1].div_ceil(self.of.block));
        for list in [0, of.lists[0] - 1] {
            for (at, row) in of.rows.clone().enumerate() {
                let expected = self.row(list, row);
                let start = (list * of.rows.len() + at) * blocks;
                for (block, expected) in expected.into_iter().enumerate() {
                    let got = f64::from(got[start + block]);
                    // Blocks that a row does not see are 0.
                    let is_close = (got - expected).abs() < 1e-4;
                    ensure!(
                        is_close,
                        "{of:?}: {list}, {row}, {block}: {got}, {expected}"
                    );
                }
            }
        }
        Ok(())
    }
}

/// A rule over scores, its plan, and attention over it of queries of zeros: means of the values of chosen keys.
struct Ruled {
    shape: LayoutShape,
    rule: Rule,
    scores: Vec<f32>,
    tensor: ChoiceTensor,
    views: [TensorView; 3],
    values: Vec<f32>,
    out: Handle,
    lse: Handle,
    counts: Handle,
    width: usize,
}

impl Ruled {
    fn new(
        client: &Client,
        shape: LayoutShape,
        rule: Rule,
        width: usize,
        rng: &mut ChaCha8Rng,
    ) -> Self {
        let LayoutShape {
            heads,
            seq_q,
            seq_kv,
            block_size,
        } = shape;
        let rows = heads * seq_q.div_ceil(block_size);
        // Some are equal.
        let scores: Vec<f32> = (0..rows * seq_kv.div_ceil(block_size))
            .map(|_| match rng.random_range(0..4) {
                0 => rng.random_range(0..8) as f32 / 8.0,
                _ => rng.random::<f32>(),
            })
            .collect();
        let values = numbers(heads * seq_kv * width, rng);
        let view = |handle: Handle, seq: usize| TensorView {
            handle,
            shape: [1, heads, seq, width],
            strides: [heads * seq * width, seq * width, width, 1],
        };
        let zeros = |seq: usize| halves(client, &vec![0.0; heads * seq * width]);
        let views = [
            view(zeros(seq_q), seq_q),
            view(zeros(seq_kv), seq_kv),
            view(halves(client, &values), seq_kv),
        ];
        Self {
            tensor: ChoiceTensor {
                handle: singles(client, &scores),
                dtype: F32,
            },
            out: halves(client, &vec![f32::NAN; heads * seq_q * width]),
            lse: singles(client, &vec![f32::NAN; heads * seq_q]),
            counts: client.create_from_slice(&vec![0xff; rows * 4]),
            shape,
            rule,
            scores,
            views,
            values,
            width,
        }
    }

    fn layout(&self) -> Result<BlockLayout> {
        let choice = DeviceChoice {
            patterns: [1, self.shape.heads],
            causal: true,
            by: BlockSource::Scores(self.rule),
        };
        Ok(BlockLayout::on_device("a rule", self.shape, choice)?)
    }

    fn choose(&self, client: &Client, layout: &BlockLayout) -> Result<()> {
        choose_blocks(client, layout, &self.tensor)?;
        Ok(())
    }

    fn attend(&self, client: &Client, layout: &BlockLayout) -> Result<()> {
        let heads = self.shape.heads;
        let request = Request::new([1, heads], [self.width; 2], BF16);
        let plan = AttentionPlan::new(client, layout, request)?;
        let [q, k, v] = &self.views;
        let outputs = Outputs::new(&self.out, &self.lse);
        let options = ScoreOptions::new(1.0);
        forward(client, &plan, layout, [q, k, v], outputs, &options)?;
        Ok(())
    }

    fn verify(&self, client: &Client) -> Result<()> {
        let layout = self.layout()?;
        self.choose(client, &layout)?;
        self.attend(client, &layout)?;
        count_blocks(client, &layout, &self.counts);
        let counts = read(client, &self.counts)?;
        let counts: Vec<i32> = counts.into_iter().map(i32::from_le_bytes).collect();
        let bytes = client
            .read_one(self.out.clone())
            .map_err(|error| anyhow!("{error:?}"))?;
        let out: Vec<f32> = (bytes.chunks_exact(2))
            .map(|half| bf16::from_le_bytes([half[0], half[1]]).to_f32())
            .collect();
        let LayoutShape {
            seq_q,
            seq_kv,
            block_size,
            ..
        } = self.shape;
        let grid = ScoreGrid {
            query_rows: block_size,
            block: block_size,
            seq_q,
            seq_kv,
            causal: true,
        };
        let what = format!("{:?}, {:?}", self.shape, self.rule);
        let (blocks, width) = (grid.blocks(), self.width);
        for (row, &got) in counts.iter().enumerate() {
            let scores = self.scores[row * blocks..][..blocks].iter();
            let scores: Vec<f64> = scores.map(|&score| score.into()).collect();
            let (head, q_block) = (row / grid.rows(), row % grid.rows());
            let kept = self.rule.selects(&grid, q_block, &scores);
            let count = kept.iter().filter(|&&kept| kept).count();
            ensure!(got == count as i32, "{what}: {row}: {got}, {count}");
            // The last query of the block.
            let query = ((q_block + 1) * block_size).min(seq_q) - 1;
            let seen = (query + 1 + seq_kv - seq_q).min(seq_kv);
            for channel in [0, width - 1] {
                let keys = (0..seen).filter(|key| kept[key / block_size]);
                let values: Vec<f64> = keys
                    .map(|key| self.values[(head * seq_kv + key) * width + channel].into())
                    .collect();
                let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
                let got = f64::from(out[(head * seq_q + query) * width + channel]);
                let is_close = (got - mean).abs() < 1e-2;
                ensure!(is_close, "{what}: {row}, {channel}: {got}, {mean}");
            }
        }
        Ok(())
    }
}

fn rule(keep: Budget) -> Rule {
    Rule {
        kind: EstimateKind::Probability,
        keep,
        forced: Always { first: 1, local: 1 },
    }
}

/// The part of what is compared that a process has.
struct Part {
    shard: usize,
    of: usize,
    /// Calls so far, of any part.
    number: usize,
    /// Calls of this part.
    compared: usize,
}

impl Part {
    /// Whether the next call is one of this part.
    fn has_next(&mut self) -> bool {
        self.number += 1;
        let has = self.number % self.of == self.shard;
        self.compared += usize::from(has);
        has
    }
}

fn verify(client: &Client, args: &Args) -> Result<()> {
    let Args { shard, of, .. } = *args;
    ensure!(
        shard < of,
        "--shard is {shard}, of {of} parts numbered from 0"
    );
    let part = &mut Part {
        shard,
        of,
        number: 0,
        compared: 0,
    };
    verify_part(client, &args.only, part)?;
    let compared = part.compared;
    println!("{compared} calls equal loops in f64");
    ensure!(compared > 0, "--shard {shard} of {of} has no call");
    Ok(())
}

fn verify_part(client: &Client, only: &str, part: &mut Part) -> Result<()> {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    choice_picks::verify(client, &mut rng, part)?;
    if only != "picks" {
        choice_lines::verify(client, &mut rng, part)?;
        choice_lines::verify_least(client, &mut rng, part)?;
    }
    if ["lines", "picks"].contains(&only) {
        return Ok(());
    }
    // Lists of queries and of keys, their lengths, and width, block and stride.
    let calls: [[usize; 7]; 6] = [
        [4, 1, 1000, 1000, 64, 64, 8],
        [2, 2, 400, 901, 16, 128, 8],
        [2, 1, 901, 400, 32, 128, 4],
        [2, 1, 700, 690, 16, 128, 2],
        [2, 1, 500, 500, 16, 128, 1],
        [6, 2, 3000, 3000, 128, 128, 16],
    ];
    for [lists, kv_lists, seq_q, seq_kv, width, block, stride] in calls {
        let (lists, seq) = ([lists, kv_lists], [seq_q, seq_kv]);
        for causal in [true, false] {
            let all = seq[0].div_ceil(block);
            for rows in [0..all, 1..all, all / 2..all / 2 + 1] {
                let of = Antidiagonals {
                    lists,
                    seq,
                    width,
                    block,
                    stride,
                    causal,
                    factor: 0.25 / stride as f64,
                    rows,
                };
                if part.has_next() {
                    Sums::new(client, of, &mut rng).verify(client)?;
                }
            }
        }
    }
    for (seq_q, seq_kv, block_size, width) in [
        (2048, 2048, 16, 64),
        (5000, 5000, 8, 64),
        (3000, 8200, 64, 128),
        (16_384, 16_384, 128, 64),
    ] {
        for keep in [
            Budget::TopK(5),
            Budget::TopK(60),
            Budget::Ratio(0.1),
            Budget::TopP {
                p: 0.3,
                min: 2,
                max: 40,
            },
            Budget::MinP(0.9),
        ] {
            let shape = LayoutShape {
                heads: 3,
                seq_q,
                seq_kv,
                block_size,
            };
            if part.has_next() {
                Ruled::new(client, shape, rule(keep), width, &mut rng).verify(client)?;
            }
        }
    }
    Ok(())
}

/// Seconds until a call returns, while the device has nothing else to do.
fn host(client: &Client, repeats: usize, run: impl Fn() -> Result<()> + Sync) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..repeats + 2 {
        block_on(client.sync()).map_err(|error| anyhow!("{error:?}"))?;
        let start = Instant::now();
        run()?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

fn main() -> Result<()> {
    let args = Args::parse();
    let client = cubecl::Device::Cuda(Default::default()).client();
    if args.verify {
        return verify(&client, &args);
    }
    let Args {
        n,
        heads,
        kv_heads,
        head_dim,
        block,
        ..
    } = args;
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let time = |name: &str, run: &(dyn Fn() -> Result<()> + Sync)| -> Result<f64> {
        if !name.contains(&args.only) {
            return Ok(f64::NAN);
        }
        if args.enqueue_only {
            run()?;
            return Ok(f64::NAN);
        }
        let seconds = match args.host {
            true => host(&client, args.repeats, run)?,
            false => median(&client, args.repeats, run)?,
        };
        println!("{name:<48} {:>9.1} µs", seconds * 1e6);
        Ok(seconds)
    };
    for stride in [16, 8].into_iter().filter(|&stride| block % stride == 0) {
        let of = Antidiagonals {
            lists: [heads, kv_heads],
            seq: [n; 2],
            width: head_dim,
            block,
            stride,
            causal: true,
            factor: 1.0 / (stride as f64 * (head_dim as f64).sqrt()),
            rows: 0..n.div_ceil(block),
        };
        let sums = Sums::new(&client, of, &mut rng);
        time(&format!("antidiagonals, stride {stride}"), &|| {
            sums.run(&client)
        })?;
    }
    let [q, k] = [heads, kv_heads].map(|heads| {
        let numbers = numbers(heads * n * head_dim, &mut rng);
        halves(&client, &numbers)
    });
    let of_blocks = RowBlocks::new(heads, [n, head_dim], block);
    let means = client.empty(heads * of_blocks.blocks() * head_dim * size_of::<f32>());
    time("means of blocks of queries", &|| {
        let blocked = Blocked {
            x: &q,
            of: &of_blocks,
            means: &means,
        };
        block_means(&client, BF16, blocked)?;
        Ok(())
    })?;
    let products = MeanProducts {
        lists: [heads; 2],
        rows: of_blocks.blocks(),
        blocks: of_blocks.blocks(),
        width: head_dim,
        factor: 1.0,
        seen: Some(SeenRows {
            seq: [n; 2],
            block,
            first: 0,
        }),
    };
    let scores = client.empty(heads * of_blocks.blocks().pow(2) * size_of::<f32>());
    time("products of means", &|| {
        mean_products(&client, [&means; 2], &products, &scores)?;
        Ok(())
    })?;
    let gate = GateSizes {
        lists: [heads, kv_heads],
        seq: [n; 2],
        width: head_dim,
        block: GATE_BLOCK,
        most: 2,
    };
    let picks = client.empty(heads * n * gate.most * size_of::<i32>());
    time("two blocks of 512 for each query", &|| {
        query_picks(&client, BF16, [&q, &k], &gate, &picks)?;
        Ok(())
    })?;
    let last = |queries: usize| LineSizes {
        lists: [heads, kv_heads],
        seq: [queries, n],
        width: head_dim,
        factor: 1.0 / (head_dim as f64).sqrt(),
    };
    for queries in [64, 128].into_iter().filter(|&queries| queries <= n) {
        // As many queries of any place cost the same.
        let lines = Lines::new(&client, last(queries), &mut rng);
        println!("{queries} queries: {}", lines.plan(&client));
        time(
            &format!("sums of {queries} queries by keys and distances"),
            &|| lines.run(&client),
        )?;
    }
    // All lists by lines, all by means, and all by lines with a least.
    for (name, threshold, blocks) in [
        ("flexprefill: estimate, all by lines", 0.0, 0),
        ("flexprefill: estimate, all by means", 2.0, 0),
        ("flexprefill: estimate, with a least", 0.0, 1024 / block),
    ] {
        let limits = FlexLimits { threshold, blocks };
        let kept = Kept::Share(0.5);
        let chosen = Chosen::new(&client, last(block.min(n)), [block, n], kept, Some(limits));
        time(name, &|| chosen.run(&client, [&q, &k]))?;
    }
    let kept = Kept::Count {
        all: [1000, 200],
        forced: [30, 100],
    };
    let chosen = Chosen::new(&client, last(64.min(n)), [64, n], kept, None);
    time("minference: estimate", &|| chosen.run(&client, [&q, &k]))?;
    let shape = LayoutShape {
        heads,
        seq_q: n,
        seq_kv: n,
        block_size: block,
    };
    for keep in [Budget::TopK(16), Budget::top_p(0.2)] {
        let ruled = Ruled::new(&client, shape, rule(keep), 16, &mut rng);
        let name = format!("{keep:?}");
        time(&format!("{name}: rule"), &|| {
            ruled.choose(&client, &ruled.layout()?)
        })?;
        let known = ruled.layout()?;
        ruled.choose(&client, &known)?;
        let over = time(&format!("{name}: attention over known blocks"), &|| {
            ruled.attend(&client, &known)
        })?;
        let all = time(&format!("{name}: rule, plan and attention"), &|| {
            let layout = ruled.layout()?;
            ruled.choose(&client, &layout)?;
            ruled.attend(&client, &layout)
        })?;
        if !args.enqueue_only {
            let name = format!("{name}: rule and plan");
            println!("{name:<48} {:>9.1} µs", (all - over) * 1e6);
        }
    }
    let blocks = n.div_ceil(block);
    for (name, lines_of) in [
        ("keys and distances", [2 * heads, n]),
        ("whole rows of blocks", [heads, blocks * blocks]),
    ] {
        let (numbers, of) = random_lines(&client, lines_of, &mut rng);
        let least = singles(&client, &vec![f32::NAN; of.lines]);
        time(&format!("least kept of {name}"), &|| {
            least_kept(&client, &numbers, &of, &least)?;
            Ok(())
        })?;
    }
    client.flush().map_err(|error| anyhow!("{error:?}"))
}
