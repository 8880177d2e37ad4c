//! Text form of the numbers of content-based heads.

use std::{fmt, iter};

/// Writes a name followed by numbers.
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

/// Reads the leading numbers, and returns them with the remaining words.
pub(crate) fn read_numbers<'a, 'b>(texts: &'a [&'b str]) -> Option<(Vec<usize>, &'a [&'b str])> {
    let is_number = |text: &&&str| text.starts_with(|c: char| c.is_ascii_digit());
    let (numbers, words) = texts.split_at(texts.iter().take_while(is_number).count());
    let numbers: Option<_> = numbers.iter().map(|text| text.parse().ok()).collect();
    Some((numbers?, words))
}
