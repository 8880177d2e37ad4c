//! `bench-content`: kernels by which keys are chosen by their content, each alone: times, and whether what they give is right by f64 on the host.

use anyhow::{Result, ensure};
use blocksparse_bench::compare::{dot, ensure_within, softmax};
use blocksparse_bench::device::{
    self, empty, poisoned, read_ints, read_numbers, upload, upload_ints,
};
use blocksparse_bench::device_time::median;
use blocksparse_bench::numbers::{BF16, F32, rounded};
use blocksparse_bench::runner::Timing;
use blocksparse_cubecl::rows;
use blocksparse_cubecl::rows::IndexedRows;
use burn_sparse_select::kernels::clusters::{ClusterPlan, ClusterSizes};
use burn_sparse_select::kernels::rows as select_rows;
use burn_sparse_select::kernels::rows::{HashedRows, RowsOfMeans};
use clap::Parser;
use cubecl::client::Client;
use cubecl::server::Handle;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

#[derive(Parser)]
#[command(
    about = "Times and checks kernels of routing and hashes, of one batch entry",
    version
)]
struct Args {
    /// Positions.
    #[arg(long, default_value_t = 8192)]
    length: usize,
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Numbers of a row.
    #[arg(long, default_value_t = 64)]
    width: usize,
    /// Tokens that a mean attracts; as many means as such clusters fill a sequence.
    #[arg(long, default_value_t = 128)]
    window: usize,
    /// Tokens of a bucket, on average.
    #[arg(long, default_value_t = 64)]
    bucket: usize,
    #[command(flatten)]
    timing: Timing<25>,
    /// Attention within clusters alone.
    #[arg(long)]
    attention: bool,
    /// Run every kernel once and check what it gives, without a time.
    #[arg(long)]
    verify: bool,
}

/// What a product may be off, as a part of the length of what is multiplied.
const OFF: f64 = 2e-6;

fn main() -> Result<()> {
    let mut bench = Bench {
        args: Args::parse(),
        client: device::client()?,
        random: ChaCha8Rng::seed_from_u64(1),
    };
    bench.attention()?;
    if bench.args.attention {
        return Ok(());
    }
    bench.highest()?;
    bench.similarities()?;
    for rounds in [1, 4] {
        bench.hashes(rounds)?;
    }
    Ok(())
}

struct Bench {
    client: Client,
    args: Args,
    random: ChaCha8Rng,
}

impl Bench {
    /// Nearly normal numbers.
    fn normal(&mut self, count: usize, factor: f32) -> Vec<f32> {
        let random = &mut self.random;
        let number = |_| (0..12).map(|_| random.random_range(-0.5..0.5)).sum::<f32>() * factor;
        (0..count).map(number).collect()
    }

    /// Rows of every position of every head.
    fn rows(&mut self) -> Vec<f32> {
        let count = self.args.heads * self.args.length * self.args.width;
        let numbers = self.normal(count, 1.0);
        numbers.into_iter().map(|x| rounded(x, BF16)).collect()
    }

    fn upload(&self, numbers: &[f32]) -> Handle {
        upload(&self.client, numbers, F32)
    }

    fn upload_halves(&self, numbers: &[f32]) -> Handle {
        upload(&self.client, numbers, BF16)
    }

    fn empty<const N: usize>(&self, counts: [usize; N]) -> [Handle; N] {
        counts.map(|count| empty(&self.client, count, F32))
    }

    /// Times a call; whether its results are there to be checked.
    fn time(&self, name: &str, call: impl Fn() -> Result<()> + Sync) -> Result<bool> {
        if self.args.timing.launched(&self.client, &call)? {
            return Ok(false);
        }
        if self.args.verify {
            call()?;
            println!("{name}");
            return Ok(true);
        }
        let seconds = median(&self.client, self.args.timing.repeats, call)?;
        println!("{name:<40} {:>8.1} us", seconds * 1e6);
        Ok(true)
    }

    fn means(&self) -> usize {
        self.args.length.div_ceil(self.args.window)
    }

    fn highest(&mut self) -> Result<()> {
        let (means, length, most) = (self.means(), self.args.length, self.args.window);
        let (heads, width) = (self.args.heads, self.args.width);
        let of = [heads, means, length];
        let count = heads * means;
        let numbers = self.normal(count * length, 0.125);
        let given = self.upload(&numbers);
        let words = select_rows::words_of_flags(length);
        let [lists, places, flags] = self.empty([count * most, count * length, count * words * 2]);
        let client = self.client.clone();
        self.time("highest of rows, as flags", || {
            let made = [&lists, &flags];
            Ok(select_rows::highest_flags_of_rows(
                &client, of, most, &given, made,
            )?)
        })?;
        let is_there = self.time("highest of rows", || {
            let made = [&lists, &places];
            Ok(select_rows::highest_of_rows(
                &client, of, most, &given, made,
            )?)
        })?;
        let x: Vec<f32> = (self.normal(count * most * width, 1.0).into_iter())
            .map(|x| rounded(x, BF16))
            .collect();
        let taken = self.upload_halves(&x);
        let [mean, shares] = self.empty([heads * length * width, heads * length]);
        self.time("means over clusters", || {
            let of = IndexedRows::new(heads, means * most, [length, means], width).turned(true);
            let (x, made) = ((&taken, BF16), [&mean, &shares]);
            Ok(rows::mean_rows(&client, &of, x, &places, made)?)
        })?;
        if !is_there {
            return Ok(());
        }
        let (lists, places) = (read_ints(&client, &lists)?, read_ints(&client, &places)?);
        let flags = read_ints(&client, &flags)?;
        for (at, &place) in places.iter().enumerate() {
            let (row, column) = (at / length, at % length);
            let word = &flags[(row * words + column / 32) * 2..][..2];
            let bit = 1u32 << (column % 32);
            let below = (word[0] as u32 & (bit - 1)).count_ones() as i32;
            let own = (row % means * most) as i32 + word[1] + below;
            let is_in = word[0] as u32 & bit != 0;
            let expected = if is_in { own } else { -1 };
            ensure!(place == expected, "flags of row {row}, column {column}");
        }
        let mean: Vec<f64> = read_numbers(&client, &mean, BF16)?;
        for row in 0..heads * length {
            let (head, token) = (row / length, row % length);
            let named: Vec<usize> = (0..means)
                .map(|m| places[(head * means + m) * length + token])
                .filter(|&at| at >= 0)
                .map(|at| head * means * most + at as usize)
                .collect();
            for n in 0..width {
                let sum: f64 = named.iter().map(|at| f64::from(x[at * width + n])).sum();
                let expected = sum / named.len().max(1) as f64;
                let bound = 0.01 * expected.abs() + 1e-3;
                let what = format_args!("mean of row {row}");
                ensure_within(what, mean[row * width + n], expected, bound)?;
            }
        }
        for (row, numbers) in numbers.chunks(length).enumerate() {
            let mut order: Vec<usize> = (0..length).collect();
            order.sort_by(|&a, &b| numbers[b].total_cmp(&numbers[a]).then(a.cmp(&b)));
            order.truncate(most);
            order.sort_unstable();
            let list = &lists[row * most..][..most];
            ensure!(order.iter().zip(list).all(|(&a, &b)| a == b as usize));
            for (column, &place) in places[row * length..][..length].iter().enumerate() {
                let own = order.binary_search(&column).ok();
                let own = own.map_or(-1, |at| (row % means * most + at) as i32);
                ensure!(own == place, "row {row}, column {column}");
            }
        }
        println!("    right");
        Ok(())
    }

    /// Attention within clusters of tokens that were drawn.
    fn attention(&mut self) -> Result<()> {
        let (clusters, most) = (self.means(), self.args.window);
        let (length, heads, width) = (self.args.length, self.args.heads, self.args.width);
        let (x, value) = (self.rows(), self.rows());
        let mut tokens = Vec::with_capacity(heads * clusters * most);
        for _ in 0..heads * clusters {
            let mut drawn = rand::seq::index::sample(&mut self.random, length, most).into_vec();
            drawn.sort_unstable();
            tokens.extend(drawn);
        }
        let client = self.client.clone();
        let named: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        let named = upload_ints(&client, &named);
        let (given, values) = (self.upload_halves(&x), self.upload_halves(&value));
        let places = tokens.len();
        let out = poisoned(&client, places * width, BF16);
        let lse = poisoned(&client, places, F32);
        let sizes = ClusterSizes::new([heads, length], [clusters, most], [width, width]);
        let Some(plan) = ClusterPlan::new(&client, sizes, BF16) else {
            println!("attention within clusters: no kernel");
            return Ok(());
        };
        println!("{plan}");
        let scale = (width as f64).powf(-0.5);
        let is_there = self.time("attention within clusters", || {
            let (inputs, made) = ([&given, &values, &named], [&out, &lse]);
            Ok(plan.attend(&client, inputs, made, scale)?)
        })?;
        if !is_there {
            return Ok(());
        }
        let out: Vec<f32> = read_numbers(&client, &out, BF16)?;
        let lse: Vec<f64> = read_numbers(&client, &lse, F32)?;
        let (mut off, mut lse_off) = (0.0f64, 0.0f64);
        for (cluster, tokens) in tokens.chunks(most).enumerate() {
            let list = cluster / clusters * length;
            let row = |of, at: usize| -> &[f32] {
                let of: &Vec<f32> = of;
                &of[(list + tokens[at]) * width..][..width]
            };
            for at in 0..most {
                let score = |key: usize| {
                    let key = row(&x, key);
                    scale * dot(row(&x, at), key) / dot(key, key).max(1e-24).sqrt()
                };
                let scores: Vec<f64> = (0..at.max(1)).map(score).collect();
                let (weights, expected) = softmax(&scores);
                let place = cluster * most + at;
                let got = lse[place];
                lse_off = lse_off.max((got - expected).abs());
                ensure!(got.is_finite(), "lse of place {place}: {got}");
                for n in 0..width {
                    let values = (0..at.max(1)).map(|key| f64::from(row(&value, key)[n]));
                    let terms = weights.iter().zip(values);
                    let expected: f64 = terms.map(|(weight, value)| weight * value).sum();
                    let got = f64::from(out[place * width + n]);
                    ensure!(got.is_finite(), "place {place}: {got}");
                    off = off.max((got - expected).abs() / (expected.abs() + 1.0));
                }
            }
        }
        println!("    off by {off:.1e}, lse by {lse_off:.1e} at most");
        ensure!(off < 8e-3 && lse_off < 1e-4);
        self.mean_over_clusters(&plan, &tokens, &out)
    }

    /// The mean of what `out` has of a token, of tokens by cluster.
    fn mean_over_clusters(&self, plan: &ClusterPlan, tokens: &[usize], out: &[f32]) -> Result<()> {
        let (clusters, most) = (self.means(), self.args.window);
        let (length, heads, width) = (self.args.length, self.args.heads, self.args.width);
        let words = select_rows::words_of_flags(length);
        let mut flags = vec![[0i32; 2]; heads * clusters * words];
        for (own, tokens) in flags.chunks_mut(words).zip(tokens.chunks(most)) {
            for token in tokens {
                own[token / 32][0] |= 1 << (token % 32);
            }
            let mut before = 0;
            for [bits, first] in own {
                *first = before;
                before += bits.count_ones() as i32;
            }
        }
        let flags = upload_ints(&self.client, flags.as_flattened());
        let given = self.upload_halves(out);
        let made = poisoned(&self.client, heads * length * width, BF16);
        self.time("means over clusters, by flags", || {
            Ok(plan.mean(&self.client, [&given, &flags], &made)?)
        })?;
        let made: Vec<f64> = read_numbers(&self.client, &made, BF16)?;
        let mut sums = vec![0.0f64; heads * length * width];
        let mut counts = vec![0.0f64; heads * length];
        for (place, token) in tokens.iter().enumerate() {
            let row = place / most / clusters * length + token;
            counts[row] += 1.0;
            let sums = &mut sums[row * width..][..width];
            let own = sums.iter_mut().zip(&out[place * width..]);
            own.for_each(|(sum, &x)| *sum += f64::from(x));
        }
        let mut off = 0.0f64;
        for (at, (sum, got)) in sums.iter().zip(made).enumerate() {
            let expected = sum / counts[at / width].max(1.0);
            ensure!(got.is_finite(), "number {at} of means: {got}");
            off = off.max((got - expected).abs() / (expected.abs() + 0.1));
        }
        println!("    means off by {off:.1e} at most");
        ensure!(off < 4e-3);
        Ok(())
    }

    fn similarities(&mut self) -> Result<()> {
        let means = self.means();
        let (length, heads, width) = (self.args.length, self.args.heads, self.args.width);
        let x = self.rows();
        let of_means = self.normal(heads * means * width, (width as f32).powf(-0.5));
        let (given, given_means) = (self.upload_halves(&x), self.upload(&of_means));
        let [made, nearest] = self.empty([heads * means * length, heads * length]);
        let client = self.client.clone();
        let is_there = self.time("similarities and the nearest", || {
            let of = RowsOfMeans::new([1, heads, length, width], means);
            let (x, made) = ((&given, BF16), [&made, &nearest]);
            Ok(select_rows::compare_with_means(
                &client,
                &of,
                x,
                &given_means,
                made,
            )?)
        })?;
        if !is_there {
            return Ok(());
        }
        let made: Vec<f64> = read_numbers(&client, &made, F32)?;
        let nearest = read_ints(&client, &nearest)?;
        let mut off = 0.0f64;
        for (at, row) in x.chunks(width).enumerate() {
            let (head, row_at) = (at / length, at % length);
            let of_mean = |mean: usize| {
                let own = &of_means[(head * means + mean) * width..][..width];
                dot(row, own) / dot(row, row).sqrt()
            };
            let all: Vec<f64> = (0..means).map(of_mean).collect();
            for (mean, expected) in all.iter().enumerate() {
                let got = made[(head * means + mean) * length + row_at];
                off = off.max((got - expected).abs());
            }
            let highest = all.iter().copied().fold(f64::MIN, f64::max);
            let got = all[nearest[at] as usize - head * means];
            ensure!(got > highest - OFF, "row {at}: {got}, {highest}");
        }
        println!("    off by {off:.1e} at most");
        ensure!(off < OFF);
        Ok(())
    }

    fn hashes(&mut self, rounds: usize) -> Result<()> {
        let (length, heads, width) = (self.args.length, self.args.heads, self.args.width);
        let half = length.div_ceil(self.args.bucket).div_ceil(2);
        let x = self.rows();
        let rotations = self.normal(rounds * width * half, 1.0);
        let (given, turned) = (self.upload_halves(&x), self.upload(&rotations));
        let of = HashedRows::new([heads, length, width], [rounds, half]);
        let [made, tokens, places, choices] = self.empty([heads * rounds * length; 4]);
        let client = self.client.clone();
        let is_there = self.time(&format!("hashes of {rounds}"), || {
            Ok(select_rows::lsh_hash(
                &client,
                &of,
                (&given, BF16),
                &turned,
                &made,
            )?)
        })?;
        self.time(&format!("hashes of {rounds}, sorted"), || {
            let (x, made) = ((&given, BF16), [&tokens, &places, &choices]);
            Ok(select_rows::lsh_argsort(
                &client, &of, length, x, &turned, made,
            )?)
        })?;
        if !is_there {
            return Ok(());
        }
        let (made, tokens) = (read_ints(&client, &made)?, read_ints(&client, &tokens)?);
        let mut off = 0.0f64;
        for (at, row) in x.chunks(width).enumerate() {
            let size = dot(row, row).sqrt();
            for round in 0..rounds {
                let mut products = vec![0.0f64; half];
                for (n, &x) in row.iter().enumerate() {
                    let turned = &rotations[(round * width + n) * half..][..half];
                    let sums = products.iter_mut().zip(turned);
                    sums.for_each(|(sum, &y)| *sum += f64::from(x) * f64::from(y));
                }
                let most = products.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                let group = at / length * rounds + round;
                let found = made[group * length + at % length] as usize;
                let got = products[found % half] * if found < half { 1.0 } else { -1.0 };
                off = off.max((most - got) / size);
            }
        }
        println!("    buckets off by {off:.1e} of a row at most");
        ensure!(off < 8.0 * OFF);
        for (group, own) in tokens.chunks(length).enumerate() {
            let buckets = &made[group * length..][..length];
            let mut order: Vec<i32> = (0..length as i32).collect();
            order.sort_by_key(|&token| buckets[token as usize]);
            ensure!(own == order, "the order of group {group}");
        }
        Ok(())
    }
}
