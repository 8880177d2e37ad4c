//! A paged KV cache for many sequences: continuous batching, forks, prefix reuse, eviction, int8 and fp8.

mod attend;
mod begin;
mod choice;
mod config;
mod dsa;
mod dsa_attend;
mod evict;
mod layer;
mod model;
mod nsa;
mod nsa_attend;
mod nsa_step;
mod policy;
mod prefix;
mod replayed;
mod saved;
mod sight;
mod step;
mod store;
mod watch;
mod watched;

pub use crate::pages::{
    CacheError, EvictionBudget, EvictionConfig, EvictionScore, KvRetention, ScoreSmoothing,
    SequenceId,
};

use burn::tensor::{DType, Device, Tensor};
use burn_sparse_select::pages::PageChoice;
use burn_sparse_transformer::content::ChoiceSharing;
use burn_sparse_transformer::decoder::{Attend, Positions};
use burn_sparse_transformer::internal::{ensure_none, ensure_shape, or_panic};
use burn_sparse_transformer::{SparseMultiHeadAttention, TransformerError};

use begin::Step;
use choice::Shared;
pub use config::{KvDtype, KvPoolConfig, KvPositions};
use layer::Layer;
pub use model::PagedDecoder;
use nsa::Branches;
use nsa_step::BranchGroups;
pub use policy::CachePolicy;
pub use replayed::GraphDecoder;
pub use saved::KvSnapshot;
use sight::Sight;
use step::{GroupKey, Uploaded};
use store::{Store, Stored};
use watched::Evictor;

use crate::PoolError;
use crate::pages::PagePool;

/// Next rows of a sequence of a [`KvPool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct KvStep {
    /// The sequence.
    pub id: SequenceId,
    /// Number of new tokens, at least 1.
    pub tokens: usize,
}

impl KvStep {
    /// Feeds `tokens` new tokens of a sequence.
    pub fn new(id: SequenceId, tokens: usize) -> Self {
        Self { id, tokens }
    }
}

/// Memory of a sequence, over all layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvUsage {
    /// Number of tokens of the sequence.
    pub tokens: usize,
    /// Slots of its pages. Each holds a key and value of one KV head of one layer, or of one branch of a layer.
    pub slots: usize,
    /// Bytes of those slots. Shared pages count for each sequence.
    pub bytes: usize,
    /// Bytes of the keys and values that a later query reads.
    pub live_bytes: usize,
    /// Bytes that the keys and values of all tokens would take.
    pub all_bytes: usize,
    /// Bytes of the scores for eviction.
    pub score_bytes: usize,
    /// Bytes of the summaries for page selection: with `nsa` the capacity for compressed keys and values, with `dsa` and `msa` the indexer's keys.
    pub summary_bytes: usize,
    /// Bytes of the keys and values that a query at the end attends to: the selected ones in layers that select pages, otherwise all live ones. With
    /// `nsa` all branches count. With `dsa` and `msa` the indexer's keys count too, so that it may exceed `live_bytes` if an indexer is as wide as a
    /// head.
    pub read_bytes: usize,
}

/// Keys and values of many sequences in pages on the device, for all layers of a model.
///
/// Sequences of any lengths [`join`](Self::join) and [`leave`](Self::leave) at any time, share pages after a [`fork`](Self::fork), and can be
/// [`truncate`](Self::truncate)d. Keys that no later query attends to are evicted, by each layer's pattern: with local attention a sequence takes as
/// many slots as its window, however long it is. Layers with equal patterns share one block table. The pool's size is fixed. A step that does not
/// fit fails before anything is written.
///
/// [`PagedDecoder::new_pool`] makes a pool for a model, and [`forward_pool`](PagedDecoder::forward_pool) continues sequences;
/// [`Self::for_attention`] and [`Self::forward_attention`] do the same for one layer.
/// [`SparseTransformerCache`](burn_sparse_transformer::SparseTransformerCache) is the simpler cache for a batch whose sequences have equal lengths
/// and retain all their keys.
#[derive(Debug)]
pub struct KvPool {
    groups: Vec<Group>,
    layers: Vec<LayerPages>,
    /// Number of positions, if limited.
    context: Option<usize>,
    residency: KvRetention,
    /// Least number of keys shared by a batch that are read once for all.
    cascade: usize,
    positions: KvPositions,
    evictor: Option<Evictor>,
    /// True if the layers' selections apply to prompts only.
    prompts_choose: bool,
    device: Device,
}

#[derive(Debug)]
struct LayerPages {
    /// Index of the group whose block tables hold its keys.
    group: usize,
    store: Store,
    /// Further branches of native sparse attention.
    branches: Option<Branches>,
    /// Keys of the layer's own indexer.
    index: Option<Store>,
}

/// Layers that retain the same keys.
#[derive(Debug)]
struct Group {
    key: GroupKey,
    /// Page selection, if any.
    choice: Option<PageChoice>,
    books: PagePool,
    uploaded: Option<Uploaded>,
    /// None if the last step did not need it.
    sight: Option<Sight>,
    /// Branch groups of native sparse attention, whose selected branch this group is.
    nsa: Option<BranchGroups>,
}

impl Group {
    fn new(
        key: GroupKey,
        choice: Option<PageChoice>,
        config: &KvPoolConfig,
    ) -> Result<Self, PoolError> {
        let books = config.page_pools(&key.pattern, [key.heads, key.kv_heads])?;
        Ok(Self {
            key,
            choice,
            books,
            uploaded: None,
            sight: None,
            nsa: None,
        })
    }

    /// Returns the number of pages of a layer's tensors, and of slots of a page.
    fn pages(&self) -> [usize; 2] {
        let heads = self.key.kv_heads / self.books.table_rows();
        let config = self.books.config();
        [config.pages() * heads, config.page_size()]
    }
}

impl KvPool {
    /// Makes an empty pool for one layer.
    ///
    /// # Errors
    /// [`TransformerError::Argument`] or [`PoolError::Cache`] naming the value out of range.
    pub fn for_attention(
        attention: &SparseMultiHeadAttention,
        config: &KvPoolConfig,
    ) -> Result<Self, PoolError> {
        Self::for_layers(&[attention], None, config)
    }

    fn for_layers(
        layers: &[&SparseMultiHeadAttention],
        context: Option<usize>,
        config: &KvPoolConfig,
    ) -> Result<Self, PoolError> {
        config.validate()?;
        let config = &config.clone().with_page_size(
            config
                .page_size
                .unwrap_or_else(|| choice::page_size(layers, config)),
        );
        let device = layers[0].key.weight.device().without_autodiff();
        let mut groups: Vec<Group> = Vec::new();
        let mut of_layers = Vec::with_capacity(layers.len());
        let evictor = match config.eviction {
            Some(eviction) => {
                let longest = config.lengths.last().copied().unwrap_or(0);
                let slots = config.most_keys(&eviction).min(longest);
                let seats = [config.lengths.len(), slots];
                let rollback = config.rollback;
                Some(Evictor::new(eviction, rollback, layers, seats, &device)?)
            }
            None => None,
        };
        for mha in layers {
            let model = mha.product_dtype();
            let stored = config.dtype.stored(model);
            let page_size = config.page_size();
            let choice = choice::of_layer(mha, config, page_size)?;
            let key = GroupKey::of(mha);
            let found = groups.iter().position(|group| group.key == key);
            // Layers that retain different numbers of keys have their own block tables.
            let found = found.filter(|_| config.eviction.is_none_or(|config| config.is_even()));
            let at = match found {
                Some(at) => at,
                None => {
                    let mut group = Group::new(key, choice, config)?;
                    let Group { key, books, .. } = &group;
                    if evictor.is_some() {
                        evict::check(key, books)?;
                    }
                    if config.positions == KvPositions::InCache {
                        let is_causal = books.clone().join(KvRetention::Evict).is_ok();
                        blocksparse::ensure! { PoolError; is_causal && key.is_plain() => "positions", "Original: heads are not causal and nothing else", "InCache"; }
                    }
                    if let Some(nsa) = mha.nsa() {
                        group.nsa = Some(nsa::groups(&mut groups, mha, nsa.config(), config)?);
                    }
                    groups.push(group);
                    groups.len() - 1
                }
            };
            let widths = mha.head_widths();
            if let Stored::Float(dtype) = stored
                && !device.supports_dtype(DType::from(dtype))
            {
                let expected = "one that the device stores";
                return Err(PoolError::argument("dtype", expected, format!("{dtype:?}")));
            }
            let pages = groups[at].pages();
            let store = Store::new(pages, mha.n_kv_heads(), widths, &device, stored)?;
            let branches = match mha.nsa() {
                Some(nsa) => {
                    let (nsa, stored) = (nsa.config(), (stored, model));
                    Some(Branches::new(&groups, at, mha, nsa, stored, &device)?)
                }
                None => None,
            };
            // Branches and indexers have their own keys, and a layer that takes another's choice scores no pages.
            let chooses = branches.is_none()
                && groups[at].key.indexer.is_none()
                && mha.choice_sharing() != Some(ChoiceSharing::Takes);
            of_layers.push(LayerPages {
                group: at,
                store: match choice.filter(|_| chooses) {
                    Some(choice) => store.with_summaries(choice.summary),
                    None => store,
                },
                branches,
                index: dsa::store(&groups[at], mha, &device)?,
            });
        }
        Ok(Self {
            groups,
            layers: of_layers,
            context: context_of(layers, context),
            residency: config.residency,
            cascade: config.cascade,
            positions: config.positions,
            evictor,
            prompts_choose: config.prompts_choose,
            device,
        })
    }

    /// Adds a sequence without tokens.
    ///
    /// # Errors
    /// [`PoolError::Cache`] if the window of the retention is out of range.
    pub fn join(&mut self) -> Result<SequenceId, PoolError> {
        let residency = self.residency;
        let id = self.each(|books| books.join(residency))?;
        if let Some(evictor) = &mut self.evictor {
            evictor.join(id)?;
        }
        Ok(id)
    }

    /// Removes a sequence and frees its pages.
    ///
    /// # Errors
    /// [`PoolError::Cache`] if the sequence does not exist.
    pub fn leave(&mut self, id: SequenceId) -> Result<(), PoolError> {
        self.each(|books| books.leave(id))?;
        if let Some(evictor) = &mut self.evictor {
            evictor.leave(id);
        }
        Ok(())
    }

    /// Adds a sequence with the tokens of another one. They share pages until either writes to them.
    ///
    /// # Errors
    /// [`PoolError::Cache`] if the sequence does not exist.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId, PoolError> {
        let fork = self.each(|books| books.fork(id))?;
        if let Some(evictor) = &mut self.evictor {
            evictor.fork(id, fork, &self.device)?;
        }
        Ok(fork)
    }

    /// Rolls a sequence back to `len` tokens.
    ///
    /// # Errors
    /// [`PoolError::Cache`] if the sequence does not exist, has fewer tokens, or keys that would be live again are gone in some layer;
    /// [`TransformerError::Boundary`] if a pattern has no boundary there.
    pub fn truncate(&mut self, id: SequenceId, len: usize) -> Result<(), PoolError> {
        // Either all layers can truncate, or none is changed.
        for Group { books, .. } in &self.groups {
            let oldest = books.oldest(id)?;
            if len < oldest {
                return Err(CacheError::Gone { asked: len, oldest }.into());
            }
            if len < books.len(id)? {
                books.check_boundary(len)?;
            }
        }
        let before = self.len(id)?;
        if let Some(evictor) = (self.evictor.as_ref()).filter(|_| 0 < len && len < before) {
            let oldest = evictor.oldest(id, before);
            if len < oldest {
                return Err(CacheError::Gone { asked: len, oldest }.into());
            }
        }
        self.each(|books| books.truncate(id, len))?;
        if let Some(evictor) = (self.evictor.as_mut()).filter(|_| len < before) {
            evictor.truncate(id, len, before - len);
        }
        Ok(())
    }

    /// Returns the number of tokens of a sequence, which is the position of its next one.
    ///
    /// # Errors
    /// [`PoolError::Cache`] if the sequence does not exist.
    pub fn len(&self, id: SequenceId) -> Result<usize, PoolError> {
        Ok(self.groups[0].books.len(id)?)
    }

    /// Returns the sequences, in the order in which they joined.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.groups[0].books.sequences()
    }

    /// Returns the memory of a sequence.
    ///
    /// # Errors
    /// [`PoolError::Cache`] if the sequence does not exist.
    pub fn usage(&self, id: SequenceId) -> Result<KvUsage, PoolError> {
        let mut usage = KvUsage {
            tokens: self.len(id)?,
            ..KvUsage::default()
        };
        for LayerPages {
            group: at,
            store,
            branches,
            index,
        } in &self.layers
        {
            let Group {
                key, books, choice, ..
            } = &self.groups[*at];
            let of_books = books.usage(id)?;
            let bytes = store.slot_bytes();
            let heads = key.kv_heads / books.table_rows();
            usage.slots += of_books.slots * heads;
            let pages = of_books.slots * heads / books.config().page_size();
            usage.summary_bytes += pages * store.summary_bytes();
            usage.bytes += of_books.bytes(bytes * heads);
            let live = of_books.live_bytes(bytes * heads);
            usage.live_bytes += live;
            usage.read_bytes += match choice {
                Some(choice) => {
                    let spans = books.spans(&[id])?;
                    let keys = spans
                        .chunks(4)
                        .map(|span| choice.attended(span[0] as usize));
                    keys.sum::<usize>() * bytes * heads
                }
                None => live,
            };
            usage.all_bytes += usage.tokens * key.kv_heads * bytes;
            if let Some(branches) = branches {
                branches.add_usage(&self.groups, *at, id, &mut usage)?;
            }
            if key.indexer.is_some() {
                dsa::add_usage(&self.groups[*at], (store, index.as_ref()), id, &mut usage)?;
            }
        }
        usage.score_bytes = (self.evictor.as_ref()).map_or(0, Evictor::bytes);
        Ok(usage)
    }

    /// Returns the bytes of all pages of all layers, whether in use or not.
    pub fn bytes(&self) -> usize {
        let of_layer = |layer: &LayerPages| {
            let branches = layer.branches.as_ref().map_or(0, Branches::bytes);
            let index = layer.index.as_ref().map_or(0, Store::bytes);
            layer.store.bytes() + branches + index
        };
        self.layers.iter().map(of_layer).sum()
    }

    /// Returns the block tables, one per pattern of the layers.
    pub fn page_pools(&self) -> impl Iterator<Item = &PagePool> {
        self.groups.iter().map(|group| &group.books)
    }

    /// Checks all invariants that hold between two calls. Visits every token of every sequence, so it is for tests.
    ///
    /// # Errors
    /// [`PoolError::Cache`] with the first contradiction.
    pub fn verify(&self) -> Result<(), PoolError> {
        let ids: Vec<SequenceId> = self.sequences().collect();
        for group in &self.groups {
            group.books.verify()?;
            for &id in &ids {
                let (len, expected) = (group.books.len(id)?, self.len(id)?);
                blocksparse::ensure! { PoolError; len == expected => "len", expected.to_string(), len; }
            }
        }
        self.verify_kept()
    }

    /// Makes the same call on the block tables of every pattern. If it may succeed on some and fail on others, the caller has to check first.
    fn each<T>(
        &mut self,
        mut f: impl FnMut(&mut PagePool) -> Result<T, CacheError>,
    ) -> Result<T, PoolError> {
        let mut first = None;
        for group in &mut self.groups {
            group.uploaded = None;
            let result = f(&mut group.books)?;
            first.get_or_insert(result);
        }
        Ok(first.expect("a pool has at least one layer"))
    }
}

impl KvPool {
    /// Computes attention of new rows of sequences to themselves and to their keys in the pool, which [`Self::for_attention`] made.
    ///
    /// Sequences fed in pieces give the result of [`SparseMultiHeadAttention::forward`] on the whole, as with
    /// [`SparseMultiHeadAttention::forward_cache`]: pieces must end where the pattern allows a boundary. After an error the pool is unchanged.
    ///
    /// # Shapes
    /// - `x`: `[batch, seq, d_model]`; the first `steps[b].tokens` rows of entry `b` are used
    /// - result: `[batch, seq, d_model]`, with arbitrary values in the other rows
    ///
    /// # Panics
    /// With the message of [`Self::try_forward_attention`]'s error.
    #[track_caller]
    pub fn forward_attention(
        &mut self,
        attention: &SparseMultiHeadAttention,
        x: Tensor<3>,
        steps: &[KvStep],
    ) -> Tensor<3> {
        or_panic(self.try_forward_attention(attention, x, steps))
    }

    /// [`Self::forward_attention`] that returns its error.
    ///
    /// # Errors
    /// Those of [`SparseMultiHeadAttention::try_forward`]; also if `x` is on a device with autodiff, the number of `steps` is not the batch size, or
    /// the pool is not this layer's; [`PoolError::Cache`] if a sequence is not in the pool or named twice, or there are too few pages;
    /// [`TransformerError::ContextExceeded`], [`TransformerError::Boundary`].
    pub fn try_forward_attention(
        &mut self,
        attention: &SparseMultiHeadAttention,
        x: Tensor<3>,
        steps: &[KvStep],
    ) -> Result<Tensor<3>, PoolError> {
        let [d_model, _] = attention.query.weight.dims();
        let expected = [None, None, Some(d_model)];
        ensure_shape("x", x.dims(), expected, ["batch", "seq", "d_model"])?;
        let ([batch, seq, _], dtype) = (x.dims(), x.dtype());
        self.check_layers(&[attention], &x.device())?;
        self.run(&[attention], steps, [batch, seq], false, |_, attend| {
            let heads = attend(0, attention, x)?;
            Ok(attention.output_projection(heads)?.cast(dtype))
        })
    }

    /// Runs a step of all layers: calls `forward` with the rows' positions and the attention over the pool. After an error the pool is unchanged.
    fn run<T>(
        &mut self,
        layers: &[&SparseMultiHeadAttention],
        steps: &[KvStep],
        [batch, seq]: [usize; 2],
        last: bool,
        forward: impl FnOnce(&Positions, &mut Attend) -> Result<T, TransformerError>,
    ) -> Result<T, PoolError> {
        check_steps(steps, batch)?;
        let step = self.begin(steps, seq, last)?;
        let found = forward(&step.positions, &mut self.attend(&step));
        let found = (found.map_err(PoolError::from))
            .and_then(|found| self.settle(steps, layers).map(|()| found));
        if let (Err(_), Some(undo)) = (&found, step.undo) {
            self.undo(undo);
        }
        found
    }

    /// Returns the attention of a step's rows.
    fn attend<'a>(
        &'a mut self,
        step: &'a Step,
    ) -> impl FnMut(usize, &SparseMultiHeadAttention, Tensor<3>) -> Result<Tensor<4>, TransformerError>
    {
        let mut shared = Shared::default();
        move |layer, mha, x| Layer(mha).attend_step(x, self, (step, &mut shared), layer)
    }
}

/// Returns the number of positions: the least of the model's limit and the layers' rotation tables.
pub(crate) fn context_of(
    layers: &[&SparseMultiHeadAttention],
    most: Option<usize>,
) -> Option<usize> {
    let tables = layers.iter().filter_map(|mha| {
        let [table, ..] = mha.rope.as_ref()?.freq_complex.dims();
        Some(table)
    });
    tables.chain(most).min()
}

fn check_steps(steps: &[KvStep], batch: usize) -> Result<(), PoolError> {
    blocksparse::ensure! { PoolError; steps.len() == batch => "steps", format!("as many as the batch's {batch} entries"), steps.len(); }
    Ok(())
}

impl KvPool {
    /// Checks that the pool was made for these layers, and is on the device of the input.
    fn check_layers(
        &self,
        layers: &[&SparseMultiHeadAttention],
        device: &Device,
    ) -> Result<(), PoolError> {
        let expected = "none: use `Module::valid`";
        ensure_none("autodiff", device.is_autodiff(), expected)?;
        blocksparse::ensure! {
            PoolError;
            self.layers.len() == layers.len() => "pool", format!("of {} layers, the model's", layers.len()), format!("{} layers", self.layers.len());
        }
        for (mha, pages) in layers.iter().zip(&self.layers) {
            let is_same = self.groups[pages.group].key.is_of(mha)
                && pages.store.widths() == Some(mha.head_widths());
            blocksparse::ensure! { PoolError; is_same => "pool", "one that was made for these layers", "another"; }
        }
        blocksparse::ensure! { PoolError; self.device == *device => "pool", format!("on {device:?}, the input's"), format!("{:?}", self.device); }
        Ok(())
    }
}
