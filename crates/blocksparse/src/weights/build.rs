//! Constructors without randomness, and checks that all constructors share.

use std::cmp::Ordering;

use super::{Kept, WEIGHT_BLOCK_SIZES, WeightLayout};
use crate::LayoutError;

/// Maximum number of blocks of a weight, kept or not.
const MOST_BLOCKS: usize = 1 << 26;

/// All blocks of a weight, kept or not.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    pub block: usize,
    pub ins: usize,
    pub outs: usize,
}

impl Grid {
    /// Returns the grid of a weight `[inputs, outputs]`.
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

    /// Returns the number of kept blocks: the nearest to a density, at least one.
    pub fn count(&self, density: f64) -> Result<usize, LayoutError> {
        crate::ensure! { LayoutError; density > 0.0 && density <= 1.0 => "density", "above 0 and at most 1", density; }
        Ok(((density * self.blocks() as f64).round() as usize).max(1))
    }

    /// Distributes `count` blocks over the output blocks so that their shares differ by at most one.
    pub fn shares(&self, count: usize) -> Vec<usize> {
        let before = |output: usize| count * output / self.outs;
        (0..self.outs)
            .map(|output| before(output + 1) - before(output))
            .collect()
    }

    /// Builds a layout from the kept input blocks of each output block, in any order, without duplicates.
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

    /// Builds a layout from indices into the grid `[in_blocks, out_blocks]`, without duplicates.
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
    /// Builds the layout of every block of a weight `[inputs, outputs]`.
    ///
    /// # Errors
    /// [`LayoutError::Argument`] if `block` is not one of [`WEIGHT_BLOCK_SIZES`], or `inputs` or `outputs` is not a positive multiple of it.
    pub fn dense(shape: [usize; 2], block: usize) -> Result<Self, LayoutError> {
        let grid = Grid::new(shape, block)?;
        let all = (0..grid.ins as u32).collect::<Vec<u32>>();
        Ok(grid.layout("dense", None, vec![all; grid.outs]))
    }

    /// Builds the layout of the blocks within `bandwidth` input blocks of the diagonal. If the weight is not square, the diagonal is a staircase: an output
    /// block keeps the input blocks whose share of the inputs overlaps its share of the outputs. A bandwidth of 0 keeps just the diagonal.
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

    /// Builds the [`banded`](Self::banded) layout whose density is nearest to the requested one; of two equally near, the narrower.
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
        // Searches for the smallest bandwidth with at least that many blocks. The result is this one or the one before it.
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

    /// Builds the layout of the blocks whose entry of `[in_blocks, out_blocks]`, row-major, is true.
    ///
    /// # Errors
    /// As [`dense`](Self::dense); and if the length of `mask` is not the number of blocks of the weight.
    pub fn from_mask(shape: [usize; 2], block: usize, mask: &[bool]) -> Result<Self, LayoutError> {
        let grid = Grid::new(shape, block)?;
        check_length("mask", &grid, mask.len())?;
        let kept = (mask.iter().enumerate()).filter_map(|(place, kept)| kept.then_some(place));
        Ok(grid.layout_of_places("mask", None, kept))
    }

    /// Builds the layout of the blocks with the largest norms, as in pruning (Narang, Undersander, Diamos, "Block-Sparse Recurrent Neural Networks", 2017).
    /// `norms` holds the norms of the blocks `[in_blocks, out_blocks]`, row-major. Ties go to the earlier one.
    ///
    /// # Errors
    /// As [`dense`](Self::dense); and if the length of `norms` is not the number of blocks of the weight, one of them is NaN, or `density` is
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
