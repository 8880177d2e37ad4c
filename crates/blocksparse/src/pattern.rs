//! What is allowed: a [`Pattern`] is a value that says, for each head, which query attends to which key.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{BlockLayout, LayoutError, LayoutShape};

/// Windows, strides and the like stay below this, so that positions can be computed in i64.
const MAX_PARAMETER: usize = 1 << 40;

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
    /// position `j`. It is called once for every pair when a layout is built, O(heads · n²); if your
    /// pattern knows which blocks are empty, [`BlockLayout::from_block_fn`] builds it in O(blocks).
    ///
    /// `i` is negative only for the first queries of a layout with more queries than keys.
    pub fn from_fn(
        name: impl Into<String>,
        attends: impl Fn(usize, i64, i64) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self::FromFn(PatternFn {
            name: name.into(),
            predicate: Arc::new(attends),
        })
    }

    /// Whether, in `head`, the query at position `i` attends to the key at position `j`.
    ///
    /// With `seq_q ≠ seq_kv` query row `r` of a layout sits at position `r + seq_kv − seq_q`
    /// (aligned bottom-right, as Burn's own attention does).
    pub fn attends(&self, head: usize, i: i64, j: i64) -> bool {
        match self {
            Self::Dense => true,
            Self::Causal => j <= i,
            Self::Local { window } => j <= i && i - j < *window as i64,
            Self::Strided { stride } => j <= i && (i - j) % *stride as i64 == 0,
            Self::Fixed {
                stride,
                columns,
                num_verts,
            } => {
                let (stride, columns) = (*stride as i64, *columns as i64);
                let vert = (head % num_verts) as i64;
                j <= i
                    && (i.div_euclid(stride) == j.div_euclid(stride)
                        || (stride - 1 - j.rem_euclid(stride)) / columns == vert)
            }
            Self::PrefixLm { prefix } => j < *prefix as i64 || j <= i,
            Self::Streaming { window, sink } => {
                j <= i && (j < *sink as i64 || i - j < *window as i64)
            }
            Self::Union(parts) => parts.iter().any(|p| p.attends(head, i, j)),
            Self::Intersection(parts) => parts.iter().all(|p| p.attends(head, i, j)),
            Self::PerHead(parts) => parts[head % parts.len()].attends(head, i, j),
            Self::FromFn(f) => (f.predicate)(head, i, j),
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

    /// A `p` such that moving query and key by `p` positions together changes no pair; `None` if unknown.
    pub(crate) fn shift_period(&self) -> Option<i64> {
        match self {
            Self::Dense | Self::Causal | Self::Local { .. } | Self::Strided { .. } => Some(1),
            Self::Fixed { stride, .. } => Some(*stride as i64),
            Self::Union(parts) | Self::Intersection(parts) | Self::PerHead(parts) => {
                parts.iter().try_fold(1, |period: i64, part| {
                    let other = part.shift_period()?;
                    (period / crate::zones::gcd(period, other)).checked_mul(other)
                })
            }
            Self::PrefixLm { .. } | Self::Streaming { .. } | Self::FromFn(_) => None,
        }
    }

    /// A `p` such that heads `h` and `h + p` have the same pairs; `None` if only a comparison can tell.
    pub(crate) fn head_period(&self) -> Option<usize> {
        match self {
            Self::Fixed { num_verts, .. } => Some(*num_verts),
            Self::Union(parts) | Self::Intersection(parts) => head_period_of(parts, 1),
            Self::PerHead(parts) => head_period_of(parts, parts.len()),
            Self::FromFn(_) => None,
            _ => Some(1),
        }
    }
}

fn head_period_of(parts: &[Pattern], start: usize) -> Option<usize> {
    parts.iter().try_fold(start, |period, part| {
        Some(crate::zones::lcm(period, part.head_period()?))
    })
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
            Self::Union(parts) => list(f, "union", parts),
            Self::Intersection(parts) => list(f, "intersection", parts),
            Self::PerHead(parts) => list(f, "per_head", parts),
            Self::FromFn(function) => write!(f, "{}", function.name),
        }
    }
}
