//! What a backward pass computes again.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::TransformerError;

/// What the backward pass of [`SparseTransformer::loss_and_gradients`](crate::SparseTransformer) computes again in place of keeping it. The
/// gradients are the same.
///
/// As text: `none`, `mlp`, `block` (segments of one) and `segment:N`. Configurations that say `true` or `false` mean `block` and `none`.
///
/// ```
/// use burn_sparse_transformer::Recompute;
///
/// assert_eq!("segment:2".parse::<Recompute>()?.to_string(), "segment:2");
/// assert_eq!("segment:1".parse::<Recompute>()?, Recompute::BLOCK);
/// # Ok::<(), burn_sparse_transformer::TransformerError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Recompute {
    /// Nothing. Of the feed-forward networks' two inner tensors one is kept in any case.
    #[default]
    None,
    /// The first product of each feed-forward network: `d_ff` numbers of a position and block less are kept.
    Mlp,
    /// So many blocks at a time: kept is the residual stream before each segment, `d_model` numbers of a position, and while a segment is
    /// differentiated what its blocks keep (Child et al., 2019, §5.4).
    Segments(NonZeroUsize),
}

impl Recompute {
    /// Every block by itself.
    pub const BLOCK: Self = Self::Segments(NonZeroUsize::MIN);
}

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
        }
    }
}

impl FromStr for Recompute {
    type Err = TransformerError;

    fn from_str(text: &str) -> Result<Self, TransformerError> {
        let segments = || text.strip_prefix("segment:")?.parse().ok();
        match text {
            "none" | "false" => Some(Self::None),
            "mlp" => Some(Self::Mlp),
            "block" | "true" => Some(Self::BLOCK),
            _ => segments().map(Self::Segments),
        }
        .ok_or_else(|| {
            let expected = "none, mlp, block or segment:N with N from 1 on";
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
        struct Visitor;

        impl de::Visitor<'_> for Visitor {
            type Value = Recompute;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("none, mlp, block, segment:N, true or false")
            }

            fn visit_bool<E: de::Error>(self, blocks: bool) -> Result<Recompute, E> {
                Ok(blocks.into())
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Recompute, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(Visitor)
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
        for bad in ["", "segment:0", "segment:", "segment:x", "blocks", "1"] {
            let error = bad.parse::<Recompute>().unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "recompute must be none, mlp, block or segment:N with N from 1 on, got {bad:?}"
                )
            );
        }
    }
}
