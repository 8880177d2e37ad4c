//! Configuration of MiniMax sparse attention, and its text form.

use std::fmt;

use crate::dsa::indexed::rotated;
use crate::error::{Result, ensure_positive};
use crate::notation::write_numbers;
use burn::config::Config;
use burn_sparse_select::msa::Msa;

/// Configuration of [`MsaHeads`](super::MsaHeads). The defaults are the paper's (MiniMax, 2026).
///
/// As text, in [`ContentAttention`](crate::content::ContentAttention): `msa`, `msa:BLOCK,KEEP` or `msa:BLOCK,KEEP,WIDTH`, the latter of the index branch.
#[derive(Config, Debug, PartialEq)]
#[must_use = "a configuration does nothing until heads are made with it"]
pub struct MsaHeadsConfig {
    /// Keys of a block: 8, 16, 32, 64, 128 or a larger multiple of 128.
    #[config(default = 128)]
    pub block: usize,
    /// Most blocks that a token attends to, its own included.
    #[config(default = 16)]
    pub keep: usize,
    /// Width of the index branch's queries and keys.
    #[config(default = 128)]
    pub index_dim: usize,
    /// Number of their first channels that are rotated if the attention's are, an even number; 0 is none. Default: half of them.
    pub rope_dim: Option<usize>,
}

impl MsaHeadsConfig {
    pub(crate) const NAME: &str = "msa";

    pub(crate) fn op(&self) -> Result<Msa> {
        Ok(Msa::new(self.block, self.keep)?)
    }

    /// Returns the number of pairs that one head attends to in a sequence.
    pub(crate) fn pairs(&self, seq: usize) -> Result<u64> {
        let op = self.op()?;
        Ok((1..=seq).map(|keys| op.attended(keys) as u64).sum())
    }

    pub(crate) fn validate(&self) -> Result<()> {
        self.op()?;
        ensure_positive("index_dim", self.index_dim)?;
        rotated(self.rope_dim, self.index_dim)?;
        Ok(())
    }

    pub(crate) fn read(numbers: &[usize], words: &[&str]) -> Option<Self> {
        let of = |block, keep| Self::new().with_block(block).with_keep(keep);
        Some(match (numbers, words) {
            ([], []) => Self::new(),
            (&[block, keep], []) => of(block, keep),
            (&[block, keep, width], []) => of(block, keep).with_index_dim(width),
            _ => return None,
        })
    }

    pub(crate) fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_numbers(f, Self::NAME, [self.block, self.keep, self.index_dim])
    }
}
