//! Views of matrices in memory.

use crate::kernels::linear::tile::{Order, ROWS, SLAB};
use crate::kernels::prelude::*;
use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::args;

/// Alignment of strides and addresses for TMA and cp.async, in elements: 16 bytes.
const ALIGNMENT: usize = 8;

/// Returns a tensor map of a half-precision tensor, read in boxes.
///
/// # Safety
/// The handle must hold the elements of this shape and these strides.
pub(crate) unsafe fn boxes_of(
    handle: &Handle,
    shape: [usize; 4],
    strides: [usize; 4],
    boxes: [usize; 4],
    half: Half,
) -> TensorMapArg<Tiled> {
    let dtype = ElemType::Float(match half {
        Half::Bf16 => FloatKind::BF16,
        Half::F16 => FloatKind::F16,
    });
    // SAFETY: as the caller promises.
    unsafe { args::boxes_of(handle, &shape, &strides, &boxes, dtype) }
}

/// Batch of half-precision matrices.
#[derive(Clone, Debug)]
pub struct MatrixView {
    /// Buffer, beginning at the first element.
    pub handle: Handle,
    /// Batch, rows, columns. If the other factor's batch is a multiple of this one's, neighbouring matrices of it share one.
    pub shape: [usize; 3],
    /// Strides in elements; the first is that between matrices of one run, see [`outer`](Self::outer).
    pub strides: [usize; 3],
    /// Number of equal runs of matrices in the batch, and the stride between runs in elements.
    pub outer: [usize; 2],
    /// Rows of a batch entry, if the matrix is laid out by heads, as `[batch, heads, seq, 64]`. It is a single matrix then, and the strides are those of rows
    /// of 64.
    pub seq: Option<usize>,
}

/// Columns of a head of a factor laid out by heads: a slab holds one head.
pub const HEAD: usize = SLAB;

/// The sequence of such a factor must be a multiple of this if its columns are the depth: the rows of a tile.
pub const HEAD_ROWS: usize = ROWS;

impl MatrixView {
    /// Returns matrices of a shape and strides, in one run.
    pub fn new(handle: Handle, shape: [usize; 3], strides: [usize; 3]) -> Self {
        Self {
            handle,
            shape,
            strides,
            outer: [1, 0],
            seq: None,
        }
    }

    /// Views contiguous `[batch, heads, seq, 64]` as the matrix `[batch · seq, heads · 64]`.
    pub fn by_heads(handle: Handle, [batch, heads, seq]: [usize; 3]) -> Self {
        let strides = [batch * seq * heads * HEAD, HEAD, 1];
        Self {
            seq: Some(seq),
            ..Self::new(handle, [1, batch * seq, heads * HEAD], strides)
        }
    }

    /// Swaps rows and columns of the matrices.
    #[must_use]
    pub fn transposed(mut self) -> Self {
        self.shape.swap(1, 2);
        self.strides.swap(1, 2);
        self
    }

    /// Returns the number of matrices of a run.
    pub(crate) fn run(&self) -> usize {
        self.shape[0] / self.outer[0].max(1)
    }

    /// Returns the contiguous dimension of a factor whose depth is dimension `depth`.
    ///
    /// # Errors
    /// The reason why TMA and cp.async cannot read it.
    pub(crate) fn order(&self, depth: usize) -> Result<Order, &'static str> {
        let begins = self.handle.offset_start.unwrap_or(0);
        let order = lies([self.shape, self.strides], depth, begins)?;
        let [runs, stride] = self.outer;
        if runs == 0 || !self.shape[0].is_multiple_of(runs) {
            return Err("a factor's batch is no number of equal runs");
        }
        if runs > 1 && (stride == 0 || !stride.is_multiple_of(ALIGNMENT)) {
            return Err("a factor's matrices do not begin at multiples of 16 bytes");
        }
        let multiple = match order {
            Order::Depth => ROWS,
            Order::Across => SLAB,
        };
        match self.seq.is_none_or(|seq| seq.is_multiple_of(multiple)) {
            true => Ok(order),
            false => Err("a sequence by heads is not a multiple of the rows of a tile"),
        }
    }
}

/// Returns the contiguous dimension of a factor of this shape and these strides that begins at byte `begins`.
fn lies(
    [shape, strides]: [[usize; 3]; 2],
    depth: usize,
    begins: u64,
) -> Result<Order, &'static str> {
    let across = 3 - depth;
    let (order, inner) = match (strides[depth], strides[across]) {
        (1, _) => (Order::Depth, depth),
        (_, 1) => (Order::Across, across),
        _ => return Err("a factor has neither contiguous rows nor contiguous columns"),
    };
    let mut outer = (0..3)
        .filter(|dim| *dim != inner && shape[*dim] > 1)
        .map(|dim| strides[dim]);
    if outer.clone().any(|stride| stride == 0) {
        return Err("a factor repeats its rows");
    }
    match outer.all(|stride| stride.is_multiple_of(ALIGNMENT)) && begins.is_multiple_of(16) {
        true => Ok(order),
        false => Err("a factor's rows do not begin at multiples of 16 bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_lie_one_way_or_the_other() {
        // Only rank, shape and strides matter.
        let order =
            |shape: [usize; 3], strides: [usize; 3], depth| lies([shape, strides], depth, 0);
        assert_eq!(order([1, 40, 16], [640, 16, 1], 2), Ok(Order::Depth));
        assert_eq!(order([1, 40, 16], [640, 16, 1], 1), Ok(Order::Across));
        assert_eq!(order([1, 16, 40], [640, 1, 16], 1), Ok(Order::Depth));
        // The stride of a single row is arbitrary.
        assert_eq!(order([1, 1, 16], [3, 5, 1], 2), Ok(Order::Depth));
        assert_eq!(
            order([1, 40, 12], [480, 12, 1], 2),
            Err("a factor's rows do not begin at multiples of 16 bytes")
        );
        assert_eq!(
            lies([[1, 40, 16], [640, 16, 1]], 2, 8),
            Err("a factor's rows do not begin at multiples of 16 bytes")
        );
        assert_eq!(
            order([1, 40, 16], [1280, 32, 2], 2),
            Err("a factor has neither contiguous rows nor contiguous columns")
        );
        for strides in [[0, 16, 1], [640, 0, 1]] {
            assert_eq!(
                order([2, 40, 16], strides, 2),
                Err("a factor repeats its rows")
            );
        }
    }
}
