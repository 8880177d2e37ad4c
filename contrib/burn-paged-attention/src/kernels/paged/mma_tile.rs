//! How a cube attends on tensor cores.

use cubecl::prelude::*;

use crate::kernels::paged::PagedShape;
use crate::kernels::paged::page_list::PageListShape;
use blocksparse::Quantization;
use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::call::check_ampere;
use blocksparse_cubecl::tensor::half_of;

/// Keys of a warp at a time: the rows of an mma.sync.
pub const KEYS: usize = 16;
/// Queries side by side: its columns.
pub const QUERIES: usize = 8;
/// Numbers in half precision of a key that the four lanes of a row load at a time.
pub const KEY_ELEMENTS: usize = 32;
/// Numbers in half precision of a value that the eight lanes of a row load at a time.
pub const VALUE_ELEMENTS: usize = 64;
/// Units of a warp.
const WARP: usize = 32;
/// Columns of queries of a cube, at most.
const MOST_COLUMNS: usize = 2;
/// Registers of a unit for what is loaded, kept and summed, at most.
const MOST_REGISTERS: usize = 180;
/// With no more of them a multiprocessor has three cubes at a time, otherwise two.
const FEW_REGISTERS: usize = 116;
/// Shares that a unit loads together, where a cube joins them.
pub const UNROLLED: usize = 16;
/// Rounds of loads that take as long as a launch.
const MOST_ROUNDS: usize = 8;
/// Warps of a cube: few, so that others load while one begins and ends.
const WARPS: usize = 4;

/// How a cube attends on tensor cores: warps have keys of their own, and all queries of the cube.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MmaTile {
    /// Elements of a key.
    pub width: usize,
    /// Elements of a value.
    pub value_width: usize,
    /// The type of all of them, or of what they are computed with.
    pub half: Half,
    /// How keys and values are stored in eight bits a number, if they are.
    pub quantization: Option<Quantization>,
    /// Queries of a cube in eights.
    pub columns: usize,
    /// Warps of a cube.
    pub warps: usize,
    /// Cubes that a multiprocessor has at a time.
    pub cubes: usize,
    /// Slots of a page, a power of two.
    pub page: usize,
    /// Whether scores are bounded.
    pub softcap: bool,
    /// Whether slots have positions.
    pub visibility: bool,
    /// Whether entries of the table are selected.
    pub selected: bool,
    /// Whether the cube that ends last joins the shares of a page list.
    pub fused: bool,
}

impl MmaTile {
    /// The tile of a call, or why tensor cores do not take it.
    pub fn new(properties: &DeviceProperties, shape: &PagedShape) -> Result<Self, &'static str> {
        check_ampere(properties)?;
        let half = half_of(shape.dtype)?;
        let [width, value_width] = shape.widths;
        if !width.is_multiple_of(KEY_ELEMENTS) || !value_width.is_multiple_of(VALUE_ELEMENTS) {
            return Err("the width of keys is no multiple of 32, or that of values none of 64");
        }
        // A load has twice as many numbers, and a register, too.
        let (key_elements, smaller) = match shape.quantization {
            Some(_) => (2 * KEY_ELEMENTS, 2),
            None => (KEY_ELEMENTS, 1),
        };
        if !width.is_multiple_of(key_elements) {
            return Err("the width of quantised keys is no multiple of 64");
        }
        if shape.page < KEYS && shape.visibility {
            return Err("pages whose slots have positions have fewer than 16 slots");
        }
        // Slots of short pages are numbers of 32 bits, of which one is none.
        if shape.page < KEYS && u32::try_from(shape.pages * shape.page + 1).is_err() {
            return Err("pages of fewer than 16 slots have too many slots");
        }
        let registers = |columns: usize| {
            let keys = (width / KEY_ELEMENTS * 8 + value_width / VALUE_ELEMENTS * 16) / smaller;
            let queries = width / KEY_ELEMENTS * 4 + value_width / 4;
            keys + columns * queries
        };
        let columns = (shape.group_rows().max(1))
            .div_ceil(QUERIES)
            .min(MOST_COLUMNS);
        let columns = (1..=columns)
            .rev()
            .find(|columns| registers(*columns) <= MOST_REGISTERS)
            .ok_or("keys and values are too wide")?;
        let cubes = if registers(columns) <= FEW_REGISTERS {
            3
        } else {
            2
        };
        Ok(Self {
            width,
            value_width,
            half,
            quantization: shape.quantization,
            columns,
            warps: WARPS,
            cubes,
            page: shape.page,
            softcap: shape.softcap,
            visibility: shape.visibility,
            selected: shape.selected.is_some(),
            fused: false,
        })
    }

    /// The same that joins so many shares of a page list itself, if it can and that takes less time than another launch. The units of its cube have to do all of
    /// it, and the loads of a round come back together.
    #[must_use]
    pub fn joining(mut self, shape: &PagedShape, shares: usize) -> Self {
        let rows = shape.group_rows().min(self.rows());
        let passes = (rows * self.value_width / 4).div_ceil(self.units());
        self.fused = shape.counters && passes * shares.div_ceil(UNROLLED) <= MOST_ROUNDS;
        self
    }

    /// Whether pages are shorter than what a warp has at a time, so that each key has a page of its own.
    pub fn apart(&self) -> bool {
        self.page < KEYS
    }

    /// Words that say where a step's keys are: of one page, or of each of six keys that a lane loads.
    pub fn place_words(&self) -> usize {
        if self.apart() { 6 } else { 3 }
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
        self.warps * WARP
    }

    /// Queries of a cube.
    pub fn rows(&self) -> usize {
        self.columns * QUERIES
    }

    /// Elements of a key that the four lanes of a row load at a time.
    pub fn key_elements(&self) -> usize {
        match self.quantization {
            Some(_) => 2 * KEY_ELEMENTS,
            None => KEY_ELEMENTS,
        }
    }

    /// Elements of a value that the eight lanes of a row load at a time.
    pub fn value_elements(&self) -> usize {
        match self.quantization {
            Some(_) => 32 * self.value_words(),
            None => VALUE_ELEMENTS,
        }
    }

    /// Words that a lane loads at a time of a value: 16 bytes, or 8 where quantised values are too narrow for that.
    pub fn value_words(&self) -> usize {
        match self.quantization {
            Some(_) if !self.value_width.is_multiple_of(2 * VALUE_ELEMENTS) => 2,
            _ => 4,
        }
    }

    /// Loads of a lane for a key.
    pub fn key_loads(&self) -> usize {
        self.width / self.key_elements()
    }

    /// Loads of a lane for a query.
    pub fn query_loads(&self) -> usize {
        self.width / KEY_ELEMENTS
    }

    /// Loads of a lane for a value.
    pub fn value_loads(&self) -> usize {
        self.value_width / self.value_elements()
    }

    /// Products that make up a value: sixteen numbers of it each.
    pub fn tiles(&self) -> usize {
        self.value_width / 16
    }

    /// Whether sums are relative to the largest scale of values so far: f16 has too few exponents for weights times any scale.
    pub fn scales_sums(&self) -> bool {
        self.quantization.is_some() && self.half == Half::F16
    }

    /// The softmaxes that a cube joins: how many, of queries, of values so wide, and by units.
    pub fn parts(&self) -> [usize; 4] {
        [self.warps, self.rows(), self.value_width, self.units()]
    }

    /// Bytes of shared memory.
    pub fn shared_bytes(&self) -> usize {
        self.warps * self.rows() * (self.value_width + 2) * 4 + self.units() * 8
    }
}
