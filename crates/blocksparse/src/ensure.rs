/// Rows of what arguments of a call must be, of a type of errors with a constructor `argument`: a condition, the argument's name, what is expected and what came.
/// The first condition that does not hold ends the call with that error.
#[doc(hidden)]
#[macro_export]
macro_rules! ensure {
    ($error:ty; $($holds:expr => $argument:expr, $expected:expr, $got:expr;)+) => {{
        $(
            match $holds {
                true => {}
                false => return Err(<$error>::argument($argument, $expected, $got)),
            }
        )+
    }};
}
