//! Token blocks to compress: `[i · stride, i · stride + block)`.

use burn::tensor::{DType, Tensor};

use crate::nsa::Nsa;
use crate::selection::parts::joined;
use burn_blocksparse::OpError;

impl Nsa {
    /// Returns the number of complete compressed blocks of a sequence.
    pub fn entries(&self, seq: usize) -> usize {
        match seq.checked_sub(self.options.block) {
            Some(behind) => behind / self.options.stride + 1,
            None => 0,
        }
    }

    /// Computes the means of token blocks, summed in f32 at least. Differentiable. `None` if the sequence is shorter than a block.
    ///
    /// # Shapes
    /// - `x`: `[batch, heads, seq, width]`
    /// - result: `[batch, heads, entries, width]`, in the dtype of `x`
    ///
    /// # Errors
    /// [`OpError`] if `x` is empty.
    pub fn means(&self, x: Tensor<4>) -> Result<Option<Tensor<4>>, OpError> {
        let Some(cells) = self.cells(&x)? else {
            return Ok(None);
        };
        let [batch, heads, count, width] = cells;
        let (entries, stride, dtype) = (self.entries(x.dims()[2]), self.options.stride, x.dtype());
        let x = x.slice_dim(2, 0..count * stride);
        let x = match dtype {
            DType::F64 => x,
            _ => x.cast(DType::F32),
        };
        let x = x.reshape([batch * heads, count, stride, width]).mean_dim(2);
        let x = x.reshape([batch, heads, count, width]);
        let parts = self.options.block / stride;
        let parts = (0..parts).map(|part| x.clone().slice_dim(2, part..part + entries));
        let sum = parts
            .reduce(|a, b| a + b)
            .expect("a block has a stride at least");
        let mean = sum * (stride as f64 / self.options.block as f64);
        Ok(Some(mean.cast(dtype)))
    }

    /// Returns the tokens of each block, concatenated, as the input of a compression. Differentiable. `None` if the sequence is shorter than a block.
    ///
    /// # Shapes
    /// - `x`: `[batch, heads, seq, width]`
    /// - result: `[batch, heads, entries, block · width]`
    ///
    /// # Errors
    /// [`OpError`] if `x` is empty.
    pub fn windows(&self, x: Tensor<4>) -> Result<Option<Tensor<4>>, OpError> {
        let Some([batch, heads, count, width]) = self.cells(&x)? else {
            return Ok(None);
        };
        let (entries, stride) = (self.entries(x.dims()[2]), self.options.stride);
        let x = x.slice_dim(2, 0..count * stride);
        let x = x.reshape([batch, heads, count, stride * width]);
        let parts = self.options.block / stride;
        let parts = (0..parts).map(|part| x.clone().slice_dim(2, part..part + entries));
        Ok(Some(joined(parts.collect(), 3)))
    }

    /// Returns the shape of the tokens that some block covers, in complete strides: `[batch, heads, strides, width]`.
    fn cells(&self, x: &Tensor<4>) -> Result<Option<[usize; 4]>, OpError> {
        let dims = x.dims();
        blocksparse::ensure! { OpError; !dims.contains(&0) => "x", "of one number at least", format!("{dims:?}"); }
        let [batch, heads, seq, width] = dims;
        let entries = self.entries(seq);
        let overlap = self.options.block / self.options.stride - 1;
        Ok((entries > 0).then_some([batch, heads, entries + overlap, width]))
    }
}
