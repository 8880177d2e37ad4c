//! The choice of coarse entries in mainloops: whole steps, with a bit per block.

use crate::call::PartRequest;
use crate::tuning::Tuning;
use blocksparse::plan::NarrowCosts;

/// When a part's mainloops get coarse entries.
pub(super) enum Coarse {
    /// If they should be faster.
    IfFaster,
    /// Wherever possible, for measuring.
    Always,
}

impl Coarse {
    /// Returns `None` if coarse entries are impossible. `BLOCKSPARSE_COARSE=0` or `1` disables or forces them.
    pub fn of(part: &PartRequest, class: usize) -> Option<Self> {
        let known = part.residue.is_none() && !part.carry && class <= 128;
        if !known || !NarrowCosts::concern(part.layout) {
            return None;
        }
        match Tuning::or_default().coarse {
            Some(false) => None,
            Some(true) => Some(Self::Always),
            None => Some(Self::IfFaster),
        }
    }

    /// Whether to use coarse steps with this cost instead of gathered ones with cost `gathered`.
    pub fn takes(&self, cost: f64, gathered: f64) -> bool {
        /// The costs are estimates, so a small gain does not count.
        const WORTHWHILE: f64 = 1.05;
        match self {
            Self::IfFaster => cost * WORTHWHILE < gathered,
            Self::Always => true,
        }
    }
}
