//! Configuration of native sparse attention, and its text form.

use std::fmt;

use burn::config::Config;
use burn_sparse_select::Always;
use burn_sparse_select::nsa::NsaOptions;

use super::Compression;
use crate::error::Result;
use crate::notation::write_numbers;

/// Configuration of [`NsaHeads`](super::NsaHeads). The defaults are the paper's (Yuan et al., 2025, §4.1), except the compression.
///
/// As text, in [`ContentAttention`](crate::content::ContentAttention): `nsa`, or `nsa:BLOCK,STRIDE,SELECTED,KEEP,WINDOW`, optionally followed by `,mlp` and
/// `,shared`.
#[derive(Config, Debug, PartialEq)]
#[must_use = "a configuration does nothing until heads are made with it"]
pub struct NsaHeadsConfig {
    /// Tokens of a compressed block, a multiple of `stride`.
    #[config(default = 32)]
    pub block: usize,
    /// Distance between the beginnings of compressed blocks, in tokens.
    #[config(default = 16)]
    pub stride: usize,
    /// Keys of a selected block: 8, 16, 32, 64, 128, or a larger multiple of 128, and a multiple of `stride`.
    #[config(default = 64)]
    pub selected_block: usize,
    /// Number of blocks that a token sees, `first` and `local` included.
    #[config(default = 16)]
    pub keep: usize,
    /// Number of first blocks that are always selected.
    #[config(default = 1)]
    pub first: usize,
    /// Number of blocks up to a token's own that are always selected.
    #[config(default = 2)]
    pub local: usize,
    /// Keys of the window; 0 turns that branch off.
    #[config(default = 512)]
    pub window: usize,
    /// Compression of a block of keys or values into one.
    #[config(default = "Compression::Mean")]
    pub compression: Compression,
    /// True if all branches share the projections of keys and values. In the paper each has its own.
    #[config(default = false)]
    pub shared_kv: bool,
}

impl NsaHeadsConfig {
    pub(crate) const NAME: &str = "nsa";

    pub(crate) fn options(&self) -> NsaOptions {
        NsaOptions::default()
            .block(self.block)
            .stride(self.stride)
            .selected_block(self.selected_block)
            .keep(self.keep)
            .forced(Always {
                first: self.first,
                local: self.local,
            })
            .window(self.window)
    }

    /// Returns the default slots of a page of a `KvPool` of `burn-paged-attention`: the largest size that divides the blocks and holds whole strides. `None`
    /// if there is none: for blocks of fewer than 16 tokens, or an odd stride.
    pub fn pool_page_size(&self) -> Option<usize> {
        let fits = |page: &usize| {
            page.is_multiple_of(self.stride) && self.selected_block.is_multiple_of(*page)
        };
        [128, 64, 32, 16].into_iter().find(fits)
    }

    /// Returns the number of compressed blocks of `tokens` tokens.
    #[doc(hidden)]
    pub fn entries(&self, tokens: usize) -> usize {
        match tokens.checked_sub(self.block) {
            Some(behind) => behind / self.stride + 1,
            None => 0,
        }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        Ok(self.options().check()?)
    }

    pub(crate) fn read(numbers: &[usize], words: &[&str]) -> Option<Self> {
        let config = match *numbers {
            [] => Self::new(),
            [block, stride, selected_block, keep, window] => Self::new()
                .with_block(block)
                .with_stride(stride)
                .with_selected_block(selected_block)
                .with_keep(keep)
                .with_window(window),
            _ => return None,
        };
        let config =
            |compression, shared| Some(config.with_compression(compression).with_shared_kv(shared));
        match words {
            [] => config(Compression::Mean, false),
            ["mlp"] => config(Compression::Mlp, false),
            ["shared"] => config(Compression::Mean, true),
            ["mlp", "shared"] => config(Compression::Mlp, true),
            _ => None,
        }
    }

    pub(crate) fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tokens = [self.block, self.stride, self.selected_block];
        write_numbers(
            f,
            Self::NAME,
            tokens.into_iter().chain([self.keep, self.window]),
        )?;
        if self.compression == Compression::Mlp {
            f.write_str(",mlp")?;
        }
        f.write_str(if self.shared_kv { ",shared" } else { "" })
    }
}
