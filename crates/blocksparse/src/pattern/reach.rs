//! How far rows and columns reach in an unbounded sequence. A KV cache uses this to find safe boundaries and keys that it can evict.

use super::Pattern;
use super::attends::{document, document_start, is_in, of_head};

/// The last position of a row's keys, or of a column's queries, in an unbounded sequence. The order is by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LastUse {
    /// No position.
    Never,
    /// This position.
    At(i64),
    /// No last position: there is always a later one.
    Always,
}

impl LastUse {
    /// Converts positions that are counted from `start` to absolute ones.
    fn from(self, start: i64) -> Self {
        match self {
            Self::At(last) => Self::At(last.saturating_add(start)),
            other => other,
        }
    }

    fn is_before(self, position: i64) -> bool {
        self < Self::At(position)
    }
}

/// Maximum number of steps of [`Pattern::next_boundary`]. A pattern whose rows always reach ahead, such as a window to both sides,
/// has no boundary, but no single step proves it.
const MOST_STEPS: usize = 1 << 10;

/// Maximum number of rows of an intersection that are evaluated one by one.
const MOST_ROWS: i64 = 1 << 9;

/// Maximum number of comparisons for drawing rows of random blocks.
const MOST_DRAWS: usize = 1 << 16;

impl Pattern {
    /// Returns the last key that the query at position `i ≥ 0` of `head` attends to. The result is exact for single kinds. For an intersection it may be
    /// later than the true one, never earlier. For a callback it is [`LastUse::Always`], since nothing is known.
    ///
    /// ```
    /// use blocksparse::{Pattern, LastUse};
    ///
    /// assert_eq!(Pattern::prefix_lm(5).horizon(0, 2), LastUse::At(4));
    /// assert_eq!(Pattern::chunked(4).horizon(0, 5), LastUse::At(7));
    /// assert_eq!(Pattern::dense().horizon(0, 5), LastUse::Always);
    /// ```
    pub fn horizon(&self, head: usize, i: i64) -> LastUse {
        match self {
            Self::Dense | Self::FromFn(_) => LastUse::Always,
            Self::Causal
            | Self::Local { .. }
            | Self::Strided { .. }
            | Self::Fixed { .. }
            | Self::Streaming { .. } => LastUse::At(i),
            Self::PrefixLm { prefix } => LastUse::At(i.max((*prefix as i64).saturating_sub(1))),
            Self::Window { reach, dilation } => {
                LastUse::At(i.saturating_add((*reach as i64).saturating_mul(*dilation as i64)))
            }
            Self::Chunked { size, after, .. } => LastUse::At(chunk_end(i, *size, *after)),
            Self::Global { ranges } if is_in(ranges, i) => LastUse::Always,
            Self::Global { ranges } | Self::GlobalKeys { ranges } => last_of(ranges),
            Self::Columns { .. } => LastUse::Always,
            Self::Rows { .. } => always_if(self.has_in_group(head, i)),
            Self::VerticalSlash { vertical, slash } => {
                let columns = vertical.partition_point(|&v| v as i64 <= i);
                let column = vertical[..columns].last().map(|&v| v as i64);
                let diagonal = slash
                    .first()
                    .map(|&s| i.saturating_sub(s as i64))
                    .filter(|&j| j >= 0);
                column.max(diagonal).map_or(LastUse::Never, LastUse::At)
            }
            Self::Documents { starts } => document_last(starts, i),
            Self::Packed { starts, pattern } => {
                let start = document_start(starts, document(starts, i));
                let own = pattern.horizon(head, i.saturating_sub(start)).from(start);
                own.min(document_last(starts, i))
            }
            Self::RandomBlocks { block, .. } => {
                let row = i.checked_div_euclid(*block as i64).unwrap_or(0);
                self.drawn_last(head, row, *block)
            }
            Self::Union(_) | Self::Intersection(_) | Self::PerHead(_) => {
                self.of_parts(head, |part| part.horizon(head, i))
            }
        }
    }

    /// Returns the last query that attends to the key at position `j ≥ 0` of `head`. The result is exact for single kinds. For an intersection, or for
    /// thousands of rows of random blocks, it may be later than the true one, never earlier. For a callback it is [`LastUse::Always`], since nothing is known.
    ///
    /// A key is *live* before query `t` if its last query is at `t` or later. A key that is no longer live never becomes live again.
    ///
    /// ```
    /// use blocksparse::{Pattern, LastUse};
    ///
    /// let fixed = Pattern::fixed(4, 1);
    /// assert_eq!(fixed.last_query(0, 5), LastUse::At(7)); // to the end of its window
    /// assert_eq!(fixed.last_query(0, 7), LastUse::Always); // a kept column
    /// ```
    pub fn last_query(&self, head: usize, j: i64) -> LastUse {
        match self {
            Self::Dense
            | Self::Causal
            | Self::Strided { .. }
            | Self::PrefixLm { .. }
            | Self::Rows { .. }
            | Self::FromFn(_) => LastUse::Always,
            Self::Streaming { sink, .. } if j < *sink as i64 => LastUse::Always,
            Self::Local { window } | Self::Streaming { window, .. } => {
                LastUse::At(j.saturating_add((*window as i64).saturating_sub(1)))
            }
            Self::Fixed { .. } if self.has_in_group(head, j) => LastUse::Always,
            Self::Fixed { stride, .. } => LastUse::At(chunk_end(j, *stride, 0)),
            Self::Window { reach, dilation } => {
                LastUse::At(j.saturating_add((*reach as i64).saturating_mul(*dilation as i64)))
            }
            Self::Chunked { size, before, .. } => LastUse::At(chunk_end(j, *size, *before)),
            Self::Global { ranges } | Self::GlobalKeys { ranges } if is_in(ranges, j) => {
                LastUse::Always
            }
            Self::Global { ranges } => last_of(ranges),
            Self::GlobalKeys { .. } => LastUse::Never,
            Self::Columns { .. } => always_if(self.has_in_group(head, j)),
            Self::VerticalSlash { vertical, slash } => {
                let is_column =
                    usize::try_from(j).is_ok_and(|j| vertical.binary_search(&j).is_ok());
                match (is_column, slash.last()) {
                    (true, _) => LastUse::Always,
                    (false, Some(&furthest)) => LastUse::At(j.saturating_add(furthest as i64)),
                    (false, None) => LastUse::Never,
                }
            }
            Self::Documents { starts } => document_last(starts, j),
            Self::Packed { starts, pattern } => {
                let start = document_start(starts, document(starts, j));
                let own = pattern
                    .last_query(head, j.saturating_sub(start))
                    .from(start);
                own.min(document_last(starts, j))
            }
            Self::RandomBlocks { count: 0, .. } => LastUse::Never,
            Self::RandomBlocks {
                block,
                blocks,
                count,
                ..
            } => {
                let column = j.checked_div_euclid(*block as i64).unwrap_or(0);
                let rows = *blocks as i64;
                let last = match is_costly(*blocks, *count) {
                    // The last row draws no blocks, and the first and the last block are never drawn.
                    true => (column > 0 && column < rows.saturating_sub(1))
                        .then_some(rows.saturating_sub(2)),
                    false => (0..rows)
                        .rev()
                        .find(|&row| self.random_row(head, row).contains(&column)),
                };
                last.map_or(LastUse::Never, |row| {
                    LastUse::At(chunk_end(row.saturating_mul(*block as i64), *block, 0))
                })
            }
            Self::Union(_) | Self::Intersection(_) | Self::PerHead(_) => {
                self.of_parts(head, |part| part.last_query(head, j))
            }
        }
    }

    /// Returns whether a cache may end at a boundary after `t` positions: no query before `t` attends to a key from `t` on, in any of `heads` heads, so
    /// the rows that were computed are final. May return false where only an intersection allows a boundary. Returns false for a callback
    /// unless it is intersected with a causal pattern.
    ///
    /// ```
    /// use blocksparse::Pattern;
    ///
    /// let chunks = Pattern::chunked_window(4, 1, 0);
    /// assert!(chunks.allows_boundary(1, 8) && !chunks.allows_boundary(1, 6));
    /// assert_eq!(chunks.next_boundary(1, 6), Some(8));
    /// assert!(chunks.and_causal().allows_boundary(1, 6));
    /// ```
    pub fn allows_boundary(&self, heads: usize, t: usize) -> bool {
        let t = position(t);
        self.furthest(heads, t).is_before(t)
    }

    /// Returns the last key from `t` on that a query before `t` attends to, in any of `heads` heads. [`LastUse::Never`] means there is none, and `t` is
    /// a boundary.
    pub fn furthest_key(&self, heads: usize, t: usize) -> LastUse {
        let t = position(t);
        let furthest = self.furthest(heads, t);
        match furthest.is_before(t) {
            true => LastUse::Never,
            false => furthest,
        }
    }

    /// Returns the first boundary after `t`, or `None` if there is none, or none within a thousand steps.
    pub fn next_boundary(&self, heads: usize, t: usize) -> Option<usize> {
        let mut next = position(t).checked_add(1)?;
        for _ in 0..MOST_STEPS {
            match self.furthest(heads, next) {
                // A boundary must lie beyond the keys that these queries see.
                LastUse::At(last) if last >= next => next = last.checked_add(1)?,
                LastUse::Always => return None,
                _ => return usize::try_from(next).ok(),
            }
        }
        None
    }

    /// Returns the last key that queries before `t` attend to, in any head. If no key is at `t` or later, the result is some value before `t`.
    fn furthest(&self, heads: usize, t: i64) -> LastUse {
        if t <= 0 || self.is_causal() {
            return LastUse::Never;
        }
        let heads = (0..heads).map(|head| self.furthest_of(head, t));
        heads.max().unwrap_or(LastUse::Never)
    }

    fn furthest_of(&self, head: usize, t: i64) -> LastUse {
        match self {
            // The first query of such a kind decides.
            Self::Global { ranges } => match ranges.first() {
                Some(&(first, _)) if (first as i64) < t => LastUse::Always,
                _ => last_of(ranges),
            },
            Self::Rows { .. } => always_if(self.group(head).is_some_and(|rows| rows.start < t)),
            Self::Packed { starts, pattern } => {
                // Earlier documents end before `t`.
                let last = t - 1;
                let start = document_start(starts, document(starts, last));
                let own = pattern
                    .furthest_of(head, t.saturating_sub(start))
                    .from(start);
                own.min(document_last(starts, last))
            }
            Self::RandomBlocks { count: 0, .. } => LastUse::Never,
            Self::RandomBlocks {
                block,
                blocks,
                count,
                ..
            } => {
                let row = (t - 1).checked_div_euclid(*block as i64).unwrap_or(0);
                let rows = row.saturating_add(1).min(*blocks as i64);
                if is_costly(rows as usize, *count) {
                    let last = (*blocks as i64)
                        .saturating_sub(2)
                        .saturating_mul(*block as i64);
                    return LastUse::At(chunk_end(last, *block, 0));
                }
                let rows = (0..rows).map(|row| self.drawn_last(head, row, *block));
                rows.max().unwrap_or(LastUse::Never)
            }
            Self::Union(_) | Self::PerHead(_) => {
                self.of_parts(head, |part| part.furthest_of(head, t))
            }
            Self::Intersection(_) => {
                let most = self.of_parts(head, |part| part.furthest_of(head, t));
                // The parts may reach their furthest keys at different queries.
                match most.is_before(t) || t > MOST_ROWS {
                    true => most,
                    false => {
                        let rows = (0..t).map(|i| self.horizon(head, i));
                        rows.max().unwrap_or(LastUse::Never)
                    }
                }
            }
            // The last query reaches at least as far as earlier ones.
            Self::Dense
            | Self::Causal
            | Self::Local { .. }
            | Self::Strided { .. }
            | Self::Fixed { .. }
            | Self::PrefixLm { .. }
            | Self::Streaming { .. }
            | Self::Window { .. }
            | Self::Chunked { .. }
            | Self::GlobalKeys { .. }
            | Self::Columns { .. }
            | Self::VerticalSlash { .. }
            | Self::Documents { .. }
            | Self::FromFn(_) => self.horizon(head, t - 1),
        }
    }

    /// Combines the results of `of` for the parts of a combined pattern.
    fn of_parts(&self, head: usize, of: impl Fn(&Self) -> LastUse) -> LastUse {
        match self {
            Self::Union(parts) => parts.iter().map(of).max().unwrap_or(LastUse::Never),
            Self::Intersection(parts) => parts.iter().map(of).min().unwrap_or(LastUse::Always),
            Self::PerHead(parts) => of_head(parts, head).map_or(LastUse::Never, of),
            alone => of(alone),
        }
    }

    /// Returns the last position of the blocks drawn for a row.
    fn drawn_last(&self, head: usize, row: i64, block: usize) -> LastUse {
        let last = self.random_row(head, row).into_iter().max();
        last.map_or(LastUse::Never, |last| {
            LastUse::At(chunk_end(last.saturating_mul(block as i64), block, 0))
        })
    }
}

fn always_if(is: bool) -> LastUse {
    match is {
        true => LastUse::Always,
        false => LastUse::Never,
    }
}

/// Returns whether drawing these rows of random blocks is too expensive: each block is compared with those before it.
fn is_costly(rows: usize, count: usize) -> bool {
    let draws = rows.saturating_mul(count).saturating_mul(count);
    draws > MOST_DRAWS
}

fn position(t: usize) -> i64 {
    i64::try_from(t).unwrap_or(i64::MAX)
}

/// Returns the last position of the chunk that is `after` chunks after the chunk of a position.
fn chunk_end(position: i64, size: usize, after: usize) -> i64 {
    let size = size as i64;
    let chunk = position.checked_div_euclid(size).unwrap_or(0);
    let next = chunk.saturating_add(after as i64).saturating_add(1);
    next.saturating_mul(size).saturating_sub(1)
}

fn last_of(ranges: &[(usize, usize)]) -> LastUse {
    (ranges.last()).map_or(LastUse::Never, |&(_, end)| {
        LastUse::At((end as i64).saturating_sub(1))
    })
}

/// Returns the last position of a position's document.
fn document_last(starts: &[usize], position: i64) -> LastUse {
    (starts.get(document(starts, position))).map_or(LastUse::Always, |&next| {
        LastUse::At((next as i64).saturating_sub(1))
    })
}
