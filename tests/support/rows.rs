//! Tables of cases as text: one row per line, columns separated by bars. Settings that differ from the default case are words followed by numbers.

use std::fmt::Debug;
use std::str::FromStr;

/// Returns the columns of each row.
pub fn rows<const N: usize>(table: &'static str) -> Vec<[&'static str; N]> {
    let lines = table.lines().map(str::trim);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let columns = |line: &'static str| {
        let columns: Vec<&str> = line.split('|').map(str::trim).collect();
        columns
            .try_into()
            .unwrap_or_else(|_| panic!("a row of {N} columns: {line}"))
    };
    lines.map(columns).collect()
}

/// Splits settings like `heads 4 2, sinks` into words and their numbers.
pub fn settings(column: &'static str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let all = column
        .split(',')
        .map(str::trim)
        .filter(|text| !text.is_empty());
    all.map(|text| text.split_once(' ').unwrap_or((text, "")))
}

/// Parses exactly `N` numbers.
pub fn all<T: FromStr + Debug, const N: usize>(column: &str) -> [T; N]
where
    T::Err: Debug,
{
    let numbers = column
        .split_whitespace()
        .map(|number| number.parse().unwrap());
    let numbers: Vec<T> = numbers.collect();
    numbers
        .try_into()
        .unwrap_or_else(|_| panic!("{N} numbers: {column}"))
}

pub fn one<T: FromStr + Debug>(column: &str) -> T
where
    T::Err: Debug,
{
    let [number] = all(column);
    number
}
