//! `bench-indexer`: sums over heads of the pairs of queries and keys, an indexer's scores or what attention gives to keys, the keys of the highest scores, and
//! gradients of these sums: times. `BLOCKSPARSE_TIER=simt` leaves tensor cores out. `check-device dsa` compares what they give.

use anyhow::{Result, ensure};
use blocksparse::HadamardFp8;
use blocksparse_bench::device::{self, empty, upload, upload_ints};
use blocksparse_bench::numbers::{Dtype, F32, uniform};
use blocksparse_bench::runner::Timing;
use burn_sparse_select::kernels::indexer::{
    IndexerGradients, KeyBytes, PairInputs, PairSizes, PairSum, TopKKeys, by_keys, by_queries,
    key_bytes, key_parts, pair_sums, round_rows, top_k_keys,
};
use clap::{Parser, ValueEnum};
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::server::Handle;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum What {
    /// An indexer's scores.
    Scores,
    /// The keys of the highest scores, which are drawn.
    Picks,
    /// Scores, and the keys of the highest of them.
    Choice,
    /// What dense attention gives to keys.
    Weights,
    /// The gradients by queries and weights, of those by scores.
    ByQueries,
    /// The gradient by keys.
    ByKeys,
}

impl What {
    fn is_sum(self) -> bool {
        matches!(self, What::Scores | What::Weights | What::Choice)
    }

    fn is_choice(self) -> bool {
        matches!(self, What::Picks | What::Choice)
    }

    fn is_gradient(self) -> bool {
        matches!(self, What::ByQueries | What::ByKeys)
    }
}

#[derive(Parser)]
#[command(
    about = "Times sums over heads of the pairs of queries and keys, and gradients by them",
    version
)]
struct Args {
    #[arg(long, value_enum, default_value_t = What::Scores)]
    what: What,
    /// Queries and keys.
    #[arg(long, short, default_value_t = 8192)]
    n: usize,
    #[arg(long, default_value_t = 1)]
    batch: usize,
    #[arg(long, default_value_t = 64)]
    heads: usize,
    #[arg(long, default_value_t = 1)]
    kv_heads: usize,
    #[arg(long, default_value_t = 128)]
    width: usize,
    /// Queries; as many as keys if it is not given. They are the last.
    #[arg(long)]
    queries: Option<usize>,
    /// Numbers in memory at a time, 2²⁴ unless it is given: a launch has as many queries as these allow.
    #[arg(long, default_value_t = 1 << 24)]
    numbers: usize,
    /// Keys that a query lists; all that it sees, if it is not given.
    #[arg(long)]
    listed: Option<usize>,
    /// Keys that are picked.
    #[arg(long, default_value_t = 2048)]
    most: usize,
    /// Keys up to a query's own that have no score.
    #[arg(long, default_value_t = 0)]
    near: usize,
    /// Also keys behind a query's own.
    #[arg(long)]
    all: bool,
    #[arg(long, value_enum, default_value_t = Dtype::Bf16)]
    dtype: Dtype,
    /// Rows that are rotated and rounded to 8 bits; a choice does that each time.
    #[arg(long)]
    rounded: bool,
    #[command(flatten)]
    timing: Timing<15>,
}

impl Args {
    fn queries(&self) -> usize {
        self.queries.unwrap_or(self.n)
    }

    /// Keys that a query sees.
    fn seen(&self, query: usize) -> usize {
        match self.all {
            true => self.n,
            false => self.n - self.queries() + query + 1,
        }
    }

    /// The keys that queries list, ascending, each once, from one end of what is seen to the other.
    fn lists(&self, most: usize) -> Vec<i32> {
        let list = |query: usize| {
            let seen = self.n - self.queries() + query + 1;
            (0..most).map(move |place| match seen > most {
                true => (place * seen / most) as i32,
                false if place < seen => place as i32,
                false => -1,
            })
        };
        let queries = 0..self.batch * self.queries();
        queries.flat_map(|at| list(at % self.queries())).collect()
    }
}

/// Rows of queries or keys, and the same rounded to 8 bits if they are to be.
fn rows_of(client: &Client, args: &Args, numbers: &[f32], of: HadamardFp8) -> Result<[Handle; 2]> {
    let element = args.dtype.element();
    let rows = upload(client, numbers, element);
    if !args.rounded {
        return Ok([rows.clone(), rows]);
    }
    let out = empty(client, numbers.len(), element);
    let size = [numbers.len() / args.width, args.width];
    round_rows(client, element, &rows, size, of, &out)?;
    Ok([rows, out])
}

/// A call: its numbers on the device.
struct Call {
    client: Client,
    element: ElemType,
    what: What,
    sum: PairSum,
    /// Of each launch.
    sizes: Vec<PairSizes>,
    q: Handle,
    k: Handle,
    of_rows: Handle,
    keys: Option<Handle>,
    /// Queries and keys before they were rounded to 8 bits, if they were.
    raw: Option<[Handle; 2]>,
    /// Sums, or what gradients or picks are made of.
    of_pairs: Handle,
    top_k: TopKKeys,
    lists: Handle,
    /// Gradients, and how many parts the one by keys has.
    gradients: [Handle; 2],
    parts: usize,
}

impl Call {
    fn new(client: &Client, args: &Args) -> Result<Self> {
        let &Args {
            n,
            batch,
            heads,
            kv_heads,
            width,
            listed,
            ..
        } = args;
        let queries = args.queries();
        let is_choice = args.what.is_choice();
        ensure!(
            (1..=n).contains(&queries) && kv_heads > 0 && heads.is_multiple_of(kv_heads),
            "there are more queries than keys, or heads of keys do not divide the others"
        );
        ensure!(
            args.what != What::ByKeys || listed.is_none(),
            "the gradient by keys is of all keys"
        );
        ensure!(
            !is_choice || (listed.is_none() && !args.all),
            "keys are picked from all up to a query's own"
        );
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut drawn = |count, element| uniform(count, 1.5, element, &mut rng);
        let element = args.dtype.element();
        let q_numbers = drawn(batch * heads * queries * width, element);
        let k_numbers = drawn(batch * kv_heads * n * width, element);
        let row_elements = drawn(batch * heads * queries, F32);
        let [raw_q, q] = rows_of(client, args, &q_numbers, HadamardFp8::Queries)?;
        let [raw_k, k] = rows_of(client, args, &k_numbers, HadamardFp8::Keys)?;
        let lists = listed.map(|most| args.lists(most));
        let rows = (args.numbers / (batch * listed.unwrap_or(n))).clamp(1, queries);
        let shapes = ([batch, heads, queries, width], [batch, kv_heads, n, width]);
        let top_k = TopKKeys {
            most: args.most.min(n),
            near: args.near,
            seen: None,
        };
        let sizes_of = |rows| PairSizes::new(shapes.0, shapes.1, rows, listed);
        let sizes: Vec<PairSizes> = match is_choice {
            true => top_k.slabs(&sizes_of([0, queries]), args.numbers),
            false => (0..queries)
                .step_by(rows)
                .map(|start| sizes_of([start, rows.min(queries - start)]))
                .collect(),
        };
        let sum = match args.what {
            What::Weights => PairSum::Weights {
                scale: 1.0 / (width as f64).sqrt(),
            },
            _ => PairSum::Scores {
                factor: 1.0 / ((heads * width) as f64).sqrt(),
                near: if is_choice { 0 } else { args.near },
                all: args.all,
            },
        };
        let pairs = sizes.iter().map(PairSizes::elements).max().unwrap_or(0);
        let output = |numbers: usize| empty(client, numbers, F32);
        let of_pairs = match args.what.is_sum() {
            true => output(pairs),
            false => {
                let mut pair_numbers = drawn(pairs, F32);
                // What the first queries do not see has none.
                if listed.is_none() && !is_choice {
                    for (row, numbers) in pair_numbers.chunks_mut(n).enumerate() {
                        numbers[n - queries + row % rows + 1..].fill(0.0);
                    }
                }
                upload(client, &pair_numbers, F32)
            }
        };
        let parts = match args.what {
            What::ByKeys => key_parts(client, &sizes[0]),
            _ => 1,
        };
        let all_rows = batch * heads * queries;
        let gradients = match args.what {
            What::ByQueries => [all_rows * width, all_rows],
            What::ByKeys => [parts * batch * n * width, 1],
            _ => [1, 1],
        };
        let picked = match is_choice {
            true => batch * queries * top_k.most,
            false => 1,
        };
        Ok(Self {
            client: client.clone(),
            element,
            what: args.what,
            sum,
            parts,
            of_pairs,
            top_k,
            lists: output(picked),
            gradients: gradients.map(output),
            sizes,
            q,
            k,
            of_rows: upload(client, &row_elements, F32),
            keys: lists.as_ref().map(|lists| upload_ints(client, lists)),
            raw: args.rounded.then_some([raw_q, raw_k]),
        })
    }

    fn run(&self) -> Result<()> {
        if self.what == What::Choice {
            self.round()?;
        }
        let bytes = self.bytes()?;
        (self.sizes.iter()).try_for_each(|sizes| self.run_slab(sizes, bytes.as_ref()))
    }

    fn round(&self) -> Result<()> {
        let Some([q, k]) = &self.raw else {
            return Ok(());
        };
        let of = &self.sizes[0];
        for (side, kind, rows, out) in [
            (0, HadamardFp8::Queries, q, &self.q),
            (1, HadamardFp8::Keys, k, &self.k),
        ] {
            let size = [of.batch * of.heads[side] * of.seq[side], of.width];
            round_rows(&self.client, self.element, rows, size, kind, out)?;
        }
        Ok(())
    }

    /// The keys in bytes, if they are rounded and a kernel takes them so.
    fn bytes(&self) -> Result<Option<KeyBytes>> {
        Ok(match self.raw.is_some() && self.what.is_sum() {
            true => key_bytes(&self.client, &self.sizes[0], &self.inputs(None), &self.sum)?,
            false => None,
        })
    }

    fn inputs<'a>(&'a self, bytes: Option<&'a KeyBytes>) -> PairInputs<'a> {
        PairInputs {
            element: self.element,
            q: &self.q,
            k: &self.k,
            of_rows: &self.of_rows,
            keys: self.keys.as_ref(),
            bytes,
        }
    }

    fn run_slab(&self, sizes: &PairSizes, bytes: Option<&KeyBytes>) -> Result<()> {
        let inputs = self.inputs(bytes);
        let of_pairs = IndexerGradients {
            inputs,
            by_scores: &self.of_pairs,
            factor: 1.0,
        };
        let [first, second] = &self.gradients;
        let client = &self.client;
        if self.what.is_sum() {
            pair_sums(client, sizes, &inputs, &self.sum, &self.of_pairs)?;
        }
        match self.what {
            What::Scores | What::Weights => {}
            What::Choice | What::Picks => {
                let numbers = [&self.of_pairs, &self.lists];
                top_k_keys(client, sizes, &self.top_k, numbers, None)?;
            }
            What::ByQueries => by_queries(client, sizes, &of_pairs, [first, second])?,
            What::ByKeys => {
                let flags = [sizes.rows[0] > 0, true];
                by_keys(client, sizes, &of_pairs, (first, self.parts), flags)?;
            }
        }
        Ok(())
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let client = device::client()?;
    let call = Call::new(&client, &args)?;
    let Some(seconds) = args.timing.seconds(&client, || call.run())? else {
        return device::sync(&client);
    };
    let most = args.listed.unwrap_or(args.n);
    let pairs: usize = (0..args.queries())
        .map(|query| args.seen(query).min(most))
        .sum();
    // Gradients need two products.
    let products = match args.what {
        What::Picks => 0.0,
        what if what.is_gradient() => 4.0,
        _ => 2.0,
    };
    let flops = products * (args.batch * args.heads * args.width) as f64 * pairs as f64;
    println!(
        "{:?} of {} x {} x {}, {} queries, {most} of {} keys, {:?}{}, {} slabs: {:9.3} ms {:7.1} TFLOP/s",
        args.what,
        args.batch,
        args.heads,
        args.width,
        args.queries(),
        args.n,
        args.dtype,
        if args.rounded { " rounded" } else { "" },
        call.sizes.len(),
        seconds * 1e3,
        flops / seconds / 1e12,
    );
    Ok(())
}
