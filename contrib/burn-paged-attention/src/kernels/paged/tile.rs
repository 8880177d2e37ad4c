//! Comptime shape of the SIMT kernel.

use blocksparse::Quantization;
use cubecl::ir::features::Plane;
use cubecl::prelude::*;

use crate::kernels::paged::PagedShape;
use crate::kernels::paged::page_list::PageListShape;
use blocksparse_cubecl::call::HAS_PTX;
use blocksparse_cubecl::limits::most_units;

/// Units of a cube with plane shuffles.
const CUBE_UNITS: usize = 256;
/// Units of a cube without plane operations.
const PLAIN_UNITS: usize = 32;
/// Bytes of a load.
const LOAD_BYTES: usize = 16;
/// Most queries of a cube.
const MOST_ROWS: usize = 8;
/// Most elements that a unit holds of all queries together, and of their outputs.
const ROW_NUMBERS: usize = 64;
/// Registers of a unit for queries, outputs, keys and values.
const REGISTERS: usize = 96;
/// Most keys that a unit processes at a time.
const MOST_KEYS: usize = 8;

/// Comptime shape of a cube. `lanes` adjacent units share a key and its value: each has every `lanes`-th vector of them. A plane has several such
/// groups, and each group has its own softmax state until the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Elements of a key.
    pub width: usize,
    /// Elements of a value.
    pub value_width: usize,
    /// Element type of quantized keys and values.
    pub quantization: Option<Quantization>,
    /// Elements of a vector operation: those of a load, or the four of a quantized word.
    pub vector: usize,
    /// Vectors of a load; more than one only if quantized.
    pub parts: usize,
    /// Units of a key: a power of two, at least `rows`.
    pub lanes: usize,
    /// Units that exchange values: a plane, or the cube if there are no plane operations.
    pub plane: usize,
    /// Planes of a cube.
    pub planes: usize,
    /// Whether units of a plane shuffle. Otherwise they exchange values in shared memory.
    pub shuffles: bool,
    /// Whether shuffles use PTX.
    pub ptx: bool,
    /// Queries of a cube, a power of two.
    pub rows: usize,
    /// Keys of a unit at a time, a power of two.
    pub keys: usize,
    /// Slots of a page, a power of two.
    pub page: usize,
    /// Whether scores have a softcap.
    pub softcap: bool,
    /// Whether slots have positions.
    pub visibility: bool,
    /// Whether table entries are selected.
    pub selected: bool,
}

impl Tile {
    /// Returns the tile of a call; None if widths are too large.
    pub fn new(properties: &DeviceProperties, shape: &PagedShape) -> Option<Self> {
        let hardware = &properties.hardware;
        let PagedShape {
            widths: [width, value_width],
            ..
        } = *shape;
        let most_vector = hardware.max_vector_size.max(1);
        let largest = |most: usize| {
            (0..=most.ilog2())
                .rev()
                .map(|power| 1 << power)
                .find(|size| width.is_multiple_of(*size) && value_width.is_multiple_of(*size))
        };
        let (element, vector, parts) = match shape.quantization {
            None => {
                let element = shape.dtype.size();
                (
                    element,
                    largest((LOAD_BYTES / element).min(most_vector))?,
                    1,
                )
            }
            Some(_) => {
                let numbers = largest(LOAD_BYTES.min(most_vector.saturating_mul(4)))?;
                if most_vector < 4 || !numbers.is_multiple_of(4) {
                    return None;
                }
                (1, 4, numbers / 4)
            }
        };
        // Elements of a load.
        let load = vector * parts;
        let most_units = most_units(properties);
        // If plane sizes vary, planes would run steps of different loops together.
        let plane = hardware.plane_size_min as usize;
        let shuffles = properties.features.plane.contains(Plane::Ops)
            && hardware.plane_size_min == hardware.plane_size_max
            && plane.is_power_of_two()
            && (8..=most_units).contains(&plane);
        let plane = match shuffles {
            true => plane,
            false => 1 << PLAIN_UNITS.min(most_units).ilog2(),
        };
        let vectors = (width / load).max(value_width / load);
        let lanes = vectors.next_power_of_two().min(plane);
        let lane_vectors = vectors.div_ceil(lanes);
        let most_rows = ROW_NUMBERS / (lane_vectors * load);
        if most_rows == 0 {
            return None;
        }
        let rows = (shape.group_rows().max(1).next_power_of_two())
            .min(MOST_ROWS)
            .min(1 << most_rows.ilog2())
            .min(plane);
        let lanes = lanes.max(rows);
        let units = match shuffles {
            true => CUBE_UNITS.min(most_units).max(plane),
            false => plane,
        };
        let lane_vectors = [width, value_width].map(|width| (width / load).div_ceil(lanes));
        let numbers = (lane_vectors[0] + lane_vectors[1]) * load;
        let of_rows = rows * numbers;
        let of_key = (numbers * element).div_ceil(4);
        let least = (4 / lane_vectors[0].max(lane_vectors[1])).max(1);
        let keys = (REGISTERS.saturating_sub(of_rows) / of_key).clamp(least, MOST_KEYS);
        Some(Self {
            width,
            value_width,
            quantization: shape.quantization,
            vector,
            parts,
            lanes,
            plane,
            planes: units / plane,
            shuffles,
            ptx: HAS_PTX
                && plane == 32
                && shape.dtype.size() <= 4
                && properties.identity.fingerprint.starts_with("ptx_sm"),
            rows,
            keys: 1 << keys.ilog2(),
            page: shape.page,
            softcap: shape.softcap,
            visibility: shape.visibility,
            selected: shape.selected.is_some(),
        })
    }

    /// Returns the comptime properties of its page lists.
    pub fn page_list_shape(&self) -> PageListShape {
        PageListShape {
            units: self.units(),
            page: self.page,
            selected: self.selected,
        }
    }

    /// Returns the units of a cube.
    pub fn units(&self) -> usize {
        self.plane * self.planes
    }

    /// Returns the groups of a plane, each with its own key.
    pub fn groups(&self) -> usize {
        self.plane / self.lanes
    }

    /// Returns the slots that a plane processes at a time.
    pub fn step(&self) -> usize {
        self.keys * self.groups()
    }

    /// Returns the pages of a step: one, or one for each key of a unit if pages are shorter.
    pub fn places(&self) -> usize {
        match self.page >= self.step() {
            true => 1,
            false => self.keys,
        }
    }

    /// Returns the elements of a load.
    pub fn load(&self) -> usize {
        self.vector * self.parts
    }

    /// Returns the stored units of a load: elements, or words if quantized.
    pub fn stored_vector(&self) -> usize {
        match self.quantization {
            None => self.vector,
            Some(_) => self.parts,
        }
    }

    /// Returns the loads of a key.
    pub fn vectors(&self) -> usize {
        self.width / self.load()
    }

    /// Returns the loads of a value.
    pub fn value_vectors(&self) -> usize {
        self.value_width / self.load()
    }

    /// Returns the loads of a lane among `vectors`.
    pub fn lane_vectors(&self, vectors: usize) -> usize {
        vectors.div_ceil(self.lanes)
    }

    /// Returns the scores of a group at a time: element `row · keys + key`.
    pub fn scores(&self) -> usize {
        self.rows * self.keys
    }

    /// Returns the scores of a lane after the reduction: adjacent ones, all of one row.
    pub fn lane_scores(&self) -> usize {
        (self.scores() / self.lanes).max(1)
    }

    /// Returns the scales of a lane at a time: of a key and of a value for each score.
    pub fn scales(&self) -> usize {
        match self.quantization {
            Some(_) => 2 * self.lane_scores(),
            None => 1,
        }
    }

    /// Returns the lanes that hold scores of the same row.
    pub fn row_lanes(&self) -> usize {
        self.lanes / self.rows
    }

    /// Returns the number of lanes that hold the same score: more than one if there are fewer scores than lanes.
    pub fn copies(&self) -> usize {
        (self.lanes / self.scores()).max(1)
    }

    /// Returns the first lane that holds a score.
    pub fn lane_of(&self, score: usize) -> usize {
        score / self.lane_scores() * self.copies()
    }

    /// Returns the softmax states that a cube joins in shared memory at the end.
    pub fn parts(&self) -> usize {
        match self.shuffles {
            true => self.planes,
            false => self.groups(),
        }
    }

    /// Returns the sizes for joining: parts, queries, value width, and units.
    pub fn cube_parts(&self) -> [usize; 4] {
        [self.parts(), self.rows, self.value_width, self.units()]
    }

    /// Returns the elements of shared memory for the exchange of scores.
    pub fn exchanged(&self) -> usize {
        match self.shuffles {
            true => 1,
            false => self.units() * self.scores(),
        }
    }

    /// Returns the bytes of shared memory.
    pub fn shared_bytes(&self, accumulator: ElemType) -> usize {
        let parts = self.parts() * self.rows * (self.value_width + 2);
        (self.exchanged() + parts) * accumulator.size() + self.units() * 8
    }
}
