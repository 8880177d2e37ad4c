//! What becomes of the results of attention in a pass that is one of two.

use std::sync::{Arc, Mutex, PoisonError};

use burn_blocksparse::KeptAttention;

/// What becomes of the results of a call of attention. Nothing of it changes what the call computes.
#[derive(Clone, Debug, Default)]
pub(crate) enum Results {
    /// They are computed, and go where they are needed.
    #[default]
    Computed,
    /// They are computed, and kept for the same call of another pass; not by a call that can be given none.
    #[cfg_attr(not(feature = "autodiff"), expect(dead_code))]
    Kept(Slot),
    /// They are those that another pass kept.
    #[cfg_attr(not(feature = "autodiff"), expect(dead_code))]
    Given(Box<KeptAttention>),
}

/// Where a call leaves its results.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slot(Arc<Mutex<Option<KeptAttention>>>);

impl Slot {
    pub(crate) fn put(&self, kept: KeptAttention) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(kept);
    }

    /// What was left, which is gone from here then.
    #[cfg(feature = "autodiff")]
    pub(crate) fn take(&self) -> Option<KeptAttention> {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        slot.take()
    }
}

#[cfg(feature = "autodiff")]
impl From<Option<KeptAttention>> for Results {
    fn from(kept: Option<KeptAttention>) -> Self {
        match kept {
            Some(kept) => Self::Given(Box::new(kept)),
            None => Self::Computed,
        }
    }
}
