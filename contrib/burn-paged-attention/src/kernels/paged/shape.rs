//! What a call is.

use cubecl::ir::ElemType;

use blocksparse::Quantization;

/// What a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PagedShape {
    /// Sequences.
    pub batch: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Queries of each head.
    pub rows: usize,
    /// Rows of the table of a sequence: 1 or `kv_heads`.
    pub tables: usize,
    /// Entries of a row of the table.
    pub entries: usize,
    /// Pages of the pool.
    pub pages: usize,
    /// Slots of a page, a power of two.
    pub page: usize,
    /// Widths of keys and values.
    pub widths: [usize; 2],
    /// The type of queries and outputs, and of keys and values that are not quantised.
    pub dtype: ElemType,
    /// How keys and values are stored in eight bits a number, if they are.
    pub quantization: Option<Quantization>,
    /// Whether scores are bounded.
    pub softcap: bool,
    /// Whether slots have positions.
    pub visibility: bool,
    /// Entries of the table that are selected, if they are.
    pub selected: Option<usize>,
    /// Whether there are sinks.
    pub sinks: bool,
    /// Pages of a share, if that does not follow from the lengths.
    pub fixed_split: Option<usize>,
    /// Whether there are `PagedBuffers::counters`.
    pub counters: bool,
}

impl PagedShape {
    /// `[batch, heads, kv_heads, rows]`, `[tables, entries]` and `[pages, page]`, without options.
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

    /// Queries of a head of keys.
    pub(crate) fn group_rows(&self) -> usize {
        self.heads / self.kv_heads * self.rows
    }

    pub(crate) fn shared_heads(&self) -> usize {
        self.kv_heads / self.tables
    }

    /// Rows of the table.
    pub(crate) fn page_lists(&self) -> usize {
        self.batch * self.tables
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.batch * self.heads * self.rows == 0
    }
}
