//! How the units of a cube share rows.

use cubecl::ir::ElemType;
use cubecl::ir::features::Plane;
use cubecl::prelude::*;

/// Units of a cube, where a row has fewer.
const CUBE_UNITS: usize = 256;

/// Bytes that a unit loads at a time, if a row's length and the device allow it.
const LOAD_BYTES: usize = 16;

/// How the units of a cube share rows: each of `rows` rows has `lanes` units, neighbours in the cube, and a lane has every `lanes`-th vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowTile {
    /// Units of a row, a power of two.
    pub lanes: usize,
    /// Rows that a cube has at a time.
    pub rows: usize,
    /// Numbers of a vector.
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
        let hardware = &properties.hardware;
        let most = (LOAD_BYTES / element.size()).min(hardware.max_vector_size.max(1));
        let vector = (0..=most.ilog2())
            .rev()
            .map(|power| 1 << power)
            .find(|vector| width.is_multiple_of(*vector))?;
        let row_vectors = width / vector;
        let most_units = (hardware.max_units_per_cube as usize)
            .min(hardware.max_cube_dim.0 as usize)
            .max(1);
        let plane = match properties.features.plane.contains(Plane::Ops) {
            // Planes of several sizes: the smallest divides the others.
            true => hardware.plane_size_min.max(1) as usize,
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

    /// Numbers of shared memory that [`across_lanes`] needs.
    pub fn shared(&self) -> usize {
        match self.lanes > self.plane {
            true => self.units(),
            false => 1,
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

#[cube]
fn combine<A: Float>(a: A, b: A, #[comptime] by: Combine) -> A {
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
