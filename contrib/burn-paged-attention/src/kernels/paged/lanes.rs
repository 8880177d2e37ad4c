//! Shuffles within a plane. CubeCL's ask on CUDA which lanes are there before each of them; PTX says that all are.

use cubecl::prelude::*;

use crate::kernels::paged::tile::Tile;
use blocksparse_cubecl::arch::ptx;

/// The number of the lane `distance` away.
#[cube]
pub fn shuffle_xor<A: Float>(x: A, #[comptime] distance: u32, #[comptime] t: Tile) -> A {
    if comptime!(t.ptx) {
        A::cast_from(ptx::shuffle_xor(f32::cast_from(x), distance))
    } else {
        plane_shuffle_xor(x, distance)
    }
}

/// The number of a lane.
#[cube]
pub fn shuffle<A: Float>(x: A, lane: u32, #[comptime] t: Tile) -> A {
    if comptime!(t.ptx) {
        A::cast_from(ptx::shuffle(f32::cast_from(x), lane))
    } else {
        plane_shuffle(x, lane)
    }
}

/// Whether `x` differs from `y` in any lane.
#[cube]
pub fn any_differ<A: Float>(x: A, y: A, #[comptime] t: Tile) -> bool {
    if comptime!(t.ptx) {
        ptx::any_differ(f32::cast_from(x), f32::cast_from(y)) != 0u32
    } else {
        plane_any(x != y)
    }
}
