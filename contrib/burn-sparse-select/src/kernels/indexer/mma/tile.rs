//! Shape of a cube's work: its own keys, which stay in registers, and streamed (query, head) columns; or rows and columns of a gradient.

use cubecl::client::Client;

use crate::kernels::indexer::pairs::{PairInputs, PairSizes, PairSum};
use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::arch::sm80::Element;
use blocksparse_cubecl::call::check_ampere;
use blocksparse_cubecl::tensor::half_of;
use blocksparse_cubecl::tuning::Tuning;

/// Bytes, and elements, of a piece: the unit of copies and of ldmatrix.
pub(crate) const PIECE: usize = 16;
pub(crate) const PIECE_NUMBERS: usize = 8;
/// Number of warps of a cube. It is small, so that two cubes fit a multiprocessor and one multiplies while the other waits.
pub(crate) const WARPS: usize = 4;
pub(crate) const UNITS: usize = 32 * WARPS;
/// Maximum number of columns of a step: (query, head) pairs.
pub(crate) const COLUMNS: usize = 64;
/// Number of columns of one mma.sync.
pub(crate) const EIGHT: usize = 8;
/// Maximum number of registers of a unit that hold keys.
const KEY_REGISTERS: usize = 128;
/// Candidate numbers of stages in shared memory.
const STAGES: [usize; 3] = [4, 3, 2];
/// Shared memory per cube if two fit a multiprocessor, less the part reserved per cube.
const SHARED: usize = 113 * 1024;
/// Candidate numbers of queries of a cube.
const QUERIES: [usize; 4] = [64, 32, 16, 8];
/// Target number of cubes per multiprocessor, which keeps the tail of a launch small.
const CUBES: usize = 16;

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SumTile {
    pub(crate) half: Half,
    /// Number of elements of a query or a key, a multiple of 8.
    pub(crate) width: usize,
    /// Number of keys of a warp, in units of 16.
    pub(crate) sixteens: usize,
    /// Number of heads of a query in a step: 2, 4 or a multiple of 8. Some may be padding.
    pub(crate) heads: usize,
    /// Number of queries of a step; one if its heads take several steps.
    pub(crate) queries: usize,
    /// Number of steps of a query's heads.
    pub(crate) parts: usize,
    pub(crate) stages: usize,
    /// True if there are several KV heads, so sums accumulate onto the output.
    pub(crate) adds: bool,
    pub(crate) is_listed: bool,
    pub(crate) is_weights: bool,
    /// True to include keys after a query's position.
    pub(crate) all: bool,
}

impl SumTile {
    /// Returns the tile of the sums on tensor cores, or the reason why there is none.
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
        // Splits the heads evenly over as few steps as possible.
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

    /// Sets as many stages as fit shared memory, if any do.
    fn staged(mut self, shared: usize) -> Option<Self> {
        let room = |stages: usize| stages * self.stage_bytes() <= shared.min(SHARED);
        self.stages = STAGES.into_iter().find(|&stages| room(stages))?;
        Some(self)
    }

    /// Returns the tile for steps whose columns are the depth of another matmul, with 16 rows per warp.
    pub(crate) fn with_sixteens(mut self) -> Self {
        self.sixteens = 1;
        if self.heads > EIGHT {
            self.heads = self.heads.next_multiple_of(16);
            self.queries = COLUMNS / self.heads;
        }
        self
    }

    /// Returns the tile for steps of keys.
    pub(crate) fn of_keys(mut self) -> Self {
        self.sixteens = 1;
        self.heads = COLUMNS;
        self.queries = 1;
        self.parts = 1;
        self
    }

    /// Returns the dtype of queries and keys.
    pub fn half(&self) -> Half {
        self.half
    }

    /// Returns whether the sums are of exponentials.
    pub fn is_weights(&self) -> bool {
        self.is_weights
    }

    /// Returns whether keys after a query's position are included.
    pub fn all(&self) -> bool {
        self.all
    }

    pub(crate) fn element(&self) -> Element {
        Element::Half(self.half)
    }

    /// Returns the number of 16-element slices of a row, the last of which may be half padding.
    pub(crate) fn depth(&self) -> usize {
        self.width.div_ceil(16)
    }

    /// Returns the number of pieces of a row in shared memory, including padding.
    pub(crate) fn pieces(&self) -> usize {
        2 * self.depth()
    }

    pub(crate) fn own_pieces(&self) -> usize {
        self.width / PIECE_NUMBERS
    }

    /// Returns the bytes from one row to the next: an odd number of pieces, so that eight rows use different banks.
    pub(crate) fn pitch(&self) -> usize {
        (self.pieces() + 1) * PIECE
    }

    /// Returns the number of columns of a step.
    pub(crate) fn columns(&self) -> usize {
        self.heads * self.queries
    }

    /// Returns the number of groups of eight columns.
    pub(crate) fn eights(&self) -> usize {
        self.columns() / EIGHT
    }

    /// Returns the number of keys of a warp.
    pub(crate) fn warp_keys(&self) -> usize {
        16 * self.sixteens
    }

    pub(crate) fn keys(&self) -> usize {
        WARPS * self.warp_keys()
    }

    /// Returns the offset of a stage's `of_rows` entries.
    pub(crate) fn of_rows(&self) -> usize {
        // A stage also holds 16 keys per warp while these are loaded.
        let rows = self.columns().next_multiple_of(16).max(16 * WARPS);
        rows * self.pitch()
    }

    /// Returns the bytes of a stage, a multiple of the alignment of ldmatrix.
    pub(crate) fn stage_bytes(&self) -> usize {
        self.of_rows() + (4 * self.columns()).next_multiple_of(PIECE)
    }

    pub(crate) fn shared_bytes(&self) -> usize {
        self.stages * self.stage_bytes()
    }

    /// Returns the number of lanes that share the columns of a query within a group of eight.
    pub(crate) fn sharing(&self) -> usize {
        self.heads.min(EIGHT) / 2
    }

    /// Returns whether a query's columns end after this many groups of eight of a step.
    pub(crate) fn ends(&self, eights: usize) -> bool {
        (eights * EIGHT).is_multiple_of(self.heads)
    }

    /// Returns the number of queries of a cube.
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

    /// Returns the number of tiles along the keys, or along a query's list.
    pub(crate) fn key_tiles(&self, sizes: &PairSizes) -> usize {
        sizes.columns().div_ceil(self.keys())
    }
}

/// Number of rows of a cube: 16 per warp.
pub(crate) const ROWS: usize = 16 * WARPS;
/// Number of groups of eight columns whose products a warp computes at a time.
pub(crate) const EIGHTS: usize = 4;
/// Scale of f16 numbers, which keeps small ones from underflow. Pair gradients are at most 1 in absolute value.
const F16_SCALE: f32 = 16384.0;

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradientTile {
    /// Layout of a step in shared memory: keys, or (query, head) pairs.
    pub(crate) step: SumTile,
    /// True if rows are keys and columns are (query, head) pairs; false for the reverse.
    pub(crate) by_keys: bool,
    /// True if both rows of a unit belong to one query.
    pub(crate) alike: bool,
    /// True to add to the existing contents of the output.
    pub(crate) adds: bool,
    /// True if no query has an entry for a key after its position.
    pub(crate) causal: bool,
}

impl GradientTile {
    /// Returns the tile of the gradient on tensor cores, or the reason why there is none.
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
            // Columns are the depth of the second matmul, which is a multiple of 16.
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

    /// Returns the factor of pair gradients before they are split into two parts.
    pub(crate) fn scale(&self) -> f32 {
        match self.step.half {
            Half::Bf16 => 1.0,
            Half::F16 => F16_SCALE,
        }
    }

    /// Returns the number of groups of eight elements of a gradient row.
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

    /// Every head has a column, queries end at groups of eight columns, and two cubes fit.
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

    /// Steps of a gradient have multiples of 16 columns, which cover all heads.
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
