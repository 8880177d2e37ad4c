//! Numbers of heads by content as text.

use std::{fmt, iter};

/// What a text begins with: a name, and numbers.
pub(crate) fn write_numbers(
    f: &mut fmt::Formatter<'_>,
    name: &str,
    numbers: impl IntoIterator<Item = usize>,
) -> fmt::Result {
    f.write_str(name)?;
    (numbers
        .into_iter()
        .zip(iter::once(':').chain(iter::repeat(','))))
    .try_for_each(|(number, before)| write!(f, "{before}{number}"))
}

/// The numbers that are read, if they all are numbers.
pub(crate) fn read_numbers(texts: &[&str]) -> Option<Vec<usize>> {
    texts.iter().map(|text| text.parse().ok()).collect()
}
