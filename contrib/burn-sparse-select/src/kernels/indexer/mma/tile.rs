//! The shape of a cube's work: keys of its own, which stay in registers, and queries by heads that come by; or rows of a gradient, and columns.

use cubecl::client::Client;

use crate::kernels::indexer::pairs::{PairInputs, PairSizes, PairSum};
use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::arch::sm80::Element;
use blocksparse_cubecl::call::check_ampere;
use blocksparse_cubecl::tensor::half_of;
use blocksparse_cubecl::tuning::Tuning;

/// Bytes, and numbers, that are copied, and read by ldmatrix, at a time.
pub(crate) const PIECE: usize = 16;
pub(crate) const PIECE_NUMBERS: usize = 8;
/// Warps of a cube: few, so that two cubes fit a multiprocessor and one multiplies while the other waits.
pub(crate) const WARPS: usize = 4;
/// Units of a cube.
pub(crate) const UNITS: usize = 32 * WARPS;
/// Columns of a step, at most: queries by heads.
pub(crate) const COLUMNS: usize = 64;
/// Columns of one mma.sync.
pub(crate) const EIGHT: usize = 8;
/// Registers of a unit that hold keys, at most.
const KEY_REGISTERS: usize = 128;
/// Steps in shared memory at a time.
const STAGES: [usize; 3] = [4, 3, 2];
/// What two cubes have of a multiprocessor's shared memory, less what it keeps for each.
const SHARED: usize = 113 * 1024;
/// Queries of a cube.
const QUERIES: [usize; 4] = [64, 32, 16, 8];
/// Cubes of a multiprocessor's share of a launch, so that what the last of them leave idle is little.
const CUBES: usize = 16;

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SumTile {
    pub(crate) half: Half,
    /// Elements of a query or a key, a multiple of 8.
    pub(crate) width: usize,
    /// Keys of a warp in sixteens.
    pub(crate) sixteens: usize,
    /// Heads of a query in a step: 2, 4 or a multiple of 8, of which some may not be there.
    pub(crate) heads: usize,
    /// Queries of a step; one if its heads take several steps.
    pub(crate) queries: usize,
    /// Steps of a query's heads.
    pub(crate) parts: usize,
    pub(crate) stages: usize,
    /// Keys have more than one head, so that sums are added to what is there.
    pub(crate) adds: bool,
    pub(crate) is_listed: bool,
    pub(crate) is_weights: bool,
    /// Keys behind a query's position count.
    pub(crate) all: bool,
}

impl SumTile {
    /// How tensor cores make the sums, or why they do not.
    pub fn new(
        client: &Client,
        sizes: &PairSizes,
        inputs: &PairInputs,
        sum: &PairSum,
    ) -> Result<Self, &'static str> {
        let properties = client.properties();
        check_ampere(properties)?;
        if Tuning::or_reason()?.tier.is_simt() {
            return Err("BLOCKSPARSE_TIER says simt");
        }
        let half = half_of(inputs.element)?;
        let begins = |of: &cubecl::server::Handle| of.offset_start.unwrap_or(0) as usize;
        let bytes = [2 * sizes.width, begins(inputs.q), begins(inputs.k)];
        if !bytes.iter().all(|bytes| bytes.is_multiple_of(PIECE)) {
            return Err("rows do not begin at multiples of 16 bytes");
        }
        Self::of(half, sizes, sum)
            .staged(properties.hardware.max_shared_memory_size)
            .ok_or("queries do not fit the shared memory")
    }

    fn of(half: Half, sizes: &PairSizes, sum: &PairSum) -> Self {
        let group = sizes.heads[0] / sizes.heads[1];
        let is_listed = sizes.listed.is_some();
        // As many steps as the heads need, of which none has more heads to pad than another.
        let heads = group.div_ceil(group.div_ceil(COLUMNS));
        let heads = match heads {
            _ if is_listed => heads.next_multiple_of(EIGHT),
            0..=EIGHT => heads.next_power_of_two().max(2),
            _ => heads.next_multiple_of(EIGHT),
        };
        let depth = sizes.width.div_ceil(16);
        Self {
            half,
            width: sizes.width,
            sixteens: if 4 * 4 * depth <= KEY_REGISTERS { 4 } else { 2 },
            heads,
            queries: if is_listed { 1 } else { COLUMNS / heads },
            parts: group.div_ceil(heads),
            stages: 0,
            adds: sizes.heads[1] > 1,
            is_listed,
            is_weights: matches!(sum, PairSum::Weights { .. }),
            all: matches!(sum, PairSum::Scores { all: true, .. }),
        }
    }

    /// With as many steps as fit.
    fn staged(mut self, shared: usize) -> Option<Self> {
        let room = |stages: usize| stages * self.stage_bytes() <= shared.min(SHARED);
        self.stages = STAGES.into_iter().find(|&stages| room(stages))?;
        Some(self)
    }

    /// The same for steps whose columns are the depth of another product, with one sixteen of rows a warp.
    pub(crate) fn with_sixteens(mut self) -> Self {
        self.sixteens = 1;
        if self.heads > EIGHT {
            self.heads = self.heads.next_multiple_of(16);
            self.queries = COLUMNS / self.heads;
        }
        self
    }

    /// The same for steps of keys.
    pub(crate) fn of_keys(mut self) -> Self {
        self.sixteens = 1;
        self.heads = COLUMNS;
        self.queries = 1;
        self.parts = 1;
        self
    }

    /// The type of queries and keys.
    pub fn half(&self) -> Half {
        self.half
    }

    /// Whether sums are of exponentials.
    pub fn is_weights(&self) -> bool {
        self.is_weights
    }

    /// Whether keys behind a query's position count.
    pub fn all(&self) -> bool {
        self.all
    }

    pub(crate) fn element(&self) -> Element {
        Element::Half(self.half)
    }

    /// Sixteens of a row, the last of which may be half zeros.
    pub(crate) fn depth(&self) -> usize {
        self.width.div_ceil(16)
    }

    /// Pieces of a row in shared memory, and those of them that there are.
    pub(crate) fn pieces(&self) -> usize {
        2 * self.depth()
    }

    pub(crate) fn own_pieces(&self) -> usize {
        self.width / PIECE_NUMBERS
    }

    /// Bytes from a row to the next: an odd number of pieces, so that eight rows lie in different banks.
    pub(crate) fn pitch(&self) -> usize {
        (self.pieces() + 1) * PIECE
    }

    /// Columns of a step.
    pub(crate) fn columns(&self) -> usize {
        self.heads * self.queries
    }

    /// Columns in eights.
    pub(crate) fn eights(&self) -> usize {
        self.columns() / EIGHT
    }

    /// Keys of a warp, and of a cube.
    pub(crate) fn warp_keys(&self) -> usize {
        16 * self.sixteens
    }

    pub(crate) fn keys(&self) -> usize {
        WARPS * self.warp_keys()
    }

    /// Where a step's numbers of rows lie.
    pub(crate) fn of_rows(&self) -> usize {
        // A step's place also has sixteen keys of each warp, while they are on their way.
        let rows = self.columns().next_multiple_of(16).max(16 * WARPS);
        rows * self.pitch()
    }

    /// Bytes of a step, a multiple of what ldmatrix reads.
    pub(crate) fn stage_bytes(&self) -> usize {
        self.of_rows() + (4 * self.columns()).next_multiple_of(PIECE)
    }

    pub(crate) fn shared_bytes(&self) -> usize {
        self.stages * self.stage_bytes()
    }

    /// Lanes of a warp that share the columns of a query among eight.
    pub(crate) fn sharing(&self) -> usize {
        self.heads.min(EIGHT) / 2
    }

    /// Whether all columns of a query are behind it after so many eights of a step.
    pub(crate) fn ends(&self, eights: usize) -> bool {
        (eights * EIGHT).is_multiple_of(self.heads)
    }

    /// Queries of a cube.
    pub fn run(&self, client: &Client, sizes: &PairSizes) -> usize {
        if self.is_listed {
            return 1;
        }
        let known = client.properties().hardware.num_streaming_multiprocessors;
        let wanted = CUBES * known.map_or(1, |known| known as usize);
        let cubes = |run: usize| self.key_tiles(sizes) * sizes.rows[1].div_ceil(run) * sizes.batch;
        let runs = QUERIES.map(|run| run.next_multiple_of(self.queries));
        let last = runs[QUERIES.len() - 1];
        (runs.into_iter())
            .find(|&run| cubes(run) >= wanted)
            .unwrap_or(last)
    }

    /// Tiles along the keys, or along a query's list.
    pub(crate) fn key_tiles(&self, sizes: &PairSizes) -> usize {
        sizes.columns().div_ceil(self.keys())
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    fn tile(heads: [usize; 2], width: usize, listed: Option<usize>) -> SumTile {
        let sizes = PairSizes {
            batch: 1,
            heads,
            seq: [64, 64],
            width,
            rows: [0, 64],
            listed,
            keys: 64,
        };
        let sum = PairSum::Weights { scale: 1.0 };
        (SumTile::of(Half::Bf16, &sizes, &sum))
            .staged(227 * 1024)
            .unwrap()
    }

    /// Every head has a column, queries end where columns of eight do, and two cubes fit.
    #[test]
    fn heads_have_columns() {
        for listed in [None, Some(40)] {
            for group in 1..200 {
                for width in [8, 24, 72, 128, 200, 256] {
                    let t = tile([2 * group, 2], width, listed);
                    let parts = t.parts;
                    assert!(t.columns() <= COLUMNS && t.columns().is_multiple_of(EIGHT));
                    assert!(parts == 1 || t.queries == 1, "{group}: {t:?}");
                    assert!(
                        parts * t.heads < group + EIGHT * parts.max(1),
                        "{group}: {t:?}"
                    );
                    assert_eq!(
                        t.queries,
                        (1..=t.eights()).filter(|&at| t.ends(at)).count() * EIGHT.div_ceil(t.heads)
                    );
                    assert!(t.ends(t.eights()));
                    assert!(
                        t.sixteens.is_multiple_of(2)
                            && (2 * t.sixteens).is_multiple_of(t.sharing())
                    );
                    assert!(t.shared_bytes() <= SHARED);
                    assert!(4 * t.sixteens * t.depth() <= KEY_REGISTERS);
                }
            }
        }
    }

    /// Steps of a gradient are sixteens of columns, which have all heads.
    #[test]
    fn columns_of_gradients_are_sixteens() {
        for group in 1..200 {
            let t = tile([group, 1], 128, None).with_sixteens();
            assert!(
                t.columns() <= COLUMNS && t.columns().is_multiple_of(16),
                "{t:?}"
            );
            assert!(t.parts * t.heads >= group && (t.parts == 1 || t.queries == 1));
            assert!((t.parts - 1) * t.heads < group, "{t:?}");
            assert_eq!(t.of_keys().columns(), COLUMNS);
        }
    }
}
