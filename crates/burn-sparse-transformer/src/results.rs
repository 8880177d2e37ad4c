//! What becomes of the results of attention in a pass that is one of two.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Tensor;
use burn_blocksparse::internal::AttentionResiduals;
use burn_blocksparse::{OpError, SparseAttentionCall, WeightsMode};

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
    Given(Box<AttentionResiduals>),
}

impl Results {
    /// Those of a call; stored weights are not kept.
    pub(crate) fn of(
        &self,
        call: SparseAttentionCall,
        weights: WeightsMode,
    ) -> Result<Tensor<4>, OpError> {
        let keeps = weights == WeightsMode::Recompute;
        Ok(match self {
            Self::Given(kept) => call.run_from_residuals(AttentionResiduals::clone(kept))?.0,
            Self::Kept(slot) if keeps => {
                let (out, _, kept) = call.run_with_residuals()?;
                slot.put(kept);
                out
            }
            Self::Computed | Self::Kept(_) => call.run()?.out,
        })
    }
}

/// Where a call leaves its results.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slot(Arc<Mutex<Option<AttentionResiduals>>>);

impl Slot {
    pub(crate) fn put(&self, kept: AttentionResiduals) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(kept);
    }

    /// What was left, which is gone from here then.
    #[cfg(feature = "autodiff")]
    pub(crate) fn take(&self) -> Option<AttentionResiduals> {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        slot.take()
    }
}

#[cfg(feature = "autodiff")]
impl From<Option<AttentionResiduals>> for Results {
    fn from(kept: Option<AttentionResiduals>) -> Self {
        match kept {
            Some(kept) => Self::Given(Box::new(kept)),
            None => Self::Computed,
        }
    }
}
