//! Selection of blocks by score on the host, with the same rules as on the device.

use blocksparse::{
    Always, BlockLayout, BlockMask, Budget, EstimateKind, LayoutShape, Rule, ScoreGrid,
};
use burn::tensor::Tensor;

use crate::error::OpError;

/// Options of `top_k_blocks`. Build them from [`TopKOptions::new`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct TopKOptions {
    /// Width of a block: 8, 16, 32, 64 or 128.
    pub block_size: usize,
    /// Number of key blocks per row of query blocks, including forced ones (more if more are forced).
    pub k: usize,
    /// True if queries see no later keys. The last query is aligned with the last key.
    pub causal: bool,
    /// Number of forced key blocks up to the queries' own: 1 is the diagonal, 2 also the block before it.
    pub local: usize,
    /// Number of forced first key blocks (attention sinks).
    pub first: usize,
}

impl TopKOptions {
    /// Creates causal options: `k` blocks of `block_size` per row, including the first block, the queries' own and the one before it.
    pub fn new(block_size: usize, k: usize) -> Self {
        Self {
            block_size,
            k,
            causal: true,
            local: 2,
            first: 1,
        }
    }

    blocksparse::setters! {
        /// Sets whether queries see no later keys.
        causal: bool,
        /// Forces `blocks` key blocks up to the queries' own; 0 forces none.
        local: usize,
        /// Forces the first `blocks` key blocks (attention sinks); 0 forces none.
        first: usize,
    }

    #[doc(hidden)]
    pub fn rule(&self) -> Rule {
        Rule {
            kind: EstimateKind::Logit,
            keep: Budget::TopK(self.k),
            forced: Always {
                first: self.first,
                local: self.local,
            },
        }
    }
}

/// Checks that a layout can have these sizes.
pub fn checked(shape: &LayoutShape) -> Result<LayoutShape, OpError> {
    // Before anything is computed from them.
    shape.validate()?;
    Ok(*shape)
}

/// Returns the grid of a layout's scores.
pub fn grid(shape: &LayoutShape, causal: bool) -> ScoreGrid {
    ScoreGrid {
        query_rows: shape.block_size,
        block: shape.block_size,
        seq_q: shape.seq_q,
        seq_kv: shape.seq_kv,
        causal,
    }
}

/// Returns the key blocks that each row of scores selects, read back from the device. If `within` is given, only its blocks are candidates.
pub fn choose_rows(
    scores: Tensor<4>,
    shape: LayoutShape,
    rule: &Rule,
    causal: bool,
    within: Option<&BlockLayout>,
) -> Result<Vec<Vec<bool>>, OpError> {
    let [_, heads, q_blocks, kv_blocks] = scores.dims();
    let scores = scores.try_into_data().map_err(OpError::read)?;
    let scores = scores.convert::<f64>();
    let scores: Vec<f64> = scores.to_vec().map_err(OpError::read)?;
    let grid = grid(&shape, causal);
    let rows = scores.chunks(kv_blocks).enumerate();
    let rows = rows.map(|(row, scores)| {
        let Some(within) = within else {
            return rule.selects(&grid, row % q_blocks, scores);
        };
        let pattern = row / q_blocks;
        let head = pattern % heads * (shape.heads / heads);
        let allowed = allowed_blocks(within, pattern / heads, head, row % q_blocks);
        rule.selects_of(&grid, row % q_blocks, scores, |block| allowed[block])
    });
    Ok(rows.collect())
}

/// Returns the blocks of a row of a layout. A layout of one batch entry serves all entries.
pub fn allowed_blocks(
    layout: &BlockLayout,
    entry: usize,
    head: usize,
    q_block: usize,
) -> Vec<bool> {
    let entry = entry.min(layout.batch().unwrap_or(1) - 1);
    let mut allowed = vec![false; layout.kv_blocks()];
    for run in layout.row_runs(layout.pattern_of(entry, head), q_block) {
        run.blocks()
            .for_each(|block| allowed[block as usize] = true);
    }
    allowed
}

/// Returns the mask of a chosen block.
pub fn mask(q_block: usize, kv_block: usize, shape: LayoutShape, causal: bool) -> BlockMask {
    let b = shape.block_size;
    let [first, _] = grid(&shape, causal).positions(q_block);
    BlockMask::from_fn(b, |row, column| {
        !causal || (kv_block * b + column) as i64 <= first + row as i64
    })
}
