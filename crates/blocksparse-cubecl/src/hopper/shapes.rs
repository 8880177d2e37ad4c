//! Shapes that tiles of the forward pass may have.

use crate::call::Request;

/// A shape that a tile may have, and its speed relative to the others on dense attention.
pub(super) struct Candidate {
    /// For widths up to this one.
    pub dim: usize,
    /// Warpgroups, columns, stages, and how many steps late a buffer is filled again.
    pub sizes: [usize; 4],
    pub overlap: bool,
    speed: f64,
}

impl Candidate {
    /// Its speed where scores are what a call has them be.
    pub fn speed(&self, request: &Request) -> f64 {
        let is_crowded = request.score.softcap || request.score.positions();
        match self.dim == 64 && self.sizes[0] == 2 && is_crowded {
            true => ALONE * self.speed,
            false => self.speed,
        }
    }
}

const fn candidate(dim: usize, sizes: [usize; 4], overlap: bool, speed: f64) -> Candidate {
    Candidate {
        dim,
        sizes,
        overlap,
        speed,
    }
}

/// The fastest shape of 128 rows and the fastest of 64, which reads keys twice as often but unites fewer rows of blocks.
/// Except for 128 rows of 96 and more, and 256, two cubes or more share a multiprocessor. At width 64 five cubes of 64 × 64 do, which is for short mainloops:
/// half as much of a window's ends is masked.
pub(super) const CANDIDATES: [Candidate; 9] = [
    candidate(64, [2, 128, 3, 2], false, 1.0),
    candidate(64, [1, 128, 2, 1], false, 0.9),
    candidate(64, [1, 64, 2, 1], false, 0.87),
    candidate(96, [2, 128, 3, 2], false, 1.0),
    candidate(96, [1, 64, 3, 1], true, 0.85),
    candidate(128, [2, 128, 3, 2], false, 1.0),
    candidate(128, [1, 64, 3, 1], true, 0.85),
    candidate(256, [2, 64, 2, 1], true, 1.0),
    candidate(256, [1, 64, 2, 1], true, 0.55),
];

/// What is left of the speed of 128 × 128 at width 64 where scores are more than products, or weights are dropped: it has more than 128 registers a unit then,
/// so that one cube has a multiprocessor for itself. Of 64 × 128 three do.
const ALONE: f64 = 0.8;

/// As [`CANDIDATES`], for keys of more than 128 columns and values of 128 or fewer: sums take no more registers than at width 128, and
/// shared memory decides. Of 128 columns two steps fit beside queries up to width 192.
const NARROW_VALUES: [Candidate; 3] = [
    candidate(256, [2, 128, 2, 1], false, 1.0),
    candidate(256, [2, 64, 3, 1], true, 0.9),
    candidate(256, [1, 64, 2, 1], true, 0.65),
];

/// The shapes for widths of keys and values.
pub(super) fn candidates(
    class: usize,
    value_dim: usize,
) -> impl Iterator<Item = &'static Candidate> {
    let all = match class > 128 && value_dim <= 128 {
        true => &NARROW_VALUES[..],
        false => &CANDIDATES[..],
    };
    all.iter().filter(move |shape| shape.dim == class)
}
