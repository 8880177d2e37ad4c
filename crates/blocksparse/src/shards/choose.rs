//! Chooses the number of pieces per device.

use super::ShardPlan;
use crate::{BlockLayout, BlockMask};

/// Number of pairs that take as long as the transfer of a key. A pair takes 14 · d operations forward and backward; a bf16 key and its value have 8 · d bytes
/// including gradients. The ratio is about 900 operations per byte, as on H100s with 400 TFLOP/s and 450 GB/s of NVLink.
const PAIRS_OF_A_KEY: f64 = 512.0;

/// Maximum number of pieces per device to try.
const MOST: usize = 64;

/// Cost of a number of pieces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub pieces: usize,
    /// Cost of the busiest device, in pairs.
    pub cost: f64,
}

pub(super) fn cost(plan: &ShardPlan) -> f64 {
    let of_device = |device: usize| {
        let keys = plan.keys_received(device).max(plan.keys_sent(device));
        plan.pairs(device) as f64 + PAIRS_OF_A_KEY * keys as f64
    };
    (0..plan.devices()).map(of_device).fold(0.0, f64::max)
}

/// Returns the cheapest plan over the powers of two; of equally cheap plans, the one with fewest pieces.
pub(super) fn cheapest(layout: &BlockLayout, kv_heads: usize, devices: usize) -> ShardPlan {
    let pairs = pairs_before(layout);
    let most = MOST.min(layout.q_blocks() / devices);
    let mut candidates = Vec::new();
    let mut best: Option<(f64, ShardPlan)> = None;
    let mut pieces = 1;
    while pieces <= most {
        let plan = ShardPlan::dealt(layout, kv_heads, &pairs, devices, pieces);
        let cost = cost(&plan);
        candidates.push(Candidate { pieces, cost });
        if best.as_ref().is_none_or(|(least, _)| cost < *least) {
            best = Some((cost, plan));
        }
        pieces *= 2;
    }
    let (_, mut plan) = best.expect("one piece is tried");
    plan.candidates = candidates;
    plan
}

/// Returns the number of allowed pairs of all heads before each block row.
pub(super) fn pairs_before(layout: &BlockLayout) -> Vec<u64> {
    let counts: Vec<u64> = layout.masks().iter().map(BlockMask::count).collect();
    let mut heads = vec![0; layout.num_patterns()];
    (0..layout.heads()).for_each(|head| heads[layout.pattern_of(0, head)] += 1);
    let mut before = vec![0];
    let mut sum = 0;
    for row in 0..layout.q_blocks() {
        for (pattern, heads) in heads.iter().enumerate() {
            let runs = layout.row_runs(pattern, row).iter();
            let pairs = runs.map(|run| u64::from(run.count) * counts[run.mask as usize]);
            sum += heads * pairs.sum::<u64>();
        }
        before.push(sum);
    }
    before
}
