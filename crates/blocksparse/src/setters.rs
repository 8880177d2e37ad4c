/// Defines setters of a builder from a doc comment and `name: Type`. A setter sets the field with its name, or another field if written as `name => field` or
/// `name => part.field`. `Some(Type)` stands for an optional field of that type.
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
