//! Tables of cases as text: a row a line, with its columns between bars; what a row has other than the rest as words with numbers.

use std::fmt::Debug;
use std::str::FromStr;

/// The columns of each row.
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

/// Words with what follows them, of `heads 4 2, sinks`.
pub fn settings(column: &'static str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let all = column
        .split(',')
        .map(str::trim)
        .filter(|text| !text.is_empty());
    all.map(|text| text.split_once(' ').unwrap_or((text, "")))
}

/// As many numbers as are asked for.
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

/// One number.
pub fn one<T: FromStr + Debug>(column: &str) -> T
where
    T::Err: Debug,
{
    let [number] = all(column);
    number
}
