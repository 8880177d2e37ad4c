//! Tensors as arguments of kernels over lists.

use blocksparse_cubecl::arch::sm80::address;
use blocksparse_cubecl::call::TensorView;
use blocksparse_cubecl::mma::gather::{Strides, StridesLaunch, head_address};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::tensor::{check_rows, check_scale, is_u32};

/// Number of 16-bit elements of 16 bytes.
pub const PIECE: usize = 8;

/// Contiguous destinations of accumulated gradients.
#[derive(Clone, Copy, Debug)]
pub struct ListedGradients<'a> {
    /// `[batch, heads, seq_q, head_dim]`
    pub q: &'a Handle,
    /// `[batch, kv_heads, seq_kv, head_dim]`
    pub k: &'a Handle,
    /// `[batch, kv_heads, seq_kv, value_dim]`
    pub v: &'a Handle,
}

/// A tensor in a kernel: its words, and the strides of its rows.
#[derive(CubeType, CubeLaunch)]
pub struct Input {
    pub words: Box<[u32]>,
    pub strides: Strides,
}

/// Returns the address of a head's first row.
#[cube]
pub fn first_row(tensor: &Input, batch: u32, head: u32) -> u64 {
    head_address(
        address::<u32>(&tensor.words[..]),
        &tensor.strides,
        batch,
        head,
    )
}

/// Returns the number of words of `elements` 16-bit elements.
pub fn words(elements: usize) -> usize {
    elements.div_ceil(2)
}

/// Returns the launch argument of a tensor with its strides.
pub fn input(tensor: &TensorView) -> InputLaunch {
    let [batch, head, row] = [0, 1, 2].map(|dim| match tensor.shape[dim] {
        1 => 0,
        _ => (tensor.strides[dim] / PIECE) as u64,
    });
    let strides = StridesLaunch::new(batch, head, row, tensor.shape[2] as u32);
    InputLaunch::new(words_of(tensor), strides)
}

/// Returns the launch argument of a tensor's words.
pub fn words_of(tensor: &TensorView) -> BufferArg {
    buffer(&tensor.handle, words(tensor.reach()))
}

/// Returns whether rows of keys or values are more than 4 GB apart.
pub fn far_rows(tensors: [&TensorView; 2]) -> bool {
    (tensors.iter()).any(|tensor| tensor.shape[2] > 1 && !is_u32(tensor.strides[2] * 2))
}

/// Checks q, k, v, the output's gradient if present, and the scale.
///
/// # Errors
/// [`KernelError`] if cp.async cannot read a tensor, or the scale is not positive.
pub fn check_inputs(inputs: &[&TensorView], scale: f64) -> Result<(), KernelError> {
    for (name, tensor) in ["q", "k", "v", "grad_out"].into_iter().zip(inputs) {
        check_rows(name, tensor, PIECE)?;
    }
    check_scale(scale, None)
}
