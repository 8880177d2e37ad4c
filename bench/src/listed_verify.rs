//! Attention of queries that walk lists of their own against loops in f64, of small calls.

use anyhow::{Result, ensure};
use burn_sparse_select::kernels::listed::ListedRequest;
use cubecl::client::Client;

use super::{Args, Call, CalledWay};

impl Call {
    /// Out, lse and the gradients by q, k and v, in f64.
    fn expected(&self) -> [Vec<f64>; 5] {
        let ListedRequest {
            heads,
            kv_heads,
            seq_q: n,
            head_dim,
            value_dim,
            block,
            most,
            ..
        } = self.request;
        let [q, k, v, grad] = &self.numbers;
        let mut made = [&q[..], &[], &q[..], &k[..], &v[..]].map(|x| vec![0.0; x.len()]);
        let rows = q.len() / head_dim;
        made[0] = vec![0.0; rows * value_dim];
        made[1] = vec![f64::NEG_INFINITY; rows];
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            a.iter()
                .zip(b)
                .map(|(&a, &b)| f64::from(a) * f64::from(b))
                .sum()
        };
        for row in 0..rows {
            let (query, head) = (row % n, row / n);
            let kv_head = head / heads * kv_heads + head % heads / (heads / kv_heads);
            let list = &self.lists[(kv_head * n + query) * most..][..most];
            let keys: Vec<usize> = (list.iter().filter(|&&named| named >= 0))
                .flat_map(|&named| (0..block).map(move |at| named as usize * block + at))
                .filter(|&key| key < n)
                .map(|key| kv_head * n + key)
                .collect();
            let q_row = &q[row * head_dim..][..head_dim];
            let g_row = &grad[row * value_dim..][..value_dim];
            let score = |key: &usize| dot(q_row, &k[key * head_dim..][..head_dim]) * self.scale();
            let scores: Vec<f64> = keys.iter().map(score).collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
            if keys.is_empty() {
                continue;
            }
            made[1][row] = top + total.ln();
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp() / total).collect();
            for (key, p) in keys.iter().zip(&weights) {
                for c in 0..value_dim {
                    made[0][row * value_dim + c] += p * f64::from(v[key * value_dim + c]);
                }
            }
            let out = &made[0][row * value_dim..][..value_dim];
            let delta: f64 = out.iter().zip(g_row).map(|(o, &g)| o * f64::from(g)).sum();
            for (key, p) in keys.iter().zip(&weights) {
                let by_weight = dot(g_row, &v[key * value_dim..][..value_dim]);
                let ds = p * (by_weight - delta) * self.scale();
                for c in 0..head_dim {
                    made[2][row * head_dim + c] += ds * f64::from(k[key * head_dim + c]);
                    made[3][key * head_dim + c] += ds * f64::from(q_row[c]);
                }
                for c in 0..value_dim {
                    made[4][key * value_dim + c] += p * f64::from(g_row[c]);
                }
            }
        }
        made
    }
}

/// Small calls of every width and number of heads, with lists of blocks or of single keys, against loops in f64, and the same bits twice.
pub fn verify(
    client: &Client,
    keys: bool,
    way: CalledWay,
    skip: usize,
    [shard, of]: [usize; 2],
) -> Result<()> {
    ensure!(
        shard < of,
        "--shard is {shard}, of {of} parts numbered from 0"
    );
    let (mut number, mut checked, mut failed) = (0, 0, 0);
    let usual = [(64, 64), (128, 128), (192, 128), (64, 128), (192, 64)];
    let groups = [(16, 1), (32, 2), (32, 1), (48, 1), (64, 1), (128, 1)];
    // Heads that do not fill a matrix, and widths between.
    let partly = [(1, 1), (8, 2), (12, 1), (20, 1), (72, 1), (100, 1)];
    let between = [(48, 48), (96, 80), (16, 112), (176, 16)];
    let mut kinds: Vec<_> = (groups.into_iter())
        .flat_map(|heads| usual.map(|widths| (heads, widths)))
        .collect();
    kinds.extend(partly.map(|heads| (heads, (64, 64))));
    kinds.extend(between.map(|widths| ((16, 1), widths)));
    kinds.extend([
        ((4, 1), (48, 48)),
        ((8, 1), (128, 128)),
        ((24, 2), (192, 128)),
        ((8, 1), (64, 128)),
        ((24, 1), (128, 128)),
        ((80, 2), (64, 64)),
        ((64, 2), (192, 128)),
    ]);
    for ((heads, kv_heads), (head_dim, value_dim)) in kinds.into_iter().skip(skip) {
        // The last of each have a block whose list has parts.
        let blocks = [
            (64, 3, 300),
            (16, 5, 210),
            (32, 1, 77),
            (128, 2, 390),
            (64, 2, 9000),
        ];
        // And the second of single keys is more steps than there is room for, where a step has many.
        let single = [(1, 40, 300), (1, 420, 700), (1, 1, 77), (1, 9, 9000)];
        let calls: &[_] = if keys { &single } else { &blocks };
        for &(block, most, n) in calls {
            let hot = n > 1000;
            let is_together = way == CalledWay::Neighbours;
            if (hot && heads != 16) || (n == 700 && heads < 48 && !is_together) {
                continue;
            }
            number += 1;
            if number % of != shard {
                continue;
            }
            let args = Args {
                n,
                heads,
                kv_heads,
                head_dim,
                value_dim,
                block,
                most,
                alike: 1,
                overlap: if is_together && number % 2 == 0 {
                    0.9
                } else {
                    0.0
                },
                hot,
                repeats: 1,
                verify: true,
                shard,
                of,
                skip,
                way: Some(way),
                enqueue_only: false,
            };
            let name = format!(
                "{heads} heads on {kv_heads}, {head_dim} and {value_dim} wide, {n} keys, {most} blocks of {block}"
            );
            let batch = if hot { 1 } else { 2 };
            let new = || Call::new(client, batch, &args, number as u64);
            let made = new()?;
            let is_taken = match way {
                CalledWay::Walk => true,
                CalledWay::Neighbours => made.neighbours.is_some(),
                CalledWay::Tiles => made.tiles.is_some(),
            };
            if !is_taken {
                println!("{name}: not so");
                continue;
            }
            checked += 1;
            let run = || -> Result<(Call, [Vec<f64>; 5])> {
                let call = new()?;
                call.forward(way.into())?;
                call.backward(way.into())?;
                let found = call.read()?;
                Ok((call, found))
            };
            let (call, found) = run()?;
            let (_, again) = run()?;
            let expected = call.expected();
            let names = ["out", "lse", "dq", "dk", "dv"];
            let mut is_wrong = found != again;
            if is_wrong {
                println!("{name}: other bits");
            }
            let mut pairs: Vec<_> = names.into_iter().zip(found.iter().zip(&expected)).collect();
            let mut in_parts = None;
            if !keys {
                call.forward_in_parts()?;
                in_parts = Some(call.read()?);
            }
            if let Some(parts) = &in_parts {
                let of_parts = ["out in parts", "lse in parts"].into_iter();
                pairs.extend(of_parts.zip(parts.iter().zip(&expected)));
            }
            for (of, (found, expected)) in pairs {
                let finite = expected.iter().filter(|x| x.is_finite());
                let scale = finite.fold(0.1, |most: f64, x| most.max(x.abs()));
                let pairs = found.iter().zip(expected);
                let worst = pairs.enumerate().map(|(at, (x, y))| match x == y {
                    true => (0.0, at),
                    false if x.is_finite() && y.is_finite() => ((x - y).abs() / scale, at),
                    false => (f64::INFINITY, at),
                });
                let worst = worst.fold((0.0, 0), |a, b| if b.0 > a.0 { b } else { a });
                if worst.0 > 1e-2 {
                    let (got, exact) = (found[worst.1], expected[worst.1]);
                    println!(
                        "{name}: {of} errs by {:.2e} at {}: got {got}, expected {exact}",
                        worst.0, worst.1
                    );
                    is_wrong = true;
                }
            }
            failed += u64::from(is_wrong);
            println!("{name}: {}", if is_wrong { "wrong" } else { "right" });
        }
    }
    println!("{checked} calls, {failed} failed");
    ensure!(failed == 0, "{failed} calls are wrong");
    Ok(())
}
