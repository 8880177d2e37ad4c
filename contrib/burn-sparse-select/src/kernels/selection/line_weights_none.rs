//! What [`lines`](crate::kernels::selection::lines) asks for where nothing makes products on tensor cores: none is made twice.

use std::convert::Infallible;

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::selection::line_sizes::LineSizes;
use blocksparse_cubecl::error::KernelError;

/// Keys of a run.
pub(crate) const RUN: usize = 64;

/// What a logarithm becomes that is of no use.
pub(crate) const UNWANTED: f32 = 1e30;

/// There are none.
pub(crate) enum LineWeights {}

/// # Errors
/// Always.
pub(crate) fn product_of_sums(
    _: &Client,
    _: ElemType,
    _: [&Handle; 2],
    _: &LineSizes,
) -> Result<Infallible, &'static str> {
    Err("there are no tensor cores")
}

impl LineWeights {
    pub fn new(
        _: &Client,
        _: ElemType,
        _: [&Handle; 2],
        _: &LineSizes,
    ) -> Result<Option<Self>, KernelError> {
        Ok(None)
    }

    pub fn logs(&self) -> &Handle {
        match *self {}
    }

    pub fn by_blocks(&self, _: &Client, _: usize, _: &Handle) -> Result<(), KernelError> {
        match *self {}
    }

    pub fn sums(&self, _: &Client, _: &Handle) -> Result<(), KernelError> {
        match *self {}
    }
}
