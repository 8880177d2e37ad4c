//! The values that cross the backend trait of gates.

#[cfg(feature = "autodiff")]
use burn::backend::{Backend, tensor::FloatTensor};
use burn_blocksparse::internal::values::{OptFloat, ThreeFloats};
use burn_blocksparse::op_values;

/// Most branches, as many as [`ThreeFloats`] has.
pub const MOST_BRANCHES: usize = 3;

op_values! {
    /// Branches and gates of a gated sum.
    pub struct GatedInputs {
        /// `[batch, heads, seq, width]` each, one of them at least.
        pub branches: ThreeFloats,
        /// `[batch, heads, seq, 3]`, of any float dtype.
        pub gates: FloatTensor,
    }
}

#[cfg(feature = "autodiff")]
impl<B: Backend> GatedInputs<B> {
    /// The branches and the gates.
    pub fn into_list(self) -> [Option<FloatTensor<B>>; MOST_BRANCHES + 1] {
        let [first, second, third] = self.branches.into_list();
        [first, second, third, Some(self.gates)]
    }

    /// The inverse of [`Self::into_list`].
    pub fn of_list(list: [Option<FloatTensor<B>>; MOST_BRANCHES + 1]) -> Self {
        let [first, second, third, gates] = list;
        Self {
            branches: ThreeFloats::of_list([first, second, third]),
            gates: gates.expect("gates"),
        }
    }
}

op_values! {
    /// Tensors saved for the backward pass.
    pub struct GatedSaved {
        /// As they came.
        pub inputs: GatedInputs,
        /// By the result.
        pub grad: FloatTensor,
    }

    /// Gradients, each of its input's shape and dtype, if it is wanted.
    pub struct GatedGrads {
        /// Of the branches that are there.
        pub branches: ThreeFloats,
        /// `[batch, heads, seq, 3]`, 0 for branches that are not there.
        pub gates: OptFloat,
    }
}

/// Gradients that the backward pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GatedTask {
    /// The branches whose gradients are wanted.
    pub branches: [bool; MOST_BRANCHES],
    /// True if the gates' is.
    pub gates: bool,
}
