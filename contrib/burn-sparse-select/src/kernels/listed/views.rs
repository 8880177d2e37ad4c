//! Tensors as kernels over lists get them.

use cubecl::prelude::*;
use cubecl::server::Handle;

use blocksparse_cubecl::args::buffer;
use blocksparse_cubecl::call::TensorView;
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::mma::gather::StridesLaunch;
use blocksparse_cubecl::tensor::{check_rows, check_scale, is_u32};

/// Elements of 16 bytes.
pub const PIECE: usize = 8;

/// Where gradients are added, contiguous.
#[derive(Clone, Copy, Debug)]
pub struct ListedGradients<'a> {
    /// `[batch, heads, seq_q, head_dim]`
    pub q: &'a Handle,
    /// `[batch, kv_heads, seq_kv, head_dim]`
    pub k: &'a Handle,
    /// `[batch, kv_heads, seq_kv, value_dim]`
    pub v: &'a Handle,
}

/// Words of so many halves.
pub fn words(elements: usize) -> usize {
    elements.div_ceil(2)
}

pub fn strides(tensor: &TensorView) -> StridesLaunch {
    let [batch, head, row] = [0, 1, 2].map(|dim| match tensor.shape[dim] {
        1 => 0,
        _ => (tensor.strides[dim] / PIECE) as u64,
    });
    StridesLaunch::new(batch, head, row, tensor.shape[2] as u32)
}

pub fn input(tensor: &TensorView) -> BufferArg {
    buffer(&tensor.handle, words(tensor.reach()))
}

/// Whether rows of keys or values are more than 4 GB apart.
pub fn far_rows(tensors: [&TensorView; 2]) -> bool {
    (tensors.iter()).any(|tensor| tensor.shape[2] > 1 && !is_u32(tensor.strides[2] * 2))
}

/// Checks q, k, v, and the output's gradient where there is one, and the scale.
///
/// # Errors
/// [`KernelError`] if cp.async cannot read a tensor, or the scale is not positive.
pub fn check_inputs(inputs: &[&TensorView], scale: f64) -> Result<(), KernelError> {
    for (name, tensor) in ["q", "k", "v", "grad_out"].into_iter().zip(inputs) {
        check_rows(name, tensor, PIECE)?;
    }
    check_scale(scale, None)
}
