//! Products of rows with columns, summed in registers: what similarities and hashes are made of.
//!
//! A cube has a tile of rows, 64 columns at a time, and of both so many numbers at a time, which its units share. A unit has every eighth row of 64 and every
//! eighth column, so that 16 loads of a vector of four serve 256 products. Sums are added in the order of the numbers.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::rows::norm_shape::sum_of;

/// Columns of a tile, and rows that share units.
pub(crate) const SIDE: usize = 64;
/// Rows of these, and columns, of a unit.
pub(crate) const OWN: usize = 8;
/// Units along either.
pub(crate) const ACROSS: usize = SIDE / OWN;

/// How a cube's units share a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProductTile {
    /// Elements of a vector.
    pub vector: usize,
    /// Rows in parts of 64, which have as many units.
    pub groups: usize,
    /// Elements of a row that are shared at a time.
    pub depth: usize,
}

impl ProductTile {
    /// Of rows of so many numbers and sums of a type, beside `others` bytes that a cube shares.
    ///
    /// # Errors
    /// [`KernelError`] if the device has too few units, or too few bytes.
    pub fn new(
        client: &Client,
        width: usize,
        sums: ElemType,
        groups: usize,
        others: usize,
    ) -> Result<Self, KernelError> {
        let hardware = &client.properties().hardware;
        let most = hardware.max_units_per_cube.min(hardware.max_cube_dim.0);
        let widest = hardware.max_vector_size.max(1);
        let fits = |vector: &usize| *vector <= widest && width.is_multiple_of(*vector);
        let vector = [4, 2, 1].into_iter().find(fits).unwrap_or(1);
        let of_depth = |depth: usize| Self {
            vector,
            groups,
            depth,
        };
        if (most as usize) < of_depth(16).units() {
            let units = of_depth(16).units();
            return Err(KernelError::limit("units of a cube", most, units));
        }
        let (all, fewest) = (hardware.max_shared_memory_size, 4);
        let bytes = |tile: &Self| tile.shared() * sums.size() + others;
        // More at a time than 16 for two parts of rows left no room for others.
        let tiles = [if groups == 1 { 32 } else { 16 }, 16, 8, fewest].map(of_depth);
        let tile = tiles.into_iter().find(|tile| bytes(tile) <= all);
        tile.ok_or_else(|| {
            let least = bytes(&of_depth(fewest));
            KernelError::limit("the bytes of a tile", all as u64, least)
        })
    }

    /// Rows of a cube, and its units.
    pub fn units(&self) -> usize {
        SIDE * self.groups
    }

    /// Vectors of a row that are shared at a time.
    pub fn slots(&self) -> usize {
        self.depth / self.vector
    }

    /// Vectors from a row to the next: one more, so that neighbours begin in different banks.
    pub fn pitch(&self) -> usize {
        self.slots() + 1
    }

    /// Vectors of shared rows, and of columns.
    pub fn left(&self) -> usize {
        self.units() * self.pitch()
    }

    pub fn right(&self) -> usize {
        SIDE * self.pitch()
    }

    /// Numbers of both.
    fn shared(&self) -> usize {
        (self.left() + self.right()) * self.vector
    }
}

/// A unit's row `i` of its tile.
#[cube]
pub(crate) fn own_row(#[comptime] i: usize) -> usize {
    let unit = UNIT_POS as usize;
    unit / SIDE * SIDE + unit % ACROSS + comptime!(i * ACROSS)
}

/// A unit's column `j`, of 64.
#[cube]
pub(crate) fn own_column(#[comptime] j: usize) -> usize {
    UNIT_POS as usize % SIDE / ACROSS + comptime!(j * ACROSS)
}

/// What of a list of rows is shared: from row `first` on, as far as there are rows, and step by step along them.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RowsOf {
    /// Where the list begins, in vectors.
    pub start: usize,
    pub first: usize,
    pub rows: usize,
    /// Vectors of a row.
    pub vectors: usize,
}

/// Fills a unit's part of `count` shared rows, with zeros behind the last row and its last number: a vector of every so many rows. To `squares` the squares of
/// these are added, if they are wanted.
#[cube]
pub(crate) fn share_rows<E: Float, A: Float, N: Size>(
    x: &[Vector<E, N>],
    shared: &mut Shared<[Vector<A, N>]>,
    squares: &mut Array<A>,
    of: &RowsOf,
    step: usize,
    #[comptime] count: usize,
    #[comptime] with_squares: bool,
    #[comptime] t: ProductTile,
) {
    let slots = comptime!(t.slots());
    let slot = UNIT_POS as usize % slots;
    let vector = step * slots + slot;
    #[unroll]
    for i in 0..comptime!(count * t.slots() / t.units()) {
        let row = UNIT_POS as usize / slots + comptime!(i * t.units() / t.slots());
        let exists = of.first + row < of.rows && vector < of.vectors;
        let at = of.start + (of.first + row) * of.vectors + vector;
        let numbers = Vector::<A, N>::cast_from(x[select(exists, at, of.start)]);
        let numbers = select(exists, numbers, Vector::<A, N>::zeroed());
        shared[row * comptime!(t.pitch()) + slot] = numbers;
        if comptime!(with_squares) {
            squares[i] += sum_of::<A, N>(numbers * numbers);
        }
    }
}

/// Adds the products of what is shared: `sums[i · 8 + j]` of a unit's row `i` and column `j`.
#[cube]
pub(crate) fn multiply_shared<A: Float, N: Size>(
    left: &Shared<[Vector<A, N>]>,
    right: &Shared<[Vector<A, N>]>,
    sums: &mut Array<A>,
    #[comptime] t: ProductTile,
) {
    for slot in 0..comptime!(t.slots()) {
        let mut own = Array::<Vector<A, N>>::new(OWN);
        #[unroll]
        for i in 0..OWN {
            own[i] = left[own_row(i) * comptime!(t.pitch()) + slot];
        }
        #[unroll]
        for j in 0..OWN {
            let column = right[own_column(j) * comptime!(t.pitch()) + slot];
            #[unroll]
            for i in 0..OWN {
                #[unroll]
                for n in 0..comptime!(t.vector) {
                    sums[comptime!(i * OWN + j)] += own[i].extract(n) * column.extract(n);
                }
            }
        }
    }
}

/// Whether of a product and another the first is the better one: the larger, and of equal ones that of the first column.
#[cube]
pub(crate) fn is_before<A: Float>(product: A, at: u32, best: A, best_at: u32) -> bool {
    product > best || (product == best && at < best_at)
}

/// The column of the best product of a unit's row, of those that units that share rows found of theirs: `parts` and `places` have a number for each row and
/// unit along it.
#[cube]
pub(crate) fn best_of_shared_row<A: Float>(
    best: &Array<A>,
    best_at: &Array<u32>,
    parts: &mut [A],
    places: &mut [u32],
) -> u32 {
    #[unroll]
    for i in 0..OWN {
        let at = own_row(i) * ACROSS + own_column(0usize);
        parts[at] = best[i];
        places[at] = best_at[i];
    }
    sync_cube();
    let first = UNIT_POS as usize * ACROSS;
    let mut product = parts[first];
    let mut column = places[first];
    #[unroll]
    for other in 1..ACROSS {
        let number = parts[first + other];
        let at = places[first + other];
        let is_better = is_before::<A>(number, at, product, column);
        product = select(is_better, number, product);
        column = select(is_better, at, column);
    }
    column
}
