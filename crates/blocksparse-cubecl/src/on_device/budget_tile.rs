//! How rows of scores are searched by a rule: what is compiled into the kernel, and the rule's numbers.

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

use crate::arch::planes::{LANES, are_there, have_ptx};
use crate::error::KernelError;
use crate::limits::most_units;
use crate::shared::row_tile::RowTile;
use blocksparse::internal::parts_of;
use blocksparse::{Budget, EstimateKind, Rule};

const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Units of a row that a cube has, at least and at most, if the device has them.
const UNITS: [usize; 2] = [32, 256];

/// Blocks of a unit, where units are between these: few units, because each halving is a sum over all of them.
const UNIT_BLOCKS: usize = 16;

/// Blocks that a unit of a cube's row holds, at most; of longer rows it reads them again.
const MOST_HELD: usize = 16;

/// Blocks that a unit of a plane's row holds, at most: a word of the row's bits each, of which a unit writes one.
const MOST_WORDS: usize = 32;

/// Rows of a cube whose planes have a row each.
const PLANE_ROWS: usize = 4;

/// Which [`Budget`] is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BudgetKind {
    TopK,
    Ratio,
    TopP,
    MinP,
}

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BudgetTile {
    pub tile: RowTile,
    pub budget: BudgetKind,
    pub kind: EstimateKind,
    pub causal: bool,
    /// Whether scores say which blocks there are none of: [`HIDDEN`](super::bits::HIDDEN)(super::bits::HIDDEN).
    pub hides: bool,
    /// Blocks that a unit holds, 0 if they are too many.
    pub held: usize,
    /// Whether a plane has a row.
    pub votes: bool,
    /// Whether its units meet by PTX.
    pub ptx: bool,
}

impl BudgetTile {
    /// Of rows of so many blocks, whose scores may say which cannot be chosen.
    ///
    /// # Errors
    /// [`KernelError`] if the device has no cubes of as many units.
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
                // Rows are as long as a launch says.
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

    /// Units of a cube.
    pub fn units(&self) -> u32 {
        self.tile.units() as u32
    }

    /// Rows of a cube.
    pub fn rows(&self) -> usize {
        self.tile.rows
    }

    /// Whether blocks weigh what they are chosen by.
    pub fn weighs(&self) -> bool {
        self.budget == BudgetKind::TopP
    }

    /// Whether blocks are chosen by what they are beside the largest.
    pub fn has_largest(&self) -> bool {
        matches!(self.budget, BudgetKind::TopP | BudgetKind::MinP)
    }
}

/// A rule's numbers.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct RuleScalars {
    /// Blocks, or parts of them, or the fewest of a share of weights.
    pub least: u32,
    /// The most blocks of a share of weights.
    pub most: u32,
    /// A share of weights.
    pub share: f32,
    /// How many blocks up to the queries' own are forced, at most one more than there are.
    pub local: usize,
    /// How many of the first key blocks are forced.
    pub first: usize,
}

/// The numbers of a rule, of rows of so many blocks.
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
