//! Capacity of a pool, and what it retains.

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
    /// A dtype of floats.
    Float(FloatDType),
    /// [`Quantization::Int8`]: a byte per element and two f32 scales per slot. `head_dim` is a multiple of 4.
    Int8,
    /// [`Quantization::Fp8E4m3`], likewise.
    Fp8E4m3,
}

impl From<FloatDType> for KvDtype {
    fn from(dtype: FloatDType) -> Self {
        Self::Float(dtype)
    }
}

impl KvDtype {
    /// Of layers whose products have a dtype.
    pub(super) fn stored(self, model: FloatDType) -> Stored {
        match self {
            Self::Model => Stored::Float(model),
            Self::Float(dtype) => Stored::Float(dtype),
            Self::Int8 => Stored::Quantized(Quantization::Int8),
            Self::Fp8E4m3 => Stored::Quantized(Quantization::Fp8E4m3),
        }
    }
}

/// Positions of rotary embeddings where [`KvRetention::Window`] leaves out keys between the first ones and the last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvPositions {
    /// Positions in the text.
    #[default]
    Original,
    /// Positions in the cache: to a query the window follows right after the sinks (Xiao et al., 2024, "StreamingLLM"), so distances stay those of
    /// the training, however long the sequence is. Keys keep their rotation; queries are rotated twice.
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
    /// Tokens of each sequence.
    pub(crate) lengths: Vec<usize>,
    pub(crate) chunk: usize,
    /// Slots of a page, if set.
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
    /// Capacity for `sequences` sequences of `tokens` tokens each, which grow by one token a call. Keys that later queries reach are retained.
    pub fn new(sequences: usize, tokens: usize) -> Self {
        Self::for_lengths(std::iter::repeat_n(tokens, sequences))
    }

    /// [`Self::new`] for sequences of different lengths.
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
        /// Most new tokens of a call for a sequence that has some already: their keys are stored before earlier ones are evicted. More may still fit.
        with_chunk => chunk: usize,
        /// Slots of a page: 16, 32, 64 or 128. Default: 32, or as the layers' selections need: `quest:16,256` has pages of 16.
        with_page_size => page_size: Some(usize),
        /// Tokens that can be rolled back ([`KvPool::truncate`](super::KvPool::truncate)). Default: 0. With [`KvRetention::All`] any number can.
        with_rollback => rollback: usize,
        /// Pages for each pattern of the layers, in place of the most that the sequences may need: fewer, if not all get as long or if they share
        /// prefixes.
        with_pages => pages: Some(usize),
        /// Positions of rotary embeddings, in a pool with [`KvRetention::Window`].
        with_positions => positions: KvPositions,
        /// Number of keys shared by all sequences of a batch, as by forks of one, from which on they are read once for all. Their queries become rows
        /// of one call, whose results are merged with those over each sequence's own keys (FlashInfer's cascade, Ye et al., 2024). Default: 1,024.
        with_cascade => cascade: usize,
    }

    /// Sets the keys that are retained.
    pub fn with_residency(mut self, residency: KvRetention) -> Self {
        self.residency = residency;
        self.eviction = None;
        self
    }

    /// Retains a number of keys per layer and KV head and evicts the others, by attention scores: **changes the output**. For layers
    /// whose heads are causal and nothing else, without ALiBi and biases of distances.
    ///
    /// A sequence's keys are evicted at the end of the call after which there are more than the capacity and the slack, on average over layers and heads. All keys
    /// of a call are stored until then, so there must be slots for the capacity, the slack and the tokens of a call: set [`Self::with_chunk`] to the length of a
    /// prompt that is read at once.
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

    /// Prefix cache: full pages stay, findable by their tokens, after their sequences have left, until their space is needed:
    /// [`KvPool::join_with_prefix`](super::KvPool::join_with_prefix).
    pub fn with_prefix_reuse(mut self) -> Self {
        self.prefix_reuse = true;
        self
    }

    /// Applies the layers' selections to prompts only, any selection, also one per head. A prompt is what a sequence without tokens gets in one call;
    /// all later tokens see all keys that the layers' patterns allow. Prompts then are calls of their own. Without this, later tokens choose pages as
    /// prompts do, and choices that later tokens influence are errors.
    ///
    /// Where later tokens influence the choice, a prompt's keys are those of the whole prompt, also after
    /// [`KvPool::truncate`](super::KvPool::truncate).
    pub fn with_choosing_prompts(mut self) -> Self {
        self.prompts_choose = true;
        self
    }

    /// Slots of a page.
    pub(super) fn page_size(&self) -> usize {
        self.page_size.unwrap_or(32)
    }

    /// That no window leaves out keys, for layers that choose among all.
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

    /// The books of layers with this pattern.
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
                // All sequences of a pool are one model's.
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
                // One page says how many rows there are, and whether the configuration is right.
                let rows = PagePool::new(of_pages(1))?.table_rows();
                // Both regions of a row end within a page.
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

    /// The most keys that a table row has at a time.
    pub(super) fn most_keys(&self, eviction: &EvictionConfig) -> usize {
        // The first layers of a pyramid have up to twice the mean; what heads have in an adaptive budget is as much for all of them together.
        let of_layer = match eviction.budget {
            EvictionBudget::Pyramid { .. } => eviction.capacity().saturating_mul(2),
            _ => eviction.capacity(),
        };
        of_layer
            .saturating_add(eviction.slack)
            .saturating_add(self.chunk)
    }

    /// The most pages that a sequence has while it grows to each of the lengths, which ascend.
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
