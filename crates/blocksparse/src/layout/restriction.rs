//! Padding masks of queries and keys.

/// Padding of the queries and keys of one batch entry: `true` keeps a position, `false` marks padding. By default nothing is padding.
///
/// ```
/// use blocksparse::{Pattern, PaddingMask};
///
/// let layout = Pattern::causal().layout(2, 4, 8)?;
/// // Entry 0 has all four positions, entry 1 the last three (padded on the left).
/// let keys = [false, true, true, true];
/// let padded = layout.mask_padding(&[PaddingMask::default(), PaddingMask::default().keys(keys)])?;
/// assert_eq!(padded.batch(), Some(2));
/// assert_eq!(padded.to_dense_batch(1, 0)[2], [false, true, true, false]);
/// # Ok::<(), blocksparse::LayoutError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[must_use]
pub struct PaddingMask {
    /// One flag per query; `None` keeps all.
    pub queries: Option<Vec<bool>>,
    /// One flag per key; `None` keeps all.
    pub keys: Option<Vec<bool>>,
}

impl PaddingMask {
    /// Sets which queries are kept: one flag per query.
    pub fn queries(mut self, kept: impl IntoIterator<Item = bool>) -> Self {
        self.queries = Some(kept.into_iter().collect());
        self
    }

    /// Sets which keys are kept: one flag per key.
    pub fn keys(mut self, kept: impl IntoIterator<Item = bool>) -> Self {
        self.keys = Some(kept.into_iter().collect());
        self
    }
}
