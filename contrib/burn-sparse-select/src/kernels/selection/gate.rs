//! Per-query selection of blocks by the means of their keys, where a tile of tensor cores contains all products of a query. The selection runs in the epilogue
//! (`linear/highest.rs`), and no product is stored. A mean is represented by two values of the queries' type, whose sum has a relative error of about 2⁻¹⁶.
//! Also the highest product of each row with each run of rows of another matrix ([`RunMaxima`]).

use crate::kernels::rows::blocks::{Beside, Blocked, RowBlocks, block_means};
use crate::kernels::selection::UNITS;
use crate::kernels::selection::products::{RowsView, asked, pitch, request_of};
use blocksparse_cubecl::prelude::*;
use burn_fused_ops::kernels::linear::{
    Epilogue, EpilogueTensors, Highest, ProductPlan, SeenColumns, multiply,
};

/// Sizes of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct GateSizes {
    /// `batch · heads` of queries and of keys; the latter divides the former.
    pub lists: [usize; 2],
    /// Number of queries and keys per list.
    pub seq: [usize; 2],
    /// Number of elements of a query.
    pub width: usize,
    /// Number of keys of a block.
    pub block: usize,
    /// Upper bound of the blocks that a query selects.
    pub most: usize,
}

/// Number of values that represent a mean.
const PARTS: usize = 2;

impl GateSizes {
    fn blocks(&self) -> usize {
        self.seq[1].div_ceil(self.block)
    }

    fn epilogue(&self) -> Epilogue {
        Epilogue::Highest(Highest {
            most: self.most,
            parts: PARTS,
            step: self.block,
        })
    }

    /// Returns whether a kernel serves the call.
    pub fn is_served(&self, client: &Client, element: ElemType) -> bool {
        let columns = pitch(self.blocks() * PARTS);
        let sizes = [self.lists[0], self.seq[0], columns, self.width];
        let request = request_of(element, sizes, self.epilogue());
        self.most > 0 && request.is_some_and(|request| ProductPlan::new(client, request).is_ok())
    }
}

/// Returns the blocks before each query's own whose means have the highest products with it, in descending order, ties in favor of the earlier: `picks`
/// `[lists, seq_q, most]`, i32, −1 where there are fewer. `q` is `[lists, seq_q, width]`, `k` `[kv lists, seq_kv, width]`; the last query is at the position of
/// the last key.
///
/// # Errors
/// [`KernelError`] if the call is not [served](GateSizes::is_served), or rows are not aligned to 16 bytes.
pub fn query_picks(
    client: &Client,
    element: ElemType,
    [q, k]: [&Handle; 2],
    of: &GateSizes,
    picks: &Handle,
) -> Result<(), KernelError> {
    let ([lists, kv_lists], [seq_q, seq_kv]) = (of.lists, of.seq);
    let blocks = of.blocks();
    let means = client.empty(kv_lists * blocks * of.width * size_of::<f32>());
    let by_block = RowBlocks::new(kv_lists, [seq_kv, of.width], of.block);
    let blocked = Blocked {
        x: k,
        of: &by_block,
        means: &means,
    };
    block_means(client, element, blocked, Beside::default())?;
    let means = halves(client, element, &means, [kv_lists * blocks, of.width])?;
    let q = RowsView::new(q, [lists, seq_q, of.width]);
    let means = RowsView::new(&means, [kv_lists, blocks * PARTS, of.width]);
    let refused = || KernelError::Factor { factor: "b" };
    let ([left, right], request) = asked(element, [&q, &means]).ok_or_else(refused)?;
    let plan = ProductPlan::new(client, request.with(of.epilogue())).map_err(|_| refused())?;
    let beside = EpilogueTensors {
        seen: Some(SeenColumns {
            first: seq_kv as i64 - seq_q as i64,
            columns: blocks,
            factor: 1.0,
        }),
        ..EpilogueTensors::default()
    };
    multiply(client, &plan, [&left, &right], picks, &beside)
}

/// Splits each f32 row into two rows of another type: the rounded numbers, and the remainder.
fn halves(
    client: &Client,
    element: ElemType,
    x: &Handle,
    [rows, width]: [usize; 2],
) -> Result<Handle, KernelError> {
    let made = client.empty(2 * rows * width * element.size());
    // SAFETY: a unit below the number of elements reads one and writes two.
    unsafe {
        halve::launch_unchecked(
            client,
            spread(client, (rows * width).div_ceil(UNITS) as u64)?,
            CubeDim::new_1d(UNITS as u32),
            address_of(client, 2 * rows * width)?,
            buffer(x, rows * width),
            buffer(&made, 2 * rows * width),
            width,
            rows * width,
            element,
        );
    }
    Ok(made)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn halve<E: Float>(
    x: &[f32],
    out: &mut [E],
    width: usize,
    count: usize,
    #[define(E)] _element: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < count {
        let (row, column) = (at / width, at % width);
        let number = x[at];
        let high = E::cast_from(number);
        out[row * 2 * width + column] = high;
        out[(row * 2 + 1) * width + column] = E::cast_from(number - f32::cast_from(high));
    }
}

/// Maximum number of rows of a run.
pub const MOST_RUN: usize = 128;

/// Sizes of the products.
#[derive(Clone, Copy, Debug)]
pub struct RunMaxima {
    /// Number of matrices of the left factor, and of their rows.
    pub rows: [usize; 2],
    /// Number of rows of a matrix of the right factor, a multiple of `run`.
    pub columns: usize,
    /// Number of elements of a row.
    pub width: usize,
    /// Number of rows of a run: 8, 16, 32, 64 or 128.
    pub run: usize,
}

impl RunMaxima {
    /// Returns whether a kernel serves the call.
    pub fn is_served(&self, client: &Client, element: ElemType) -> bool {
        let [batch, rows] = self.rows;
        let sizes = [batch, rows, self.columns, self.width];
        let request = request_of(element, sizes, Epilogue::Maxima { run: self.run });
        request.is_some_and(|request| ProductPlan::new(client, request).is_ok())
    }

    /// Computes the maxima, f32 `[a.matrices, a.rows, b.rows / run]`. A maximum is NaN only if the whole run is.
    ///
    /// # Errors
    /// [`KernelError`] if the call is not [served](Self::is_served), or rows are not aligned to 16 bytes.
    pub fn launch(
        &self,
        client: &Client,
        element: ElemType,
        factors: [&RowsView; 2],
        out: &Handle,
    ) -> Result<(), KernelError> {
        let refused = || KernelError::Factor { factor: "b" };
        let ([left, right], request) = asked(element, factors).ok_or_else(refused)?;
        let request = request.with(Epilogue::Maxima { run: self.run });
        let plan = ProductPlan::new(client, request).map_err(|_| refused())?;
        let beside = EpilogueTensors::default();
        multiply(client, &plan, [&left, &right], out, &beside)
    }
}
