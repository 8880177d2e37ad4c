//! Tile of a call, or the reason why there is none.

use std::fmt;

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::call::check_ampere;
use blocksparse_cubecl::tuning::{TierLimit, Tuning};

/// Sizes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressedShape {
    pub batch: usize,
    /// Number of query heads and of KV heads; the latter divides the former.
    pub heads: [usize; 2],
    /// Number of queries and keys; the last query is at the position of the last key.
    pub seq: [usize; 2],
    /// Number of elements of a query.
    pub width: usize,
    /// Tokens of a compressed block, tokens from the start of one to the next, and tokens of a block to select from. The first and last are multiples of the
    /// second.
    pub blocks: [usize; 3],
}

impl CompressedShape {
    /// Returns the number of complete compressed blocks.
    pub fn entries(&self) -> usize {
        let [block, stride, _] = self.blocks;
        match self.seq[1].checked_sub(block) {
            Some(behind) => behind / stride + 1,
            None => 0,
        }
    }

    /// Returns the number of blocks to select from.
    pub fn chosen_from(&self) -> usize {
        self.seq[1].div_ceil(self.blocks[2])
    }

    /// Returns `batch · kv_heads`.
    pub fn lists(&self) -> usize {
        self.batch * self.heads[1]
    }

    /// Returns the number of compressed blocks that start in a block to select from, and that cover a token.
    pub fn strides(&self) -> [usize; 2] {
        let [block, stride, selected] = self.blocks;
        [selected / stride, block / stride]
    }
}

/// Number of compressed blocks of a step.
pub const STEP: usize = 64;
/// Rows of an mma.sync: the heads of some queries.
pub const ROWS: usize = 16;
/// Maximum number of blocks that a query selects: one per lane.
pub const MOST: usize = 32;
/// Number of warps of a cube. It is small, so that a multiprocessor has several cubes that wait for keys at different times.
const WARPS: usize = 4;
/// Number of warps of a cube on wgmma: two warpgroups.
const GROUP_WARPS: usize = 8;
/// Number of elements of a span of keys that wgmma reads.
const ROW_ELEMENTS: usize = 64;
/// Largest width at which a warp holds two tiles of queries in registers.
const WIDE: usize = 192;
/// Largest supported width.
const WIDEST: usize = 256;
/// Maximum number of compressed blocks that overlap a block to select from: a unit adds them sequentially.
const OVERLAPPING: usize = 40;

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionSumTile {
    /// True for bf16, false for f16.
    pub is_bf16: bool,
    /// Number of elements of a query, a multiple of 16.
    pub width: usize,
    /// Number of rows of a query: its heads, padded to a power of two.
    pub members: usize,
    /// Number of warps of a cube.
    pub warps: usize,
    /// Number of tiles of 16 rows of a warp. With 2 a warp uses each key that it reads twice.
    pub tiles: usize,
    /// Number of compressed blocks that start in a block to select from: a power of two, at most a step's.
    pub strides: usize,
    /// Number of compressed blocks that cover a token.
    pub covered: usize,
    /// True to select blocks, false to write attention sums.
    pub chooses: bool,
    /// True for wgmma, false for mma.sync.
    pub is_wgmma: bool,
}

impl AttentionSumTile {
    fn new(
        properties: &DeviceProperties,
        dtype: ElemType,
        shape: &CompressedShape,
        limit: TierLimit,
    ) -> Result<Self, &'static str> {
        check_ampere(properties)?;
        if limit.is_simt() {
            return Err("BLOCKSPARSE_TIER says simt");
        }
        let is_bf16 = match dtype {
            ElemType::Float(FloatKind::BF16) => true,
            ElemType::Float(FloatKind::F16) => false,
            _ => return Err("the dtype is neither bf16 nor f16"),
        };
        let width = shape.width;
        if width == 0 || !width.is_multiple_of(16) || width > WIDEST {
            return Err("the width of keys is no multiple of 16 up to 256");
        }
        let members = (shape.heads[0] / shape.heads[1]).next_power_of_two();
        if members > ROWS {
            return Err("more than 16 heads share keys");
        }
        let [strides, covered] = shape.strides();
        if !strides.is_power_of_two() || strides > STEP || strides + covered > OVERLAPPING {
            return Err(
                "too many compressed blocks overlap a block, or no power of two begins in it",
            );
        }
        let is_wgmma = properties.identity.fingerprint == "ptx_sm90"
            && limit != TierLimit::Mma
            && width.is_multiple_of(ROW_ELEMENTS);
        let tile = Self {
            is_bf16,
            width,
            members,
            warps: if is_wgmma { GROUP_WARPS } else { WARPS },
            // With few heads, two tiles would have too many queries, whose sums would not fit. wgmma reads keys once for four warps anyway.
            tiles: if !is_wgmma && width <= WIDE && members >= 4 {
                2
            } else {
                1
            },
            strides,
            covered,
            chooses: false,
            is_wgmma,
        };
        match tile.shared_bytes() > properties.hardware.max_shared_memory_size {
            true => Err("a cube has too little shared memory"),
            false => Ok(tile),
        }
    }

    /// Returns the tile that selects blocks or writes attention sums.
    pub fn choosing(self, chooses: bool) -> Self {
        Self { chooses, ..self }
    }

    /// Returns the dtype of the tensors.
    pub fn half(&self) -> Half {
        match self.is_bf16 {
            true => Half::Bf16,
            false => Half::F16,
        }
    }

    /// Returns the number of units of a cube.
    pub fn units(&self) -> usize {
        32 * self.warps
    }

    /// Returns the number of queries of a warp and of a cube.
    pub fn queries(&self) -> [usize; 2] {
        let of_warp = self.tiles * ROWS / self.members;
        [of_warp, of_warp * self.warps]
    }

    /// Returns the number of blocks of a step.
    pub fn blocks(&self) -> usize {
        STEP / self.strides
    }

    /// Returns the number of 16-element slices of a row.
    pub fn depth(&self) -> usize {
        self.width / 16
    }

    /// Returns the number of compressed blocks with sums in registers at a time. On mma.sync it is half a step, which raises occupancy.
    pub fn chunk(&self) -> usize {
        match self.is_wgmma {
            true => STEP,
            false => STEP / 2,
        }
    }

    /// Returns the number of groups of eight columns of a chunk.
    pub fn eights(&self) -> usize {
        self.chunk() / 8
    }

    /// Returns the sizes of the two vectors that hold a unit's words of a row, and of the vector of its sums. The two together hold at least the words: inline
    /// PTX takes powers of two.
    pub fn vectors(&self) -> [usize; 3] {
        match (self.is_wgmma, self.width) {
            (false, _) => [4, 4, 4],
            (true, ..=64) => [8, 8, self.chunk() / 2],
            (true, ..=128) => [16, 16, self.chunk() / 2],
            (true, ..=192) => [32, 16, self.chunk() / 2],
            (true, _) => [32, 32, self.chunk() / 2],
        }
    }

    /// Returns the bytes of a span of 64 elements of a step's keys, as wgmma reads them.
    pub fn span(&self) -> usize {
        STEP * 2 * ROW_ELEMENTS
    }

    /// Returns the bytes from one key to the next in shared memory. For mma.sync this is an odd number of 16-byte pieces, so that eight adjacent keys use
    /// different banks.
    pub fn pitch(&self) -> usize {
        match self.is_wgmma {
            true => self.width * 2,
            false => self.width * 2 + 16,
        }
    }

    /// Returns the bytes of a step's keys, which are double-buffered.
    pub fn step_bytes(&self) -> usize {
        STEP * self.pitch()
    }

    /// Returns the offset of the sums over heads: for each query those of this step and the one before.
    pub fn sums_offset(&self) -> usize {
        2 * self.step_bytes()
    }

    /// Returns the bytes between the sums of two queries.
    pub fn sums_pitch(&self) -> usize {
        (2 * STEP + 4) * 4
    }

    /// Returns the bytes of a cube's shared memory.
    pub fn shared_bytes(&self) -> usize {
        self.sums_offset() + self.queries()[1] * self.sums_pitch()
    }
}

/// Plan of the attention sums of a call. It can be printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompressedPlan {
    pub(crate) shape: CompressedShape,
    pub(crate) tile: AttentionSumTile,
}

impl CompressedPlan {
    /// Returns the plan of a call.
    ///
    /// # Errors
    /// The reason why the kernel does not serve it.
    pub fn new(
        client: &Client,
        dtype: ElemType,
        shape: CompressedShape,
    ) -> Result<Self, &'static str> {
        let limit = Tuning::or_reason()?.tier;
        Self::of(client.properties(), dtype, shape, limit)
    }

    /// Returns the plan of a call on a described device.
    pub(crate) fn of(
        properties: &DeviceProperties,
        dtype: ElemType,
        shape: CompressedShape,
        limit: TierLimit,
    ) -> Result<Self, &'static str> {
        let tile = AttentionSumTile::new(properties, dtype, &shape, limit)?;
        Ok(Self { shape, tile })
    }

    /// Returns whether the kernel selects up to `most` blocks per query.
    pub fn chooses(&self, most: usize) -> bool {
        most <= MOST
    }
}

impl fmt::Display for CompressedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tile = self.tile;
        let [of_warp, of_cube] = tile.queries();
        write!(
            f,
            "{}  {} units a cube of {of_cube} queries, {of_warp} of a warp with {} rows each, {STEP} compressed blocks at a time in {} KiB shared",
            if tile.is_wgmma { "wgmma" } else { "mma" },
            tile.units(),
            tile.members,
            tile.shared_bytes().div_ceil(1024)
        )
    }
}
