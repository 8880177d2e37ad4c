//! What every op writes the same.

/// Runs the default bodies of a backend trait, the reference, on Burn's backends without kernels.
#[doc(hidden)]
#[macro_export]
macro_rules! reference_backends {
    ($ops:ident) => {
        #[cfg(feature = "flex")]
        impl $ops for burn::backend::Flex {}

        #[cfg(feature = "ndarray")]
        impl $ops for burn::backend::NdArray {}
    };
}

/// Gives a struct of float tensors its list of them: those that there always are, then those that may be missing.
#[doc(hidden)]
#[macro_export]
macro_rules! float_list {
    ($name:ident, $count:literal: $($always:ident)*; $($maybe:ident)*) => {
        impl<B: burn::backend::Backend> $name<B> {
            /// The tensors, as far as there are.
            pub fn into_list(self) -> [Option<burn::backend::tensor::FloatTensor<B>>; $count] {
                [$(Some(self.$always),)* $(self.$maybe.into_option(),)*]
            }

            /// The inverse of [`Self::into_list`].
            pub fn of_list(list: [Option<burn::backend::tensor::FloatTensor<B>>; $count]) -> Self {
                let [$($always,)* $($maybe,)*] = list;
                Self {
                    $($always: $always.expect(stringify!($always)),)*
                    $($maybe: $maybe.into(),)*
                }
            }
        }
    };
}
