//! Lifts functions of one lane to functions of all lanes, and dispatches on the types that an instruction names.

macro_rules! lanes {
    (|$a:ident| $value:expr) => {
        lanes!(One $a; $value)
    };
    (|$a:ident, $b:ident| $value:expr) => {
        lanes!(Two $a $b; $value)
    };
    (|$a:ident, $b:ident, $c:ident| $value:expr) => {
        lanes!(Three $a $b $c; $value)
    };
    (|$a:ident, $b:ident, $c:ident, $d:ident| $value:expr) => {
        lanes!(Four $a $b $c $d; $value)
    };
    ($arguments:ident $($x:ident)+; $value:expr) => {
        $crate::ptx::Pure::$arguments(|$($x),+| {
            std::array::from_fn(|lane| {
                $(let $x = $x[lane];)+
                $value
            })
        })
    };
}
/// Evaluates `$body` with `$T` as the type whose pattern matches.
macro_rules! by_type {
    ($kind:expr, $T:ident => $body:expr, $($pattern:pat => $type:ty;)*) => {
        match $kind {
            $(
                $pattern => {
                    type $T = $type;
                    $body
                }
            )*
            _ => return None,
        }
    };
}
/// Evaluates `$body` with `$T` as the integer type.
macro_rules! by_integer {
    ($kind:expr, $T:ident => $body:expr) => {
        by_type! {
            $kind, $T => $body,
            Type::Signed(8) => i8;
            Type::Signed(16) => i16;
            Type::Signed(32) => i32;
            Type::Signed(64) => i64;
            Type::Unsigned(8) | Type::Bits(8) => u8;
            Type::Unsigned(16) | Type::Bits(16) => u16;
            Type::Unsigned(32) | Type::Bits(32) => u32;
            Type::Unsigned(64) | Type::Bits(64) => u64;
        }
    };
}
/// Evaluates `$body` with `$T` as the [`Float`](super::numbers::Float) of a type and a rounding mode.
macro_rules! by_float {
    ($kind:expr, $T:ident => $body:expr) => {
        by_type! {
            $kind, $T => $body,
            (Type::F64, _) => F64;
            (Type::F16, _) => F16;
            (Type::BF16, _) => BF16;
            (Type::F32, Rounding::Nearest) => F32;
            (Type::F32, Rounding::Zero) => F32Zero;
            (Type::F32, Rounding::Down) => F32Down;
            (Type::F32, Rounding::Up) => F32Up;
            (Type::F32, Rounding::Saturated) => F32Saturated;
        }
    };
}

pub(crate) use lanes;
pub(super) use {by_float, by_integer, by_type};
