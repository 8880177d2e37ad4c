//! Block selection in one of two ways per list, decided on the device: by means where these are accurate, otherwise by the blocks that selected keys and
//! distances touch.
//!
//! ```text
//! divergences   √JS between the attention of blocks and its estimate by means   a list per cube
//! scores        scores by the way that the divergence selects                   a score per unit
//! ```
//!
//! Each list computes a selection only for the way that it takes. Where the products of the last queries are not stored, the shares of blocks are computed
//! before the sums over keys and distances, and lists that select by means skip these sums.

use crate::kernels::rows::blocks::{Beside, Blocked, OnlyLists, RowBlocks, block_means};
use crate::kernels::selection::line_weights::{LineSizes, LineWeights, RUN};
use crate::kernels::selection::lines::line_sums;
use crate::kernels::selection::means::{MeanProducts, SeenRows, mean_products, softmax_of_seen};
use crate::kernels::selection::threshold::{Kept, KeptLines, least_kept};
use crate::kernels::selection::touched::{ScoreSizes, Touched, is_kept, is_touched};
use crate::kernels::selection::{UNITS, across_cube};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::row_tile::{Combine, RowTile, across_lanes};
use burn_fused_ops::kernels::linear::UNWANTED;

/// Threshold between the two ways, and the least selection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlexLimits {
    /// Largest distance of the estimate from the attention, √JS.
    pub threshold: f64,
    /// Number of key blocks and of block distances that both ways keep at least; 0: only forced ones.
    pub blocks: usize,
}

/// Inputs of a call.
#[derive(Clone, Copy, Debug)]
pub struct FlexTensors<'a> {
    /// `[lists, seq_q, width]`.
    pub q: &'a Handle,
    /// Last block of queries, `[lists, queries, width]`.
    pub last: &'a Handle,
    /// `[kv lists, seq_kv, width]`.
    pub k: &'a Handle,
}

/// Writes scores of 1 and 0 of the rows of `of`. A list whose attention of the last block of queries differs from the estimate by means by at least `threshold`
/// (√JS) gets those of [`touched_blocks`](crate::kernels::selection::touched_blocks), with a share of keys and of distances. Other lists get 1 for the largest
/// elements of the softmax of products of means that cover the same share of the total. The first block always has 1, and so have the heaviest `limits.blocks`
/// key blocks, and as many block distances, by the attention of the last block of queries.
pub fn flex_blocks(
    client: &Client,
    element: ElemType,
    tensors: FlexTensors,
    sizes: &LineSizes,
    of: &Touched,
    limits: &FlexLimits,
    out: &Handle,
) -> Result<(), KernelError> {
    crate::kernels::selection::check(client)?;
    let FlexTensors { q, last, k } = tensors;
    let ([lists, kv_lists], [queries, _], width) = (sizes.lists, sizes.seq, sizes.width);
    let [seq_q, seq_kv] = of.seq;
    let (blocks, b) = (of.blocks(), of.block);
    let rows = seq_q.div_ceil(b);
    let count = lists * of.rows.len() * blocks;
    crate::kernels::selection::counted("the scores of blocks", lists * rows * blocks)?;
    if count == 0 {
        return Ok(());
    }
    let Kept::Share(_) = of.kept else {
        return Err(KernelError::Factor { factor: "kept" });
    };
    let made = |len: usize| client.empty(len * size_of::<f32>());
    let means_of = |x: &Handle, [lists, rows, block]: [usize; 3], only: Option<OnlyLists>| {
        let means = made(lists * rows.div_ceil(block) * width);
        let of = RowBlocks::new(lists, [rows, width], block);
        let blocked = Blocked {
            x,
            of: &of,
            means: &means,
        };
        let beside = Beside {
            only,
            ..Beside::default()
        };
        block_means(client, element, blocked, beside)?;
        Ok::<Handle, KernelError>(means)
    };
    let k_means = means_of(k, [kv_lists, seq_kv, b], None)?;
    let product = |q: &Handle, rows: usize, seen: Option<SeenRows>, only: Option<OnlyLists>| {
        let x = made(lists * rows * blocks);
        let of = MeanProducts {
            lists: [lists, kv_lists],
            rows,
            blocks,
            width,
            factor: sizes.factor,
            seen,
        };
        mean_products(client, [q, &k_means], &of, only, &x)?;
        softmax_of_seen(client, &x, [lists, rows, blocks], seen, None)?;
        Ok::<Handle, KernelError>(x)
    };
    let last_means = means_of(last, [lists, queries, queries], None)?;
    let estimate = product(&last_means, 1, None, None)?;

    let apart = Apart {
        client,
        lists,
        blocks,
        estimate: &estimate,
        apart: made(lists),
        limit: limits.threshold as f32,
    };
    let has_least = limits.blocks > 0;
    let sums = made(lists * 2 * seq_kv);
    let weights = LineWeights::new(client, element, [last, k], sizes)?;
    let [flags, attention] = match weights {
        Some(weights) if b.is_multiple_of(RUN) => {
            let attention = made(lists * blocks);
            weights.by_blocks(client, b, &attention)?;
            // With a least selection, all lists need their sums.
            let unwanted = (!has_least).then(|| (weights.logs(), queries));
            apart.find(&attention, blocks, unwanted)?;
            weights.sums(client, &sums)?;
            of.flag(client, &sums, (!has_least).then(|| apart.only(true)))?
        }
        weights => {
            match weights {
                Some(weights) => weights.sums(client, &sums)?,
                None => line_sums(client, element, [last, k], sizes, &sums)?,
            }
            let [flags, of_blocks] = of.flag(client, &sums, None)?;
            apart.find(&of_blocks, 2 * of.flags(), None)?;
            [flags, of_blocks]
        }
    };
    let (heaviest, heaviest_len) = match has_least {
        true => (
            of.heaviest(client, &attention, limits.blocks)?,
            2 * lists * of.flags(),
        ),
        // Unused placeholder.
        false => (made(1), 1),
    };

    // Only lists that select by means need the means of all queries.
    let by = Some(apart.only(false));
    let q_means = means_of(q, [lists, seq_q, b], by)?;
    let seen = SeenRows {
        seq: of.seq,
        block: b,
        first: 0,
    };
    let by_means = product(&q_means, rows, Some(seen), by)?;
    let least = made(lists);
    let lines = KeptLines {
        lines: lists,
        len: rows * blocks,
        step: rows * blocks,
        kept: of.kept,
    };
    least_kept(client, &by_means, &lines, by, &least)?;
    // SAFETY: a unit below `count` reads data of its own list and writes its own score.
    unsafe {
        flex_scores::launch_unchecked(
            client,
            spread(client, count.div_ceil(UNITS) as u64)?,
            CubeDim::new_1d(UNITS as u32),
            AddressType::U32,
            buffer(&flags, 2 * lists * of.flags()),
            buffer(&by_means, lists * rows * blocks),
            buffer(&least, lists),
            buffer(&apart.apart, lists),
            buffer(&heaviest, heaviest_len),
            buffer(out, count),
            of.scores(),
            rows,
            apart.limit,
            has_least,
        );
    }
    Ok(())
}

/// Distances between the lists' attention and its estimate.
struct Apart<'a> {
    client: &'a Client,
    lists: usize,
    blocks: usize,
    /// Estimate by means, `[lists, blocks]`.
    estimate: &'a Handle,
    /// Distances √JS, `[lists]`.
    apart: Handle,
    limit: f32,
}

impl Apart<'_> {
    /// Computes the distances from `attention` `[lists, step]`. Lists below the limit get a marker in the first of their `unwanted` logarithms, which skips
    /// their sums.
    fn find(
        &self,
        attention: &Handle,
        step: usize,
        unwanted: Option<(&Handle, usize)>,
    ) -> Result<(), KernelError> {
        let lists = self.lists;
        let each = unwanted.map_or(0, |(_, each)| each);
        // SAFETY: a cube reads the blocks of its list, and writes its distance and the list's first logarithm.
        unsafe {
            divergences::launch_unchecked(
                self.client,
                spread(self.client, lists as u64)?,
                CubeDim::new_1d(UNITS as u32),
                AddressType::U32,
                buffer(self.estimate, lists * self.blocks),
                buffer(attention, lists * step),
                buffer(&self.apart, lists),
                optional(unwanted.map(|(logs, _)| logs), lists * each),
                self.blocks,
                step,
                lists,
                each,
                self.limit,
                across_cube(self.client),
            );
        }
        Ok(())
    }

    /// Returns a condition that selects lists at or above the limit, or the others.
    fn only(&self, apart: bool) -> OnlyLists<'_> {
        OnlyLists {
            numbers: &self.apart,
            lists: self.lists,
            limit: self.limit,
            above: apart,
        }
    }
}

/// Computes `x · ln(2x / (x + y))`, 0 for x = 0.
#[cube]
fn part_of_divergence(x: f32, y: f32) -> f32 {
    let ratio = max(
        2.0f32 * x / max(x + y, comptime!(f32::MIN_POSITIVE).runtime()),
        comptime!(f32::MIN_POSITIVE).runtime(),
    );
    x * ratio.ln()
}

/// Computes √JS of each list, between `estimate` `[lists, blocks]` and `attention` `[lists, step]` normalized to sum 1. Lists below the limit get [`UNWANTED`]
/// in the first of their `each` logarithms.
#[cube(launch_unchecked, address_type = "dynamic")]
fn divergences(
    estimate: &[f32],
    attention: &[f32],
    apart: &mut [f32],
    logs: ComptimeOption<Box<[f32]>>,
    blocks: usize,
    step: usize,
    lists: usize,
    each: usize,
    limit: f32,
    #[comptime] tile: RowTile,
) {
    let mut logs = logs;
    // Surplus cubes repeat the last list.
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
        // For equal rows rounding may give a negative result.
        let root = max(sum * 0.5f32, 0.0f32).sqrt();
        apart[list] = root;
        #[comptime]
        match &mut logs {
            ComptimeOption::Some(logs) => {
                let first = list * each;
                let log = logs[first];
                logs[first] = select(root >= limit, log, comptime!(UNWANTED).runtime());
            }
            ComptimeOption::None => {}
        }
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
