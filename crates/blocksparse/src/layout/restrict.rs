//! Removes padded queries and keys from a layout, per batch entry.

use std::collections::HashMap;

use super::builder::LayoutBuilder;
use super::mask::{BlockMask, MaskInterner};
use super::restriction::PaddingMask;
use super::rows::{RowRuns, Run};
use super::{BlockLayout, HeadPattern, residue};
use crate::LayoutError;

impl BlockLayout {
    /// Returns this layout for a batch of `entries.len()`, in which each entry keeps only the pairs of its unpadded queries and keys.
    /// A padded query, or one whose keys are all padded, attends to nothing.
    ///
    /// Time is O(runs + positions) for each distinct entry. Equal entries share their rows.
    ///
    /// # Errors
    /// [`LayoutError`] if `entries` is empty, an entry's lists are not `seq_q` and `seq_kv` long, or the layout is per batch with a different batch size.
    pub fn mask_padding(&self, entries: &[PaddingMask]) -> Result<Self, LayoutError> {
        self.check_restrictions(entries)?;
        let inner = self.inner();
        let mut builder = LayoutBuilder::new(MaskInterner::new(self.block_size()));
        let mut known: HashMap<(usize, &PaddingMask), u32> = HashMap::new();
        for (batch, entry) in entries.iter().enumerate() {
            let cut = Cut::new(self, entry);
            for head in 0..self.heads() {
                let pattern = self.pattern_of(batch, head);
                let index = *known.entry((pattern, entry)).or_insert_with(|| {
                    let (rows, masks) = (&inner.patterns[pattern], &inner.masks);
                    let rows = cut.rows(rows, masks, &mut builder.masks);
                    builder.pattern(rows)
                });
                builder.head_patterns.push(index);
            }
        }
        let name = format!("{}, restricted", inner.name);
        let restricted = builder.finish(name, inner.shape, Some(entries.len()));
        let parts = self
            .parts()
            .map(|parts| residue::restricted(parts, entries));
        Ok(restricted.with_parts(parts.transpose()?))
    }

    /// Applies [`Self::mask_padding`] to keys with padding at the end: entry `b` keeps the first `lengths[b]` keys.
    ///
    /// # Errors
    /// As [`Self::mask_padding`]; also if a length is above `seq_kv`.
    pub fn with_key_padding(&self, lengths: &[usize]) -> Result<Self, LayoutError> {
        let seq = self.seq_kv();
        let most = lengths.iter().max().copied().unwrap_or(0);
        crate::ensure! { LayoutError; most <= seq => "lengths", format!("at most {seq}, seq_kv"), most; }
        let entries: Vec<PaddingMask> = (lengths.iter())
            .map(|&length| PaddingMask::default().keys((0..seq).map(|j| j < length)))
            .collect();
        self.mask_padding(&entries)
    }

    fn check_restrictions(&self, entries: &[PaddingMask]) -> Result<(), LayoutError> {
        let expected = match self.batch() {
            Some(batch) => format!("{batch}, one for each batch entry of the layout"),
            None => "at least one".into(),
        };
        crate::ensure! {
            LayoutError;
            !entries.is_empty() && self.batch().is_none_or(|batch| batch == entries.len()) => "entries", expected, entries.len();
        }
        for entry in entries {
            for (argument, list, name, seq) in [
                ("queries", &entry.queries, "seq_q", self.seq_q()),
                ("keys", &entry.keys, "seq_kv", self.seq_kv()),
            ] {
                let length = list.as_ref().map_or(seq, Vec::len);
                crate::ensure! { LayoutError; length == seq => argument, format!("{seq} long, {name}"), length; }
            }
        }
        Ok(())
    }
}

/// Unpadded share of a block of queries or keys.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Share {
    Nothing,
    All,
    Some,
}

/// Blocks from the end of the previous stretch up to `end`, with the same share. A partially padded block is its own stretch.
struct Stretch {
    end: usize,
    share: Share,
}

/// A padding mask cut into blocks.
struct Cut<'a> {
    entry: &'a PaddingMask,
    block_size: usize,
    queries: Vec<Share>,
    keys: Vec<Stretch>,
}

impl<'a> Cut<'a> {
    fn new(layout: &BlockLayout, entry: &'a PaddingMask) -> Self {
        let b = layout.block_size();
        let shares = |list: &Option<Vec<bool>>, blocks: usize| match list {
            Some(list) => list.chunks(b).map(share).collect(),
            None => vec![Share::All; blocks],
        };
        let mut keys: Vec<Stretch> = Vec::new();
        for (block, share) in shares(&entry.keys, layout.kv_blocks())
            .into_iter()
            .enumerate()
        {
            match keys.last_mut() {
                Some(last) if last.share == share && share != Share::Some => last.end = block + 1,
                _ => keys.push(Stretch {
                    end: block + 1,
                    share,
                }),
            }
        }
        Self {
            entry,
            block_size: b,
            queries: shares(&entry.queries, layout.q_blocks()),
            keys,
        }
    }

    /// Returns the remaining rows of a pattern.
    fn rows(
        &self,
        pattern: &HeadPattern,
        table: &[BlockMask],
        masks: &mut MaskInterner,
    ) -> RowRuns {
        let mut rows = RowRuns::new();
        // The key is the mask, and the query block and key block if they are partially padded.
        let mut known: HashMap<(u32, Option<usize>, Option<usize>), Option<u32>> = HashMap::new();
        for (q_block, &queries) in self.queries.iter().enumerate() {
            if queries != Share::Nothing {
                let q_part = (queries == Share::Some).then_some(q_block);
                for run in pattern.runs(q_block) {
                    for (piece, kv_part) in self.pieces(run) {
                        let key = (run.mask, q_part, kv_part);
                        let mask = *known.entry(key).or_insert_with(|| {
                            masks.intern(self.mask(&table[run.mask as usize], q_part, kv_part))
                        });
                        if let Some(mask) = mask {
                            rows.push(Run { mask, ..piece });
                        }
                    }
                }
            }
            rows.end_row();
        }
        rows
    }

    /// Returns the remaining pieces of a run, each with its block if that is partially padded.
    fn pieces(&self, run: &Run) -> impl Iterator<Item = (Run, Option<usize>)> {
        let (start, stride, count) = (run.start as usize, run.stride as usize, run.count as usize);
        let run = *run;
        // Number of the run's blocks before block `end`.
        let before = move |end: usize| end.saturating_sub(start).div_ceil(stride).min(count);
        let first = self.keys.partition_point(|stretch| stretch.end <= start);
        let mut from = 0;
        (self.keys[first..].iter())
            .map(move |stretch| {
                let piece = (from, before(stretch.end), stretch.share);
                from = piece.1;
                piece
            })
            .take_while(move |&(from, ..)| from < count)
            .filter(|&(from, to, share)| to > from && share != Share::Nothing)
            .map(move |(from, to, share)| {
                let first = start + from * stride;
                let piece = Run {
                    start: first as u32,
                    count: (to - from) as u32,
                    ..run
                };
                (piece, (share == Share::Some).then_some(first))
            })
    }

    fn mask(&self, whole: &BlockMask, q_part: Option<usize>, kv_part: Option<usize>) -> BlockMask {
        if q_part.is_none() && kv_part.is_none() {
            return whole.clone();
        }
        let b = self.block_size;
        let takes_part = |list: &Option<Vec<bool>>, block: Option<usize>, place: usize| {
            let Some((list, block)) = list.as_ref().zip(block) else {
                return true;
            };
            list.get(block * b + place).is_some_and(|&kept| kept)
        };
        BlockMask::from_fn(b, |row, column| {
            whole.get(row, column)
                && takes_part(&self.entry.queries, q_part, row)
                && takes_part(&self.entry.keys, kv_part, column)
        })
    }
}

fn share(block: &[bool]) -> Share {
    match block.iter().filter(|&&kept| kept).count() {
        0 => Share::Nothing,
        kept if kept == block.len() => Share::All,
        _ => Share::Some,
    }
}
