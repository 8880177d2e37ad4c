//! An indexer's queries and keys in fp8.

use blocksparse::{HADAMARD_WIDTHS, HadamardFp8};
use burn::tensor::{DType, Tensor, TensorData};

use crate::dsa::found::like;
#[cfg(feature = "cube")]
use crate::dsa::kernels;
use crate::dsa::scores::DsaIndex;
use burn_blocksparse::OpError;

impl DsaIndex {
    /// Rounds queries and keys to fp8 as DeepSeek-V3.2-Exp's indexer does (its report, 2025, and `inference/model.py`). Rows are rotated by a Hadamard matrix
    /// and rounded to E4M3 times a power of two per row, see [`HadamardFp8::round`]. They stay tensors of their dtype, which represents such numbers exactly
    /// (f16 loses those below 2⁻²⁴), so every device computes the same scores up to the order of sums. GPUs of compute capability 9.0 multiply rows of 128 with
    /// 8, 16, 32, 64 or 128 heads in fp8. An index that is in fp8 stays unchanged.
    ///
    /// Use it for selection only: rounded rows have no gradient. Keys that are stored for later queries, in a cache or in pages, must come from an index in
    /// fp8; pass them to [`with_keys`](Self::with_keys).
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_sparse_select::dsa::{Dsa, DsaIndex};
    ///
    /// let device = Device::flex();
    /// let random = |heads, width| Tensor::<4>::random([1, heads, 64, width], Distribution::Default, &device);
    /// let index = DsaIndex::new(random(2, 16), random(1, 16), random(2, 1).squeeze_dim(3))?;
    /// let lists = Dsa::new(12)?.choose(&index.in_fp8()?)?;
    /// assert_eq!(lists.keys().dims(), [1, 1, 64, 12]);
    /// # Ok::<(), burn_blocksparse::OpError>(())
    /// ```
    ///
    /// # Errors
    /// [`OpError`] if the width of the indexer's heads is not a power of two from 8 to 256.
    pub fn in_fp8(self) -> Result<Self, OpError> {
        if self.in_fp8 {
            return Ok(self);
        }
        let [.., width] = self.q.dims();
        if !HadamardFp8::takes(width) {
            let [least, most] = HADAMARD_WIDTHS;
            let expected = format!("a power of two from {least} to {most}, for fp8");
            return Err(OpError::argument("index q's index_dim", expected, width));
        }
        Ok(Self {
            q: rounded(&self.q, HadamardFp8::Queries),
            k: rounded(&self.k, HadamardFp8::Keys),
            in_fp8: true,
            ..self
        })
    }

    /// Returns whether queries and keys are in fp8.
    pub fn is_in_fp8(&self) -> bool {
        self.in_fp8
    }

    /// Returns the index with other keys, `[batch, 1, seq_kv, index_dim]`. If the index is in fp8, they must be keys of an index in fp8.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn with_keys(self, k: Tensor<4>) -> Result<Self, OpError> {
        let in_fp8 = self.in_fp8;
        let index = Self::new(self.q, k, self.weights)?;
        Ok(Self { in_fp8, ..index })
    }
}

fn rounded(x: &Tensor<4>, of: HadamardFp8) -> Tensor<4> {
    let inner = x.clone().without_autodiff();
    #[cfg(feature = "cube")]
    let rounded = kernels::rounded(&inner, of).unwrap_or_else(|| by_host(inner, of));
    #[cfg(not(feature = "cube"))]
    let rounded = by_host(inner, of);
    match x.is_autodiff() {
        true => like(rounded, x),
        false => rounded,
    }
}

/// Rounds on the host, for devices without a kernel.
fn by_host(x: Tensor<4>, of: HadamardFp8) -> Tensor<4> {
    let (device, dtype, dims) = (x.device(), x.dtype(), x.dims());
    let mut numbers: Vec<f32> = x.into_data().convert_dtype(DType::F32).iter().collect();
    of.round(&mut numbers, dims[3]);
    Tensor::from_data(
        TensorData::new(numbers, dims).convert_dtype(dtype),
        (&device, dtype),
    )
}
