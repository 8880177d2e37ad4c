//! Attention results that one of two passes computes for the other.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Tensor;
use burn_blocksparse::internal::AttentionResiduals;
use burn_blocksparse::{OpError, SparseAttentionCall, WeightsMode};

/// Source and use of the results of an attention call. The output is the same in all cases.
#[derive(Clone, Debug, Default)]
pub(crate) enum Results {
    /// Computed, and not kept.
    #[default]
    Computed,
    /// Computed, and kept for the same call of another pass. A call that stores its weights keeps nothing.
    #[cfg_attr(not(feature = "autodiff"), expect(dead_code))]
    Kept(Slot),
    /// Results that another pass kept.
    #[cfg_attr(not(feature = "autodiff"), expect(dead_code))]
    Given(Box<AttentionResiduals>),
}

impl Results {
    /// Returns the output of a call. Results are not kept if weights are stored.
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

/// Slot that a call stores its results in.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slot(Arc<Mutex<Option<AttentionResiduals>>>);

impl Slot {
    pub(crate) fn put(&self, kept: AttentionResiduals) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(kept);
    }

    /// Takes the results out of the slot.
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
