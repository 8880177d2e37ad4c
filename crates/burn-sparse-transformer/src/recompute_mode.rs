//! Modes of activation recomputation.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::TransformerError;
use crate::error::Result;

/// Activation recomputation in the backward pass of [`SparseTransformer::loss_and_gradients`](crate::SparseTransformer). The
/// gradients are the same.
///
/// As text: `none`, `mlp`, `block` (segments of one), `segment:N`, and the last two followed by `+attention` to keep the attention results. In configurations
/// `true` and `false` mean `block` and `none`.
///
/// ```
/// use burn_sparse_transformer::Recompute;
///
/// assert_eq!("segment:2".parse::<Recompute>()?.to_string(), "segment:2");
/// assert_eq!("segment:1".parse::<Recompute>()?, Recompute::BLOCK);
/// let keeping = "block+attention".parse::<Recompute>()?;
/// assert!(matches!(keeping, Recompute::SegmentsSavingAttention(blocks) if blocks.get() == 1));
/// # Ok::<(), burn_sparse_transformer::TransformerError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Recompute {
    /// Nothing is recomputed. Of the feed-forward networks' two inner tensors one is stored in any case.
    #[default]
    None,
    /// The first product of each feed-forward network, which stores `d_ff` elements less per position and block. No effect on networks with block-sparse
    /// weights.
    Mlp,
    /// Segments of this many blocks. Stored are the residual stream before each segment, `d_model` elements per position, and the activations of the segment
    /// that is being differentiated (Child et al., 2019, §5.4).
    Segments(NonZeroUsize),
    /// Like [`Segments`](Self::Segments), but the attention of each block that runs twice is computed once. Its output and lse are stored too
    /// ([`AttentionResiduals`](burn_blocksparse::internal::AttentionResiduals)): `d_model` elements per position and block in the dtype of the products, and
    /// one f32 per head. The longer the sequences, the larger the share of attention in a block's time, and the more this saves. A block that stores
    /// attention weights (`store_weights`) recomputes them in any case.
    SegmentsSavingAttention(NonZeroUsize),
}

impl Recompute {
    /// Segments of one block.
    pub const BLOCK: Self = Self::Segments(NonZeroUsize::MIN);
}

/// Suffix of segments whose attention results are kept.
const KEEPING: &str = "+attention";

impl From<bool> for Recompute {
    fn from(blocks: bool) -> Self {
        match blocks {
            true => Self::BLOCK,
            false => Self::None,
        }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Mlp => f.write_str("mlp"),
            Self::Segments(NonZeroUsize::MIN) => f.write_str("block"),
            Self::Segments(blocks) => write!(f, "segment:{blocks}"),
            Self::SegmentsSavingAttention(blocks) => {
                write!(f, "{}{KEEPING}", Self::Segments(*blocks))
            }
        }
    }
}

impl FromStr for Recompute {
    type Err = TransformerError;

    fn from_str(text: &str) -> Result<Self> {
        let segments = |text: &str| match text {
            "block" => Some(NonZeroUsize::MIN),
            _ => text.strip_prefix("segment:")?.parse().ok(),
        };
        match (text, text.strip_suffix(KEEPING)) {
            ("none" | "false", _) => Some(Self::None),
            ("mlp", _) => Some(Self::Mlp),
            ("true", _) => Some(Self::BLOCK),
            (_, Some(text)) => segments(text).map(Self::SegmentsSavingAttention),
            (_, None) => segments(text).map(Self::Segments),
        }
        .ok_or_else(|| {
            let expected = "none, mlp, block or segment:N with N from 1 on, or one of the last two and +attention";
            TransformerError::argument("recompute", expected, format!("{text:?}"))
        })
    }
}

impl Serialize for Recompute {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Recompute {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Blocks(bool),
            Text(String),
        }

        match Written::deserialize(deserializer)? {
            Written::Blocks(blocks) => Ok(blocks.into()),
            Written::Text(text) => text.parse().map_err(de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_json_say_the_same() {
        for (text, shown) in [
            ("none", "none"),
            ("mlp", "mlp"),
            ("block", "block"),
            ("segment:1", "block"),
            ("segment:12", "segment:12"),
            ("block+attention", "block+attention"),
            ("segment:1+attention", "block+attention"),
            ("segment:12+attention", "segment:12+attention"),
            ("true", "block"),
            ("false", "none"),
        ] {
            let mode: Recompute = text.parse().unwrap();
            assert_eq!(mode.to_string(), shown);
            let json = serde_json::to_string(&mode).unwrap();
            assert_eq!(json, format!("\"{shown}\""));
            assert_eq!(serde_json::from_str::<Recompute>(&json).unwrap(), mode);
        }
        for blocks in [true, false] {
            let json = blocks.to_string();
            assert_eq!(
                serde_json::from_str::<Recompute>(&json).unwrap(),
                blocks.into()
            );
        }
        for bad in [
            "",
            "segment:0",
            "segment:",
            "segment:x",
            "blocks",
            "1",
            "+attention",
            "none+attention",
            "mlp+attention",
            "true+attention",
            "segment:0+attention",
            "block+attention+attention",
            "block+",
        ] {
            let error = bad.parse::<Recompute>().unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "recompute must be none, mlp, block or segment:N with N from 1 on, \
                     or one of the last two and +attention, got {bad:?}"
                )
            );
        }
    }
}
