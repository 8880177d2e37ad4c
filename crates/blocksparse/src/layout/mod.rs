//! [`BlockLayout`]: which blocks are kept, and which pairs of each.

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
/// Runs are why a layout of a million positions fits in a few megabytes and builds in milliseconds.
/// Pairs outside a ragged edge are 0 in the masks, so a block on the edge is never [`FULL`].
/// Heads with equal rows share them; [`BlockLayout::stack_batch`] gives every batch entry its own.
///
/// Cloning is cheap (the data is shared). Layouts compare by what they allow, draw themselves with
/// `{}`, and serialize with serde; deserialization checks everything.
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
    /// `None`: one layout for every batch entry.
    pub batch: Option<usize>,
    /// `[batch | 1, heads]`, row-major: index into `patterns`.
    pub head_patterns: Vec<u32>,
    pub patterns: Vec<HeadPattern>,
    pub masks: Vec<BlockMask>,
    /// A cheaper way to compute the same pairs.
    parts: Option<Vec<Part>>,
    /// Blocks are chosen on a device, and this layout lists none.
    pub choice: Option<DeviceChoice>,
    /// Layout from which those blocks are chosen.
    pub within: Option<BlockLayout>,
    attachments: Attachments,
}

/// The kept blocks of one distinct head pattern.
pub(crate) struct HeadPattern {
    pub rows: RowRuns,
    /// Kept blocks before block row `I`; `q_blocks + 1` entries.
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

    /// The entries of a row in ascending order of key blocks.
    pub fn row(&self, q_block: usize) -> Vec<Entry> {
        entries(self.runs(q_block))
    }
}

/// The positions of a part are ordered class by class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Residue {
    /// Distance between two positions of a class; also the number of classes.
    pub stride: usize,
    /// Places of a class, the last of which may be beyond the sequence.
    pub class_len: usize,
}

impl Residue {
    /// The position at a place.
    pub fn position(&self, place: usize) -> usize {
        place % self.class_len * self.stride + place / self.class_len
    }
}

/// A layout that computes some of the pairs of another, over positions in natural order or class by class.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Part {
    /// The blocks.
    pub layout: BlockLayout,
    /// Order of positions; `None`: as they come.
    pub residue: Option<Residue>,
}

impl BlockLayout {
    /// Disjoint parts that make up the layout at less cost, if its pattern has strided heads: see
    /// [`Part`]. Layouts made of such ones also have them: padded, stacked for a batch, written and read again. Layouts of callbacks, or
    /// of blocks that are listed, have none.
    pub fn parts(&self) -> Option<&[Part]> {
        self.inner.parts.as_deref()
    }

    /// `rows[h mod rows.len()]` are head `h`'s.
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

    /// With parts that have the same pairs, if they compute fewer in vain.
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

    /// Returns the rule of the layout's blocks, if a tensor on a device chooses them.
    pub fn device_choice(&self) -> Option<&DeviceChoice> {
        self.inner().choice.as_ref()
    }

    /// A value that lives as long as the layout's data, made on first use: where a crate that computes
    /// on layouts keeps what it derives from them (launch plans, copies on a device). Clones of a layout share it.
    ///
    /// `make` may use the layout, and attach values of other types. Threads that ask at once get the same value, that of the first whose `make` returns: of
    /// what is costly keep a [`OnceLock`] here, or a map with a lock, and make it there.
    pub fn attachment<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> Arc<T> {
        self.inner.attachments.get_or_make(make)
    }

    /// The name of the pattern it was built from.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The layout's sizes.
    pub fn shape(&self) -> &LayoutShape {
        &self.inner.shape
    }

    /// Number of query heads.
    pub fn heads(&self) -> usize {
        self.inner.shape.heads
    }

    /// The batch size of a per-batch layout; `None` if the layout serves any batch.
    pub fn batch(&self) -> Option<usize> {
        self.inner.batch
    }

    /// Number of queries.
    pub fn seq_q(&self) -> usize {
        self.inner.shape.seq_q
    }

    /// Number of keys.
    pub fn seq_kv(&self) -> usize {
        self.inner.shape.seq_kv
    }

    /// Width of a block.
    pub fn block_size(&self) -> usize {
        self.inner.shape.block_size
    }

    /// Rows of blocks: `⌈seq_q / block_size⌉`.
    pub fn q_blocks(&self) -> usize {
        self.seq_q().div_ceil(self.block_size())
    }

    /// Columns of blocks: `⌈seq_kv / block_size⌉`.
    pub fn kv_blocks(&self) -> usize {
        self.seq_kv().div_ceil(self.block_size())
    }

    /// Number of distinct head patterns, which share storage.
    pub fn num_patterns(&self) -> usize {
        self.inner.patterns.len()
    }

    /// Returns the index of the distinct pattern that `head` of batch entry `batch` uses.
    ///
    /// # Panics
    /// If `batch` or `head` is not one of the layout's.
    pub fn pattern_of(&self, batch: usize, head: usize) -> usize {
        assert!(head < self.heads(), "head {head} of {}", self.heads());
        let batch = if self.inner.batch.is_some() { batch } else { 0 };
        self.inner.head_patterns[batch * self.heads() + head] as usize
    }

    /// The kept blocks of keys of a row of query blocks, ascending.
    ///
    /// # Panics
    /// If `pattern` or `q_block` is not one of the layout's.
    pub fn row(&self, pattern: usize, q_block: usize) -> Vec<Entry> {
        self.inner.patterns[pattern].row(q_block)
    }

    /// The same, as runs.
    ///
    /// # Panics
    /// If `pattern` or `q_block` is not one of the layout's.
    pub fn row_runs(&self, pattern: usize, q_block: usize) -> &[Run] {
        self.inner.patterns[pattern].runs(q_block)
    }

    /// Kept blocks before each block row of a pattern: `[q_blocks + 1]`.
    ///
    /// # Panics
    /// If `pattern` is not one of the layout's.
    pub fn row_offsets(&self, pattern: usize) -> &[usize] {
        &self.inner.patterns[pattern].row_offsets
    }

    /// The query blocks that attend to a column of key blocks, ascending. The first call for a pattern
    /// transposes it, O(blocks).
    ///
    /// # Panics
    /// If `pattern` or `kv_block` is not one of the layout's.
    pub fn column(&self, pattern: usize, kv_block: usize) -> Vec<Entry> {
        entries(self.column_runs(pattern, kv_block))
    }

    /// The same, as runs.
    ///
    /// # Panics
    /// If `pattern` or `kv_block` is not one of the layout's.
    pub fn column_runs(&self, pattern: usize, kv_block: usize) -> &[Run] {
        let head = &self.inner.patterns[pattern];
        head.columns
            .get_or_init(|| Columns::transpose(&head.rows, self.q_blocks(), self.kv_blocks()))
            .runs(kv_block)
    }

    /// The table of distinct masks; entry [`FULL`] is the full block.
    pub fn masks(&self) -> &[BlockMask] {
        &self.inner.masks
    }

    /// Kept blocks of one distinct pattern.
    ///
    /// # Panics
    /// If `pattern` is not one of the layout's.
    pub fn pattern_blocks(&self, pattern: usize) -> usize {
        self.inner.patterns[pattern].blocks()
    }

    /// Kept blocks, summed over heads (and over the batch of a per-batch layout).
    pub fn blocks(&self) -> usize {
        let patterns = &self.inner.patterns;
        let heads = self.inner.head_patterns.iter();
        heads.map(|&p| patterns[p as usize].blocks()).sum()
    }

    /// Kept blocks over all blocks, in 0..=1.
    pub fn block_density(&self) -> f64 {
        let all = self.inner.head_patterns.len() as f64
            * (self.q_blocks() as f64 * self.kv_blocks() as f64);
        self.blocks() as f64 / all
    }

    /// Allowed (query, key) pairs, summed over heads (and over the batch of a per-batch layout).
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

    /// Allowed pairs over all pairs, in 0..=1.
    pub fn density(&self) -> f64 {
        let all =
            self.inner.head_patterns.len() as f64 * self.seq_q() as f64 * self.seq_kv() as f64;
        self.allowed_pairs() as f64 / all
    }

    /// The element mask of `head` (of batch entry 0), `seq_q × seq_kv`: for tests and small pictures.
    ///
    /// # Panics
    /// If `head` is not one of the layout's.
    pub fn to_dense(&self, head: usize) -> Vec<Vec<bool>> {
        self.to_dense_batch(0, head)
    }

    /// The element mask of `head` in batch entry `batch`.
    ///
    /// # Panics
    /// If `head` or `batch` is not one of the layout's.
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

    /// Bytes of host memory the layout holds, its lazily made columns not counted.
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

/// Equal if they have the same sizes and allow the same pairs, however they were built.
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
