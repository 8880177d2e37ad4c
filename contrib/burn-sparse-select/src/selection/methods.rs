//! The table of methods, and the parser of selections.

use std::str::FromStr;

use crate::selection::text::{Arguments, Method};
use crate::selection::{Selection, antidiagonal, flex, mean, moba, quest, sparge, vertical_slash};
use burn_blocksparse::OpError;

/// All methods. A new method adds a row here.
pub(crate) const METHODS: &[Method] = &[
    mean::METHOD,
    moba::METHOD,
    quest::METHOD,
    antidiagonal::METHOD,
    sparge::METHOD,
    flex::METHOD,
    vertical_slash::METHOD,
];

/// Notation of each method.
pub(crate) const NOTATION: &[&str] = &{
    let mut notation = [""; METHODS.len()];
    let mut method = 0;
    while method < METHODS.len() {
        notation[method] = METHODS[method].notation;
        method += 1;
    }
    notation
};

impl FromStr for Selection {
    type Err = OpError;

    fn from_str(text: &str) -> Result<Self, OpError> {
        let text = text.trim();
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        let found = METHODS.iter().find(|method| method.name == name.trim());
        let method = found.ok_or_else(|| OpError::Selection {
            text: text.to_owned(),
            expected: NOTATION.join(" or "),
            got: format!("'{name}'"),
        })?;
        let mut arguments = Arguments::new(text, rest, method.notation);
        let sharing = arguments.gqa_reduction()?;
        let mut selection = (method.read)(&mut arguments)?;
        arguments.end()?;
        if let Some(sharing) = sharing {
            selection = selection.with_gqa_reduction(sharing);
        }
        selection.check()?;
        Ok(selection)
    }
}
