//! Kinds of content-based heads: configuration and text form.

use std::str::FromStr;
use std::{fmt, iter};

use serde::{Deserialize, Serialize};

use super::{LshHeadsConfig, RoutingHeadsConfig};
use crate::TransformerError;
use crate::dsa::DsaHeadsConfig;
use crate::error::Result;
use crate::msa::MsaHeadsConfig;
use crate::notation::{read_numbers, write_numbers};
use crate::nsa::NsaHeadsConfig;

/// Content-based heads of a layer: each token selects its own keys.
///
/// As text: see [`Self::NOTATION`].
///
/// ```
/// use burn_sparse_transformer::content::ContentAttention;
///
/// let clusters: ContentAttention = "routing:128".parse()?;
/// assert!(matches!(&clusters, ContentAttention::Routing(config) if config.window == 128));
/// assert_eq!(clusters.to_string(), "routing:128");
/// # Ok::<(), burn_sparse_transformer::TransformerError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ContentAttention {
    /// By clusters (Roy et al., 2021): [`RoutingHeads`](crate::content::RoutingHeads).
    Routing(RoutingHeadsConfig),
    /// By hashes (Kitaev et al., 2020): [`LshHeads`](crate::content::LshHeads).
    Lsh(LshHeadsConfig),
    /// Three branches (Yuan et al., 2025), in all heads of a layer: [`NsaHeads`](crate::nsa::NsaHeads).
    Nsa(NsaHeadsConfig),
    /// By a learned indexer (DeepSeek-V3.2-Exp, 2025), in all heads of a layer: [`DsaHeads`](crate::dsa::DsaHeads).
    Dsa(DsaHeadsConfig),
    /// By a learned index branch, which chooses blocks for each key head (MiniMax, 2026), in all heads of a layer: [`MsaHeads`](crate::msa::MsaHeads).
    Msa(MsaHeadsConfig),
}

impl ContentAttention {
    /// Supported text forms.
    pub const NOTATION: &[&str] = &[
        "routing:WINDOW[,CLUSTERS]  clusters of WINDOW similar tokens (Roy et al., 2021)",
        "lsh:BUCKET,ROUNDS[,dedup]  chunks of BUCKET tokens that hash alike (Kitaev et al., 2020)",
        "nsa[:BLOCK,STRIDE,SELECTED,KEEP,WINDOW][,mlp][,shared]  compressed blocks, KEEP blocks of SELECTED tokens and a window, in all heads (Yuan et al., 2025)",
        "dsa[:KEEP,NEAR[,HEADS,WIDTH[,PRECISION][,fp8][,blocks=COUNTxBLOCK]]]  KEEP single keys, the NEAR last ones among them, by an indexer of HEADS heads in a precision (f32, bf16; default: the attention's), or rounded to fp8 for choosing, of COUNT blocks that are chosen first, in all heads (DeepSeek-V3.2-Exp, 2025; HISA: Xu et al., 2026)",
        "msa[:BLOCK,KEEP[,WIDTH]]  KEEP blocks of BLOCK tokens, the own one among them, by an index branch of a width, in all heads (MiniMax, 2026)",
    ];

    /// Returns whether later tokens do not affect what a token sees, as with `nsa`, `dsa` and `msa`. The others cannot decode from a cache, and language
    /// models trained with them get slightly optimistic scores.
    pub fn is_prefix_stable(&self) -> bool {
        match self {
            Self::Routing(_) | Self::Lsh(_) => false,
            Self::Nsa(_) | Self::Dsa(_) | Self::Msa(_) => true,
        }
    }

    /// Returns whether it uses all heads of a layer, without heads of a pattern.
    pub fn is_whole_layer(&self) -> bool {
        matches!(self, Self::Nsa(_) | Self::Dsa(_) | Self::Msa(_))
    }

    /// Returns the prefix of its text form.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Routing(_) => "routing",
            Self::Lsh(_) => "lsh",
            Self::Nsa(_) => NsaHeadsConfig::NAME,
            Self::Dsa(_) => DsaHeadsConfig::NAME,
            Self::Msa(_) => MsaHeadsConfig::NAME,
        }
    }

    /// Returns whether an indexer chooses for all heads of a layer, so that other layers can take its choice
    /// ([`ChoiceSharing`](crate::content::ChoiceSharing)).
    pub fn has_indexer(&self) -> bool {
        matches!(self, Self::Dsa(_) | Self::Msa(_))
    }

    /// Returns the tokens of a cluster, a chunk or a window; for `dsa` the keys that are always seen, for `msa` a block.
    pub fn window(&self) -> usize {
        match self {
            Self::Routing(config) => config.window,
            Self::Lsh(config) => config.bucket,
            Self::Nsa(config) => config.window,
            Self::Dsa(config) => config.near,
            Self::Msa(config) => config.block,
        }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        match self {
            Self::Routing(config) => config.validate(),
            Self::Lsh(config) => config.validate(),
            Self::Nsa(config) => config.validate(),
            Self::Dsa(config) => config.validate(),
            Self::Msa(config) => config.validate(),
        }
    }

    /// Fixes the number of clusters for sequences of up to `context` tokens.
    pub(crate) fn for_context(self, context: usize) -> Result<Self> {
        Ok(match self {
            Self::Routing(config) => {
                let clusters = config.clusters(context)?;
                Self::Routing(config.with_clusters(Some(clusters)))
            }
            other => other,
        })
    }
}

impl fmt::Display for ContentAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Routing(config) => {
                let numbers = iter::once(config.window).chain(config.clusters);
                write_numbers(f, self.name(), numbers)
            }
            Self::Lsh(config) => {
                write_numbers(f, self.name(), [config.bucket, config.rounds])?;
                f.write_str(if config.dedup { ",dedup" } else { "" })
            }
            Self::Nsa(config) => config.write(f),
            Self::Dsa(config) => config.write(f),
            Self::Msa(config) => config.write(f),
        }
    }
}

impl FromStr for ContentAttention {
    type Err = TransformerError;

    fn from_str(text: &str) -> Result<Self> {
        let read = |text: &str| {
            let (name, arguments) = match text.split_once(':') {
                Some((name, arguments)) => (name, arguments.split(',').collect()),
                None => (text, Vec::new()),
            };
            let (numbers, words) = read_numbers(&arguments)?;
            Some(match (name, &numbers[..], words) {
                ("routing", &[window], []) => Self::Routing(RoutingHeadsConfig::new(window)),
                ("routing", &[window, clusters], []) => {
                    let config = RoutingHeadsConfig::new(window);
                    Self::Routing(config.with_clusters(Some(clusters)))
                }
                ("lsh", &[bucket, rounds], [] | ["dedup"]) => Self::Lsh(
                    LshHeadsConfig::new()
                        .with_bucket(bucket)
                        .with_rounds(rounds)
                        .with_dedup(!words.is_empty()),
                ),
                (NsaHeadsConfig::NAME, ..) => Self::Nsa(NsaHeadsConfig::read(&numbers, words)?),
                (DsaHeadsConfig::NAME, ..) => Self::Dsa(DsaHeadsConfig::read(&numbers, words)?),
                (MsaHeadsConfig::NAME, ..) => Self::Msa(MsaHeadsConfig::read(&numbers, words)?),
                _ => return None,
            })
        };
        let found = read(text).ok_or_else(|| {
            let expected = "routing:WINDOW[,CLUSTERS], lsh:BUCKET,ROUNDS[,dedup], nsa:BLOCK,STRIDE,SELECTED,KEEP,WINDOW[,mlp][,shared], dsa:KEEP,NEAR[,HEADS,WIDTH[,PRECISION][,fp8][,blocks=COUNTxBLOCK]] or msa:BLOCK,KEEP[,WIDTH]";
            TransformerError::argument("content", expected, format!("{text:?}"))
        })?;
        found.validate()?;
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_read_as_they_are_written() {
        let texts = "
            routing:128 routing:64,8 lsh:64,4 lsh:32,1,dedup nsa:32,16,64,16,512 nsa:8,4,16,4,0,mlp
            nsa:8,4,16,4,32,shared nsa:8,4,16,4,32,mlp,shared dsa:64,8,4,32 dsa:64,8,4,32,f32 dsa:64,8,4,32,bf16
            dsa:64,8,4,32,fp8 dsa:64,8,4,32,bf16,fp8 dsa:64,8,4,32,blocks=4x16 dsa:64,8,4,32,bf16,fp8,blocks=9x8 msa:64,8,32
        ";
        for text in texts.split_whitespace() {
            let content: ContentAttention = text.parse().unwrap();
            assert_eq!(content.to_string(), text);
            let json = serde_json::to_string(&content).unwrap();
            let read: ContentAttention = serde_json::from_str(&json).unwrap();
            assert_eq!(read, content);
            let stable = ["nsa", "dsa", "msa"].contains(&&text[..3]);
            assert_eq!(content.is_prefix_stable(), stable);
        }
        for (text, written) in [
            ("nsa", "nsa:32,16,64,16,512"),
            ("nsa:mlp", "nsa:32,16,64,16,512,mlp"),
            ("dsa", "dsa:2048,0,64,128"),
            ("dsa:64,8", "dsa:64,8,64,128"),
            ("msa", "msa:128,16,128"),
            ("msa:64,8", "msa:64,8,128"),
        ] {
            let content: ContentAttention = text.parse().unwrap();
            assert_eq!(content.to_string(), written);
        }
        let texts = "
            routing routing: routing:x routing:8, routing:8,2,1 lsh:64 lsh:64,4,twice lsh:64,4,dedup, moba:8,2
            nsa: nsa:32 nsa:32,16,64,16,x nsa:32,16,64,16,-1 nsa:32,16,64,16,512,shared,mlp
            nsa:32,16,64,16,512,7 dsa: dsa:64 dsa:64,8,4 dsa:f32 dsa:64,8,f32 dsa:64,8,fp8
            dsa:64,8,4,32,fp8,bf16 dsa:64,8,4,32,f16 dsa:64,x dsa:64,8,blocks=4x16
            dsa:64,8,4,32,blocks=4 dsa:64,8,4,32,blocks=x4 dsa:64,8,4,32,blocks=4x16,fp8 msa: msa:64 msa:64,8,x msa:64,8,32,2
        ";
        for text in texts.split_whitespace().chain([""]) {
            let error = text.parse::<ContentAttention>().unwrap_err().to_string();
            assert_eq!(
                error,
                format!(
                    "content must be routing:WINDOW[,CLUSTERS], lsh:BUCKET,ROUNDS[,dedup], nsa:BLOCK,STRIDE,SELECTED,KEEP,WINDOW[,mlp][,shared], dsa:KEEP,NEAR[,HEADS,WIDTH[,PRECISION][,fp8][,blocks=COUNTxBLOCK]] or msa:BLOCK,KEEP[,WIDTH], got {text:?}"
                )
            );
        }
        for (text, message) in [
            ("routing:0", "window must be at least 1, got 0"),
            ("routing:8,0", "clusters must be at least 1, got 0"),
            ("lsh:0,4", "bucket must be at least 1, got 0"),
            ("lsh:64,0", "rounds must be at least 1, got 0"),
            (
                "nsa:32,12,64,16,512",
                "block must be a multiple of stride, which is 12, got 32",
            ),
            (
                "nsa:32,16,64,2,512",
                "keep must be at least 3, the forced blocks, got 2",
            ),
            ("dsa:4,5", "near must be at most keep, which is 4, got 5"),
            ("dsa:4,0,0,8", "index_heads must be at least 1, got 0"),
            (
                "dsa:64,8,4,32,blocks=3x16",
                "blocks must be at least 4, the first, those of near keys and as many as have keep keys, got 3",
            ),
            ("msa:64,0", "keep must be at least 1, the own block, got 0"),
            (
                "msa:48,4",
                "block must be 8, 16, 32, 64, 128 or a larger multiple of 128, got 48",
            ),
            ("msa:64,4,0", "index_dim must be at least 1, got 0"),
        ] {
            let error = text.parse::<ContentAttention>().unwrap_err();
            assert_eq!(error.to_string(), message);
        }
    }
}
