//! Results of an attention call that a later call can reuse.

use crate::base::prelude::*;
use crate::base::values::KnownOutput;
use crate::check::same_device;
use crate::options::{AttentionOptions, WeightsMode};

/// Tensors that [`run_with_residuals`](crate::SparseAttentionCall::run_with_residuals) stores for
/// [`run_from_residuals`](crate::SparseAttentionCall::run_from_residuals): output and lse **before sinks**, without autodiff.
///
/// Without sinks they equal the results of [`SparseAttentionCall`](crate::SparseAttentionCall). With sinks the backward pass needs the values of the keys
/// alone, which cannot be recovered from the output. So [`new`](Self::new) must not be given results that [`SparseAttentionCall`](crate::SparseAttentionCall)
/// computed with sinks.
#[derive(Clone, Debug)]
#[must_use]
#[non_exhaustive]
pub struct AttentionResiduals {
    /// `[batch, heads, seq_q, value_dim]`, in the dtype of q, k and v.
    pub out: Tensor<4>,
    /// `[batch, heads, seq_q]`, in f32 (f64 for f64 inputs).
    pub lse: Tensor<3>,
}

/// Checks that a call with these options returns only output and lse.
pub(super) fn check_options(options: &AttentionOptions) -> Result<(), OpError> {
    blocksparse::ensure! {
        OpError;
        options.weights != WeightsMode::Store => "options.weights", "Recompute where the output is kept", "Store";
        !options.max_scores => "options.max_scores", "false where the output is kept", true;
    }
    Ok(())
}

impl AttentionResiduals {
    /// Creates residuals from output and lse before sinks. Detaches them from autodiff.
    pub fn new(out: Tensor<4>, lse: Tensor<3>) -> Self {
        Self {
            out: out.without_autodiff(),
            lse: lse.without_autodiff(),
        }
    }

    /// Checks that a call with these options can use the residuals. The call's other arguments must already be checked.
    pub(crate) fn check(
        &self,
        q: &Tensor<4>,
        v: &Tensor<4>,
        options: &AttentionOptions,
    ) -> Result<(), OpError> {
        check_options(options)?;
        let ([batch, heads, seq_q, _], [.., value_dim]) = (q.dims(), v.dims());
        let (rows, out) = ([batch, heads, seq_q], [batch, heads, seq_q, value_dim]);
        let sums = sums_of(q.dtype());
        OpError::expect_same("kept.out's shape", out, "q's and v's", self.out.dims())?;
        OpError::expect_same("kept.lse's shape", rows, "q's rows", self.lse.dims())?;
        OpError::expect_same("kept.out's dtype", q.dtype(), "q's", self.out.dtype())?;
        let whose = "that of q's sums";
        OpError::expect_same("kept.lse's dtype", sums, whose, self.lse.dtype())?;
        same_device("kept.out's device", &q.device(), "q's", &self.out.device())?;
        same_device("kept.lse's device", &q.device(), "q's", &self.lse.device())
    }

    /// Converts the residuals for backends. `packed` holds the heads and queries of the layout if the call packs heads that share a key head.
    pub(crate) fn into_given(self, packed: Option<[usize; 2]>) -> KnownOutput<Dispatch> {
        // The fields are public, so they may belong to a graph again.
        let Self { mut out, mut lse } = Self::new(self.out, self.lse);
        if let Some([heads, seq_q]) = packed {
            let [batch, .., value_dim] = out.dims();
            out = out.reshape([batch, heads, seq_q, value_dim]);
            lse = lse.reshape([batch, heads, seq_q]);
        }
        KnownOutput {
            out: out.into_dispatch(),
            lse: lse.into_dispatch(),
        }
    }
}
