//! [`BlockLayout`]: which blocks are kept, and which pairs of each.

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use serde::{Deserialize, Serialize};

use crate::builder::{Grid, Rows};
use crate::columns::Columns;
use crate::mask::{BlockMask, FULL, MaskInterner};
use crate::on_device::DeviceChoice;
use crate::residue::{self, Part};
use crate::{BLOCK_SIZES, LayoutError, Pattern};

/// The sizes of a layout. Lengths count tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayoutShape {
    /// Number of query heads.
    pub heads: usize,
    /// Number of queries.
    pub seq_q: usize,
    /// Number of keys.
    pub seq_kv: usize,
    /// Width of a block: 8, 16, 32, 64 or 128.
    pub block_size: usize,
}

impl LayoutShape {
    pub(crate) fn validate(&self) -> Result<(), LayoutError> {
        if !BLOCK_SIZES.contains(&self.block_size) {
            return Err(LayoutError::argument(
                "block_size",
                "8, 16, 32, 64 or 128",
                self.block_size,
            ));
        }
        for (argument, value, max) in [
            ("heads", self.heads, MAX_HEADS),
            ("seq_q", self.seq_q, MAX_SEQ),
            ("seq_kv", self.seq_kv, MAX_SEQ),
        ] {
            if value == 0 || value > max {
                return Err(LayoutError::argument(
                    argument,
                    format!("between 1 and {max}"),
                    value,
                ));
            }
        }
        Ok(())
    }
}

/// Positions and block indices fit 32-bit signed integers, as kernels want them.
const MAX_SEQ: usize = 1 << 30;
const MAX_HEADS: usize = 1 << 16;

/// Blocks `start, start + stride, …`, `count` of them, that share one mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Run {
    /// First block.
    pub start: u32,
    /// Distance between two blocks.
    pub stride: u32,
    /// Number of blocks.
    pub count: u32,
    /// Their mask: [`FULL`], or an index into [`BlockLayout::masks`].
    pub mask: u32,
}

impl Run {
    /// The run's blocks, in order.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = u32> + use<> {
        let Self { start, stride, .. } = *self;
        (0..self.count).map(move |k| start + k * stride)
    }

    pub(crate) fn last(&self) -> u32 {
        self.start + (self.count - 1) * self.stride
    }
}

/// One kept block of a row or of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// The key block of a row's entry; the query block of a column's.
    pub block: u32,
    /// [`FULL`], or an index into [`BlockLayout::masks`].
    pub mask: u32,
}

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
    try_from = "crate::serial::LayoutData",
    into = "crate::serial::LayoutData"
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
    /// Blocks are chosen on a device, and none are listed here.
    pub choice: Option<DeviceChoice>,
    attachments: Mutex<Vec<(TypeId, Arc<dyn Any + Send + Sync>)>>,
}

/// The kept blocks of one distinct head pattern.
pub(crate) struct HeadPattern {
    pub rows: Rows,
    /// Kept blocks before block row `I`; `q_blocks + 1` entries.
    pub row_offsets: Vec<usize>,
    columns: OnceLock<Columns>,
}

impl HeadPattern {
    pub fn new(rows: Rows) -> Self {
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
        let offsets = &self.rows.run_offsets;
        &self.rows.runs[offsets[q_block]..offsets[q_block + 1]]
    }

    pub fn blocks(&self) -> usize {
        *self.row_offsets.last().expect("starts with 0")
    }

    /// The entries of a row in ascending order of key blocks.
    pub fn row(&self, q_block: usize) -> Vec<Entry> {
        entries(self.runs(q_block))
    }
}

/// The blocks of `runs`, ascending.
pub(crate) fn entries(runs: &[Run]) -> Vec<Entry> {
    let mut entries: Vec<Entry> = runs
        .iter()
        .flat_map(|run| {
            let mask = run.mask;
            run.blocks().map(move |block| Entry { block, mask })
        })
        .collect();
    if runs.windows(2).any(|w| w[1].start <= w[0].last()) {
        entries.sort_unstable();
    }
    entries
}

impl BlockLayout {
    /// The layout of `pattern`. Time and memory follow the kept blocks, never `seq_q · seq_kv`
    /// (unless the pattern is a callback, [`Pattern::from_fn`]).
    ///
    /// Query row `r` sits at position `r + seq_kv − seq_q`: causality is aligned bottom-right.
    ///
    /// # Errors
    /// [`LayoutError`] if a size or one of the pattern's parameters is out of range.
    pub fn new(pattern: &Pattern, shape: LayoutShape) -> Result<Self, LayoutError> {
        shape.validate()?;
        pattern.validate(shape.heads)?;
        let grid = Grid::new(shape);
        let mut masks = MaskInterner::new(shape.block_size);
        let distinct = pattern.head_period().unwrap_or(shape.heads);
        let rows = (0..distinct.min(shape.heads))
            .map(|head| grid.build(pattern, head, &mut masks))
            .collect();
        let mut layout = Self::from_heads(pattern.to_string(), shape, rows, masks);
        let parts = residue::parts(pattern, &layout)?;
        Arc::get_mut(&mut layout.inner).expect("just made").parts = parts;
        Ok(layout)
    }

    /// Head `h` has pattern `heads[h]`, or keeps nothing.
    pub(crate) fn new_by_head(
        heads: &[Option<Pattern>],
        shape: LayoutShape,
    ) -> Result<Self, LayoutError> {
        let grid = Grid::new(shape);
        let mut masks = MaskInterner::new(shape.block_size);
        let mut rows = Vec::with_capacity(heads.len());
        let mut names = Vec::with_capacity(heads.len());
        for (head, pattern) in heads.iter().enumerate() {
            rows.push(match pattern {
                Some(pattern) => {
                    pattern.validate(shape.heads)?;
                    grid.build(pattern, head, &mut masks)
                }
                None => Rows::empty(grid.q_blocks()),
            });
            names.push(match pattern {
                Some(pattern) => pattern.to_string(),
                None => "nothing".into(),
            });
        }
        names.dedup();
        let name = format!("per_head({})", names.join(", "));
        Ok(Self::from_heads(name, shape, rows, masks))
    }

    /// Disjoint parts that make up the layout at less cost, if its pattern has strided heads: see
    /// [`Part`]. Layouts that were built otherwise than from a pattern have none.
    pub fn parts(&self) -> Option<&[Part]> {
        self.inner.parts.as_deref()
    }

    /// A layout from a block-level callback, called once per head and block:
    /// `None` drops the block, `Some(mask)` keeps the mask's pairs. Pairs beyond `seq_q` or `seq_kv` on
    /// a ragged edge are dropped; [`BlockMask::corner`]`(b, b, b)` keeps all pairs.
    ///
    /// ```
    /// use blocksparse::{BlockLayout, BlockMask, LayoutShape};
    ///
    /// // A checkerboard of 16 × 16 blocks.
    /// let shape = LayoutShape { heads: 1, seq_q: 64, seq_kv: 64, block_size: 16 };
    /// let layout = BlockLayout::from_block_fn("checkerboard", shape, |_head, q_block, kv_block| {
    ///     ((q_block + kv_block) % 2 == 0).then(|| BlockMask::corner(16, 16, 16))
    /// })?;
    /// assert_eq!(layout.blocks(), 8);
    /// # Ok::<(), blocksparse::LayoutError>(())
    /// ```
    ///
    /// # Errors
    /// [`LayoutError`] if a size is out of range or a mask is of another block size.
    pub fn from_block_fn(
        name: impl Into<String>,
        shape: LayoutShape,
        mut block: impl FnMut(usize, usize, usize) -> Option<BlockMask>,
    ) -> Result<Self, LayoutError> {
        shape.validate()?;
        let b = shape.block_size;
        let grid = Grid::new(shape);
        let mut masks = MaskInterner::new(b);
        let mut heads = Vec::with_capacity(shape.heads);
        for head in 0..shape.heads {
            let mut rows = Rows::new();
            for q_block in 0..grid.q_blocks() {
                for kv_block in 0..grid.kv_blocks() {
                    let Some(mask) = block(head, q_block, kv_block) else {
                        continue;
                    };
                    if mask.block_size() != b {
                        return Err(LayoutError::argument(
                            "the block size of the mask returned by the callback",
                            format!("{b}, the layout's"),
                            mask.block_size(),
                        ));
                    }
                    let (height, width) = (grid.rows_in(q_block), grid.columns_in(kv_block));
                    let mask = match height == b && width == b {
                        true => mask,
                        false => {
                            BlockMask::from_fn(b, |r, c| r < height && c < width && mask.get(r, c))
                        }
                    };
                    if let Some(mask) = masks.intern(mask) {
                        rows.push(Run {
                            start: kv_block as u32,
                            stride: 1,
                            count: 1,
                            mask,
                        });
                    }
                }
                rows.end_row();
            }
            heads.push(rows);
        }
        Ok(Self::from_heads(name.into(), shape, heads, masks))
    }

    /// One layout out of one per batch entry, all of the same shape.
    ///
    /// # Errors
    /// [`LayoutError`] if there is none, if shapes differ, or if one is itself per batch.
    pub fn stack_batch(layouts: &[BlockLayout]) -> Result<Self, LayoutError> {
        let Some(first) = layouts.first() else {
            return Err(LayoutError::argument("layouts", "at least one", "none"));
        };
        let mut masks = MaskInterner::new(first.block_size());
        let mut patterns: Vec<HeadPattern> = Vec::new();
        let mut head_patterns = Vec::new();
        for layout in layouts {
            if layout.shape() != first.shape() || layout.batch().is_some() {
                return Err(LayoutError::argument(
                    "layouts",
                    format!("shared over the batch and of shape {:?}", first.shape()),
                    format!("{:?}, batch {:?}", layout.shape(), layout.batch()),
                ));
            }
            let ids: Vec<u32> = (layout.inner.masks.iter())
                .map(|mask| {
                    masks
                        .intern(mask.clone())
                        .expect("kept masks are not empty")
                })
                .collect();
            let known: Vec<u32> = (layout.inner.patterns.iter())
                .map(|pattern| {
                    let mut rows = pattern.rows.clone();
                    rows.runs
                        .iter_mut()
                        .for_each(|r| r.mask = ids[r.mask as usize]);
                    position_or_push(&mut patterns, rows)
                })
                .collect();
            head_patterns.extend(
                layout
                    .inner
                    .head_patterns
                    .iter()
                    .map(|&p| known[p as usize]),
            );
        }
        Ok(Self::from_parts(Inner::of_patterns(
            first.inner.name.clone(),
            *first.shape(),
            Some(layouts.len()),
            head_patterns,
            patterns,
            masks.into_masks(),
        )))
    }

    /// `rows[h mod rows.len()]` are head `h`'s.
    pub(crate) fn from_heads(
        name: String,
        shape: LayoutShape,
        rows: Vec<Rows>,
        masks: MaskInterner,
    ) -> Self {
        let mut patterns: Vec<HeadPattern> = Vec::new();
        let known: Vec<u32> = rows
            .into_iter()
            .map(|rows| position_or_push(&mut patterns, rows))
            .collect();
        Self::from_parts(Inner::of_patterns(
            name,
            shape,
            None,
            (0..shape.heads).map(|h| known[h % known.len()]).collect(),
            patterns,
            masks.into_masks(),
        ))
    }

    pub(crate) fn from_parts(inner: Inner) -> Self {
        Self {
            inner: Arc::new(inner),
        }
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
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

    /// Which of the distinct patterns `head` of batch entry `batch` uses.
    ///
    /// # Panics
    /// If `batch` or `head` is not one of the layout's.
    pub fn pattern_of(&self, batch: usize, head: usize) -> usize {
        assert!(head < self.heads(), "head {head} of {}", self.heads());
        let batch = if self.inner.batch.is_some() { batch } else { 0 };
        self.inner.head_patterns[batch * self.heads() + head] as usize
    }

    /// The kept key blocks of a row of query blocks, ascending.
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
            .get_or_init(|| Columns::transpose(head, self.q_blocks(), self.kv_blocks()))
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
        let all = self.inner.head_patterns.len() * self.q_blocks() * self.kv_blocks();
        self.blocks() as f64 / all as f64
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

    /// A value that lives as long as the layout's data, made on first use: where a crate that computes
    /// on layouts keeps what it derives from them (launch plans, copies on a device).
    pub fn attachment<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> Arc<T> {
        let mut attachments = self
            .inner
            .attachments
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let id = TypeId::of::<T>();
        if let Some((_, value)) = attachments.iter().find(|(known, _)| *known == id) {
            return value.clone().downcast().expect("stored under its type");
        }
        let value = Arc::new(make());
        attachments.push((id, value.clone()));
        value
    }
}

impl Inner {
    pub fn new(
        name: String,
        shape: LayoutShape,
        batch: Option<usize>,
        head_patterns: Vec<u32>,
        rows: Vec<Rows>,
        masks: Vec<BlockMask>,
    ) -> Self {
        let patterns = rows.into_iter().map(HeadPattern::new).collect();
        Self::of_patterns(name, shape, batch, head_patterns, patterns, masks)
    }

    pub fn of_patterns(
        name: String,
        shape: LayoutShape,
        batch: Option<usize>,
        head_patterns: Vec<u32>,
        patterns: Vec<HeadPattern>,
        masks: Vec<BlockMask>,
    ) -> Self {
        Self {
            name,
            shape,
            batch,
            head_patterns,
            patterns,
            masks,
            parts: None,
            choice: None,
            attachments: Mutex::default(),
        }
    }

    pub fn on_device(mut self, choice: DeviceChoice) -> Self {
        self.choice = Some(choice);
        self
    }
}

/// The index of the pattern with these rows, added if it is new.
pub(crate) fn position_or_push(patterns: &mut Vec<HeadPattern>, rows: Rows) -> u32 {
    let known = patterns.iter().position(|p| p.rows == rows);
    let index = known.unwrap_or_else(|| {
        patterns.push(HeadPattern::new(rows));
        patterns.len() - 1
    });
    index as u32
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
