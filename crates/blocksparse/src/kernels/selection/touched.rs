//! Blocks of keys in which something is kept: keys, distances from a query back to a key, or the blocks themselves.
//!
//! ```text
//! flags       whether a block of keys has one that is kept, and which distances between blocks have one     16 units a flag
//! heaviest    the same of whole blocks of keys, and of whole distances between blocks                       a unit a flag
//! scores      1 and 0 of blocks of queries and of keys                                                      a unit a score
//! ```

use std::ops::Range;

use cubecl::ir::ElemType;
use cubecl::ir::features::Plane;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::UNITS;
use super::lines::{LineSizes, line_sums};
use super::means::{MeanProducts, SeenRows, mean_products, softmax_of_seen};
use super::threshold::{Kept, KeptLines, least_kept};
use crate::kernels::args::{buffer, spread};
use crate::kernels::error::KernelError;
use crate::kernels::rows::tile::{Combine, RowTile, across_lanes};
use crate::kernels::rows::{RowBlocks, block_means};

/// Which blocks are asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Touched {
    /// Batch entries times heads.
    pub lists: usize,
    /// Queries and keys.
    pub seq: [usize; 2],
    /// Queries and keys of a block.
    pub block: usize,
    /// The rows of blocks that are wanted.
    pub rows: Range<usize>,
    /// Which keys and which distances are kept.
    pub kept: Kept,
}

/// Units that look for one flag.
const LANES: usize = 16;

/// Numbers that are less apart, in parts of them, are as good as equal.
const APART: f32 = 1e-6;

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct FlagSizes {
    keys: usize,
    block: usize,
    /// Flags of a line.
    flags: usize,
    /// The distance of flag 1; the others are whole blocks apart.
    first: usize,
    forced: usize,
    forced_second: usize,
    count: usize,
}

impl Touched {
    fn blocks(&self) -> usize {
        self.seq[1].div_ceil(self.block)
    }

    /// Flags of a line: of blocks of keys, or of distances between blocks.
    fn flags(&self) -> usize {
        self.blocks() + 2
    }

    /// How many blocks the first query lies behind the first key, and how much more.
    fn offset(&self) -> [i64; 2] {
        let (offset, block) = (self.seq[1] as i64 - self.seq[0] as i64, self.block as i64);
        [offset.div_euclid(block), offset.rem_euclid(block)]
    }

    fn kept_lines(&self) -> KeptLines {
        let keys = self.seq[1];
        KeptLines {
            lines: 2 * self.lists,
            len: keys,
            step: keys,
            kept: self.kept,
        }
    }

    /// The flags of sums of keys and of distances `[lists, 2, keys]`, and the sums of blocks `[lists, 2, flags]`: of the keys of a block, and of the
    /// distances from the first query of a block of queries to a block of keys.
    fn flag(&self, client: &Client, sums: &Handle) -> Result<[Handle; 2], KernelError> {
        let (lists, flags, keys) = (self.lists, self.flags(), self.seq[1]);
        let made = |len: usize| client.empty(len * size_of::<u32>());
        let least = made(2 * lists);
        least_kept(client, sums, &self.kept_lines(), &least)?;
        let count = 2 * lists * flags;
        let (flagged, of_blocks) = (made(count), made(count));
        let [forced, forced_second] = self.kept.forced(keys);
        let [_, first] = self.offset();
        let sizes = FlagSizesLaunch::new(
            keys,
            self.block,
            flags,
            first as usize,
            forced,
            forced_second,
            count,
        );
        // SAFETY: units read numbers of lines below `keys`; the first of those of a flag below `count` writes it.
        unsafe {
            flags_of_lines::launch_unchecked(
                client,
                spread(client, (count * LANES).div_ceil(UNITS) as u64)?,
                CubeDim::new_1d(UNITS as u32),
                AddressType::U32,
                buffer(sums, 2 * lists * keys),
                buffer(&least, 2 * lists),
                buffer(&flagged, count),
                buffer(&of_blocks, count),
                sizes,
            );
        }
        Ok([flagged, of_blocks])
    }

    /// The flags of so many blocks of keys and distances between blocks that have the largest sums of blocks, the first block and the queries' own among them.
    fn heaviest(
        &self,
        client: &Client,
        of_blocks: &Handle,
        blocks: usize,
    ) -> Result<Handle, KernelError> {
        let (lists, flags) = (self.lists, self.flags());
        let lines = KeptLines {
            lines: 2 * lists,
            len: flags,
            step: flags,
            kept: Kept::Count {
                // A query's own block has distances of two flags.
                all: [blocks, blocks.saturating_add(1)],
                forced: OWN,
            },
        };
        let made = |len: usize| client.empty(len * size_of::<u32>());
        let (least, count) = (made(2 * lists), 2 * lists * flags);
        least_kept(client, of_blocks, &lines, &least)?;
        let heaviest = made(count);
        // SAFETY: a unit below `count` reads the sum of its flag, and writes it.
        unsafe {
            flags_of_blocks::launch_unchecked(
                client,
                spread(client, count.div_ceil(UNITS) as u64)?,
                CubeDim::new_1d(UNITS as u32),
                AddressType::U32,
                buffer(of_blocks, count),
                buffer(&least, 2 * lists),
                buffer(&heaviest, count),
                flags,
                count,
            );
        }
        Ok(heaviest)
    }

    fn scores(&self) -> ScoreSizesLaunch {
        let [blocks_behind, _] = self.offset();
        ScoreSizesLaunch::new(
            self.rows.len(),
            self.rows.start,
            self.blocks(),
            self.flags(),
            blocks_behind as i32 + 1,
            self.lists * self.rows.len() * self.blocks(),
        )
    }
}

/// Scores of 1 and 0, `[lists, rows, blocks]` in f32: 1 if a block has a key that is kept, or a pair at a distance that is kept, by `sums` `[lists, 2, keys]`
/// of keys and of distances ([`line_sums`]).
///
/// # Errors
/// [`KernelError`] if the device cannot run it.
pub fn touched_blocks(
    client: &Client,
    sums: &Handle,
    of: &Touched,
    out: &Handle,
) -> Result<(), KernelError> {
    super::check(client)?;
    let count = of.lists * of.rows.len() * of.blocks();
    super::counted("the scores of blocks", count)?;
    if count == 0 {
        return Ok(());
    }
    let [flags, _] = of.flag(client, sums)?;
    // SAFETY: a unit below `count` reads flags of its list, and writes its own score.
    unsafe {
        touched_scores::launch_unchecked(
            client,
            spread(client, count.div_ceil(UNITS) as u64)?,
            CubeDim::new_1d(UNITS as u32),
            AddressType::U32,
            buffer(&flags, 2 * of.lists * of.flags()),
            buffer(out, count),
            of.scores(),
        );
    }
    Ok(())
}

/// When heads choose in which of two ways, and what they keep at least.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlexLimits {
    /// How far an estimate may be from what it estimates, √JS.
    pub threshold: f64,
    /// So many blocks of keys and distances between blocks are kept by either way; 0: none but what is forced.
    pub blocks: usize,
}

/// What heads choose by that do it in one of two ways.
#[derive(Clone, Copy, Debug)]
pub struct FlexTensors<'a> {
    /// `[lists, seq_q, width]`.
    pub q: &'a Handle,
    /// The last block of them, `[lists, queries, width]`.
    pub last: &'a Handle,
    /// `[kv lists, seq_kv, width]`.
    pub k: &'a Handle,
}

/// Scores of 1 and 0 of `of`'s rows: in each list, if the attention of the last block of queries to blocks of keys is no less than `threshold` (√JS) from what
/// means say, those of [`touched_blocks`], with a share of keys and of distances; else the highest of the softmax of products of means, with the same share of
/// the whole. The first block has 1 in any case, and so have the blocks of the heaviest `limits.blocks` blocks of keys, and of as many distances between
/// blocks, by what the last block of queries gives them.
///
/// # Errors
/// [`KernelError`] if the device cannot run it.
pub fn flex_blocks(
    client: &Client,
    element: ElemType,
    tensors: FlexTensors,
    sizes: &LineSizes,
    of: &Touched,
    limits: &FlexLimits,
    out: &Handle,
) -> Result<(), KernelError> {
    super::check(client)?;
    let FlexTensors { q, last, k } = tensors;
    let ([lists, kv_lists], [queries, _], width) = (sizes.lists, sizes.seq, sizes.width);
    let [seq_q, seq_kv] = of.seq;
    let (blocks, b) = (of.blocks(), of.block);
    let rows = seq_q.div_ceil(b);
    let count = lists * of.rows.len() * blocks;
    super::counted("the scores of blocks", lists * rows * blocks)?;
    if count == 0 {
        return Ok(());
    }
    let made = |len: usize| client.empty(len * size_of::<f32>());
    let sums = made(lists * 2 * seq_kv);
    line_sums(client, element, [last, k], sizes, &sums)?;
    let [flags, attention] = of.flag(client, &sums)?;
    let has_least = limits.blocks > 0;
    let (heaviest, heaviest_len) = match has_least {
        true => (
            of.heaviest(client, &attention, limits.blocks)?,
            2 * lists * of.flags(),
        ),
        // Not read.
        false => (made(1), 1),
    };

    let means_of = |x: &Handle, lists: usize, rows: usize, block: usize| {
        let means = made(lists * rows.div_ceil(block) * width);
        let of = RowBlocks::new(lists, [rows, width], block);
        block_means(client, (x, element), &of, &means)?;
        Ok::<Handle, KernelError>(means)
    };
    let k_means = means_of(k, kv_lists, seq_kv, b)?;
    let q_means = means_of(q, lists, seq_q, b)?;
    let last_means = means_of(last, lists, queries, queries)?;
    let product = |q: &Handle, rows: usize, seen: Option<SeenRows>| {
        let x = made(lists * rows * blocks);
        let of = MeanProducts {
            lists: [lists, kv_lists],
            rows,
            blocks,
            width,
            factor: sizes.factor,
            seen,
        };
        mean_products(client, [q, &k_means], &of, &x)?;
        softmax_of_seen(client, &x, [lists, rows, blocks], seen)?;
        Ok::<Handle, KernelError>(x)
    };
    let seen = SeenRows {
        seq: of.seq,
        block: b,
        first: 0,
    };
    let by_means = product(&q_means, rows, Some(seen))?;
    let estimate = product(&last_means, 1, None)?;
    let Kept::Share(_) = of.kept else {
        return Err(KernelError::Factor { factor: "kept" });
    };
    let least = made(lists);
    let lines = KeptLines {
        lines: lists,
        len: rows * blocks,
        step: rows * blocks,
        kept: of.kept,
    };
    least_kept(client, &by_means, &lines, &least)?;
    let apart = made(lists);
    let plane = match client.properties().features.plane.contains(Plane::Ops) {
        true => client.properties().hardware.plane_size_min.max(1) as usize,
        false => 1,
    };
    let tile = RowTile {
        lanes: UNITS,
        rows: 1,
        vector: 1,
        row_vectors: 0,
        plane,
    };
    let (dim, address) = (CubeDim::new_1d(UNITS as u32), AddressType::U32);
    // SAFETY: a cube reads the blocks of its list and writes how far apart they are; a unit below `count` reads what its list has, and writes its score.
    unsafe {
        divergences::launch_unchecked(
            client,
            spread(client, lists as u64)?,
            dim,
            address,
            buffer(&estimate, lists * blocks),
            buffer(&attention, 2 * lists * of.flags()),
            buffer(&apart, lists),
            blocks,
            2 * of.flags(),
            lists,
            tile,
        );
        flex_scores::launch_unchecked(
            client,
            spread(client, count.div_ceil(UNITS) as u64)?,
            dim,
            address,
            buffer(&flags, 2 * lists * of.flags()),
            buffer(&by_means, lists * rows * blocks),
            buffer(&least, lists),
            buffer(&apart, lists),
            buffer(&heaviest, heaviest_len),
            buffer(out, count),
            of.scores(),
            rows,
            limits.threshold as f32,
            has_least,
        );
    }
    Ok(())
}

/// Whether a number is kept.
#[cube]
fn is_kept(number: f32, least: f32) -> bool {
    number > 0.0f32 && number >= least * comptime!(1.0 - APART)
}

/// Of flags the first of blocks of keys, and those of distances that a query's own block has.
const OWN: [usize; 2] = [1, 2];

/// `sums` `[lists, 2, keys]`, `least` `[lists, 2]`; `flags` and the sums of blocks, `of_blocks`, `[lists, 2, flags]`.
///
/// Flag `p` of distances is of a block of queries whose first one lies `first + (p − 1) · block` behind the first key of a block: all distances that two whole
/// blocks there have. Its sum is of those that the first query, or one less than a block before it, has to the first key.
#[cube(launch_unchecked, address_type = "dynamic")]
fn flags_of_lines(
    sums: &[f32],
    least: &[f32],
    flags: &mut [u32],
    of_blocks: &mut [f32],
    of: FlagSizes,
) {
    let mut found = Shared::<[u32]>::new_slice(comptime!(UNITS));
    let mut totals = Shared::<[f32]>::new_slice(comptime!(UNITS));
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(LANES);
    let own = ABSOLUTE_POS / comptime!(LANES);
    let at = own.min(of.count - 1);
    let line = at / of.flags;
    let flag = at % of.flags;
    let is_second = line % 2 == 1;
    let forced = select(is_second, of.forced_second, of.forced);
    let least = least[line];
    // From `from` on, before `to`.
    let mut from = flag * of.block;
    let mut to = from + of.block;
    if is_second {
        // The distance of the first query and the first key, and a block more.
        let apart = of.first + flag * of.block;
        to = apart;
        from = (apart + 1).max(2 * of.block) - 2 * of.block;
    }
    // The later half of the distances that two blocks have.
    let summed = select(is_second, to.max(of.block) - of.block, from);
    to = to.min(of.keys);
    let mut is_any = 0u32.runtime();
    let mut total = 0.0f32.runtime();
    let mut place = from + lane;
    while place < to {
        let number = sums[line * of.keys + place];
        if place < forced || is_kept(number, least) {
            is_any = 1u32;
        }
        total += select(place >= summed, number, 0.0f32);
        place += comptime!(LANES);
    }
    found[unit] = is_any;
    totals[unit] = total;
    sync_cube();
    if lane == 0 && own < of.count {
        for other in 1..comptime!(LANES) {
            is_any |= found[unit + other];
            total += totals[unit + other];
        }
        flags[at] = is_any;
        of_blocks[at] = total;
    }
}

/// `of_blocks` and `flags` `[lists, 2, len]`, `least` `[lists, 2]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn flags_of_blocks(of_blocks: &[f32], least: &[f32], flags: &mut [u32], len: usize, count: usize) {
    let at = ABSOLUTE_POS;
    if at < count {
        let line = at / len;
        let own = select(
            line % 2 == 1,
            comptime!(OWN[1]).runtime(),
            comptime!(OWN[0]).runtime(),
        );
        let is_one = at % len < own || is_kept(of_blocks[at], least[line]);
        flags[at] = select(is_one, 1u32, 0u32);
    }
}

/// Rows of scores.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct ScoreSizes {
    rows: usize,
    first: usize,
    blocks: usize,
    flags: usize,
    /// The flag of distances of a block of queries and the block of keys of the same number.
    same: i32,
    count: usize,
}

/// Whether a block has a key or a distance that is kept.
#[cube]
fn is_touched(flags: &[u32], list: usize, row: usize, block: usize, of: &ScoreSizes) -> bool {
    let start = list * 2 * of.flags;
    let apart = row as i32 - block as i32 + of.same;
    let is_there = apart >= 0i32 && apart < of.flags as i32;
    let at = select(is_there, apart, 0i32) as usize;
    let by_distance = is_there && flags[start + of.flags + at] != 0u32;
    flags[start + block] != 0u32 || by_distance
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn touched_scores(flags: &[u32], out: &mut [f32], of: ScoreSizes) {
    let at = ABSOLUTE_POS;
    if at < of.count {
        let block = at % of.blocks;
        let row = at / of.blocks % of.rows + of.first;
        let list = at / of.blocks / of.rows;
        let is_one = is_touched(flags, list, row, block, &of);
        out[at] = select(is_one, 1.0f32, 0.0f32);
    }
}

/// `x · ln(2x / (x + y))`, 0 of 0.
#[cube]
fn part_of_divergence(x: f32, y: f32) -> f32 {
    let ratio = max(
        2.0f32 * x / max(x + y, comptime!(f32::MIN_POSITIVE).runtime()),
        comptime!(f32::MIN_POSITIVE).runtime(),
    );
    x * ratio.ln()
}

/// √JS of each list: of `estimate` `[lists, blocks]`, and of `attention` `[lists, step]` as shares of its whole.
#[cube(launch_unchecked, address_type = "dynamic")]
fn divergences(
    estimate: &[f32],
    attention: &[f32],
    apart: &mut [f32],
    blocks: usize,
    step: usize,
    lists: usize,
    #[comptime] tile: RowTile,
) {
    // Cubes beyond the last list have it again.
    let list = CUBE_POS.min(lists - 1);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(tile.shared()));
    let mut whole = 0.0f32.runtime();
    let mut block = UNIT_POS as usize;
    while block < blocks {
        whole += attention[list * step + block];
        block += comptime!(UNITS);
    }
    let whole = across_lanes::<f32>(whole, &mut shared, tile, Combine::Sum);
    let part = 1.0f32 / max(whole, comptime!(f32::MIN_POSITIVE).runtime());
    let mut sum = 0.0f32.runtime();
    let mut block = UNIT_POS as usize;
    while block < blocks {
        let a = estimate[list * blocks + block];
        let b = attention[list * step + block] * part;
        sum += part_of_divergence(a, b) + part_of_divergence(b, a);
        block += comptime!(UNITS);
    }
    let sum = across_lanes::<f32>(sum, &mut shared, tile, Combine::Sum);
    if UNIT_POS == 0 {
        // Rounding may leave less than 0 of rows that are equal.
        apart[list] = max(sum * 0.5f32, 0.0f32).sqrt();
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn flex_scores(
    flags: &[u32],
    by_means: &[f32],
    least: &[f32],
    apart: &[f32],
    heaviest: &[u32],
    out: &mut [f32],
    of: ScoreSizes,
    rows: usize,
    threshold: f32,
    #[comptime] has_least: bool,
) {
    let at = ABSOLUTE_POS;
    if at < of.count {
        let block = at % of.blocks;
        let row = at / of.blocks % of.rows + of.first;
        let list = at / of.blocks / of.rows;
        let mut is_one = block == 0;
        if apart[list] >= threshold {
            is_one = is_one || is_touched(flags, list, row, block, &of);
        } else {
            let number = by_means[(list * rows + row) * of.blocks + block];
            is_one = is_one || is_kept(number, least[list]);
        }
        if comptime!(has_least) {
            is_one = is_one || is_touched(heaviest, list, row, block, &of);
        }
        out[at] = select(is_one, 1.0f32, 0.0f32);
    }
}
