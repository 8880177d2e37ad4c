//! All rounds of hashing in one attention call, over sorted slots that positions mask.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use burn::tensor::{DType, Int, Tensor};
use burn_blocksparse::internal::{gather_rows, merge_parts};
use burn_blocksparse::layout::{BlockMask, PositionMask};
use burn_blocksparse::{BlockLayout, DeviceLayout, LayoutShape, SparseAttentionCall};
use burn_sparse_select::internal::{LayoutCache, sort_by_bucket};

use super::routing::block_size;
use crate::error::Result;
use burn_blocksparse::internal::arange;

/// Assignment of tokens to slots in all rounds, as i32 tensors on the device, without autodiff.
pub(super) struct Placed {
    /// Token in each slot of all rounds, −1 for filler: `[batch, heads, rounds · places]`.
    tokens: Tensor<3, Int>,
    /// Slot of each token in each round: `[batch, heads, seq, rounds]`.
    places: Tensor<4, Int>,
    /// Inverse: `token · rounds + round` in each slot, negative for filler.
    choices: Tensor<3, Int>,
    chunks: usize,
    bucket: usize,
}

impl Placed {
    /// Sorts tokens by their bucket in each round, `[batch, heads, rounds, seq]`, below `count`: one sort for all rounds.
    pub fn new(
        buckets: Tensor<4, Int>,
        count: usize,
        [chunks, bucket]: [usize; 2],
    ) -> Result<Self> {
        let [batch, heads, rounds, seq] = buckets.dims();
        let all = chunks * bucket;
        let buckets = buckets.reshape([batch * heads, rounds, seq]);
        let [tokens, places] = sort_by_bucket(buckets, count, all)?;
        let dims = tokens.dims();
        let round = arange(rounds, &tokens.device()).reshape([1, rounds, 1]);
        let none = tokens.clone().lower_elem(0);
        let choices = tokens.clone() * rounds as i32 + round.clone().expand(dims);
        let choices = choices.mask_fill(none, -1);
        let first = (round * all as i32).expand(places.dims());
        let places = (places + first).swap_dims(1, 2);
        Ok(Self {
            tokens: tokens.reshape([batch, heads, rounds * all]),
            places: places.reshape([batch, heads, seq, rounds]),
            choices: choices.reshape([batch, heads, rounds * all]),
            chunks,
            bucket,
        })
    }

    /// Computes attention of tokens to their chunk and the one before, in every round, merged by lse with the token itself at `self_alone`. Returns out and
    /// lse like [`lsh_attention`](super::lsh::lsh_attention). All three inputs have one dtype.
    pub fn attend(
        self,
        [query, key, value]: [Tensor<4>; 3],
        rule: PositionMask,
        self_alone: f64,
    ) -> Result<(Tensor<4>, Tensor<3>)> {
        let (tokens, places) = (self.tokens, self.places);
        let [batch, heads, seq, rounds] = places.dims();
        let layout = layout([heads, rounds, self.chunks, self.bucket])?;
        let at_places = |x: Tensor<4>| gather_rows(x, tokens.clone(), places.clone());
        let (query, key) = (at_places(query)?, at_places(key)?);
        let others = at_places(value.clone())?;
        let seen = DeviceLayout::from_own_positions(&layout, tokens, rule)?;
        let others = SparseAttentionCall::new(query, key, others, &seen).run_with_lse()?;
        let dtype: DType = others.1.dtype();
        // lse of a token that sees nothing in any round.
        let alone = self_alone + (rounds as f64).ln();
        let device = value.device().without_autodiff();
        let alone = Tensor::full([batch, heads, seq], alone, (&device, dtype));
        let own = (value, alone);
        Ok(merge_parts(own, others, places, self.choices))
    }
}

/// Recent layouts of all calls: they do not depend on the tokens.
static LAYOUTS: LazyLock<LayoutCache> = LazyLock::new(LayoutCache::default);

/// Returns the layout in which each chunk of each round sees itself and the one before, the first the last.
fn layout(sizes: [usize; 4]) -> Result<BlockLayout> {
    let [heads, rounds, chunks, bucket] = sizes;
    let shape = LayoutShape::square(heads, rounds * chunks * bucket, block_size(bucket));
    LAYOUTS.get(name(sizes), shape, || made(sizes))
}

fn name([_, rounds, chunks, bucket]: [usize; 4]) -> String {
    format!("chunks of {bucket} and those before, {rounds} rounds of {chunks}")
}

fn made(sizes: [usize; 4]) -> Result<BlockLayout> {
    let [heads, rounds, chunks, bucket] = sizes;
    let places = rounds * chunks * bucket;
    let b = block_size(bucket);
    let shape = LayoutShape::square(1, places, b);
    // Chunks are numbered over all rounds.
    let before = |chunk: usize| chunk / chunks * chunks + (chunk + chunks - 1) % chunks;
    let sees = |own: usize, other: usize| other == own || other == before(own);
    let of_block = |block: usize| block * b / bucket..=(block * b + b - 1).min(places - 1) / bucket;
    let of_chunk = |chunk: usize| chunk * bucket / b..=(chunk * bucket + bucket - 1) / b;
    let layout = BlockLayout::from_row_fn(name(sizes), shape, |_, q_block| {
        let near = of_block(q_block).flat_map(|own| [own, before(own)]);
        let blocks: BTreeSet<usize> = near.flat_map(of_chunk).collect();
        let mask = |kv_block: usize| match bucket.is_multiple_of(b) {
            true => BlockMask::corner(b, b, b),
            false => BlockMask::from_fn(b, |r, c| {
                sees((q_block * b + r) / bucket, (kv_block * b + c) / bucket)
            }),
        };
        (blocks.into_iter())
            .map(|kv_block| (kv_block, mask(kv_block)))
            .collect()
    })?;
    Ok(layout.of_first_head(heads)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_see_themselves_and_the_one_before() {
        for [rounds, chunks, bucket] in [[1, 2, 5], [3, 4, 16], [2, 6, 24]] {
            let dense = made([2, rounds, chunks, bucket]).unwrap().to_dense(1);
            for (i, row) in dense.iter().enumerate() {
                for (j, &seen) in row.iter().enumerate() {
                    let [(r, own), (s, other)] =
                        [i, j].map(|at| (at / bucket / chunks, at / bucket % chunks));
                    let expected = r == s && (other == own || (other + 1) % chunks == own);
                    assert_eq!(seen, expected, "{rounds}, {chunks}, {bucket}: {i}, {j}");
                }
            }
        }
    }
}
