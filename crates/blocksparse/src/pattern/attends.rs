//! Definition of every pattern: the pairs it allows.

use super::Pattern;
use crate::arith::split_mix;

/// Maximum number of random blocks per row, since each is compared with those drawn before it.
pub(super) const MAX_DRAWN: usize = 1 << 12;

impl Pattern {
    /// Returns whether, in `head`, the query at position `i` attends to the key at position `j`.
    ///
    /// With `seq_q ≠ seq_kv` query row `r` of a layout has position `r + seq_kv − seq_q` (aligned bottom-right, as in Burn's own attention). The result is
    /// meaningless for parameters that [`Pattern::validate`] rejects.
    pub fn attends(&self, head: usize, i: i64, j: i64) -> bool {
        let distance = i.saturating_sub(j);
        match self {
            Self::Dense => true,
            Self::Causal => j <= i,
            Self::Local { window } => j <= i && distance < *window as i64,
            Self::Strided { stride } => j <= i && divides(*stride as i64, distance),
            Self::Fixed { stride, .. } => {
                let window = |p: i64| p.checked_div_euclid(*stride as i64);
                j <= i && (window(i) == window(j) || self.has_in_group(head, j))
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
            Self::Columns { .. } => self.has_in_group(head, j),
            Self::Rows { .. } => self.has_in_group(head, i),
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
                of_head(parts, head).is_some_and(|part| part.attends(head, i, j))
            }
            Self::FromFn(f) => (f.predicate)(head, i, j),
        }
    }

    /// Returns whether no query can see a later key, as a model that predicts the next position requires. False for a callback, about which nothing
    /// is known.
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
            _ => false,
        }
    }

    /// Returns as bits which of the keys `j0..j0 + b` query `i` sees, for patterns made of lists: they need not be asked for each pair.
    pub(crate) fn row_bits(&self, head: usize, i: i64, j0: i64, b: usize) -> Option<u128> {
        let after = j0 + b as i64;
        // Returns the bits of keys `first..end`.
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

    /// Returns the blocks drawn for a row of a [`Pattern::RandomBlocks`]; none for any other pattern.
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
        // Candidates are the blocks 1..last without the row's own block and its neighbours.
        let (left_out, after) = ((row - 1).max(1), (row + 2).min(last));
        let candidates = last - 1 - (after - left_out);
        let block_of = |k: i64| {
            if 1 + k < left_out {
                1 + k
            } else {
                1 + k + (after - left_out)
            }
        };
        // Floyd's sampling: every subset of this size is equally likely.
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

/// Returns the pattern of a head, if the heads use `parts` in turn.
pub(super) fn of_head(parts: &[Pattern], head: usize) -> Option<&Pattern> {
    head.checked_rem(parts.len()).map(|part| &parts[part])
}

fn divides(divisor: i64, number: i64) -> bool {
    number.checked_rem(divisor) == Some(0)
}

pub(super) fn is_in(ranges: &[(usize, usize)], position: i64) -> bool {
    usize::try_from(position).is_ok_and(|p| {
        let after = ranges.partition_point(|&(first, _)| first <= p);
        after > 0 && p < ranges[after - 1].1
    })
}

/// Returns the number of documents that begin at or before a position.
pub(crate) fn document(starts: &[usize], position: i64) -> usize {
    starts.partition_point(|&start| start as i64 <= position)
}

/// Returns the first position of a document as [`document`] counts them. Document 0, before the first start, begins at position 0.
pub(crate) fn document_start(starts: &[usize], document: usize) -> i64 {
    match document {
        0 => 0,
        after => starts[after - 1] as i64,
    }
}

/// Hashes several numbers into one.
fn mix<const N: usize>(numbers: [u64; N]) -> u64 {
    let first = 0x9e37_79b9_7f4a_7c15;
    let mixed = |state: u64, number| split_mix(state ^ number);
    numbers.into_iter().fold(first, mixed)
}
