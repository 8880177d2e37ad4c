//! Macros for code that all ops share.

/// Implements a backend trait with its default bodies, the reference, for Burn's backends without kernels.
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

/// Implements list conversions for a struct of float tensors. The list has the required tensors, then the optional ones.
#[doc(hidden)]
#[macro_export]
macro_rules! float_list {
    ($name:ident, $count:literal: $($always:ident)*; $($maybe:ident)*) => {
        impl<B: burn::backend::Backend> $name<B> {
            /// Returns the tensors as a list.
            pub fn into_list(self) -> [Option<burn::backend::tensor::FloatTensor<B>>; $count] {
                [$(Some(self.$always),)* $(self.$maybe.into_option(),)*]
            }

            /// Inverts [`Self::into_list`].
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

/// Defines structs of tensors that are passed through a backend trait. A field that is not a tensor, such as an
/// [`OptFloat`](crate::internal::values::OptFloat), is itself such a struct or enum.
#[doc(hidden)]
#[macro_export]
macro_rules! op_values {
    // Field by field, because a tensor field has no attribute.
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
