//! Strided patterns listed by residue class. `strided(s)` lets position `i` see `i, i − s, i − 2s, …`. In blocks of consecutive positions this is a diagonal in
//! every `s / b`-th block, almost all of it masked. But the positions with `i mod s = c` see only each other, causally. Listed class by class, the pattern is
//! dense causal attention inside each class:
//!
//! ```text
//! position  i = t · s + c        listed at  v = c · class_len + t
//!
//! s = 3, n = 9        0 \                          0 \
//!                     1   \                        3 # \
//!                     2     \                      6 # # \
//!                     3 #     \         ──►        1       \
//!                     4   #     \                  4       # \
//!                     …                            …
//! ```
//!
//! A kernel maps rows `v` to positions `i`, so no tensor is copied. A union with a local window is two parts without common pairs: the window
//! excludes the nearest δ = ⌈window / s⌉ positions of each class. The parts are computed one after the other, and the second
//! continues from the softmax state of the first.

use std::collections::HashMap;

use super::mask::{BlockMask, FULL, MaskInterner};
use super::restriction::PaddingMask;
use super::rows::{RowRuns, Run};
use super::shape::LayoutShape;
use super::{BlockLayout, Part, Residue, grid};
use crate::{LayoutError, Pattern};

/// A head's pattern as a natural part and a strided part, which is `(stride, delta)` and excludes the `delta` nearest positions of each class.
struct Split {
    natural: Option<Pattern>,
    strided: Option<(usize, usize)>,
}

fn split(pattern: &Pattern) -> Split {
    let mut union = Windows::default();
    match (union.add(pattern), union) {
        (
            true,
            Windows {
                local,
                stride: Some(stride),
            },
        ) => Split {
            natural: (local > 0).then(|| Pattern::local(local)),
            strided: Some((stride, local.div_ceil(stride))),
        },
        _ => Split {
            natural: Some(pattern.clone()),
            strided: None,
        },
    }
}

/// A union of windows and strides.
#[derive(Default)]
struct Windows {
    /// The widest window, or 0 if there is none.
    local: usize,
    stride: Option<usize>,
}

impl Windows {
    /// Adds a pattern and returns whether it consists of windows and strides of one length.
    fn add(&mut self, pattern: &Pattern) -> bool {
        match pattern {
            Pattern::Local { window } => {
                self.local = self.local.max(*window);
                true
            }
            Pattern::Strided { stride } => *self.stride.get_or_insert(*stride) == *stride,
            Pattern::Union(parts) => parts.iter().all(|part| self.add(part)),
            // An intersection with `Causal` does not change a causal pattern.
            Pattern::Intersection(parts) => {
                let mut rest = parts.iter().filter(|part| **part != Pattern::Causal);
                match (rest.next(), rest.next()) {
                    (Some(part), None) => part.is_causal() && self.add(part),
                    _ => false,
                }
            }
            _ => false,
        }
    }
}

/// Returns the parts of a pattern with strided heads, or `None` if it cannot be split.
pub(crate) fn parts(
    pattern: &Pattern,
    shape: LayoutShape,
) -> Result<Option<Vec<Part>>, LayoutError> {
    let heads: Vec<&Pattern> = match pattern {
        Pattern::PerHead(parts) => parts.iter().cycle().take(shape.heads).collect(),
        other => vec![other],
    };
    let splits: Vec<Split> = heads.into_iter().map(split).collect();
    let mut strides = splits
        .iter()
        .filter_map(|s| s.strided.map(|(stride, _)| stride));
    let Some(stride) = strides.next() else {
        return Ok(None);
    };
    if strides.any(|other| other != stride) || shape.seq_q != shape.seq_kv || stride < 2 {
        return Ok(None);
    }
    // Every position is alone in its class, so listing by class gains nothing, and there may be far more classes than positions.
    if stride >= shape.seq_kv {
        return Ok(None);
    }
    let longest = shape.seq_kv.div_ceil(stride);
    let block_size = longest.next_power_of_two().clamp(8, 32);
    let residue = Residue {
        stride,
        class_len: longest.next_multiple_of(block_size),
    };
    let places = stride * residue.class_len;
    let listed = LayoutShape::square(shape.heads, places, block_size);
    // Padded to whole blocks, the classes may have more slots than a layout allows, whose indices fit in 32 bits.
    if listed.validate().is_err() {
        return Ok(None);
    }
    let mut parts = Vec::new();
    if splits.iter().any(|split| split.natural.is_some()) {
        let natural: Vec<Option<Pattern>> = splits.iter().map(|s| s.natural.clone()).collect();
        let layout = match &natural[..] {
            [Some(one)] => grid::natural_layout(one, shape)?,
            heads => grid::layout_by_head(heads, shape)?,
        };
        parts.push(Part {
            layout,
            residue: None,
        });
    }
    let mut masks = MaskInterner::new(block_size);
    let rows = splits
        .iter()
        .map(|split| match split.strided {
            Some((_, delta)) => class_rows(&residue, shape.seq_kv, delta, &listed, &mut masks),
            None => RowRuns::empty(listed.seq_q / block_size),
        })
        .collect();
    let name = format!("strided({stride}) by residue class");
    parts.push(Part {
        layout: BlockLayout::from_heads(name, listed, rows, masks),
        residue: Some(residue),
    });
    Ok(Some(parts))
}

/// Stacks the parts of layouts of one shape for a batch. An entry that lacks a part has no pairs in it.
pub(crate) fn stacked(layouts: &[BlockLayout]) -> Result<Option<Vec<Part>>, LayoutError> {
    // Parts in natural order come first, since they do not continue a softmax.
    let mut listings: Vec<(Option<Residue>, LayoutShape)> = Vec::new();
    let mut listed = false;
    for layout in layouts {
        let own = (None, *layout.shape());
        let parts = layout.parts().map(|parts| parts.iter());
        let of_parts = parts.map(|parts| parts.map(|part| (part.residue, *part.layout.shape())));
        listed |= layout.parts().is_some();
        let found: Vec<_> = of_parts.map_or(vec![own], Iterator::collect);
        for listing in found {
            if !listings.contains(&listing) {
                listings.push(listing);
            }
        }
    }
    if !listed {
        return Ok(None);
    }
    listings.sort_by_key(|(residue, _)| residue.map(|residue| residue.stride));
    let parts = listings.into_iter().map(|(residue, shape)| {
        let of_entry = |layout: &BlockLayout| match layout.parts() {
            None => residue.is_none().then(|| layout.clone()),
            Some(parts) => (parts.iter())
                .find(|part| part.residue == residue)
                .map(|part| part.layout.clone()),
        };
        let found: Vec<Option<BlockLayout>> = layouts.iter().map(of_entry).collect();
        let name = found.iter().flatten().next().map(BlockLayout::name);
        let nothing = BlockLayout::from_heads(
            name.unwrap_or_default().into(),
            shape,
            vec![RowRuns::empty(shape.seq_q.div_ceil(shape.block_size))],
            MaskInterner::new(shape.block_size),
        );
        let found: Vec<BlockLayout> = (found.into_iter())
            .map(|layout| layout.unwrap_or_else(|| nothing.clone()))
            .collect();
        let layout = BlockLayout::stack_batch(&found)?;
        Ok(Part { layout, residue })
    });
    parts.collect::<Result<_, _>>().map(Some)
}

/// Applies padding masks to the parts of a layout.
pub(crate) fn restricted(
    parts: &[Part],
    entries: &[PaddingMask],
) -> Result<Vec<Part>, LayoutError> {
    let restrict = |part: &Part| {
        let layout = match part.residue {
            None => part.layout.mask_padding(entries)?,
            Some(residue) => {
                // Slots beyond the sequence have no pairs anyway.
                let listed = |kept: &Option<Vec<bool>>| {
                    let at = |place| kept.as_ref()?.get(residue.position(place)).copied();
                    kept.as_ref().map(|_| {
                        (0..part.layout.seq_q())
                            .map(|place| at(place).unwrap_or(true))
                            .collect()
                    })
                };
                let entries: Vec<PaddingMask> = (entries.iter())
                    .map(|entry| PaddingMask {
                        queries: listed(&entry.queries),
                        keys: listed(&entry.keys),
                    })
                    .collect();
                part.layout.mask_padding(&entries)?
            }
        };
        Ok(Part {
            layout,
            residue: part.residue,
        })
    };
    parts.iter().map(restrict).collect()
}

/// Builds the rows of causal attention inside each class, without the nearest `delta` positions.
fn class_rows(
    residue: &Residue,
    seq: usize,
    delta: usize,
    listed: &LayoutShape,
    masks: &mut MaskInterner,
) -> RowRuns {
    let b = listed.block_size;
    let per_class = residue.class_len / b;
    let mut rows = RowRuns::new();
    // Blocks at the same distance have the same mask, except at the end of a class.
    let mut alike: HashMap<usize, Option<u32>> = HashMap::new();
    for class in 0..residue.stride {
        // Number of existing positions of the class.
        let len = seq.saturating_sub(class).div_ceil(residue.stride);
        for q_block in 0..per_class {
            let first = q_block * b;
            let height = len.saturating_sub(first).min(b);
            // Number of key blocks whose positions are all at least `delta` before the first query.
            let whole = (first + 1).saturating_sub(delta) / b;
            let mut push = |kv_block: usize, count: usize, mask: Option<u32>| {
                if let Some(mask) = mask {
                    rows.push(Run {
                        start: (class * per_class + kv_block) as u32,
                        stride: 1,
                        count: count as u32,
                        mask,
                    });
                }
            };
            if height == b && whole > 0 {
                push(0, whole, Some(FULL));
            } else if height > 0 && whole > 0 {
                push(0, whole, masks.intern(BlockMask::corner(b, height, b)));
            }
            for kv_block in whole..=q_block {
                let mut make = || {
                    masks.intern(BlockMask::from_fn(b, |r, c| {
                        let (query, key) = (first + r, kv_block * b + c);
                        r < height && key < len && key + delta <= query
                    }))
                };
                let mask = match height == b {
                    true => *alike.entry(q_block - kv_block).or_insert_with(make),
                    false => make(),
                };
                push(kv_block, 1, mask);
            }
            rows.end_row();
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_without_a_stride_have_no_parts() {
        for pattern in [
            Pattern::causal(),
            Pattern::fixed(16, 4),
            Pattern::local(9),
            Pattern::union([Pattern::local(9), Pattern::local(12).and_causal()]),
            // The strided pairs overlap with the global ones.
            Pattern::union([Pattern::strided(16), Pattern::global_keys([3])]),
            Pattern::intersection([Pattern::strided(16), Pattern::documents([0, 50])]),
        ] {
            let layout = pattern.layout(2, 128, 16).unwrap();
            assert!(layout.parts().is_none(), "{pattern}");
        }
        // One listing cannot serve two strides.
        let two = Pattern::per_head([Pattern::strided(16), Pattern::strided(24)]);
        assert!(two.layout(2, 128, 8).unwrap().parts().is_none());
    }

    #[test]
    fn a_million_positions_in_strides() {
        let layout = Pattern::merged_strided(128).layout(8, 1 << 20, 32).unwrap();
        let parts = layout.parts().unwrap();
        // A class has 8,192 positions: 256 rows of blocks, of one run and a diagonal each.
        assert!(parts[1].layout.host_bytes() < 8 << 20);
    }
}
