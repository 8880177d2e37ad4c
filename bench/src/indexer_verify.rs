//! Sums of pairs, picks and gradients by sums against loops in f64, of small calls.

use anyhow::{Result, ensure};
use blocksparse::HadamardFp8;
use blocksparse_bench::compare::dot;
use blocksparse_bench::device::{read_floats, read_ints};
use blocksparse_bench::numbers::{Dtype, F32};
use blocksparse_bench::runner::Tally;
use burn_sparse_select::kernels::indexer::{PairSizes, PairSum};
use cubecl::client::Client;

use super::{Args, Call, What};

/// Queries and keys, how many are picked, near ones among them, and numbers at a time, 0 for all.
const PICKS: &[([usize; 2], [usize; 3])] = &[
    ([65, 530], [64, 9, 530 * 40]),
    ([300, 300], [1, 0, 300 * 70]),
    ([2, 70_000], [2048, 0, 0]),
    ([5, 65_536], [2048, 16, 65_536]),
    ([700, 4100], [4000, 3, 0]),
    ([3, 9001], [9000, 0, 0]),
    ([1, 1], [1, 0, 0]),
    // Few rows that are cut.
    ([3, 50_001], [2048, 0, 0]),
    ([2, 140_001], [2048, 7, 0]),
    ([1, 65_536], [60_000, 0, 0]),
];

/// Numbers of a call, as the device has them.
pub struct Numbers {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub of_rows: Vec<f32>,
    pub keys: Option<Vec<i32>>,
    pub of_pairs: Vec<f32>,
}

/// The most that a sum errs by, beside 1 or itself, and a gradient beside the largest.
const SUM_ERROR: f64 = 1e-5;
const GRADIENT_ERROR: f64 = 2e-5;
/// Sums of products of bytes, which tensor cores add up with fewer digits than f32 has.
const BYTE_ERROR: f64 = 2e-3;

/// Heads, of keys, and width; queries and keys; keys of a list, near ones, and numbers at a time, 0 for all.
type Shape = ([usize; 3], [usize; 2], [usize; 3]);

const SHAPES: &[Shape] = &[
    ([64, 1, 128], [65, 530], [0, 9, 530 * 40]),
    ([64, 1, 128], [30, 600], [290, 3, 0]),
    ([1, 1, 24], [300, 300], [0, 3, 300 * 70]),
    ([3, 1, 72], [50, 270], [0, 0, 0]),
    ([4, 1, 200], [33, 90], [0, 1, 90 * 20]),
    ([72, 1, 40], [9, 300], [33, 2, 0]),
    ([16, 1, 256], [21, 260], [0, 0, 0]),
    ([24, 1, 8], [70, 130], [20, 0, 20 * 15]),
    ([40, 1, 64], [290, 300], [0, 16, 0]),
    ([6, 6, 48], [60, 60], [0, 0, 0]),
    ([48, 2, 128], [20, 300], [0, 5, 300 * 7]),
    ([144, 2, 16], [11, 80], [40, 0, 0]),
    // Heads that fill the columns of a step on wgmma.
    ([16, 1, 128], [290, 700], [0, 16, 0]),
    ([128, 1, 128], [33, 300], [0, 0, 0]),
    ([8, 1, 128], [130, 600], [0, 2, 600 * 50]),
    ([32, 1, 128], [600, 600], [0, 0, 0]),
];

/// Types, and whether rows are rounded to 8 bits.
const KINDS: [(Dtype, bool); 5] = [
    (Dtype::Bf16, false),
    (Dtype::F16, false),
    (Dtype::Bf16, true),
    (Dtype::F16, true),
    (Dtype::F32, true),
];

/// All kinds of calls of these sizes in both types, twice.
pub fn verify(client: &Client, args: &Args) -> Result<()> {
    let mut tally = Tally::new(args.shard)?;
    let numbers_of = |numbers| if numbers == 0 { 1 << 24 } else { 2 * numbers };
    for &([heads, kv_heads, width], [queries, n], [listed, near, numbers]) in SHAPES {
        for what in [What::Scores, What::Weights, What::ByQueries, What::ByKeys] {
            // An indexer's keys have one head.
            let left_out = what.is_gradient() && kv_heads > 1 || what == What::ByKeys && listed > 0;
            for (dtype, rounded) in KINDS {
                for all in [false, true] {
                    let is_plain = what == What::Scores;
                    if left_out
                        || all && !(is_plain && listed == 0)
                        || rounded && !(is_plain && HadamardFp8::takes(width))
                        || !tally.has_next()
                    {
                        continue;
                    }
                    let args = Args {
                        what,
                        n,
                        batch: 2,
                        heads,
                        kv_heads,
                        width,
                        queries: Some(queries),
                        numbers: numbers_of(numbers),
                        listed: (listed > 0).then_some(listed),
                        near,
                        all,
                        dtype,
                        rounded,
                        ..args.clone()
                    };
                    let name = format!(
                        "{what:?} of {heads} heads on {kv_heads}, {width} wide, {queries} of {n}, {listed} listed, {dtype:?}, rounded {rounded}, all {all}"
                    );
                    let found = Call::new(client, &args)?.worst(client).and_then(|first| {
                        let again = Call::new(client, &args)?.worst(client)?;
                        ensure!(first == again, "other numbers when run again");
                        println!("right {name}: {first:.1e}");
                        Ok(())
                    });
                    tally.count(format!("WRONG {name}"), found);
                }
            }
        }
    }
    for &([queries, n], [most, near, numbers]) in PICKS {
        if !tally.has_next() {
            continue;
        }
        let args = Args {
            what: What::Picks,
            n,
            batch: 2,
            heads: 1,
            width: 8,
            queries: Some(queries),
            numbers: numbers_of(numbers),
            most,
            near,
            ..args.clone()
        };
        let name = format!("picks of {most} by {queries} of {n}, {near} near");
        let found = Call::new(client, &args)?.verify_top_k(client);
        if found.is_ok() {
            println!("right {name}");
        }
        tally.count(format!("WRONG {name}"), found);
    }
    tally.finish("calls")
}

/// Products whose sign a rounding may change.
const NEAR_ZERO: f64 = 1e-5;

/// By how much numbers err at most, beside the largest, but for so much.
fn compared(what: &str, found: &[f64], expected: &[f64], slack: f64) -> Result<f64> {
    let most = expected.iter().fold(1e-3, |most: f64, x| most.max(x.abs()));
    let mut worst = 0.0f64;
    for (at, (x, y)) in found.iter().zip(expected).enumerate() {
        let error = match (x - y).abs() - slack {
            within if within <= 0.0 => 0.0,
            // Also if it is no number.
            above => above / most,
        };
        ensure!(
            error <= GRADIENT_ERROR,
            "{what} {at} is {x}, expected {y}, of up to {most}"
        );
        worst = worst.max(error);
    }
    Ok(worst)
}

impl Call {
    fn numbers(&self) -> &Numbers {
        self.kept.as_ref().expect("kept where calls are compared")
    }

    fn product(&self, sizes: &PairSizes, [entry, head, query, key]: [usize; 4]) -> f64 {
        let [heads, kv_heads] = sizes.heads;
        let [seq_q, seq_kv] = sizes.seq;
        let kv_head = head / (heads / kv_heads);
        let q = ((entry * heads + head) * seq_q + query) * sizes.width;
        let k = ((entry * kv_heads + kv_head) * seq_kv + key) * sizes.width;
        let numbers = self.numbers();
        dot(
            &numbers.q[q..][..sizes.width],
            &numbers.k[k..][..sizes.width],
        )
    }

    fn key(&self, sizes: &PairSizes, entry: usize, query: usize, column: usize) -> Option<usize> {
        match &self.numbers().keys {
            None => Some(column),
            Some(keys) => {
                let at = (entry * sizes.seq[0] + query) * sizes.columns() + column;
                usize::try_from(keys[at]).ok()
            }
        }
    }

    /// That the keys that are picked are those of a sort.
    fn verify_top_k(&self, client: &Client) -> Result<()> {
        let most = self.top_k.most;
        for sizes in &self.sizes {
            self.run_slab(sizes, None)?;
            let lists = read_ints(client, &self.lists)?;
            let [start, rows] = sizes.rows;
            for at in 0..sizes.batch * rows {
                let query = at / rows * sizes.seq[0] + start + at % rows;
                let seen = start + at % rows + sizes.seq[1] - sizes.seq[0] + 1;
                let numbers = &self.numbers().of_pairs[at * sizes.columns()..][..seen];
                let number = |key: usize| match key + self.top_k.near >= seen {
                    true => f32::INFINITY,
                    false => numbers[key],
                };
                let mut order: Vec<usize> = (0..seen).collect();
                order.sort_by(|&a, &b| number(b).total_cmp(&number(a)).then(a.cmp(&b)));
                let mut expected: Vec<i32> =
                    order.iter().take(most).map(|&key| key as i32).collect();
                expected.sort_unstable();
                expected.resize(most, -1);
                let found = &lists[query * most..][..most];
                for (place, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    ensure!(
                        found == expected,
                        "place {place} of query {query} is {found}, expected {expected}"
                    );
                }
            }
        }
        Ok(())
    }

    fn worst(&self, client: &Client) -> Result<f64> {
        let (mut worst, mut slack) = (0.0f64, 0.0);
        let [seq_q, seq_kv] = self.sizes[0].seq;
        let (heads, width) = (self.sizes[0].heads[0], self.sizes[0].width);
        let batch = self.sizes[0].batch;
        let mut by_q = vec![0.0; batch * heads * seq_q * width];
        let mut by_weights = vec![0.0; batch * heads * seq_q];
        let mut by_k = vec![0.0; batch * seq_kv * width];
        let bytes = self.bytes()?;
        let sum_error = match bytes {
            Some(_) => BYTE_ERROR,
            None => SUM_ERROR,
        };
        for sizes in &self.sizes {
            self.run_slab(sizes, bytes.as_ref())?;
            if matches!(self.what, What::Scores | What::Weights) {
                worst = worst.max(self.worst_sum(client, sizes, sum_error)?);
                continue;
            }
            let numbers = self.numbers();
            let [start, rows] = sizes.rows;
            for at in 0..batch * rows * sizes.columns() {
                let (row, column) = (at / sizes.columns(), at % sizes.columns());
                let (entry, query) = (row / rows, start + row % rows);
                let Some(key) = self.key(sizes, entry, query, column) else {
                    continue;
                };
                let by_score = f64::from(numbers.of_pairs[at]);
                for head in 0..heads {
                    let product = self.product(sizes, [entry, head, query, key]);
                    let of_row = (entry * heads + head) * seq_q + query;
                    let by_product = by_score * f64::from(numbers.of_rows[of_row]);
                    if product.abs() < NEAR_ZERO {
                        slack += 1.5 * by_product.abs();
                    }
                    if by_score == 0.0 || product <= 0.0 {
                        continue;
                    }
                    by_weights[of_row] += by_score * product;
                    let (q, k) = (of_row * width, (entry * seq_kv + key) * width);
                    for c in 0..width {
                        by_q[q + c] += by_product * f64::from(numbers.k[k + c]);
                        by_k[k + c] += by_product * f64::from(numbers.q[q + c]);
                    }
                }
            }
        }
        let read = |handle| read_floats::<f64>(client, handle, F32);
        let [first, second] = &self.gradients;
        match self.what {
            What::Scores | What::Weights | What::Picks | What::Choice => Ok(worst),
            What::ByQueries => {
                let worst = compared("by q", &read(first)?, &by_q, slack)?;
                let of_weights = compared("by weights", &read(second)?, &by_weights, 0.0)?;
                Ok(worst.max(of_weights))
            }
            What::ByKeys => {
                let mut sums = vec![0.0; by_k.len()];
                for part in read(first)?.chunks(by_k.len()) {
                    sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
                }
                compared("by k", &sums, &by_k, slack)
            }
        }
    }

    /// The largest error of the sums of some queries, beside 1 or the sum.
    fn worst_sum(&self, client: &Client, sizes: &PairSizes, most: f64) -> Result<f64> {
        let found: Vec<f64> = read_floats(client, &self.of_pairs, F32)?;
        let mut worst = 0.0f64;
        let [start, rows] = sizes.rows;
        let heads = sizes.heads[0];
        let own = &found[..sizes.batch * rows * sizes.columns()];
        for (at, &found) in own.iter().enumerate() {
            let (row, column) = (at / sizes.columns(), at % sizes.columns());
            let (entry, query) = (row / rows, start + row % rows);
            let position = query + sizes.seq[1] - sizes.seq[0];
            let Some(key) = self.key(sizes, entry, query, column) else {
                continue;
            };
            let of_head = |head: usize| {
                let product = self.product(sizes, [entry, head, query, key]);
                let of_row = (entry * heads + head) * sizes.seq[0] + query;
                let of_row = f64::from(self.numbers().of_rows[of_row]);
                match self.sum {
                    PairSum::Scores { .. } => of_row * product.max(0.0),
                    PairSum::Weights { scale } => (scale * product - of_row).exp(),
                }
            };
            let expected = match self.sum {
                PairSum::Scores { all: false, .. } | PairSum::Weights { .. } if key > position => {
                    continue;
                }
                PairSum::Scores { near, .. } if near > 0 && key + near > position => f64::INFINITY,
                PairSum::Scores { factor, .. } => factor * (0..heads).map(of_head).sum::<f64>(),
                PairSum::Weights { .. } => (0..heads).map(of_head).sum::<f64>() / heads as f64,
            };
            let error = match found == expected {
                true => 0.0,
                false => (found - expected).abs() / expected.abs().max(1.0),
            };
            ensure!(
                error <= most,
                "entry {entry}, query {query}, column {column}: {found} is not {expected}"
            );
            worst = worst.max(error);
        }
        Ok(worst)
    }
}
