//! Matrices in memory, as products read them.

use crate::kernels::linear::tile::{Order, ROWS, SLAB};
use crate::kernels::prelude::*;
use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::args;

/// Elements that strides and addresses are multiples of, for TMA and for cp.async: 16 bytes.
const ALIGNMENT: usize = 8;

/// A map of a tensor of half-precision numbers, of which boxes are read.
///
/// # Safety
/// The handle holds the elements of such a shape and strides.
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

/// A batch of matrices of half-precision numbers.
#[derive(Clone, Debug)]
pub struct MatrixView {
    /// The buffer, from the first element on.
    pub handle: Handle,
    /// Batch, rows, columns. Where the other factor's batch is a multiple, as many neighbours share a matrix.
    pub shape: [usize; 3],
    /// Elements from one to the next; from a matrix to the next one of the same [`outer`](Self::outer).
    pub strides: [usize; 3],
    /// How many equal runs of matrices the batch is, and the elements from one to the next.
    pub outer: [usize; 2],
    /// Rows of a batch entry, if the matrix lies by heads, as `[batch, heads, seq, 64]`: then it is one, and the strides are as if it had rows of 64.
    pub seq: Option<usize>,
}

/// Columns of a head of a factor that lies by heads: a slab has one.
pub const HEAD: usize = SLAB;

/// What the sequence of such a factor is a multiple of, if its columns are the depth: the rows of a tile.
pub const HEAD_ROWS: usize = ROWS;

impl MatrixView {
    /// Matrices of a shape and strides, in one run.
    pub fn new(handle: Handle, shape: [usize; 3], strides: [usize; 3]) -> Self {
        Self {
            handle,
            shape,
            strides,
            outer: [1, 0],
            seq: None,
        }
    }

    /// `[batch, heads, seq, 64]`, contiguous, as the matrix `[batch · seq, heads · 64]`.
    pub fn by_heads(handle: Handle, [batch, heads, seq]: [usize; 3]) -> Self {
        let strides = [batch * seq * heads * HEAD, HEAD, 1];
        Self {
            seq: Some(seq),
            ..Self::new(handle, [1, batch * seq, heads * HEAD], strides)
        }
    }

    /// The matrices with rows and columns swapped.
    #[must_use]
    pub fn transposed(mut self) -> Self {
        self.shape.swap(1, 2);
        self.strides.swap(1, 2);
        self
    }

    /// Matrices of a run.
    pub(crate) fn run(&self) -> usize {
        self.shape[0] / self.outer[0].max(1)
    }

    /// How a factor lies whose depth is in dimension `depth`.
    ///
    /// # Errors
    /// What TMA and cp.async cannot read.
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

/// How a factor of a shape and strides lies that begins at a byte.
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
        // Rank, shape and strides alone decide.
        let order =
            |shape: [usize; 3], strides: [usize; 3], depth| lies([shape, strides], depth, 0);
        assert_eq!(order([1, 40, 16], [640, 16, 1], 2), Ok(Order::Depth));
        assert_eq!(order([1, 40, 16], [640, 16, 1], 1), Ok(Order::Across));
        assert_eq!(order([1, 16, 40], [640, 1, 16], 1), Ok(Order::Depth));
        // What has one row alone may lie anyhow.
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
