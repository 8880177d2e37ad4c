//! Periods of patterns along positions and heads.

use super::Pattern;
use crate::arith::{gcd, lcm};

impl Pattern {
    /// Returns a `p` such that shifting query and key by `p` positions changes no pair; `None` if unknown.
    pub(crate) fn shift_period(&self) -> Option<i64> {
        match self {
            Self::Dense
            | Self::Causal
            | Self::Local { .. }
            | Self::Strided { .. }
            | Self::Window { .. } => Some(1),
            Self::Fixed { stride, .. }
            | Self::Columns { stride, .. }
            | Self::Rows { stride, .. }
            | Self::Chunked { size: stride, .. } => Some(*stride as i64),
            Self::Union(parts) | Self::Intersection(parts) | Self::PerHead(parts) => {
                parts.iter().try_fold(1, |period: i64, part| {
                    let other = part.shift_period()?;
                    (period / gcd(period, other)).checked_mul(other)
                })
            }
            _ => None,
        }
    }

    /// Returns whether heads may see different pairs.
    pub fn is_by_head(&self) -> bool {
        self.head_period() != Some(1)
    }

    /// Returns a `p` such that heads `h` and `h + p` have the same pairs; `None` if only a comparison of heads can tell.
    #[doc(hidden)]
    pub fn head_period(&self) -> Option<usize> {
        match self {
            Self::Fixed { num_verts, .. }
            | Self::Columns { num_verts, .. }
            | Self::Rows { num_verts, .. } => Some(*num_verts),
            Self::Union(parts) | Self::Intersection(parts) => head_period_of(parts, 1),
            Self::PerHead(parts) => head_period_of(parts, parts.len()),
            Self::Packed { pattern, .. } => pattern.head_period(),
            Self::FromFn(function) => (!function.by_head).then_some(1),
            Self::RandomBlocks { .. } => None,
            Self::Dense
            | Self::Causal
            | Self::Local { .. }
            | Self::Strided { .. }
            | Self::PrefixLm { .. }
            | Self::Streaming { .. }
            | Self::Window { .. }
            | Self::Chunked { .. }
            | Self::Global { .. }
            | Self::GlobalKeys { .. }
            | Self::VerticalSlash { .. }
            | Self::Documents { .. } => Some(1),
        }
    }
}

fn head_period_of(parts: &[Pattern], start: usize) -> Option<usize> {
    parts
        .iter()
        .try_fold(start, |period, part| lcm(period, part.head_period()?))
}
