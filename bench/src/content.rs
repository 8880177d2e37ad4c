//! `bench-content`: kernels by which keys are chosen by their content, each alone: times, and whether what they give is right by f64 on the host.

mod device_time;

use anyhow::{Result, anyhow, ensure};
use blocksparse_cubecl::rows;
use blocksparse_cubecl::rows::IndexedRows;
use burn_sparse_select::kernels::clusters::ClusterPlan;
use burn_sparse_select::kernels::clusters::ClusterSizes;
use burn_sparse_select::kernels::rows as select_rows;
use burn_sparse_select::kernels::rows::HashedRows;
use burn_sparse_select::kernels::rows::RowsOfMeans;
use clap::Parser;
use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::server::Handle;
use half::bf16;
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
    /// Timed runs; the median is reported.
    #[arg(long, default_value_t = 25)]
    repeats: usize,
    /// Attention within clusters alone.
    #[arg(long)]
    attention: bool,
    /// Run every kernel once and check what it gives, without a time.
    #[arg(long)]
    verify: bool,
    /// Launch every kernel once and wait for nothing: for looking at what is compiled.
    #[arg(long)]
    enqueue_only: bool,
}

const BF16: ElemType = ElemType::Float(FloatKind::BF16);
/// What a product may be off, as a part of the length of what is multiplied.
const OFF: f64 = 2e-6;

fn main() -> Result<()> {
    let args = Args::parse();
    let client = cubecl::Device::Cuda(Default::default()).client();
    let mut bench = Bench {
        random: ChaCha8Rng::seed_from_u64(1),
        client,
        args,
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

    fn upload(&self, bytes: Vec<u8>) -> Handle {
        self.client
            .create(cubecl::bytes::Bytes::from_bytes_vec(bytes))
    }

    fn floats(&self, numbers: &[f32]) -> Handle {
        self.upload(numbers.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    fn halves(&self, numbers: &[bf16]) -> Handle {
        self.upload(numbers.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    fn empty<const N: usize>(&self, counts: [usize; N]) -> [Handle; N] {
        counts.map(|count| self.client.empty(4 * count))
    }

    fn words(&self, handle: &Handle) -> Result<Vec<u32>> {
        let read = self.client.read_one(handle.clone());
        let bytes = read.map_err(|error| anyhow!("{error:?}"))?;
        let word = |word: &[u8]| u32::from_le_bytes(word.try_into().expect("four"));
        Ok(bytes.chunks_exact(4).map(word).collect())
    }

    /// Times a call; whether its results are there to be checked.
    fn time(&self, name: &str, call: impl Fn() -> Result<()> + Sync) -> Result<bool> {
        if self.args.enqueue_only {
            call()?;
            self.client.flush().map_err(|error| anyhow!("{error}"))?;
            return Ok(false);
        }
        if self.args.verify {
            call()?;
            println!("{name}");
            return Ok(true);
        }
        let seconds = device_time::median(&self.client, self.args.repeats, call)?;
        println!("{name:<40} {:>8.1} us", seconds * 1e6);
        Ok(true)
    }

    fn means(&self) -> usize {
        self.args.length.div_ceil(self.args.window)
    }

    fn highest(&mut self) -> Result<()> {
        let (means, length, most) = (self.means(), self.args.length, self.args.window);
        let count = self.args.heads * means;
        let numbers = self.normal(count * length, 0.125);
        let given = self.floats(&numbers);
        let words = select_rows::words_of_flags(length);
        let [lists, places, flags] = self.empty([count * most, count * length, count * words * 2]);
        self.time("highest of rows, as flags", || {
            let of = [self.args.heads, means, length];
            let made = [&lists, &flags];
            Ok(select_rows::highest_flags_of_rows(
                &self.client,
                of,
                most,
                &given,
                made,
            )?)
        })?;
        let is_there = self.time("highest of rows", || {
            let of = [self.args.heads, means, length];
            let made = [&lists, &places];
            Ok(select_rows::highest_of_rows(
                &self.client,
                of,
                most,
                &given,
                made,
            )?)
        })?;
        let width = self.args.width;
        let x: Vec<bf16> = self
            .normal(self.args.heads * means * most * width, 1.0)
            .into_iter()
            .map(bf16::from_f32)
            .collect();
        let (taken, [mean, shares]) = (
            self.halves(&x),
            self.empty([self.args.heads * length * width, self.args.heads * length]),
        );
        self.time("means over clusters", || {
            let of = IndexedRows::new(self.args.heads, means * most, [length, means], width);
            let made = [&mean, &shares];
            Ok(rows::mean_rows(
                &self.client,
                &of.turned(true),
                (&taken, BF16),
                &places,
                made,
            )?)
        })?;
        if !is_there {
            return Ok(());
        }
        let (lists, places) = (self.words(&lists)?, self.words(&places)?);
        let flags = self.words(&flags)?;
        for (at, &place) in places.iter().enumerate() {
            let (row, column) = (at / length, at % length);
            let word = &flags[(row * words + column / 32) * 2..][..2];
            let bit = 1u32 << (column % 32);
            let below = (word[0] & (bit - 1)).count_ones();
            let own = (row % means * most) as u32 + word[1] + below;
            let expected = if word[0] & bit != 0 { own } else { u32::MAX };
            ensure!(place == expected, "flags of row {row}, column {column}");
        }
        let mean = self.words(&mean)?;
        for row in 0..self.args.heads * length {
            let (head, token) = (row / length, row % length);
            let named: Vec<usize> = (0..means)
                .map(|m| places[(head * means + m) * length + token] as i32)
                .filter(|&at| at >= 0)
                .map(|at| head * means * most + at as usize)
                .collect();
            for n in 0..width {
                let sum: f64 = named.iter().map(|at| x[at * width + n].to_f64()).sum();
                let expected = sum / named.len().max(1) as f64;
                let word = mean[(row * width + n) / 2];
                let got = bf16::from_bits((word >> (16 * (n % 2))) as u16).to_f64();
                let off = (got - expected).abs();
                ensure!(
                    off <= 0.01 * expected.abs() + 1e-3,
                    "mean of row {row}: {got}, {expected}"
                );
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
                let first = row % means * most;
                let own = order.binary_search(&column).ok();
                let own = own.map_or(-1, |at| (first + at) as i32);
                ensure!(own == place as i32, "row {row}, column {column}");
            }
        }
        println!("    right");
        Ok(())
    }

    /// Attention within clusters of tokens that were drawn.
    fn attention(&mut self) -> Result<()> {
        let (clusters, most) = (self.means(), self.args.window);
        let Args {
            length,
            heads,
            width,
            ..
        } = self.args;
        let (x, value) = (self.rows(), self.rows());
        let mut tokens = Vec::with_capacity(heads * clusters * most);
        for _ in 0..heads * clusters {
            let mut drawn = rand::seq::index::sample(&mut self.random, length, most).into_vec();
            drawn.sort_unstable();
            tokens.extend(drawn);
        }
        let words: Vec<u8> = tokens
            .iter()
            .flat_map(|&x| (x as i32).to_le_bytes())
            .collect();
        let named = self.upload(words);
        let (given, values) = (self.halves(&x), self.halves(&value));
        let places = tokens.len();
        // NaN in both.
        let [out, lse] =
            [places * width / 2, places].map(|count| self.upload(vec![0xff; 4 * count]));
        let sizes = ClusterSizes::new([heads, length], [clusters, most], [width, width]);
        let Some(plan) = ClusterPlan::new(&self.client, sizes, BF16) else {
            println!("attention within clusters: no kernel");
            return Ok(());
        };
        println!("{plan}");
        let scale = (width as f64).powf(-0.5);
        let is_there = self.time("attention within clusters", || {
            let (inputs, made) = ([&given, &values, &named], [&out, &lse]);
            Ok(plan.attend(&self.client, inputs, made, scale)?)
        })?;
        if !is_there {
            return Ok(());
        }
        let (out, lse) = (self.words(&out)?, self.words(&lse)?);
        let (mut off, mut lse_off) = (0.0f64, 0.0f64);
        for (cluster, tokens) in tokens.chunks(most).enumerate() {
            let list = cluster / clusters * length;
            let row = |of: &[bf16], at: usize| -> Vec<f64> {
                let own = &of[(list + tokens[at]) * width..][..width];
                own.iter().map(|x| x.to_f64()).collect()
            };
            let rows: Vec<Vec<f64>> = (0..most).map(|at| row(&x, at)).collect();
            let values: Vec<Vec<f64>> = (0..most).map(|at| row(&value, at)).collect();
            let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            for at in 0..most {
                let score = |key: usize| {
                    let square = product(&rows[key], &rows[key]).max(1e-24);
                    scale * product(&rows[at], &rows[key]) / square.sqrt()
                };
                let scores: Vec<f64> = (0..at.max(1)).map(score).collect();
                let highest = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - highest).exp()).collect();
                let sum: f64 = weights.iter().sum();
                let place = cluster * most + at;
                let got = f64::from(f32::from_bits(lse[place]));
                lse_off = lse_off.max((got - highest - sum.ln()).abs());
                ensure!(got.is_finite(), "lse of place {place}: {got}");
                for n in 0..width {
                    let expected = (weights.iter().zip(&values))
                        .map(|(weight, value)| weight * value[n])
                        .sum::<f64>()
                        / sum;
                    let word = out[(place * width + n) / 2];
                    let got = bf16::from_bits((word >> (16 * (n % 2))) as u16).to_f64();
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
    fn mean_over_clusters(&self, plan: &ClusterPlan, tokens: &[usize], out: &[u32]) -> Result<()> {
        let (clusters, most) = (self.means(), self.args.window);
        let Args {
            length,
            heads,
            width,
            ..
        } = self.args;
        let words = select_rows::words_of_flags(length);
        let mut flags = vec![[0u32; 2]; heads * clusters * words];
        for (own, tokens) in flags.chunks_mut(words).zip(tokens.chunks(most)) {
            tokens
                .iter()
                .for_each(|token| own[token / 32][0] |= 1 << (token % 32));
            let mut before = 0;
            for [bits, first] in own {
                *first = before;
                before += bits.count_ones();
            }
        }
        let bytes = |words: &[u32]| words.iter().flat_map(|x| x.to_le_bytes()).collect();
        let (given, flags) = (
            self.upload(bytes(out)),
            self.upload(bytes(flags.as_flattened())),
        );
        let made = self.upload(vec![0xff; heads * length * width * 2]);
        self.time("means over clusters, by flags", || {
            Ok(plan.mean(&self.client, [&given, &flags], &made)?)
        })?;
        let made = self.words(&made)?;
        let number = |words: &[u32], at: usize| {
            bf16::from_bits((words[at / 2] >> (16 * (at % 2))) as u16).to_f64()
        };
        let mut sums = vec![0.0f64; heads * length * width];
        let mut counts = vec![0.0f64; heads * length];
        for (place, token) in tokens.iter().enumerate() {
            let row = place / most / clusters * length + token;
            counts[row] += 1.0;
            (0..width).for_each(|n| sums[row * width + n] += number(out, place * width + n));
        }
        let mut off = 0.0f64;
        for (at, sum) in sums.iter().enumerate() {
            let expected = sum / counts[at / width].max(1.0);
            let got = number(&made, at);
            ensure!(got.is_finite(), "number {at} of means: {got}");
            off = off.max((got - expected).abs() / (expected.abs() + 0.1));
        }
        println!("    means off by {off:.1e} at most");
        ensure!(off < 4e-3);
        Ok(())
    }

    fn rows(&mut self) -> Vec<bf16> {
        let count = self.args.heads * self.args.length * self.args.width;
        let numbers = self.normal(count, 1.0);
        numbers.into_iter().map(bf16::from_f32).collect()
    }

    fn similarities(&mut self) -> Result<()> {
        let means = self.means();
        let Args {
            length,
            heads,
            width,
            ..
        } = self.args;
        let x = self.rows();
        let of_means = self.normal(heads * means * width, (width as f32).powf(-0.5));
        let (given, given_means) = (self.halves(&x), self.floats(&of_means));
        let [made, nearest] = self.empty([heads * means * length, heads * length]);
        let is_there = self.time("similarities and the nearest", || {
            let of = RowsOfMeans::new([1, heads, length, width], means);
            let (x, made) = ((&given, BF16), [&made, &nearest]);
            Ok(select_rows::compare_with_means(
                &self.client,
                &of,
                x,
                &given_means,
                made,
            )?)
        })?;
        if !is_there {
            return Ok(());
        }
        let (made, nearest) = (self.words(&made)?, self.words(&nearest)?);
        let mut off = 0.0f64;
        for (at, row) in x.chunks(width).enumerate() {
            let (head, row_at) = (at / length, at % length);
            let square: f64 = row.iter().map(|x| x.to_f64().powi(2)).sum();
            let of_mean = |mean: usize| {
                let own = &of_means[(head * means + mean) * width..][..width];
                let product = row.iter().zip(own);
                let product: f64 = product.map(|(x, &y)| x.to_f64() * f64::from(y)).sum();
                product / square.sqrt()
            };
            let all: Vec<f64> = (0..means).map(of_mean).collect();
            for (mean, expected) in all.iter().enumerate() {
                let got = f32::from_bits(made[(head * means + mean) * length + row_at]);
                off = off.max((f64::from(got) - expected).abs());
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
        let Args {
            length,
            heads,
            width,
            bucket,
            ..
        } = self.args;
        let half = length.div_ceil(bucket).div_ceil(2);
        let x = self.rows();
        let rotations = self.normal(rounds * width * half, 1.0);
        let (given, turned) = (self.halves(&x), self.floats(&rotations));
        let of = HashedRows::new([heads, length, width], [rounds, half]);
        let all = heads * rounds * length;
        let [made, tokens, places, choices] = self.empty([all; 4]);
        let is_there = self.time(&format!("hashes of {rounds}"), || {
            let x = (&given, BF16);
            Ok(select_rows::lsh_hash(&self.client, &of, x, &turned, &made)?)
        })?;
        self.time(&format!("hashes of {rounds}, sorted"), || {
            let (x, made) = ((&given, BF16), [&tokens, &places, &choices]);
            Ok(select_rows::lsh_argsort(
                &self.client,
                &of,
                length,
                x,
                &turned,
                made,
            )?)
        })?;
        if !is_there {
            return Ok(());
        }
        let (made, tokens) = (self.words(&made)?, self.words(&tokens)?);
        let mut off = 0.0f64;
        for (at, row) in x.chunks(width).enumerate() {
            let size: f64 = row.iter().map(|x| x.to_f64().powi(2)).sum::<f64>().sqrt();
            for round in 0..rounds {
                let mut products = vec![0.0f64; half];
                for (n, x) in row.iter().enumerate() {
                    let turned = &rotations[(round * width + n) * half..][..half];
                    let sums = products.iter_mut().zip(turned);
                    sums.for_each(|(sum, &y)| *sum += x.to_f64() * f64::from(y));
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
            let mut order: Vec<u32> = (0..length as u32).collect();
            order.sort_by_key(|&token| buckets[token as usize]);
            ensure!(own == order, "the order of group {group}");
        }
        Ok(())
    }
}
