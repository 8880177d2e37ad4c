//! Paged keys and values, and options of attention over them.

use burn::tensor::{DType, Int, Tensor};

use crate::paged::store::PagedStore;
use burn_blocksparse::{AttentionOptions, AttentionTensors, OpError, WeightsMode};

/// Paged keys and values, with the page lists of the sequences.
///
/// A page has `P` slots, a power of two, and belongs to one KV head. `T` is 1 if the KV heads of a sequence retain the same keys, and `kv_heads`
/// otherwise. With `T = kv_heads` an entry of the table is a page; with `T = 1` entry `x` is the pages `x · kv_heads + κ` of the KV heads `κ`.
/// Negative entries and pages that do not exist are skipped.
///
/// ```text
/// table   [ 7  2  9  4  … ]          spans: 3P − 2 permanent slots, timed slots from entry 3 on: start 5, count n
///           └──┴──┘  └──┴─…
///           permanent  timed: slots 5 .. 5 + n of these pages
/// ```
///
/// The page list of a table row has two regions. Region one is slots `0 .. permanent_slots` of its pages from entry 0 on; region two is slots
/// `timed_start .. timed_start + timed_slots` of its pages from entry `timed_first_entry` on. Regions share no entry. Elements in these slots must
/// be finite; other slots are never used.
#[derive(Clone, Debug)]
pub struct PagedKeysValues {
    /// Keys and values of the pages.
    pub store: PagedStore,
    /// Number of KV heads.
    pub kv_heads: usize,
    /// `[batch, T, max_pages]`, i32.
    pub table: Tensor<3, Int>,
    /// `[batch, T, 4]`, i32: `permanent_slots`, `timed_first_entry`, `timed_start`, `timed_slots`.
    pub spans: Tensor<3, Int>,
    /// Slots that each query sees. None: all queries see all slots, as a single new query does.
    pub visibility: Option<PagedVisibility>,
    /// `[batch, kv_heads, n]`, i32: indices of the table entries to attend to, in any order and without repeats; negative: none. None: all entries.
    pub selected: Option<Tensor<3, Int>>,
    /// `[batch · heads · s]` or longer, i32, all zero. With counters, one launch does everything on tensor cores where that is faster; without them,
    /// or with i64, it takes two. Calls leave zeros behind. Concurrent calls from two threads need separate counters.
    pub counters: Option<Tensor<1, Int>>,
}

/// Slots that each query sees: the query at position `p` sees a slot if `positions ≤ p ≤ last`.
#[derive(Clone, Debug)]
pub struct PagedVisibility {
    /// `[entries, P]`, i32: each slot's position. `entries` is the number of values that a table entry may have: `pages`, or `pages / kv_heads` with
    /// `T = 1`.
    pub positions: Tensor<2, Int>,
    /// `[entries, P]`, i32: the last query position that sees each slot.
    pub last: Tensor<2, Int>,
    /// `[batch]`, i32: the position of q's first row; row `i` is at this plus `i`.
    pub query_positions: Tensor<1, Int>,
}

impl PagedKeysValues {
    /// Makes the inputs from pages `[pages, P, d_k]` and `[pages, P, d_v]` whose slots all queries see.
    pub fn new(
        keys: Tensor<3>,
        values: Tensor<3>,
        kv_heads: usize,
        table: Tensor<3, Int>,
        spans: Tensor<3, Int>,
    ) -> Self {
        Self::of_store(PagedStore::Plain { keys, values }, kv_heads, table, spans)
    }

    /// Like [`Self::new`], for pages in any storage format.
    pub fn of_store(
        store: PagedStore,
        kv_heads: usize,
        table: Tensor<3, Int>,
        spans: Tensor<3, Int>,
    ) -> Self {
        Self {
            store,
            kv_heads,
            table,
            spans,
            visibility: None,
            selected: None,
            counters: None,
        }
    }

    /// Attends to single slots, as [`choose_in_pages`](crate::dsa::choose_in_pages) lists them: i32 `[page_lists, kv_heads, most]` with
    /// `page · P + slot` of each KV head, padded with negative numbers. `spans` are those of the page lists that the slots were chosen from, with
    /// region one alone: their lengths, at most `most`, are the numbers of valid slots.
    pub fn of_slots(store: PagedStore, slots: Tensor<3, Int>, spans: &Tensor<3, Int>) -> Self {
        let [page_lists, kv_heads, most] = slots.dims();
        let spans = spans.clone().clamp_max(most as i32);
        let spans = spans.expand([page_lists, kv_heads, 4]);
        Self::of_store(store.by_slots(), kv_heads, slots, spans)
    }

    blocksparse::setters! {
        /// Sets the slots that each query sees.
        #[must_use]
        visibility: Some(PagedVisibility),
        /// Sets the zeros that elect the last cube of a row.
        #[must_use]
        counters: Some(Tensor<1, Int>),
        /// Sets the table entries to attend to.
        #[must_use]
        selected: Some(Tensor<3, Int>),
    }
}

/// Options of [`paged_attention`](crate::paged::paged_attention). Build them from [`Default`].
#[derive(Clone, Debug, Default)]
#[must_use]
#[non_exhaustive]
pub struct PagedOptions {
    /// Factor of the scores `q · kᵀ`. Default: `1 / √d_k`.
    pub scale: Option<f64>,
    /// Softcap `c`: scores become `c · tanh(score / c)` after scaling (Gemma 2).
    pub softcap: Option<f64>,
    /// Sink logits, `[heads]`: each query attends to a further key with this score and value 0.
    pub sinks: Option<Tensor<1>>,
    /// Pages of a split. None: as many as keep the device busy, which depends on all lengths of the batch.
    pub fixed_split: Option<usize>,
}

impl PagedOptions {
    blocksparse::setters! {
        /// Sets the factor of the scores.
        scale: Some(f64),
        /// Sets the softcap.
        softcap: Some(f64),
        /// Sets the sink logits.
        sinks: Some(Tensor<1>),
        /// Splits page lists into parts of this many pages, whatever else is in the batch: a sequence gives the same bits alone and in any batch.
        fixed_split: Some(usize),
    }

    /// Converts the options that paged attention shares with attention over a layout: scale, softcap and sinks. A softmax threshold is ignored.
    ///
    /// # Errors
    /// [`OpError::Argument`] for options that paged attention lacks: ALiBi, dropout, biases, stored weights and largest scores.
    pub fn for_attention(
        options: &AttentionOptions,
        tensors: &AttentionTensors,
    ) -> Result<Self, OpError> {
        for (argument, is_set) in [
            ("options.alibi", options.alibi.is_some()),
            ("options.dropout", options.active_dropout().is_some()),
            ("options.weights", options.weights != WeightsMode::Recompute),
            ("options.max_scores", options.max_scores),
            ("tensors.bias", tensors.bias.is_some()),
            ("tensors.relative_bias", tensors.relative_bias.is_some()),
        ] {
            blocksparse::ensure! { OpError; !is_set => argument, "unset, because attention over pages does not support it", "a value"; }
        }
        Ok(Self {
            scale: options.scale,
            softcap: options.softcap,
            sinks: tensors.sinks.clone(),
            fixed_split: None,
        })
    }

    pub(crate) fn validate(&self, dtype: DType) -> Result<(), OpError> {
        let mut attention = AttentionOptions::default();
        (attention.scale, attention.softcap) = (self.scale, self.softcap);
        attention.validate(0, dtype)?;
        match self.fixed_split {
            Some(0) => Err(OpError::argument("options.fixed_split", "at least 1", 0)),
            _ => Ok(()),
        }
    }
}
