//! Parameters of DeepSeek sparse attention, also as text.

use std::fmt;

use burn::config::Config;
use burn_blocksparse::internal::DispatchMode;
use burn_sparse_select::dsa::{Dsa, HADAMARD_WIDTHS, HadamardFp8};

use super::indexed::rotated;
use crate::Precision;
use crate::error::{Result, ensure, ensure_positive};
use crate::notation::write_numbers;

/// Configuration of [`DsaHeads`](super::DsaHeads). The defaults are the paper's (DeepSeek-V3.2-Exp, 2025, §2).
///
/// As text, in [`ContentAttention`](crate::content::ContentAttention): `dsa`, `dsa:KEEP,NEAR` or `dsa:KEEP,NEAR,HEADS,WIDTH`, the latter two of the indexer; after
/// these there may be its precision, as in `dsa:2048,0,64,128,f32`, `fp8`, as in `dsa:2048,0,64,128,fp8`, and what is chosen
/// first, as in `dsa:2048,0,64,128,blocks=64x128`.
#[derive(Config, Debug, PartialEq)]
#[must_use = "a configuration does nothing until heads are made with it"]
pub struct DsaHeadsConfig {
    /// Keys that a token attends to, at most.
    #[config(default = 2048)]
    pub keep: usize,
    /// Keys up to a token's own that are always among them.
    #[config(default = 0)]
    pub near: usize,
    /// Heads of the indexer. 4 heads of width 64 cost a thirty-second of the paper's.
    #[config(default = 64)]
    pub index_heads: usize,
    /// Width of an indexer's head.
    #[config(default = 128)]
    pub index_dim: usize,
    /// First channels of the indexer's queries and keys that are rotated where those of the attention are, an even number; 0 is none. Default: half of them.
    pub rope_dim: Option<usize>,
    /// Precision of the indexer's queries and keys, and of the products that make them. Default: the attention's. In bf16 scores are made on tensor cores, where
    /// a device has some, and are not those of f32, so that a few keys about the last that is kept are others. Its weights, norms, scores and losses are in the
    /// dtype of its parameters, or in f32, either way.
    pub index_precision: Option<Precision>,
    /// True if it chooses by queries and keys in fp8, rotated and rounded as the paper's indexer has them ([`DsaIndex::in_fp8`](burn_sparse_select::dsa::DsaIndex::in_fp8)),
    /// whose scores GPUs of compute capability 9.0 make of products in fp8. It learns by those that are not rounded. Caches and pools keep rounded keys.
    #[config(default = false)]
    pub index_fp8: bool,
    /// Blocks that a token chooses first, by the means of their keys, and among whose keys it then chooses (HISA: Xu et al., 2026); all keys, if there are none. The
    /// paper has 64.
    pub blocks: Option<usize>,
    /// Keys of such a block.
    #[config(default = 128)]
    pub block: usize,
    /// True if kernels gather single keys by the lists where a device has them ([`DispatchMode::Auto`]).
    #[config(default = true)]
    pub gather_keys: bool,
}

impl DsaHeadsConfig {
    pub(crate) const NAME: &str = "dsa";
    /// What it ends with if it chooses in fp8.
    const FP8: &str = "fp8";
    /// What blocks begin with.
    const BLOCKS: &str = "blocks=";

    pub(crate) fn op(&self) -> Result<Dsa> {
        let op = Dsa::new(self.keep)?.with_near(self.near)?;
        Ok(match self.blocks {
            Some(blocks) => op.with_blocks(blocks, self.block)?,
            None => op,
        })
    }

    pub(crate) fn validate(&self) -> Result<()> {
        self.op()?;
        ensure_positive("index_heads", self.index_heads)?;
        ensure_positive("index_dim", self.index_dim)?;
        rotated(self.rope_dim, self.index_dim)?;
        let fits = !self.index_fp8 || HadamardFp8::takes(self.index_dim);
        let [least, most] = HADAMARD_WIDTHS;
        ensure! { fits =>
        "index_dim", format!("a power of two from {least} to {most}, for fp8"), self.index_dim; }
        Ok(())
    }

    /// The precision of the index beside attention in a precision.
    pub(super) fn precision(&self, of_attention: Precision) -> Precision {
        self.index_precision.unwrap_or(of_attention)
    }

    pub(super) fn dispatch_mode(&self) -> DispatchMode {
        match self.gather_keys {
            true => DispatchMode::Auto,
            false => DispatchMode::GroupByBlock,
        }
    }

    pub(crate) fn read(numbers: &[usize], mut words: &[&str]) -> Option<Self> {
        let of = |keep, near| Self::new().with_keep(keep).with_near(near);
        let mut config = match (numbers, words) {
            ([], []) => Self::new(),
            (&[keep, near], []) => of(keep, near),
            (&[keep, near, heads, width], _) => {
                of(keep, near).with_index_heads(heads).with_index_dim(width)
            }
            _ => return None,
        };
        // Words in their order, each of them or not.
        let own = [Precision::F32, Precision::Tf32, Precision::Bf16];
        if let [name, rest @ ..] = words
            && let Some(precision) = own.into_iter().find(|one| one.name() == *name)
        {
            (config.index_precision, words) = (Some(precision), rest);
        }
        if let [Self::FP8, rest @ ..] = words {
            (config.index_fp8, words) = (true, rest);
        }
        if let [text, rest @ ..] = words {
            let (blocks, block) = text.strip_prefix(Self::BLOCKS)?.split_once('x')?;
            config.blocks = Some(blocks.parse().ok()?);
            (config.block, words) = (block.parse().ok()?, rest);
        }
        words.is_empty().then_some(config)
    }

    pub(crate) fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = [self.keep, self.near, self.index_heads, self.index_dim];
        write_numbers(f, Self::NAME, numbers)?;
        (self.index_precision).map_or(Ok(()), |precision| write!(f, ",{precision}"))?;
        if self.index_fp8 {
            write!(f, ",{}", Self::FP8)?;
        }
        self.blocks.map_or(Ok(()), |blocks| {
            write!(f, ",{}{blocks}x{}", Self::BLOCKS, self.block)
        })
    }
}
