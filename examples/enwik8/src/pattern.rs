//! What the trainer asks of patterns beyond their notation, which is [`Pattern::NOTATION`].

use burn_blocksparse::{LayoutError, Pattern};

/// Checks a pattern and hands its text back: run configurations store what the user wrote.
///
/// # Errors
/// If it cannot be read.
pub fn checked(text: &str) -> Result<String, LayoutError> {
    text.parse::<Pattern>().map(|_| text.to_owned())
}

/// The stride of the first strided or fixed part: the natural width of the position matrix (§5.3).
pub fn stride(pattern: &Pattern) -> Option<usize> {
    match pattern {
        &Pattern::Strided { stride } | &Pattern::Fixed { stride, .. } => Some(stride),
        Pattern::Union(parts) | Pattern::Intersection(parts) | Pattern::PerHead(parts) => {
            parts.iter().find_map(stride)
        }
        Pattern::Packed { pattern, .. } => stride(pattern),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Pattern {
        text.parse().unwrap()
    }

    #[test]
    fn strides() {
        for (text, expected) in [
            ("fixed:64,16", Some(64)),
            ("local:32+strided:16", Some(16)),
            ("merged-strided:8", Some(8)),
            ("packed:0,40(causal&fixed:32,4)", Some(32)),
            ("causal", None),
            ("deepspeed-fixed:32,8,2&causal", None),
        ] {
            assert_eq!(stride(&parse(text)), expected, "{text}");
        }
    }
}
