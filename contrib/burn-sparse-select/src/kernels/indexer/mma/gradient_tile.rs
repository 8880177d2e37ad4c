//! The shape of a cube's work of a gradient: rows, which stay in registers, and columns that come by.

use cubecl::client::Client;

use crate::kernels::indexer::mma::tile::{EIGHT, SumTile, WARPS};
use crate::kernels::indexer::pairs::{PairInputs, PairSizes};
use crate::kernels::indexer::wanted::PairSum;
use blocksparse_cubecl::arch::ptx::Half;

/// Rows of a cube: sixteen of a warp.
pub(crate) const ROWS: usize = 16 * WARPS;
/// Columns whose products a warp makes at a time, in eights.
pub(crate) const EIGHTS: usize = 4;
/// What numbers of f16 are multiplied by, so that small ones do not vanish: differences of shares are at most 1.
const F16_SCALE: f32 = 16384.0;

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradientTile {
    /// How a step lies in shared memory: keys, or queries by heads.
    pub(crate) step: SumTile,
    /// Rows are keys, and columns are queries by heads; otherwise it is the other way round.
    pub(crate) by_keys: bool,
    /// Both rows of a unit are of one query.
    pub(crate) alike: bool,
    /// What is there is added to.
    pub(crate) adds: bool,
    /// No query has a number for a key behind its position.
    pub(crate) causal: bool,
}

impl GradientTile {
    /// How tensor cores make the gradient, or why they do not.
    pub fn new(
        client: &Client,
        sizes: &PairSizes,
        inputs: &PairInputs,
        [by_keys, adds, causal]: [bool; 3],
    ) -> Result<Self, &'static str> {
        let sum = PairSum::Scores {
            factor: 1.0,
            near: 0,
            all: !causal,
        };
        let step = SumTile::new(client, sizes, inputs, &sum)?;
        if by_keys && step.half == Half::F16 {
            return Err("a difference times a weight may be too large for f16");
        }
        let step = match by_keys {
            // Rows of a product's depth come by sixteens.
            true => step.with_sixteens(),
            false => step.of_keys(),
        };
        Ok(Self {
            step,
            by_keys,
            alike: !by_keys && (step.is_listed || sizes.heads[0].is_multiple_of(16)),
            adds,
            causal,
        })
    }

    /// What differences are multiplied by before they are rounded to two parts.
    pub(crate) fn scale(&self) -> f32 {
        match self.step.half {
            Half::Bf16 => 1.0,
            Half::F16 => F16_SCALE,
        }
    }

    /// Eights of a row of the gradient.
    pub(crate) fn width_eights(&self) -> usize {
        self.step.width / EIGHT
    }
}
