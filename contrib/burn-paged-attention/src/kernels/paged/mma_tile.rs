//! Comptime shape of the kernel on tensor cores.

use cubecl::prelude::*;

use crate::kernels::paged::PagedShape;
use crate::kernels::paged::page_list::PageListShape;
use blocksparse::Quantization;
use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::call::check_ampere;
use blocksparse_cubecl::tensor::half_of;

/// Keys of a warp at a time: the rows of an mma.sync.
pub const KEYS: usize = 16;
/// Queries of a product: the columns of an mma.sync.
pub const QUERIES: usize = 8;
/// Half-precision elements of a key that the four lanes of a row load at a time.
pub const KEY_ELEMENTS: usize = 32;
/// Half-precision elements of a value that the eight lanes of a row load at a time.
pub const VALUE_ELEMENTS: usize = 64;
/// Units of a warp.
const WARP: usize = 32;
/// Most columns of queries of a cube.
const MOST_COLUMNS: usize = 2;
/// Most registers of a unit for loads, queries and accumulators.
const MOST_REGISTERS: usize = 180;
/// With at most this many, three cubes are resident on a multiprocessor, otherwise two.
const FEW_REGISTERS: usize = 116;
/// Shares that a unit loads at a time when a cube joins them.
pub const UNROLLED: usize = 16;
/// Rounds of loads that take as long as a launch.
const MOST_ROUNDS: usize = 8;
/// Warps of a cube: few, so that other cubes load while one begins or ends.
const WARPS: usize = 4;

/// Comptime shape of a cube on tensor cores: each warp has its own keys, and all queries of the cube.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MmaTile {
    /// Elements of a key.
    pub width: usize,
    /// Elements of a value.
    pub value_width: usize,
    /// Half-precision dtype of the elements, or of the products if quantized.
    pub half: Half,
    /// Element type of quantized keys and values.
    pub quantization: Option<Quantization>,
    /// Queries of a cube, in units of 8.
    pub columns: usize,
    /// Warps of a cube.
    pub warps: usize,
    /// Cubes that are resident on a multiprocessor.
    pub cubes: usize,
    /// Slots of a page, a power of two.
    pub page: usize,
    /// Whether scores have a softcap.
    pub softcap: bool,
    /// Whether slots have positions.
    pub visibility: bool,
    /// Whether table entries are selected.
    pub selected: bool,
    /// Whether the cube that ends last joins the shares of a page list.
    pub fused: bool,
}

impl MmaTile {
    /// Returns the tile of a call, or why tensor cores do not support it.
    pub fn new(properties: &DeviceProperties, shape: &PagedShape) -> Result<Self, &'static str> {
        check_ampere(properties)?;
        let half = half_of(shape.dtype)?;
        let [width, value_width] = shape.widths;
        if !width.is_multiple_of(KEY_ELEMENTS) || !value_width.is_multiple_of(VALUE_ELEMENTS) {
            return Err("the width of keys is no multiple of 32, or that of values none of 64");
        }
        // Quantized elements take half the bytes: a load has twice as many.
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
        // Slots of short pages are 32-bit indices, and one value means none.
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

    /// Enables joining of `shares` shares of a page list in the same launch, if counters are present and that takes less time than another launch.
    /// One cube does it all; the loads of a round are in flight together.
    #[must_use]
    pub fn joining(mut self, shape: &PagedShape, shares: usize) -> Self {
        let rows = shape.group_rows().min(self.rows());
        let passes = (rows * self.value_width / 4).div_ceil(self.units());
        self.fused = shape.counters && passes * shares.div_ceil(UNROLLED) <= MOST_ROUNDS;
        self
    }

    /// Returns whether pages are shorter than the keys of a warp, so that each key has its own page.
    pub fn apart(&self) -> bool {
        self.page < KEYS
    }

    /// Returns the words that locate a step's keys: one page, or the six keys that a lane loads.
    pub fn place_words(&self) -> usize {
        if self.apart() { 6 } else { 3 }
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
        self.warps * WARP
    }

    /// Returns the queries of a cube.
    pub fn rows(&self) -> usize {
        self.columns * QUERIES
    }

    /// Returns the elements of a key that the four lanes of a row load at a time.
    pub fn key_elements(&self) -> usize {
        match self.quantization {
            Some(_) => 2 * KEY_ELEMENTS,
            None => KEY_ELEMENTS,
        }
    }

    /// Returns the elements of a value that the eight lanes of a row load at a time.
    pub fn value_elements(&self) -> usize {
        match self.quantization {
            Some(_) => 32 * self.value_words(),
            None => VALUE_ELEMENTS,
        }
    }

    /// Returns the words that a lane loads of a value at a time: 16 bytes, or 8 if quantized values are too narrow.
    pub fn value_words(&self) -> usize {
        match self.quantization {
            Some(_) if !self.value_width.is_multiple_of(2 * VALUE_ELEMENTS) => 2,
            _ => 4,
        }
    }

    /// Returns the loads of a lane for a key.
    pub fn key_loads(&self) -> usize {
        self.width / self.key_elements()
    }

    /// Returns the loads of a lane for a query.
    pub fn query_loads(&self) -> usize {
        self.width / KEY_ELEMENTS
    }

    /// Returns the loads of a lane for a value.
    pub fn value_loads(&self) -> usize {
        self.value_width / self.value_elements()
    }

    /// Returns the products that make up a value, each of sixteen elements.
    pub fn tiles(&self) -> usize {
        self.value_width / 16
    }

    /// Returns whether sums are relative to the largest scale of values so far: the exponent range of f16 is too small for weights times arbitrary
    /// scales.
    pub fn scales_sums(&self) -> bool {
        self.quantization.is_some() && self.half == Half::F16
    }

    /// Returns the sizes for joining: parts, queries, value width, and units.
    pub fn parts(&self) -> [usize; 4] {
        [self.warps, self.rows(), self.value_width, self.units()]
    }

    /// Returns the bytes of shared memory.
    pub fn shared_bytes(&self) -> usize {
        self.warps * self.rows() * (self.value_width + 2) * 4 + self.units() * 8
    }
}
