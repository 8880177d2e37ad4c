//! All rounds of hashing in one call of attention, over places that positions mask.

use std::sync::{Mutex, PoisonError};

use burn::tensor::{DType, Int, Tensor};
use burn_blocksparse::{
    AttentionOptions, BlockLayout, BlockMask, DeviceLayout, LayoutShape, PositionRule,
    attention_with_lse, merge_attention_at, rows_at,
};

use super::routing::block_size;
use super::unit;
use crate::TransformerError;

/// What rounds put where. All are i32 tensors on the device, without autodiff.
pub(super) struct Placed {
    /// The token at each place of each round, −1 for what fills up: `[batch, heads, places]` for each.
    pub tokens: Vec<Tensor<3, Int>>,
    /// The place of each token: `[batch, heads, seq]` for each.
    pub places: Vec<Tensor<3, Int>>,
    /// Chunks of a round.
    pub chunks: usize,
    /// Tokens of a chunk.
    pub bucket: usize,
}

impl Placed {
    /// Attention of tokens to those of their chunks and the ones before, in every round, merged by lse with themselves at `self_alone`: out and lse, as
    /// [`lsh_attention`](super::lsh::lsh_attention) has them. `qk` and `value` are of one dtype.
    pub fn attend(
        self,
        qk: Tensor<4>,
        value: Tensor<4>,
        rule: PositionRule,
        self_alone: f64,
    ) -> Result<(Tensor<4>, Tensor<3>), TransformerError> {
        let [batch, heads, seq, head_dim] = qk.dims();
        let [.., value_dim] = value.dims();
        let rounds = self.tokens.len();
        let all = self.chunks * self.bucket;
        let layout = layout([heads, rounds, self.chunks, self.bucket])?;
        // A token's places in all rounds, and of each place the token and the round.
        let places = self.places.into_iter().enumerate().map(|(round, places)| {
            let places = places.add_scalar((round * all) as i32);
            places.reshape([batch, heads, seq, 1])
        });
        let places = Tensor::cat(places.collect(), 3);
        let choices = self.tokens.iter().enumerate().map(|(round, tokens)| {
            let first = tokens.clone().mul_scalar(rounds as i32);
            first.add_scalar(round as i32)
        });
        let choices = Tensor::cat(choices.collect(), 2);
        let tokens = Tensor::cat(self.tokens, 2);
        let key = unit(qk.clone()).cast(value.dtype());
        let rows = Tensor::cat(vec![qk, key, value.clone()], 3);
        let rows = rows_at(rows, tokens.clone(), places.clone())?;
        let part = |from: usize, width: usize| rows.clone().slice_dim(3, from..from + width);
        let (query, key) = (part(0, head_dim), part(head_dim, head_dim));
        let placed = part(2 * head_dim, value_dim);
        let seen = DeviceLayout::from_positions(&layout, tokens.clone(), tokens, rule)?;
        let others = attention_with_lse(query, key, placed, &seen, AttentionOptions::default())?;
        let dtype: DType = others.1.dtype();
        // A token that sees nothing in any round.
        let alone = self_alone + (rounds as f64).ln();
        let alone = Tensor::full([batch, heads, seq], alone, (&value.device(), dtype));
        Ok(merge_attention_at((value, alone), others, places, choices)?)
    }
}

/// Sizes whose layouts are kept.
const KEPT: usize = 8;

/// Heads, rounds, chunks of a round and tokens of a chunk, and the layout.
type Known = ([usize; 4], BlockLayout);

/// The latest layouts of all calls: they are the same whatever the tokens are.
static LAYOUTS: Mutex<Vec<Known>> = Mutex::new(Vec::new());

/// Each chunk of each round with itself and the one before, the first with the last.
fn layout(sizes: [usize; 4]) -> Result<BlockLayout, TransformerError> {
    let mut known = LAYOUTS.lock().unwrap_or_else(PoisonError::into_inner);
    let found = match known.iter().position(|(of, _)| *of == sizes) {
        Some(at) => known.remove(at),
        None => (sizes, made(sizes)?),
    };
    let layout = found.1.clone();
    known.push(found);
    if known.len() > KEPT {
        known.remove(0);
    }
    Ok(layout)
}

fn made([heads, rounds, chunks, bucket]: [usize; 4]) -> Result<BlockLayout, TransformerError> {
    let places = rounds * chunks * bucket;
    let b = block_size(bucket);
    let shape = LayoutShape::square(1, places, b);
    // Chunks of all rounds are counted through.
    let before = |chunk: usize| chunk / chunks * chunks + (chunk + chunks - 1) % chunks;
    let sees = |own: usize, other: usize| other == own || other == before(own);
    let of_block = |block: usize| block * b / bucket..=(block * b + b - 1).min(places - 1) / bucket;
    let name = format!("chunks of {bucket} and those before, {rounds} rounds of {chunks}");
    let layout = BlockLayout::from_block_fn(name, shape, |_, q_block, kv_block| {
        let others = of_block(kv_block);
        let is_near = |own| others.contains(&own) || others.contains(&before(own));
        if !of_block(q_block).any(is_near) {
            return None;
        }
        Some(match bucket.is_multiple_of(b) {
            true => BlockMask::corner(b, b, b),
            false => BlockMask::from_fn(b, |r, c| {
                sees((q_block * b + r) / bucket, (kv_block * b + c) / bucket)
            }),
        })
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
