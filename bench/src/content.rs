//! `bench-content`: kernels by which keys are chosen by their content, each alone: times, and whether what they give is right by f64 on the host.

use anyhow::{Result, ensure};
use blocksparse_bench::compare::{dot, ensure_within};
use blocksparse_bench::device::{self, empty, read_ints, read_numbers, upload};
use blocksparse_bench::device_time::median;
use blocksparse_bench::numbers::{BF16, F32, rounded};
use blocksparse_bench::runner::Timing;
use blocksparse_cubecl::rows;
use blocksparse_cubecl::rows::IndexedRows;
use burn_sparse_select::kernels::rows as select_rows;
use burn_sparse_select::kernels::rows::{HashedRows, Rounds, RowsOfMeans};
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
    bench.top_k()?;
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

    fn top_k(&mut self) -> Result<()> {
        let (means, length, most) = (self.means(), self.args.length, self.args.window);
        let (heads, width) = (self.args.heads, self.args.width);
        let of = [heads, means, length];
        let count = heads * means;
        let numbers = self.normal(count * length, 0.125);
        let given = self.upload(&numbers);
        let [lists, places] = self.empty([count * most, count * length]);
        let client = self.client.clone();
        let is_there = self.time("top-k of rows", || {
            let made = [&lists, &places];
            Ok(select_rows::topk_rows(&client, of, most, &given, made)?)
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
        self.time(&format!("sort by {rounds} rounds of buckets"), || {
            let of = Rounds::new([heads, rounds, length], length);
            let sorted = [&tokens, &places, &choices];
            let count = 2 * half;
            Ok(select_rows::counting_argsort_rounds(
                &client, of, count, &made, sorted,
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
