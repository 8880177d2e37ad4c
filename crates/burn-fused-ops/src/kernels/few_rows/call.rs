//! What a product of few rows is made of.

use crate::kernels::prelude::*;
use blocksparse_cubecl::shared::curve::ActivationKind;

/// Weights that share a launch, at most.
pub const MOST_WEIGHTS: usize = 3;
/// Bytes of a load, which rows of weights are multiples of.
pub const BYTES: usize = 16;

/// A weight of such a product.
#[derive(Clone, Copy, Debug)]
pub struct FewRowsWeight<'a> {
    /// From its first number on.
    pub handle: &'a Handle,
    /// Its columns.
    pub width: usize,
    /// From one row of the memory to the next.
    pub pitch: usize,
}

/// A product of few rows. Everything but weights is contiguous, of one type but for the bias.
#[derive(Clone, Copy, Debug)]
pub struct FewRows<'a> {
    /// `[rows, depth]`
    pub x: Typed<'a>,
    /// Rows and depth.
    pub lengths: [usize; 2],
    /// One to three, `[depth, width]`; a single one if it is `transposed`.
    pub weights: &'a [FewRowsWeight<'a>],
    /// Whether the weight is in memory as `[width, depth]`.
    pub transposed: bool,
    /// `[Σ width]`; not of a weight that is transposed.
    pub bias: Option<Typed<'a>>,
    /// To be written: `[rows, Σ width]`.
    pub output: &'a Handle,
    /// Elements of the output; and where `[rows, width]` of each weight begins in it, if they do not lie side by side.
    pub numbers: usize,
    pub starts: Option<[usize; MOST_WEIGHTS]>,
    /// What becomes of the first of two weights' rows before the second's are multiplied by them: then the output is `[rows, width]`.
    pub gate: Option<ActivationKind>,
}

/// What such a product is, without its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FewRowsRequest {
    pub element: ElemType,
    /// Rows and depth.
    pub lengths: [usize; 2],
    /// Columns of each weight; 0 where there is none.
    pub widths: [usize; MOST_WEIGHTS],
    pub transposed: bool,
    pub gated: bool,
}

impl FewRowsRequest {
    /// Of weights with these columns.
    ///
    /// # Errors
    /// [`KernelError`] if a length is 0 or no multiple of 16 bytes, or there are more weights.
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

    /// Weights that have columns of their own in the result.
    pub fn count(&self) -> usize {
        match self.gated {
            true => 1,
            false => self.widths.iter().filter(|width| **width > 0).count(),
        }
    }
}

impl FewRows<'_> {
    /// Of this call.
    ///
    /// # Errors
    /// As [`FewRowsRequest::new`], and if rows of the memory do not begin at multiples of 16 bytes.
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

    /// Elements of a weight, from its first to its last.
    pub fn reach(&self, weight: &FewRowsWeight) -> usize {
        let [_, depth] = self.lengths;
        match self.transposed {
            true => (weight.width - 1) * weight.pitch + depth,
            false => (depth - 1) * weight.pitch + weight.width,
        }
    }
}
