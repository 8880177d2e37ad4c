//! Calls that are refused, each with its expected message.

use std::fmt::Display;

/// Panics unless a call is refused with this message, in which `…` at the beginning or end stands for any text.
#[track_caller]
pub fn assert_refused<T, E: Display>(result: Result<T, E>, message: impl AsRef<str>) {
    let message = message.as_ref();
    let Err(error) = result else {
        panic!("not refused: {message}");
    };
    let (error, part) = (error.to_string(), message.trim_matches('…'));
    let says_so = match (message.starts_with('…'), message.ends_with('…')) {
        (false, false) => error == part,
        (false, true) => error.starts_with(part),
        (true, false) => error.ends_with(part),
        (true, true) => error.contains(part),
    };
    assert!(says_so, "'{error}' is not '{message}'");
}

/// `refused! { call => message; }`, for any number of calls.
#[macro_export]
macro_rules! refused {
    ($($call:expr => $message:expr;)+) => {
        $($crate::refused::assert_refused($call, $message);)+
    };
}
