//! The keys of the highest scores of each query.
//!
//! Nothing is sorted. Scores in their order are whole numbers in the same order ([`key`]), of which the last that is kept is found from its highest bits on,
//! eleven at a time:
//!
//! ```text
//! for each of three digits    count the digits of the numbers that have all digits found so far        in shared memory
//!                             the digit: the highest that, with those above it, enough numbers have
//!                             end if all numbers that have it are kept
//! kept: numbers that are above in the digits that were found, and the first of those that are equal in them
//! ```
//!
//! A cube has a query, whose numbers its units read next to each other: of most rows of long sequences twice for digits and once for the list. Counts are whole
//! numbers that units add to in any order, so they are the same every time.

// A kernel's numbers have no such methods.
#![allow(clippy::manual_is_multiple_of, clippy::needless_range_loop)]

use cubecl::ir::features::AtomicUsage;
use cubecl::ir::{ElemType, Type, UIntKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::indexer::digits::{
    AHEAD, BINS, DIGITS, FOUND, Picked, Run, find_digit, list_numbers, mask_of, number_key,
    shift_of,
};
use crate::kernels::indexer::pairs::{PairSizes, Sizes};
use crate::kernels::indexer::picks_parts;
use crate::kernels::indexer::picks_parts::Parts;
use blocksparse_cubecl::args::{address_of, buffer, optional, spread};
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::shared::bins::Bins;

/// Rows of numbers are as long as multiples of so many where keys are left out, so that they begin where loads do.
const ALIGNED: usize = 32;
/// Numbers of a vector, at most.
const MOST_VECTOR: usize = 4;

/// What is picked for queries whose numbers are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyPicks {
    /// Keys of a query's list.
    pub most: usize,
    /// Keys up to the last that a query sees that count as the highest.
    pub near: usize,
    /// Batch entries of how many keys queries see, 1 or all: none, if they see those up to their own positions.
    pub seen: Option<usize>,
}

impl KeyPicks {
    /// Queries whose numbers are in memory at a time, `numbers` of them at most unless one query has more. Of keys behind all positions of such queries there are
    /// no numbers, so that many of the first queries fit.
    pub fn slabs(&self, all: &PairSizes, numbers: usize) -> Vec<PairSizes> {
        let [seq_q, seq_kv] = all.seq;
        let keys = |end: usize| match self.seen {
            Some(_) => seq_kv,
            None => (seq_kv - seq_q + end).next_multiple_of(ALIGNED).min(seq_kv),
        };
        let mut slabs = Vec::new();
        let mut start = 0;
        while start < seq_q {
            // The most that fit.
            let (mut rows, mut limit) = (1, seq_q - start);
            while rows < limit {
                let middle = (rows + limit).div_ceil(2);
                match all.batch * middle * keys(start + middle) <= numbers {
                    true => rows = middle,
                    false => limit = middle - 1,
                }
            }
            slabs.push(PairSizes {
                rows: [start, rows],
                listed: None,
                keys: keys(start + rows),
                ..*all
            });
            start += rows;
        }
        slabs
    }
}

/// That a device picks keys.
///
/// # Errors
/// [`KernelError`] if its cubes are too small, or units of a cube cannot count together.
pub fn check_picks(client: &Client) -> Result<(), KernelError> {
    let counts = Type::atomic(ElemType::UInt(UIntKind::U32));
    let usage = client.properties().atomic_type_usage(counts);
    if !(usage.contains(AtomicUsage::Add) && usage.contains(AtomicUsage::LoadStore)) {
        let dtype = "whole numbers that units of a cube add to".into();
        return Err(KernelError::Dtype { dtype });
    }
    let t = Picked::new(client, usize::MAX >> 1)?;
    let bytes = size_of::<u32>() * (BINS + 4 + FOUND + t.sums.partial());
    let available = client.properties().hardware.max_shared_memory_size;
    match bytes > available {
        true => {
            let what = "bytes of shared memory";
            Err(KernelError::limit(what, available as u32, bytes))
        }
        false => Ok(()),
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn picks<N: Size>(
    scores: &[Vector<f32, N>],
    seen: ComptimeOption<Box<[i32]>>,
    lists: &mut [i32],
    s: Sizes,
    most: usize,
    near: usize,
    // Numbers of `seen` between batch entries, which may share them.
    seen_step: usize,
    #[comptime] t: Picked,
) {
    let bins = Bins::new(BINS, t.ptx);
    let mut partial = Shared::<[u32]>::new_slice(comptime!(t.sums.partial()));
    let mut found = Shared::<[u32]>::new_slice(comptime!(FOUND));
    let units = comptime!(t.units);
    let width = N::value();
    let unit = UNIT_POS as usize;
    // Cubes beyond the last row make it again.
    let at_row = CUBE_POS.min(s.batch * s.rows - 1);
    let entry = at_row / s.rows;
    let row = at_row % s.rows;
    let start = at_row * s.columns / width;
    let mut keys = s.position(row) + 1;
    #[comptime]
    match &seen {
        ComptimeOption::Some(seen) => {
            keys = max(seen[entry * seen_step + s.start + row], 0i32) as usize;
        }
        ComptimeOption::None => {}
    }
    let keys = keys.min(s.columns);
    let first_near = keys - near.min(keys);
    let vectors = keys.div_ceil(width);
    let last_vector = max(vectors, 1usize) - 1;
    let wanted = keys.min(most) as u32;

    // The digits that are known, and which bits they are.
    let mut digits = 0u32.runtime();
    let mut known = 0u32.runtime();
    // How many of the numbers that have these digits are kept, and whether all are.
    let mut left = wanted;
    let mut is_done = keys <= most;
    #[unroll]
    for level in 0..comptime!(DIGITS) {
        let shift = comptime!(shift_of(level));
        let mask = comptime!(mask_of(level));
        #[unroll]
        for i in 0..comptime!(BINS / t.units) {
            bins.clear(unit + comptime!(i * t.units), t.ptx);
        }
        sync_cube();
        let counted = select(is_done, 0usize, vectors);
        let mut at = unit;
        while at < counted {
            let mut loaded = Array::<Vector<f32, N>>::new(comptime!(AHEAD));
            #[unroll]
            for i in 0..comptime!(AHEAD) {
                loaded[i] = scores[start + (at + comptime!(i * units)).min(last_vector)];
            }
            #[unroll]
            for i in 0..comptime!(AHEAD) {
                #[unroll]
                for j in 0..width {
                    let own = (at + comptime!(i * units)) * width + j;
                    let number = number_key(loaded[i].extract(j), own, first_near);
                    if own < keys && (number & known) == digits {
                        let digit = (number >> shift) & mask;
                        bins.count(digit as usize, t.ptx);
                    }
                }
            }
            at += comptime!(AHEAD * units);
        }
        sync_cube();
        // From the highest digit down.
        let top = comptime!(BINS - 1) - unit * comptime!(t.own_bins());
        let mut counts = Array::<u32>::new(comptime!(t.own_bins()));
        #[unroll]
        for i in 0..comptime!(t.own_bins()) {
            counts[i] = bins.get(top - i, t.ptx);
        }
        let step = comptime!(level as usize).runtime();
        find_digit(&counts, left, is_done, &mut found, &mut partial, step, t);
        if !is_done {
            digits |= found[0] << shift;
            known |= comptime!(mask << shift);
            left -= found[1];
            is_done = found[2] == left;
        }
    }

    let mut listed = keys;
    if comptime!(!t.sums.by_planes()) {
        // As many for all cubes, where barriers ask for it.
        listed = s.columns;
    }
    let into = (entry * s.seq_q + s.start + row) * most;
    let run = Run {
        start,
        begin: 0usize,
        end: keys,
        listed,
        last_vector,
        first_near,
        digits,
        known,
        left,
        above: 0u32,
        equal: 0u32,
        into,
    };
    list_numbers::<N>(scores, lists, &mut partial, &run, t);
    let mut at = wanted as usize + unit;
    while at < most {
        lists[into + at] = -1i32;
        at += units;
    }
}

/// Of the queries that are computed the keys of the `most` highest numbers among those that each sees, ascending, −1 behind the last: of equal ones the earlier,
/// and NaN is the lowest. `scores` are f32 `[batch, rows, columns]`, `lists` i32 `[batch, seq_q, most]`, of which those of the rows are written; `seen`, if queries
/// see others than those up to their positions, is i32 `[batch or 1, seq_q]`: so many keys, from the first on. Contiguous.
///
/// # Errors
/// As [`check_picks`], or if there are more rows than a launch has cubes or more numbers than the device counts.
pub fn pick_keys(
    client: &Client,
    sizes: &PairSizes,
    of: &KeyPicks,
    [scores, lists]: [&Handle; 2],
    seen: Option<&Handle>,
) -> Result<(), KernelError> {
    check_picks(client)?;
    let (columns, most) = (sizes.columns(), of.most);
    let rows = sizes.batch * sizes.rows[1];
    let out = sizes.batch * sizes.seq[0] * most;
    let of_seen = of.seen.unwrap_or(0) * sizes.seq[0];
    if sizes.numbers() * most == 0 {
        return Ok(());
    }
    let t = Picked::new(client, columns)?;
    let widest = client
        .properties()
        .hardware
        .max_vector_size
        .clamp(1, MOST_VECTOR);
    let begins = scores.offset_start.unwrap_or(0) as usize / size_of::<f32>();
    let fits = |vector: &usize| {
        *vector <= widest && columns.is_multiple_of(*vector) && begins.is_multiple_of(*vector)
    };
    let vector = [4, 2, 1].into_iter().find(fits).unwrap_or(1);
    if let Some(parts) = Parts::new(client, rows, columns) {
        let numbers = [scores, lists];
        let of_rows = (of.most, of.near, of.seen);
        return picks_parts::launch(client, sizes, of_rows, numbers, seen, vector, parts);
    }
    let address = address_of(client, sizes.numbers().max(out).max(of_seen))?;
    let cubes = spread(client, rows as u64)?;
    let seen_step = match of.seen {
        Some(entries) if entries > 1 => sizes.seq[0],
        _ => 0,
    };
    // SAFETY: a cube reads numbers of its row, and how many it sees, and writes its own list: no more than `most` keys of it. The buffers have the lengths they
    // say (see `buffer`).
    unsafe {
        picks::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(t.units as u32),
            address,
            vector,
            buffer(scores, sizes.numbers() / vector),
            optional(seen, of_seen),
            buffer(lists, out),
            sizes.launch(),
            most,
            of.near,
            seen_step,
            t,
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(batch: usize, seq: [usize; 2]) -> PairSizes {
        PairSizes::new(
            [batch, 2, seq[0], 8],
            [batch, 1, seq[1], 8],
            [0, seq[0]],
            None,
        )
    }

    /// Every query is in one slab, which has numbers for all keys that it sees, and no more of them than there may be.
    #[test]
    fn slabs_have_all_queries() {
        for seen in [None, Some(1)] {
            let picks = KeyPicks {
                most: 4,
                near: 0,
                seen,
            };
            for (batch, seq) in [(1, [1, 1]), (3, [70, 70]), (2, [5, 901]), (1, [1000, 1003])] {
                for numbers in [1, 900, 5000, 1 << 24] {
                    let slabs = picks.slabs(&sizes(batch, seq), numbers);
                    let mut next = 0;
                    for slab in &slabs {
                        let [start, rows] = slab.rows;
                        assert_eq!(start, next);
                        next += rows;
                        assert!(slab.columns() <= seq[1]);
                        let seen = seq[1] - seq[0] + next;
                        assert!(
                            slab.columns() >= seen && slab.columns() < seen + ALIGNED
                                || seen_all(&picks, slab)
                        );
                        assert!(slab.numbers() <= numbers || rows == 1, "{slab:?}");
                    }
                    assert_eq!(next, seq[0]);
                }
            }
        }
    }

    fn seen_all(picks: &KeyPicks, slab: &PairSizes) -> bool {
        picks.seen.is_some() && slab.columns() == slab.seq[1]
    }

    /// Half as many slabs as where all have numbers for all keys.
    #[test]
    fn slabs_leave_out_what_none_sees() {
        let mut picks = KeyPicks {
            most: 2048,
            near: 0,
            seen: None,
        };
        let all = sizes(1, [65_536, 65_536]);
        let own = picks.slabs(&all, 1 << 24).len();
        picks.seen = Some(1);
        assert_eq!(picks.slabs(&all, 1 << 24).len(), 256);
        assert!(own <= 132, "{own}");
    }
}
