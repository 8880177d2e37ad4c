//! Pruning of blocks of the feed-forward networks' weights.

use std::fmt;

use anyhow::Result;
use burn::module::ParamId;
use burn_sparse_transformer::SparseTransformer;
use burn_sparse_transformer::feed_forward::FeedForwardLinear;
use serde::{Deserialize, Serialize};

use crate::flags::ensure_all;

/// Gradual pruning by magnitude (Zhu and Gupta, "To prune, or not to prune", 2017): between two steps the density falls from the model's to the final one,
/// fast at first.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pruning {
    /// Final density.
    pub density: f64,
    /// Step after which pruning begins.
    pub from: usize,
    /// Step after which pruning ends.
    pub until: usize,
    /// Steps between two prunings.
    pub every: usize,
}

impl fmt::Display for Pruning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (percent, every) = (100.0 * self.density, self.every);
        write!(f, "pruned to {percent} % from step {} ", self.from)?;
        write!(f, "to step {}, every {every} steps", self.until)
    }
}

impl Pruning {
    /// Checks that the numbers match, for weights that begin with the density `initial`.
    pub fn check(&self, initial: f64) -> Result<()> {
        let (density, from, until) = (self.density, self.from, self.until);
        ensure_all! {
            density <= initial => "--ff-prune must be at most --ff-density = {initial}, got {density}";
            until >= from =>
                "--ff-prune-until must be at least the {from} steps of --ff-prune-from, got {until}";
        }
        Ok(())
    }

    /// Returns the density after `step` steps, for weights that begin with `initial`.
    pub fn density_after(&self, step: usize, initial: f64) -> f64 {
        let pruned_at = match step {
            step if step >= self.until => self.until,
            step if step >= self.from => step - (step - self.from) % self.every,
            _ => return initial,
        };
        let all = (self.until - self.from) as f64;
        let left = match self.until == self.from {
            true => 0.0,
            false => (self.until - pruned_at) as f64 / all,
        };
        self.density + (initial - self.density) * left.powi(3)
    }
}

/// Pruned weight, and the previous indices of its blocks.
pub type Pruned = (ParamId, Vec<usize>);

/// Prunes the feed-forward networks' weights to this density by the norms of their blocks. Weights that are not denser are unchanged.
pub fn prune(
    mut model: SparseTransformer,
    density: f64,
) -> Result<(SparseTransformer, Vec<Pruned>)> {
    let mut all = Vec::new();
    for block in &mut model.blocks {
        for layer in [&mut block.pwff.linear_inner, &mut block.pwff.linear_outer] {
            let FeedForwardLinear::BlockSparse(weight) = layer else {
                continue;
            };
            if weight.layout()?.density() <= density {
                continue;
            }
            let (fewer, kept) = weight.clone().prune(density)?;
            all.push((fewer.weight.id, kept));
            *weight = fewer;
        }
    }
    Ok((model, all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn density_falls_in_steps() {
        let pruning = Pruning {
            density: 0.2,
            from: 100,
            until: 200,
            every: 30,
        };
        let at = |step| pruning.density_after(step, 1.0);
        assert_eq!([at(0), at(100), at(129)], [1.0; 3]);
        let third = |left: f64| 0.2 + 0.8 * (left / 100.0).powi(3);
        assert_eq!([at(130), at(159), at(160)], [70.0, 70.0, 40.0].map(third));
        assert_eq!([at(190), at(199)], [10.0; 2].map(third));
        assert_eq!([at(200), at(10_000)], [0.2; 2]);
        let at_once = Pruning {
            until: 100,
            ..pruning
        };
        assert_eq!(at_once.density_after(99, 1.0), 1.0);
        assert_eq!(at_once.density_after(100, 1.0), 0.2);
    }
}
