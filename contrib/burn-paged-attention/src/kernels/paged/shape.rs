//! Shape of a call.

use cubecl::ir::ElemType;

use blocksparse::Quantization;

/// Sizes, dtypes and options of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PagedShape {
    /// Number of sequences.
    pub batch: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of KV heads.
    pub kv_heads: usize,
    /// Queries of each head.
    pub rows: usize,
    /// Table rows of a sequence: 1 or `kv_heads`.
    pub tables: usize,
    /// Entries of a table row.
    pub entries: usize,
    /// Pages of the pool.
    pub pages: usize,
    /// Slots of a page, a power of two.
    pub page: usize,
    /// Widths of keys and values.
    pub widths: [usize; 2],
    /// Dtype of queries and outputs, and of keys and values that are not quantized.
    pub dtype: ElemType,
    /// Element type of quantized keys and values.
    pub quantization: Option<Quantization>,
    /// Whether scores have a softcap.
    pub softcap: bool,
    /// Whether slots have positions.
    pub visibility: bool,
    /// Number of selected table entries, if any are selected.
    pub selected: Option<usize>,
    /// Whether there are sinks.
    pub sinks: bool,
    /// Pages of a share; None: derived from the lengths.
    pub fixed_split: Option<usize>,
    /// Whether [`PagedBuffers::counters`](super::PagedBuffers::counters) are present.
    pub counters: bool,
}

impl PagedShape {
    /// Makes a shape without options from `[batch, heads, kv_heads, rows]`, `[tables, entries]` and `[pages, page]`.
    pub fn new(
        [batch, heads, kv_heads, rows]: [usize; 4],
        [tables, entries]: [usize; 2],
        [pages, page]: [usize; 2],
        widths: [usize; 2],
        dtype: ElemType,
    ) -> Self {
        Self {
            batch,
            heads,
            kv_heads,
            rows,
            tables,
            entries,
            pages,
            page,
            widths,
            dtype,
            quantization: None,
            softcap: false,
            visibility: false,
            selected: None,
            sinks: false,
            fixed_split: None,
            counters: false,
        }
    }

    /// Returns the queries of a KV head.
    pub(crate) fn group_rows(&self) -> usize {
        self.heads / self.kv_heads * self.rows
    }

    pub(crate) fn shared_heads(&self) -> usize {
        self.kv_heads / self.tables
    }

    /// Returns the table rows of all sequences.
    pub(crate) fn page_lists(&self) -> usize {
        self.batch * self.tables
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.batch * self.heads * self.rows == 0
    }
}
