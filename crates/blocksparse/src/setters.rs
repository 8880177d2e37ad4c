/// Setters of a builder, each of its documentation and `name: Type`: it sets the field of that name, or with `name => field` or `name => part.field`
/// another. `Some(Type)` is the type of a field that is optional.
#[doc(hidden)]
#[macro_export]
macro_rules! setters {
    (@ [$($doc:tt)*] $name:ident $value:ident [$($field:ident).+] Some($type:ty), $($rest:tt)*) => {
        $($doc)*
        pub fn $name(mut self, $value: $type) -> Self {
            self.$($field).+ = Some($value);
            self
        }

        $crate::setters! { $($rest)* }
    };
    (@ [$($doc:tt)*] $name:ident $value:ident [$($field:ident).+] $type:ty, $($rest:tt)*) => {
        $($doc)*
        pub fn $name(mut self, $value: $type) -> Self {
            self.$($field).+ = $value;
            self
        }

        $crate::setters! { $($rest)* }
    };
    ($(#[$doc:meta])* $name:ident => $part:ident.$field:ident: $($rest:tt)*) => {
        $crate::setters! { @ [$(#[$doc])*] $name $field [$part.$field] $($rest)* }
    };
    ($(#[$doc:meta])* $name:ident => $field:ident: $($rest:tt)*) => {
        $crate::setters! { @ [$(#[$doc])*] $name $field [$field] $($rest)* }
    };
    ($(#[$doc:meta])* $name:ident: $($rest:tt)*) => {
        $crate::setters! { @ [$(#[$doc])*] $name $name [$name] $($rest)* }
    };
    () => {};
}
