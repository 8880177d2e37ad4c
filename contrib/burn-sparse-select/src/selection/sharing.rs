//! Shared selection of the query heads of a KV head.

use std::fmt;

use burn::tensor::Tensor;

/// Reduction of scores over the query heads that share a KV head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum GqaReduction {
    /// Every query head selects separately.
    #[default]
    PerHead,
    /// Query heads of a KV head share a selection by the sum of their scores.
    Sum,
    /// Query heads of a KV head share a selection by the mean of their scores.
    Mean,
    /// Query heads of a KV head share a selection by the maximum of their scores.
    Max,
}

/// Text of each variant.
pub(crate) const WORDS: [(&str, GqaReduction); 4] = [
    ("no", GqaReduction::PerHead),
    ("sum", GqaReduction::Sum),
    ("mean", GqaReduction::Mean),
    ("max", GqaReduction::Max),
];

impl fmt::Display for GqaReduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = WORDS.iter().find(|(_, sharing)| sharing == self);
        f.write_str(word.map_or("", |(word, _)| word))
    }
}

impl GqaReduction {
    /// Reduces `[batch, heads, rows, blocks]` to `[batch, kv_heads, rows, blocks]`, if heads share a selection.
    pub(crate) fn reduce(self, scores: Tensor<4>, group: usize) -> Tensor<4> {
        if group == 1 || self == Self::PerHead {
            return scores;
        }
        let [batch, heads, rows, blocks] = scores.dims();
        let kv_heads = heads / group;
        let scores = scores.reshape([batch * kv_heads, group, rows, blocks]);
        let scores = match self {
            Self::Max => scores.max_dim(1),
            Self::Mean => scores.mean_dim(1),
            Self::Sum | Self::PerHead => scores.sum_dim(1),
        };
        scores.reshape([batch, kv_heads, rows, blocks])
    }

    /// Computes [`reduce`](Self::reduce) of `[heads][elements]`.
    pub(crate) fn reduce_reference(self, scores: Vec<f64>, heads: usize, group: usize) -> Vec<f64> {
        if group == 1 || self == Self::PerHead {
            return scores;
        }
        let numbers = scores.len() / heads;
        let of = |head: usize, at: usize| scores[head * numbers + at];
        let reduced = (0..heads / group).flat_map(|kv_head| {
            let members = kv_head * group..(kv_head + 1) * group;
            (0..numbers).map(move |at| {
                let members = members.clone().map(|head| of(head, at));
                match self {
                    Self::Max => members.fold(f64::NEG_INFINITY, f64::max),
                    Self::Mean => members.sum::<f64>() / group as f64,
                    Self::Sum | Self::PerHead => members.sum(),
                }
            })
        });
        reduced.collect()
    }
}
