//! The blocks that single queries choose by the means of their keys: `bench-choice`.

use anyhow::{Result, ensure};
use blocksparse_bench::compare::{dot, same_twice};
use blocksparse_bench::device::{poisoned, read_ints};
use blocksparse_bench::numbers::{BF16, F32};
use blocksparse_bench::runner::Tally;
use burn_sparse_select::kernels::selection::{GateSizes, query_picks};
use cubecl::client::Client;
use rand_chacha::ChaCha8Rng;

use crate::choice_lists::Lists;

/// How far the products of two blocks are apart at least, of which one must be before the other: a mean is rounded to two numbers of 8 bits each.
const ROUNDED: f64 = 1e-3;

/// Blocks before a query's own, by falling product with the mean of their keys.
fn expected(of: &GateSizes, q: &[f32], k: &[f32], position: usize) -> Vec<(usize, f64)> {
    let blocks = k.chunks_exact(of.block * of.width).enumerate();
    let mut blocks: Vec<(usize, f64)> = (blocks.take(position / of.block))
        .map(|(block, keys)| {
            let products = keys.chunks(of.width).map(|key| dot(q, key));
            (block, products.sum::<f64>() / of.block as f64)
        })
        .collect();
    blocks.sort_by(|a, b| b.1.total_cmp(&a.1));
    blocks
}

/// Choices of small calls, in one product, against loops in f64; and the same twice.
pub fn verify(client: &Client, rng: &mut ChaCha8Rng, tally: &mut Tally) -> Result<()> {
    // Lists of queries and of keys, their lengths, and width, block and most.
    let calls: [[usize; 7]; 5] = [
        [4, 1, 1000, 1000, 64, 16, 2],
        [2, 2, 300, 901, 128, 32, 3],
        [2, 1, 510, 510, 32, 4, 8],
        [1, 1, 129, 700, 96, 100, 1],
        [3, 3, 700, 700, 64, 8, 5],
    ];
    for [lists, kv_lists, seq_q, seq_kv, width, block, most] in calls {
        if !tally.takes_next() {
            continue;
        }
        let of = GateSizes {
            lists: [lists, kv_lists],
            seq: [seq_q, seq_kv],
            width,
            block,
            most,
        };
        let inputs = Lists::new(client, of.lists, of.seq, width, rng);
        let got = same_twice(|| {
            ensure!(of.is_served(client, BF16), "{of:?} is not served");
            let picks = poisoned(client, lists * seq_q * most, F32);
            query_picks(client, BF16, inputs.handles(), &of, &picks)?;
            read_ints(client, &picks)
        })?;
        for (row, got) in got.chunks(most).enumerate() {
            let (list, query) = (row / seq_q, row % seq_q);
            let [q, k] = inputs.list(list);
            let q = &q[query * width..][..width];
            let all = expected(&of, q, k, query + seq_kv - seq_q);
            for (place, &block) in got.iter().enumerate() {
                let is_right = match all.get(place) {
                    None => block == -1,
                    // One with the same product, but for rounding.
                    Some((_, product)) => {
                        let own = all.iter().find(|(other, _)| *other as i32 == block);
                        own.is_some_and(|own| (own.1 - product).abs() < ROUNDED)
                            && !got[..place].contains(&block)
                    }
                };
                ensure!(
                    is_right,
                    "{of:?}: row {row}, {got:?}, {:?}",
                    &all[..all.len().min(9)]
                );
            }
        }
    }
    Ok(())
}
