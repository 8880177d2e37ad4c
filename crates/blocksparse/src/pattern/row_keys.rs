//! The keys of one query as ranges: the rows that a decoding step reads.

use std::ops::Range;

use super::Pattern;
use super::attends::of_head;
use super::cells::{BlockRow, Cell, Cells};

impl Pattern {
    /// Returns whether every query of `head` attends to exactly the keys up to its own position that are live before it
    /// ([`Pattern::last_query`] is at the query or later). A key's position and last query then determine who sees it. May return false for
    /// parameters for which it is true.
    ///
    /// ```
    /// use blocksparse::Pattern;
    ///
    /// assert!(Pattern::fixed(4, 1).row_is_live(0) && Pattern::chunked_window(4, 1, 0).and_causal().row_is_live(0));
    /// assert!(!Pattern::strided(4).row_is_live(0) && !Pattern::chunked(4).row_is_live(0));
    /// ```
    pub fn row_is_live(&self, head: usize) -> bool {
        self.is_causal_in(head) && self.earlier_is_live(head)
    }

    /// Returns [`Self::is_causal`] for one head.
    fn is_causal_in(&self, head: usize) -> bool {
        match self {
            Self::PerHead(parts) => {
                of_head(parts, head).is_some_and(|part| part.is_causal_in(head))
            }
            Self::Union(parts) => parts.iter().all(|part| part.is_causal_in(head)),
            Self::Intersection(parts) => parts.iter().any(|part| part.is_causal_in(head)),
            other => other.is_causal(),
        }
    }

    /// Returns whether every query attends, among the keys up to its own position, to exactly the live ones.
    fn earlier_is_live(&self, head: usize) -> bool {
        match self {
            Self::Dense
            | Self::Causal
            | Self::Local { .. }
            | Self::Fixed { .. }
            | Self::PrefixLm { .. }
            | Self::Streaming { .. }
            | Self::Chunked { .. }
            | Self::GlobalKeys { .. }
            | Self::Columns { .. }
            | Self::Documents { .. } => true,
            Self::Strided { stride } => *stride == 1,
            Self::Window { reach, dilation } => *dilation == 1 || *reach == 0,
            Self::Global { ranges } => ranges.is_empty(),
            // Diagonals 0, 1, 2, … without a gap.
            Self::VerticalSlash { slash, .. } => slash.iter().enumerate().all(|(at, &s)| at == s),
            Self::Packed { pattern, .. } => pattern.earlier_is_live(head),
            Self::Union(parts) | Self::Intersection(parts) => {
                parts.iter().all(|part| part.earlier_is_live(head))
            }
            Self::PerHead(parts) => {
                of_head(parts, head).is_some_and(|part| part.earlier_is_live(head))
            }
            Self::Rows { .. } | Self::RandomBlocks { .. } | Self::FromFn(_) => false,
        }
    }

    /// Returns whether no key has a last query, in any head.
    #[doc(hidden)]
    pub fn keeps_all(&self) -> bool {
        match self {
            Self::Dense
            | Self::Causal
            | Self::Strided { .. }
            | Self::PrefixLm { .. }
            | Self::Rows { .. }
            | Self::FromFn(_) => true,
            Self::Union(parts) => parts.iter().any(Self::keeps_all),
            Self::Intersection(parts) | Self::PerHead(parts) => parts.iter().all(Self::keeps_all),
            _ => false,
        }
    }

    /// Returns whether keys that have a last query die in the order of their positions. May return false where it is so.
    #[doc(hidden)]
    pub fn dies_in_order(&self) -> bool {
        match self {
            Self::Fixed { .. }
            | Self::Streaming { .. }
            | Self::GlobalKeys { .. }
            | Self::Columns { .. }
            | Self::Global { .. }
            | Self::VerticalSlash { .. } => true,
            Self::Union(parts) | Self::PerHead(parts) => parts.iter().all(Self::dies_in_order),
            // A part that keeps all keys does not change the others.
            Self::Intersection(parts) => {
                let mut dying = parts.iter().filter(|part| !part.keeps_all());
                self.lives_ascend()
                    || match (dying.next(), dying.next()) {
                        (Some(part), None) => part.dies_in_order(),
                        (part, _) => part.is_none(),
                    }
            }
            other => other.lives_ascend(),
        }
    }

    /// Returns whether the last queries of keys ascend with their positions, where keys that are always seen come last.
    fn lives_ascend(&self) -> bool {
        match self {
            Self::Local { .. }
            | Self::Window { .. }
            | Self::Chunked { .. }
            | Self::Documents { .. } => true,
            Self::Packed { pattern, .. } => pattern.lives_ascend(),
            Self::Union(parts) | Self::Intersection(parts) | Self::PerHead(parts) => {
                parts.iter().all(Self::lives_ascend)
            }
            other => other.keeps_all(),
        }
    }

    /// Returns the keys before `end` that the query at position `i` attends to, without duplicates. Computed from the zones of the row, in O(zones) plus the
    /// period where keys repeat. A callback is called for every key. The pattern must be valid.
    #[doc(hidden)]
    pub fn row_keys(&self, head: usize, i: usize, end: usize) -> Vec<Repeat> {
        let i = i as i64;
        let row = BlockRow {
            first: i,
            last: i,
            block_size: 1,
            kv_blocks: end as i64,
        };
        let mut found = Found(Vec::new());
        if end == 0 {
            return found.0;
        }
        let mut start = 0;
        for zone in self.zones(head, &row) {
            let keys = start..zone.end;
            start = zone.end;
            match zone.cells {
                Cells::Same(Cell::Empty) => {}
                Cells::Same(Cell::Full) => found.push(keys),
                Cells::Same(Cell::Mixed) | Cells::Each => {
                    for j in keys.filter(|&j| self.attends(head, i, j)) {
                        found.push(j..j + 1);
                    }
                }
                Cells::Cycle(cells) => {
                    // One key per residue represents all others.
                    let period = (cells.len() as i64).min(keys.end - keys.start);
                    let mut first = Found(Vec::new());
                    for j in keys.start..keys.start + period {
                        let is_seen = match cells[j as usize % cells.len()] {
                            Cell::Empty => false,
                            Cell::Full => true,
                            Cell::Mixed => self.attends(head, i, j),
                        };
                        if is_seen {
                            first.push(j..j + 1);
                        }
                    }
                    let (end, period) = (keys.end as usize, period as usize);
                    for seen in first.0 {
                        match seen.keys.len() == period {
                            true => found.push(keys.clone()),
                            false => {
                                let times = (end - seen.keys.start).div_ceil(period);
                                let endless = Repeat {
                                    keys: seen.keys,
                                    period,
                                    times,
                                };
                                found.0.extend(endless.within(0..end));
                            }
                        }
                    }
                }
            }
        }
        found.0
    }
}

/// A range of positions that repeats at equal distances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repeat {
    /// The first range.
    pub keys: Range<usize>,
    /// Distance between the starts of two ranges.
    pub period: usize,
    /// Number of ranges.
    pub times: usize,
}

impl Repeat {
    /// Creates a single range.
    pub fn once(keys: Range<usize>) -> Self {
        Self {
            period: keys.len(),
            keys,
            times: 1,
        }
    }

    /// Returns all ranges.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        (0..self.times).map(|k| self.at(k))
    }

    fn at(&self, k: usize) -> Range<usize> {
        let shift = k * self.period;
        self.keys.start + shift..self.keys.end + shift
    }

    /// Returns the part within `bounds`: whole ranges, and the cut first and last one.
    pub fn within(&self, bounds: Range<usize>) -> Vec<Self> {
        let cut = |range: Range<usize>| range.start.max(bounds.start)..range.end.min(bounds.end);
        // Ranges that begin within the bounds, and the first range that ends within them.
        let first = (bounds.start + 1)
            .saturating_sub(self.keys.end)
            .div_ceil(self.period);
        let after = bounds
            .end
            .saturating_sub(self.keys.start)
            .div_ceil(self.period)
            .min(self.times);
        let mut parts = Vec::new();
        if first >= after || bounds.is_empty() {
            return parts;
        }
        let mut whole = first..after;
        let (low, high) = (self.at(first), self.at(after - 1));
        if cut(low.clone()) != low {
            parts.push(Self::once(cut(low)));
            whole.start += 1;
        }
        let is_last_cut = whole.start < after && cut(high.clone()) != high;
        whole.end -= usize::from(is_last_cut);
        if whole.start < whole.end {
            parts.push(Self {
                keys: self.at(whole.start),
                period: self.period,
                times: whole.len(),
            });
        }
        if is_last_cut {
            parts.push(Self::once(cut(high)));
        }
        parts
    }
}

/// Ascending ranges, with adjacent ones merged.
struct Found(Vec<Repeat>);

impl Found {
    fn push(&mut self, range: Range<i64>) {
        let range = range.start.max(0) as usize..range.end.max(0) as usize;
        if range.is_empty() {
            return;
        }
        match self.0.last_mut() {
            Some(last) if last.times == 1 && last.keys.end == range.start => {
                *last = Repeat::once(last.keys.start..range.end);
            }
            _ => self.0.push(Repeat::once(range)),
        }
    }
}
