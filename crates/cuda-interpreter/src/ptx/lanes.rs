//! Functions of one lane's registers, as functions of all lanes.

macro_rules! one {
    (|$a:ident| $value:expr) => {
        Pure::One(|a| {
            std::array::from_fn(|lane| {
                let $a = a[lane];
                $value
            })
        })
    };
}
macro_rules! two {
    (|$a:ident, $b:ident| $value:expr) => {
        Pure::Two(|a, b| {
            std::array::from_fn(|lane| {
                let ($a, $b) = (a[lane], b[lane]);
                $value
            })
        })
    };
}
macro_rules! three {
    (|$a:ident, $b:ident, $c:ident| $value:expr) => {
        Pure::Three(|a, b, c| {
            std::array::from_fn(|lane| {
                let ($a, $b, $c) = (a[lane], b[lane], c[lane]);
                $value
            })
        })
    };
}
macro_rules! four {
    (|$a:ident, $b:ident, $c:ident, $d:ident| $value:expr) => {
        Pure::Four(|a, b, c, d| {
            std::array::from_fn(|lane| {
                let ($a, $b, $c, $d) = (a[lane], b[lane], c[lane], d[lane]);
                $value
            })
        })
    };
}
/// `$body` with `$T` the integer that a type is.
macro_rules! by_integer {
    ($kind:expr, $T:ident => $body:expr) => {
        match $kind {
            Type::Signed(16) => {
                type $T = i16;
                $body
            }
            Type::Signed(32) => {
                type $T = i32;
                $body
            }
            Type::Signed(64) => {
                type $T = i64;
                $body
            }
            Type::Unsigned(16) | Type::Bits(16) => {
                type $T = u16;
                $body
            }
            Type::Unsigned(32) | Type::Bits(32) => {
                type $T = u32;
                $body
            }
            Type::Unsigned(64) | Type::Bits(64) => {
                type $T = u64;
                $body
            }
            _ => return None,
        }
    };
}

pub(super) use {by_integer, four, one, three, two};
