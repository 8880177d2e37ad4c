//! Whether mainloops have coarse entries: whole steps, with a bit for each block.

use crate::call::PartRequest;
use crate::tuning::Tuning;
use blocksparse::plan::NarrowCosts;

/// Whether a part's mainloops are to have coarse entries.
pub(super) enum Coarse {
    /// Where they should be faster.
    IfFaster,
    /// Where they can: for measuring.
    Always,
}

impl Coarse {
    /// Nothing where there are none. `BLOCKSPARSE_COARSE=0` or `1` leaves them out, or takes them.
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

    /// Whether coarse steps are taken where gathered ones should cost `gathered`.
    pub fn takes(&self, cost: f64, gathered: f64) -> bool {
        /// The costs are estimates: what is about as fast stays as it is.
        const WORTHWHILE: f64 = 1.05;
        match self {
            Self::IfFaster => cost * WORTHWHILE < gathered,
            Self::Always => true,
        }
    }
}
