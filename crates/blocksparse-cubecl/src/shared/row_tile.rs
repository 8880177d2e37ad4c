//! How the units of a cube share rows.

// A kernel's integers have no such method.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::ir::ElemType;
use cubecl::ir::features::Plane;
use cubecl::prelude::*;

use crate::limits::{most_units, vector_of};

/// Units of a cube, where a row has fewer.
const CUBE_UNITS: usize = 256;

/// How the units of a cube share rows: each of `rows` rows has `lanes` units, neighbours in the cube, and a lane has every `lanes`-th vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowTile {
    /// Units of a row, a power of two.
    pub lanes: usize,
    /// Rows that a cube has at a time.
    pub rows: usize,
    /// Elements of a vector.
    pub vector: usize,
    /// Vectors of a row.
    pub row_vectors: usize,
    /// Units that exchange numbers without shared memory: a power of two, 1 on a device without plane operations.
    pub plane: usize,
}

impl RowTile {
    /// The tile of rows of `width` numbers, the widest of which are of `element`. A lane gets at most `most_vectors` vectors, or `None`: no cube of the device
    /// has as many units.
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
            // Planes of several sizes: the smallest divides the others.
            true => properties.hardware.plane_size_min.max(1) as usize,
            false => 1,
        };
        let least = row_vectors
            .div_ceil(most_vectors)
            .max(1)
            .next_power_of_two();
        // Beyond a plane more lanes only shorten a row's own time.
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

    /// The tile with fewer rows: at most so many units, if a row has no more.
    pub fn with_units(mut self, units: usize) -> Self {
        self.rows = self.rows.min((units / self.lanes).max(1));
        self
    }

    /// Units of a cube.
    pub fn units(&self) -> usize {
        self.lanes * self.rows
    }

    /// Vectors of a lane, at most.
    pub fn lane_vectors(&self) -> usize {
        self.row_vectors.div_ceil(self.lanes)
    }

    /// Whether every lane has as many vectors.
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
    /// The first.
    pub a: A,
    /// The second.
    pub b: A,
}

/// Elements of shared memory that `pair_across_lanes` needs.
pub fn pair_shared(tile: &RowTile) -> usize {
    match tile.plane > 1 && tile.lanes > tile.plane {
        true => 4 * tile.units() / tile.plane,
        false => tile.shared(),
    }
}

/// The sums of two numbers over a row's lanes, in all of them, for loops: planes meet once in each step. `shared` has [`pair_shared`] numbers, of which even
/// and odd `step`s take a half each, so that none overwrites what another still reads.
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

/// How numbers of lanes become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Combine {
    /// Added.
    Sum,
    /// The largest.
    Max,
}

/// Two of them.
#[cube]
pub fn combine<A: Float>(a: A, b: A, #[comptime] by: Combine) -> A {
    match comptime!(by) {
        Combine::Sum => a + b,
        Combine::Max => max(a, b),
    }
}

/// The `value`s of a row's lanes as one, in all of them. Every unit of the cube gets here; `shared` has [`RowTile::shared`] numbers, and may be used
/// again at once.
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
            // The units of a plane have the same number, which only the other planes lack.
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

    /// A device with planes of a size, or none, and cubes and vectors up to a size.
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

    /// Every number of a row has a lane, units are no more than the device's, and lanes and planes divide each other.
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

    /// The trainer's rows have a plane each, and need no shared memory.
    #[test]
    fn rows_of_512_have_a_plane_each() {
        let device = device(Some(32), 1024, 8);
        let tile = RowTile::new(&device, 512, F32, 8).unwrap();
        assert_eq!((tile.lanes, tile.rows, tile.vector), (32, 8, 4));
        assert_eq!((tile.lane_vectors(), tile.shared()), (4, 1));
        // What a plane has no registers for has several.
        let tile = RowTile::new(&device, 4096, F32, 8).unwrap();
        assert_eq!((tile.lanes, tile.rows, tile.shared()), (128, 2, 256));
    }
}
