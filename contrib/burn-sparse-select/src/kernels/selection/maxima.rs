//! The highest product of each row with every so many rows of another matrix, where tensor cores make them: no product is written.

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::selection::products::RowsView;
use crate::kernels::selection::products::{asked, request_of};
use blocksparse_cubecl::error::KernelError;
use burn_fused_ops::kernels::linear::{Epilogue, EpilogueTensors, ProductPlan, multiply};

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
