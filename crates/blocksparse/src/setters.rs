/// Setters of a builder, each of its documentation and `name: Type`: it sets the field of that name, or with `name => field` another. `Some(Type)` is the type
/// of a field that is optional.
#[doc(hidden)]
#[macro_export]
macro_rules! setters {
    (@ [$($doc:tt)*] $name:ident $field:ident: Some($type:ty), $($rest:tt)*) => {
        $($doc)*
        pub fn $name(mut self, $field: $type) -> Self {
            self.$field = Some($field);
            self
        }

        $crate::setters! { $($rest)* }
    };
    (@ [$($doc:tt)*] $name:ident $field:ident: $type:ty, $($rest:tt)*) => {
        $($doc)*
        pub fn $name(mut self, $field: $type) -> Self {
            self.$field = $field;
            self
        }

        $crate::setters! { $($rest)* }
    };
    ($(#[$doc:meta])* $name:ident => $field:ident: $($rest:tt)*) => {
        $crate::setters! { @ [$(#[$doc])*] $name $field: $($rest)* }
    };
    ($(#[$doc:meta])* $name:ident: $($rest:tt)*) => {
        $crate::setters! { @ [$(#[$doc])*] $name $name: $($rest)* }
    };
    () => {};
}
