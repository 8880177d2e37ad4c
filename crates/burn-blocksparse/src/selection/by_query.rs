//! Choices of single queries on the host.

use blocksparse::{BlockLayout, BlockMask, LayoutShape, ScoreGrid};

use crate::error::OpError;

/// The layout of what each row of a grid of single queries keeps, `[patterns · rows][blocks]`. The grid's blocks are whole multiples of the layout's.
pub(crate) fn layout(
    name: &str,
    shape: LayoutShape,
    grid: &ScoreGrid,
    kept: &[Vec<bool>],
) -> Result<BlockLayout, OpError> {
    let b = shape.block_size;
    let patterns = kept.len() / grid.rows();
    let layout = BlockLayout::from_block_fn(name, shape, |head, q_block, kv_block| {
        let pattern = head / (shape.heads / patterns);
        let mask = BlockMask::from_fn(b, |row, column| {
            let (query, key) = (q_block * b + row, kv_block * b + column);
            if query >= shape.seq_q || key >= shape.seq_kv {
                return false;
            }
            let [position, _] = grid.positions(query);
            let is_seen = !grid.causal || key as i64 <= position;
            is_seen && kept[pattern * grid.rows() + query][key / grid.block]
        });
        (!mask.is_empty()).then_some(mask)
    });
    Ok(layout?)
}
