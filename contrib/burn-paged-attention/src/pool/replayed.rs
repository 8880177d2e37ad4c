//! Decoding steps that are captured once and replayed.

use std::cell::{Ref, RefCell, RefMut};
use std::rc::Rc;

use burn::tensor::{DType, Int, Tensor};
use burn_blocksparse::graph::{CapturedGraph, StaticInput};
use burn_sparse_select::pages::PageChoice;
use burn_sparse_transformer::TransformerError;
use burn_sparse_transformer::decoder::{Decoder, Positions};

use super::begin::Advance;
use super::model::PagedDecoder;
use super::nsa::Branches;
use super::nsa_step::NsaInputs;
use super::sight::Sight;
use super::step::{self, GroupStep, PageLists, Road};
use super::store::{ints, overwrite, zeros};
use super::watch::Watch;
use super::watched::Evictor;
use super::{Group, KvPool, KvPositions, KvRetention, KvStep, Step};
use crate::pages::{SequenceId, Writes};
use crate::{PagedVisibility, PoolError};

/// A model with its pool, whose decoding steps are captured in a graph. Steps with the same number of rows per sequence are captured once per batch
/// and replayed as one launch if the device can (CUDA): see [`CapturedGraph`]. Elsewhere they run launch by launch. Results equal those of
/// [`PagedDecoder::next_logits`] and [`PagedDecoder::forward_pool`].
///
/// The first three steps of a batch run normally, the fourth is captured. Sequences may get fewer tokens than a step has rows, as with drafts. A
/// step of another batch, or one that cannot be captured, runs normally; [`fallback_reason`](Self::fallback_reason) says why, and the next batch is
/// captured anew. Keys are evicted between replays, by scores that replays sum. After a failed replay the pool must not be used.
///
/// Like captured graphs, it is not `Send`.
///
/// ```
/// use burn::tensor::Device;
/// use burn_sparse_transformer::{Factorization, Pattern, SparseTransformerConfig};
/// use burn_paged_attention::pool::{GraphDecoder, KvPoolConfig, KvStep, PagedDecoder};
///
/// let model = SparseTransformerConfig::new(16, 2, Factorization::from(Pattern::local(8)))
///     .with_vocab_size(256)
///     .with_context(64)
///     .with_n_layers(2)
///     .init(&Device::flex());
/// let pool = model.new_pool(&KvPoolConfig::new(2, 64).with_page_size(16))?;
/// let mut decoder = GraphDecoder::new(model, pool)?;
/// let a = decoder.pool_mut().join()?;
/// let b = decoder.pool_mut().join()?;
/// decoder.next_logits(&[84, 104, 65, 110], &[KvStep::new(a, 2), KvStep::new(b, 2)])?;
/// for token in 0..8 {
///     let logits = decoder.next_logits(&[token; 2], &[KvStep::new(a, 1), KvStep::new(b, 1)])?;
///     assert_eq!(logits.dims(), [2, 256]);
/// }
/// assert_eq!(decoder.pool().len(a)?, 10);
/// # Ok::<(), burn_paged_attention::PoolError>(())
/// ```
pub struct GraphDecoder<M> {
    model: M,
    pool: Rc<RefCell<KvPool>>,
    recording: Option<Recording>,
    records: bool,
    /// Why the last step was not part of a recording.
    reason: Option<&'static str>,
}

type Pass = Box<dyn FnMut() -> Result<Tensor<3>, TransformerError>>;

/// Recording of one batch.
struct Recording {
    batch: Vec<SequenceId>,
    inputs: Rc<Inputs>,
    replayed: CapturedGraph<Tensor<3>, Pass>,
    /// [`Evictor::moves`] at the time, and the [`Evictor::evictions`] that its tables reflect.
    moves: usize,
    evictions: usize,
}

/// Inputs that a replay reads.
struct Inputs {
    /// `[batch, s]`
    tokens: StaticInput<2, Int>,
    /// `[batch · s]`
    positions: StaticInput<1, Int>,
    /// `[batch]`: positions of the first tokens.
    first: StaticInput<1, Int>,
    groups: Vec<GroupInputs>,
    /// [`Watch::calls`] and [`Watch::slots`], if keys are evicted.
    watch: Option<(StaticInput<2, Int>, StaticInput<3, Int>)>,
    /// Zeros.
    counters: Tensor<1, Int>,
}

struct GroupInputs {
    /// `[batch, T, s]`
    slots: StaticInput<3, Int>,
    /// `[batch, T, entries]`
    table: StaticInput<3, Int>,
    /// `[batch, T, 4]`
    spans: StaticInput<3, Int>,
    /// Positions of the slots and the last queries that see them, `[batch · T · s]`; None if all queries see all slots.
    sight: Option<[StaticInput<1, Int>; 2]>,
    /// Pages that all sequences share and that are read once, and their number.
    prefix: (Option<Box<PageLists>>, usize),
    /// Page selection, if any.
    choice: Option<PageChoice>,
    /// Compressed blocks that end, for native sparse attention.
    nsa: Option<NsaInputs>,
}

impl<M: Decoder + 'static> GraphDecoder<M> {
    /// Wraps a model and its pool.
    ///
    /// # Errors
    /// [`TransformerError::Argument`](burn_sparse_transformer::TransformerError::Argument) if the pool is another model's, or the model is on a
    /// device with autodiff.
    pub fn new(model: M, pool: KvPool) -> Result<Self, PoolError> {
        let layers = model.attentions();
        pool.check_layers(&layers, &layers[0].key.weight.device())?;
        Ok(Self {
            model,
            pool: Rc::new(RefCell::new(pool)),
            recording: None,
            records: true,
            reason: None,
        })
    }

    /// Sets whether steps are captured if the device can. Default: yes.
    #[must_use]
    pub fn recording(mut self, records: bool) -> Self {
        self.records = records;
        self
    }

    /// Returns the pool.
    pub fn pool(&self) -> Ref<'_, KvPool> {
        self.pool.borrow()
    }

    /// Returns the pool mutably, for sequences to join, leave, fork and roll back.
    pub fn pool_mut(&mut self) -> RefMut<'_, KvPool> {
        self.pool.borrow_mut()
    }

    /// Returns the model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// Returns whether steps of the last batch are replays of a recording.
    pub fn is_recorded(&self) -> bool {
        (self.recording.as_ref()).is_some_and(|recording| recording.replayed.is_recorded())
    }

    /// Returns why steps are not replayed, once that is known.
    pub fn fallback_reason(&self) -> Option<&str> {
        let of_recording = || self.recording.as_ref()?.replayed.fallback_reason();
        self.reason.or_else(of_recording)
    }

    /// Like [`PagedDecoder::next_logits`], for tokens `[batch, seq]`, row by row. The next step may overwrite the logits. Steps of one token are
    /// captured.
    ///
    /// # Shapes
    /// - output: `[batch, vocab_size]`
    ///
    /// # Errors
    /// Those of [`PagedDecoder::next_logits`]; also if the tokens are not a whole number of rows.
    pub fn next_logits(
        &mut self,
        tokens: &[u32],
        steps: &[KvStep],
    ) -> Result<Tensor<2>, PoolError> {
        let seq = rows(tokens, steps)?;
        if seq == 1 && self.records {
            let logits = self.all_logits(tokens, steps)?;
            let [batch, _, vocab] = logits.dims();
            return Ok(logits.reshape([batch, vocab]));
        }
        self.recording = None;
        let several = "only the logits after the last of several tokens";
        self.reason = self.records.then_some(several);
        let tokens = self.tensor(tokens, steps.len());
        self.model
            .next_logits(tokens, steps, &mut self.pool.borrow_mut())
    }

    /// Like [`PagedDecoder::forward_pool`], for tokens `[batch, seq]`, row by row; sequences may have fewer. Returns the logits after each token,
    /// which the next step may overwrite. It verifies drafts; [`KvPool::truncate`] rolls the rejected ones back.
    ///
    /// # Shapes
    /// - output: `[batch, seq, vocab_size]`
    ///
    /// # Errors
    /// Those of [`PagedDecoder::try_forward_pool`]; also if the tokens are not a whole number of rows.
    pub fn all_logits(&mut self, tokens: &[u32], steps: &[KvStep]) -> Result<Tensor<3>, PoolError> {
        let seq = rows(tokens, steps)?;
        if self.records {
            self.reason = self.pool.borrow().refuses(steps, seq)?;
        }
        if self.records && self.reason.is_none() {
            return self.replay(tokens, steps, seq);
        }
        // This step may write to other buffers than the recording does.
        self.recording = None;
        let tokens = self.tensor(tokens, steps.len());
        self.model
            .try_forward_pool(tokens, steps, &mut self.pool.borrow_mut())
    }

    fn tensor(&self, tokens: &[u32], batch: usize) -> Tensor<2, Int> {
        let shape = [batch, tokens.len() / batch];
        ints(numbers(tokens), shape, &self.pool.borrow().device)
    }

    fn replay(
        &mut self,
        tokens: &[u32],
        steps: &[KvStep],
        seq: usize,
    ) -> Result<Tensor<3>, PoolError> {
        // A replay writes the eviction state in place, so only other steps keep a copy of it.
        let recording = self.recording.as_ref();
        let is_kept = recording.is_none_or(|recording| !recording.replayed.replays_next());
        let advance = self
            .pool
            .borrow_mut()
            .advance(steps, seq, [false, is_kept])?;
        let logits = self.replay_advanced(tokens, steps, seq, &advance);
        let logits = logits.and_then(|logits| {
            let layers = self.model.attentions();
            self.pool.borrow_mut().settle(steps, &layers)?;
            Ok(logits)
        });
        if logits.is_err() {
            self.pool.borrow_mut().undo(advance.undo);
        }
        logits
    }

    fn replay_advanced(
        &mut self,
        tokens: &[u32],
        steps: &[KvStep],
        seq: usize,
        advance: &Advance,
    ) -> Result<Tensor<3>, PoolError> {
        let batch: Vec<SequenceId> = steps.iter().map(|step| step.id).collect();
        let shape = [steps.len(), seq];
        let kept = match self.recording.take() {
            Some(recording) if recording.fits(&batch, shape, advance, &self.pool.borrow())? => {
                Some(recording)
            }
            _ => None,
        };
        let mut is_new = kept.is_none();
        let mut recording = match kept {
            Some(recording) => recording,
            None => self.record(batch, seq)?,
        };
        let pool = self.pool.borrow();
        let evictions = pool.evictor.as_ref().map_or(0, |evictor| evictor.evictions);
        is_new |= std::mem::replace(&mut recording.evictions, evictions) != evictions;
        let inputs = &recording.inputs;
        overwrite(&inputs.tokens, numbers(tokens))?;
        let most = pool.context.map_or(usize::MAX, |context| context - 1);
        let positions = (advance.starts.iter()).flat_map(|&start| start..start + seq);
        let positions = positions.map(|position| position.min(most) as i32);
        overwrite(&inputs.positions, positions.collect())?;
        let first = advance.starts.iter().map(|&start| start as i32);
        overwrite(&inputs.first, first.collect())?;
        if let (Some((calls, slots)), Some(evictor)) = (&inputs.watch, &pool.evictor) {
            let [of_calls, of_slots] = evictor.places(steps, &advance.starts, seq);
            overwrite(calls, of_calls)?;
            overwrite(slots, of_slots)?;
        }
        for ((group, inputs), writes) in pool.groups.iter().zip(&inputs.groups).zip(&advance.writes)
        {
            inputs.write(group, &recording.batch, writes, is_new)?;
            if let Some(nsa) = &inputs.nsa {
                nsa.write(&pool.groups, group, (&recording.batch[..], &writes[..]))?;
            }
        }
        drop(pool);
        let logits = recording.replayed.run()?.clone();
        self.recording = Some(recording);
        Ok(logits)
    }

    /// Makes the inputs of a recording; the next steps run, and then are captured, with them.
    fn record(&self, batch: Vec<SequenceId>, seq: usize) -> Result<Recording, PoolError> {
        let mut pool = self.pool.borrow_mut();
        let device = pool.device.clone();
        let count = batch.len();
        let heads = pool.groups.iter().map(|group| group.key.heads).max();
        let queries = count * seq * heads.unwrap_or(1);
        let mut groups = Vec::with_capacity(pool.groups.len());
        for at in 0..pool.groups.len() {
            let inputs = GroupInputs::new(&pool.groups[at], (&batch, seq), &pool)?;
            let group = &mut pool.groups[at];
            let sight = inputs.sight.as_ref();
            group.sight = sight.map(|_| Sight::new(&group.books, &device));
            groups.push(inputs);
        }
        let watch = match pool.evictor {
            Some(_) => Some((
                zeros([count, 4], &device)?,
                zeros([count, 1, seq], &device)?,
            )),
            None => None,
        };
        let inputs = Rc::new(Inputs {
            tokens: zeros([count, seq], &device)?,
            positions: zeros([count * seq], &device)?,
            first: zeros([count], &device)?,
            groups,
            watch,
            counters: Tensor::zeros([queries], (&device, DType::I32)),
        });
        let pass: Pass = Box::new({
            let (model, pool, inputs) = (self.model.clone(), self.pool.clone(), inputs.clone());
            move || {
                let mut pool = pool.borrow_mut();
                let step = inputs.step(&mut pool);
                let attend = &mut pool.attend(&step);
                let x = model.hidden(inputs.tokens.tensor(), &step.positions, attend)?;
                model.logits(x)
            }
        });
        Ok(Recording {
            batch,
            inputs,
            replayed: CapturedGraph::new(&device, pass)?,
            moves: pool.evictor.as_ref().map_or(0, |evictor| evictor.moves),
            evictions: 0,
        })
    }
}

/// Returns the tokens of each sequence in rows of a batch.
fn rows(tokens: &[u32], steps: &[KvStep]) -> Result<usize, PoolError> {
    let batch = steps.len();
    blocksparse::ensure! {
        PoolError;
        batch > 0 && !tokens.is_empty() && tokens.len().is_multiple_of(batch) => "tokens", format!("rows for {batch} sequences"), tokens.len();
    }
    Ok(tokens.len() / batch)
}

fn numbers(tokens: &[u32]) -> Vec<i32> {
    tokens.iter().map(|&token| token as i32).collect()
}

impl Recording {
    /// Returns whether a step can be a replay.
    fn fits(
        &self,
        batch: &[SequenceId],
        shape: [usize; 2],
        advance: &Advance,
        pool: &KvPool,
    ) -> Result<bool, PoolError> {
        let moves = pool.evictor.as_ref().map_or(0, |evictor| evictor.moves);
        if self.batch != batch || self.inputs.tokens.dims() != shape || self.moves != moves {
            return Ok(false);
        }
        for ((inputs, writes), group) in
            (self.inputs.groups.iter().zip(&advance.writes)).zip(&pool.groups)
        {
            let entries = writes
                .iter()
                .map(|writes| writes.entries)
                .max()
                .unwrap_or(0);
            let [_, _, most] = inputs.table.dims();
            let is_seen = inputs.sight.is_none() || group.sight.is_some();
            let (prefix, shared) = &inputs.prefix;
            let is_shared = match prefix {
                Some(_) => group.books.shared_pages(batch)? >= *shared,
                None => true,
            };
            if entries > most + shared || !is_seen || !is_shared {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Inputs {
    /// Makes the step that the layers read.
    fn step(&self, pool: &mut KvPool) -> Step {
        let groups = self.groups.iter().zip(&mut pool.groups);
        let groups = groups.map(|(inputs, group)| GroupStep {
            copies: None,
            slots: inputs.slots.tensor(),
            road: Road::Paged(Box::new(PageLists {
                visibility: inputs.visibility(group, self.first.tensor()),
                counters: Some(self.counters.clone()),
                prefix: inputs.prefix.0.clone(),
                choice: inputs.choice,
                ..PageLists::new(inputs.table.tensor(), inputs.spans.tensor())
            })),
            index_copies: None,
            freed: Vec::new(),
            nsa: inputs.nsa.as_ref().map(NsaInputs::step),
        });
        let watch = self.watch.as_ref();
        Step {
            groups: groups.collect(),
            positions: Positions::Listed(Box::new(self.positions.tensor())),
            watch: watch.map(|(calls, slots)| Watch {
                calls: calls.tensor(),
                slots: slots.tensor(),
                prompts: None,
            }),
            undo: None,
        }
    }
}

impl GroupInputs {
    /// Allocates inputs with a table wide enough for the whole context, for the retained keys if keys are evicted, or for all pages if there is no
    /// limit.
    fn new(
        group: &Group,
        (batch, seq): (&[SequenceId], usize),
        pool: &KvPool,
    ) -> Result<Self, PoolError> {
        let (config, device) = (group.books.config(), &pool.device);
        let most = pool.evictor.as_ref().map(|evictor| {
            let config = &evictor.config;
            config
                .capacity()
                .saturating_add(config.slack)
                .saturating_add(seq)
        });
        let most = most.into_iter().chain(pool.context).min();
        // Both regions may end with a page that is not full.
        let of_context = |context: usize| 2 * (context.div_ceil(config.page_size()) + 1);
        let entries = most.map_or(usize::MAX, of_context);
        let now = group.books.tables(batch)?.max_pages;
        let entries = entries.min(config.pages()).max(now).next_power_of_two();
        let rows = group.books.table_rows();
        let count = batch.len() * rows * seq;
        let sight = match group.sees_all(seq == 1, pool.residency) {
            true => None,
            false => Some([zeros([count], device)?, zeros([count], device)?]),
        };
        let cascade = match group.is_apart() {
            true => usize::MAX,
            false => pool.cascade(),
        };
        let prefix = step::shared_prefix(&group.books, batch, cascade, device)?;
        Ok(Self {
            slots: zeros([batch.len(), rows, seq], device)?,
            table: zeros([batch.len(), rows, entries - prefix.1], device)?,
            spans: zeros([batch.len(), rows, 4], device)?,
            sight,
            prefix,
            choice: group.choice,
            nsa: NsaInputs::new(group, batch.len(), device)?,
        })
    }

    /// Writes the visibility of the new slots, unless all queries see all slots.
    fn visibility(&self, group: &mut Group, first: Tensor<1, Int>) -> Option<PagedVisibility> {
        let [positions, last] = self.sight.as_ref()?;
        let slots = self.slots.tensor();
        let slots = slots.reshape(positions.dims());
        let sight = group.sight.take()?;
        let sight = sight.written(slots, positions.tensor(), last.tensor());
        Some(group.sight.insert(sight).of_queries(first))
    }

    /// Writes the slots of a step's keys and the spans of the batch. Writes the table only if it is new or changed.
    fn write(
        &self,
        group: &Group,
        batch: &[SequenceId],
        writes: &[Writes],
        is_new: bool,
    ) -> Result<(), PoolError> {
        let [_, rows, seq] = self.slots.dims();
        let places = step::slots_in_rows(writes, rows, seq, |writes| &writes.slots);
        overwrite(&self.slots, places)?;
        if let Some([positions, last]) = &self.sight {
            let of_last = step::slots_in_rows(writes, rows, seq, |writes| &writes.last);
            overwrite(last, of_last)?;
            let of_rows = writes.iter().flat_map(|writes| {
                let first = writes.first as i32;
                (0..rows).flat_map(move |_| first..first + seq as i32)
            });
            overwrite(positions, of_rows.collect())?;
        }
        let (_, shared) = self.prefix;
        let spans = step::own_spans(&group.books, batch, shared)?;
        overwrite(&self.spans, spans)?;
        // The table is not uploaded elsewhere after an eviction or a change of sequences.
        if is_new || writes.iter().any(|writes| !writes.changes.is_empty()) {
            let tables = group.books.tables(batch)?;
            let [_, _, entries] = self.table.dims();
            let mut table = vec![-1; tables.rows * entries];
            let rows = tables.table.chunks(tables.max_pages);
            for (row, to) in rows.zip(table.chunks_mut(entries)) {
                let row = &row[shared..];
                let count = row.len().min(entries);
                to[..count].copy_from_slice(&row[..count]);
            }
            overwrite(&self.table, table)?;
        }
        Ok(())
    }
}

impl Group {
    /// Returns whether queries of a step see all slots, or select the ones that they see.
    pub(super) fn sees_all(&self, is_single: bool, residency: KvRetention) -> bool {
        is_single && self.books.single_sees_all(residency) || self.is_apart()
    }

    /// Returns whether each query selects its own keys, so that no pages are read once for all sequences.
    pub(super) fn is_apart(&self) -> bool {
        self.choice.is_some() || self.key.indexer.is_some()
    }
}

impl KvPool {
    /// Returns why a step cannot be captured, if it cannot: more than lengths, tables and visibility would differ from step to step.
    fn refuses(&self, steps: &[KvStep], seq: usize) -> Result<Option<&'static str>, PoolError> {
        let mut is_new = seq > 1;
        for step in steps {
            is_new &= self.len(step.id)? == 0;
        }
        let branches = || {
            self.layers
                .iter()
                .filter_map(|layer| layer.branches.as_ref())
        };
        let has_branches = branches().next().is_some();
        let of_keys = self.layers.iter().any(|layer| layer.store.is_quantized());
        let sums = self.evictor.as_ref().is_some_and(Evictor::sums);
        let all = |f: &dyn Fn(&Group) -> bool| self.groups.iter().all(f);
        let reasons = [
            (is_new, "sequences without tokens read prompts"),
            (
                self.positions != KvPositions::Original,
                "rotations are of places in the cache",
            ),
            (
                !all(&|group| group.key.is_plain() && group.books.row_is_live()),
                "the keys of a query are gathered",
            ),
            (
                seq > 1 && (has_branches || self.groups.iter().any(Group::is_apart)),
                "several tokens of a sequence choose keys",
            ),
            (
                has_branches && !all(&|group| group.books.single_sees_all(self.residency)),
                "branches keep keys that a query does not see",
            ),
            (
                !branches().all(Branches::is_recordable),
                "branches are in eight bits",
            ),
            (
                sums && of_keys,
                "attention to keys in eight bits is summed up",
            ),
        ];
        if let Some((_, reason)) = reasons.into_iter().find(|(is_so, _)| *is_so) {
            return Ok(Some(reason));
        }
        for group in &self.groups {
            for step in steps {
                if group.books.copies_next(step.id)? {
                    return Ok(Some("pages are copied after a fork"));
                }
            }
        }
        Ok(None)
    }
}
