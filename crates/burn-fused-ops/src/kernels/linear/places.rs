//! Positions of the tiles of a product.

use cubecl::prelude::*;

use crate::kernels::linear::epilogue::Place;
use crate::kernels::linear::tile::ROWS;

/// Grid of tiles.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Tiles {
    /// Number of tiles.
    pub count: u32,
    /// Tiles along the rows and along the columns.
    pub rows: u32,
    pub cols: u32,
    /// Parts of the depth, and slabs of every part but the last.
    pub parts: u32,
    pub part_slabs: u32,
    /// Slabs of the depth.
    pub slabs: u32,
    /// Neighbouring matrices of the batch that share one matrix of the left, respectively right, factor.
    pub a_each: u32,
    pub b_each: u32,
    /// Matrices of a run of the left, respectively right, factor.
    pub a_run: u32,
    pub b_run: u32,
    /// Rows of a batch entry of the left factor, if it is laid out by heads.
    pub seq: u32,
}

/// Returns the position of a tile with `cols` columns.
#[cube]
pub fn place_of(tiles: &Tiles, tile: u32, #[comptime] cols: usize) -> Place {
    let row_tile = tile / tiles.cols;
    let matrix = row_tile / tiles.rows;
    let first = matrix % tiles.parts * tiles.part_slabs;
    Place {
        row: row_tile % tiles.rows * comptime!(ROWS as u32),
        col: tile % tiles.cols * comptime!(cols as u32),
        row_tile,
        matrix,
        batch: matrix / tiles.parts,
        first,
        count: min(tiles.part_slabs, tiles.slabs - first),
    }
}
