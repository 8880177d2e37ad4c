//! The values that cross the backend trait of gates.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};

use burn_blocksparse::internal::values::{OptFloat, ThreeFloats};

/// Most branches, as many as [`ThreeFloats`] has.
pub const MOST_BRANCHES: usize = 3;

/// Branches and gates of a gated sum.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct GatedInputs<B: Backend> {
    /// `[batch, heads, seq, width]` each, one of them at least.
    #[extension_type]
    pub branches: ThreeFloats<B>,
    /// `[batch, heads, seq, 3]`, of any float dtype.
    pub gates: FloatTensor<B>,
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

/// Tensors saved for the backward pass.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct GatedSaved<B: Backend> {
    /// As they came.
    #[extension_type]
    pub inputs: GatedInputs<B>,
    /// By the result.
    pub grad: FloatTensor<B>,
}

/// Gradients, each of its input's shape and dtype, if it is wanted.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct GatedGrads<B: Backend> {
    /// Of the branches that are there.
    #[extension_type]
    pub branches: ThreeFloats<B>,
    /// `[batch, heads, seq, 3]`, 0 for branches that are not there.
    #[extension_type]
    pub gates: OptFloat<B>,
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
