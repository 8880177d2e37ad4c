//! Properties of patterns beyond [`Pattern::NOTATION`].

use burn_blocksparse::Pattern;

/// Returns the stride of the first strided or fixed part: the natural width of the position matrix (§5.3).
pub fn stride(pattern: &Pattern) -> Option<usize> {
    find(pattern, |part| match part {
        &Pattern::Strided { stride } | &Pattern::Fixed { stride, .. } => Some(stride),
        _ => None,
    })
}

/// Returns whether a callback decides some pairs. Such a pattern is not known to be causal.
pub fn has_callback(pattern: &Pattern) -> bool {
    find(pattern, |part| {
        matches!(part, Pattern::FromFn(_)).then_some(())
    })
    .is_some()
}

/// Returns the first result of `of` over the parts.
fn find<T>(pattern: &Pattern, of: fn(&Pattern) -> Option<T>) -> Option<T> {
    match pattern {
        Pattern::Union(parts) | Pattern::Intersection(parts) | Pattern::PerHead(parts) => {
            parts.iter().find_map(|part| find(part, of))
        }
        Pattern::Packed { pattern, .. } => find(pattern, of),
        part => of(part),
    }
}

/// Returns the text of a pattern without pairs of later positions.
pub fn causal_part(text: &str) -> String {
    match text.contains(['+', '/']) {
        true => format!("({text})&causal"),
        false => format!("{text}&causal"),
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
