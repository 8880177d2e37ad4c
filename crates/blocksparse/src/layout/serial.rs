//! The serialized form of a layout. Input is not trusted: every index is checked.

use serde::{Deserialize, Serialize};

use super::builder::LayoutBuilder;
use super::grid::Grid;
use super::mask::{BlockMask, FULL, MaskInterner};
use super::rows::{RowRuns, Run};
use super::shape::LayoutShape;
use super::{BlockLayout, HeadPattern, Part, Residue, same_pairs};
use crate::LayoutError;
use crate::error::ensure_sound;

const VERSION: u32 = 1;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LayoutData {
    version: u32,
    name: String,
    shape: LayoutShape,
    batch: Option<usize>,
    head_patterns: Vec<u32>,
    patterns: Vec<RowRuns>,
    /// Masks 1.. of the table, `block_size² / 64` words each. Mask 0 is the full block.
    masks: Vec<u64>,
    /// Parts with the same pairs, if there are any.
    #[serde(default)]
    parts: Vec<PartData>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct PartData {
    /// Stride and slots per class.
    residue: Option<[usize; 2]>,
    layout: LayoutData,
}

impl From<BlockLayout> for LayoutData {
    fn from(layout: BlockLayout) -> Self {
        let inner = layout.inner();
        Self {
            version: VERSION,
            name: inner.name.clone(),
            shape: inner.shape,
            batch: inner.batch,
            head_patterns: inner.head_patterns.clone(),
            patterns: inner.patterns.iter().map(|p| p.rows.clone()).collect(),
            masks: (inner.masks[1..].iter())
                .flat_map(|mask| mask.words().iter().copied())
                .collect(),
            parts: (layout.parts().unwrap_or_default().iter())
                .map(|part| PartData {
                    residue: (part.residue).map(|residue| [residue.stride, residue.class_len]),
                    layout: part.layout.clone().into(),
                })
                .collect(),
        }
    }
}

impl TryFrom<LayoutData> for BlockLayout {
    type Error = LayoutError;

    fn try_from(data: LayoutData) -> Result<Self, LayoutError> {
        let version = data.version;
        ensure_sound!(
            version == VERSION,
            "version must be {VERSION}, got {version}"
        );
        data.shape.validate()?;
        let masks = read_masks(&data)?;
        check_heads(&data)?;
        let grid = Grid::new(data.shape);
        for (index, pattern) in data.patterns.iter().enumerate() {
            check_rows(index, pattern, &masks, &grid)?;
        }
        let builder = LayoutBuilder {
            masks: MaskInterner::of(masks),
            patterns: data.patterns.into_iter().map(HeadPattern::new).collect(),
            head_patterns: data.head_patterns,
        };
        let layout = builder.finish(data.name, data.shape, data.batch);
        match data.parts.is_empty() {
            true => Ok(layout),
            false => {
                let parts = read_parts(data.parts)?;
                same_pairs::check(&layout, &parts)?;
                Ok(layout.with_parts(Some(parts)))
            }
        }
    }
}

fn read_parts(parts: Vec<PartData>) -> Result<Vec<Part>, LayoutError> {
    let read = |(index, part): (usize, PartData)| {
        let own = part.layout.parts.len();
        ensure_sound!(
            own == 0,
            "part {index} must have no parts of its own, got {own}"
        );
        let residue = part
            .residue
            .map(|[stride, class_len]| Residue { stride, class_len });
        let layout = BlockLayout::try_from(part.layout)?;
        Ok(Part { layout, residue })
    };
    parts.into_iter().enumerate().map(read).collect()
}

fn read_masks(data: &LayoutData) -> Result<Vec<BlockMask>, LayoutError> {
    let b = data.shape.block_size;
    let (words, all) = (b * b / 64, data.masks.len());
    ensure_sound!(
        all.is_multiple_of(words),
        "masks must be a multiple of {words} words long, got {all}"
    );
    let mut masks = vec![BlockMask::corner(b, b, b)];
    for (index, words) in data.masks.chunks(words).enumerate() {
        let mask = BlockMask::from_words(b, words);
        let is_partial = !mask.is_empty() && !mask.is_full();
        ensure_sound!(
            is_partial,
            "mask {} must be neither empty nor full",
            index + 1
        );
        masks.push(mask);
    }
    Ok(masks)
}

fn check_heads(data: &LayoutData) -> Result<(), LayoutError> {
    let heads = data.shape.heads;
    let (batch, got) = (data.batch, data.head_patterns.len());
    ensure_sound!(
        batch != Some(0) && batch.unwrap_or(1).checked_mul(heads) == Some(got),
        "head_patterns must have one entry per head and batch entry ({heads} heads, batch {batch:?}), got {got}"
    );
    let patterns = data.patterns.len();
    let most = data.head_patterns.iter().copied().max().unwrap_or(0);
    ensure_sound!(
        (most as usize) < patterns,
        "head_patterns must be below the {patterns} patterns, got {most}"
    );
    Ok(())
}

/// Checks that offsets ascend, that blocks are in range and occur at most once per row, and that masks are in range and have no pairs beyond the edges.
fn check_rows(
    index: usize,
    pattern: &RowRuns,
    masks: &[BlockMask],
    grid: &Grid,
) -> Result<(), LayoutError> {
    let (q_blocks, kv_blocks) = (grid.q_blocks(), grid.kv_blocks());
    let (offsets, runs) = (&pattern.run_offsets, &pattern.runs);
    let in_order = offsets.windows(2).all(|w| w[0] <= w[1]);
    let ends = offsets.first() == Some(&0) && offsets.last() == Some(&runs.len());
    ensure_sound!(
        offsets.len() == q_blocks + 1 && ends && in_order,
        "pattern {index}: run_offsets must rise from 0 to {} in {} entries",
        runs.len(),
        q_blocks + 1
    );
    for q_block in 0..q_blocks {
        let row = &runs[offsets[q_block]..offsets[q_block + 1]];
        for run in row {
            let last = u64::from(run.start)
                + u64::from(run.count.saturating_sub(1)) * u64::from(run.stride);
            ensure_sound!(
                run.count > 0 && run.stride > 0 && last < kv_blocks as u64,
                "pattern {index}: row {q_block}: {run:?} must stay below the {kv_blocks} key blocks, with positive stride and count"
            );
            let mask = masks.get(run.mask as usize);
            ensure_sound!(
                mask.is_some(),
                "pattern {index}: row {q_block}: mask must be below {}, got {}",
                masks.len(),
                run.mask
            );
            // Only the last block of a run can be on the edge of the keys. Either all or none of its blocks are on the edge of the queries.
            ensure_sound!(
                mask.is_some_and(|mask| inside(mask, run.mask, grid, q_block, last as usize)),
                "pattern {index}: row {q_block}: the mask of key block {last} allows pairs beyond seq_q or seq_kv"
            );
        }
        let twice = repeated(row);
        ensure_sound!(
            twice.is_none(),
            "pattern {index}: row {q_block}: key block {} occurs twice",
            twice.unwrap_or(0)
        );
    }
    Ok(())
}

/// Returns a block that two runs of a row share. Runs are not expanded, since a few bytes can claim billions of blocks.
fn repeated(row: &[Run]) -> Option<u64> {
    let mut row: Vec<&Run> = row.iter().collect();
    row.sort_unstable_by_key(|run| run.start);
    // The contiguous run that reaches furthest so far, and the strided runs so far.
    let mut furthest: Option<&Run> = None;
    let mut strided: Vec<&Run> = Vec::new();
    for run in row {
        strided.retain(|other| other.last() >= run.start);
        let block = (furthest.into_iter().chain(strided.iter().copied()))
            .find_map(|other| common_block(other, run));
        if block.is_some() {
            return block;
        }
        match run.stride == 1 || run.count == 1 {
            true if furthest.is_none_or(|other| run.last() > other.last()) => furthest = Some(run),
            true => {}
            false => strided.push(run),
        }
    }
    None
}

/// Returns the first block of both runs: the first solution of two congruences.
fn common_block(a: &Run, b: &Run) -> Option<u64> {
    let [(a0, a_stride), (b0, b_stride)] =
        [a, b].map(|run| (i128::from(run.start), i128::from(run.stride)));
    let (gcd, inverse) = bezout(a_stride, b_stride);
    if (b0 - a0) % gcd != 0 {
        return None;
    }
    // a0 + k · a_stride ≡ b0 modulo b_stride
    let period = b_stride / gcd;
    let k = ((b0 - a0) / gcd * inverse).rem_euclid(period);
    let (first, step) = (a0 + k * a_stride, a_stride * period);
    let from = a0.max(b0);
    let block = match first >= from {
        true => first,
        false => first + (from - first + step - 1) / step * step,
    };
    (block <= i128::from(a.last().min(b.last()))).then_some(block as u64)
}

/// Returns `(g, x)` with `g = gcd(a, b)` and `a · x ≡ g` modulo `b`.
fn bezout(a: i128, b: i128) -> (i128, i128) {
    let ((mut old_r, mut r), (mut old_x, mut x)) = ((a, b), (1, 0));
    while r != 0 {
        let quotient = old_r / r;
        (old_r, r) = (r, old_r - quotient * r);
        (old_x, x) = (x, old_x - quotient * x);
    }
    (old_r, old_x)
}

fn inside(mask: &BlockMask, id: u32, grid: &Grid, q_block: usize, kv_block: usize) -> bool {
    let b = grid.shape.block_size;
    let (rows, columns) = (grid.rows_in(q_block), grid.columns_in(kv_block));
    if rows == b && columns == b {
        return true;
    }
    id != FULL && (0..b).all(|r| (0..b).all(|c| !mask.get(r, c) || (r < rows && c < columns)))
}
