//! Tensor lists and settings in the signatures of the backend trait of optimizers.

use burn::backend::ExtensionType;

use burn_blocksparse::internal::prelude::*;

/// Most tensors of a call.
pub const MOST_TENSORS: usize = 32;

/// Defines a struct of `OptFloat` fields, because the derive does not support `Vec`.
macro_rules! tensor_list {
    ($($field:ident)*) => {
        /// Up to 32 float tensors of any shapes; present ones come first.
        #[derive(ExtensionType, Clone, Debug)]
        #[extension_type(fusion: cfg(feature = "fusion"))]
        #[non_exhaustive]
        pub struct TensorList<B: Backend> {
            $(
                /// One tensor of the list.
                #[extension_type]
                pub $field: OptFloat<B>,
            )*
        }

        impl<B: Backend> TensorList<B> {
            /// Returns a list of at most 32 `tensors`.
            pub fn new(tensors: impl IntoIterator<Item = FloatTensor<B>>) -> Self {
                let mut tensors = tensors.into_iter();
                $(let $field = tensors.next().into();)*
                assert!(tensors.next().is_none(), "a list has at most {MOST_TENSORS} tensors");
                Self { $($field,)* }
            }

            /// Returns the tensors that are present.
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
    /// β₁ and β₂: decay of the moments.
    pub betas: [f64; 2],
    /// ε, added to the root of the second moment.
    pub epsilon: f64,
    /// λ: parameters are multiplied by `1 − η λ`.
    pub weight_decay: f64,
}

impl AdamWHyper {
    /// Returns hyperparameters β₁ and β₂, ε and λ.
    pub fn new(betas: [f64; 2], epsilon: f64, weight_decay: f64) -> Self {
        Self {
            betas,
            epsilon,
            weight_decay,
        }
    }
}

/// Elements of a control tensor: η, 1 − β₁ᵗ, 1 − β₂ᵗ, the limit of the norm, and four reserved ones.
pub const CONTROL: usize = 8;

/// Index of the norm's limit in a control tensor.
pub const LIMIT: usize = 3;

op_values! {
    /// Inputs of an AdamW step; all lists have equal length.
    pub struct AdamWInputs {
        /// Parameters.
        pub parameters: TensorList,
        /// Gradients, of the parameters' shapes.
        pub gradients: TensorList,
        /// First moments, in the dtype of sums.
        pub first: TensorList,
        /// Second moments, in the dtype of sums.
        pub second: TensorList,
        /// Factor of the gradients, `[1]`, in the dtype of sums. None: 1.
        pub factor: OptFloat,
    }

    /// Output of an AdamW step, each of its input's shape and dtype.
    pub struct AdamWOutput {
        /// Parameters.
        pub parameters: TensorList,
        /// First moments.
        pub first: TensorList,
        /// Second moments.
        pub second: TensorList,
    }

    /// Norm over many tensors, and the factor that clips it.
    pub struct GradNorm {
        /// Norm, `[1]`.
        pub norm: FloatTensor,
        /// Factor `min(1, limit / norm)`, `[1]`.
        pub factor: FloatTensor,
    }
}

impl<B: Backend> AdamWInputs<B> {
    /// Builds inputs from parameters, gradients, first and second moments, and the factor of the gradients.
    pub(crate) fn of_lists(lists: [Vec<FloatTensor<B>>; 4], factor: OptFloat<B>) -> Self {
        let [parameters, gradients, first, second] = lists.map(TensorList::new);
        Self {
            parameters,
            gradients,
            first,
            second,
            factor,
        }
    }

    /// The inverse of [`Self::of_lists`].
    pub(crate) fn into_lists(self) -> ([Vec<FloatTensor<B>>; 4], OptFloat<B>) {
        let lists = [self.parameters, self.gradients, self.first, self.second];
        (lists.map(TensorList::into_vec), self.factor)
    }
}

impl<B: Backend> AdamWOutput<B> {
    /// Builds an output from parameters, first and second moments.
    pub(crate) fn of_lists(lists: [Vec<FloatTensor<B>>; 3]) -> Self {
        let [parameters, first, second] = lists.map(TensorList::new);
        Self {
            parameters,
            first,
            second,
        }
    }
}
