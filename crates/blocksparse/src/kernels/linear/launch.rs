//! The launch of a product.

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::plan::ProductPlan;
use super::product::{self, TilesLaunch};
use super::tile::{Order, ROWS, SLAB, UNITS};
use super::view::MatrixView;
use crate::kernels::args::buffer;
use crate::kernels::error::KernelError;
use crate::kernels::shared::tma::ROW_ELEMENTS;

/// A map of a factor whose depth is in dimension `depth`: boxes have `width` of its rows or columns.
fn map(
    view: &MatrixView,
    depth: usize,
    order: Order,
    width: usize,
    dtype: ElemType,
) -> TensorMapArg<Tiled> {
    let across = 3 - depth;
    let (outer, inner, boxes) = match order {
        Order::Depth => (across, depth, [1, 1, width, ROW_ELEMENTS]),
        Order::Across => (depth, across, [1, 1, SLAB, ROW_ELEMENTS]),
    };
    let shape = [1, view.shape[0], view.shape[outer], view.shape[inner]];
    let mut strides = [0, view.strides[0], view.strides[outer], 1];
    // Strides of dimensions of length 1 are arbitrary, but a map's have to be multiples of 16 bytes.
    for dim in 0..3 {
        if shape[dim] == 1 {
            strides[dim] = shape[3].next_multiple_of(8);
        }
    }
    // SAFETY: the view's shape and strides, whose elements its handle holds.
    let tensor = unsafe {
        TensorArg::from_raw_parts(
            view.handle.clone(),
            strides.as_slice().into(),
            shape.as_slice().into(),
        )
    };
    let boxes = TiledArgs {
        tile_size: boxes.as_slice().into(),
    };
    TensorMapArg::new(boxes, tensor, dtype).with_swizzle(TensorMapSwizzle::B128)
}

/// `out = a · b`, as planned: `out` is `[batch, parts, rows, columns]`, contiguous.
///
/// # Errors
/// [`KernelError::Factor`] if a factor is not what was planned. Then nothing was launched.
pub fn multiply(
    client: &Client,
    plan: &ProductPlan,
    [a, b]: [&MatrixView; 2],
    out: &Handle,
) -> Result<(), KernelError> {
    let request = plan.request;
    for (name, view, depth, across, order) in [
        ("a", a, 2, request.rows, request.orders[0]),
        ("b", b, 1, request.cols, request.orders[1]),
    ] {
        let lengths = [view.shape[depth], view.shape[3 - depth]];
        let fits =
            lengths == [request.depth, across] && [1, request.batch].contains(&view.shape[0]);
        if !fits || view.order(depth) != Ok(order) {
            return Err(KernelError::Factor { factor: name });
        }
    }
    let dtype = ElemType::Float(match request.bf16 {
        true => FloatKind::BF16,
        false => FloatKind::F16,
    });
    let tile = plan.tile;
    let rows = request.rows.div_ceil(ROWS);
    let cols = request.cols.div_ceil(tile.cols);
    let batched = |view: &MatrixView| u32::from(view.shape[0] > 1);
    let tiles = TilesLaunch::new(
        (request.batch * plan.parts * rows * cols) as u32,
        rows as u32,
        cols as u32,
        plan.parts as u32,
        plan.part_slabs as u32,
        plan.slabs() as u32,
        batched(a),
        batched(b),
    );
    let words = if tile.wide { 2 } else { 4 };
    let elements = request.batch * plan.parts * request.rows * request.cols;
    // SAFETY: TMA reads nothing beyond its maps; rows and columns beyond the result are not written, and `out` has the length it says (see
    // `buffer`).
    unsafe {
        product::product::launch_unchecked(
            client,
            CubeCount::Static(plan.cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            tile.cols / 2,
            words,
            map(a, 2, tile.a, ROWS, dtype),
            map(b, 1, tile.b, tile.cols, dtype),
            buffer(out, elements / tile.written()),
            tiles,
            request.rows as u32,
            request.cols as u32,
            tile,
        );
    }
    Ok(())
}
