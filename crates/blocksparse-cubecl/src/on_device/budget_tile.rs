//! Compile-time parameters of searches in rows of scores, and the scalars of a rule.

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

use crate::arch::planes::{LANES, are_there, have_ptx};
use crate::error::KernelError;
use crate::limits::most_units;
use crate::shared::row_tile::RowTile;
use blocksparse::internal::parts_of;
use blocksparse::{Budget, EstimateKind, Rule};

const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Least and largest number of units per row of a cube, if the device has them.
const UNITS: [usize; 2] = [32, 256];

/// Blocks per unit, as long as that keeps the number of units in this range. Few units, because each bisection step sums over all of them.
const UNIT_BLOCKS: usize = 16;

/// Largest number of blocks that a unit of a cube's row holds in registers. In longer rows it reads them again.
const MOST_HELD: usize = 16;

/// Largest number of blocks that a unit of a plane's row holds. Each is a word of the row's bits, and a unit writes one word.
const MOST_WORDS: usize = 32;

/// Rows per cube if each plane has a row.
const PLANE_ROWS: usize = 4;

/// Compile-time kind of a [`Budget`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BudgetKind {
    TopK,
    Ratio,
    TopP,
    MinP,
}

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BudgetTile {
    pub tile: RowTile,
    pub budget: BudgetKind,
    pub kind: EstimateKind,
    pub causal: bool,
    /// Whether scores mark blocks that cannot be chosen, with [`HIDDEN`](super::bits::HIDDEN).
    pub hides: bool,
    /// Blocks that a unit holds in registers, 0 if they are too many.
    pub held: usize,
    /// Whether a plane has a row.
    pub votes: bool,
    /// Whether planes use PTX.
    pub ptx: bool,
}

impl BudgetTile {
    /// Returns the parameters for rows of `blocks` blocks. With `hides`, scores may mark blocks that cannot be chosen.
    ///
    /// # Errors
    /// [`KernelError`] if the device's cubes are too small.
    pub fn new(
        properties: &DeviceProperties,
        rule: &Rule,
        blocks: usize,
        causal: bool,
        hides: bool,
    ) -> Result<Self, KernelError> {
        let most = most_units(properties);
        let votes = !hides
            && are_there(properties)
            && most >= LANES * PLANE_ROWS
            && (1..=MOST_WORDS * LANES).contains(&blocks);
        let [low, high] = UNITS;
        let lanes = blocks.div_ceil(UNIT_BLOCKS).next_power_of_two();
        let lanes = match votes {
            true => LANES,
            false => lanes.clamp(low, high).min(1 << most.max(1).ilog2()),
        };
        let limit = || KernelError::limit("units of a row", most as u32, most + 1);
        let tile = RowTile::new(properties, lanes, F32, 1).ok_or_else(limit)?;
        let held = blocks.div_ceil(lanes);
        Ok(Self {
            tile: RowTile {
                lanes,
                rows: if votes { PLANE_ROWS } else { 1 },
                vector: 1,
                // The length of rows is a run-time argument.
                row_vectors: 0,
                plane: tile.plane.min(lanes),
            },
            budget: match rule.keep {
                Budget::TopK(_) => BudgetKind::TopK,
                Budget::Ratio(_) => BudgetKind::Ratio,
                Budget::TopP { .. } => BudgetKind::TopP,
                Budget::MinP(_) => BudgetKind::MinP,
            },
            kind: rule.kind,
            causal,
            hides,
            held: if votes || held <= MOST_HELD { held } else { 0 },
            votes,
            ptx: have_ptx(properties),
        })
    }

    /// Units per cube.
    pub fn units(&self) -> u32 {
        self.tile.units() as u32
    }

    /// Rows per cube.
    pub fn rows(&self) -> usize {
        self.tile.rows
    }

    /// Whether the budget sums weights of blocks.
    pub fn weighs(&self) -> bool {
        self.budget == BudgetKind::TopP
    }

    /// Whether the budget is relative to the largest score.
    pub fn has_largest(&self) -> bool {
        matches!(self.budget, BudgetKind::TopP | BudgetKind::MinP)
    }
}

/// Scalars of a rule.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct RuleScalars {
    /// Number of blocks, or parts of them, or the least number for a share of weights.
    pub least: u32,
    /// Largest number of blocks for a share of weights.
    pub most: u32,
    /// Share of weights.
    pub share: f32,
    /// Number of forced blocks up to the queries' own, at most one more than there are.
    pub local: usize,
    /// Number of forced first key blocks.
    pub first: usize,
}

/// Returns the scalars of a rule, for rows of `blocks` blocks.
pub fn rule_scalars(rule: &Rule, blocks: usize) -> RuleScalarsLaunch {
    let whole = |count: usize| u32::try_from(count.min(blocks)).unwrap_or(u32::MAX);
    let (least, most, share) = match rule.keep {
        Budget::TopK(k) => (whole(k), 0, 0.0),
        Budget::Ratio(ratio) => (parts_of(ratio), 0, 0.0),
        Budget::TopP { p, min, max } => (whole(min), whole(max), p),
        Budget::MinP(above) => (0, 0, above),
    };
    let (local, first) = (
        rule.forced.local.min(blocks + 1),
        rule.forced.first.min(blocks),
    );
    RuleScalarsLaunch::new(least, most, share as f32, local, first)
}
