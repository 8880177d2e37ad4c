//! Steps of one token a sequence, recorded once and replayed.

use std::cell::{Ref, RefCell, RefMut};
use std::rc::Rc;

use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_blocksparse::graph::{CapturedGraph, StaticInput};
use burn_sparse_select::pages::PageChoice;
use burn_sparse_transformer::TransformerError;
use burn_sparse_transformer::decoder::{Decoder, Positions};

use super::begin::Advance;
use super::model::PagedDecoder;
use super::nsa::Branches;
use super::nsa_step::NsaInputs;
use super::step::{GroupStep, PageLists, Road};
use super::store::{data, zeros};
use super::{Group, KvPool, KvPositions, KvStep, Step, check_steps};
use crate::PoolError;
use crate::pages::{SequenceId, Writes};

/// A model with its pool, whose steps of a token for each sequence of a batch are recorded once and replayed as a single dispatch where the device can
/// (CUDA): see [`CapturedGraph`]. Elsewhere they run one by one. The numbers are those of [`PagedDecoder::next_logits`] either way.
///
/// The first three steps of a batch run, the fourth is recorded. Another batch, or a step that a recording cannot take (several tokens, pages that are
/// copied after a fork, a pattern whose slots are gathered or have positions, `nsa` in eight bits), runs by itself, and the next batch is recorded anew.
///
/// It stays on its thread, as recordings do.
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
}

type Pass = Box<dyn FnMut() -> Result<Tensor<2>, TransformerError>>;

/// What is recorded of one batch.
struct Recording {
    batch: Vec<SequenceId>,
    inputs: Rc<Inputs>,
    replayed: CapturedGraph<Tensor<2>, Pass>,
}

/// What a replay reads.
struct Inputs {
    /// `[batch, 1]`
    tokens: StaticInput<2, Int>,
    /// `[batch]`
    positions: StaticInput<1, Int>,
    groups: Vec<GroupInputs>,
    /// Zeros.
    counters: Tensor<1, Int>,
}

struct GroupInputs {
    /// `[batch, T, 1]`
    slots: StaticInput<3, Int>,
    /// `[batch, T, entries]`
    table: StaticInput<3, Int>,
    /// `[batch, T, 4]`
    spans: StaticInput<3, Int>,
    /// How queries choose pages, if they do.
    choice: Option<PageChoice>,
    /// Blocks that end, of native sparse attention.
    nsa: Option<NsaInputs>,
}

impl<M: Decoder + 'static> GraphDecoder<M> {
    /// Takes a model and a pool of it.
    ///
    /// # Errors
    /// [`TransformerError::Argument`](burn_sparse_transformer::TransformerError::Argument) if the pool is another model's, or the model is on a device with autodiff.
    pub fn new(model: M, pool: KvPool) -> Result<Self, PoolError> {
        let layers = model.attentions();
        pool.check_layers(&layers, &layers[0].key.weight.device())?;
        Ok(Self {
            model,
            pool: Rc::new(RefCell::new(pool)),
            recording: None,
        })
    }

    /// The pool.
    pub fn pool(&self) -> Ref<'_, KvPool> {
        self.pool.borrow()
    }

    /// The pool, for sequences to join, leave, fork and go back.
    pub fn pool_mut(&mut self) -> RefMut<'_, KvPool> {
        self.pool.borrow_mut()
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// Whether steps of the last batch are replays of a recording.
    pub fn is_recorded(&self) -> bool {
        (self.recording.as_ref()).is_some_and(|recording| recording.replayed.is_recorded())
    }

    /// Why steps run one by one, once that is known.
    pub fn fallback_reason(&self) -> Option<&str> {
        self.recording.as_ref()?.replayed.fallback_reason()
    }

    /// [`PagedDecoder::next_logits`] of tokens `[batch, seq]`, row by row. The next step may write where the logits are.
    ///
    /// # Shapes
    /// - output: `[batch, vocab_size]`
    ///
    /// # Errors
    /// As [`PagedDecoder::next_logits`]; also if the tokens are no whole number of rows.
    pub fn next_logits(
        &mut self,
        tokens: &[u32],
        steps: &[KvStep],
    ) -> Result<Tensor<2>, PoolError> {
        let batch = steps.len();
        blocksparse::ensure! {
            PoolError;
            batch > 0 && !tokens.is_empty() && tokens.len().is_multiple_of(batch) => "tokens", format!("rows for {batch} sequences"), tokens.len();
        }
        let seq = tokens.len() / batch;
        check_steps(steps, batch)?;
        let can_be_replayed = seq == 1 && self.pool.borrow().is_replayable(batch);
        if can_be_replayed && !self.pool.borrow().copies(steps)? {
            return self.replay(tokens, steps);
        }
        // What this writes may be elsewhere than where a recording writes.
        self.recording = None;
        let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        let data = TensorData::new(tokens, [batch, seq]);
        let mut pool = self.pool.borrow_mut();
        let tokens = Tensor::from_data(data, &pool.device);
        self.model.next_logits(tokens, steps, &mut pool)
    }

    fn replay(&mut self, tokens: &[u32], steps: &[KvStep]) -> Result<Tensor<2>, PoolError> {
        let advance = self.pool.borrow_mut().advance(steps, 1, false)?;
        match self.replay_advanced(tokens, steps, &advance) {
            Ok(logits) => Ok(logits),
            Err(error) => {
                self.pool.borrow_mut().undo(advance.undo);
                Err(error)
            }
        }
    }

    fn replay_advanced(
        &mut self,
        tokens: &[u32],
        steps: &[KvStep],
        advance: &Advance,
    ) -> Result<Tensor<2>, PoolError> {
        let batch: Vec<SequenceId> = steps.iter().map(|step| step.id).collect();
        let tokens = tokens.iter().map(|&token| token as i32).collect();
        let fits = |recording: &Recording| {
            let entries = |writes: &[Writes]| writes.iter().map(|writes| writes.entries).max();
            let mut groups = recording.inputs.groups.iter().zip(&advance.writes);
            recording.batch == batch
                && groups.all(|(inputs, writes)| entries(writes) <= Some(inputs.table.dims()[2]))
        };
        let pool = self.pool.borrow();
        let kept = self.recording.take().filter(|recording| fits(recording));
        let is_new = kept.is_none();
        let mut recording = match kept {
            Some(recording) => recording,
            None => self.record(batch, &pool)?,
        };
        let inputs = &recording.inputs;
        inputs.tokens.write(data(tokens, [steps.len(), 1]))?;
        let positions = advance.starts.iter().map(|&start| start as i32);
        let positions = data(positions.collect(), [steps.len()]);
        inputs.positions.write(positions)?;
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

    /// Nothing is recorded yet, but what will be reads these inputs.
    fn record(&self, batch: Vec<SequenceId>, pool: &KvPool) -> Result<Recording, PoolError> {
        let device = &pool.device;
        let count = batch.len();
        let heads = pool.groups.iter().map(|group| group.key.heads).max();
        let queries = count * heads.unwrap_or(1);
        let groups = pool
            .groups
            .iter()
            .map(|group| GroupInputs::new(group, &batch, pool));
        let inputs = Rc::new(Inputs {
            tokens: zeros([count, 1], device)?,
            positions: zeros([count], device)?,
            groups: groups.collect::<Result<_, _>>()?,
            counters: Tensor::zeros([queries], (device, DType::I32)),
        });
        let pass: Pass = Box::new({
            let (model, pool, inputs) = (self.model.clone(), self.pool.clone(), inputs.clone());
            move || {
                let step = inputs.step();
                let mut pool = pool.borrow_mut();
                let attend = &mut pool.attend(&step);
                let x = model.hidden(inputs.tokens.tensor(), &step.positions, attend)?;
                let logits = model.logits(x)?;
                let [batch, _, vocab] = logits.dims();
                Ok(logits.reshape([batch, vocab]))
            }
        });
        Ok(Recording {
            batch,
            inputs,
            replayed: CapturedGraph::new(device, pass)?,
        })
    }
}

impl Inputs {
    /// The step that the layers take.
    fn step(&self) -> Step {
        let groups = self.groups.iter().map(|group| GroupStep {
            copies: None,
            slots: group.slots.tensor(),
            road: Road::Paged(Box::new(PageLists {
                table: group.table.tensor(),
                spans: group.spans.tensor(),
                visibility: None,
                counters: Some(self.counters.clone()),
                prefix: None,
                sinks: None,
                choice: group.choice,
            })),
            watch: None,
            index_copies: None,
            freed: Vec::new(),
            nsa: group.nsa.as_ref().map(NsaInputs::step),
        });
        Step {
            positions: Positions::Listed(Box::new(self.positions.tensor())),
            groups: groups.collect(),
            undo: None,
        }
    }
}

impl GroupInputs {
    /// With a table for all that the context holds, or all pages if there is none.
    fn new(group: &Group, batch: &[SequenceId], pool: &KvPool) -> Result<Self, PoolError> {
        let config = group.books.config();
        // Both regions end with a page that is not full.
        let of_context = |context: usize| 2 * (context.div_ceil(config.page_size()) + 1);
        let entries = pool.context.map_or(usize::MAX, of_context);
        let now = group.books.tables(batch)?.max_pages;
        let entries = entries.min(config.pages()).max(now).next_power_of_two();
        let rows = group.books.table_rows();
        Ok(Self {
            slots: zeros([batch.len(), rows, 1], &pool.device)?,
            table: zeros([batch.len(), rows, entries], &pool.device)?,
            spans: zeros([batch.len(), rows, 4], &pool.device)?,
            choice: group.choice,
            nsa: NsaInputs::new(group, batch.len(), &pool.device)?,
        })
    }

    /// Writes where a step's keys go and where those of the batch are; the table only if it is new or changed.
    fn write(
        &self,
        group: &Group,
        batch: &[SequenceId],
        writes: &[Writes],
        is_new: bool,
    ) -> Result<(), PoolError> {
        let slots = writes.iter().flat_map(|writes| writes.slots.clone());
        self.slots.write(data(slots.collect(), self.slots.dims()))?;
        self.spans
            .write(data(group.books.spans(batch)?, self.spans.dims()))?;
        if is_new || writes.iter().any(|writes| !writes.changes.is_empty()) {
            let tables = group.books.tables(batch)?;
            let [_, _, entries] = self.table.dims();
            let mut table = vec![-1; tables.rows * entries];
            let rows = tables.table.chunks(tables.max_pages);
            for (row, to) in rows.zip(table.chunks_mut(entries)) {
                let count = row.len().min(entries);
                to[..count].copy_from_slice(&row[..count]);
            }
            self.table.write(data(table, self.table.dims()))?;
        }
        Ok(())
    }
}

impl KvPool {
    /// Whether single tokens of a batch read pages as they are, with nothing but lengths and tables that differ from step to step.
    fn is_replayable(&self, batch: usize) -> bool {
        batch > 0
            && self.evictor.is_none()
            && self.positions == KvPositions::Original
            && self.groups.iter().all(|Group { key, books, .. }| {
                key.is_plain() && books.single_sees_all(self.residency)
            })
            && self.branches.iter().flatten().all(Branches::is_recordable)
    }

    /// Whether single tokens would copy pages.
    fn copies(&self, steps: &[KvStep]) -> Result<bool, PoolError> {
        for group in &self.groups {
            for step in steps {
                if group.books.copies_next(step.id)? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}
