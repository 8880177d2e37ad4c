//! Candidate tiles of the forward pass.

use crate::call::Request;

/// A candidate tile, and its relative speed on dense attention.
pub(super) struct Candidate {
    /// Largest width.
    pub dim: usize,
    /// Warpgroups, columns, stages, and the lag of refills in steps.
    pub sizes: [usize; 4],
    pub overlap: bool,
    speed: f64,
}

impl Candidate {
    /// Returns the speed for a call's options of scores.
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

/// The fastest shape of 128 rows and the fastest of 64, which reads keys twice as often but joins fewer rows of blocks. Two or more cubes share a
/// multiprocessor, except with 128 rows at widths of 96 and more, and at width 256. At width 64 there is also a shape of 64 × 64 for short mainloops. Five
/// of its cubes share a multiprocessor, and only half as much at the ends of a window is masked.
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

/// Factor of the speed of 128 × 128 at width 64 if scores are more than products, or with dropout. Then a unit needs more than 128 registers, so a
/// multiprocessor runs only one cube. Of 64 × 128 it runs three.
const ALONE: f64 = 0.8;

/// Like [`CANDIDATES`], for keys of more than 128 columns and values of at most 128. Sums take no more registers than at width 128, so shared memory
/// decides. Two steps of 128 columns fit along with queries up to width 192.
const NARROW_VALUES: [Candidate; 3] = [
    candidate(256, [2, 128, 2, 1], false, 1.0),
    candidate(256, [2, 64, 3, 1], true, 0.9),
    candidate(256, [1, 64, 2, 1], true, 0.65),
];

/// Returns the candidates for widths of keys and values.
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
