//! Matrices in memory, as products read them.

use cubecl::server::Handle;

use super::tile::Order;

/// Elements that TMA's strides and addresses are multiples of: 16 bytes.
const ALIGNMENT: usize = 8;

/// A batch of matrices of half-precision numbers.
#[derive(Clone, Debug)]
pub struct MatrixView {
    /// The buffer, from the first element on.
    pub handle: Handle,
    /// Batch, rows, columns. A batch of 1 goes with any other.
    pub shape: [usize; 3],
    /// Elements from one to the next.
    pub strides: [usize; 3],
}

impl MatrixView {
    /// The matrices with rows and columns swapped.
    #[must_use]
    pub fn transposed(mut self) -> Self {
        self.shape.swap(1, 2);
        self.strides.swap(1, 2);
        self
    }

    /// How a factor lies whose depth is in dimension `depth`.
    ///
    /// # Errors
    /// What TMA cannot read.
    pub(super) fn order(&self, depth: usize) -> Result<Order, &'static str> {
        let across = 3 - depth;
        let order = match (self.strides[depth], self.strides[across]) {
            (1, _) => Order::Depth,
            (_, 1) => Order::Across,
            _ => return Err("a factor has neither contiguous rows nor contiguous columns"),
        };
        let inner = match order {
            Order::Depth => depth,
            Order::Across => across,
        };
        let begins = self.handle.offset_start.unwrap_or(0);
        let aligned = (0..3)
            .filter(|dim| *dim != inner && self.shape[*dim] > 1)
            .all(|dim| self.strides[dim].is_multiple_of(ALIGNMENT));
        match aligned && begins.is_multiple_of(16) {
            true => Ok(order),
            false => Err("a factor's rows do not begin at multiples of 16 bytes"),
        }
    }
}
