//! The backend trait of optimizers' steps, and the lists of tensors that cross it.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType, backend_extension};

use crate::optim::reference;
use burn_blocksparse::internal::values::OptFloat;
use burn_blocksparse::reference_backends;

/// How many tensors a call has, at most.
pub const MOST_TENSORS: usize = 32;

/// A struct of `OptFloat` fields, because the derive maps no `Vec`.
macro_rules! tensor_list {
    ($($field:ident)*) => {
        /// Up to 32 float tensors of any shapes, those that there are in front.
        #[derive(ExtensionType, Clone, Debug)]
        #[extension_type(fusion: cfg(feature = "fusion"))]
        #[non_exhaustive]
        pub struct TensorList<B: Backend> {
            $(
                /// One of them.
                #[extension_type]
                pub $field: OptFloat<B>,
            )*
        }

        impl<B: Backend> TensorList<B> {
            /// The list of `tensors`, of which there are at most 32.
            pub fn new(tensors: impl IntoIterator<Item = FloatTensor<B>>) -> Self {
                let mut tensors = tensors.into_iter();
                $(let $field = tensors.next().into();)*
                assert!(tensors.next().is_none(), "a list has at most {MOST_TENSORS} tensors");
                Self { $($field,)* }
            }

            /// The tensors that there are.
            pub fn into_vec(self) -> Vec<FloatTensor<B>> {
                let tensors = [$(self.$field.into_option(),)*];
                tensors.into_iter().flatten().collect()
            }
        }
    };
}

tensor_list!(t0 t1 t2 t3 t4 t5 t6 t7 t8 t9 t10 t11 t12 t13 t14 t15 t16 t17 t18 t19 t20 t21 t22 t23 t24 t25 t26 t27 t28 t29 t30 t31);

/// Hyperparameters of AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct AdamWHyper {
    /// β₁ and β₂: how much is retained of the moments.
    pub betas: [f64; 2],
    /// ε, added to the root of the second moment.
    pub epsilon: f64,
    /// λ: parameters are multiplied by `1 − η λ`.
    pub weight_decay: f64,
}

impl AdamWHyper {
    pub fn new(betas: [f64; 2], epsilon: f64, weight_decay: f64) -> Self {
        Self {
            betas,
            epsilon,
            weight_decay,
        }
    }
}

/// Elements of a control tensor: η, 1 − β₁ᵗ, 1 − β₂ᵗ, the limit of the norm, and four that are kept for later.
pub const CONTROL: usize = 8;

/// The limit's element of a control tensor.
pub const LIMIT: usize = 3;

/// What AdamW's step reads and writes: as many tensors in each list.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct AdamWInputs<B: Backend> {
    /// The parameters.
    #[extension_type]
    pub parameters: TensorList<B>,
    /// Their gradients, of the same shapes.
    #[extension_type]
    pub gradients: TensorList<B>,
    /// Their first moments, in the dtype of sums.
    #[extension_type]
    pub first: TensorList<B>,
    /// Their second moments, in the dtype of sums.
    #[extension_type]
    pub second: TensorList<B>,
    /// `[1]`, in the dtype of sums: what gradients are multiplied by. None: 1.
    #[extension_type]
    pub factor: OptFloat<B>,
}

/// What AdamW's step returns, each of the shape and dtype that it came in.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct AdamWOutput<B: Backend> {
    /// The parameters.
    #[extension_type]
    pub parameters: TensorList<B>,
    /// The first moments.
    #[extension_type]
    pub first: TensorList<B>,
    /// The second moments.
    #[extension_type]
    pub second: TensorList<B>,
}

/// The norm over many tensors, and what scales them to a limit.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct GradNorm<B: Backend> {
    /// `[1]`: the norm.
    pub norm: FloatTensor<B>,
    /// `[1]`: `min(1, limit / norm)`.
    pub factor: FloatTensor<B>,
}

/// Steps of optimizers as backend operations, on tensors that are not on an autodiff device. Arguments are checked by the public functions. A backend
/// writes in place what the call alone holds, and otherwise to tensors of its own.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait OptimOps: Backend {
    /// Writes sums of squares of the tensors into `partials`, from element `first` on: one for each 8,192 elements of a tensor. The dtype of
    /// `partials` is that of the sums. One that overflows is negative, and of numbers that are multiplied by 2⁻⁹⁶ first, or 2⁻⁷⁶⁸ in f64.
    #[fusion(dtype = partials, shape = partials)]
    fn sum_of_squares(
        #[extension_type] tensors: TensorList<Self>,
        partials: FloatTensor<Self>,
        first: usize,
    ) -> FloatTensor<Self> {
        reference::sum_of_squares::<Self>(tensors, partials, first, true)
    }

    /// The norm of what has `partials` as its sums of squares, and the factor that clips it to the limit in `control`, of the same dtype.
    #[fusion(meta = meta::clip_factor)]
    fn clip_factor(partials: FloatTensor<Self>, control: FloatTensor<Self>) -> GradNorm<Self> {
        reference::clip_factor::<Self>(partials, control)
    }

    /// A step of AdamW; `control` is `[8]`, in the dtype of sums.
    #[fusion(meta = meta::adamw)]
    fn adamw(
        #[extension_type] inputs: AdamWInputs<Self>,
        control: FloatTensor<Self>,
        numbers: AdamWHyper,
    ) -> AdamWOutput<Self> {
        reference::adamw::<Self>(inputs, control, numbers)
    }

    /// The tensors multiplied by `factor`, `[1]`, in the dtype of their sums.
    #[fusion(meta = |tensors, _factor| tensors.clone())]
    fn scale(
        #[extension_type] tensors: TensorList<Self>,
        factor: FloatTensor<Self>,
    ) -> TensorList<Self> {
        reference::scale::<Self>(tensors, factor)
    }
}

reference_backends!(OptimOps);

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;

    pub fn clip_factor(partials: &TensorSpec, _control: &TensorSpec) -> GradNormMetadata {
        let one = TensorSpec::new([1].into(), partials.dtype);
        GradNormMetadata {
            norm: one.clone(),
            factor: one,
        }
    }

    pub fn adamw(
        inputs: &AdamWInputsMetadata,
        _control: &TensorSpec,
        _numbers: &AdamWHyper,
    ) -> AdamWOutputMetadata {
        AdamWOutputMetadata {
            parameters: inputs.parameters.clone(),
            first: inputs.first.clone(),
            second: inputs.second.clone(),
        }
    }
}
