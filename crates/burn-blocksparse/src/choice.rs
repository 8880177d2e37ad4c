//! How blocks are chosen by scores, on the host; the same rules as on the device.

use blocksparse::BlockLayout;
use blocksparse::{BlockMask, ChosenBy, DeviceChoice, LayoutShape};
use burn::tensor::Tensor;

use crate::error::OpError;

/// How [`top_k_blocks`](crate::top_k_blocks) chooses. Build it from [`TopKOptions::new`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct TopKOptions {
    /// Width of a block: 8, 16, 32, 64 or 128.
    pub block_size: usize,
    /// Key blocks of each row of query blocks, the forced ones among them (more, if more are forced).
    pub k: usize,
    /// Whether queries see no later keys. The last query sits at the last key.
    pub causal: bool,
    /// How many key blocks up to the queries' own are forced: 1 is the diagonal, 2 also the block before it.
    pub local: usize,
    /// How many of the first key blocks are forced (attention sinks).
    pub first: usize,
}

impl TopKOptions {
    /// `k` blocks of `block_size` for each row, among them the first one, the queries' own and the one before it: causal.
    pub fn new(block_size: usize, k: usize) -> Self {
        Self {
            block_size,
            k,
            causal: true,
            local: 2,
            first: 1,
        }
    }

    /// Sets whether queries see no later keys.
    pub fn causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Forces `blocks` key blocks up to the queries' own; 0 forces none.
    pub fn local(mut self, blocks: usize) -> Self {
        self.local = blocks;
        self
    }

    /// Forces the first `blocks` key blocks (attention sinks); 0 forces none.
    pub fn first(mut self, blocks: usize) -> Self {
        self.first = blocks;
        self
    }
}

/// Sizes that a layout can have.
pub(crate) fn checked(shape: &LayoutShape) -> Result<LayoutShape, OpError> {
    // The sizes are the layout's to check, before anything is computed with them.
    let nothing = DeviceChoice {
        patterns: [1, 1],
        causal: false,
        by: ChosenBy::Mask,
    };
    Ok(*BlockLayout::on_device("sizes", *shape, nothing)?.shape())
}

/// Which key blocks each row of scores keeps, read back from the device.
pub(crate) fn choose_rows(
    scores: Tensor<4>,
    shape: LayoutShape,
    options: &TopKOptions,
) -> Result<Vec<Vec<bool>>, OpError> {
    let [_, _, q_blocks, kv_blocks] = scores.dims();
    let scores = scores.try_into_data().map_err(OpError::read)?;
    let scores: Vec<f32> = scores.to_vec().map_err(OpError::read)?;
    let rows = scores.chunks(kv_blocks).enumerate();
    let rows = rows.map(|(row, scores)| choose(scores, row % q_blocks, shape, options));
    Ok(rows.collect())
}

/// Which key blocks a row of query blocks keeps.
fn choose(scores: &[f32], q_block: usize, shape: LayoutShape, options: &TopKOptions) -> Vec<bool> {
    let [first, last] = positions(q_block, shape);
    let b = shape.block_size as i64;
    let start = |kv_block: usize| kv_block as i64 * b;
    let allowed = |kv_block: usize| !options.causal || start(kv_block) <= last;
    let reach = i64::try_from(options.local).map_or(i64::MAX, |local| local.saturating_mul(b));
    let near = |kv_block: usize| start(kv_block) <= last && first - start(kv_block) < reach;
    let forced =
        |kv_block: usize| kv_block < options.first || (options.local > 0 && near(kv_block));
    let candidates = (0..scores.len()).filter(|&kv_block| allowed(kv_block));
    let (mut chosen, mut rest): (Vec<_>, Vec<_>) =
        candidates.partition(|&kv_block| forced(kv_block));
    let key = |kv_block: usize| match scores[kv_block].is_nan() {
        true => f32::NEG_INFINITY,
        // −0 equals 0.
        false => scores[kv_block] + 0.0,
    };
    rest.sort_by(|&x, &y| key(y).total_cmp(&key(x)));
    rest.truncate(options.k.saturating_sub(chosen.len()));
    chosen.extend(rest);
    let mut kept = vec![false; scores.len()];
    chosen.iter().for_each(|&kv_block| kept[kv_block] = true);
    kept
}

/// Positions of the first and the last query of a block; the last of all queries sits at the last key.
pub(crate) fn positions(q_block: usize, shape: LayoutShape) -> [i64; 2] {
    let offset = shape.seq_kv as i64 - shape.seq_q as i64;
    let first = q_block * shape.block_size;
    let last = (first + shape.block_size).min(shape.seq_q) - 1;
    [first as i64 + offset, last as i64 + offset]
}

/// The pairs of a chosen block.
pub(crate) fn mask(q_block: usize, kv_block: usize, shape: LayoutShape, causal: bool) -> BlockMask {
    let b = shape.block_size;
    let [first, _] = positions(q_block, shape);
    BlockMask::from_fn(b, |row, column| {
        !causal || (kv_block * b + column) as i64 <= first + row as i64
    })
}
