//! What is allowed: a [`Pattern`] is a value that says, for each head, which query attends to which key.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{BlockLayout, LayoutError, LayoutShape};

/// Windows, strides and the like stay below this, so that positions can be computed in i64.
const MAX_PARAMETER: usize = 1 << 40;

/// Random blocks of a row: each is compared with those drawn before it.
const MAX_DRAWN: usize = 1 << 12;

type Predicate = dyn Fn(usize, i64, i64) -> bool + Send + Sync;

/// Which (query, key) pairs of each head are computed.
///
/// [`Pattern::attends`] is the definition; everything else (layouts, kernels, pictures) follows it.
/// Patterns are plain values: they print, compare, serialize and combine.
///
/// ```
/// use blocksparse::Pattern;
///
/// let merged = Pattern::union([Pattern::local(4), Pattern::strided(4)]);
/// assert!(merged.attends(0, 9, 1) && !merged.attends(0, 9, 4));
/// assert_eq!(merged.to_string(), "union(local(4), strided(4))");
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Pattern {
    /// Every pair.
    Dense,
    /// `j ≤ i`.
    Causal,
    /// `j ≤ i ∧ i − j < window`: `window` keys, the query's own position included.
    Local {
        /// Keys each query sees.
        window: usize,
    },
    /// `j ≤ i ∧ (i − j) mod stride = 0` (Child et al., 2019, §4.2).
    Strided {
        /// Distance between two keys of a query.
        stride: usize,
    },
    /// `j ≤ i ∧ (⌊i/ℓ⌋ = ⌊j/ℓ⌋ ∨ ⌊(ℓ−1−(j mod ℓ))/c⌋ = head mod num_verts)` (Child et al., 2019, §4.3).
    Fixed {
        /// ℓ, the width of the windows.
        stride: usize,
        /// c, how many columns of each earlier window are kept.
        columns: usize,
        /// How many different column groups the heads use in turn.
        num_verts: usize,
    },
    /// `j < prefix ∨ j ≤ i`.
    PrefixLm {
        /// Keys that every query sees.
        prefix: usize,
    },
    /// `j ≤ i ∧ (j < sink ∨ i − j < window)`: attention sinks and a sliding window.
    Streaming {
        /// Keys each query sees, its own position included.
        window: usize,
        /// First keys that every query keeps seeing.
        sink: usize,
    },
    /// `|i − j| ≤ reach · dilation ∧ (i − j) mod dilation = 0`: a window to both sides (Beltagy et al., 2020, §3.1).
    Window {
        /// Keys to each side.
        reach: usize,
        /// Distance between two keys.
        dilation: usize,
    },
    /// `⌊i/size⌋ − before ≤ ⌊j/size⌋ ≤ ⌊i/size⌋ + after`: the query's chunk and its neighbours; block-diagonal without any.
    Chunked {
        /// Positions of a chunk.
        size: usize,
        /// Chunks before the query's own.
        before: usize,
        /// Chunks after it.
        after: usize,
    },
    /// `i ∈ G ∨ j ∈ G`: tokens that see and are seen by all.
    Global {
        /// G, as ranges `start..end` in ascending order that do not overlap.
        ranges: Vec<(usize, usize)>,
    },
    /// `j ∈ G`: tokens that are seen by all.
    GlobalKeys {
        /// G, as ranges `start..end` in ascending order that do not overlap.
        ranges: Vec<(usize, usize)>,
    },
    /// `⌊(ℓ−1−(j mod ℓ))/c⌋ = head mod num_verts`: columns that every query sees, of each window of ℓ the `c` that are the head's.
    Columns {
        /// ℓ, the width of the windows.
        stride: usize,
        /// c
        columns: usize,
        /// How many different groups of columns the heads use in turn.
        num_verts: usize,
    },
    /// `⌊(ℓ−1−(i mod ℓ))/c⌋ = head mod num_verts`: queries that see every key.
    Rows {
        /// ℓ, the width of the windows.
        stride: usize,
        /// c
        rows: usize,
        /// How many different groups of rows the heads use in turn.
        num_verts: usize,
    },
    /// `j ≤ i ∧ (j ∈ V ∨ i − j ∈ S)`: chosen columns and diagonals (MInference, Jiang et al., 2024).
    VerticalSlash {
        /// V, ascending.
        vertical: Vec<usize>,
        /// S, ascending.
        slash: Vec<usize>,
    },
    /// Positions of one document see each other: there are as many `starts ≤ i` as `≤ j`.
    Documents {
        /// Where documents begin, ascending: the `cu_seqlens` of packed sequences.
        starts: Vec<usize>,
    },
    /// Positions of one document see each other as `pattern` says, counted from where the document begins.
    Packed {
        /// Where documents begin, ascending: the `cu_seqlens` of packed sequences.
        starts: Vec<usize>,
        /// What holds inside of each document.
        pattern: Box<Pattern>,
    },
    /// `⌊j/block⌋ ∈ rand(head, ⌊i/block⌋)`: for each head and row of blocks `count` blocks, drawn from those that are not at an end
    /// of the sequence, nor the row's own, nor next to it. First and last row have none.
    RandomBlocks {
        /// Positions of a block (of the pattern; a layout may have others).
        block: usize,
        /// Blocks of the sequence.
        blocks: usize,
        /// Blocks drawn for a row, if there are as many.
        count: usize,
        /// The same seed draws the same blocks.
        seed: u64,
    },
    /// Pairs allowed by any part.
    Union(Vec<Pattern>),
    /// Pairs allowed by all parts.
    Intersection(Vec<Pattern>),
    /// Head `h` uses part `h mod p`.
    PerHead(Vec<Pattern>),
    /// A callback; see [`Pattern::from_fn`]. It cannot be serialized (the layout built from it can).
    #[serde(skip)]
    FromFn(PatternFn),
}

/// The callback of [`Pattern::from_fn`] and its name.
#[derive(Clone)]
pub struct PatternFn {
    name: String,
    predicate: Arc<Predicate>,
    /// Whether heads may differ.
    by_head: bool,
}

impl fmt::Debug for PatternFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PatternFn({:?})", self.name)
    }
}

/// Equal if they are clones of one callback: functions cannot be compared otherwise.
impl PartialEq for PatternFn {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && Arc::ptr_eq(&self.predicate, &other.predicate)
    }
}

impl Pattern {
    /// Every pair.
    pub fn dense() -> Self {
        Self::Dense
    }

    /// `j ≤ i`.
    pub fn causal() -> Self {
        Self::Causal
    }

    /// `j ≤ i ∧ i − j < window`.
    pub fn local(window: usize) -> Self {
        Self::Local { window }
    }

    /// `j ≤ i ∧ (i − j) mod stride = 0`.
    pub fn strided(stride: usize) -> Self {
        Self::Strided { stride }
    }

    /// `local(stride) ∪ strided(stride)`, one joint softmax: the "merged" strided attention of the
    /// Sparse Transformer.
    pub fn merged_strided(stride: usize) -> Self {
        Self::union([Self::local(stride), Self::strided(stride)])
    }

    /// The Sparse Transformer's fixed pattern: the query's own window of `stride` keys and the last
    /// `columns` keys of every earlier window.
    pub fn fixed(stride: usize, columns: usize) -> Self {
        Self::fixed_heads(stride, columns, 1)
    }

    /// [`Pattern::fixed`] whose heads look at distinct column groups: head `h` keeps group
    /// `h mod num_verts`, counted from the end of the window.
    pub fn fixed_heads(stride: usize, columns: usize, num_verts: usize) -> Self {
        Self::Fixed {
            stride,
            columns,
            num_verts,
        }
    }

    /// `j < prefix ∨ j ≤ i`.
    pub fn prefix_lm(prefix: usize) -> Self {
        Self::PrefixLm { prefix }
    }

    /// `j ≤ i ∧ (j < sink ∨ i − j < window)`.
    pub fn streaming(window: usize, sink: usize) -> Self {
        Self::Streaming { window, sink }
    }

    /// `|i − j| ≤ reach`: `2 · reach + 1` keys, the query's own position included.
    pub fn window(reach: usize) -> Self {
        Self::dilated_window(reach, 1)
    }

    /// `|i − j| ≤ reach · dilation ∧ (i − j) mod dilation = 0`.
    pub fn dilated_window(reach: usize, dilation: usize) -> Self {
        Self::Window { reach, dilation }
    }

    /// `⌊i/size⌋ = ⌊j/size⌋`: block-diagonal.
    pub fn chunked(size: usize) -> Self {
        Self::chunked_window(size, 0, 0)
    }

    /// The query's chunk of `size` positions, `before` chunks before it and `after` after it.
    pub fn chunked_window(size: usize, before: usize, after: usize) -> Self {
        Self::Chunked {
            size,
            before,
            after,
        }
    }

    /// `i ∈ tokens ∨ j ∈ tokens`.
    pub fn global(tokens: impl IntoIterator<Item = usize>) -> Self {
        Self::Global {
            ranges: ranges(tokens),
        }
    }

    /// `j ∈ tokens`: keys that every query sees, while they see no more than other queries do.
    pub fn global_keys(tokens: impl IntoIterator<Item = usize>) -> Self {
        Self::GlobalKeys {
            ranges: ranges(tokens),
        }
    }

    /// Longformer's pattern, `dilated_window(reach, dilation) ∪ global(tokens)` in one softmax (Beltagy et al., 2020). For a dilation
    /// per head, make one per head: [`Pattern::per_head`].
    pub fn longformer(
        reach: usize,
        dilation: usize,
        tokens: impl IntoIterator<Item = usize>,
    ) -> Self {
        Self::union([Self::dilated_window(reach, dilation), Self::global(tokens)])
    }

    /// BigBird's pattern over `blocks` blocks of `block` positions (Zaheer et al., 2020): the row's own block and its neighbours,
    /// first and last block as global ones, and `random` blocks drawn for each head and row.
    pub fn bigbird(block: usize, blocks: usize, random: usize, seed: u64) -> Self {
        let last = block.saturating_mul(blocks.saturating_sub(1));
        let ends = match last {
            0 => vec![(0, block)],
            _ if last == block => vec![(0, block.saturating_mul(2))],
            _ => vec![(0, block), (last, last.saturating_add(block))],
        };
        Self::union([
            Self::chunked_window(block, 1, 1),
            Self::Global { ranges: ends },
            Self::RandomBlocks {
                block,
                blocks,
                count: random,
                seed,
            },
        ])
    }

    /// The bidirectional `fixed` pattern of DeepSpeed: windows of `stride` positions, of each the last `columns` that are the head's
    /// (group `head mod num_verts` from the end) as columns that all see and, with `horizontal`, as rows that see all.
    pub fn deepspeed_fixed(
        stride: usize,
        columns: usize,
        num_verts: usize,
        horizontal: bool,
    ) -> Self {
        let mut parts = vec![
            Self::chunked(stride),
            Self::Columns {
                stride,
                columns,
                num_verts,
            },
        ];
        if horizontal {
            parts.push(Self::Rows {
                stride,
                rows: columns,
                num_verts,
            });
        }
        Self::union(parts)
    }

    /// The `variable` pattern of DeepSpeed: windows of these sizes, the last one repeated up to `seq` positions, and `tokens` as keys that
    /// all queries see and, with `horizontal`, as queries that see all keys. Its random blocks are a union with
    /// [`Pattern::random_blocks`]. A window of 0, or none at all, is an error of the layout. Makes a list of the windows.
    pub fn deepspeed_variable(
        windows: &[usize],
        seq: usize,
        tokens: impl IntoIterator<Item = usize>,
        horizontal: bool,
    ) -> Self {
        let mut starts = vec![0];
        let mut at = 0usize;
        let mut sizes = windows.iter().copied();
        let mut size = 0;
        while at < seq {
            size = sizes.next().unwrap_or(size);
            at = at.saturating_add(size);
            starts.push(at);
            if size == 0 {
                break;
            }
        }
        let windows = Self::Documents { starts };
        let ranges = ranges(tokens);
        match (ranges.is_empty(), horizontal) {
            (true, _) => windows,
            (false, true) => Self::union([windows, Self::Global { ranges }]),
            (false, false) => Self::union([windows, Self::GlobalKeys { ranges }]),
        }
    }

    /// `j ≤ i ∧ (j ∈ vertical ∨ i − j ∈ slash)`.
    pub fn vertical_slash(
        vertical: impl IntoIterator<Item = usize>,
        slash: impl IntoIterator<Item = usize>,
    ) -> Self {
        Self::VerticalSlash {
            vertical: sorted(vertical),
            slash: sorted(slash),
        }
    }

    /// Packed sequences that do not see each other, from where they begin (`cu_seqlens`, with or without the total at its end). Compose it
    /// with what holds inside of them: `Pattern::intersection([Pattern::documents([0, 300, 420]), Pattern::local(64)])`.
    pub fn documents(starts: impl IntoIterator<Item = usize>) -> Self {
        Self::Documents {
            starts: sorted(starts),
        }
    }

    /// [`Pattern::documents`] from the document of each position. A document is a stretch of equal ids: one that comes again later is
    /// another document.
    ///
    /// ```
    /// use blocksparse::Pattern;
    ///
    /// assert_eq!(Pattern::document_ids([7, 7, 7, 2, 2]), Pattern::documents([0, 3]));
    /// ```
    pub fn document_ids<T: PartialEq>(ids: impl IntoIterator<Item = T>) -> Self {
        let mut starts = Vec::new();
        let mut last = None;
        for (position, id) in ids.into_iter().enumerate() {
            if last.as_ref() != Some(&id) {
                starts.push(position);
            }
            last = Some(id);
        }
        Self::Documents { starts }
    }

    /// Packed sequences, in each of which `pattern` holds as if it stood alone: unlike in an intersection with
    /// [`Pattern::documents`], windows, columns and global tokens are counted from where a document begins.
    ///
    /// ```
    /// use blocksparse::Pattern;
    ///
    /// let packed = Pattern::packed([0, 5], Pattern::fixed(4, 1));
    /// // Position 10 is the sixth of the second document: it sees that one's column 3, which is at 8.
    /// assert!(packed.attends(0, 10, 8) && !packed.attends(0, 10, 7) && !packed.attends(0, 10, 3));
    /// ```
    pub fn packed(starts: impl IntoIterator<Item = usize>, pattern: Pattern) -> Self {
        Self::Packed {
            starts: sorted(starts),
            pattern: Box::new(pattern),
        }
    }

    /// `count` blocks for each head and row of blocks: see [`Pattern::RandomBlocks`].
    pub fn random_blocks(block: usize, blocks: usize, count: usize, seed: u64) -> Self {
        Self::RandomBlocks {
            block,
            blocks,
            count,
            seed,
        }
    }

    /// Pairs allowed by any of `parts`.
    pub fn union(parts: impl IntoIterator<Item = Pattern>) -> Self {
        Self::Union(parts.into_iter().collect())
    }

    /// Pairs allowed by all of `parts`.
    pub fn intersection(parts: impl IntoIterator<Item = Pattern>) -> Self {
        Self::Intersection(parts.into_iter().collect())
    }

    /// The pairs of this pattern with `j ≤ i`.
    pub fn and_causal(self) -> Self {
        Self::intersection([self, Self::Causal])
    }

    /// Head `h` uses pattern `h mod p` of the `p` given.
    pub fn per_head(parts: impl IntoIterator<Item = Pattern>) -> Self {
        Self::PerHead(parts.into_iter().collect())
    }

    /// A pattern of your own: `attends(head, i, j)` says whether query position `i` sees key
    /// position `j`. It is called once for every pair when a layout is built, O(heads · n²); where heads are
    /// alike, [`Pattern::from_pair_fn`] asks for one of them, and if your pattern knows which blocks are empty,
    /// [`BlockLayout::from_block_fn`] builds it in O(blocks).
    ///
    /// `i` is negative only for the first queries of a layout with more queries than keys.
    pub fn from_fn(
        name: impl Into<String>,
        attends: impl Fn(usize, i64, i64) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self::FromFn(PatternFn {
            name: name.into(),
            predicate: Arc::new(attends),
            by_head: true,
        })
    }

    /// [`Pattern::from_fn`] for a pattern that is the same in all heads: `attends(i, j)`, called once for every pair, O(n²).
    ///
    /// ```
    /// use blocksparse::Pattern;
    ///
    /// let powers = Pattern::from_pair_fn("powers of two", |i, j| i == j || (i > j && (i - j).count_ones() == 1));
    /// assert!(powers.attends(3, 9, 1) && !powers.attends(3, 9, 2));
    /// ```
    pub fn from_pair_fn(
        name: impl Into<String>,
        attends: impl Fn(i64, i64) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self::FromFn(PatternFn {
            name: name.into(),
            predicate: Arc::new(move |_, i, j| attends(i, j)),
            by_head: false,
        })
    }

    /// Whether, in `head`, the query at position `i` attends to the key at position `j`.
    ///
    /// With `seq_q ≠ seq_kv` query row `r` of a layout sits at position `r + seq_kv − seq_q`
    /// (aligned bottom-right, as Burn's own attention does). With parameters that [`Pattern::validate`] refuses the answer means nothing.
    pub fn attends(&self, head: usize, i: i64, j: i64) -> bool {
        let distance = i.saturating_sub(j);
        match self {
            Self::Dense => true,
            Self::Causal => j <= i,
            Self::Local { window } => j <= i && distance < *window as i64,
            Self::Strided { stride } => j <= i && divides(*stride as i64, distance),
            Self::Fixed {
                stride,
                columns,
                num_verts,
            } => {
                let window = |p: i64| p.checked_div_euclid(*stride as i64);
                j <= i
                    && (window(i) == window(j)
                        || is_in_group(j, *stride, *columns, head, *num_verts))
            }
            Self::PrefixLm { prefix } => j < *prefix as i64 || j <= i,
            Self::Streaming { window, sink } => {
                j <= i && (j < *sink as i64 || distance < *window as i64)
            }
            Self::Window { reach, dilation } => {
                let dilation = *dilation as i64;
                distance.saturating_abs() <= (*reach as i64).saturating_mul(dilation)
                    && divides(dilation, distance)
            }
            Self::Chunked {
                size,
                before,
                after,
            } => {
                let chunk = |p: i64| p.checked_div_euclid(*size as i64).unwrap_or(0);
                let later = chunk(j).saturating_sub(chunk(i));
                later <= *after as i64 && later.saturating_neg() <= *before as i64
            }
            Self::Global { ranges } => is_in(ranges, i) || is_in(ranges, j),
            Self::GlobalKeys { ranges } => is_in(ranges, j),
            Self::Columns {
                stride,
                columns,
                num_verts,
            } => is_in_group(j, *stride, *columns, head, *num_verts),
            Self::Rows {
                stride,
                rows,
                num_verts,
            } => is_in_group(i, *stride, *rows, head, *num_verts),
            Self::VerticalSlash { vertical, slash } => {
                let has = |list: &[usize], x: i64| {
                    usize::try_from(x).is_ok_and(|x| list.binary_search(&x).is_ok())
                };
                j <= i && (has(vertical, j) || has(slash, distance))
            }
            Self::Documents { starts } => document(starts, i) == document(starts, j),
            Self::Packed { starts, pattern } => {
                let own = document(starts, i);
                let start = document_start(starts, own);
                let from_start = |p: i64| p.saturating_sub(start);
                own == document(starts, j) && pattern.attends(head, from_start(i), from_start(j))
            }
            Self::RandomBlocks { block, .. } => {
                let block = |p: i64| p.checked_div_euclid(*block as i64).unwrap_or(0);
                self.random_row(head, block(i)).contains(&block(j))
            }
            Self::Union(parts) => parts.iter().any(|p| p.attends(head, i, j)),
            Self::Intersection(parts) => parts.iter().all(|p| p.attends(head, i, j)),
            Self::PerHead(parts) => {
                (head.checked_rem(parts.len())).is_some_and(|part| parts[part].attends(head, i, j))
            }
            Self::FromFn(f) => (f.predicate)(head, i, j),
        }
    }

    /// Whether no query can see a later key: what a model that predicts the next position needs. Of a callback nothing is
    /// known, so the answer is no.
    pub fn is_causal(&self) -> bool {
        match self {
            Self::Causal
            | Self::Local { .. }
            | Self::Strided { .. }
            | Self::Fixed { .. }
            | Self::Streaming { .. }
            | Self::VerticalSlash { .. } => true,
            Self::Union(parts) | Self::PerHead(parts) => parts.iter().all(Self::is_causal),
            Self::Intersection(parts) => parts.iter().any(Self::is_causal),
            Self::Packed { pattern, .. } => pattern.is_causal(),
            Self::Dense
            | Self::PrefixLm { .. }
            | Self::Window { .. }
            | Self::Chunked { .. }
            | Self::Global { .. }
            | Self::GlobalKeys { .. }
            | Self::Columns { .. }
            | Self::Rows { .. }
            | Self::Documents { .. }
            | Self::RandomBlocks { .. }
            | Self::FromFn(_) => false,
        }
    }

    /// The layout of this pattern for self-attention over `seq` positions.
    ///
    /// # Errors
    /// See [`BlockLayout::new`].
    pub fn layout(
        &self,
        heads: usize,
        seq: usize,
        block_size: usize,
    ) -> Result<BlockLayout, LayoutError> {
        BlockLayout::new(
            self,
            LayoutShape {
                heads,
                seq_q: seq,
                seq_kv: seq,
                block_size,
            },
        )
    }

    /// Checks every parameter, for a layout of `heads` heads.
    ///
    /// # Errors
    /// [`LayoutError::Pattern`] naming the first parameter that is out of range.
    pub fn validate(&self, heads: usize) -> Result<(), LayoutError> {
        let error = |argument, expected: String, got: String| {
            Err(LayoutError::Pattern {
                pattern: self.to_string(),
                argument,
                expected,
                got,
            })
        };
        let between = |argument, min: usize, value: usize| match value {
            value if (min..=MAX_PARAMETER).contains(&value) => Ok(()),
            _ => error(
                argument,
                format!("between {min} and {MAX_PARAMETER}"),
                value.to_string(),
            ),
        };
        let positive = |argument, value| between(argument, 1, value);
        let ascending = |argument, list: &[usize]| {
            if let Some(pair) = list.windows(2).find(|pair| pair[0] >= pair[1]) {
                let got = format!("{} before {}", pair[0], pair[1]);
                return error(argument, "ascending".to_owned(), got);
            }
            list.last()
                .map_or(Ok(()), |&last| between(argument, 0, last))
        };
        match self {
            Self::Dense | Self::Causal | Self::FromFn(_) => Ok(()),
            Self::PrefixLm { prefix } => between("prefix", 0, *prefix),
            Self::Local { window } => positive("window", *window),
            Self::Streaming { window, sink } => {
                positive("window", *window)?;
                between("sink", 0, *sink)
            }
            Self::Strided { stride } => positive("stride", *stride),
            Self::Fixed {
                stride,
                columns,
                num_verts,
            } => {
                positive("stride", *stride)?;
                positive("columns", *columns)?;
                positive("num_verts", *num_verts)?;
                if !stride.is_multiple_of(*columns) {
                    return error(
                        "stride",
                        format!("a multiple of columns = {columns}"),
                        stride.to_string(),
                    );
                }
                if num_verts.checked_mul(*columns).is_none_or(|c| c > *stride) {
                    return error(
                        "num_verts · columns",
                        format!("at most stride = {stride}"),
                        format!("{num_verts} · {columns}"),
                    );
                }
                if !heads.is_multiple_of(*num_verts) {
                    return error(
                        "heads",
                        format!("a multiple of num_verts = {num_verts}"),
                        heads.to_string(),
                    );
                }
                Ok(())
            }
            Self::Window { reach, dilation } => {
                between("reach", 0, *reach)?;
                positive("dilation", *dilation)?;
                between("reach · dilation", 0, reach.saturating_mul(*dilation))
            }
            Self::Chunked {
                size,
                before,
                after,
            } => {
                positive("size", *size)?;
                between("before · size", 0, before.saturating_mul(*size))?;
                between("after · size", 0, after.saturating_mul(*size))
            }
            Self::Columns {
                stride,
                columns: width,
                num_verts,
            }
            | Self::Rows {
                stride,
                rows: width,
                num_verts,
            } => {
                let name = match self {
                    Self::Columns { .. } => "columns",
                    _ => "rows",
                };
                positive("stride", *stride)?;
                positive(name, *width)?;
                positive("num_verts", *num_verts)?;
                if num_verts
                    .checked_mul(*width)
                    .is_none_or(|all| all > *stride)
                {
                    let expected = format!("at most stride = {stride}");
                    return error(name, expected, format!("{num_verts} groups of {width}"));
                }
                Ok(())
            }
            Self::Global { ranges } | Self::GlobalKeys { ranges } => {
                let mut end = 0;
                for (index, &(first, after)) in ranges.iter().enumerate() {
                    between("the end of a range", 1, after)?;
                    if first >= after || (index > 0 && first < end) {
                        let expected = "ascending and disjoint".to_owned();
                        return error("ranges", expected, format!("{first}..{after}"));
                    }
                    end = after;
                }
                Ok(())
            }
            Self::VerticalSlash { vertical, slash } => {
                ascending("vertical", vertical).and_then(|()| ascending("slash", slash))
            }
            Self::Documents { starts } => ascending("starts", starts),
            Self::Packed { starts, pattern } => {
                ascending("starts", starts).and_then(|()| pattern.validate(heads))
            }
            Self::RandomBlocks {
                block,
                blocks,
                count,
                ..
            } => {
                positive("block", *block)?;
                positive("blocks", *blocks)?;
                between("block · blocks", 1, block.saturating_mul(*blocks))?;
                if *count > MAX_DRAWN {
                    let expected = format!("at most {MAX_DRAWN}");
                    return error("count", expected, count.to_string());
                }
                Ok(())
            }
            Self::Union(parts) | Self::Intersection(parts) | Self::PerHead(parts) => {
                positive("the number of parts", parts.len())?;
                if matches!(self, Self::PerHead(_)) && !heads.is_multiple_of(parts.len()) {
                    return error(
                        "heads",
                        format!("a multiple of the {} patterns", parts.len()),
                        heads.to_string(),
                    );
                }
                parts.iter().try_for_each(|p| p.validate(heads))
            }
        }
    }

    /// Which of the keys `j0..j0 + b` query `i` sees, as bits, for patterns made of lists: without asking for each pair.
    pub(crate) fn row_bits(&self, head: usize, i: i64, j0: i64, b: usize) -> Option<u128> {
        let after = j0 + b as i64;
        // The bits of keys `first..end`.
        let span = |first: i64, end: i64| {
            let (first, end) = (first.max(j0), end.min(after));
            match end > first {
                true => (u128::MAX >> (128 - (end - first))) << (first - j0),
                false => 0,
            }
        };
        Some(match self {
            Self::Global { ranges } if is_in(ranges, i) => span(j0, after),
            Self::Global { ranges } | Self::GlobalKeys { ranges } => {
                let from = ranges.partition_point(|&(_, end)| end as i64 <= j0);
                let near = ranges[from..].iter();
                near.take_while(|&&(start, _)| (start as i64) < after)
                    .fold(0, |bits, &(start, end)| {
                        bits | span(start as i64, end as i64)
                    })
            }
            Self::Documents { starts } => {
                let own = document(starts, i);
                let first = match own {
                    0 => j0,
                    own => starts[own - 1] as i64,
                };
                span(first, starts.get(own).map_or(after, |&end| end as i64))
            }
            Self::VerticalSlash { vertical, slash } => {
                let from = vertical.partition_point(|&v| (v as i64) < j0);
                let columns = vertical[from..].iter().map(|&v| v as i64);
                let columns = columns.take_while(|&v| v < after && v <= i);
                // i − s < after
                let from = slash.partition_point(|&s| s as i64 <= i - after);
                let diagonals = slash[from..].iter().map(|&s| i - s as i64);
                let diagonals = diagonals.take_while(|&j| j >= j0);
                columns
                    .chain(diagonals)
                    .fold(0, |bits, j| bits | span(j, j + 1))
            }
            Self::RandomBlocks { block, .. } => {
                let block = *block as i64;
                let drawn = self.random_row(head, i.div_euclid(block)).into_iter();
                drawn.fold(0, |bits, j| bits | span(j * block, (j + 1) * block))
            }
            _ => return None,
        })
    }

    /// A `p` such that moving query and key by `p` positions together changes no pair; `None` if unknown.
    pub(crate) fn shift_period(&self) -> Option<i64> {
        match self {
            Self::Dense
            | Self::Causal
            | Self::Local { .. }
            | Self::Strided { .. }
            | Self::Window { .. } => Some(1),
            Self::Fixed { stride, .. }
            | Self::Columns { stride, .. }
            | Self::Rows { stride, .. }
            | Self::Chunked { size: stride, .. } => Some(*stride as i64),
            Self::Union(parts) | Self::Intersection(parts) | Self::PerHead(parts) => {
                parts.iter().try_fold(1, |period: i64, part| {
                    let other = part.shift_period()?;
                    (period / crate::zones::gcd(period, other)).checked_mul(other)
                })
            }
            Self::PrefixLm { .. }
            | Self::Streaming { .. }
            | Self::Global { .. }
            | Self::GlobalKeys { .. }
            | Self::VerticalSlash { .. }
            | Self::Documents { .. }
            | Self::Packed { .. }
            | Self::RandomBlocks { .. }
            | Self::FromFn(_) => None,
        }
    }

    /// A `p` such that heads `h` and `h + p` have the same pairs; `None` if only a comparison can tell.
    pub(crate) fn head_period(&self) -> Option<usize> {
        match self {
            Self::Fixed { num_verts, .. }
            | Self::Columns { num_verts, .. }
            | Self::Rows { num_verts, .. } => Some(*num_verts),
            Self::Union(parts) | Self::Intersection(parts) => head_period_of(parts, 1),
            Self::PerHead(parts) => head_period_of(parts, parts.len()),
            Self::Packed { pattern, .. } => pattern.head_period(),
            Self::FromFn(PatternFn { by_head: true, .. }) | Self::RandomBlocks { .. } => None,
            _ => Some(1),
        }
    }

    /// The blocks drawn for a row of a [`Pattern::RandomBlocks`]; none for any other pattern.
    pub(crate) fn random_row(&self, head: usize, row: i64) -> Vec<i64> {
        let &Self::RandomBlocks {
            blocks,
            count,
            seed,
            ..
        } = self
        else {
            return Vec::new();
        };
        let last = (blocks as i64).saturating_sub(1);
        if row < 1 || row >= last {
            return Vec::new();
        }
        // Blocks 1..last but for the row's own and its neighbours.
        let (left_out, after) = ((row - 1).max(1), (row + 2).min(last));
        let candidates = last - 1 - (after - left_out);
        let block_of = |k: i64| {
            if 1 + k < left_out {
                1 + k
            } else {
                1 + k + (after - left_out)
            }
        };
        // Floyd's sampling: every subset of this size is as likely as any other.
        let count = (count.min(MAX_DRAWN) as i64).min(candidates);
        let mut chosen: Vec<i64> = Vec::new();
        for bound in candidates - count..candidates {
            let number = mix([seed, head as u64, row as u64, bound as u64]);
            let drawn = block_of((number % (bound as u64 + 1)) as i64);
            chosen.push(match chosen.contains(&drawn) {
                true => block_of(bound),
                false => drawn,
            });
        }
        chosen
    }
}

fn sorted(numbers: impl IntoIterator<Item = usize>) -> Vec<usize> {
    let mut numbers: Vec<usize> = numbers.into_iter().collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// Ranges of neighbours.
fn ranges(tokens: impl IntoIterator<Item = usize>) -> Vec<(usize, usize)> {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for token in sorted(tokens) {
        match ranges.last_mut() {
            Some(last) if last.1 == token => last.1 = token.saturating_add(1),
            _ => ranges.push((token, token.saturating_add(1))),
        }
    }
    ranges
}

fn divides(divisor: i64, number: i64) -> bool {
    number.checked_rem(divisor) == Some(0)
}

pub(crate) fn is_in(ranges: &[(usize, usize)], position: i64) -> bool {
    usize::try_from(position).is_ok_and(|p| {
        let after = ranges.partition_point(|&(first, _)| first <= p);
        after > 0 && p < ranges[after - 1].1
    })
}

/// Whether a position is of the head's group, of `num_verts` that are counted from the end of its window.
pub(crate) fn is_in_group(
    position: i64,
    stride: usize,
    width: usize,
    head: usize,
    num_verts: usize,
) -> bool {
    let stride = stride as i64;
    let from_end = position
        .checked_rem_euclid(stride)
        .map(|at| stride.wrapping_sub(1).wrapping_sub(at));
    let group = from_end.and_then(|at| at.checked_div(width as i64));
    let own = head.checked_rem(num_verts).map(|vert| vert as i64);
    group.is_some() && group == own
}

/// How many documents begin up to a position.
pub(crate) fn document(starts: &[usize], position: i64) -> usize {
    starts.partition_point(|&start| start as i64 <= position)
}

/// Where a document begins, as [`document`] counts them; what is before the first one is counted from position 0.
pub(crate) fn document_start(starts: &[usize], document: usize) -> i64 {
    match document {
        0 => 0,
        after => starts[after - 1] as i64,
    }
}

/// A number made of others (the finaliser of SplitMix64, chained).
fn mix<const N: usize>(numbers: [u64; N]) -> u64 {
    numbers
        .into_iter()
        .fold(0x9e37_79b9_7f4a_7c15, |state, number| {
            let mut x = (state ^ number).wrapping_add(0x9e37_79b9_7f4a_7c15);
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^ (x >> 31)
        })
}

fn head_period_of(parts: &[Pattern], start: usize) -> Option<usize> {
    parts.iter().try_fold(start, |period, part| {
        Some(crate::zones::lcm(period, part.head_period()?))
    })
}

/// A list, of long ones the first few.
fn few(items: impl ExactSizeIterator<Item = String>) -> String {
    const FEW: usize = 8;
    let count = items.len();
    let mut shown: Vec<String> = items.take(FEW).collect();
    if count > FEW {
        shown.push(format!("… {count} in all"));
    }
    shown.join(", ")
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |f: &mut fmt::Formatter<'_>, name: &str, parts: &[Pattern]| {
            write!(f, "{name}(")?;
            for (index, part) in parts.iter().enumerate() {
                let comma = if index > 0 { ", " } else { "" };
                write!(f, "{comma}{part}")?;
            }
            write!(f, ")")
        };
        match self {
            Self::Dense => write!(f, "dense"),
            Self::Causal => write!(f, "causal"),
            Self::Local { window } => write!(f, "local({window})"),
            Self::Strided { stride } => write!(f, "strided({stride})"),
            Self::Fixed {
                stride,
                columns,
                num_verts: 1,
            } => write!(f, "fixed({stride}, {columns})"),
            Self::Fixed {
                stride,
                columns,
                num_verts,
            } => write!(f, "fixed({stride}, {columns}, num_verts = {num_verts})"),
            Self::PrefixLm { prefix } => write!(f, "prefix_lm({prefix})"),
            Self::Streaming { window, sink } => write!(f, "streaming({window}, sink = {sink})"),
            Self::Window { reach, dilation: 1 } => write!(f, "window({reach})"),
            Self::Window { reach, dilation } => write!(f, "window({reach}, dilation = {dilation})"),
            Self::Chunked {
                size,
                before: 0,
                after: 0,
            } => write!(f, "chunked({size})"),
            Self::Chunked {
                size,
                before,
                after,
            } => write!(f, "chunked({size}, before = {before}, after = {after})"),
            Self::Global { ranges } | Self::GlobalKeys { ranges } => {
                let ranges = ranges.iter().map(|&(first, after)| {
                    match first.checked_add(1) == Some(after) {
                        true => first.to_string(),
                        false => format!("{first}..{after}"),
                    }
                });
                let name = match self {
                    Self::Global { .. } => "global",
                    _ => "global_keys",
                };
                write!(f, "{name}({})", few(ranges))
            }
            Self::Columns {
                stride,
                columns,
                num_verts,
            } => write!(f, "columns({stride}, {columns}, num_verts = {num_verts})"),
            Self::Rows {
                stride,
                rows,
                num_verts,
            } => write!(f, "rows({stride}, {rows}, num_verts = {num_verts})"),
            Self::VerticalSlash { vertical, slash } => {
                let lists = [vertical, slash].map(|list| few(list.iter().map(usize::to_string)));
                write!(f, "vertical_slash([{}], [{}])", lists[0], lists[1])
            }
            Self::Documents { starts } => {
                write!(f, "documents({})", few(starts.iter().map(usize::to_string)))
            }
            Self::Packed { starts, pattern } => {
                let starts = few(starts.iter().map(usize::to_string));
                write!(f, "packed([{starts}], {pattern})")
            }
            Self::RandomBlocks {
                block,
                blocks,
                count,
                seed,
            } => write!(
                f,
                "random_blocks({block}, {blocks}, {count}, seed = {seed})"
            ),
            Self::Union(parts) => list(f, "union", parts),
            Self::Intersection(parts) => list(f, "intersection", parts),
            Self::PerHead(parts) => list(f, "per_head", parts),
            Self::FromFn(function) => write!(f, "{}", function.name),
        }
    }
}
