//! Choice of the kernel for a product of few rows.

use std::fmt;

use crate::kernels::few_rows::call::{FewRows, FewRowsRequest};
use crate::kernels::few_rows::units;
use crate::kernels::few_rows::units::MOST_UNIT_ROWS;
use crate::kernels::few_rows::warps::{self, WarpsPlan};
use crate::kernels::prelude::*;

/// Most rows of a product.
pub const MOST_ROWS: usize = 32;

/// Most rows with one weight, since tiles multiply it in one launch; and the bytes of several weights from which tiles are faster.
const ROWS_OF_ONE_WEIGHT: usize = 16;
const LARGE: usize = 16 << 20;

/// Most rows that `units` multiplies where tensor cores could.
const ROWS_OF_UNITS: usize = 2;

/// Plan of a product of few rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FewRowsPlan {
    /// Without tensor cores.
    Units,
    /// On mma.sync.
    Warps(WarpsPlan),
}

impl FewRowsPlan {
    /// Returns the plan that runs.
    ///
    /// # Errors
    /// [`KernelError`] if no kernel here supports that many rows.
    pub fn new(client: &Client, request: &FewRowsRequest) -> Result<Self, KernelError> {
        let plans = Self::all(client, request);
        let [rows, _] = request.lengths;
        plans
            .first()
            .copied()
            .ok_or(KernelError::limit("rows", MOST_UNIT_ROWS as u64, rows))
    }

    /// Returns all plans, the preferred one first.
    pub fn all(client: &Client, request: &FewRowsRequest) -> Vec<Self> {
        let [rows, _] = request.lengths;
        let units = (rows <= MOST_UNIT_ROWS).then_some(Self::Units);
        let warps = match rows <= Self::most_rows(request) {
            true => WarpsPlan::all(client, request).unwrap_or_default(),
            false => Vec::new(),
        };
        let warps = warps.into_iter().map(Self::Warps);
        match rows <= ROWS_OF_UNITS {
            true => units.into_iter().chain(warps).collect(),
            false => warps.chain(units).collect(),
        }
    }

    /// Returns the most rows for which this beats tiles. Tiles need further launches for several weights: concatenating copies, or an activation and a
    /// product of their outputs.
    fn most_rows(request: &FewRowsRequest) -> usize {
        let [_, depth] = request.lengths;
        let columns: usize = request.widths.iter().sum();
        let several = request.widths[1] > 0;
        match several && depth * columns * request.element.size() <= LARGE {
            true => MOST_ROWS,
            false => ROWS_OF_ONE_WEIGHT,
        }
    }

    /// Returns whether this plan runs another kernel than `than`.
    pub fn is_other(&self, than: &Self) -> bool {
        std::mem::discriminant(self) != std::mem::discriminant(than)
    }

    /// Computes `output = x · [w₁ w₂ w₃] + bias`, with sums in f32 (f64 for f64), rounded once.
    ///
    /// # Errors
    /// [`KernelError`] if the call differs from the planned one, or the device lacks a type, units, shared memory or vectors of 16 bytes.
    pub fn launch(&self, client: &Client, call: &FewRows) -> Result<(), KernelError> {
        let request = call.request()?;
        match self {
            Self::Units => units::launch(client, call),
            Self::Warps(plan) => warps::launch(client, plan, &request, call),
        }
    }
}

impl fmt::Display for FewRowsPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Units => f.write_str("one pass over the weights, no tensor cores"),
            Self::Warps(plan) => write!(f, "one pass over the weights, {plan}"),
        }
    }
}
