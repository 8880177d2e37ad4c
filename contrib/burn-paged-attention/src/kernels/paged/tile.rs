//! How a cube attends: the comptime shape of the kernel.

use blocksparse::Quantization;
use cubecl::ir::features::Plane;
use cubecl::prelude::*;

use crate::kernels::paged::PagedShape;
use crate::kernels::paged::page_list::PageListShape;
use blocksparse_cubecl::call::HAS_PTX;
use blocksparse_cubecl::limits::most_units;

/// Units of a cube where units of a plane exchange numbers.
const CUBE_UNITS: usize = 256;
/// Units of a cube without plane operations.
const PLAIN_UNITS: usize = 32;
/// Bytes that a unit loads at a time.
const LOAD_BYTES: usize = 16;
/// Queries of a cube, at most.
const MOST_ROWS: usize = 8;
/// Elements of a query, and of its output, that a unit keeps, all queries together.
const ROW_NUMBERS: usize = 64;
/// Registers of a unit for queries, outputs, keys and values.
const REGISTERS: usize = 96;
/// Keys that a unit has at a time, at most.
const MOST_KEYS: usize = 8;

/// How a cube attends. `lanes` neighbouring units share a key and its value: each has every `lanes`-th vector of them. A plane has several such groups,
/// and each group a softmax of its own until the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Elements of a key.
    pub width: usize,
    /// Elements of a value.
    pub value_width: usize,
    /// How keys and values are stored in eight bits a number, if they are.
    pub quantization: Option<Quantization>,
    /// Numbers that are computed with side by side: of a load, or four of a word that is quantised.
    pub vector: usize,
    /// Vectors of a load: more than one only of words that are quantised.
    pub parts: usize,
    /// Units of a key: a power of two, at least `rows`.
    pub lanes: usize,
    /// Units that exchange numbers: a plane, or the cube where there are no plane operations.
    pub plane: usize,
    /// Planes of a cube.
    pub planes: usize,
    /// Whether units of a plane shuffle numbers. Otherwise they exchange them in shared memory.
    pub shuffles: bool,
    /// Whether shuffles are in PTX.
    pub ptx: bool,
    /// Queries of a cube, a power of two.
    pub rows: usize,
    /// Keys of a unit at a time, a power of two.
    pub keys: usize,
    /// Slots of a page, a power of two.
    pub page: usize,
    /// Whether scores are bounded.
    pub softcap: bool,
    /// Whether slots have positions.
    pub visibility: bool,
    /// Whether entries of the table are selected.
    pub selected: bool,
}

impl Tile {
    /// The tile of a call, or None: widths are too large.
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
        // Planes of several sizes would take steps of different loops together.
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

    /// What is known of its page lists.
    pub fn page_list_shape(&self) -> PageListShape {
        PageListShape {
            units: self.units(),
            page: self.page,
            selected: self.selected,
        }
    }

    /// Units of a cube.
    pub fn units(&self) -> usize {
        self.plane * self.planes
    }

    /// Keys that a plane has side by side.
    pub fn groups(&self) -> usize {
        self.plane / self.lanes
    }

    /// Slots of a plane at a time.
    pub fn step(&self) -> usize {
        self.keys * self.groups()
    }

    /// Pages of a step: one, or one for each key of a unit where pages are shorter.
    pub fn places(&self) -> usize {
        match self.page >= self.step() {
            true => 1,
            false => self.keys,
        }
    }

    /// Elements of a load.
    pub fn load(&self) -> usize {
        self.vector * self.parts
    }

    /// What a load has of the stored type: numbers, or words.
    pub fn stored_vector(&self) -> usize {
        match self.quantization {
            None => self.vector,
            Some(_) => self.parts,
        }
    }

    /// Loads of a key.
    pub fn vectors(&self) -> usize {
        self.width / self.load()
    }

    /// Loads of a value.
    pub fn value_vectors(&self) -> usize {
        self.value_width / self.load()
    }

    /// Loads of a lane of so many.
    pub fn lane_vectors(&self, vectors: usize) -> usize {
        vectors.div_ceil(self.lanes)
    }

    /// Scores of a group at a time: element `row · keys + key`.
    pub fn scores(&self) -> usize {
        self.rows * self.keys
    }

    /// Scores of a lane after they are dealt: neighbours, all of one row.
    pub fn lane_scores(&self) -> usize {
        (self.scores() / self.lanes).max(1)
    }

    /// Scales of a lane at a time: of a key and of a value for each score.
    pub fn scales(&self) -> usize {
        match self.quantization {
            Some(_) => 2 * self.lane_scores(),
            None => 1,
        }
    }

    /// Lanes that have scores of the same row.
    pub fn row_lanes(&self) -> usize {
        self.lanes / self.rows
    }

    /// How many lanes have the same score: more than one if there are fewer scores than lanes.
    pub fn copies(&self) -> usize {
        (self.lanes / self.scores()).max(1)
    }

    /// The lane of a score.
    pub fn lane_of(&self, score: usize) -> usize {
        score / self.lane_scores() * self.copies()
    }

    /// Softmaxes that a cube has at the end, and joins in shared memory.
    pub fn parts(&self) -> usize {
        match self.shuffles {
            true => self.planes,
            false => self.groups(),
        }
    }

    /// These as they are joined: of queries, of values so wide, and by units.
    pub fn cube_parts(&self) -> [usize; 4] {
        [self.parts(), self.rows, self.value_width, self.units()]
    }

    /// Elements of shared memory in which units exchange scores.
    pub fn exchanged(&self) -> usize {
        match self.shuffles {
            true => 1,
            false => self.units() * self.scores(),
        }
    }

    /// Bytes of shared memory.
    pub fn shared_bytes(&self, accumulator: ElemType) -> usize {
        let parts = self.parts() * self.rows * (self.value_width + 2);
        (self.exchanged() + parts) * accumulator.size() + self.units() * 8
    }
}
