//! Computes the key blocks that rows attend to.

use std::collections::HashMap;
use std::ops::Range;

use crate::BlockLayout;

/// Returns, per key block, whether the rows of some pattern attend to it. Runs that continue each other are joined before they are expanded.
pub(super) fn reached(
    layout: &BlockLayout,
    patterns: &[usize],
    rows: &[Range<usize>],
) -> Vec<bool> {
    // First and last blocks, by stride and residue.
    let mut spans: HashMap<[u32; 2], Vec<[u32; 2]>> = HashMap::new();
    for &pattern in patterns {
        for row in rows.iter().cloned().flatten() {
            for run in layout.row_runs(pattern, row) {
                let stride = if run.count == 1 { 1 } else { run.stride };
                let known = spans.entry([stride, run.start % stride]).or_default();
                let span = [run.start, run.last()];
                match known.last_mut() {
                    Some([first, last]) if *first <= span[0] && span[0] <= *last + stride => {
                        *last = span[1].max(*last);
                    }
                    _ => known.push(span),
                }
            }
        }
    }
    let mut reached = vec![false; layout.kv_blocks()];
    for ([stride, _], mut spans) in spans {
        spans.sort_unstable();
        let mut next = 0;
        for [first, last] in spans {
            for block in (first.max(next)..=last).step_by(stride as usize) {
                reached[block as usize] = true;
            }
            next = next.max(last + stride);
        }
    }
    reached
}

/// Returns the ranges where `is` is true.
pub(super) fn ranges(is: &[bool]) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for at in (0..is.len()).filter(|&at| is[at]) {
        match ranges.last_mut() {
            Some(last) if last.end == at => last.end = at + 1,
            _ => ranges.push(at..at + 1),
        }
    }
    ranges
}

/// Returns the total length of ranges.
pub(super) fn count(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}
