//! Parameters of DeepSeek sparse attention, also as text.

use std::fmt;

use burn::config::Config;
use burn_blocksparse::internal::DispatchMode;
use burn_sparse_select::dsa::{Dsa, HADAMARD_WIDTHS, HadamardFp8};

use super::indexed::rotated;
use crate::Precision;
use crate::error::{Result, ensure, ensure_positive};
use crate::notation::{read_numbers, write_numbers};

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

    pub(crate) fn read(arguments: &[&str]) -> Option<Self> {
        let blocks = arguments
            .last()
            .and_then(|last| last.strip_prefix(Self::BLOCKS));
        let arguments = &arguments[..arguments.len() - usize::from(blocks.is_some())];
        let blocks: Option<[usize; 2]> = match blocks {
            Some(text) => {
                let (blocks, block) = text.split_once('x')?;
                Some([blocks.parse().ok()?, block.parse().ok()?])
            }
            None => None,
        };
        let index_fp8 = arguments.last() == Some(&Self::FP8);
        let arguments = &arguments[..arguments.len() - usize::from(index_fp8)];
        let named = |text: &&str| {
            (Precision::ALL.into_iter())
                .filter(|one| *one != Precision::Fp8)
                .find(|one| one.name() == *text)
        };
        let precision = arguments.last().and_then(named);
        let arguments = &arguments[..arguments.len() - usize::from(precision.is_some())];
        let of = |keep, near| Self::new().with_keep(keep).with_near(near);
        let config = match read_numbers(arguments)?[..] {
            [keep, near] if precision.is_none() && !index_fp8 && blocks.is_none() => of(keep, near),
            [keep, near, heads, width] => {
                of(keep, near).with_index_heads(heads).with_index_dim(width)
            }
            _ => return None,
        };
        let config = config
            .with_index_precision(precision)
            .with_index_fp8(index_fp8);
        Some(match blocks {
            Some([blocks, block]) => config.with_blocks(Some(blocks)).with_block(block),
            None => config,
        })
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
