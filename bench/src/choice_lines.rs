//! Sums of the last queries' attention over keys and distances, and the scores that are made of them: `bench-choice`.

use anyhow::{Context, Result, ensure};
use blocksparse_bench::compare::{dot, ensure_within, same_twice, softmax};
use blocksparse_bench::device::{empty, poisoned, read, read_floats, upload};
use blocksparse_bench::numbers::{BF16, F32, decoded};
use blocksparse_bench::runner::Tally;
use burn_sparse_select::kernels::selection::{
    FlexLimits, FlexTensors, Kept, KeptLines, LineSizes, LinesPlan, Touched, flex_blocks,
    least_kept, line_sums, touched_blocks,
};
use cubecl::client::Client;
use cubecl::server::Handle;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use crate::choice_lists::Lists;

/// The last queries of lists, and all keys.
pub struct Lines {
    of: LineSizes,
    inputs: Lists,
    sums: Handle,
}

impl Lines {
    pub fn new(client: &Client, of: LineSizes, rng: &mut ChaCha8Rng) -> Self {
        Self {
            inputs: Lists::new(client, of.lists, of.seq, of.width, rng),
            sums: poisoned(client, of.lists[0] * 2 * of.seq[1], F32),
            of,
        }
    }

    pub fn plan(&self, client: &Client) -> LinesPlan {
        LinesPlan::new(client, BF16, self.inputs.handles(), &self.of)
    }

    pub fn run(&self, client: &Client) -> Result<()> {
        line_sums(client, BF16, self.inputs.handles(), &self.of, &self.sums)?;
        Ok(())
    }

    /// The sums of a list, by loops: of keys, and of distances behind them.
    fn list(&self, list: usize) -> Vec<f64> {
        let ([queries, keys], width) = (self.of.seq, self.of.width);
        let [q, k] = self.inputs.list(list);
        let mut sums = vec![0.0; 2 * keys];
        for (i, q) in q.chunks(width).enumerate() {
            let seen = (keys + i + 1).saturating_sub(queries);
            let scores = k.chunks(width).take(seen);
            let scores: Vec<f64> = scores.map(|k| dot(q, k) * self.of.factor).collect();
            for (j, weight) in softmax(&scores).0.into_iter().enumerate() {
                sums[j] += weight;
                sums[keys + seen - 1 - j] += weight;
            }
        }
        sums
    }

    fn verify(&self, client: &Client) -> Result<()> {
        let got = same_twice(|| {
            self.run(client)?;
            read(client, &self.sums)
        })?;
        let got: Vec<f64> = decoded(&got, F32);
        for (list, got) in got.chunks(2 * self.of.seq[1]).enumerate() {
            for (at, (&got, expected)) in got.iter().zip(self.list(list)).enumerate() {
                let what = format_args!("{list}, {at}");
                ensure_within(what, got, expected, 1e-7 + 1e-4 * expected)?;
            }
        }
        Ok(())
    }
}

/// Sums of calls that have each shape of a tile, equal to loops: queries of one and of two warpgroups, some of these not whole; keys of no whole tile or run;
/// more queries than keys.
pub fn verify(client: &Client, rng: &mut ChaCha8Rng, tally: &mut Tally) -> Result<()> {
    // Lists of queries and of keys, their lengths, and width.
    let calls: [[usize; 5]; 10] = [
        [4, 1, 128, 1000, 128],
        [8, 2, 64, 4099, 64],
        [3, 3, 100, 700, 128],
        [2, 1, 16, 333, 128],
        [2, 1, 128, 100, 64],
        [2, 1, 128, 1, 64],
        [6, 2, 65, 2048, 192],
        [1, 1, 1, 257, 256],
        [4, 2, 128, 8192, 128],
        // More queries than a tile has rows, whose products are in memory.
        [2, 1, 150, 600, 32],
    ];
    for [lists, kv_lists, queries, keys, width] in calls {
        if !tally.takes_next() {
            continue;
        }
        let of = LineSizes {
            lists: [lists, kv_lists],
            seq: [queries, keys],
            width,
            factor: 2.0 / (width as f64).sqrt(),
        };
        let lines = Lines::new(client, of, rng);
        let plan = lines.plan(client);
        println!("{:?}: {plan}", lines.of.seq);
        (lines.verify(client)).with_context(|| format!("{:?}, {plan}", lines.of))?;
    }
    Ok(())
}

/// The least that is kept of long lines: with it a line has the share, without it less.
pub fn verify_least(client: &Client, rng: &mut ChaCha8Rng, tally: &mut Tally) -> Result<()> {
    // Lines that have several cubes each, and those that have one.
    let calls = [[3, 200_000], [2, 131_072], [70, 131_072], [5, 70_001]];
    for lines_of in calls {
        if !tally.takes_next() {
            continue;
        }
        let lines = HalfKept::new(client, lines_of, rng);
        lines.run(client)?;
        let numbers: Vec<f32> = read_floats(client, &lines.numbers, F32)?;
        let least: Vec<f32> = read_floats(client, &lines.least, F32)?;
        for (line, least) in numbers.chunks(lines.of.len).zip(least) {
            let sum = |is_kept: &dyn Fn(f32) -> bool| -> f64 {
                let kept = line.iter().filter(|&&number| is_kept(number));
                kept.map(|&number| f64::from(number)).sum()
            };
            let whole = sum(&|_| true);
            let with = sum(&|number| number >= least) / whole;
            let without = sum(&|number| number > least) / whole;
            ensure!(
                with > 0.5 - 1e-5 && without < 0.5 + 1e-5 && with > without,
                "{lines_of:?}: {least}: {with}, {without}"
            );
        }
    }
    Ok(())
}

/// The scores of a method whose last queries choose.
pub struct Chosen {
    sizes: LineSizes,
    of: Touched,
    /// The others keep so many lines.
    flex: Option<FlexLimits>,
    sums: Handle,
    out: Handle,
}

impl Chosen {
    /// Of queries and keys `seq`.
    pub fn new(
        client: &Client,
        sizes: LineSizes,
        [block, seq_q]: [usize; 2],
        kept: Kept,
        flex: Option<FlexLimits>,
    ) -> Self {
        let (lists, seq) = (sizes.lists[0], [seq_q, sizes.seq[1]]);
        let [rows, blocks] = seq.map(|seq| seq.div_ceil(block));
        Self {
            of: Touched {
                lists,
                seq,
                block,
                rows: 0..rows,
                kept,
            },
            flex,
            sums: empty(client, lists * 2 * seq[1], F32),
            out: empty(client, lists * rows * blocks, F32),
            sizes,
        }
    }

    /// Any queries do for the last ones.
    pub fn run(&self, client: &Client, [q, k]: [&Handle; 2]) -> Result<()> {
        let (sizes, of) = (&self.sizes, &self.of);
        match &self.flex {
            Some(limits) => {
                let tensors = FlexTensors { q, last: q, k };
                flex_blocks(client, BF16, tensors, sizes, of, limits, &self.out)?;
            }
            None => {
                line_sums(client, BF16, [q, k], sizes, &self.sums)?;
                touched_blocks(client, &self.sums, of, &self.out)?;
            }
        }
        Ok(())
    }
}

/// Lines of random numbers, of which half is kept.
pub struct HalfKept {
    numbers: Handle,
    of: KeptLines,
    least: Handle,
}

impl HalfKept {
    pub fn new(client: &Client, [lines, len]: [usize; 2], rng: &mut ChaCha8Rng) -> Self {
        let numbers: Vec<f32> = (0..lines * len).map(|_| rng.random()).collect();
        Self {
            numbers: upload(client, &numbers, F32),
            of: KeptLines {
                lines,
                len,
                step: len,
                kept: Kept::Share(0.5),
            },
            least: poisoned(client, lines, F32),
        }
    }

    pub fn run(&self, client: &Client) -> Result<()> {
        least_kept(client, &self.numbers, &self.of, &self.least)?;
        Ok(())
    }
}
