//! An estimate of the speed-up over dense attention, from the blocks alone.

use blocksparse::plan::{Grouping, Mainloop};
use blocksparse::{BlockLayout, LayoutError, Pattern};

/// Queries and keys that a kernel on tensor cores computes at once.
const TILE: [usize; 2] = [128, 64];

/// The block size of the dense layout.
const DENSE_BLOCK: usize = 128;

/// How many times as long the forward pass of dense attention should take, causal if the pattern is: the pairs in kept blocks,
/// times what the planner of the kernels says that tiles add. Masks, launches and memory traffic are left out.
pub fn speed_up(pattern: &Pattern, layout: &BlockLayout) -> Result<f64, LayoutError> {
    let dense = match pattern.is_causal() {
        true => Pattern::causal(),
        false => Pattern::dense(),
    };
    let dense = dense.layout(layout.heads(), layout.seq_q(), DENSE_BLOCK)?;
    Ok(cost(&dense) / cost(layout).max(1.0))
}

fn cost(layout: &BlockLayout) -> f64 {
    let Some(parts) = layout.parts() else {
        return cost_of_blocks(layout);
    };
    parts.iter().map(|part| cost_of_blocks(&part.layout)).sum()
}

fn cost_of_blocks(layout: &BlockLayout) -> f64 {
    let pairs = layout.blocks() as f64 * layout.block_size().pow(2) as f64;
    pairs * Grouping::best(layout, Mainloop::Rows, TILE, true).overhead
}
