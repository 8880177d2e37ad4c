//! Products of rows in bf16 with columns in f32 on tensor cores, as exact as in f32.
//!
//! ```text
//! r = high + mid + low          three numbers in bf16, 8 bits each: r but for what is below 2⁻²⁴ of it
//! x · r = x · high + (x · mid + x · low)
//! ```
//!
//! Numbers in bf16 times such have 16 bits, which f32 holds; sums are those of tensor cores, and the two of small parts are added last. A cube has 128 rows, each
//! warp 32 of them in registers, as far as they are long, and 64 columns at a time in shared memory as mma.sync takes them. Which elements of a row meet which is the
//! same for rows and columns, so a unit has neighbouring ones: 16 bytes of a row, 8 numbers of a column.

#[cfg(feature = "cuda")]
mod ptx;

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::rows::products::is_before;
use blocksparse_cubecl::arch::planes;
use blocksparse_cubecl::tuning::Tuning;

#[cfg(feature = "cuda")]
pub(crate) use ptx::{load_columns, load_rows, products, row_squares, share_eight};

/// Rows of a cube, and its units.
pub(crate) const ROWS: usize = 128;
/// Columns that are shared at a time, and of a product.
pub(crate) const COLUMNS: usize = 64;
pub(crate) const EIGHT: usize = 8;
/// Rows of a unit in its warp: every eighth, from a quarter of its lane on.
pub(crate) const OWN: usize = 4;
/// Parts of a number.
const PARTS: usize = 3;
/// Elements of a row that two products take, and what a unit has of them.
const PAIR: usize = 32;
/// Bytes of a part of eight columns that two products take.
const PART_BYTES: usize = 512;
/// Elements of a row, at most: of which a unit has a quarter of four rows in registers.
const MOST_WIDTH: usize = 256;

/// Whether products may be other than on all devices. `BLOCKSPARSE_ROW_PRODUCTS=0` says no, for comparing.
fn may_split(properties: &DeviceProperties) -> bool {
    planes::are_there(properties)
        && planes::have_ptx(properties)
        && Tuning::or_default().row_products
}

/// How a cube multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SplitTile {
    /// Elements of a row.
    width: usize,
}

impl SplitTile {
    /// `None` if tensor cores do not multiply rows of so many numbers: of other types than bf16, or that begin elsewhere than at 16 bytes.
    pub fn new(
        client: &Client,
        width: usize,
        (x, element): (&Handle, ElemType),
        columns: &Handle,
    ) -> Option<Self> {
        let properties = client.properties();
        let tile = Self { width };
        let begin = |handle: &Handle| handle.offset_start.unwrap_or(0).is_multiple_of(16);
        let fits = may_split(properties)
            && !Tuning::or_default().tier.is_simt()
            && element == ElemType::Float(FloatKind::BF16)
            && width.is_multiple_of(EIGHT)
            && (EIGHT..=MOST_WIDTH).contains(&width)
            && begin(x)
            && begin(columns)
            && tile.bytes() <= properties.hardware.max_shared_memory_size;
        fits.then_some(tile)
    }

    pub fn width(&self) -> usize {
        self.width
    }

    /// Pairs of sixteens of a row, of which the last may be zeros.
    fn pairs(&self) -> usize {
        self.width.div_ceil(PAIR)
    }

    /// Words of a unit's rows.
    pub fn words(&self) -> usize {
        OWN * self.pairs() * 4
    }

    /// Bytes of shared columns.
    pub fn bytes(&self) -> usize {
        COLUMNS / EIGHT * self.pairs() * PARTS * PART_BYTES
    }

    /// Eights of numbers of columns that a unit shares.
    pub fn eights(&self) -> usize {
        COLUMNS * 4 * self.pairs() / ROWS
    }
}

/// What a unit shares of columns: eight numbers of one.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Eight {
    /// Among those that are shared.
    pub column: usize,
    /// The first of its numbers.
    pub number: usize,
    /// Where they lie.
    pub offset: u32,
}

/// The eight that a unit shares as its `i`th.
#[cube]
pub(crate) fn own_eight(#[comptime] i: usize, #[comptime] t: SplitTile) -> Eight {
    let unit = UNIT_POS as usize;
    let lane = unit % 32;
    let block = comptime!(i * ROWS / 32) + unit / 32;
    Eight {
        column: block / comptime!(t.pairs()) * EIGHT + lane / 4,
        number: block % comptime!(t.pairs()) * PAIR + lane % 4 * EIGHT,
        offset: (block * comptime!(PARTS * PART_BYTES) + lane * 16) as u32,
    }
}

/// A unit's row `i`, of its cube's.
#[cube]
pub(crate) fn own_row(#[comptime] i: usize) -> usize {
    let unit = UNIT_POS as usize;
    unit / 32 * 32 + unit % 32 / 4 + comptime!(i * EIGHT)
}

/// A unit's first column of two neighbouring ones, of eight.
#[cube]
pub(crate) fn own_column() -> usize {
    UNIT_POS as usize % 4 * 2
}

/// The column of the best product of a unit's own row, of those that its four units have for their rows.
#[cube]
pub(crate) fn best_of_own_row(best: &mut Array<f32>, best_at: &mut Array<u32>) -> u32 {
    #[unroll]
    for i in 0..OWN {
        #[unroll]
        for bit in 0..2u32 {
            let product = plane_shuffle_xor(best[i], comptime!(1u32 << bit));
            let at = plane_shuffle_xor(best_at[i], comptime!(1u32 << bit));
            let is_better = is_before::<f32>(product, at, best[i], best_at[i]);
            best[i] = select(is_better, product, best[i]);
            best_at[i] = select(is_better, at, best_at[i]);
        }
    }
    of_own_row(&*best_at)
}

/// Of numbers that the four units of a row have for their rows the row's of a unit, whose row is its place in the cube.
#[cube]
fn of_own_row(numbers: &Array<u32>) -> u32 {
    let lane = UNIT_POS % 32;
    let mut own = 0u32.runtime();
    #[unroll]
    for i in 0..OWN {
        let number = plane_shuffle(numbers[i], lane % 8u32 * 4u32);
        own = select(lane / 8u32 == i as u32, number, own);
    }
    own
}

/// Without PTX there are none.
#[cfg(not(feature = "cuda"))]
mod no_ptx {
    use super::*;

    #[cube]
    pub fn load_rows<T: CubePrimitive>(
        _x: &[T],
        _own: &mut Array<u32>,
        _start: usize,
        _first: usize,
        _rows: usize,
        #[comptime] _t: SplitTile,
    ) {
    }

    #[cube]
    pub fn row_squares(_own: &Array<u32>, _squares: &mut Array<f32>, #[comptime] _t: SplitTile) {}

    #[cube]
    pub fn load_columns(
        _columns: &[f32],
        _numbers: &mut Array<f32>,
        _at: usize,
        _number: usize,
        _end: usize,
    ) {
    }

    #[cube]
    pub fn share_eight(_numbers: &Array<f32>, _shared: &Shared<[u32]>, _offset: u32) {}

    #[cube]
    pub fn products(
        _own: &Array<u32>,
        _shared: &Shared<[u32]>,
        _eight: usize,
        _sums: &mut Array<f32>,
        #[comptime] _t: SplitTile,
    ) {
    }
}
#[cfg(not(feature = "cuda"))]
pub(crate) use no_ptx::{load_columns, load_rows, products, row_squares, share_eight};
