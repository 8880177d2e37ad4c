use std::fmt;

use burn_blocksparse::Pattern;
use serde::{Deserialize, Serialize};

use crate::error::{Result, ensure};

/// Factorisation of attention into `p` patterns (Child et al., 2019, §4.2).
///
/// ```
/// use burn_sparse_transformer::{Factorization, Pattern};
///
/// let patterns = vec![Pattern::local(128), Pattern::strided(128)];
/// let interleaved = Factorization::Interleaved(patterns.clone());
/// assert_eq!(interleaved.pattern(3)?, Pattern::strided(128));
/// let merged = Factorization::Merged(patterns);
/// assert_eq!(merged.to_string(), "merged(local(128), strided(128))");
/// assert_eq!(Factorization::from(Pattern::causal()).to_string(), "causal");
/// # Ok::<(), burn_sparse_transformer::TransformerError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Factorization {
    /// Layer `r` uses pattern `r mod p`: one kind of attention per block.
    Interleaved(Vec<Pattern>),
    /// Every head attends to the union of the patterns, in one softmax.
    Merged(Vec<Pattern>),
    /// Head `h` uses pattern `h mod p`; the heads are combined by the output projection.
    MultiHead(Vec<Pattern>),
}

impl Factorization {
    /// Returns the `p` patterns.
    pub fn patterns(&self) -> &[Pattern] {
        let (Self::Interleaved(patterns) | Self::Merged(patterns) | Self::MultiHead(patterns)) =
            self;
        patterns
    }

    /// Returns the pattern of layer `layer`, counted from 0.
    ///
    /// # Errors
    /// If there are no patterns.
    pub fn pattern(&self, layer: usize) -> Result<Pattern> {
        let patterns = self.patterns();
        ensure! { !patterns.is_empty() => "factorization", "at least one pattern", "none"; }
        Ok(match self {
            Self::Interleaved(_) => patterns[layer % patterns.len()].clone(),
            _ if patterns.len() == 1 => patterns[0].clone(),
            Self::Merged(_) => Pattern::union(patterns.iter().cloned()),
            Self::MultiHead(_) => Pattern::per_head(patterns.iter().cloned()),
        })
    }
}

/// One pattern for all layers and heads.
impl From<Pattern> for Factorization {
    fn from(pattern: Pattern) -> Self {
        Self::Merged(vec![pattern])
    }
}

/// A single pattern prints as itself: all layers and heads use it, however patterns would be combined.
impl fmt::Display for Factorization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let [pattern] = self.patterns() {
            return pattern.fmt(f);
        }
        let name = match self {
            Self::Interleaved(_) => "interleaved",
            Self::Merged(_) => "merged",
            Self::MultiHead(_) => "multi_head",
        };
        let patterns: Vec<String> = self.patterns().iter().map(Pattern::to_string).collect();
        write!(f, "{name}({})", patterns.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_pattern_is_itself_and_none_is_an_error() {
        let one = Factorization::from(Pattern::fixed(128, 32));
        assert_eq!(one.pattern(3).unwrap(), Pattern::fixed(128, 32));
        let error = Factorization::MultiHead(vec![]).pattern(0).unwrap_err();
        assert_eq!(
            error.to_string(),
            "factorization must be at least one pattern, got none"
        );
    }
}
