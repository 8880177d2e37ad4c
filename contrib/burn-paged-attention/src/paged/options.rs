//! Pages as a call sees them, and how it computes.

use burn::tensor::{DType, Int, Tensor};

use crate::paged::store::PagedStore;
use burn_blocksparse::{AttentionOptions, AttentionTensors, OpError, WeightsMode};

/// Keys and values in pages, and where those of each sequence are.
///
/// A page has `P` slots, a power of two, and belongs to one head of keys. `T` is 1 if the heads of a sequence keep the same keys, or `kv_heads`. With
/// `T = kv_heads` an entry of the table is a page; with `T = 1` the entry `x` is the pages `x · kv_heads + κ` of the heads `κ`. Entries below 0 and pages that
/// do not exist count for nothing.
///
/// ```text
/// table   [ 7  2  9  4  … ]          spans: 3P − 2 permanent slots, timed slots from entry 3 on: start 5, count n
///           └──┴──┘  └──┴─…
///           permanent  timed: slots 5 .. 5 + n of these pages
/// ```
///
/// The page list of a row of the table goes through region one, slots `0 .. permanent_slots` of its pages from entry 0 on, then through region two, slots
/// `timed_start .. timed_start + timed_slots` of its pages from entry `timed_first_entry` on. Regions share no entry. Numbers in the slots of the page list must be
/// finite; whatever lies in others is never used.
#[derive(Clone, Debug)]
pub struct PagedKeysValues {
    /// The keys and values.
    pub store: PagedStore,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// `[batch, T, max_pages]`, i32.
    pub table: Tensor<3, Int>,
    /// `[batch, T, 4]`, i32: `permanent_slots`, `timed_first_entry`, `timed_start`, `timed_slots`.
    pub spans: Tensor<3, Int>,
    /// Slots that each query sees. None: all see all, as a single new query does.
    pub visibility: Option<PagedVisibility>,
    /// `[batch, kv_heads, n]`, i32: the entries of the table whose slots count, in any order and each once; below 0: none. None: all.
    pub selected: Option<Tensor<3, Int>>,
    /// `[batch · heads · s]` or longer, i32: zeros. With them one launch does it all on tensor cores, where that is faster; without them, or as i64, two do.
    /// Calls leave zeros behind. Calls that run at the same time, from two threads, need counters of their own.
    pub counters: Option<Tensor<1, Int>>,
}

/// Slots that each query sees: the query at position `p` sees a slot if `positions ≤ p ≤ last`.
#[derive(Clone, Debug)]
pub struct PagedVisibility {
    /// `[entries, P]`, i32: each slot's position. `entries` are the indices that a table may have: `pages`, or `pages / kv_heads` with `T = 1`.
    pub positions: Tensor<2, Int>,
    /// `[entries, P]`, i32: the last position that sees each slot.
    pub last: Tensor<2, Int>,
    /// `[batch]`, i32: the position of the first of q's rows; row `i` is `i` further.
    pub query_positions: Tensor<1, Int>,
}

impl PagedKeysValues {
    /// Pages `[pages, P, d_k]` and `[pages, P, d_v]` whose slots all queries see.
    pub fn new(
        keys: Tensor<3>,
        values: Tensor<3>,
        kv_heads: usize,
        table: Tensor<3, Int>,
        spans: Tensor<3, Int>,
    ) -> Self {
        Self::of_store(PagedStore::Plain { keys, values }, kv_heads, table, spans)
    }

    /// [`Self::new`] of pages that are stored in any way.
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

    /// Single slots of pages, as `Dsa::choose_in_pages` lists them: i32 `[page_lists, kv_heads, most]`, of each head of keys
    /// `page · P + slot`, below 0 after the last. `spans` are those of the page lists that they were chosen from, over region one alone: a page list with fewer slots
    /// than are listed has as many.
    pub fn of_slots(store: PagedStore, slots: Tensor<3, Int>, spans: &Tensor<3, Int>) -> Self {
        let [page_lists, kv_heads, most] = slots.dims();
        let spans = spans.clone().clamp_max(most as i32);
        let spans = spans.expand([page_lists, kv_heads, 4]);
        Self::of_store(store.by_slots(), kv_heads, slots, spans)
    }

    blocksparse::setters! {
        /// Sets which queries see which slots.
        #[must_use]
        visibility: Some(PagedVisibility),
        /// Sets the zeros by which cubes find out who is the last.
        #[must_use]
        counters: Some(Tensor<1, Int>),
        /// Sets the entries of the table that count.
        #[must_use]
        selected: Some(Tensor<3, Int>),
    }
}

/// Options of [`paged_attention`](crate::paged::paged_attention). Build them from [`Default`].
#[derive(Clone, Debug, Default)]
#[must_use]
#[non_exhaustive]
pub struct PagedOptions {
    /// Factor of the scores `q · kᵀ`; default `1 / √d_k`.
    pub scale: Option<f64>,
    /// Softcap `c`: scores become `c · tanh(score / c)` after scaling (Gemma 2).
    pub softcap: Option<f64>,
    /// Sink logits, `[heads]`: queries attend to a further key of this score and of value 0.
    pub sinks: Option<Tensor<1>>,
    /// Pages of one split. None: as many as keep the device busy, which depends on all lengths of the batch.
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
        /// Splits lists of pages into parts of so many, whatever else is in the batch: a sequence gives the same bits alone and in any batch.
        fixed_split: Some(usize),
    }

    /// The options that attention over a layout has: scale, softcap and sinks. Nothing is skipped below a softmax threshold.
    ///
    /// # Errors
    /// [`OpError::Argument`] for what attention over pages does not have: ALiBi, dropout, biases, stored weights and largest scores.
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
