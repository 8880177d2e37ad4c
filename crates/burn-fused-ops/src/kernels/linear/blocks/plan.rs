//! Partition of products with a block-sparse weight.

use std::fmt;

use crate::kernels::linear::blocks::tables::{BlockTables, Direction, slab_cycles};
use crate::kernels::linear::blocks::tile::{BlockTile, Split, Work};
use crate::kernels::linear::plan::hopper;
use crate::kernels::linear::tile::SLAB;
use crate::kernels::prelude::*;
use blocksparse_cubecl::arch::ptx::Half;

/// Rows of a warpgroup's tile of a product, the widest first.
const COLS: [usize; 3] = [256, 128, 64];
/// Cycles of a tile's prologue and epilogue.
const TILE_CYCLES: usize = 1500;
/// Most parts of the rows, and the bandwidth in which they are added, in bytes per cycle.
const MOST_PARTS: usize = 32;
const MEMORY_BYTES: usize = 2200;

/// Returns a tile with `cols` columns and the most slabs that fit.
fn tile_of(
    tables: &BlockTables,
    work: Work,
    cols: usize,
    bf16: bool,
    shared: usize,
) -> Result<BlockTile, &'static str> {
    let tile = BlockTile {
        half: if bf16 { Half::Bf16 } else { Half::F16 },
        work,
        split: split_of(tables),
        cell: tables.cell(),
        block: tables.block,
        cols,
        stages: 1,
    };
    tile.with_stages(shared)
        .ok_or("no tile fits the shared memory")
}

fn split_of(tables: &BlockTables) -> Split {
    if tables.block > SLAB {
        Split::Left
    } else {
        Split::Right
    }
}

/// Plan of `x · W` or `dy · Wᵀ` for `[rows, ..]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockProductPlan {
    pub(crate) tile: BlockTile,
    pub(crate) rows: usize,
    pub(crate) lists: usize,
    pub(crate) tiles: usize,
    pub(crate) cubes: usize,
}

impl BlockProductPlan {
    /// # Errors
    /// The reason why the kernel does not support it.
    pub fn new(
        client: &Client,
        tables: &BlockTables,
        direction: Direction,
        bf16: bool,
        rows: usize,
    ) -> Result<Self, &'static str> {
        let (multiprocessors, shared) = hopper(client)?;
        if rows == 0 {
            return Err("a factor is empty");
        }
        let [_, width] = tables.ends(direction);
        let counts = [Some(rows), rows.checked_mul(width).map(|all| all / 2)];
        if counts
            .iter()
            .any(|count| count.is_none_or(|count| i32::try_from(count).is_err()))
        {
            return Err(
                "a length or the result has more numbers than the kernel counts in 32 bits",
            );
        }
        let split = split_of(tables);
        let groups = tables.lists(direction).groups;
        let lists = if split == Split::Left {
            groups / 2
        } else {
            groups
        };
        // Narrow tiles if wide ones would leave multiprocessors idle.
        let tiles = |cols: usize| {
            let of_tile = if split == Split::Right {
                2 * cols
            } else {
                cols
            };
            lists * rows.div_ceil(of_tile)
        };
        let cols = (COLS.into_iter())
            .find(|cols| tiles(*cols) >= multiprocessors)
            .unwrap_or(COLS[2]);
        Ok(Self {
            tile: tile_of(tables, Work::Gathered(direction), cols, bf16, shared)?,
            rows,
            lists,
            tiles: tiles(cols),
            cubes: tiles(cols).min(multiprocessors),
        })
    }
}

/// Returns the height and width of a tile.
fn sides(tile: &BlockTile) -> [usize; 2] {
    match tile.split {
        Split::Left => [128, tile.cols],
        Split::Right => [64, 2 * tile.cols],
    }
}

impl fmt::Display for BlockProductPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [tall, wide] = sides(&self.tile);
        write!(
            f,
            "wgmma, tiles of {tall} outputs × {wide} rows, {} slabs of {SLAB}, {} cubes",
            self.tile.stages, self.cubes
        )
    }
}

/// Plan of `xᵀ · dy` over the kept blocks for `[rows, ..]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockGradientPlan {
    pub(crate) tile: BlockTile,
    pub(crate) rows: usize,
    pub(crate) parts: usize,
    pub(crate) part_slabs: usize,
    pub(crate) tiles: usize,
    pub(crate) cubes: usize,
}

impl BlockGradientPlan {
    /// # Errors
    /// The reason why the kernel does not support it.
    pub fn new(
        client: &Client,
        tables: &BlockTables,
        bf16: bool,
        rows: usize,
    ) -> Result<Self, &'static str> {
        let (multiprocessors, shared) = hopper(client)?;
        if rows == 0 || tables.targets.tiles == 0 {
            return Err("a factor is empty");
        }
        if i32::try_from(rows).is_err() {
            return Err(
                "a length or the result has more numbers than the kernel counts in 32 bits",
            );
        }
        let tile = tile_of(tables, Work::Weight, tables.targets.cols, bf16, shared)?;
        let slabs = rows.div_ceil(SLAB);
        let cycles = slab_cycles(tile.cols, tile.slab_bytes());
        let lists = tables.targets.tiles;
        let plan = |parts: usize| {
            let part_slabs = slabs.div_ceil(parts);
            let waves = (lists * parts).div_ceil(multiprocessors);
            let sums = tables.numbers * 4 * (2 * parts + 1) / MEMORY_BYTES;
            (
                waves * (part_slabs * cycles + TILE_CYCLES) + sums,
                part_slabs,
            )
        };
        let parts = (1..=MOST_PARTS.min(slabs))
            .filter(|parts| {
                let numbers = tables.numbers.checked_mul(*parts);
                numbers.is_some_and(|numbers| u32::try_from(numbers).is_ok())
            })
            .min_by_key(|parts| plan(*parts).0)
            .ok_or("the gradient has more numbers than the kernel counts in 32 bits")?;
        Ok(Self {
            tile,
            rows,
            parts,
            part_slabs: plan(parts).1,
            tiles: lists * parts,
            cubes: (lists * parts).min(multiprocessors),
        })
    }

    /// Returns the number of parts of the rows: the result is `[parts, blocks, block, block]`, to be added.
    pub fn parts(&self) -> usize {
        self.parts
    }
}

impl fmt::Display for BlockGradientPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [tall, wide] = sides(&self.tile);
        write!(
            f,
            "wgmma, tiles of {tall} inputs × {wide} outputs, {} slabs of {SLAB} rows, {} cubes, the rows in {} parts",
            self.tile.stages, self.cubes, self.parts
        )
    }
}
