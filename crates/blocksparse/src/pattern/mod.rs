//! [`Pattern`]: a value that defines, for each head, which query attends to which key.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

mod attends;
mod cells;
mod display;
mod notation;
mod periods;
mod reach;
mod repeats;
mod row_keys;
mod validate;
mod zones;

pub(crate) use attends::{document, document_start};
pub(crate) use cells::{BlockRow, Cell, Cells};
pub use reach::LastUse;
pub use row_keys::Repeat;

type Predicate = dyn Fn(usize, i64, i64) -> bool + Send + Sync;

/// A static sparsity pattern: the (query, key) pairs that each head computes.
///
/// [`Pattern::attends`] is the definition; layouts, kernels and pictures follow from it. Patterns are plain values: they print, compare, serialize and combine.
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
#[must_use]
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
        /// c, the number of last columns of each earlier window.
        columns: usize,
        /// Number of column groups that the heads use in turn.
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
        /// Number of first keys that every query sees.
        sink: usize,
    },
    /// `|i − j| ≤ reach · dilation ∧ (i − j) mod dilation = 0`: a window to both sides (Beltagy et al., 2020, §3.1).
    Window {
        /// Keys to each side.
        reach: usize,
        /// Distance between two keys.
        dilation: usize,
    },
    /// `⌊i/size⌋ − before ≤ ⌊j/size⌋ ≤ ⌊i/size⌋ + after`: the query's chunk and adjacent chunks. Block-diagonal if `before` and `after` are 0.
    Chunked {
        /// Positions of a chunk.
        size: usize,
        /// Chunks before the query's own.
        before: usize,
        /// Chunks after it.
        after: usize,
    },
    /// `i ∈ G ∨ j ∈ G`: tokens that see all positions and are seen by all.
    Global {
        /// G, as ranges `start..end` in ascending order that do not overlap.
        ranges: Vec<(usize, usize)>,
    },
    /// `j ∈ G`: tokens that are seen by all.
    GlobalKeys {
        /// G, as ranges `start..end` in ascending order that do not overlap.
        ranges: Vec<(usize, usize)>,
    },
    /// `⌊(ℓ−1−(j mod ℓ))/c⌋ = head mod num_verts`: columns that every query sees. They are the head's group of `c` columns in each window of ℓ.
    Columns {
        /// ℓ, the width of the windows.
        stride: usize,
        /// c, the number of columns in a group.
        columns: usize,
        /// Number of column groups that the heads use in turn.
        num_verts: usize,
    },
    /// `⌊(ℓ−1−(i mod ℓ))/c⌋ = head mod num_verts`: queries that see every key.
    Rows {
        /// ℓ, the width of the windows.
        stride: usize,
        /// c, the number of rows in a group.
        rows: usize,
        /// Number of row groups that the heads use in turn.
        num_verts: usize,
    },
    /// `j ≤ i ∧ (j ∈ V ∨ i − j ∈ S)`: selected columns and diagonals (MInference, Jiang et al., 2024).
    VerticalSlash {
        /// V, ascending.
        vertical: Vec<usize>,
        /// S, ascending.
        slash: Vec<usize>,
    },
    /// Positions of one document see each other: as many `starts` are `≤ i` as `≤ j`.
    Documents {
        /// First position of each document, ascending: the `cu_seqlens` of packed sequences.
        starts: Vec<usize>,
    },
    /// Positions of one document see each other by `pattern`, with positions counted from the start of the document.
    Packed {
        /// First position of each document, ascending: the `cu_seqlens` of packed sequences.
        starts: Vec<usize>,
        /// Pattern within each document.
        pattern: Box<Pattern>,
    },
    /// `⌊j/block⌋ ∈ rand(head, ⌊i/block⌋)`: `count` random blocks for each head and row of blocks. Blocks at either end of the sequence, the row's own block
    /// and its neighbours are never drawn. The first and the last row have none.
    RandomBlocks {
        /// Positions per block of the pattern. A layout may use another block size.
        block: usize,
        /// Number of blocks of the sequence.
        blocks: usize,
        /// Number of blocks drawn per row, if there are as many candidates.
        count: usize,
        /// Seed of the random blocks.
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

/// A callback and its name, the content of [`Pattern::FromFn`]. Created by [`Pattern::from_fn`] and [`Pattern::from_pair_fn`].
#[derive(Clone)]
pub struct PatternFn {
    name: String,
    predicate: Arc<Predicate>,
    /// True if heads may differ.
    by_head: bool,
}

impl PatternFn {
    /// Returns the callback's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether heads may differ.
    pub fn is_by_head(&self) -> bool {
        self.by_head
    }
}

impl fmt::Debug for PatternFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PatternFn({:?})", self.name)
    }
}

/// Callbacks are equal only if they are clones of one another, since functions cannot be compared.
impl PartialEq for PatternFn {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && Arc::ptr_eq(&self.predicate, &other.predicate)
    }
}

impl Pattern {
    /// Allows every pair.
    pub fn dense() -> Self {
        Self::Dense
    }

    /// Allows the pairs with `j ≤ i`.
    pub fn causal() -> Self {
        Self::Causal
    }

    /// Allows the pairs with `j ≤ i ∧ i − j < window`.
    pub fn local(window: usize) -> Self {
        Self::Local { window }
    }

    /// Allows the pairs with `j ≤ i ∧ (i − j) mod stride = 0`.
    pub fn strided(stride: usize) -> Self {
        Self::Strided { stride }
    }

    /// Combines `local(stride) ∪ strided(stride)` in one softmax: the "merged" strided attention of the Sparse Transformer.
    pub fn merged_strided(stride: usize) -> Self {
        Self::union([Self::local(stride), Self::strided(stride)])
    }

    /// Returns the Sparse Transformer's fixed pattern: the query's own window of `stride` keys, and the last `columns` keys of every earlier window.
    pub fn fixed(stride: usize, columns: usize) -> Self {
        Self::fixed_heads(stride, columns, 1)
    }

    /// Returns [`Pattern::fixed`] with heads that use different column groups: head `h` uses group `h mod num_verts`, counted from the end of the window.
    pub fn fixed_heads(stride: usize, columns: usize, num_verts: usize) -> Self {
        Self::Fixed {
            stride,
            columns,
            num_verts,
        }
    }

    /// Allows the pairs with `j < prefix ∨ j ≤ i`.
    pub fn prefix_lm(prefix: usize) -> Self {
        Self::PrefixLm { prefix }
    }

    /// Allows the pairs with `j ≤ i ∧ (j < sink ∨ i − j < window)`.
    pub fn streaming(window: usize, sink: usize) -> Self {
        Self::Streaming { window, sink }
    }

    /// Allows the pairs with `|i − j| ≤ reach`: `2 · reach + 1` keys, the query's own position included.
    pub fn window(reach: usize) -> Self {
        Self::dilated_window(reach, 1)
    }

    /// Allows the pairs with `|i − j| ≤ reach · dilation ∧ (i − j) mod dilation = 0`.
    pub fn dilated_window(reach: usize, dilation: usize) -> Self {
        Self::Window { reach, dilation }
    }

    /// Allows the pairs with `⌊i/size⌋ = ⌊j/size⌋`: block-diagonal.
    pub fn chunked(size: usize) -> Self {
        Self::chunked_window(size, 0, 0)
    }

    /// Allows the query's chunk of `size` positions, `before` chunks before it and `after` after it.
    pub fn chunked_window(size: usize, before: usize, after: usize) -> Self {
        Self::Chunked {
            size,
            before,
            after,
        }
    }

    /// Allows the pairs with `i ∈ tokens ∨ j ∈ tokens`.
    pub fn global(tokens: impl IntoIterator<Item = usize>) -> Self {
        Self::Global {
            ranges: ranges(tokens),
        }
    }

    /// Allows the pairs with `j ∈ tokens`: keys that every query sees. As queries these tokens see no more than others.
    pub fn global_keys(tokens: impl IntoIterator<Item = usize>) -> Self {
        Self::GlobalKeys {
            ranges: ranges(tokens),
        }
    }

    /// Returns Longformer's pattern, `dilated_window(reach, dilation) ∪ global(tokens)` in one softmax (Beltagy et al., 2020). For different dilations
    /// per head, combine several with [`Pattern::per_head`].
    pub fn longformer(
        reach: usize,
        dilation: usize,
        tokens: impl IntoIterator<Item = usize>,
    ) -> Self {
        Self::union([Self::dilated_window(reach, dilation), Self::global(tokens)])
    }

    /// Returns BigBird's pattern over `blocks` blocks of `block` positions (Zaheer et al., 2020): the row's own block and the adjacent ones,
    /// the first and the last block as global tokens, and `random` blocks drawn for each head and row.
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

    /// Returns DeepSpeed's bidirectional `fixed` pattern: windows of `stride` positions, and in each window a group of `columns` positions
    /// (group `head mod num_verts` from its end) as columns that all queries see. With `horizontal`, this group also sees all keys.
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

    /// Returns DeepSpeed's `variable` pattern: windows of the given sizes, the last size repeated up to `seq` positions, and `tokens` as keys that
    /// all queries see. With `horizontal`, `tokens` also see all keys. For its random blocks, form a union with
    /// [`Pattern::random_blocks`]. An empty list of windows or a window of 0 is an error when a layout is built. The list of windows is expanded.
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

    /// Allows the pairs with `j ≤ i ∧ (j ∈ vertical ∨ i − j ∈ slash)`.
    pub fn vertical_slash(
        vertical: impl IntoIterator<Item = usize>,
        slash: impl IntoIterator<Item = usize>,
    ) -> Self {
        Self::VerticalSlash {
            vertical: sorted(vertical),
            slash: sorted(slash),
        }
    }

    /// Separates packed sequences, which do not see each other, given their first positions (`cu_seqlens`, with or without the total at the end). Intersect it
    /// with the pattern inside the sequences: `Pattern::intersection([Pattern::documents([0, 300, 420]), Pattern::local(64)])`.
    pub fn documents(starts: impl IntoIterator<Item = usize>) -> Self {
        Self::Documents {
            starts: sorted(starts),
        }
    }

    /// Returns [`Pattern::documents`] from the document id of each position. A document is a run of equal ids; an id that reappears later is
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

    /// Applies `pattern` to each packed sequence as if the sequence stood alone. Unlike in an intersection with
    /// [`Pattern::documents`], windows, columns and global tokens are counted from the start of each document.
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

    /// Allows `count` random blocks for each head and row of blocks: see [`Pattern::RandomBlocks`].
    pub fn random_blocks(block: usize, blocks: usize, count: usize, seed: u64) -> Self {
        Self::RandomBlocks {
            block,
            blocks,
            count,
            seed,
        }
    }

    /// Allows the pairs that any of `parts` allows.
    pub fn union(parts: impl IntoIterator<Item = Pattern>) -> Self {
        Self::Union(parts.into_iter().collect())
    }

    /// Allows the pairs that all of `parts` allow.
    pub fn intersection(parts: impl IntoIterator<Item = Pattern>) -> Self {
        Self::Intersection(parts.into_iter().collect())
    }

    /// Restricts this pattern to the pairs with `j ≤ i`.
    pub fn and_causal(self) -> Self {
        Self::intersection([self, Self::Causal])
    }

    /// Gives head `h` pattern `h mod p` of the `p` patterns.
    pub fn per_head(parts: impl IntoIterator<Item = Pattern>) -> Self {
        Self::PerHead(parts.into_iter().collect())
    }

    /// Creates a custom pattern: `attends(head, i, j)` returns whether query position `i` sees key position `j`. It is called for every pair when a layout is
    /// built, O(heads · n²). If all heads are equal, [`Pattern::from_pair_fn`] evaluates only one of them. If you know which blocks are empty,
    /// [`BlockLayout::from_block_fn`](crate::BlockLayout::from_block_fn) builds a layout in O(blocks).
    ///
    /// The callback is called only for existing queries and keys: `j` is in `0..seq_kv`, and `i` is in `seq_kv − seq_q..seq_kv`, since the last query is
    /// aligned with the last key. With more queries than keys the first `seq_q − seq_kv` queries therefore have a negative `i`. Inside [`Pattern::packed`]
    /// positions are counted from the start of a document.
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

    /// Creates a pattern like [`Pattern::from_fn`] that is the same in all heads: `attends(i, j)` is called for every pair of one head, O(n²).
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
}

fn sorted(numbers: impl IntoIterator<Item = usize>) -> Vec<usize> {
    let mut numbers: Vec<usize> = numbers.into_iter().collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// Merges adjacent tokens into ranges.
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
