//! The constructors that draw: random bipartite graphs whose vertices are the blocks of inputs and of outputs, and whose edges are kept blocks.

use super::WeightLayout;
use super::build::Grid;
use super::numbers::Draws;
use crate::LayoutError;

impl WeightLayout {
    /// Blocks drawn at random, each set of them as likely but for this: every input block and every output block keeps one at least, if there
    /// are as many blocks. Their number is the nearest to `density`, and 1 at least.
    ///
    /// The same seed gives the same layout on every machine.
    ///
    /// # Errors
    /// As [`dense`](Self::dense); and if `density` is not in `(0, 1]`.
    pub fn random(
        shape: [usize; 2],
        block: usize,
        density: f64,
        seed: u64,
    ) -> Result<Self, LayoutError> {
        let grid = Grid::new(shape, block)?;
        let count = grid.count(density)?;
        let mut draws = Draws::new(seed);
        let [ins, outs] = [grid.ins, grid.outs].map(|blocks| {
            let mut order: Vec<usize> = (0..blocks).collect();
            draws.shuffle(&mut order, blocks);
            order
        });
        // One block for each of the longer side meets each of the shorter one, too.
        let cover = (0..grid.ins.max(grid.outs)).take(count);
        let mut places: Vec<usize> = cover
            .map(|at| ins[at % grid.ins] * grid.outs + outs[at % grid.outs])
            .collect();
        let mut is_kept = vec![false; grid.blocks()];
        for &place in &places {
            is_kept[place] = true;
        }
        let mut rest: Vec<usize> = (0..grid.blocks()).filter(|&at| !is_kept[at]).collect();
        let more = count - places.len();
        draws.shuffle(&mut rest, more);
        places.extend_from_slice(&rest[..more]);
        Ok(grid.layout_of_places("random", Some(seed), places))
    }

    /// A small world (Watts, Strogatz, "Collective dynamics of 'small-world' networks", 1998): each output block first keeps the input blocks
    /// that are nearest to its place on the ring of input blocks, as many as `density` gives, and then each kept block is moved, with probability
    /// `rewiring`, to another input block of the same output block that is not kept. Blocks are moved in the paper's order: the nearest of each
    /// output block, then the second nearest of each, and so on.
    ///
    /// Output blocks keep equally many, up to one; input blocks may be left without any. The number of blocks is the nearest to `density`, and
    /// 1 at least. The same seed gives the same layout on every machine.
    ///
    /// # Errors
    /// As [`random`](Self::random); and if `rewiring` is not in `[0, 1]`.
    pub fn small_world(
        shape: [usize; 2],
        block: usize,
        density: f64,
        rewiring: f64,
        seed: u64,
    ) -> Result<Self, LayoutError> {
        let grid = Grid::new(shape, block)?;
        let count = grid.count(density)?;
        crate::ensure! { LayoutError; (0.0..=1.0).contains(&rewiring) => "rewiring", "from 0 to 1", rewiring; }
        let shares = grid.shares(count);
        let mut by_output: Vec<Vec<u32>> = (shares.iter().enumerate())
            .map(|(output, &share)| {
                // 0, 1, −1, 2, −2, … from the block's own place.
                let place = (2 * output + 1) * grid.ins / (2 * grid.outs);
                let neighbour = |at: usize| match at % 2 {
                    1 => (place + at.div_ceil(2)) % grid.ins,
                    _ => (place + grid.ins - at / 2) % grid.ins,
                };
                (0..share).map(|at| neighbour(at) as u32).collect()
            })
            .collect();
        let mut draws = Draws::new(seed);
        for lap in 0..shares.iter().copied().max().unwrap_or(0) {
            for inputs in by_output.iter_mut().filter(|inputs| inputs.len() > lap) {
                let free = grid.ins - inputs.len();
                if draws.happens(rewiring) && free > 0 {
                    let number = draws.below(free);
                    inputs[lap] = free_input(inputs, number);
                }
            }
        }
        Ok(grid.layout("small-world", Some(seed), by_output))
    }

    /// Preferential attachment (Barabási, Albert, "Emergence of scaling in random networks", 1999) between blocks of inputs and of outputs:
    /// output blocks come one after the other, and each keeps input blocks, as many as `density` gives, drawn with probabilities
    /// proportional to one more than how often an input block is already kept. Few input blocks then meet most output blocks. The one more
    /// is there because all input blocks are there from the start.
    ///
    /// Output blocks keep equally many, up to one; input blocks may be left without any. The number of blocks is the nearest to `density`, and
    /// 1 at least. The same seed gives the same layout on every machine.
    ///
    /// # Errors
    /// As [`random`](Self::random).
    pub fn barabasi_albert(
        shape: [usize; 2],
        block: usize,
        density: f64,
        seed: u64,
    ) -> Result<Self, LayoutError> {
        let grid = Grid::new(shape, block)?;
        let count = grid.count(density)?;
        let mut draws = Draws::new(seed);
        let mut degrees = vec![0; grid.ins];
        let by_output = (grid.shares(count).into_iter())
            .map(|share| {
                // What is drawn weighs nothing in the same output block's further draws.
                let mut weights: Vec<usize> = degrees.iter().map(|degree| degree + 1).collect();
                let mut all: usize = weights.iter().sum();
                let mut inputs = Vec::with_capacity(share);
                for _ in 0..share {
                    let input = weighted(&weights, draws.below(all));
                    all -= std::mem::take(&mut weights[input]);
                    inputs.push(input as u32);
                }
                for &input in &inputs {
                    degrees[input as usize] += 1;
                }
                inputs
            })
            .collect();
        Ok(grid.layout("barabasi-albert", Some(seed), by_output))
    }
}

/// Of the input blocks that are not in `inputs`, one by its number.
fn free_input(inputs: &[u32], number: usize) -> u32 {
    let mut sorted = inputs.to_vec();
    sorted.sort_unstable();
    let mut free = number as u32;
    for input in sorted {
        if input <= free {
            free += 1;
        }
    }
    free
}

/// The place at which the sum of weights passes `number`.
fn weighted(weights: &[usize], mut number: usize) -> usize {
    for (place, &weight) in weights.iter().enumerate() {
        if number < weight {
            return place;
        }
        number -= weight;
    }
    unreachable!("the number is below the sum of the weights")
}
