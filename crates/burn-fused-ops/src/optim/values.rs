//! The lists of tensors and the settings that cross backends of optimizers.

use burn::backend::ExtensionType;

use burn_blocksparse::internal::prelude::*;

/// Most tensors of a call.
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
    /// Of β₁ and β₂, ε and λ.
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

op_values! {
    /// Inputs of an AdamW step: as many tensors in each list.
    pub struct AdamWInputs {
        /// The parameters.
        pub parameters: TensorList,
        /// Their gradients, of the same shapes.
        pub gradients: TensorList,
        /// Their first moments, in the dtype of sums.
        pub first: TensorList,
        /// Their second moments, in the dtype of sums.
        pub second: TensorList,
        /// `[1]`, in the dtype of sums: what gradients are multiplied by. None: 1.
        pub factor: OptFloat,
    }

    /// Output of an AdamW step, each of the shape and dtype that it came in.
    pub struct AdamWOutput {
        /// The parameters.
        pub parameters: TensorList,
        /// The first moments.
        pub first: TensorList,
        /// The second moments.
        pub second: TensorList,
    }

    /// The norm over many tensors, and what scales them to a limit.
    pub struct GradNorm {
        /// `[1]`: the norm.
        pub norm: FloatTensor,
        /// `[1]`: `min(1, limit / norm)`.
        pub factor: FloatTensor,
    }
}

impl<B: Backend> AdamWInputs<B> {
    /// Of parameters, gradients, first and second moments, and the factor of the gradients.
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
    /// Of parameters and both moments.
    pub(crate) fn of_lists(lists: [Vec<FloatTensor<B>>; 3]) -> Self {
        let [parameters, first, second] = lists.map(TensorList::new);
        Self {
            parameters,
            first,
            second,
        }
    }
}
