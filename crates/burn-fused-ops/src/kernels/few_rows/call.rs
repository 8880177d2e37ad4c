//! Arguments of a product of few rows.

use crate::kernels::prelude::*;
use blocksparse_cubecl::shared::curve::ActivationKind;

/// Most weights that share a launch.
pub const MOST_WEIGHTS: usize = 3;
/// Bytes of a load; rows of weights are multiples of it.
pub const BYTES: usize = 16;

/// Weight of such a product.
#[derive(Clone, Copy, Debug)]
pub struct FewRowsWeight<'a> {
    /// Buffer, beginning at the first element.
    pub handle: &'a Handle,
    /// Number of columns.
    pub width: usize,
    /// Distance between rows of the memory, in elements.
    pub pitch: usize,
}

/// Tensors of a product of few rows. All but the weights are contiguous, and all but the bias have one type.
#[derive(Clone, Copy, Debug)]
pub struct FewRows<'a> {
    /// `[rows, depth]`
    pub x: Typed<'a>,
    /// Rows and depth.
    pub lengths: [usize; 2],
    /// One to three weights, `[depth, width]`; only one if it is `transposed`.
    pub weights: &'a [FewRowsWeight<'a>],
    /// True if the weight is in memory as `[width, depth]`.
    pub transposed: bool,
    /// Bias, `[Σ width]`; not supported with a transposed weight.
    pub bias: Option<Typed<'a>>,
    /// Output, `[rows, Σ width]`.
    pub output: &'a Handle,
    /// Number of elements of the output. `starts` holds the offset of each weight's `[rows, width]` in it; without it the output is `[rows, Σ width]`.
    pub numbers: usize,
    pub starts: Option<[usize; MOST_WEIGHTS]>,
    /// Activation of the first weight's result, which is then multiplied by the second's: the output is `[rows, width]`.
    pub gate: Option<ActivationKind>,
}

/// Shapes and kind of a product of few rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FewRowsRequest {
    pub element: ElemType,
    /// Rows and depth.
    pub lengths: [usize; 2],
    /// Columns of each weight; 0 for an absent one.
    pub widths: [usize; MOST_WEIGHTS],
    pub transposed: bool,
    pub gated: bool,
}

impl FewRowsRequest {
    /// Returns the request for weights with these columns.
    ///
    /// # Errors
    /// [`KernelError`] if a length is 0 or not a multiple of 16 bytes, or there are too many weights.
    pub fn new(
        element: ElemType,
        lengths: [usize; 2],
        widths: &[usize],
        [transposed, gated]: [bool; 2],
    ) -> Result<Self, KernelError> {
        let [rows, depth] = lengths;
        let count = if transposed { 1 } else { MOST_WEIGHTS };
        if widths.is_empty() || widths.len() > count {
            return Err(KernelError::limit("weights", count as u64, widths.len()));
        }
        if gated && (widths.len() != 2 || widths[0] != widths[1]) {
            return Err(KernelError::limit("weights of a gate", 2u32, widths.len()));
        }
        let vector = BYTES / element.size();
        let whole = |n: &usize| *n > 0 && n.is_multiple_of(vector);
        if rows == 0 || !whole(&depth) || !widths.iter().all(whole) {
            return Err(KernelError::limit(
                "numbers of a load",
                vector as u64,
                depth,
            ));
        }
        let mut request = Self {
            element,
            lengths,
            widths: [0; MOST_WEIGHTS],
            transposed,
            gated,
        };
        request.widths[..widths.len()].copy_from_slice(widths);
        Ok(request)
    }

    /// Returns the number of weights that have columns of their own in the result.
    pub fn count(&self) -> usize {
        match self.gated {
            true => 1,
            false => self.widths.iter().filter(|width| **width > 0).count(),
        }
    }
}

impl FewRows<'_> {
    /// Returns the request of this call.
    ///
    /// # Errors
    /// Those of [`FewRowsRequest::new`]; also if rows in memory do not begin at multiples of 16 bytes.
    pub fn request(&self) -> Result<FewRowsRequest, KernelError> {
        let vector = BYTES / self.x.1.size();
        let widths: Vec<usize> = self.weights.iter().map(|weight| weight.width).collect();
        let kind = [self.transposed, self.gate.is_some()];
        let request = FewRowsRequest::new(self.x.1, self.lengths, &widths, kind)?;
        match self
            .weights
            .iter()
            .find(|weight| !weight.pitch.is_multiple_of(vector))
        {
            None => Ok(request),
            Some(weight) => Err(KernelError::limit(
                "numbers of a load",
                vector as u64,
                weight.pitch,
            )),
        }
    }

    /// Returns the extent of a weight in memory, from its first element to its last.
    pub fn reach(&self, weight: &FewRowsWeight) -> usize {
        let [_, depth] = self.lengths;
        match self.transposed {
            true => (weight.width - 1) * weight.pitch + depth,
            false => (depth - 1) * weight.pitch + weight.width,
        }
    }
}
