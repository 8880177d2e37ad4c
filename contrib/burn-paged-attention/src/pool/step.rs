//! Inputs of a call for the layers, made once for all layers of a pattern.

use std::collections::BTreeMap;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_blocksparse::Pattern;
use burn_sparse_select::Selection;
use burn_sparse_select::pages::PageChoice;
use burn_sparse_transformer::content::ContentAttention;
use burn_sparse_transformer::decoder::Positions;
use burn_sparse_transformer::nsa::NsaHeadsConfig;
use burn_sparse_transformer::{SparseMultiHeadAttention, TransformerError};

use super::KvStep;
use super::nsa_step::NsaStep;
use super::store::{Copies, Store, ints};
use crate::pages::{PagePool, SequenceId, SlotKey, Writes};
use crate::{PagedKeysValues, PagedStore, PagedVisibility, PoolError};

/// Added to the scores of masked pairs.
pub(super) const HIDDEN: f32 = -1e30;

/// Returns the positions of a call's rows, from each sequence's start on. They are clamped to the context: rows after a sequence's own have
/// arbitrary positions.
pub(super) fn positions_of(
    starts: &[usize],
    seq: usize,
    context: Option<usize>,
    device: &Device,
) -> Positions {
    let most = context.map_or(usize::MAX, |context| context - 1);
    let start = starts[0];
    if starts.iter().all(|&other| other == start) && start + seq - 1 <= most {
        return Positions::From(start);
    }
    let listed: Vec<i32> = (starts.iter())
        .flat_map(|&start| (start..start + seq).map(|position| position.min(most) as i32))
        .collect();
    let count = listed.len();
    Positions::Listed(Box::new(ints(listed, [count], device)))
}

/// Inputs for the layers of a pattern.
#[derive(Debug)]
pub(super) struct GroupStep {
    pub copies: Option<Copies>,
    /// Copies of an indexer's keys.
    pub index_copies: Option<Copies>,
    /// `[batch, T, s]`
    pub slots: Tensor<3, Int>,
    pub road: Road,
    /// Pages that became free.
    pub freed: Vec<usize>,
    /// Inputs for native sparse attention.
    pub nsa: Option<NsaStep>,
}

impl GroupStep {
    /// Writes a step's keys and values.
    pub(super) fn write(
        &self,
        store: &mut Store,
        pair: [Tensor<4>; 2],
    ) -> Result<(), TransformerError> {
        self.write_copied(store, self.copies.as_ref(), pair)
    }

    /// Like [`Self::write`], with other page copies.
    pub(super) fn write_copied(
        &self,
        store: &mut Store,
        copies: Option<&Copies>,
        pair: [Tensor<4>; 2],
    ) -> Result<(), TransformerError> {
        if cfg!(debug_assertions) {
            let [_, kv_heads, ..] = pair[0].dims();
            store.poison(&self.freed, kv_heads / self.slots.dims()[1]);
        }
        store.write(copies, pair, self.slots.clone())
    }
}

/// Path of the computation.
#[derive(Debug)]
pub(super) enum Road {
    /// Over the layers' own layout, because the cache is empty. With the lengths if sequences differ in length.
    Dense(Option<Vec<usize>>),
    /// From the pages in place.
    Paged(Box<PageLists>),
    /// From slots that are gathered first.
    Gathered(Box<Gathered>),
}

/// Page lists of a batch.
#[derive(Clone, Debug)]
pub(super) struct PageLists {
    pub table: Tensor<3, Int>,
    pub spans: Tensor<3, Int>,
    pub visibility: Option<PagedVisibility>,
    /// Zeros, at least one for each query of the batch.
    pub counters: Option<Tensor<1, Int>>,
    /// Pages that all sequences of the batch share, `[1, T, ..]`; they are not in the table and spans.
    pub prefix: Option<Box<PageLists>>,
    /// Sinks, which have spans of their own.
    pub sinks: Option<Sinks>,
    /// Page selection, if any; then every row of the call has its own page list.
    pub choice: Option<PageChoice>,
}

/// First keys of sequences, at positions as if the keys between them and the window did not exist.
#[derive(Clone, Debug)]
pub(super) struct Sinks {
    /// `[batch, T, 4]`
    pub spans: Tensor<3, Int>,
    /// Number of positions left out before each query, `[batch · s]`.
    pub left_out: Tensor<1, Int>,
}

impl Sinks {
    /// Splits the sinks off a page list, for queries with this window and number of sinks. None if nothing is left out.
    pub(super) fn of(
        page_lists: &mut PageLists,
        books: &PagePool,
        steps: &[KvStep],
        writes: &[Writes],
        seq: usize,
        [window, sinks]: [usize; 2],
        device: &Device,
    ) -> Result<Option<Self>, PoolError> {
        let last = sinks + window - 1;
        let queries = writes.iter().flat_map(|writes| {
            // Rows after a sequence's own are unused.
            let own = writes.tokens;
            (0..seq).map(move |row| writes.first + row.min(own.saturating_sub(1)))
        });
        let left_out: Vec<i32> = queries.map(|at| at.saturating_sub(last) as i32).collect();
        if left_out.iter().all(|&count| count == 0) {
            return Ok(None);
        }
        let batch: Vec<SequenceId> = steps.iter().map(|step| step.id).collect();
        let spans = books.spans(&batch)?;
        let shape = [batch.len(), books.table_rows(), 4];
        let without = |of: &[usize]| {
            let mut part = spans.clone();
            for span in part.chunks_mut(4) {
                for &number in of {
                    span[number] = 0;
                }
            }
            ints(part, shape, device)
        };
        page_lists.spans = without(&[0]);
        let count = left_out.len();
        Ok(Some(Self {
            spans: without(&[2, 3]),
            left_out: ints(left_out, [count], device),
        }))
    }
}

impl PageLists {
    pub(super) fn new(table: Tensor<3, Int>, spans: Tensor<3, Int>) -> Self {
        Self {
            table,
            spans,
            visibility: None,
            counters: None,
            prefix: None,
            sinks: None,
            choice: None,
        }
    }

    /// Lists all pages of a batch.
    pub(super) fn of_all(
        books: &PagePool,
        batch: &[SequenceId],
        device: &Device,
    ) -> Result<Self, PoolError> {
        page_lists(books, &mut None, (batch.to_vec(), &[]), usize::MAX, device)
    }

    pub(super) fn pages(&self, store: PagedStore, kv_heads: usize) -> PagedKeysValues {
        let (table, spans) = (self.table.clone(), self.spans.clone());
        let mut pages = PagedKeysValues::of_store(store, kv_heads, table, spans);
        pages.visibility = self.visibility.clone();
        pages.counters = self.counters.clone();
        pages
    }

    /// Returns the zeros if there are enough for `queries` queries.
    pub(super) fn counters_of(&self, queries: usize) -> Option<Tensor<1, Int>> {
        let counters = self.counters.as_ref();
        counters.filter(|all| all.dims()[0] >= queries).cloned()
    }
}

/// The slots of a batch, and their visibility to its queries.
#[derive(Debug)]
pub(super) struct Gathered {
    /// Slots of each sequence and KV head: the number of the longest.
    pub count: usize,
    /// `[batch · kv_heads · count]`: rows among those of all pages.
    pub ids: Tensor<1, Int>,
    /// `[batch, heads or 1, s, count]`: added to the scores.
    pub bias: Tensor<4>,
    /// `[batch · heads · s · count]`: indices into the relative bias table, all heads concatenated.
    pub distances: Option<Tensor<1, Int>>,
}

/// Common properties of the layers of a group.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct GroupKey {
    pub pattern: Pattern,
    pub heads: usize,
    pub kv_heads: usize,
    /// ALiBi slopes of each head.
    pub alibi: Option<Vec<f64>>,
    /// Shape of the relative bias, `[heads or 1, 2 · reach + 1]`.
    pub relative: Option<[usize; 2]>,
    pub selection: Option<Selection>,
    /// Native sparse attention.
    pub nsa: Option<NsaHeadsConfig>,
    /// Selection by an indexer, the layer's own or that of an earlier layer.
    pub indexer: Option<ContentAttention>,
}

impl GroupKey {
    pub(super) fn of(mha: &SparseMultiHeadAttention) -> Self {
        Self {
            pattern: mha.pattern().clone(),
            heads: mha.n_heads(),
            kv_heads: mha.n_kv_heads(),
            alibi: (mha.attention_options().alibi.as_ref()).map(|slopes| slopes.to_vec()),
            relative: (mha.relative_bias.as_ref()).map(|table| table.dims()),
            selection: mha.selection().cloned(),
            nsa: mha.nsa().map(|nsa| nsa.config().clone()),
            indexer: mha.choosing_indexer().cloned(),
        }
    }

    /// Returns whether it equals [`Self::of`] of an attention layer.
    pub(super) fn is_of(&self, mha: &SparseMultiHeadAttention) -> bool {
        let relative = mha.relative_bias.as_ref().map(|table| table.dims());
        self.pattern == *mha.pattern()
            && [self.heads, self.kv_heads] == [mha.n_heads(), mha.n_kv_heads()]
            && self.alibi.as_deref() == mha.attention_options().alibi.as_deref()
            && self.relative == relative
            && self.selection.as_ref() == mha.selection()
            && self.nsa.as_ref() == mha.nsa().map(|nsa| nsa.config())
            && self.indexer.as_ref() == mha.choosing_indexer()
    }

    /// Returns whether paged attention supports everything that the layers add to scores.
    pub(super) fn is_plain(&self) -> bool {
        self.alibi.is_none() && self.relative.is_none()
    }
}

/// Table of a batch on the device.
#[derive(Clone, Debug)]
pub(super) struct Uploaded {
    batch: Vec<SequenceId>,
    /// Width of the page allocator's table.
    max_pages: usize,
    /// Without the pages that all sequences share and that are read once for all of them.
    table: Tensor<3, Int>,
    /// Number of shared pages.
    shared: usize,
    prefix: Option<Box<PageLists>>,
}

/// Returns the pages that all sequences of a batch share, if they hold `cascade` keys or more, and the number of table entries that they take.
pub(super) fn shared_prefix(
    books: &PagePool,
    batch: &[SequenceId],
    cascade: usize,
    device: &Device,
) -> Result<(Option<Box<PageLists>>, usize), PoolError> {
    let page_size = books.config().page_size();
    let shared = match batch.len() {
        0 | 1 => 0,
        _ if cascade == usize::MAX => 0,
        _ => books.shared_pages(batch)?,
    };
    if shared == 0 || shared * page_size < cascade {
        return Ok((None, 0));
    }
    let rows = books.table_rows();
    let tables = books.tables(&batch[..1])?;
    let first = tables.table.chunks(tables.max_pages);
    let first = first.flat_map(|row| &row[..shared]);
    let spans = (0..rows).flat_map(|_| [(shared * page_size) as i32, shared as i32, 0, 0]);
    let prefix = PageLists::new(
        ints(first.copied().collect(), [1, rows, shared], device),
        ints(spans.collect(), [1, rows, 4], device),
    );
    Ok((Some(Box::new(prefix)), shared))
}

impl Uploaded {
    /// Uploads the table of a batch; shared pages are split off if they hold `cascade` keys or more.
    fn new(
        books: &PagePool,
        batch: Vec<SequenceId>,
        cascade: usize,
        device: &Device,
    ) -> Result<Self, PoolError> {
        let rows = books.table_rows();
        let (prefix, shared) = shared_prefix(books, &batch, cascade, device)?;
        let tables = books.tables(&batch)?;
        let own = tables.max_pages - shared;
        let rest = tables.table.chunks(tables.max_pages);
        let rest = rest.flat_map(|row| &row[shared..]).copied().collect();
        Ok(Self {
            table: ints(rest, [batch.len(), rows, own], device),
            max_pages: tables.max_pages,
            batch,
            shared,
            prefix,
        })
    }
}

/// Returns the spans of a batch without shared pages.
pub(super) fn own_spans(
    books: &PagePool,
    batch: &[SequenceId],
    shared: usize,
) -> Result<Vec<i32>, PoolError> {
    let mut spans = books.spans(batch)?;
    for span in spans.chunks_mut(4) {
        span[0] -= (shared * books.config().page_size()) as i32;
        span[1] -= shared as i32;
    }
    Ok(spans)
}

/// Returns the slots of a step's rows.
pub(super) fn slots_of(
    writes: &[Writes],
    table_rows: usize,
    seq: usize,
    device: &Device,
) -> Tensor<3, Int> {
    let slots = slots_in_rows(writes, table_rows, seq, |writes| &writes.slots);
    ints(slots, [writes.len(), table_rows, seq], device)
}

/// Returns a property of a step's rows; −1 after a sequence's own rows.
pub(super) fn slots_in_rows(
    writes: &[Writes],
    table_rows: usize,
    seq: usize,
    of: impl Fn(&Writes) -> &Vec<i32>,
) -> Vec<i32> {
    let mut slots = vec![-1; writes.len() * table_rows * seq];
    for (writes, entry) in writes.iter().zip(slots.chunks_mut(table_rows * seq)) {
        for (row, to) in entry.chunks_mut(seq).enumerate() {
            let from = &of(writes)[row * writes.tokens..][..writes.tokens];
            to[..writes.tokens].copy_from_slice(from);
        }
    }
    slots
}

/// Makes the page lists of a batch. The table stays on the device while none of its entries changes.
pub(super) fn page_lists(
    books: &PagePool,
    uploaded: &mut Option<Uploaded>,
    (batch, writes): (Vec<SequenceId>, &[Writes]),
    cascade: usize,
    device: &Device,
) -> Result<PageLists, PoolError> {
    let rows = books.table_rows();
    let is_current = |uploaded: &Uploaded| {
        uploaded.batch == batch
            && writes
                .iter()
                .all(|writes| writes.changes.is_empty() && writes.entries <= uploaded.max_pages)
    };
    let Uploaded {
        table,
        shared,
        prefix,
        ..
    } = match uploaded.as_ref().filter(|uploaded| is_current(uploaded)) {
        Some(uploaded) => uploaded.clone(),
        None => {
            let made = Uploaded::new(books, batch.clone(), cascade, device)?;
            uploaded.insert(made).clone()
        }
    };
    let spans = own_spans(books, &batch, shared)?;
    let spans = ints(spans, [batch.len(), rows, 4], device);
    Ok(PageLists {
        prefix,
        ..PageLists::new(table, spans)
    })
}

/// Lists all slots of a batch with their visibility.
pub(super) fn gather(
    books: &PagePool,
    key: &GroupKey,
    steps: &[KvStep],
    writes: &[Writes],
    seq: usize,
    device: &Device,
) -> Result<Gathered, PoolError> {
    if seq == 1 && key.is_plain() {
        return gather_single(books, key, steps, writes, device);
    }
    let rows = books.table_rows();
    let page_size = books.config().page_size();
    let mut slots: Vec<Vec<SlotKey>> = Vec::with_capacity(steps.len() * rows);
    for step in steps {
        for row in 0..rows {
            slots.push(books.slot_keys(step.id, row)?);
        }
    }
    let count = slots.iter().map(Vec::len).max().unwrap_or(0);
    // Masked slots are read too, so they must be slots that were written.
    let any = slots.iter().flatten().next().map(|key| key.slot);
    let heads_of_row = key.kv_heads / rows;
    let mut ids = Vec::with_capacity(steps.len() * key.kv_heads * count);
    for row in &slots {
        for head in 0..heads_of_row {
            let id = |slot: crate::pages::Slot| {
                ((slot.page * heads_of_row + head) * page_size + slot.slot) as i32
            };
            ids.extend(row.iter().map(|key| id(key.slot)));
            let hidden = count - row.len();
            ids.extend(any.map(id).into_iter().cycle().take(hidden));
        }
    }
    let pairs = Pairs {
        key,
        slots: &slots,
        rows,
        count,
        seq,
    };
    let mut bias = Vec::with_capacity(steps.len() * key.heads * seq * count);
    let mut distances = Vec::new();
    for (entry, writes) in writes.iter().enumerate() {
        for head in 0..key.heads {
            pairs.of(entry, head, writes.first, &mut bias, &mut distances);
        }
    }
    Ok(Gathered {
        count,
        ids: ints(ids, [steps.len() * key.kv_heads * count], device),
        bias: biases(bias, [steps.len(), key.heads, seq, count], device),
        distances: (key.relative.is_some()).then(|| {
            let all = distances.len();
            ints(distances, [all], device)
        }),
    })
}

/// Lists the slots that one new query of each sequence reads, from its pattern's row alone: time does not depend on the number of live keys.
fn gather_single(
    books: &PagePool,
    key: &GroupKey,
    steps: &[KvStep],
    writes: &[Writes],
    device: &Device,
) -> Result<Gathered, PoolError> {
    let page_size = books.config().page_size();
    let group = key.heads / key.kv_heads;
    // KV heads that share the pages of an entry.
    let heads_of_row = key.kv_heads / books.table_rows();
    // For each sequence and KV head, the rows among those of all pages, and which query heads of the group see them.
    let mut lists: Vec<Vec<(i32, Vec<bool>)>> = Vec::with_capacity(steps.len() * key.kv_heads);
    for (step, writes) in steps.iter().zip(writes) {
        let tables = books.tables(&[step.id])?;
        for kv_head in 0..key.kv_heads {
            let mut seen: BTreeMap<usize, Vec<bool>> = BTreeMap::new();
            for place in 0..group {
                let head = kv_head * group + place;
                for slot in books.row_slots(step.id, head, writes.first)? {
                    seen.entry(slot).or_insert_with(|| vec![false; group])[place] = true;
                }
            }
            let row = books.row_of_head(kv_head * group);
            let table = &tables.table[row * tables.max_pages..][..tables.max_pages];
            let list = seen.into_iter().map(|(slot, heads)| {
                let page = table[slot / page_size] as usize;
                let page = page * heads_of_row + kv_head % heads_of_row;
                ((page * page_size + slot % page_size) as i32, heads)
            });
            lists.push(list.collect());
        }
    }
    let count = lists.iter().map(Vec::len).max().unwrap_or(0);
    // Masked slots are read too, so they must be slots that were written.
    let any = lists.iter().flatten().next().map_or(0, |(id, _)| *id);
    let mut ids = Vec::with_capacity(lists.len() * count);
    let mut bias = Vec::with_capacity(steps.len() * key.heads * count);
    for list in &lists {
        let hidden = count - list.len();
        ids.extend(list.iter().map(|(id, _)| *id));
        ids.extend(std::iter::repeat_n(any, hidden));
        for place in 0..group {
            let of = |seen: &[bool]| if seen[place] { 0.0 } else { HIDDEN };
            bias.extend(list.iter().map(|(_, seen)| of(seen)));
            bias.extend(std::iter::repeat_n(HIDDEN, hidden));
        }
    }
    Ok(Gathered {
        count,
        ids: ints(ids, [lists.len() * count], device),
        bias: biases(bias, [steps.len(), key.heads, 1, count], device),
        distances: None,
    })
}

/// Uploads the bias of scores, `[batch, heads, s, count]`, once for all heads if they are equal.
fn biases(bias: Vec<f32>, [batch, heads, seq, count]: [usize; 4], device: &Device) -> Tensor<4> {
    let of_head = seq * count;
    let entry = heads * of_head;
    let are_alike = entry > 0
        && (bias.chunks(entry)).all(|entry| {
            let first = &entry[..of_head];
            entry.chunks(of_head).all(|head| head == first)
        });
    let (bias, heads) = match are_alike {
        true => {
            let first = bias.chunks(entry).flat_map(|entry| &entry[..of_head]);
            (first.copied().collect(), 1)
        }
        false => (bias, heads),
    };
    Tensor::from_data(TensorData::new(bias, [batch, heads, seq, count]), device)
}

/// Pairs of queries and slots of a batch.
struct Pairs<'a> {
    key: &'a GroupKey,
    slots: &'a [Vec<SlotKey>],
    rows: usize,
    count: usize,
    seq: usize,
}

impl Pairs<'_> {
    /// Appends the bias of one head of a sequence, `[s, count]`, and the indices of its distances.
    fn of(
        &self,
        entry: usize,
        head: usize,
        first: usize,
        bias: &mut Vec<f32>,
        distances: &mut Vec<i32>,
    ) {
        let key = self.key;
        let row = head / (key.heads / self.rows);
        let slots = &self.slots[entry * self.rows + row];
        let slope = key.alibi.as_ref().map_or(0.0, |slopes| slopes[head]);
        for query in first..first + self.seq {
            let of_slot = |slot: &SlotKey| {
                let is_seen = query as i64 <= i64::from(slot.last)
                    && key
                        .pattern
                        .attends(head, query as i64, slot.position as i64);
                let distance = query.abs_diff(slot.position) as f64;
                if is_seen {
                    (-slope * distance) as f32
                } else {
                    HIDDEN
                }
            };
            bias.extend(slots.iter().map(of_slot));
            bias.extend(std::iter::repeat_n(HIDDEN, self.count - slots.len()));
            let Some([heads, places]) = key.relative else {
                continue;
            };
            let reach = (places / 2) as i64;
            let of_slot = |slot: &SlotKey| {
                let distance = slot.position as i64 - query as i64;
                let place = distance.clamp(-reach, reach) + reach;
                (head % heads * places) as i32 + place as i32
            };
            distances.extend(slots.iter().map(of_slot));
            distances.extend(std::iter::repeat_n(0, self.count - slots.len()));
        }
    }
}
