//! Attention sums of blocks by sums over antidiagonals: `bench-choice`.

use anyhow::Result;
use blocksparse_bench::compare::{dot, ensure_within, softmax};
use blocksparse_bench::device::{poisoned, read_floats};
use blocksparse_bench::numbers::{BF16, F32};
use blocksparse_bench::runner::Tally;
use burn_sparse_select::kernels::selection::{Antidiagonals, antidiagonal_attention_sums};
use cubecl::client::Client;
use cubecl::server::Handle;
use rand_chacha::ChaCha8Rng;

use crate::choice_lists::Lists;

/// A call: its numbers here and on the device.
pub struct AttentionSums {
    of: Antidiagonals,
    inputs: Lists,
    out: Handle,
}

impl AttentionSums {
    pub fn new(client: &Client, of: Antidiagonals, rng: &mut ChaCha8Rng) -> Self {
        let written = of.lists[0] * of.rows.len() * of.seq[1].div_ceil(of.block);
        Self {
            inputs: Lists::new(client, of.lists, of.seq, of.width, rng),
            out: poisoned(client, written, F32),
            of,
        }
    }

    pub fn run(&self, client: &Client) -> Result<()> {
        antidiagonal_attention_sums(client, BF16, self.inputs.handles(), &self.of, &self.out)?;
        Ok(())
    }

    /// The attention sums of a row of blocks, by loops.
    fn row(&self, list: usize, row: usize) -> Vec<f64> {
        let of = &self.of;
        let ([seq_q, seq_kv], width, block, stride) = (of.seq, of.width, of.block, of.stride);
        let [q, k] = self.inputs.list(list);
        let mut attention_sums = vec![0.0; seq_kv.div_ceil(block)];
        let groups = row * block / stride..((row + 1) * block).min(seq_q).div_ceil(stride);
        for group in groups {
            let last = ((group + 1) * stride).min(seq_q) as i64 - 1 + seq_kv as i64 - seq_q as i64;
            let seen = |keys: &usize| !of.causal || (keys * stride) as i64 <= last;
            let score = |keys: &usize| -> f64 {
                let pairs =
                    (0..stride).map(|u| [group * stride + stride - 1 - u, keys * stride + u]);
                let pairs = pairs.filter(|[i, j]| *i < seq_q && *j < seq_kv);
                let products =
                    pairs.map(|[i, j]| dot(&q[i * width..][..width], &k[j * width..][..width]));
                products.sum::<f64>() * of.factor
            };
            let keys: Vec<usize> = (0..seq_kv.div_ceil(stride)).filter(seen).collect();
            let scores: Vec<f64> = keys.iter().map(score).collect();
            for (keys, weight) in keys.into_iter().zip(softmax(&scores).0) {
                attention_sums[keys * stride / block] += weight;
            }
        }
        attention_sums
    }

    fn verify(&self, client: &Client) -> Result<()> {
        self.run(client)?;
        let got: Vec<f64> = read_floats(client, &self.out, F32)?;
        let (of, blocks) = (&self.of, self.of.seq[1].div_ceil(self.of.block));
        for list in [0, of.lists[0] - 1] {
            for (at, row) in of.rows.clone().enumerate() {
                let got = &got[(list * of.rows.len() + at) * blocks..][..blocks];
                // Blocks that a row does not see are 0.
                for (block, (got, expected)) in got.iter().zip(self.row(list, row)).enumerate() {
                    let what = format_args!("{of:?}: {list}, {row}, {block}");
                    ensure_within(what, *got, expected, 1e-4)?;
                }
            }
        }
        Ok(())
    }
}

/// Small calls of every stride, causal and not, of all rows of blocks and of some.
pub fn verify(client: &Client, rng: &mut ChaCha8Rng, tally: &mut Tally) -> Result<()> {
    // Lists of queries and of keys, their lengths, and width, block and stride.
    let calls: [[usize; 7]; 6] = [
        [4, 1, 1000, 1000, 64, 64, 8],
        [2, 2, 400, 901, 16, 128, 8],
        [2, 1, 901, 400, 32, 128, 4],
        [2, 1, 700, 690, 16, 128, 2],
        [2, 1, 500, 500, 16, 128, 1],
        [6, 2, 3000, 3000, 128, 128, 16],
    ];
    for [lists, kv_lists, seq_q, seq_kv, width, block, stride] in calls {
        for causal in [true, false] {
            let all = seq_q.div_ceil(block);
            for rows in [0..all, 1..all, all / 2..all / 2 + 1] {
                if !tally.takes_next() {
                    continue;
                }
                let of = Antidiagonals {
                    lists: [lists, kv_lists],
                    seq: [seq_q, seq_kv],
                    width,
                    block,
                    stride,
                    causal,
                    factor: 0.25 / stride as f64,
                    rows,
                };
                AttentionSums::new(client, of, rng).verify(client)?;
            }
        }
    }
    Ok(())
}
