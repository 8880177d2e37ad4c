//! Sums of the last queries' attention over keys and distances, and the scores that are made of them: `bench-choice`.

use anyhow::{Result, ensure};
use burn_sparse_select::kernels::selection::FlexLimits;
use burn_sparse_select::kernels::selection::FlexTensors;
use burn_sparse_select::kernels::selection::Kept;
use burn_sparse_select::kernels::selection::KeptLines;
use burn_sparse_select::kernels::selection::LineSizes;
use burn_sparse_select::kernels::selection::LinesPlan;
use burn_sparse_select::kernels::selection::Touched;
use burn_sparse_select::kernels::selection::flex_blocks;
use burn_sparse_select::kernels::selection::least_kept;
use burn_sparse_select::kernels::selection::line_sums;
use burn_sparse_select::kernels::selection::touched_blocks;
use cubecl::client::Client;
use cubecl::server::Handle;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use crate::{BF16, Part, halves, numbers, read_f32, singles};

/// The product of two rows.
pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    let pairs = a.iter().zip(b);
    pairs.map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
}

/// The last queries of lists, and all keys.
pub struct Lines {
    of: LineSizes,
    q: Handle,
    k: Handle,
    sums: Handle,
    numbers: [Vec<f32>; 2],
}

impl Lines {
    pub fn new(client: &Client, of: LineSizes, rng: &mut ChaCha8Rng) -> Self {
        let numbers = [0, 1].map(|which| numbers(of.lists[which] * of.seq[which] * of.width, rng));
        Self {
            q: halves(client, &numbers[0]),
            k: halves(client, &numbers[1]),
            sums: singles(client, &vec![f32::NAN; of.lists[0] * 2 * of.seq[1]]),
            numbers,
            of,
        }
    }

    pub fn plan(&self, client: &Client) -> LinesPlan {
        LinesPlan::new(client, BF16, [&self.q, &self.k], &self.of)
    }

    pub fn run(&self, client: &Client) -> Result<()> {
        line_sums(client, BF16, [&self.q, &self.k], &self.of, &self.sums)?;
        Ok(())
    }

    /// The sums of a list, by loops: of keys, and of distances behind them.
    fn list(&self, list: usize) -> Vec<f64> {
        let LineSizes {
            lists,
            seq: [queries, keys],
            width,
            factor,
            ..
        } = self.of;
        let kv_list = list / (lists[0] / lists[1]);
        let q = &self.numbers[0][list * queries * width..][..queries * width];
        let k = &self.numbers[1][kv_list * keys * width..][..keys * width];
        let mut sums = vec![0.0; 2 * keys];
        for (i, q) in q.chunks(width).enumerate() {
            let seen = (keys + i + 1).saturating_sub(queries);
            let keys_seen = k.chunks(width).take(seen);
            let scores: Vec<f64> = keys_seen.map(|k| dot(q, k) * factor).collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let whole: f64 = scores.iter().map(|score| (score - top).exp()).sum();
            for (j, score) in scores.into_iter().enumerate() {
                let p = (score - top).exp() / whole;
                sums[j] += p;
                sums[keys + seen - 1 - j] += p;
            }
        }
        sums
    }

    pub fn verify(&self, client: &Client) -> Result<()> {
        self.run(client)?;
        let got = read_f32(client, &self.sums)?;
        self.run(client)?;
        let again = read_f32(client, &self.sums)?;
        let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let (of, plan) = (&self.of, self.plan(client));
        ensure!(
            bits(&got) == bits(&again),
            "{of:?}, {plan}: other bits the second time"
        );
        let numbers = 2 * of.seq[1];
        for (list, got) in got.chunks(numbers).enumerate() {
            for (at, (&got, expected)) in got.iter().zip(self.list(list)).enumerate() {
                let got = f64::from(got);
                let is_close = (got - expected).abs() <= 1e-7 + 1e-4 * expected;
                ensure!(is_close, "{of:?}, {plan}: {list}, {at}: {got}, {expected}");
            }
        }
        Ok(())
    }
}

/// Sums of calls that have each shape of a tile, equal to loops: queries of one and of two warpgroups, some of these not whole; keys of no whole tile or run;
/// more queries than keys.
pub fn verify(client: &Client, rng: &mut ChaCha8Rng, part: &mut Part) -> Result<()> {
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
        if !part.has_next() {
            continue;
        }
        let of = LineSizes {
            lists: [lists, kv_lists],
            seq: [queries, keys],
            width,
            factor: 2.0 / (width as f64).sqrt(),
        };
        let lines = Lines::new(client, of, rng);
        println!("{:?}: {}", lines.of.seq, lines.plan(client));
        lines.verify(client)?;
    }
    Ok(())
}

/// The least that is kept of long lines: with it a line has the share, without it less.
pub fn verify_least(client: &Client, rng: &mut ChaCha8Rng, part: &mut Part) -> Result<()> {
    // Lines that have several cubes each, and those that have one.
    let calls = [[3, 200_000], [2, 131_072], [70, 131_072], [5, 70_001]];
    for lines_of in calls {
        if !part.has_next() {
            continue;
        }
        let (numbers, of) = random_lines(client, lines_of, rng);
        let least = singles(client, &vec![f32::NAN; of.lines]);
        least_kept(client, &numbers, &of, &least)?;
        let numbers = read_f32(client, &numbers)?;
        for (line, least) in numbers.chunks(of.len).zip(read_f32(client, &least)?) {
            let sum = |from: &dyn Fn(f32) -> bool| -> f64 {
                let kept = line.iter().filter(|&&number| from(number));
                kept.map(|&number| f64::from(number)).sum()
            };
            let share = |sum: f64| sum / line.iter().map(|&x| f64::from(x)).sum::<f64>();
            let with = share(sum(&|number| number >= least));
            let without = share(sum(&|number| number > least));
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
        let lists = sizes.lists[0];
        let seq = [seq_q, sizes.seq[1]];
        let [rows, blocks] = seq.map(|seq| seq.div_ceil(block));
        let made = |len: usize| client.empty(len * size_of::<f32>());
        Self {
            of: Touched {
                lists,
                seq,
                block,
                rows: 0..rows,
                kept,
            },
            flex,
            sums: made(lists * 2 * seq[1]),
            out: made(lists * rows * blocks),
            sizes,
        }
    }

    /// Any queries do for the last ones.
    pub fn run(&self, client: &Client, [q, k]: [&Handle; 2]) -> Result<()> {
        match &self.flex {
            Some(limits) => {
                let tensors = FlexTensors { q, last: q, k };
                let (sizes, of) = (&self.sizes, &self.of);
                flex_blocks(client, BF16, tensors, sizes, of, limits, &self.out)?;
            }
            None => {
                line_sums(client, BF16, [q, k], &self.sizes, &self.sums)?;
                touched_blocks(client, &self.sums, &self.of, &self.out)?;
            }
        }
        Ok(())
    }
}

/// Of lines of random numbers the least that is kept.
pub fn random_lines(
    client: &Client,
    [lines, len]: [usize; 2],
    rng: &mut ChaCha8Rng,
) -> (Handle, KeptLines) {
    let numbers: Vec<f32> = (0..lines * len).map(|_| rng.random()).collect();
    let of = KeptLines {
        lines,
        len,
        step: len,
        kept: Kept::Share(0.5),
    };
    (singles(client, &numbers), of)
}
