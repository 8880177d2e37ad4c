//! Parameters of native sparse attention.

use blocksparse::Always;

use crate::selection::check_wide_block;
use burn_blocksparse::internal::DispatchMode;
use burn_blocksparse::{OpError, ProductPrecision};

/// Parameters of [`Nsa`](crate::nsa::Nsa). The defaults are the paper's (Yuan et al., 2025, §4.1).
#[derive(Clone, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct NsaOptions {
    /// Number of tokens of a compressed block, a multiple of `stride`. Default: 32.
    pub block: usize,
    /// Number of tokens between the starts of adjacent compressed blocks. Default: 16.
    pub stride: usize,
    /// Number of keys of a selected block: 8, 16, 32, 64, 128, or a larger multiple of 128, and a multiple of `stride`. Default: 64.
    pub selected_block: usize,
    /// Number of blocks that a query sees, forced ones included. Default: 16.
    pub keep: usize,
    /// Forced blocks, including the query's own. Default: the first one, the query's own and the one before it.
    pub forced: Always,
    /// Number of keys of the window, including the query's own; 0 turns the branch off. Default: 512.
    pub window: usize,
    /// Factor of the dot products of all branches. Default: 1/√head_dim.
    pub scale: Option<f64>,
    /// Precision of matmuls of f32 tensors.
    pub precision: ProductPrecision,
    /// Implementation of attention to selected blocks.
    pub dispatch_mode: DispatchMode,
}

impl Default for NsaOptions {
    fn default() -> Self {
        Self {
            block: 32,
            stride: 16,
            selected_block: 64,
            keep: 16,
            forced: Always { first: 1, local: 2 },
            window: 512,
            scale: None,
            precision: ProductPrecision::default(),
            dispatch_mode: DispatchMode::default(),
        }
    }
}

impl NsaOptions {
    blocksparse::setters! {
        /// Sets the number of tokens of a compressed block.
        block: usize,
        /// Sets the number of tokens between the starts of adjacent compressed blocks.
        stride: usize,
        /// Sets the number of keys of a selected block.
        selected_block: usize,
        /// Sets the number of blocks that a query sees.
        keep: usize,
        /// Sets the forced blocks.
        forced: Always,
        /// Sets the number of keys of the window.
        window: usize,
        /// Sets the factor of the dot products.
        scale: Some(f64),
        /// Sets the precision of matmuls of f32 tensors.
        precision: ProductPrecision,
        /// Sets the implementation of attention to selected blocks.
        dispatch_mode: DispatchMode,
    }

    /// Checks the parameters.
    ///
    /// # Errors
    /// [`OpError`] if one is out of its range.
    pub fn check(&self) -> Result<(), OpError> {
        let stride = self.stride;
        OpError::ensure_positive("stride", stride)?;
        for (argument, block) in [
            ("block", self.block),
            ("selected_block", self.selected_block),
        ] {
            blocksparse::ensure! {
                OpError;
                block != 0 && block.is_multiple_of(stride) => argument, format!("a multiple of stride, which is {stride}"), block;
            }
        }
        check_wide_block("selected_block", self.selected_block)?;
        let Always { first, local } = self.forced;
        blocksparse::ensure! { OpError; local != 0 => "forced.local", "at least 1, the query's own block", 0; }
        let forced = first.saturating_add(local);
        blocksparse::ensure! { OpError; self.keep >= forced => "keep", format!("at least {forced}, the forced blocks"), self.keep; }
        match self.scale {
            Some(scale) if !scale.is_finite() => Err(OpError::argument("scale", "finite", scale)),
            _ => Ok(()),
        }
    }
}
