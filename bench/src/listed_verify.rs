//! Compares attention of queries to individual lists with loops in f64, for small calls.

use anyhow::{Context, Result, ensure};
use blocksparse_bench::compare::{dot, same_twice, softmax};
use blocksparse_bench::runner::Tally;
use cubecl::client::Client;

use super::{Args, Call, Plan, Way};

/// Query heads and KV heads, and the widths of keys and values.
type Kind = ([usize; 2], [usize; 2]);

/// Block size, blocks per list, and number of keys. The last of each has a block whose query list is split into parts.
const BLOCKS: [[usize; 3]; 5] = [
    [64, 3, 300],
    [16, 5, 210],
    [32, 1, 77],
    [128, 2, 390],
    [64, 2, 9000],
];
/// The second has more steps than fit, where a step has many keys.
const SINGLE_KEYS: [[usize; 3]; 4] = [[1, 40, 300], [1, 420, 700], [1, 1, 77], [1, 9, 9000]];

fn kinds() -> Vec<Kind> {
    let usual = [[64, 64], [128, 128], [192, 128], [64, 128], [192, 64]];
    let groups = [[16, 1], [32, 2], [32, 1], [48, 1], [64, 1], [128, 1]];
    // Head counts that do not fill a matrix, and unusual widths.
    let partly = [[1, 1], [8, 2], [12, 1], [20, 1], [72, 1], [100, 1]];
    let between = [[48, 48], [96, 80], [16, 112], [176, 16]];
    let mut kinds = groups
        .map(|heads| usual.map(|widths| (heads, widths)))
        .concat();
    kinds.extend(partly.map(|heads| (heads, [64, 64])));
    kinds.extend(between.map(|widths| ([16, 1], widths)));
    kinds.extend([
        ([4, 1], [48, 48]),
        ([8, 1], [128, 128]),
        ([24, 2], [192, 128]),
        ([8, 1], [64, 128]),
        ([24, 1], [128, 128]),
        ([80, 2], [64, 64]),
        ([64, 2], [192, 128]),
    ]);
    kinds
}

impl Call {
    /// Computes out, lse and the gradients with respect to q, k and v in f64.
    fn expected(&self) -> [Vec<f64>; 5] {
        let of = &self.request;
        let (n, heads, kv_heads, most) = (of.seq_q, of.heads, of.kv_heads, of.most);
        let (head_dim, value_dim) = (of.head_dim, of.value_dim);
        let [q, k, v, grad] = &self.numbers;
        let rows = q.len() / head_dim;
        let [mut out, mut dq, mut dk, mut dv] = [grad, q, k, v].map(|like| vec![0.0; like.len()]);
        let mut lse = vec![f64::NEG_INFINITY; rows];
        let add = |to: &mut [f64], row: usize, factor: f64, from: &[f32]| {
            let to = to[row * from.len()..].iter_mut().zip(from);
            to.for_each(|(to, &x)| *to += factor * f64::from(x));
        };
        for row in 0..rows {
            let (query, head) = (row % n, row / n);
            let kv_head = head / heads * kv_heads + head % heads / (heads / kv_heads);
            let list = &self.lists[(kv_head * n + query) * most..][..most];
            let keys: Vec<usize> = (list.iter().filter(|&&named| named >= 0))
                .flat_map(|&named| (0..of.block).map(move |at| named as usize * of.block + at))
                .filter(|&key| key < n)
                .map(|key| kv_head * n + key)
                .collect();
            let q_row = &q[row * head_dim..][..head_dim];
            let g_row = &grad[row * value_dim..][..value_dim];
            let [k_row, v_row] = [(k, head_dim), (v, value_dim)]
                .map(|(of, width)| move |key: usize| &of[key * width..][..width]);
            let scores = keys
                .iter()
                .map(|&key| dot(q_row, k_row(key)) * self.scale());
            let weights;
            (weights, lse[row]) = softmax(&scores.collect::<Vec<f64>>());
            for (&key, &p) in keys.iter().zip(&weights) {
                add(&mut out, row, p, v_row(key));
                add(&mut dv, key, p, g_row);
            }
            let made = out[row * value_dim..].iter().zip(g_row);
            let delta: f64 = made.map(|(o, &g)| o * f64::from(g)).sum();
            for (&key, &p) in keys.iter().zip(&weights) {
                let by_score = p * (dot(g_row, v_row(key)) - delta) * self.scale();
                add(&mut dq, row, by_score, k_row(key));
                add(&mut dk, key, by_score, q_row);
            }
        }
        [out, lse, dq, dk, dv]
    }
}

/// Returns the largest error relative to the largest element, and its index.
fn furthest(found: &[f64], expected: &[f64]) -> (f64, usize) {
    let finite = expected.iter().filter(|x| x.is_finite());
    let scale = finite.fold(0.1, |most: f64, x| most.max(x.abs()));
    let off = found.iter().zip(expected).map(|(x, y)| match x == y {
        true => 0.0,
        false if x.is_finite() && y.is_finite() => (x - y).abs() / scale,
        false => f64::INFINITY,
    });
    let places = off.zip(0..);
    places.fold((0.0, 0), |a, b| if b.0 > a.0 { b } else { a })
}

/// Checks one call and all its results. Returns whether its implementation supports it.
fn check(client: &Client, name: &str, batch: usize, args: &Args, seed: u64) -> Result<bool> {
    let way = args.way.unwrap_or(Way::Queries);
    let new = || Call::new(client, batch, args, seed);
    let call = new()?;
    if way != Way::Queries && call.plan(way).is_none() {
        println!("{name}: not so");
        return Ok(false);
    }
    let found = same_twice(|| {
        let call = new()?;
        let plan = call
            .plan(way)
            .context("there is no mainloop over these lists")?;
        call.forward(plan)?;
        call.backward(plan)?;
        call.read()
    })?;
    let expected = call.expected();
    let names = ["out", "lse", "dq", "dk", "dv"];
    let mut pairs: Vec<_> = names.into_iter().zip(found.iter().zip(&expected)).collect();
    let in_parts;
    if let (2.., Some(Plan::Queries(mainloops) | Plan::Neighbours(mainloops))) =
        (args.block, call.plan(way))
    {
        call.forward_in_parts(mainloops)?;
        in_parts = call.read()?;
        let names = ["out in parts", "lse in parts"].into_iter();
        pairs.extend(names.zip(in_parts.iter().zip(&expected)));
    }
    let twice;
    if let Some(Plan::Blocks([plan, _])) = call.plan(way) {
        // Continued from itself, the result is the same with twice the weights.
        for carry in [false, true] {
            call.forward_by_block(plan, carry)?;
        }
        let [out, lse, ..] = call.read()?;
        let lse: Vec<f64> = lse.iter().map(|log| log - std::f64::consts::LN_2).collect();
        twice = [out, lse];
        let names = ["out twice", "lse twice"].into_iter();
        pairs.extend(names.zip(twice.iter().zip(&expected)));
    }
    for (of, (found, expected)) in pairs {
        let (off, at) = furthest(found, expected);
        let (got, exact) = (found[at], expected[at]);
        ensure!(
            off <= 1e-2,
            "{of} errs by {off:.2e} at {at}: got {got}, expected {exact}"
        );
    }
    Ok(true)
}

/// Compares small calls of every width and number of heads, with lists of blocks or of single keys, with loops in f64, and checks that they have the same bits
/// twice.
pub fn verify(client: &Client, args: &Args) -> Result<()> {
    let mut tally = Tally::new(args.shard)?;
    let is_together = args.way == Some(Way::Neighbours);
    for ([heads, kv_heads], [head_dim, value_dim]) in kinds().into_iter().skip(args.skip) {
        let calls: &[_] = match args.block {
            1 => &SINGLE_KEYS,
            _ => &BLOCKS,
        };
        for &[block, most, n] in calls {
            let hot = n > 1000;
            if (hot && heads != 16) || (n == 700 && heads < 48 && !is_together) {
                continue;
            }
            if !tally.has_next() {
                continue;
            }
            let overlap = match is_together && tally.number.is_multiple_of(2) {
                true => 0.9,
                false => 0.0,
            };
            let args = Args {
                n,
                heads,
                kv_heads,
                head_dim,
                value_dim,
                block,
                most,
                alike: 1,
                overlap,
                hot,
                ..args.clone()
            };
            let name = format!(
                "{heads} heads on {kv_heads}, {head_dim} and {value_dim} wide, {n} keys, {most} blocks of {block}"
            );
            let batch = if hot { 1 } else { 2 };
            match check(client, &name, batch, &args, tally.number as u64) {
                Ok(false) => {}
                found => {
                    let is_right = found.is_ok();
                    tally.count(&name, found.map(|_| ()));
                    println!("{name}: {}", if is_right { "right" } else { "wrong" });
                }
            }
        }
    }
    tally.finish("calls")
}
