//! Configuration of DeepSeek sparse attention, and its text form.

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
/// As text, in [`ContentAttention`](crate::content::ContentAttention): `dsa`, `dsa:KEEP,NEAR` or `dsa:KEEP,NEAR,HEADS,WIDTH`, the latter two of the indexer.
/// These may be followed by its precision, as in `dsa:2048,0,64,128,f32`, by `fp8`, as in `dsa:2048,0,64,128,fp8`, and by the blocks to choose first, as in
/// `dsa:2048,0,64,128,blocks=64x128`.
#[derive(Config, Debug, PartialEq)]
#[must_use = "a configuration does nothing until heads are made with it"]
pub struct DsaHeadsConfig {
    /// Most keys that a token attends to.
    #[config(default = 2048)]
    pub keep: usize,
    /// Number of last keys up to a token's own that are always among them.
    #[config(default = 0)]
    pub near: usize,
    /// Heads of the indexer. 4 heads of width 64 cost a thirty-second of the paper's indexer.
    #[config(default = 64)]
    pub index_heads: usize,
    /// Width of an indexer head.
    #[config(default = 128)]
    pub index_dim: usize,
    /// Number of first channels of the indexer's queries and keys that are rotated if the attention's are, an even number; 0 is none. Default: half of them.
    pub rope_dim: Option<usize>,
    /// Precision of the indexer's queries and keys, and of the products that compute them. Default: the attention's. In bf16, scores are computed on tensor
    /// cores if the device has any and differ from those in f32, so that a few keys near the threshold differ. Its weights, norms, scores and losses are in
    /// the dtype of its parameters or in f32 either way.
    pub index_precision: Option<Precision>,
    /// True if it chooses by queries and keys in fp8, rotated and rounded as in the paper's indexer
    /// ([`DsaIndex::in_fp8`](burn_sparse_select::dsa::DsaIndex::in_fp8)); GPUs of compute capability 9.0 compute their scores with fp8 products. It learns
    /// from the unrounded ones. Caches and pools store rounded keys.
    #[config(default = false)]
    pub index_fp8: bool,
    /// Number of blocks that a token chooses first, by the means of their keys, to choose keys from them afterwards (HISA: Xu et al., 2026). Default: it
    /// chooses from all keys. The paper uses 64.
    pub blocks: Option<usize>,
    /// Number of keys of such a block.
    #[config(default = 128)]
    pub block: usize,
    /// True if kernels gather single keys by the lists on devices that have such kernels ([`DispatchMode::Auto`]).
    #[config(default = true)]
    pub gather_keys: bool,
}

impl DsaHeadsConfig {
    pub(crate) const NAME: &str = "dsa";
    /// Suffix for choosing in fp8.
    const FP8: &str = "fp8";
    /// Prefix of the number and size of blocks.
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

    /// Returns the precision of the index, given that of the attention.
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
        // Optional words in a fixed order.
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
