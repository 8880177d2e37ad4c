//! Random constructors. A layout is a bipartite graph whose vertices are the input and output blocks and whose edges are the kept blocks.

use super::WeightLayout;
use super::build::Grid;
use super::numbers::Draws;
use crate::LayoutError;

impl WeightLayout {
    /// Draws blocks at random. All sets of blocks are equally likely, except that every input block and every output block keeps at least one block if there
    /// are enough. The number of blocks is the nearest to `density`, and at least 1.
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
        // One block for each position of the longer side also covers the shorter side.
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

    /// Draws a small world (Watts, Strogatz, "Collective dynamics of 'small-world' networks", 1998). Each output block first keeps the input blocks
    /// nearest to its position on the ring of input blocks, as many as `density` gives. Then each kept block moves, with probability
    /// `rewiring`, to another input block that the same output block does not keep. Blocks move in the paper's order: the nearest of each
    /// output block, then the second nearest of each, and so on.
    ///
    /// The numbers of blocks of output blocks differ by at most one; input blocks may have none. The number of blocks is the nearest to `density`, and
    /// at least 1. The same seed gives the same layout on every machine.
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
                // 0, 1, −1, 2, −2, … from the block's own position.
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

    /// Draws by preferential attachment (Barabási, Albert, "Emergence of scaling in random networks", 1999) between input blocks and output blocks. Output
    /// blocks are processed in order. Each keeps as many input blocks as `density` gives, drawn with probabilities proportional to one plus the number of times
    /// that an input block is already kept. A few input blocks then connect to most output blocks. The one is added because all input blocks exist from the
    /// start.
    ///
    /// The numbers of blocks of output blocks differ by at most one; input blocks may have none. The number of blocks is the nearest to `density`, and
    /// at least 1. The same seed gives the same layout on every machine.
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
                // A drawn input block has weight 0 in further draws of the same output block.
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

/// Returns the input block with index `number` among those that are not in `inputs`.
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

/// Returns the index at which the running sum of weights exceeds `number`.
fn weighted(weights: &[usize], mut number: usize) -> usize {
    for (place, &weight) in weights.iter().enumerate() {
        if number < weight {
            return place;
        }
        number -= weight;
    }
    unreachable!("the number is below the sum of the weights")
}
