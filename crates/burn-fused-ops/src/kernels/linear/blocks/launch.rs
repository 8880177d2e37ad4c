//! The launches of products of a block-sparse weight.

use crate::kernels::linear::blocks::plan::{BlockGradientPlan, BlockProductPlan};
use crate::kernels::linear::blocks::product;
use crate::kernels::linear::blocks::product::BlockTilesLaunch;
use crate::kernels::linear::blocks::tables::{BlockTables, Direction, GROUP};
use crate::kernels::linear::blocks::tile::{BlockTile, Work};
use crate::kernels::linear::tile::{Order, SLAB, UNITS};
use crate::kernels::linear::view::{MatrixView, boxes_of};
use crate::kernels::prelude::*;
use blocksparse_cubecl::arch::ptx::Half;

/// Returns the tensor map of a matrix `[rows, width]`, read in boxes.
fn map(
    handle: &Handle,
    [rows, width, pitch]: [usize; 3],
    boxes: [usize; 2],
    half: Half,
) -> TensorMapArg<Tiled> {
    let shape = [1, 1, rows, width];
    let strides = [rows * pitch, rows * pitch, pitch, 1];
    let boxes = [1, 1, boxes[0], boxes[1]];
    // SAFETY: the handle holds the elements of the matrix's shape and pitch.
    unsafe { boxes_of(handle, shape, strides, boxes, half) }
}

/// Returns rows, width and pitch of a matrix with contiguous rows.
fn lengths(
    view: &MatrixView,
    factor: &'static str,
    expected: [usize; 2],
) -> Result<[usize; 3], KernelError> {
    let [batch, rows, width] = view.shape;
    let fits = batch == 1 && view.seq.is_none() && [rows, width] == expected;
    // The pitch of a single row is arbitrary.
    let pitch = if rows == 1 { width } else { view.strides[1] };
    match fits && view.order(2) == Ok(Order::Depth) {
        true => Ok([rows, width, pitch]),
        false => Err(KernelError::Factor { factor }),
    }
}

/// Computes `out = x · W` (or `x · Wᵀ`) as planned, with a weight packed by [`pack_blocks`](crate::kernels::linear::blocks::pack_blocks): `out` is
/// `[rows, columns]`, contiguous, in the type of x.
///
/// # Errors
/// [`KernelError::Factor`] if x differs from the plan or its rows are not contiguous. Nothing is launched then.
pub fn multiply_blocks(
    client: &Client,
    plan: &BlockProductPlan,
    tables: &BlockTables,
    direction: Direction,
    x: &MatrixView,
    packed: &Handle,
    out: &Handle,
) -> Result<(), KernelError> {
    let tile = plan.tile;
    if tile.work != Work::Gathered(direction) || tile.block != tables.block {
        return Err(KernelError::Factor { factor: "W" });
    }
    let [width, cols] = tables.ends(direction);
    let lengths = lengths(x, "x", [plan.rows, width])?;
    let lists = tables.lists(direction);
    let packed_rows = lists.slabs * SLAB;
    let a = map(
        packed,
        [packed_rows, GROUP, GROUP],
        [SLAB, GROUP],
        tile.half,
    );
    let b = map(&x.handle, lengths, [tile.cols, tile.cell], tile.half);
    let tiles = BlockTilesLaunch::new(
        plan.tiles as u32,
        plan.lists as u32,
        plan.rows as u32,
        cols as u32,
        0,
        0,
    );
    // SAFETY: TMA reads nothing beyond its maps; rows and columns beyond the result are not written, and `out` has the declared length; lists are those of
    // the tables (see `buffer`).
    unsafe {
        product::product::launch_unchecked(
            client,
            CubeCount::Static(plan.cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            tile.cols / 2,
            4,
            a,
            b,
            buffer(out, plan.rows * cols / 8),
            buffer(&lists.offsets.handle, lists.offsets.len),
            buffer(&lists.entries.handle, lists.entries.len),
            optional(None, 0),
            tiles,
            tile,
        );
    }
    Ok(())
}

/// Computes `xᵀ · dy` over the kept blocks as planned: `out` is `[parts, blocks, block, block]`, contiguous, in f32, to be added.
///
/// # Errors
/// [`KernelError::Factor`] if x or dy differs from the plan or its rows are not contiguous. Nothing is launched then.
pub fn block_gradient(
    client: &Client,
    plan: &BlockGradientPlan,
    tables: &BlockTables,
    [x, dy]: [&MatrixView; 2],
    out: &Handle,
) -> Result<(), KernelError> {
    let tile: BlockTile = plan.tile;
    let targets = &tables.targets;
    if tile.block != tables.block || tile.cols != targets.cols {
        return Err(KernelError::Factor { factor: "W" });
    }
    let of_x = lengths(x, "x", [plan.rows, tables.inputs])?;
    let of_dy = lengths(dy, "dy", [plan.rows, tables.outputs])?;
    let a = map(&x.handle, of_x, [SLAB, GROUP], tile.half);
    let b = map(&dy.handle, of_dy, [SLAB, tile.cell], tile.half);
    let tiles = BlockTilesLaunch::new(
        plan.tiles as u32,
        targets.tiles as u32,
        plan.rows as u32,
        tables.outputs as u32,
        plan.part_slabs as u32,
        tables.numbers as u32,
    );
    // SAFETY: TMA reads nothing beyond its maps; only cells of the weight are written, for which `out` has space in each part; lists are those of the tables
    // (see `buffer`).
    unsafe {
        product::product::launch_unchecked(
            client,
            CubeCount::Static(plan.cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            tile.cols / 2,
            2,
            a,
            b,
            buffer(out, plan.parts * tables.numbers / 2),
            buffer(&targets.starts.handle, targets.starts.len),
            buffer(&targets.entries.handle, targets.entries.len),
            optional(Some(&targets.targets.handle), targets.targets.len),
            tiles,
            tile,
        );
    }
    Ok(())
}
