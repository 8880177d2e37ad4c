//! Shared parts of the methods that select per query, and such selections on the host.

use blocksparse::{
    Always, BlockLayout, BlockMask, Budget, EstimateKind, LayoutShape, Rule, ScoreGrid,
};

use crate::selection::estimator::EstimatorTraits;
use burn_blocksparse::OpError;

/// Traits of methods whose scores are products of a query with summaries of key blocks.
pub(crate) const TRAITS: EstimatorTraits = EstimatorTraits {
    kind: EstimateKind::Logit,
    // The blocks before a query's own are complete, and no other block is scored.
    prefix_stable: true,
    causal_only: true,
};

/// Default forced blocks: the query's own.
pub(crate) const FORCED: Always = Always { first: 0, local: 1 };

/// Returns the number of blocks of a top-k budget.
///
/// # Errors
/// If the budget is of another kind. The error names what is expected.
pub(crate) fn top_k(keep: Budget, expected: impl Into<String>) -> Result<usize, OpError> {
    match keep {
        Budget::TopK(count) => Ok(count),
        _ => Err(OpError::argument("keep", expected, format!("{keep:?}"))),
    }
}

/// Checks that a method's rule is top-k of at least `least` blocks, with the query's own among the forced ones.
///
/// # Errors
/// If it is another rule.
pub(crate) fn check_rule(
    rule: &Rule,
    [name, blocks]: [&str; 2],
    least: usize,
) -> Result<(), OpError> {
    let count = top_k(rule.keep, format!("a number of {blocks} for {name}"))?;
    blocksparse::ensure! {
        OpError;
        count >= least => "keep", format!("at least {least} {blocks} for {name}"), count;
        rule.forced.local > 0 => "forced.local", format!("at least 1, the query's own, for {name}"), 0;
    }
    Ok(())
}

/// Returns the layout of the blocks that each row of a grid of single queries keeps, `[patterns · rows][blocks]`. The grid's blocks are multiples of the
/// layout's.
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
