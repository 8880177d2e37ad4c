//! Keys of the highest scores of each query.
//!
//! Rows have a cube each ([`radix_select`](blocksparse_cubecl::primitives::radix_select)); if there are only a few long ones, several
//! ([`top_k_parts`](crate::kernels::indexer::top_k_parts)).

use crate::kernels::indexer::pairs::{PairSizes, Sizes};
use crate::kernels::indexer::top_k_parts;
use crate::kernels::indexer::top_k_parts::{
    Launch, Parts, RowArgs, ScoreKeys, TopKKeys, fill_list, row_of,
};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::primitives::radix_select::{ListPlace, RadixTile, list_top_k, vector_of};

/// Row lengths are multiples of this where hidden keys are left out, which keeps loads aligned.
const ALIGNED: usize = 32;

impl TopKKeys {
    /// Splits the queries into slabs whose scores are in memory at a time, at most `numbers` unless a single query has more. Keys that no query of a slab sees
    /// have no scores, so the first slabs have many queries.
    pub fn slabs(&self, all: &PairSizes, numbers: usize) -> Vec<PairSizes> {
        let [seq_q, seq_kv] = all.seq;
        let keys = |end: usize| match self.seen {
            Some(_) => seq_kv,
            None => (seq_kv - seq_q + end).next_multiple_of(ALIGNED).min(seq_kv),
        };
        let columns = |end: usize| all.listed.unwrap_or_else(|| keys(end));
        let mut slabs = Vec::new();
        let mut start = 0;
        while start < seq_q {
            // Bisects for the largest number of rows that fits.
            let (mut rows, mut limit) = (1, seq_q - start);
            while rows < limit {
                let middle = (rows + limit).div_ceil(2);
                match all.batch * middle * columns(start + middle) <= numbers {
                    true => rows = middle,
                    false => limit = middle - 1,
                }
            }
            slabs.push(PairSizes {
                rows: [start, rows],
                keys: keys(start + rows),
                ..*all
            });
            start += rows;
        }
        slabs
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn top_k<N: Size>(
    scores: &[Vector<u32, N>],
    seen: ComptimeOption<Box<[i32]>>,
    lists: &mut [i32],
    s: Sizes,
    of: RowArgs,
    #[comptime] t: RadixTile,
) {
    let row = row_of(&seen, &s, &of, N::value());
    let wanted = row.keys.min(of.most) as u32;
    let mut looked = row.keys;
    if comptime!(!t.sums.by_planes()) {
        looked = s.columns;
    }
    let place = ListPlace::new(row.into, looked);
    let mut places = ComptimeOption::new_None();
    list_top_k::<N, ScoreKeys>(
        scores,
        &row.scores,
        &row.span,
        wanted,
        lists,
        &mut places,
        &place,
        1usize,
        t,
    );
    fill_list(lists, &row, &of, t);
}

/// Returns the keys of the `most` highest scores among those that each computed query sees, ascending, then −1; ties in favor of the earlier, NaN lowest.
/// `scores` are f32 `[batch, rows, columns]`; `lists` are i32 `[batch, seq_q, most]`, of which the computed rows are written. `seen`, i32
/// `[batch or 1, seq_q]`, is the number of keys that each query sees; without it, those up to its position. Contiguous.
///
/// # Errors
/// Those of [`RadixTile::new`], or if there are more rows than a launch has cubes, or the device cannot index the elements.
pub fn top_k_keys(
    client: &Client,
    sizes: &PairSizes,
    of: &TopKKeys,
    [scores, lists]: [&Handle; 2],
    seen: Option<&Handle>,
) -> Result<(), KernelError> {
    let columns = sizes.columns();
    let t = RadixTile::new(client, columns)?;
    if sizes.elements() * of.most == 0 {
        return Ok(());
    }
    let rows = sizes.batch * sizes.rows[1];
    let launch = Launch {
        client,
        sizes,
        of,
        scores,
        lists,
        seen,
        vector: vector_of(client, columns, scores.offset_start),
    };
    if let Some(parts) = Parts::new(client, rows, columns) {
        return top_k_parts::launch(&launch, rows, parts);
    }
    // SAFETY: a cube reads elements of its row and its number of visible keys, and writes its own list of at most `most` keys. The buffers have the lengths
    // that `buffer` gets.
    unsafe {
        top_k::launch_unchecked(
            client,
            spread(client, rows as u64)?,
            CubeDim::new_1d(t.units as u32),
            launch.address(0)?,
            launch.vector,
            launch.scores(),
            launch.seen(),
            buffer(lists, launch.out()),
            sizes.launch(),
            launch.top_k(1, columns),
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

    /// Every query is in one slab, which has entries for all keys that it sees and stays within the bound.
    #[test]
    fn slabs_have_all_queries() {
        for seen in [None, Some(1)] {
            let of = TopKKeys {
                most: 4,
                near: 0,
                seen,
            };
            for (batch, seq) in [(1, [1, 1]), (3, [70, 70]), (2, [5, 901]), (1, [1000, 1003])] {
                for numbers in [1, 900, 5000, 1 << 24] {
                    let slabs = of.slabs(&sizes(batch, seq), numbers);
                    let mut next = 0;
                    for slab in &slabs {
                        let [start, rows] = slab.rows;
                        assert_eq!(start, next);
                        next += rows;
                        assert!(slab.columns() <= seq[1]);
                        let seen = seq[1] - seq[0] + next;
                        assert!(
                            slab.columns() >= seen && slab.columns() < seen + ALIGNED
                                || seen_all(&of, slab)
                        );
                        assert!(slab.elements() <= numbers || rows == 1, "{slab:?}");
                    }
                    assert_eq!(next, seq[0]);
                }
            }
        }
    }

    fn seen_all(of: &TopKKeys, slab: &PairSizes) -> bool {
        of.seen.is_some() && slab.columns() == slab.seq[1]
    }

    /// Leaving out hidden keys halves the number of slabs.
    #[test]
    fn slabs_leave_out_what_none_sees() {
        let mut of = TopKKeys {
            most: 2048,
            near: 0,
            seen: None,
        };
        let all = sizes(1, [65_536, 65_536]);
        let own = of.slabs(&all, 1 << 24).len();
        of.seen = Some(1);
        assert_eq!(of.slabs(&all, 1 << 24).len(), 256);
        assert!(own <= 132, "{own}");
    }
}
