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

/// Structs of tensors that cross a backend trait. Fields that are no tensor themselves, as an [`OptFloat`](crate::internal::values::OptFloat), are values
/// of the same kind.
#[doc(hidden)]
#[macro_export]
macro_rules! op_values {
    // Field by field, since a tensor's has no attribute.
    (@ $head:tt { $($done:tt)* } $(#[$doc:meta])* pub $field:ident: FloatTensor, $($rest:tt)*) => {
        $crate::op_values! { @ $head { $($done)* $(#[$doc])* pub $field: burn::backend::tensor::FloatTensor<B>, } $($rest)* }
    };
    (@ $head:tt { $($done:tt)* } $(#[$doc:meta])* pub $field:ident: IntTensor, $($rest:tt)*) => {
        $crate::op_values! { @ $head { $($done)* $(#[$doc])* pub $field: burn::backend::tensor::IntTensor<B>, } $($rest)* }
    };
    (@ $head:tt { $($done:tt)* } $(#[$doc:meta])* pub $field:ident: $kind:ident, $($rest:tt)*) => {
        $crate::op_values! { @ $head { $($done)* $(#[$doc])* #[extension_type] pub $field: $kind<B>, } $($rest)* }
    };
    (@ { $(#[$doc:meta])* $name:ident } { $($fields:tt)* }) => {
        $(#[$doc])*
        #[derive(burn::backend::ExtensionType, Clone, Debug)]
        #[extension_type(fusion: cfg(feature = "fusion"))]
        #[non_exhaustive]
        pub struct $name<B: burn::backend::Backend> {
            $($fields)*
        }
    };
    ($($(#[$doc:meta])* pub struct $name:ident { $($fields:tt)* })*) => {
        $($crate::op_values! { @ { $(#[$doc])* $name } {} $($fields)* })*
    };
}
