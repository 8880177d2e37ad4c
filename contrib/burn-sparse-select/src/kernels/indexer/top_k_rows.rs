//! Rows of scores whose highest are selected, and what launches over them are told.

use crate::kernels::indexer::pairs::{PairSizes, Sizes};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::primitives::radix_select::{RadixTile, RowKeys, RowKeysExpand, Span};
use blocksparse_cubecl::shared::order_key::{INFINITE, key};

/// What is selected for queries whose scores are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopKKeys {
    /// Keys of a query's list.
    pub most: usize,
    /// Keys up to the last that a query sees that count as the highest.
    pub near: usize,
    /// Batch entries of how many keys queries see, 1 or all: none, if they see those up to their own positions.
    pub seen: Option<usize>,
}

/// What of a query's keys is selected, in a kernel.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct RowArgs {
    /// Keys of a query's list.
    pub most: usize,
    /// Keys up to the last that a query sees that count as the highest.
    near: usize,
    /// Numbers of `seen` between batch entries, which may share them.
    seen_step: usize,
    /// Parts of a row, and numbers of each.
    pub parts: usize,
    len: usize,
}

/// A row of scores, and the part of it that a cube has.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Row {
    /// Among those that are computed.
    pub at: usize,
    pub part: usize,
    /// Keys that the query sees.
    pub keys: usize,
    /// The numbers of the cube's own part.
    pub span: Span,
    /// Where the row's list begins.
    pub into: usize,
    pub scores: ScoreKeys,
}

/// Scores as keys: those of near keys are the highest.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct ScoreKeys {
    /// The row's first vector.
    start: usize,
    /// From which number on all count as the highest.
    first_near: usize,
}

#[cube]
impl RowKeys for ScoreKeys {
    fn load<N: Size>(&self, numbers: &[Vector<u32, N>], vector: usize) -> Vector<u32, N> {
        numbers[self.start + vector]
    }

    fn key(&self, number: u32, at: usize) -> u32 {
        select(at >= self.first_near, INFINITE, key(number))
    }
}

#[cube]
pub(crate) fn row_of(
    seen: &ComptimeOption<Box<[i32]>>,
    s: &Sizes,
    of: &RowArgs,
    #[comptime] width: usize,
) -> Row {
    // Cubes beyond the last part make it again.
    let cube = CUBE_POS.min(s.batch * s.rows * of.parts - 1);
    let at = cube / of.parts;
    let part = cube % of.parts;
    let entry = at / s.rows;
    let row = at % s.rows;
    let mut keys = s.position(row) + 1;
    #[comptime]
    match seen {
        ComptimeOption::Some(seen) => {
            keys = max(seen[entry * of.seen_step + s.start + row], 0i32) as usize;
        }
        ComptimeOption::None => {}
    }
    let keys = keys.min(s.columns);
    Row {
        at,
        part,
        keys,
        span: Span {
            begin: part * of.len,
            end: (part * of.len + of.len).min(keys),
        },
        into: (entry * s.seq_q + s.start + row) * of.most,
        scores: ScoreKeys {
            start: at * s.columns / width,
            first_near: keys - of.near.min(keys),
        },
    }
}

/// −1 behind the last key of a row's list.
#[cube]
pub(crate) fn fill_list(lists: &mut [i32], row: &Row, of: &RowArgs, #[comptime] t: RadixTile) {
    let mut at = row.keys.min(of.most) + UNIT_POS as usize;
    while at < of.most {
        lists[row.into + at] = -1i32;
        at += comptime!(t.units);
    }
}

/// What of a call is told to a launch.
pub(crate) struct Launch<'a> {
    pub client: &'a Client,
    pub sizes: &'a PairSizes,
    pub of: &'a TopKKeys,
    pub scores: &'a Handle,
    pub lists: &'a Handle,
    pub seen: Option<&'a Handle>,
    /// Elements of a vector.
    pub vector: usize,
}

impl Launch<'_> {
    /// Numbers of all lists.
    pub fn out(&self) -> usize {
        self.sizes.batch * self.sizes.seq[0] * self.of.most
    }

    fn of_seen(&self) -> usize {
        self.of.seen.unwrap_or(0) * self.sizes.seq[0]
    }

    /// How a launch that has so many numbers beside those of the call indexes them.
    pub fn address(&self, others: usize) -> Result<AddressType, KernelError> {
        let own = self.sizes.elements().max(self.out()).max(self.of_seen());
        address_of(self.client, own.max(others))
    }

    pub fn scores(&self) -> BufferArg {
        buffer(self.scores, self.sizes.elements() / self.vector)
    }

    pub fn seen<T: LaunchArg<RuntimeArg = BufferArg>>(&self) -> ComptimeOptionArgs<T> {
        optional(self.seen, self.of_seen())
    }

    /// Of rows that are cut into so many parts of so many numbers.
    pub fn top_k(&self, parts: usize, len: usize) -> RowArgsLaunch {
        let seen_step = match self.of.seen {
            Some(entries) if entries > 1 => self.sizes.seq[0],
            _ => 0,
        };
        RowArgsLaunch::new(self.of.most, self.of.near, seen_step, parts, len)
    }
}
