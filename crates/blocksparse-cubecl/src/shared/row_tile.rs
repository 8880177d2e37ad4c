//! Distribution of rows over the units of a cube.

// Integers in kernels do not have this method.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::ir::ElemType;
use cubecl::ir::features::Plane;
use cubecl::prelude::*;

use crate::limits::{most_units, vector_of};

/// Units per cube, unless a row needs more.
const CUBE_UNITS: usize = 256;

/// Distribution of rows over the units of a cube. Each of `rows` rows has `lanes` consecutive units, and a lane has every `lanes`-th vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowTile {
    /// Units per row, a power of two.
    pub lanes: usize,
    /// Rows per cube at a time.
    pub rows: usize,
    /// Elements per vector.
    pub vector: usize,
    /// Vectors per row.
    pub row_vectors: usize,
    /// Units that exchange values without shared memory: a power of two, 1 on a device without plane operations.
    pub plane: usize,
}

impl RowTile {
    /// Returns the tile of rows of `width` elements, whose widest type is `element`. A lane gets at most `most_vectors` vectors. `None` if the device's
    /// cubes are too small for that.
    pub fn new(
        properties: &DeviceProperties,
        width: usize,
        element: ElemType,
        most_vectors: usize,
    ) -> Option<Self> {
        let vector = vector_of(properties, element.size(), &[width]);
        let row_vectors = width / vector;
        let most_units = most_units(properties);
        let plane = match properties.features.plane.contains(Plane::Ops) {
            // Of several plane sizes, the smallest divides the others.
            true => properties.hardware.plane_size_min.max(1) as usize,
            false => 1,
        };
        let least = row_vectors
            .div_ceil(most_vectors)
            .max(1)
            .next_power_of_two();
        // More lanes than a plane only shorten the time of a single row.
        let lanes = least.max(row_vectors.next_power_of_two().min(plane.max(32)));
        if least > most_units {
            return None;
        }
        let lanes = lanes.min(1 << most_units.ilog2());
        Some(Self {
            lanes,
            rows: (CUBE_UNITS.min(most_units) / lanes).max(1),
            vector,
            row_vectors,
            plane,
        })
    }

    /// Returns the tile with fewer rows, for at most `units` units, if a row needs no more.
    pub fn with_units(mut self, units: usize) -> Self {
        self.rows = self.rows.min((units / self.lanes).max(1));
        self
    }

    /// Units per cube.
    pub fn units(&self) -> usize {
        self.lanes * self.rows
    }

    /// Largest number of vectors per lane.
    pub fn lane_vectors(&self) -> usize {
        self.row_vectors.div_ceil(self.lanes)
    }

    /// Whether every lane has the same number of vectors.
    pub fn is_whole(&self) -> bool {
        self.row_vectors.is_multiple_of(self.lanes)
    }

    /// Elements of shared memory that [`across_lanes`] needs.
    pub fn shared(&self) -> usize {
        match self.lanes > self.plane {
            true => self.units(),
            false => 1,
        }
    }
}

/// Two sums over the lanes of a row.
#[derive(CubeType, Clone, Copy)]
pub struct Pair<A: Float> {
    /// First sum.
    pub a: A,
    /// Second sum.
    pub b: A,
}

/// Elements of shared memory that `pair_across_lanes` needs.
pub fn pair_shared(tile: &RowTile) -> usize {
    match tile.plane > 1 && tile.lanes > tile.plane {
        true => 4 * tile.units() / tile.plane,
        false => tile.shared(),
    }
}

/// Returns the sums of two values over a row's lanes, in all lanes, with one barrier per step of a loop. `shared` has [`pair_shared`] elements. Even and
/// odd `step`s use a half each, so that no plane overwrites what another still reads.
#[cube]
pub fn pair_across_lanes<A: Float>(
    a: A,
    b: A,
    shared: &mut [A],
    step: usize,
    #[comptime] tile: RowTile,
) -> Pair<A> {
    if comptime!(tile.plane > 1 && tile.lanes > tile.plane) {
        let mut a = a;
        let mut b = b;
        #[unroll]
        for step in 0..comptime!(tile.plane.ilog2()) {
            a += plane_shuffle_xor(a, comptime!(1u32 << step));
            b += plane_shuffle_xor(b, comptime!(1u32 << step));
        }
        let unit = UNIT_POS as usize;
        let planes = comptime!(tile.units() / tile.plane);
        let half = step % 2 * comptime!(2 * planes);
        if unit % comptime!(tile.plane) == 0 {
            let at = half + unit / comptime!(tile.plane) * 2;
            shared[at] = a;
            shared[at + 1] = b;
        }
        sync_cube();
        let row_planes = comptime!(tile.lanes / tile.plane);
        let first = half + unit / comptime!(tile.lanes) * comptime!(2 * row_planes);
        a = shared[first];
        b = shared[first + 1];
        #[unroll]
        for other in 1..row_planes {
            a += shared[first + comptime!(2 * other)];
            b += shared[first + comptime!(2 * other + 1)];
        }
        Pair::<A> { a, b }
    } else {
        Pair::<A> {
            a: across_lanes::<A>(a, shared, tile, Combine::Sum),
            b: across_lanes::<A>(b, shared, tile, Combine::Sum),
        }
    }
}

/// Reduction over lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Combine {
    /// Addition.
    Sum,
    /// Maximum.
    Max,
}

/// Reduces two values.
#[cube]
pub fn combine<A: Float>(a: A, b: A, #[comptime] by: Combine) -> A {
    match comptime!(by) {
        Combine::Sum => a + b,
        Combine::Max => max(a, b),
    }
}

/// Reduces `value` over a row's lanes, with the result in all of them. Every unit of the cube must call it. `shared` has [`RowTile::shared`] elements, and
/// can be reused at once.
#[cube]
pub fn across_lanes<A: Float>(
    value: A,
    shared: &mut [A],
    #[comptime] tile: RowTile,
    #[comptime] by: Combine,
) -> A {
    let mut result = value;
    #[unroll]
    for step in 0..comptime!(tile.lanes.min(tile.plane).ilog2()) {
        let other = plane_shuffle_xor(result, comptime!(1u32 << step));
        result = combine::<A>(result, other, by);
    }
    if comptime!(tile.lanes > tile.plane) {
        let unit = UNIT_POS as usize;
        let lane = unit % comptime!(tile.lanes);
        shared[unit] = result;
        sync_cube();
        #[unroll]
        for step in 0..comptime!((tile.lanes / tile.plane).ilog2()) {
            // The units of a plane have the same value already; only other planes' values are missing.
            let half = comptime!(tile.lanes >> (step + 1));
            if lane < half {
                let own = shared[unit];
                let other = shared[unit + half];
                shared[unit] = combine::<A>(own, other, by);
            }
            sync_cube();
        }
        result = shared[unit - lane];
        sync_cube();
    }
    result
}

#[cfg(test)]
mod tests {
    use cubecl::ir::FloatKind;

    use super::*;
    use crate::described::Fake;

    const F32: ElemType = ElemType::Float(FloatKind::F32);
    const BF16: ElemType = ElemType::Float(FloatKind::BF16);

    /// Returns a device with this plane size or none, and limits of units per cube and elements per vector.
    fn device(plane: Option<u32>, units: u32, vector: usize) -> DeviceProperties {
        let mut device = Fake::webgpu().properties;
        let hardware = &mut device.hardware;
        hardware.plane_size_min = plane.unwrap_or(0);
        hardware.plane_size_max = plane.unwrap_or(0);
        hardware.max_units_per_cube = units;
        hardware.max_cube_dim = (units, units, 64);
        hardware.max_vector_size = vector;
        if plane.is_some() {
            device.features.plane.insert(Plane::Ops);
        }
        device
    }

    /// Every element of a row has a lane, the device has enough units, and lanes and planes divide each other.
    #[test]
    fn tiles_cover_rows() {
        for (plane, units, vector) in [
            (Some(32), 1024, 8),
            (Some(64), 1024, 4),
            (Some(8), 512, 4),
            (None, 1024, 4),
            (None, 16, 1),
        ] {
            let device = device(plane, units, vector);
            for width in (1..200).chain([512, 1000, 1031, 2048, 4100, 16_384]) {
                for element in [F32, BF16] {
                    for most in [1, 4, 32, usize::MAX] {
                        let what = format!("{plane:?}, {units}, {width}, {element:?}, {most}");
                        let Some(tile) = RowTile::new(&device, width, element, most) else {
                            let lanes = width.div_ceil(vector).div_ceil(most);
                            assert!(lanes > units as usize / 2 / vector, "{what}");
                            continue;
                        };
                        assert!(tile.units() <= units as usize && tile.rows > 0, "{what}");
                        assert_eq!(tile.vector * tile.row_vectors, width, "{what}");
                        assert!(tile.lanes * tile.lane_vectors() >= tile.row_vectors);
                        assert!(tile.vector <= vector && tile.vector * element.size() <= 16);
                        assert!(tile.lanes.is_power_of_two() && tile.plane.is_power_of_two());
                        assert_eq!(
                            tile.is_whole(),
                            tile.row_vectors % tile.lanes == 0,
                            "{what}"
                        );
                        let few = tile.lane_vectors() <= most || tile.lanes == units as usize;
                        assert!(few, "{what}");
                    }
                }
            }
        }
    }

    /// Rows of 512, as the trainer has, get a plane each and need no shared memory.
    #[test]
    fn rows_of_512_have_a_plane_each() {
        let device = device(Some(32), 1024, 8);
        let tile = RowTile::new(&device, 512, F32, 8).unwrap();
        assert_eq!((tile.lanes, tile.rows, tile.vector), (32, 8, 4));
        assert_eq!((tile.lane_vectors(), tile.shared()), (4, 1));
        // A row too long for a plane's registers gets several planes.
        let tile = RowTile::new(&device, 4096, F32, 8).unwrap();
        assert_eq!((tile.lanes, tile.rows, tile.shared()), (128, 2, 256));
    }
}
