//! `bench-indexer`: sums over heads of the pairs of queries and keys, an indexer's scores or what attention gives to keys, the keys of the highest scores, and
//! gradients by sums: times, and equality to loops in f64. `BLOCKSPARSE_PAIRS=0` leaves tensor cores out.

mod device_time;
mod indexer_verify;

use anyhow::{Result, anyhow, ensure};
use blocksparse::HadamardFp8;
use burn_sparse_select::kernels::indexer::IndexerGradients;
use burn_sparse_select::kernels::indexer::KeyBytes;
use burn_sparse_select::kernels::indexer::KeyPicks;
use burn_sparse_select::kernels::indexer::PairInputs;
use burn_sparse_select::kernels::indexer::PairSizes;
use burn_sparse_select::kernels::indexer::PairSum;
use burn_sparse_select::kernels::indexer::by_keys;
use burn_sparse_select::kernels::indexer::by_queries;
use burn_sparse_select::kernels::indexer::key_bytes;
use burn_sparse_select::kernels::indexer::key_parts;
use burn_sparse_select::kernels::indexer::pair_sums;
use burn_sparse_select::kernels::indexer::pick_keys;
use burn_sparse_select::kernels::indexer::round_rows;
use clap::{Parser, ValueEnum};
use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::server::Handle;
use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use device_time::median;
use indexer_verify::{Numbers, verify};

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    fn element(self) -> ElemType {
        ElemType::Float(match self {
            Dtype::F32 => FloatKind::F32,
            Dtype::F16 => FloatKind::F16,
            Dtype::Bf16 => FloatKind::BF16,
        })
    }

    /// Numbers as the device has them.
    fn bytes(self, numbers: &[f32]) -> Vec<u8> {
        match self {
            Dtype::F32 => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Dtype::F16 => (numbers.iter())
                .flat_map(|&x| f16::from_f32(x).to_le_bytes())
                .collect(),
            Dtype::Bf16 => (numbers.iter())
                .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
                .collect(),
        }
    }
}

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

#[derive(Clone, Parser)]
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
    /// Timed runs; the median is reported.
    #[arg(long, default_value_t = 15)]
    repeats: usize,
    /// Compare results with loops in f64, of small calls, and run twice, instead of timing.
    #[arg(long)]
    verify: bool,
    /// Of so many parts of what is to be compared, only this one.
    #[arg(long, default_value_t = 0)]
    shard: usize,
    /// Parts of what is to be compared: each call has a kernel of its own to compile, and processes share them.
    #[arg(long, default_value_t = 1)]
    of: usize,
    /// Launch every kernel once and time nothing: for looking at what is compiled.
    #[arg(long)]
    enqueue_only: bool,
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
    picks: KeyPicks,
    lists: Handle,
    /// Gradients, and how many parts the one by keys has.
    gradients: [Handle; 2],
    parts: usize,
    /// Where calls are compared.
    kept: Option<Numbers>,
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
        let queries = args.queries.unwrap_or(n);
        ensure!(
            (1..=n).contains(&queries) && kv_heads > 0 && heads.is_multiple_of(kv_heads),
            "there are more queries than keys, or heads of keys do not divide the others"
        );
        ensure!(
            args.what != What::ByKeys || listed.is_none(),
            "the gradient by keys is of all keys"
        );
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        // Long calls repeat a part of their numbers: nothing depends on them but power.
        let mut drawn = |count: usize| -> Vec<f32> {
            let some: Vec<f32> = (0..count.min(1 << 20))
                .map(|_| rng.random_range(-1.5..1.5))
                .collect();
            (0..count).map(|at| some[at % some.len()]).collect()
        };
        // As the device has them.
        let rounded = |mut numbers: Vec<f32>| {
            match args.dtype {
                Dtype::F32 => {}
                Dtype::F16 => numbers
                    .iter_mut()
                    .for_each(|x| *x = f16::from_f32(*x).to_f32()),
                Dtype::Bf16 => (numbers.iter_mut()).for_each(|x| *x = bf16::from_f32(*x).to_f32()),
            }
            numbers
        };
        let upload =
            |numbers: &[f32], dtype: Dtype| client.create_from_slice(&dtype.bytes(numbers));
        let mut q_numbers = rounded(drawn(batch * heads * queries * width));
        let mut k_numbers = rounded(drawn(batch * kv_heads * n * width));
        let row_numbers = drawn(batch * heads * queries);
        let element = args.dtype.element();
        let of = |numbers: &mut Vec<f32>, of: HadamardFp8| -> Result<[Handle; 2]> {
            let rows = upload(numbers, args.dtype);
            if !args.rounded {
                return Ok([rows.clone(), rows]);
            }
            let out = client.empty(numbers.len() * element.size());
            let size = [numbers.len() / width, width];
            round_rows(client, element, &rows, size, of, &out)?;
            if args.verify {
                of.round(numbers, width);
                let found = client.read_one(out.clone());
                let found = found.map_err(|error| anyhow!("{error:?}"))?;
                ensure!(
                    args.dtype.bytes(numbers) == found.to_vec(),
                    "rows are rounded to other numbers than on the host"
                );
            }
            Ok([rows, out])
        };
        let [raw_q, q] = of(&mut q_numbers, HadamardFp8::Queries)?;
        let [raw_k, k] = of(&mut k_numbers, HadamardFp8::Keys)?;
        let of_rows = upload(&row_numbers, Dtype::F32);
        let lists = listed.map(|most| {
            let list = |at: usize| {
                let seen = n - queries + at % queries + 1;
                // Ascending, each once, from one end of what is seen to the other.
                (0..most).map(move |place| match seen > most {
                    true => (place * seen / most) as i32,
                    false if place < seen => place as i32,
                    false => -1,
                })
            };
            (0..batch * queries).flat_map(list).collect::<Vec<i32>>()
        });
        let keys = lists.as_ref().map(|lists| {
            let bytes: Vec<u8> = lists.iter().flat_map(|key| key.to_le_bytes()).collect();
            client.create_from_slice(&bytes)
        });
        let is_choice = matches!(args.what, What::Picks | What::Choice);
        ensure!(
            !is_choice || (listed.is_none() && !args.all),
            "keys are picked from all up to a query's own"
        );
        let columns = listed.unwrap_or(n);
        let rows = (args.numbers / (batch * columns)).clamp(1, queries);
        let shapes = ([batch, heads, queries, width], [batch, kv_heads, n, width]);
        let picks = KeyPicks {
            most: args.most.min(n),
            near: args.near,
            seen: None,
        };
        let sizes_of = |rows| PairSizes::new(shapes.0, shapes.1, rows, listed);
        let sizes: Vec<PairSizes> = match is_choice {
            true => picks.slabs(&sizes_of([0, queries]), args.numbers),
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
        let pairs = sizes.iter().map(PairSizes::numbers).max().unwrap_or(0);
        let (of_pairs, parts, gradients) = match args.what {
            What::Scores | What::Weights | What::Choice => (4 * pairs, 1, [4, 4]),
            What::Picks => (0, 1, [4, 4]),
            What::ByQueries => (
                0,
                1,
                [width, 1].map(|width| 4 * batch * heads * queries * width),
            ),
            What::ByKeys => {
                let parts = key_parts(client, &sizes[0]);
                (0, parts, [4 * parts * batch * n * width, 4])
            }
        };
        // Outputs that are compared are no numbers before.
        let output = |bytes: usize| match args.verify {
            true => client.create_from_slice(&vec![0xff; bytes]),
            false => client.empty(bytes),
        };
        let mut pair_numbers = Vec::new();
        let of_pairs = match of_pairs {
            0 => {
                pair_numbers = drawn(pairs);
                // What the first queries do not see has none.
                if listed.is_none() && !is_choice {
                    for (at, number) in pair_numbers.iter_mut().enumerate() {
                        let seen = n - queries + at / n % rows + 1;
                        if at % n >= seen {
                            *number = 0.0;
                        }
                    }
                }
                upload(&pair_numbers, Dtype::F32)
            }
            bytes => output(bytes),
        };
        let gradients = gradients.map(output);
        let picked = match is_choice {
            true => 4 * batch * queries * picks.most,
            false => 4,
        };
        let picked = output(picked);
        let kept = args.verify.then_some(Numbers {
            q: q_numbers,
            k: k_numbers,
            of_rows: row_numbers,
            keys: lists,
            of_pairs: pair_numbers,
        });
        Ok(Self {
            client: client.clone(),
            element,
            what: args.what,
            sum,
            parts,
            of_pairs,
            picks,
            lists: picked,
            gradients,
            sizes,
            q,
            k,
            of_rows,
            keys,
            raw: args.rounded.then_some([raw_q, raw_k]),
            kept,
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
        let PairSizes {
            batch,
            heads,
            seq,
            width,
            ..
        } = self.sizes[0];
        for (side, of, rows, out) in [
            (0, HadamardFp8::Queries, q, &self.q),
            (1, HadamardFp8::Keys, k, &self.k),
        ] {
            let size = [batch * heads[side] * seq[side], width];
            round_rows(&self.client, self.element, rows, size, of, out)?;
        }
        Ok(())
    }

    /// The keys in bytes, if they are rounded and a kernel takes them so.
    fn bytes(&self) -> Result<Option<KeyBytes>> {
        let is_sum = matches!(self.what, What::Scores | What::Weights | What::Choice);
        Ok(match self.raw.is_some() && is_sum {
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

    /// A launch.
    fn run_slab(&self, sizes: &PairSizes, bytes: Option<&KeyBytes>) -> Result<()> {
        let inputs = self.inputs(bytes);
        let of_pairs = IndexerGradients {
            inputs,
            by_scores: &self.of_pairs,
            factor: 1.0,
        };
        let [first, second] = &self.gradients;
        let client = &self.client;
        match self.what {
            What::Scores | What::Weights => {
                pair_sums(client, sizes, &inputs, &self.sum, &self.of_pairs)?;
            }
            What::Choice => {
                pair_sums(client, sizes, &inputs, &self.sum, &self.of_pairs)?;
                self.pick(sizes)?;
            }
            What::Picks => self.pick(sizes)?,
            What::ByQueries => by_queries(client, sizes, &of_pairs, [first, second])?,
            What::ByKeys => {
                let flags = [sizes.rows[0] > 0, true];
                by_keys(client, sizes, &of_pairs, (first, self.parts), flags)?;
            }
        }
        Ok(())
    }

    fn pick(&self, sizes: &PairSizes) -> Result<()> {
        let numbers = [&self.of_pairs, &self.lists];
        Ok(pick_keys(&self.client, sizes, &self.picks, numbers, None)?)
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let client = cubecl::Device::Cuda(Default::default()).client();
    if args.verify {
        return verify(&client, &args);
    }
    let call = Call::new(&client, &args)?;
    if args.enqueue_only {
        call.run()?;
        client.flush().map_err(|error| anyhow!("{error}"))?;
        return block_on(client.sync()).map_err(|error| anyhow!("{error:?}"));
    }
    let queries = args.queries.unwrap_or(args.n);
    let most = args.listed.unwrap_or(args.n);
    let seen = |at: usize| {
        if args.all {
            args.n
        } else {
            args.n - queries + at + 1
        }
    };
    let pairs: usize = (0..queries).map(|at| seen(at).min(most)).sum();
    // Gradients need two products.
    let products = match args.what {
        What::Scores | What::Weights | What::Choice => 2.0,
        What::Picks => 0.0,
        What::ByQueries | What::ByKeys => 4.0,
    };
    let flops = products * (args.batch * args.heads * args.width) as f64 * pairs as f64;
    let seconds = median(&client, args.repeats, || call.run())?;
    println!(
        "{:?} of {} x {} x {}, {queries} queries, {most} of {} keys, {:?}{}, {} slabs: {:9.3} ms {:7.1} TFLOP/s",
        args.what,
        args.batch,
        args.heads,
        args.width,
        args.n,
        args.dtype,
        if args.rounded { " rounded" } else { "" },
        call.sizes.len(),
        seconds * 1e3,
        flops / seconds / 1e12,
    );
    Ok(())
}
