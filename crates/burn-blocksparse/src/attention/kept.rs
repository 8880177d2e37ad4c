//! What is kept of a call of attention.

use crate::base::prelude::*;
use crate::base::values::KnownOutput;
use crate::check::same_device;
use crate::options::{AttentionOptions, WeightsMode};

/// Tensors that [`run_with_residuals`](crate::SparseAttentionCall::run_with_residuals) stores of a call for
/// [`run_from_residuals`](crate::SparseAttentionCall::run_from_residuals): output and lse **before sinks**, without autodiff.
///
/// Without sinks they are what [`SparseAttentionCall`](crate::SparseAttentionCall) returns. With sinks the backward pass needs those of the keys alone,
/// and they cannot be had back from the output, so that [`new`](Self::new) must not be given what
/// [`SparseAttentionCall`](crate::SparseAttentionCall) returns with sinks.
#[derive(Clone, Debug)]
#[must_use]
#[non_exhaustive]
pub struct AttentionResiduals {
    /// `[batch, heads, seq_q, value_dim]`, in the dtype of q, k and v.
    pub out: Tensor<4>,
    /// `[batch, heads, seq_q]`, in f32 (f64 for f64 inputs).
    pub lse: Tensor<3>,
}

/// That a call with these options returns nothing but what is kept.
pub(super) fn check_options(options: &AttentionOptions) -> Result<(), OpError> {
    blocksparse::ensure! {
        OpError;
        options.weights != WeightsMode::Store => "options.weights", "Recompute where the output is kept", "Store";
        !options.max_scores => "options.max_scores", "false where the output is kept", true;
    }
    Ok(())
}

impl AttentionResiduals {
    /// Output and lse before sinks. What autodiff knows of them is dropped.
    pub fn new(out: Tensor<4>, lse: Tensor<3>) -> Self {
        Self {
            out: out.without_autodiff(),
            lse: lse.without_autodiff(),
        }
    }

    /// That a call with these options, whose other arguments were checked, can take it.
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

    /// As backends take it; with the heads and queries of the layout that the call runs over, if heads that share a key head are one there.
    pub(crate) fn into_given(self, packed: Option<[usize; 2]>) -> KnownOutput<Dispatch> {
        // The fields are public, so that they may be of a graph again.
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
