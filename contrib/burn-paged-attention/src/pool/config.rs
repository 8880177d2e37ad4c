//! Capacity and retention of a pool.

use burn::tensor::FloatDType;
use burn_blocksparse::Pattern;
use burn_sparse_transformer::TransformerError;
use burn_sparse_transformer::internal::{ensure_none, ensure_positive};

use super::store::Stored;
use crate::pages::{CacheError, EvictionBudget, EvictionConfig, KvRetention, PagePool, PoolConfig};
use crate::{PoolError, Quantization};

/// Dtype in which a pool stores keys and values.
///
/// ```
/// use burn_paged_attention::pool::{KvDtype, KvPoolConfig};
///
/// // Eight bits a number, with a scale for each key and each value of a head.
/// let config = KvPoolConfig::new(8, 4096).with_dtype(KvDtype::Int8);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvDtype {
    /// The dtype of the layers' matmuls.
    #[default]
    Model,
    /// A float dtype.
    Float(FloatDType),
    /// [`Quantization::Int8`]: a byte per element and two f32 scales per slot. `head_dim` is a multiple of 4.
    Int8,
    /// [`Quantization::Fp8E4m3`], with the same sizes.
    Fp8E4m3,
}

impl From<FloatDType> for KvDtype {
    fn from(dtype: FloatDType) -> Self {
        Self::Float(dtype)
    }
}

impl KvDtype {
    /// Returns the storage format for layers whose products have dtype `model`.
    pub(super) fn stored(self, model: FloatDType) -> Stored {
        match self {
            Self::Model => Stored::Float(model),
            Self::Float(dtype) => Stored::Float(dtype),
            Self::Int8 => Stored::Quantized(Quantization::Int8),
            Self::Fp8E4m3 => Stored::Quantized(Quantization::Fp8E4m3),
        }
    }
}

/// Positions for rotary embeddings if [`KvRetention::Window`] leaves out keys between the first and the last ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvPositions {
    /// Positions in the sequence.
    #[default]
    Original,
    /// Positions in the cache: for a query the window directly follows the sinks (Xiao et al., 2024, "StreamingLLM"), so distances stay within those
    /// of the training, however long the sequence is. Keys keep their rotation; queries are rotated twice.
    InCache,
}

/// Configuration of a [`KvPool`](super::KvPool).
///
/// ```
/// use burn_paged_attention::pool::{KvPoolConfig, KvRetention};
///
/// // Up to 8 sequences of up to 4,096 tokens, of which each call adds at most 256 to one that has some already.
/// let config = KvPoolConfig::new(8, 4096).with_chunk(256).with_page_size(64).with_residency(KvRetention::All);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct KvPoolConfig {
    /// Number of tokens of each sequence.
    pub(crate) lengths: Vec<usize>,
    pub(crate) chunk: usize,
    pub(crate) page_size: Option<usize>,
    pub(crate) residency: KvRetention,
    pub(crate) rollback: usize,
    pub(crate) dtype: KvDtype,
    pub(crate) pages: Option<usize>,
    pub(crate) cascade: usize,
    pub(crate) prefix_reuse: bool,
    pub(crate) positions: KvPositions,
    pub(crate) eviction: Option<EvictionConfig>,
    pub(crate) prompts_choose: bool,
}

impl KvPoolConfig {
    /// Makes the configuration of a pool for `sequences` sequences of `tokens` tokens each, which grow by one token per call. Keys that later
    /// queries reach are retained.
    pub fn new(sequences: usize, tokens: usize) -> Self {
        Self::for_lengths(std::iter::repeat_n(tokens, sequences))
    }

    /// Like [`Self::new`], for sequences of different lengths.
    pub fn for_lengths(lengths: impl IntoIterator<Item = usize>) -> Self {
        let mut lengths: Vec<usize> = lengths.into_iter().collect();
        lengths.sort_unstable();
        Self {
            lengths,
            chunk: 1,
            page_size: None,
            residency: KvRetention::default(),
            rollback: 0,
            dtype: KvDtype::Model,
            pages: None,
            cascade: 1024,
            prefix_reuse: false,
            positions: KvPositions::Original,
            eviction: None,
            prompts_choose: false,
        }
    }

    blocksparse::setters! {
        /// Sets the largest number of new tokens in a call for a sequence that has some already: their keys are stored before earlier ones are
        /// evicted. More may still fit.
        with_chunk => chunk: usize,
        /// Sets the slots of a page: 16, 32, 64 or 128. Default: 32, or what the layers' selections need: `quest:16,256` has pages of 16.
        with_page_size => page_size: Some(usize),
        /// Sets the number of tokens that can be rolled back ([`KvPool::truncate`](super::KvPool::truncate)). Default: 0. With [`KvRetention::All`]
        /// any number can.
        with_rollback => rollback: usize,
        /// Sets the number of pages for each pattern of the layers. Default: the most that the sequences may need. Fewer suffice if not all
        /// sequences become that long or if they share prefixes.
        with_pages => pages: Some(usize),
        /// Sets the positions for rotary embeddings, in a pool with [`KvRetention::Window`].
        with_positions => positions: KvPositions,
        /// Sets the least number of keys shared by all sequences of a batch, such as forks of one, that are read once for all. Their queries become rows
        /// of one call, whose results are merged with those over each sequence's own keys (FlashInfer's cascade, Ye et al., 2024). Default: 1,024.
        with_cascade => cascade: usize,
    }

    /// Sets which keys are retained.
    pub fn with_residency(mut self, residency: KvRetention) -> Self {
        self.residency = residency;
        self.eviction = None;
        self
    }

    /// Retains a number of keys per layer and KV head and evicts the others, by attention scores: **changes the output**. For layers whose heads are
    /// plainly causal, without ALiBi and relative biases.
    ///
    /// A sequence's keys are evicted at the end of the call after which there are more than the capacity and the slack, on average over layers and
    /// heads. Until then all keys of the call are stored, so there must be slots for the capacity, the slack and the tokens of a call: set
    /// [`Self::with_chunk`] to the length of a prompt that is read at once.
    pub fn with_eviction(mut self, eviction: EvictionConfig) -> Self {
        self.residency = KvRetention::Evict;
        self.eviction = Some(eviction);
        self
    }

    /// Sets the dtype of stored keys and values: a [`FloatDType`], or a [`KvDtype`]. Default: [`KvDtype::Model`].
    pub fn with_dtype(mut self, dtype: impl Into<KvDtype>) -> Self {
        self.dtype = dtype.into();
        self
    }

    /// Enables the prefix cache: full pages can be found by their tokens even after their sequences have left, until the space is needed:
    /// [`KvPool::join_with_prefix`](super::KvPool::join_with_prefix).
    pub fn with_prefix_reuse(mut self) -> Self {
        self.prefix_reuse = true;
        self
    }

    /// Applies the layers' selections to prompts only, including selections per head. A prompt is the call that gives a sequence its first tokens;
    /// all later tokens see all keys that the layers' patterns allow. Prompts are then separate calls. Without this, later tokens select pages like
    /// prompts do, and selections that later tokens influence are errors.
    ///
    /// If later tokens influence the selection, a prompt's keys are those selected for the whole prompt, even after
    /// [`KvPool::truncate`](super::KvPool::truncate).
    pub fn with_choosing_prompts(mut self) -> Self {
        self.prompts_choose = true;
        self
    }

    /// Returns the slots of a page.
    pub(super) fn page_size(&self) -> usize {
        self.page_size.unwrap_or(32)
    }

    /// Checks that no window leaves out keys, for layers that select among all.
    pub(super) fn ensure_no_window(
        &self,
        expected: impl Into<String>,
    ) -> Result<(), TransformerError> {
        let is_window = matches!(self.residency, KvRetention::Window { .. });
        blocksparse::ensure! { TransformerError; !is_window => "residency", expected, format!("{:?}", self.residency); }
        Ok(())
    }

    pub(super) fn validate(&self) -> Result<(), PoolError> {
        ensure_positive("sequences", self.lengths.len())?;
        for &tokens in &self.lengths {
            ensure_positive("tokens", tokens)?;
        }
        ensure_positive("chunk", self.chunk)?;
        let is_window = matches!(self.residency, KvRetention::Window { .. });
        let is_window = is_window && self.eviction.is_none();
        blocksparse::ensure! {
            PoolError;
            self.positions == KvPositions::Original || is_window => "positions", "Original, because the residency is no Window", "InCache";
        }
        let known = self.prefix_reuse && self.prompts_choose;
        let expected = "none where prompts choose: cached keys may depend on later tokens";
        ensure_none("prefix_reuse", known, expected)?;
        let is_said = self.residency != KvRetention::Evict || self.eviction.is_some();
        blocksparse::ensure! { PoolError; is_said => "residency", "another; `with_eviction` says which keys stay", "Evict"; }
        let expected = "none: pages with evicted keys are not cached";
        let known = self.prefix_reuse && self.eviction.is_some();
        Ok(ensure_none("eviction", known, expected)?)
    }

    /// Makes the block tables of layers with this pattern.
    pub(super) fn page_pools(
        &self,
        pattern: &Pattern,
        [heads, kv_heads]: [usize; 2],
    ) -> Result<PagePool, PoolError> {
        let of_pages = |pages: usize| {
            let config = PoolConfig::new(pages)
                .with_page_size(self.page_size())
                .with_pattern(pattern.clone(), heads, kv_heads)
                .with_rollback(self.rollback);
            let config = match self.prefix_reuse {
                // All sequences of a pool belong to one model.
                true => config.with_prefix_reuse(0),
                false => config,
            };
            match self.eviction.map(|eviction| eviction.is_even_in_layers()) {
                Some(true) => config.with_table_rows(1),
                Some(false) => config.with_table_rows(kv_heads),
                None => config,
            }
        };
        let pages = match self.pages {
            Some(pages) => pages,
            None => {
                // A pool of one page tells the number of table rows, and checks the configuration.
                let rows = PagePool::new(of_pages(1))?.table_rows();
                // Both regions of a row may end within a page.
                let whole = |tokens: usize| rows * (tokens.div_ceil(self.page_size()) + 2);
                if let Some(eviction) = &self.eviction {
                    let most = self.most_keys(eviction);
                    let each = self.lengths.iter().map(|&tokens| whole(tokens.min(most)));
                    let pages = each.fold(0, usize::saturating_add);
                    return Ok(PagePool::new(of_pages(pages))?);
                }
                let longest = self.lengths.last().copied().unwrap_or(0);
                let one = PagePool::new(of_pages(whole(longest)))?;
                let most = self.most_pages(one).ok();
                let each = self.lengths.iter().enumerate().map(|(at, &tokens)| {
                    let most = most.as_ref().map_or(usize::MAX, |most| most[at]);
                    most.min(whole(tokens))
                });
                each.fold(0, usize::saturating_add)
            }
        };
        Ok(PagePool::new(of_pages(pages))?)
    }

    /// Returns the most keys that a table row has at a time.
    pub(super) fn most_keys(&self, eviction: &EvictionConfig) -> usize {
        // The first layers of a pyramid have up to twice the mean. An adaptive budget bounds the sum over the heads of a layer.
        let of_layer = match eviction.budget {
            EvictionBudget::Pyramid { .. } => eviction.capacity().saturating_mul(2),
            _ => eviction.capacity(),
        };
        of_layer
            .saturating_add(eviction.slack)
            .saturating_add(self.chunk)
    }

    /// Returns the most pages of a sequence while it grows to each of the lengths, which ascend.
    fn most_pages(&self, mut pool: PagePool) -> Result<Vec<usize>, CacheError> {
        let id = pool.join(self.residency)?;
        let rows = pool.table_rows();
        let step = self.chunk.max(self.page_size());
        let (mut len, mut most) = (0, 0);
        let mut of_lengths = Vec::with_capacity(self.lengths.len());
        for &tokens in &self.lengths {
            while len < tokens {
                let tokens = step.min(tokens - len);
                pool.append(id, tokens)?;
                len += tokens;
                most = most.max(pool.config().pages() - pool.free_pages());
            }
            // Other steps may begin and end elsewhere in a page.
            of_lengths.push(most + 2 * rows);
        }
        Ok(of_lengths)
    }
}
