//! DeepSeek sparse attention (DSA: DeepSeek-V3.2-Exp, 2025, §2): an indexer scores single keys, and each query attends to those with the highest scores.

// mod      selection, also among listed keys, and attention over it
// scores   the indexer's scores in Burn's operations
// slabs    scores by kernels or by operations
// loss     training loss of the indexer
// fp8      queries and keys in fp8
// found    compared keys, and a loss with its gradients
// kernels  selection and loss by kernels
// blocks   two-stage selection
#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
pub mod ops;

mod blocks;
mod found;
mod fp8;
#[cfg(feature = "cube")]
pub(crate) mod kernels;
mod loss;
mod scores;
mod slabs;

pub use blocksparse::{HADAMARD_WIDTHS, HadamardFp8};

use burn::tensor::{Bool, DType, IndexingUpdateOp, Int, Tensor};

use crate::dsa::blocks::Blocks;
use crate::selection::key_lists::{TokenIndices, token_sparse_attention};
use crate::selection::parts::joined;
use crate::selection::token_order::topk_rows;
use burn_blocksparse::internal::arange;
use burn_blocksparse::{AttentionOptions, OpError};
pub use found::DsaTarget;
pub use scores::{DsaIndex, DsaLists};
pub(crate) use scores::{check_index, together};
pub(crate) use slabs::Slabs;

/// DeepSeek sparse attention (DeepSeek-V3.2-Exp, 2025, §2). Every query attends to the `keep` keys, up to its own position, that a lightning indexer scores
/// highest:
///
/// ```text
/// x[i, j] = (index_heads · index_dim)^−½ · Σ_u w[i, u] · relu(q[i, u] · k[j])
/// ```
///
/// The indexer has a few narrow query heads of its own, one key per token, and weights of the heads; all heads of the attention share one list. Ties go to the
/// earlier key, and NaN sorts last; with at most `keep` keys all are selected. A selection depends on earlier tokens only.
///
/// The selection has no gradient. The indexer is trained by [`loss`](Self::loss): the paper trains it alone for 1,000 steps against dense attention
/// ([`DsaTarget::All`]), and then together with the model over the selected keys ([`DsaTarget::Chosen`]). The model's own loss does not reach the indexer,
/// whose inputs are detached from the model. The paper uses 64 heads of width 128 and `keep` 2,048.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::AttentionOptions;
/// use burn_sparse_select::dsa::{Dsa, DsaIndex, DsaTarget};
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
    numbers: usize,
    /// Blocks of the first stage, if there is one.
    within: Option<Blocks>,
}

/// Typical overlap of adjacent queries' lists with a trained indexer: .80 to .95 in the four layers of a small model (docs/dev/selection-measurements.md).
const OVERLAP: f64 = 0.85;

/// Default number of scores in memory at a time.
const NUMBERS: usize = 1 << 24;

impl Dsa {
    /// Selects `keep` keys per query.
    ///
    /// # Errors
    /// [`OpError`] if it is 0.
    pub fn new(keep: usize) -> Result<Self, OpError> {
        OpError::ensure_positive("keep", keep)?;
        Ok(Self {
            keep,
            near: 0,
            numbers: NUMBERS,
            within: None,
        })
    }

    /// Forces the last `near` keys up to a query's own. An untrained indexer selects at random, and a model that starts without the nearest keys learns slowly.
    /// The default is 0, as in the paper.
    ///
    /// # Errors
    /// [`OpError`] if `near` exceeds `keep`, or [`with_blocks`](Self::with_blocks) has too few blocks for it.
    pub fn with_near(self, near: usize) -> Result<Self, OpError> {
        blocksparse::ensure! { OpError; near <= self.keep => "near", format!("at most keep, which is {}", self.keep), near; }
        Self { near, ..self }.with_enough_blocks()
    }

    /// Sets the number of scores in memory at a time, rounded to whole queries. Default: 2²⁴. Smaller numbers are slower.
    ///
    /// # Errors
    /// [`OpError`] if it is 0.
    pub fn with_chunk_elements(self, numbers: usize) -> Result<Self, OpError> {
        OpError::ensure_positive("numbers", numbers)?;
        Ok(Self { numbers, ..self })
    }

    /// Returns the number of keys that a query attends to at most.
    pub fn keep(&self) -> usize {
        self.keep
    }

    /// Returns how many keys up to a query's own are always selected.
    pub fn near(&self) -> usize {
        self.near
    }

    /// Selects the keys that each query attends to, in one list for all heads. The last query is at the position of the last key, so the queries of new tokens
    /// select among all keys of a cache. Scores of some queries at a time are in memory, 2²⁴ elements. Reads nothing back where kernels run.
    ///
    /// # Errors
    /// [`OpError`] if there are more queries than keys.
    pub fn choose(&self, index: &DsaIndex) -> Result<TokenIndices, OpError> {
        let [batch, _, seq_q, _] = index.q.dims();
        let seq_kv = index.seq_kv();
        let keys = self.listed(index, None)?;
        let [_, _, most] = keys.dims();
        let keys = keys.reshape([batch, 1, seq_q, most]);
        TokenIndices::of_unique(keys, seq_kv, true).with_group_reuse(OVERLAP)
    }

    /// Returns the highest-scoring keys among those that queries see: `[batch, seq_q, most]`, ascending, then −1. `seen`, `[batch or 1, seq_q]`, is the number
    /// of keys that each query sees; by default those up to its position.
    fn listed(
        &self,
        index: &DsaIndex,
        seen: Option<Tensor<2, Int>>,
    ) -> Result<Tensor<3, Int>, OpError> {
        let index = index.clone().without_autodiff();
        let [batch, _, seq_q, _] = index.q.dims();
        let seq_kv = index.seq_kv();
        let most = self.keep.min(seq_kv);
        let device = index.q.device();
        let up_to_own = || {
            let seen = arange(seq_q, &device).add_scalar((seq_kv - seq_q + 1) as i32);
            seen.reshape([1, seq_q])
        };
        if let Some(of) = self.within
            && seq_kv > of.keys()
        {
            let seen = seen.unwrap_or_else(up_to_own);
            return self.listed_in_blocks(&index, seen, of);
        }
        #[cfg(feature = "cube")]
        if seq_kv > self.keep {
            let lists = kernels::top_k(&index, seen.as_ref(), [most, self.near], self.numbers);
            if let Some(lists) = lists {
                return Ok(lists);
            }
        }
        let in_order = seen.is_none();
        let seen = seen.unwrap_or_else(up_to_own);
        let keys = Tensor::<1, Int>::arange(0..seq_kv as i64, (&device, DType::I32));
        let keys = keys.reshape([1, 1, seq_kv]);
        let seen = seen.unsqueeze_dim::<3>(2);
        if seq_kv <= self.keep {
            // All keys are selected.
            let all = [batch, seq_q, seq_kv];
            let keys = keys.expand(all);
            let later = keys.clone().greater_equal(seen.expand(all));
            return Ok(keys.mask_fill(later, -1));
        }
        let scores = Slabs::new(&index, self.numbers);
        // Kernels force near keys only if queries see the keys up to their own positions.
        let has_near = self.near == 0 || (in_order && scores.by_kernels());
        let near = if in_order { self.near } else { 0 };
        let mut chosen = Vec::new();
        for rows in scores.rows() {
            let count = rows.len();
            let seen = seen.clone().slice_dim(1, rows.clone());
            let x = scores.scores(rows, near, !in_order);
            let wide = [batch, count, seq_kv];
            let x = match has_near {
                true => x,
                false => {
                    let least = seen.clone().sub_scalar(self.near as i32).expand(wide);
                    let is_near = keys.clone().expand(wide).greater_equal(least);
                    x.mask_fill(is_near, f32::INFINITY)
                }
            };
            // NaN sorts after all visible scores.
            let is_hidden = keys
                .clone()
                .expand(wide)
                .greater_equal(seen.clone().expand(wide));
            let found = topk_rows(x.mask_fill(is_hidden, f32::NAN), most)?.columns;
            let is_none = (found.clone()).greater_equal(seen.expand([batch, count, most]));
            chosen.push(found.mask_fill(is_none, -1));
        }
        Ok(joined(chosen, 1))
    }

    /// Returns the scores of all pairs, hidden ones included: f32 `[batch, seq_q, seq_kv]`, without autodiff. Meant for inspection.
    pub fn scores(&self, index: &DsaIndex) -> Tensor<3> {
        let index = index.clone().without_autodiff();
        let scores = Slabs::new(&index, self.numbers);
        let slabs = scores.rows().into_iter();
        Tensor::cat(slabs.map(|rows| scores.scores(rows, 0, true)).collect(), 1)
    }

    /// Attends to the keys of [`choose`](Self::choose), see [`token_sparse_attention`].
    ///
    /// # Errors
    /// Those of [`token_sparse_attention`].
    pub fn attention(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        lists: TokenIndices,
        options: AttentionOptions,
    ) -> Result<Tensor<4>, OpError> {
        token_sparse_attention(q, k, v, lists, options).map(|(out, _)| out)
    }

    /// Runs [`choose`](Self::choose) over listed keys and returns list indices: i32 `[queries, most]`, ascending, negative after the last. Reads nothing back
    /// where kernels run, and launches depend on shapes only. The caller checks shapes.
    ///
    /// # Errors
    /// [`OpError`] if queries and keys do not form an index.
    pub fn choose_in_lists(&self, index: &DsaLists) -> Result<Tensor<2, Int>, OpError> {
        let slots = &index.slots;
        let [queries, listed] = slots.dims();
        if listed <= self.keep {
            // All keys are selected.
            let places = Tensor::<1, Int>::arange(0..listed as i64, (&slots.device(), DType::I32));
            let places = places.unsqueeze::<2>().expand([queries, listed]);
            return Ok(places.mask_fill(slots.clone().lower_elem(0), -1));
        }
        // Means of blocks need contiguous keys.
        #[cfg(feature = "cube")]
        if self.within.is_none_or(|of| listed <= of.keys()) {
            let picks = [self.keep, self.near];
            let places = crate::dsa::kernels::top_k_in_lists(index, picks, self.numbers);
            if let Some(places) = places {
                return Ok(places);
            }
        }
        let seen = index.seen.clone().unsqueeze_dim(1);
        let places = self.listed(&index.gathered()?, Some(seen))?;
        Ok(places.reshape([queries, self.keep]))
    }
}

/// Returns true for keys that are not in lists `[batch, rows, most]`: `[batch, rows, seq_kv]`.
fn unlisted(keys: Tensor<3, Int>, seq_kv: usize) -> Tensor<3, Bool> {
    let [batch, rows, most] = keys.dims();
    // Empty entries mark an extra last column, which is dropped.
    let none = keys.clone().lower_elem(0);
    let keys = keys.mask_fill(none, seq_kv as i32);
    let inner = keys.device().without_autodiff();
    let ones = Tensor::<3>::ones([batch, rows, most], &inner);
    let marks = Tensor::<3>::zeros([batch, rows, seq_kv + 1], &inner);
    let marks = marks.scatter(2, keys, ones, IndexingUpdateOp::Add);
    marks.slice_dim(2, 0..seq_kv).lower_elem(0.5)
}
