//! Code that the passes of a norm share: how units share a row, and limits of a launch.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use crate::error::KernelError;
use crate::shared::row_tile::RowTile;

/// Elements of a row that a unit keeps in registers, if the device has enough units.
pub const LANE_NUMBERS: usize = 32;

/// Compile-time parameters of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kind {
    /// Distribution of rows over units.
    pub tile: RowTile,
    /// Whether the mean is subtracted.
    pub centered: bool,
    /// Whether the branch has dropout.
    pub dropout: bool,
}

/// Returns the index of a lane's vector `i` in the row, clamped to the last vector.
#[cube]
pub fn place(lane: usize, i: usize, #[comptime] tile: RowTile) -> usize {
    let at = lane + i * comptime!(tile.lanes);
    if comptime!(tile.is_whole()) {
        at
    } else {
        min(at, comptime!(tile.row_vectors - 1).runtime())
    }
}

/// Whether a lane has a vector `i`.
#[cube]
pub fn has(lane: usize, i: usize, #[comptime] tile: RowTile) -> bool {
    comptime!(tile.is_whole()).runtime()
        || lane + i * comptime!(tile.lanes) < comptime!(tile.row_vectors)
}

/// Loads the lane's vectors of a row that begins at vector `start`.
#[cube]
pub fn load_row<E: Float, A: Float, N: Size>(
    source: &[Vector<E, N>],
    start: usize,
    lane: usize,
    #[comptime] tile: RowTile,
) -> Array<Vector<A, N>> {
    let mut row = Array::<Vector<A, N>>::new(comptime!(tile.lane_vectors()));
    #[unroll]
    for i in 0..comptime!(tile.lane_vectors()) {
        row[i] = Vector::<A, N>::cast_from(source[start + place(lane, i, tile)]);
    }
    row
}

/// Stores the lane's vectors of a row, if the row exists. The counterpart of `load_row`.
#[cube]
pub fn store_row<E: Float, A: Float, N: Size>(
    target: &mut [Vector<E, N>],
    row: &Array<Vector<A, N>>,
    start: usize,
    exists: bool,
    lane: usize,
    #[comptime] tile: RowTile,
) {
    #[unroll]
    for i in 0..comptime!(tile.lane_vectors()) {
        if exists && has(lane, i, tile) {
            target[start + place(lane, i, tile)] = Vector::<E, N>::cast_from(row[i]);
        }
    }
}

/// Returns the sum of the elements of a vector.
#[cube]
pub fn sum_of<A: Float, N: Size>(vector: Vector<A, N>) -> A {
    let mut sum = vector.extract(0usize);
    #[unroll]
    for c in 1..N::value() {
        sum += vector.extract(c);
    }
    sum
}

/// Returns the distribution over units of rows of `width` elements, whose widest type is `element`. A unit has about `numbers` elements.
pub fn tile_of(
    properties: &DeviceProperties,
    width: usize,
    element: ElemType,
    numbers: usize,
) -> Result<RowTile, KernelError> {
    let most_units = properties.hardware.max_units_per_cube;
    let too_wide =
        || KernelError::limit("a row's numbers", most_units * LANE_NUMBERS as u32, width);
    let vector = RowTile::new(properties, width, element, usize::MAX)
        .ok_or_else(too_wide)?
        .vector;
    let most = |numbers: usize| (numbers / vector).max(1);
    RowTile::new(properties, width, element, most(numbers))
        .or_else(|| RowTile::new(properties, width, element, most(LANE_NUMBERS)))
        .ok_or_else(too_wide)
}

/// Returns the widest of some types.
pub fn widest(elements: impl IntoIterator<Item = ElemType>) -> ElemType {
    let widest = elements.into_iter().max_by_key(|element| element.size());
    widest.expect("there are types")
}

/// Checks that a launch can bind this many buffers, and one more with its scalars.
pub fn check_buffers(client: &Client, buffers: usize) -> Result<(), KernelError> {
    let most = client.properties().hardware.max_bindings;
    KernelError::check("buffers of a launch", most, buffers + 1)
}
