/// Checks the arguments of a call. Each row has a condition, the argument's name, the expected value and the actual value; `$error` has a constructor
/// `argument`. The first condition that is false returns that error.
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
