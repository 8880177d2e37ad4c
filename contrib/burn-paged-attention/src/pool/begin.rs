//! Begin of a call: reserves slots in the block tables and makes the inputs of the layers.

use burn::tensor::Device;
use burn_sparse_transformer::TransformerError;
use burn_sparse_transformer::decoder::Positions;

use super::nsa_step::NsaStep;
use super::sight::Sight;
use super::step::{self, GroupStep, Road, Sinks};
use super::store::{self, Copies};
use super::watch::Watch;
use super::watched::Evictor;
use super::{Group, KvPool, KvPositions, KvStep};
use crate::PoolError;
use crate::pages::{CacheError, KvRetention, PagePool, SequenceId, Step as BooksStep, Writes};

/// A call in progress.
#[derive(Debug)]
pub(super) struct Step {
    pub positions: Positions,
    pub(super) groups: Vec<GroupStep>,
    /// Inputs for eviction, if keys are evicted.
    pub(super) watch: Option<Watch>,
    /// None in a recording: the caller that replays it undoes steps.
    pub(super) undo: Option<Undo>,
}

/// State before a call.
#[derive(Debug)]
pub(super) struct Undo {
    books: UndoBooks,
    /// None if it stays unchanged.
    evictor: Option<Evictor>,
}

#[derive(Debug)]
enum UndoBooks {
    /// Lengths to truncate to.
    Lengths(Vec<(SequenceId, usize)>),
    Books(Vec<PagePool>),
}

impl Undo {
    /// Copies the present state.
    pub(super) fn of_books(pool: &KvPool) -> Self {
        Self {
            books: UndoBooks::all(pool),
            evictor: pool.evictor.clone(),
        }
    }
}

impl UndoBooks {
    fn all(pool: &KvPool) -> Self {
        let books = pool.groups.iter().map(|group| group.books.clone());
        Self::Books(books.collect())
    }
}

/// Changes of the block tables by a call.
#[derive(Debug)]
pub(super) struct Advance {
    /// First new position of each sequence.
    pub starts: Vec<usize>,
    /// Per group and sequence.
    pub writes: Vec<Vec<Writes>>,
    /// True if the cache is empty, so that attention runs over the layers' own layout.
    pub is_dense: bool,
    pub undo: Undo,
}

impl KvPool {
    /// Reserves slots for new rows of a batch `[batch, seq]` in the block tables. Nothing has changed after an error; if a later stage fails, call
    /// [`Self::undo`]. If `watched`, the undo state includes that of eviction, which is then not written in place.
    pub(super) fn advance(
        &mut self,
        steps: &[KvStep],
        seq: usize,
        [last, watched]: [bool; 2],
    ) -> Result<Advance, PoolError> {
        let mut starts = Vec::with_capacity(steps.len());
        for step in steps {
            let start = self.len(step.id)?;
            blocksparse::ensure! {
                PoolError;
                (1..=seq).contains(&step.tokens) => "tokens", format!("from 1 to {seq} of each sequence, the input's"), step.tokens;
            }
            let end = start + step.tokens;
            if let Some(context) = self.context.filter(|&context| end > context) {
                return Err(PoolError::Layers(TransformerError::ContextExceeded {
                    context,
                    limit: "the model's context",
                    start,
                    end,
                }));
            }
            starts.push(start);
        }
        let is_causal = self
            .groups
            .iter()
            .all(|group| group.key.pattern.is_causal());
        let is_even = steps.iter().all(|step| step.tokens == seq);
        // A prompt's queries must not see what a window hides from later ones.
        let is_dense = seq > 1
            && starts.iter().all(|&start| start == 0)
            && (is_even || is_causal)
            && !matches!(self.residency, KvRetention::Window { .. });
        let is_prompt = |(step, &start): (&KvStep, &usize)| start == 0 && step.tokens > 1;
        blocksparse::ensure! {
            PoolError;
            !self.prompts_choose || is_dense || !steps.iter().zip(&starts).any(is_prompt) => "steps",
                "prompts alone, or none of more than one token, where prompts choose their keys", "both";
        }
        let of_books: Vec<_> = steps
            .iter()
            .map(|step| {
                let of_books = match is_dense {
                    true => BooksStep::prefill(step.id, step.tokens),
                    false => BooksStep::decode(step.id, step.tokens),
                };
                if last { of_books.last() } else { of_books }
            })
            .collect();
        for group in &self.groups {
            let (asked, free) = group.books.pages_needed(&of_books)?;
            if asked > free {
                return Err(CacheError::OutOfPages { asked, free }.into());
            }
        }
        if let Some(evictor) = &mut self.evictor {
            let ids: Vec<SequenceId> = steps.iter().map(|step| step.id).collect();
            let slots = (self.groups.iter()).map(|group| Ok(group.books.tables(&ids)?.most_slots));
            let slots = slots.collect::<Result<Vec<_>, PoolError>>()?;
            evictor.make_room([0, slots.into_iter().max().unwrap_or(0) + seq])?;
        }
        let books = match is_dense {
            true => UndoBooks::all(self),
            false => {
                let ids = steps.iter().map(|step| step.id);
                UndoBooks::Lengths(ids.zip(starts.iter().copied()).collect())
            }
        };
        let undo = Undo {
            books,
            evictor: self.evictor.clone().filter(|_| watched),
        };
        let mut writes = Vec::with_capacity(self.groups.len());
        for group in &mut self.groups {
            writes.push(group.books.steps(&of_books)?);
        }
        Ok(Advance {
            starts,
            writes,
            is_dense,
            undo,
        })
    }

    /// Runs [`Self::advance`], and makes the inputs of the layers.
    pub(super) fn begin(
        &mut self,
        steps: &[KvStep],
        seq: usize,
        last: bool,
    ) -> Result<Step, PoolError> {
        let Advance {
            starts,
            writes,
            is_dense,
            undo,
        } = self.advance(steps, seq, [last, true])?;
        match self.told(steps, (&starts, &writes), seq, is_dense) {
            Ok((groups, watch)) => Ok(Step {
                positions: step::positions_of(&starts, seq, self.context, &self.device),
                groups,
                watch,
                undo: Some(undo),
            }),
            Err(error) => {
                self.undo(undo);
                Err(error)
            }
        }
    }

    /// Makes the inputs of the layers of each group.
    fn told(
        &mut self,
        steps: &[KvStep],
        (starts, writes): (&[usize], &[Vec<Writes>]),
        seq: usize,
        is_dense: bool,
    ) -> Result<(Vec<GroupStep>, Option<Watch>), PoolError> {
        let kept = Kept {
            residency: self.residency,
            cascade: self.cascade(),
            positions: self.positions,
        };
        let mut groups = Vec::with_capacity(self.groups.len());
        for (group, writes) in self.groups.iter_mut().zip(writes) {
            groups.push(group.step(steps, writes, seq, is_dense, kept, &self.device)?);
        }
        for (at, group) in groups.iter_mut().enumerate() {
            let call = (steps, writes);
            group.nsa = NsaStep::new(&self.groups, at, call, seq, is_dense, &self.device)?;
        }
        let how = (seq, is_dense);
        let watch = |evictor| Watch::new(evictor, &self.groups, steps, starts, how, &self.device);
        let watch = self.evictor.as_ref().map(watch).transpose()?;
        Ok((groups, watch))
    }

    /// Returns the least number of keys shared by a batch that are read once for all. Sums of attention need whole page lists, so they disable it.
    pub(super) fn cascade(&self) -> usize {
        match self.evictor.as_ref().is_some_and(Evictor::sums) {
            true => usize::MAX,
            false => self.cascade,
        }
    }

    /// Undoes [`Self::advance`].
    pub(super) fn undo(&mut self, undo: Undo) {
        if undo.evictor.is_some() {
            self.evictor = undo.evictor;
        }
        match undo.books {
            UndoBooks::Books(books) => {
                for (group, books) in self.groups.iter_mut().zip(books) {
                    group.books = books;
                    group.uploaded = None;
                    group.sight = None;
                }
            }
            UndoBooks::Lengths(lengths) => {
                for (id, len) in lengths {
                    let undone = self.each(|books| books.truncate(id, len));
                    debug_assert!(undone.is_ok(), "a step can be taken back: {undone:?}");
                }
            }
        }
    }
}

/// Settings of a pool for its groups.
#[derive(Clone, Copy)]
struct Kept {
    residency: KvRetention,
    cascade: usize,
    positions: KvPositions,
}

impl Group {
    fn step(
        &mut self,
        steps: &[KvStep],
        writes: &[Writes],
        seq: usize,
        is_dense: bool,
        kept: Kept,
        device: &Device,
    ) -> Result<GroupStep, PoolError> {
        let is_single = steps.iter().all(|step| step.tokens == 1);
        let (is_apart, sees_all) = (self.is_apart(), self.sees_all(is_single, kept.residency));
        let Self {
            key,
            choice,
            books,
            uploaded,
            sight,
            nsa: _,
        } = self;
        let known = sight.take();
        let rows = books.table_rows();
        let copies = || writes.iter().flat_map(|writes| &writes.copies);
        let page_size = books.config().page_size();
        let road = if is_dense {
            let is_even = steps.iter().all(|step| step.tokens == seq);
            let lengths = || steps.iter().map(|step| step.tokens).collect();
            Road::Dense((!is_even).then(lengths))
        } else if key.is_plain() && books.row_is_live() {
            let seen = match (kept.positions, kept.residency) {
                (KvPositions::InCache, KvRetention::Window { window, sinks }) => {
                    Some([window, sinks])
                }
                _ => None,
            };
            // Pages that are read once for all sequences cannot be subject to selection.
            let cascade = match seen.is_some() || is_apart {
                true => usize::MAX,
                false => kept.cascade,
            };
            let batch: Vec<_> = steps.iter().map(|step| step.id).collect();
            let call = (batch.clone(), writes);
            let mut page_lists = step::page_lists(books, uploaded, call, cascade, device)?;
            if let Some(seen) = seen {
                let sinks = Sinks::of(&mut page_lists, books, steps, writes, seq, seen, device)?;
                page_lists.sinks = sinks;
            }
            if is_apart {
                page_lists.by_row(&books.spans(&batch)?, writes, rows, seq);
                page_lists.choice = *choice;
            } else if !sees_all {
                let first = writes.iter().map(|writes| writes.first as i32).collect();
                let first = store::ints(first, [steps.len()], device);
                let now = match known {
                    Some(known) => known.apply(writes, device),
                    None => Sight::new(books, device),
                };
                page_lists.visibility = Some(now.of_queries(first));
                *sight = Some(now);
            }
            Road::Paged(Box::new(page_lists))
        } else {
            let gathered = step::gather(books, key, steps, writes, seq, device)?;
            Road::Gathered(Box::new(gathered))
        };
        Ok(GroupStep {
            copies: Copies::new(copies(), [rows, key.kv_heads, page_size], device),
            index_copies: match key.indexer.is_some() {
                true => Copies::new(copies(), [rows, rows, page_size], device),
                false => None,
            },
            slots: step::slots_of(writes, rows, seq, device),
            road,
            freed: (writes.iter())
                .flat_map(|writes| writes.freed.clone())
                .collect(),
            nsa: None,
        })
    }
}
