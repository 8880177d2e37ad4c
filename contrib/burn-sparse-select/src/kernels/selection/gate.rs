//! The blocks that single queries choose by the means of their keys, where tensor cores have all of a query's products in one tile: queries pick there
//! (`linear/highest.rs`), and no product is in memory. A mean counts as two numbers of the queries' type, whose sum it is but for 2⁻¹⁶ or so of it.
//! Also the highest product of each row with every so many rows of another matrix ([`RunMaxima`]).

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
    /// Batch entries times heads, of queries and of keys; these divide those.
    pub lists: [usize; 2],
    /// Queries and keys of each.
    pub seq: [usize; 2],
    /// Elements of a query.
    pub width: usize,
    /// Keys of a block.
    pub block: usize,
    /// Blocks that a query chooses, at most.
    pub most: usize,
}

/// Numbers that stand for a mean.
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

    /// Whether a kernel picks.
    pub fn is_served(&self, client: &Client, element: ElemType) -> bool {
        let columns = pitch(self.blocks() * PARTS);
        let sizes = [self.lists[0], self.seq[0], columns, self.width];
        let request = request_of(element, sizes, self.epilogue());
        self.most > 0 && request.is_some_and(|request| ProductPlan::new(client, request).is_ok())
    }
}

/// Of each query the blocks before its own whose means it has the highest products with, by falling product, of equal ones the earlier: `picks`
/// `[lists, seq_q, most]`, i32, −1 where there are fewer. `q` is `[lists, seq_q, width]`, `k` `[kv lists, seq_kv, width]`; the last query sits at the last key.
///
/// # Errors
/// [`KernelError`] if the call is not [served](GateSizes::is_served), or rows do not begin at multiples of 16 bytes.
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

/// Rows of f32 numbers as two rows each of another type: the numbers as they are there, and what that leaves.
fn halves(
    client: &Client,
    element: ElemType,
    x: &Handle,
    [rows, width]: [usize; 2],
) -> Result<Handle, KernelError> {
    let made = client.empty(2 * rows * width * element.size());
    // SAFETY: a unit below the rows' numbers reads one and writes two.
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

/// Rows of a run, at most.
pub const MOST_RUN: usize = 128;

/// Which products.
#[derive(Clone, Copy, Debug)]
pub struct RunMaxima {
    /// Matrices of the left factor, and their rows.
    pub rows: [usize; 2],
    /// Rows of a matrix of the right factor, whole runs.
    pub columns: usize,
    /// Elements of a row.
    pub width: usize,
    /// Rows of a run: 8, 16, 32, 64 or 128.
    pub run: usize,
}

impl RunMaxima {
    /// Whether a kernel makes them.
    pub fn is_served(&self, client: &Client, element: ElemType) -> bool {
        let [batch, rows] = self.rows;
        let sizes = [batch, rows, self.columns, self.width];
        let request = request_of(element, sizes, Epilogue::Maxima { run: self.run });
        request.is_some_and(|request| ProductPlan::new(client, request).is_ok())
    }

    /// Makes them, `[a.matrices, a.rows, b.rows / run]` in f32. NaN counts only where all of a run are.
    ///
    /// # Errors
    /// [`KernelError`] if they are not [served](Self::is_served), or rows do not begin at multiples of 16 bytes.
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
