//! DeepSeek sparse attention (DSA: DeepSeek-V3.2-Exp, 2025, §2): an indexer scores single keys, and each query attends to those of the highest scores.
//!
//! ```text
//! mod      the choice, and attention over it
//! scores   the indexer's scores, of some queries at a time
//! loss     what the indexer learns by
//! ```

mod loss;
mod scores;

use burn::tensor::{DType, Int, Tensor};

use crate::error::OpError;
use crate::options::AttentionOptions;
use crate::paged::highest_keys;
use crate::selection::key_lists::{KeyLists, attention_with_keys};
pub use loss::DsaTarget;
pub use scores::DsaIndex;
use scores::Scores;

/// DeepSeek sparse attention (DeepSeek-V3.2-Exp, 2025, §2): every query attends to the `keep` keys up to its own position that a lightning indexer scores
/// highest,
///
/// ```text
/// x[i, j] = (index_heads · index_dim)^−½ · Σ_u w[i, u] · relu(q[i, u] · k[j])
/// ```
///
/// with a few narrow heads of queries of its own, one key a token, and weights; all heads of the attention have one list. Of equal scores the earlier key is
/// chosen, and NaN is the lowest; where there are no more keys than `keep` all are. A choice follows from earlier tokens alone.
///
/// The choice has no gradient. The indexer learns by [`loss`](Self::loss): the paper trains it alone for 1,000 steps against dense attention
/// ([`DsaTarget::All`]), and then beside the model, whose own loss does not reach it, over the chosen keys ([`DsaTarget::Chosen`]); its
/// inputs are detached from the model. The paper has 64 heads of width 128 and `keep` 2,048.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{AttentionOptions, Dsa, DsaIndex, DsaTarget};
///
/// let device = Device::flex().autodiff();
/// let random = |heads, width| Tensor::<4>::random([1, heads, 64, width], Distribution::Default, &device);
/// let (q, k, v) = (random(4, 16), random(1, 16), random(1, 16));
/// // Two index heads of width 8, from the tokens, which the model does not learn by.
/// let queries = random(2, 8).require_grad();
/// let index = DsaIndex::new(queries.clone(), random(1, 8), random(2, 1).squeeze_dim(3))?;
/// let dsa = Dsa::new(12)?;
/// let lists = dsa.choose(&index)?;
/// let out = dsa.attention(q.clone(), k.clone(), v, lists.clone(), AttentionOptions::default())?;
/// assert_eq!(out.dims(), [1, 4, 64, 16]);
/// let loss = dsa.loss(&index, [&q, &k], None, DsaTarget::Chosen(&lists))?;
/// assert_eq!(queries.grad(&loss.backward()).unwrap().dims(), [1, 2, 64, 8]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dsa {
    keep: usize,
    near: usize,
}

impl Dsa {
    /// Of so many keys.
    ///
    /// # Errors
    /// [`OpError`] if it is 0.
    pub fn new(keep: usize) -> Result<Self, OpError> {
        match keep {
            0 => Err(OpError::argument("keep", "at least 1", 0)),
            _ => Ok(Self { keep, near: 0 }),
        }
    }

    /// The same with so many keys up to a query's own always among the chosen: an indexer that has not learned anything yet chooses at random, and a model
    /// that begins without the nearest keys learns slowly. 0, as in the paper, is none.
    ///
    /// # Errors
    /// [`OpError`] if it is more than are kept.
    pub fn with_near(self, near: usize) -> Result<Self, OpError> {
        match near > self.keep {
            true => {
                let expected = format!("at most keep, which is {}", self.keep);
                Err(OpError::argument("near", expected, near))
            }
            false => Ok(Self { near, ..self }),
        }
    }

    /// Keys that a query attends to, at most.
    pub fn keep(&self) -> usize {
        self.keep
    }

    /// Keys up to a query's own that are always among them.
    pub fn near(&self) -> usize {
        self.near
    }

    /// The keys that each query attends to, one list for all heads. The last query sits at the last key, so that the queries of new tokens choose among all
    /// keys that a cache has. Scores are in memory for some queries at a time, 2²⁴ numbers of them. Nothing is read back where kernels run.
    ///
    /// # Errors
    /// [`OpError`] if there are more queries than keys.
    pub fn choose(&self, index: &DsaIndex) -> Result<KeyLists, OpError> {
        let index = index.clone().without_autodiff();
        let [batch, _, seq_q, _] = index.q.dims();
        let seq_kv = index.seq_kv();
        let most = self.keep.min(seq_kv);
        let device = index.q.device();
        let ints = (&device, DType::I32);
        let first = (seq_kv - seq_q) as i64;
        if seq_kv <= self.keep {
            // There is nothing to choose.
            let keys = Tensor::<1, Int>::arange(0..seq_kv as i64, ints);
            let keys = keys.reshape([1, 1, 1, seq_kv]);
            let keys = keys.expand([batch, 1, seq_q, seq_kv]);
            let positions = Tensor::<1, Int>::arange(first..seq_kv as i64, ints);
            let positions = positions.reshape([1, 1, seq_q, 1]);
            let later = keys
                .clone()
                .greater(positions.expand([batch, 1, seq_q, seq_kv]));
            let keys = keys.mask_fill(later, -1);
            return Ok(KeyLists::of_unique(keys, seq_kv, true));
        }
        let scores = Scores::new(&index);
        let mut chosen = Vec::new();
        for rows in scores.slabs(scores.heads()) {
            let count = rows.len();
            let x = scores.of_rows(rows.clone());
            let seen = Tensor::<1, Int>::arange(
                first + rows.start as i64 + 1..first + rows.end as i64 + 1,
                ints,
            );
            let x = match self.near {
                0 => x,
                near => {
                    let wide = [1, count, seq_kv];
                    let keys = Tensor::<1, Int>::arange(0..seq_kv as i64, ints);
                    let keys = keys.reshape([1, 1, seq_kv]).expand(wide);
                    let least = seen.clone().sub_scalar(near as i32);
                    let least = least.reshape([1, count, 1]).expand(wide);
                    let is_near = keys.greater_equal(least);
                    x.mask_fill(is_near.expand([batch, count, seq_kv]), f32::INFINITY)
                }
            };
            chosen.push(highest_keys(x, seen, most));
        }
        let keys = match chosen.len() {
            1 => chosen.remove(0),
            _ => Tensor::cat(chosen, 1),
        };
        let keys = keys.reshape([batch, 1, seq_q, most]);
        Ok(KeyLists::of_unique(keys, seq_kv, true))
    }

    /// The scores of all pairs, f32 `[batch, seq_q, seq_kv]`, without autodiff; those of keys that a query does not see among them: for looking at.
    pub fn scores(&self, index: &DsaIndex) -> Tensor<3> {
        let index = index.clone().without_autodiff();
        let scores = Scores::new(&index);
        let slabs = scores.slabs(scores.heads());
        let parts = slabs.into_iter().map(|rows| scores.of_rows(rows));
        Tensor::cat(parts.collect(), 1)
    }

    /// Attention to the keys of [`choose`](Self::choose): [`attention_with_keys`].
    ///
    /// # Errors
    /// As [`attention_with_keys`].
    pub fn attention(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        lists: KeyLists,
        options: AttentionOptions,
    ) -> Result<Tensor<4>, OpError> {
        attention_with_keys(q, k, v, lists, options).map(|(out, _)| out)
    }
}
