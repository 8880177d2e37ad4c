//! The constructors that draw nothing, and what all of them check.

use std::cmp::Ordering;

use super::{Kept, WEIGHT_BLOCK_SIZES, WeightLayout};
use crate::LayoutError;

/// The most blocks that a weight may have, kept or not.
const MOST_BLOCKS: usize = 1 << 26;

/// Blocks of a weight, kept or not.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    pub block: usize,
    pub ins: usize,
    pub outs: usize,
}

impl Grid {
    /// The blocks of a weight `[inputs, outputs]`.
    pub fn new([inputs, outputs]: [usize; 2], block: usize) -> Result<Self, LayoutError> {
        crate::ensure! { LayoutError; WEIGHT_BLOCK_SIZES.contains(&block) => "block", format!("one of {WEIGHT_BLOCK_SIZES:?}"), block; }
        for (argument, length) in [("inputs", inputs), ("outputs", outputs)] {
            crate::ensure! {
                LayoutError;
                length != 0 && length.is_multiple_of(block) => argument, format!("a positive multiple of the block, {block}"), length;
            }
        }
        let (ins, outs) = (inputs / block, outputs / block);
        crate::ensure! {
            LayoutError;
            ins.checked_mul(outs).is_some_and(|blocks| blocks <= MOST_BLOCKS)
                => "the weight", format!("cut into at most {MOST_BLOCKS} blocks"), format!("{ins} × {outs}");
        }
        Ok(Self { block, ins, outs })
    }

    pub fn blocks(&self) -> usize {
        self.ins * self.outs
    }

    /// Returns the number of retained blocks: the nearest to a density, at least one.
    pub fn count(&self, density: f64) -> Result<usize, LayoutError> {
        crate::ensure! { LayoutError; density > 0.0 && density <= 1.0 => "density", "above 0 and at most 1", density; }
        Ok(((density * self.blocks() as f64).round() as usize).max(1))
    }

    /// Returns the number of blocks of each output block, of `count` in all, if they differ by one at most.
    pub fn shares(&self, count: usize) -> Vec<usize> {
        let before = |output: usize| count * output / self.outs;
        (0..self.outs)
            .map(|output| before(output + 1) - before(output))
            .collect()
    }

    /// The layout of the kept blocks of inputs of each output block, in any order, none twice.
    pub fn layout(
        self,
        name: &str,
        seed: Option<u64>,
        mut by_output: Vec<Vec<u32>>,
    ) -> WeightLayout {
        for inputs in &mut by_output {
            inputs.sort_unstable();
        }
        let kept = Kept::new(self.ins, &by_output);
        WeightLayout::from_parts(name, seed, self.block, kept)
    }

    /// The layout of places in the grid `[in_blocks, out_blocks]`, none twice.
    pub fn layout_of_places(
        self,
        name: &str,
        seed: Option<u64>,
        places: impl IntoIterator<Item = usize>,
    ) -> WeightLayout {
        let mut by_output = vec![Vec::new(); self.outs];
        for place in places {
            by_output[place % self.outs].push((place / self.outs) as u32);
        }
        self.layout(name, seed, by_output)
    }
}

impl WeightLayout {
    /// Every block of a weight `[inputs, outputs]`.
    ///
    /// # Errors
    /// [`LayoutError::Argument`] if `block` is none of [`WEIGHT_BLOCK_SIZES`], or `inputs` or `outputs` is no positive multiple of it.
    pub fn dense(shape: [usize; 2], block: usize) -> Result<Self, LayoutError> {
        let grid = Grid::new(shape, block)?;
        let all = (0..grid.ins as u32).collect::<Vec<u32>>();
        Ok(grid.layout("dense", None, vec![all; grid.outs]))
    }

    /// The blocks within `bandwidth` input blocks of the diagonal. The diagonal of a weight that is not square is a staircase: an output block
    /// meets the input blocks whose share of the inputs overlaps its share of the outputs. A bandwidth of 0 keeps just the diagonal.
    ///
    /// # Errors
    /// As [`dense`](Self::dense).
    pub fn banded(shape: [usize; 2], block: usize, bandwidth: usize) -> Result<Self, LayoutError> {
        let grid = Grid::new(shape, block)?;
        let by_output = (0..grid.outs).map(|output| {
            let first = output * grid.ins / grid.outs;
            let end = ((output + 1) * grid.ins).div_ceil(grid.outs);
            let end = end.saturating_add(bandwidth).min(grid.ins);
            (first.saturating_sub(bandwidth) as u32..end as u32).collect()
        });
        Ok(grid.layout("banded", None, by_output.collect()))
    }

    /// The [`banded`](Self::banded) layout whose density is nearest to the one asked for; of two as near, the narrower.
    ///
    /// # Errors
    /// As [`banded`](Self::banded); and if `density` is not in `(0, 1]`.
    pub fn banded_of_density(
        shape: [usize; 2],
        block: usize,
        density: f64,
    ) -> Result<Self, LayoutError> {
        let grid = Grid::new(shape, block)?;
        let count = grid.count(density)?;
        let distance = |layout: &Self| layout.len().abs_diff(count);
        // The first bandwidth with as many blocks, or the one before it.
        let (mut low, mut high) = (0, grid.ins);
        while low < high {
            let middle = low + (high - low) / 2;
            match Self::banded(shape, block, middle)?.len() < count {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        let wide = Self::banded(shape, block, low)?;
        let narrow = Self::banded(shape, block, low.saturating_sub(1))?;
        Ok(match distance(&narrow) <= distance(&wide) {
            true => narrow,
            false => wide,
        })
    }

    /// The blocks whose entry of `[in_blocks, out_blocks]`, row by row, is true.
    ///
    /// # Errors
    /// As [`dense`](Self::dense); and if `mask` does not have as many entries as the weight has blocks.
    pub fn from_mask(shape: [usize; 2], block: usize, mask: &[bool]) -> Result<Self, LayoutError> {
        let grid = Grid::new(shape, block)?;
        check_length("mask", &grid, mask.len())?;
        let kept = (mask.iter().enumerate()).filter_map(|(place, kept)| kept.then_some(place));
        Ok(grid.layout_of_places("mask", None, kept))
    }

    /// The blocks with the largest norms, as pruning keeps them (Narang, Undersander, Diamos, "Block-Sparse Recurrent Neural Networks", 2017);
    /// ties go to the first of `norms`, which are those of the blocks `[in_blocks, out_blocks]`, row by row.
    ///
    /// # Errors
    /// As [`dense`](Self::dense); and if `norms` does not have as many entries as the weight has blocks or one of them is NaN, or `density` is
    /// not in `(0, 1]`.
    pub fn by_magnitude(
        shape: [usize; 2],
        block: usize,
        norms: &[f32],
        density: f64,
    ) -> Result<Self, LayoutError> {
        let grid = Grid::new(shape, block)?;
        check_length("norms", &grid, norms.len())?;
        let nan = norms.iter().position(|norm| norm.is_nan());
        crate::ensure! { LayoutError; nan.is_none() => "norms", "numbers", format!("NaN at {}", nan.unwrap_or(0)); }
        let count = grid.count(density)?;
        let mut places: Vec<usize> = (0..norms.len()).collect();
        let larger_first = |&a: &usize, &b: &usize| {
            let by_norm = norms[b].partial_cmp(&norms[a]).unwrap_or(Ordering::Equal);
            by_norm.then(a.cmp(&b))
        };
        places.sort_unstable_by(larger_first);
        places.truncate(count);
        Ok(grid.layout_of_places("magnitude", None, places))
    }
}

fn check_length(argument: &'static str, grid: &Grid, got: usize) -> Result<(), LayoutError> {
    let Grid { ins, outs, .. } = grid;
    crate::ensure! {
        LayoutError;
        got == grid.blocks() => argument, format!("of {} entries, {ins} × {outs} blocks", grid.blocks()), got;
    }
    Ok(())
}
