//! [`BlockLayout`]: the kept blocks of a pattern and the allowed pairs of each.

mod at_places;
pub(crate) mod attachments;
mod build;
mod builder;
mod choice;
mod columns;
#[cfg(feature = "draw")]
pub(crate) mod draw;
#[cfg(feature = "draw")]
pub mod font;
mod grid;
mod mask;
mod pack;
mod residue;
mod restrict;
mod restriction;
mod rows;
mod same_pairs;
mod serial;
mod shape;
pub(crate) mod text;
mod within;

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use attachments::Attachments;
use builder::LayoutBuilder;
use columns::Columns;
use rows::RowRuns;

pub(crate) use at_places::NOWHERE;
pub use choice::{BlockSource, DeviceChoice, PositionMask, TALLEST};
pub(crate) use mask::MaskInterner;
pub use mask::{BlockMask, FULL};
pub use restriction::PaddingMask;
pub(crate) use rows::entries;
pub use rows::{Entry, Run};
pub use shape::LayoutShape;

/// A pattern cut into blocks, of which only those with an allowed pair are kept.
///
/// Per distinct head pattern the layout holds, for every row of query blocks, the key blocks it
/// attends to as [`Run`]s, and one shared table of element masks. Below, causal over 4 × 4 blocks: six
/// full blocks, four that share the triangular mask 1.
///
/// ```text
///   key block  0 1 2 3       row   runs (start, stride, count, mask)
/// query    0   \             0     (0, 1, 1, 1)
/// block    1   # \           1     (0, 1, 1, FULL) (1, 1, 1, 1)
///          2   # # \         2     (0, 1, 2, FULL) (2, 1, 1, 1)
///          3   # # # \       3     (0, 1, 3, FULL) (3, 1, 1, 1)
/// ```
///
/// Runs are why a layout of a million positions fits in a few megabytes and builds in milliseconds. Pairs outside a ragged edge are 0 in the masks, so a block
/// on the edge is never [`FULL`]. Heads with equal rows share them. [`BlockLayout::stack_batch`] gives every batch entry its own rows.
///
/// Cloning is cheap because the data is shared. Layouts compare by the pairs they allow, draw themselves with `{}`, and serialize with serde. Deserialization
/// checks everything.
#[derive(Clone, Serialize, Deserialize)]
#[serde(
    try_from = "crate::layout::serial::LayoutData",
    into = "crate::layout::serial::LayoutData"
)]
pub struct BlockLayout {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub name: String,
    pub shape: LayoutShape,
    /// Batch size, or `None` if all batch entries share one layout.
    pub batch: Option<usize>,
    /// `[batch | 1, heads]`, row-major: index into `patterns`.
    pub head_patterns: Vec<u32>,
    pub patterns: Vec<HeadPattern>,
    pub masks: Vec<BlockMask>,
    /// Cheaper parts with the same pairs.
    parts: Option<Vec<Part>>,
    /// Set if a device chooses the blocks. The layout then lists none.
    pub choice: Option<DeviceChoice>,
    /// Layout from which the device chooses the blocks.
    pub within: Option<BlockLayout>,
    attachments: Attachments,
}

/// The kept blocks of one distinct head pattern.
pub(crate) struct HeadPattern {
    pub rows: RowRuns,
    /// Number of kept blocks before block row `I`; `q_blocks + 1` entries.
    pub row_offsets: Vec<usize>,
    columns: OnceLock<Columns>,
}

impl HeadPattern {
    pub fn new(rows: RowRuns) -> Self {
        let mut row_offsets = vec![0];
        for bounds in rows.run_offsets.windows(2) {
            let runs = &rows.runs[bounds[0]..bounds[1]];
            let blocks: usize = runs.iter().map(|run| run.count as usize).sum();
            row_offsets.push(row_offsets.last().expect("starts with 0") + blocks);
        }
        Self {
            rows,
            row_offsets,
            columns: OnceLock::new(),
        }
    }

    pub fn runs(&self, q_block: usize) -> &[Run] {
        self.rows.row(q_block)
    }

    pub fn blocks(&self) -> usize {
        *self.row_offsets.last().expect("starts with 0")
    }

    /// Returns the entries of a row in ascending order of key blocks.
    pub fn row(&self, q_block: usize) -> Vec<Entry> {
        entries(self.runs(q_block))
    }
}

/// Order of the positions of a part: one residue class after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Residue {
    /// Distance between two positions of a class, and the number of classes.
    pub stride: usize,
    /// Number of slots of a class. The last slots may be beyond the sequence.
    pub class_len: usize,
}

impl Residue {
    /// Returns the position in a slot.
    pub fn position(&self, place: usize) -> usize {
        place % self.class_len * self.stride + place / self.class_len
    }
}

/// A layout of some of the pairs of another layout, over positions in natural order or class by class.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Part {
    /// The blocks of the part.
    pub layout: BlockLayout,
    /// Order of positions; `None` is the natural order.
    pub residue: Option<Residue>,
}

impl BlockLayout {
    /// Returns disjoint parts that compute the same pairs at less cost, if the pattern has strided heads: see [`Part`]. Layouts derived from such a layout also
    /// have them: padded, stacked for a batch, or deserialized. Layouts from callbacks or lists of blocks have none.
    pub fn parts(&self) -> Option<&[Part]> {
        self.inner.parts.as_deref()
    }

    /// Builds a layout in which head `h` has the rows `rows[h mod rows.len()]`.
    pub(crate) fn from_heads(
        name: String,
        shape: LayoutShape,
        rows: Vec<RowRuns>,
        masks: MaskInterner,
    ) -> Self {
        let mut builder = LayoutBuilder::new(masks);
        let rows = rows.into_iter().map(|rows| builder.pattern(rows));
        let known: Vec<u32> = rows.collect();
        builder.head_patterns = (0..shape.heads).map(|h| known[h % known.len()]).collect();
        builder.finish(name, shape, None)
    }

    /// Adds parts with the same pairs if they compute fewer masked pairs.
    pub(crate) fn with_parts(mut self, parts: Option<Vec<Part>>) -> Self {
        let pairs =
            |layout: &BlockLayout| layout.blocks() as u64 * layout.block_size().pow(2) as u64;
        let cheaper = |parts: &Vec<Part>| {
            let computed: u64 = parts.iter().map(|part| pairs(&part.layout)).sum();
            computed < pairs(&self)
        };
        let parts = parts.filter(cheaper);
        Arc::get_mut(&mut self.inner).expect("just made").parts = parts;
        self
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }

    /// Returns the rule by which a tensor on a device chooses the layout's blocks, if it does.
    pub fn device_choice(&self) -> Option<&DeviceChoice> {
        self.inner().choice.as_ref()
    }

    /// Returns a value that lives as long as the layout's data and is made on first use. A crate that computes on layouts stores derived data here (launch
    /// plans, copies on a device). Clones of a layout share it.
    ///
    /// `make` may use the layout, and attach values of other types. Threads that ask at the same time all get the value of the first `make` that returns. If
    /// the value is expensive, attach a [`OnceLock`] or a map with a lock, and compute the value there.
    pub fn attachment<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> Arc<T> {
        self.inner.attachments.get_or_make(make)
    }

    /// Returns the name of the pattern from which the layout was built.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Returns the layout's sizes.
    pub fn shape(&self) -> &LayoutShape {
        &self.inner.shape
    }

    /// Returns the number of query heads.
    pub fn heads(&self) -> usize {
        self.inner.shape.heads
    }

    /// Returns the batch size of a per-batch layout; `None` if the layout fits any batch.
    pub fn batch(&self) -> Option<usize> {
        self.inner.batch
    }

    /// Returns the number of queries.
    pub fn seq_q(&self) -> usize {
        self.inner.shape.seq_q
    }

    /// Returns the number of keys.
    pub fn seq_kv(&self) -> usize {
        self.inner.shape.seq_kv
    }

    /// Returns the width of a block.
    pub fn block_size(&self) -> usize {
        self.inner.shape.block_size
    }

    /// Returns the number of block rows: `⌈seq_q / block_size⌉`.
    pub fn q_blocks(&self) -> usize {
        self.seq_q().div_ceil(self.block_size())
    }

    /// Returns the number of block columns: `⌈seq_kv / block_size⌉`.
    pub fn kv_blocks(&self) -> usize {
        self.seq_kv().div_ceil(self.block_size())
    }

    /// Returns the number of distinct head patterns. Heads with the same pattern share storage.
    pub fn num_patterns(&self) -> usize {
        self.inner.patterns.len()
    }

    /// Returns the index of the distinct pattern that `head` of batch entry `batch` uses.
    ///
    /// # Panics
    /// If `batch` or `head` is out of range.
    pub fn pattern_of(&self, batch: usize, head: usize) -> usize {
        assert!(head < self.heads(), "head {head} of {}", self.heads());
        let batch = if self.inner.batch.is_some() { batch } else { 0 };
        self.inner.head_patterns[batch * self.heads() + head] as usize
    }

    /// Returns the kept key blocks of a row of query blocks, in ascending order.
    ///
    /// # Panics
    /// If `pattern` or `q_block` is out of range.
    pub fn row(&self, pattern: usize, q_block: usize) -> Vec<Entry> {
        self.inner.patterns[pattern].row(q_block)
    }

    /// Returns [`row`](Self::row) as runs.
    ///
    /// # Panics
    /// If `pattern` or `q_block` is out of range.
    pub fn row_runs(&self, pattern: usize, q_block: usize) -> &[Run] {
        self.inner.patterns[pattern].runs(q_block)
    }

    /// Returns the number of kept blocks before each block row of a pattern: `[q_blocks + 1]`.
    ///
    /// # Panics
    /// If `pattern` is out of range.
    pub fn row_offsets(&self, pattern: usize) -> &[usize] {
        &self.inner.patterns[pattern].row_offsets
    }

    /// Returns the query blocks that attend to a column of key blocks, in ascending order. The first call for a pattern transposes it in O(blocks).
    ///
    /// # Panics
    /// If `pattern` or `kv_block` is out of range.
    pub fn column(&self, pattern: usize, kv_block: usize) -> Vec<Entry> {
        entries(self.column_runs(pattern, kv_block))
    }

    /// Returns [`column`](Self::column) as runs.
    ///
    /// # Panics
    /// If `pattern` or `kv_block` is out of range.
    pub fn column_runs(&self, pattern: usize, kv_block: usize) -> &[Run] {
        let head = &self.inner.patterns[pattern];
        head.columns
            .get_or_init(|| Columns::transpose(&head.rows, self.q_blocks(), self.kv_blocks()))
            .runs(kv_block)
    }

    /// Returns the table of distinct masks. Entry [`FULL`] is the full block.
    pub fn masks(&self) -> &[BlockMask] {
        &self.inner.masks
    }

    /// Returns the number of kept blocks of one distinct pattern.
    ///
    /// # Panics
    /// If `pattern` is out of range.
    pub fn pattern_blocks(&self, pattern: usize) -> usize {
        self.inner.patterns[pattern].blocks()
    }

    /// Returns the number of kept blocks, summed over heads (and over the batch of a per-batch layout).
    pub fn blocks(&self) -> usize {
        let patterns = &self.inner.patterns;
        let heads = self.inner.head_patterns.iter();
        heads.map(|&p| patterns[p as usize].blocks()).sum()
    }

    /// Returns the share of blocks that are kept, in `[0, 1]`.
    pub fn block_density(&self) -> f64 {
        let all = self.inner.head_patterns.len() as f64
            * (self.q_blocks() as f64 * self.kv_blocks() as f64);
        self.blocks() as f64 / all
    }

    /// Returns the number of allowed (query, key) pairs, summed over heads (and over the batch of a per-batch layout).
    pub fn allowed_pairs(&self) -> u64 {
        let counts: Vec<u64> = self.inner.masks.iter().map(BlockMask::count).collect();
        let per_pattern: Vec<u64> = (self.inner.patterns.iter())
            .map(|pattern| {
                let runs = pattern.rows.runs.iter();
                runs.map(|r| u64::from(r.count) * counts[r.mask as usize])
                    .sum()
            })
            .collect();
        let heads = self.inner.head_patterns.iter();
        heads.map(|&p| per_pattern[p as usize]).sum()
    }

    /// Returns the share of pairs that are allowed, in `[0, 1]`.
    pub fn density(&self) -> f64 {
        let all =
            self.inner.head_patterns.len() as f64 * self.seq_q() as f64 * self.seq_kv() as f64;
        self.allowed_pairs() as f64 / all
    }

    /// Returns the element mask of `head` (of batch entry 0), `seq_q × seq_kv`. For tests and small pictures.
    ///
    /// # Panics
    /// If `head` is out of range.
    pub fn to_dense(&self, head: usize) -> Vec<Vec<bool>> {
        self.to_dense_batch(0, head)
    }

    /// Returns the element mask of `head` in batch entry `batch`.
    ///
    /// # Panics
    /// If `head` or `batch` is out of range.
    pub fn to_dense_batch(&self, batch: usize, head: usize) -> Vec<Vec<bool>> {
        let b = self.block_size();
        let mut dense = vec![vec![false; self.seq_kv()]; self.seq_q()];
        let pattern = self.pattern_of(batch, head);
        for (i, line) in dense.iter_mut().enumerate() {
            for entry in self.row(pattern, i / b) {
                let mask = &self.inner.masks[entry.mask as usize];
                let first = entry.block as usize * b;
                let end = (first + b).min(self.seq_kv());
                for (column, allowed) in line[first..end].iter_mut().enumerate() {
                    *allowed = mask.get(i % b, column);
                }
            }
        }
        dense
    }

    /// Returns the bytes of host memory that the layout holds, without its lazily transposed columns.
    pub fn host_bytes(&self) -> usize {
        let patterns = self.inner.patterns.iter().map(|p| {
            size_of_val(&p.rows.runs[..])
                + size_of_val(&p.rows.run_offsets[..])
                + size_of_val(&p.row_offsets[..])
        });
        let masks = self.inner.masks.iter().map(|m| size_of_val(m.words()));
        patterns.sum::<usize>() + masks.sum::<usize>() + size_of_val(&self.inner.head_patterns[..])
    }
}

/// Layouts are equal if they have the same sizes and allow the same pairs, however they were built.
impl PartialEq for BlockLayout {
    fn eq(&self, other: &Self) -> bool {
        if Arc::ptr_eq(&self.inner, &other.inner) {
            return true;
        }
        let heads = self.inner.head_patterns.len();
        self.shape() == other.shape()
            && self.batch() == other.batch()
            && (0..heads).all(|head| {
                let (a, b) = (&self.inner, &other.inner);
                let pattern_a = &a.patterns[a.head_patterns[head] as usize];
                let pattern_b = &b.patterns[b.head_patterns[head] as usize];
                (0..self.q_blocks()).all(|q_block| {
                    let (row_a, row_b) = (pattern_a.row(q_block), pattern_b.row(q_block));
                    row_a.len() == row_b.len()
                        && row_a.iter().zip(&row_b).all(|(x, y)| {
                            x.block == y.block
                                && (x.mask == FULL) == (y.mask == FULL)
                                && a.masks[x.mask as usize] == b.masks[y.mask as usize]
                        })
                })
            })
    }
}

impl fmt::Debug for BlockLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockLayout")
            .field("name", &self.inner.name)
            .field("shape", self.shape())
            .field("batch", &self.batch())
            .field("patterns", &self.num_patterns())
            .field("blocks", &self.blocks())
            .field("masks", &self.inner.masks.len())
            .finish()
    }
}
