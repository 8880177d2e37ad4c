//! Device-specific code: PTX and planes of 32 units.

/// Defines functions of one PTX text each. In the text, `{o}` is the result and other names are arguments; those after `;` are known when the kernel is
/// compiled. A text `with` an expression inserts that as `{body}`, built from those arguments and the numbers of elements of vectors.
macro_rules! instructions {
    () => {};
    (
        $(#[$of:meta])* $visible:vis fn $name:ident($($x:ident: $X:ty),* $(; $($c:ident: $C:ty),+)?) -> $O:ty =
            $text:tt $(, options($($option:ident),+))?;
        $($more:tt)*
    ) => {
        $(#[$of])*
        #[cube]
        $visible fn $name($($x: $X,)* $($(#[comptime] $c: $C,)+)?) -> $O {
            let o: $O;
            gpu_asm!($text, o = out(_) o $(, $x = in(_) $crate::arch::ptx::val::<$X>($x))*
                $($(, $c = const $c)+)? $(, options($($option),+))?);
            o
        }
        instructions! { $($more)* }
    };
    (
        $(#[$of:meta])* $visible:vis fn $name:ident($($x:ident: $X:ty),* $(; $($c:ident: $C:ty),+)?) = $text:tt;
        $($more:tt)*
    ) => {
        $(#[$of])*
        #[cube]
        $visible fn $name($($x: $X,)* $($(#[comptime] $c: $C,)+)?) {
            gpu_asm!($text $(, $x = in(_) $crate::arch::ptx::val::<$X>($x))* $($(, $c = const $c)+)?);
        }
        instructions! { $($more)* }
    };
    (
        $(#[$of:meta])* $visible:vis fn $name:ident$(<$($G:ident = $size:ident),+>)?($($x:ident: $X:ty),* $(; $($c:ident: $C:ty),+)?) -> $O:ty =
            $text:tt with $body:expr $(, options($($option:ident),+))?;
        $($more:tt)*
    ) => {
        $(#[$of])*
        #[cube]
        $visible fn $name$(<$($G: Size),+>)?($($x: $X,)* $($(#[comptime] $c: $C,)+)?) -> $O {
            $($(let $size = $G::value();)+)?
            let o: $O;
            gpu_asm!($text, body = const $body, o = out(_) o $(, $x = in(_) $crate::arch::ptx::val::<$X>($x))*
                $(, options($($option),+))?);
            o
        }
        instructions! { $($more)* }
    };
    (
        $(#[$of:meta])* $visible:vis fn $name:ident<$($G:ident = $size:ident),+>($($x:ident: $X:ty),* $(; $($c:ident: $C:ty),+)?) =
            $text:tt with $body:expr;
        $($more:tt)*
    ) => {
        $(#[$of])*
        #[cube]
        $visible fn $name<$($G: Size),+>($($x: $X,)* $($(#[comptime] $c: $C,)+)?) {
            $(let $size = $G::value();)+
            gpu_asm!($text, body = const $body $(, $x = in(_) $crate::arch::ptx::val::<$X>($x))*);
        }
        instructions! { $($more)* }
    };
}
pub(crate) use instructions;

#[doc(hidden)]
pub mod ptx;
#[doc(hidden)]
pub mod sm80;
#[doc(hidden)]
pub mod sm90;
#[doc(hidden)]
pub mod swizzled;
#[doc(hidden)]
pub mod tma;

#[doc(hidden)]
pub mod planes;

use cubecl::prelude::*;

/// Vector width of shared memory accesses.
pub type Four = Const<4>;
