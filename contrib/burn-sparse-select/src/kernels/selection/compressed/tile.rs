//! What a call gets, or why not.

use std::fmt;

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::call::check_ampere;
use blocksparse_cubecl::tuning::{TierLimit, Tuning};

/// Sizes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressedShape {
    /// Batch entries.
    pub batch: usize,
    /// Heads of queries and of keys; these divide those.
    pub heads: [usize; 2],
    /// Queries and keys; the last query sits at the last key.
    pub seq: [usize; 2],
    /// Elements of a query.
    pub width: usize,
    /// Tokens of a compressed block, from the beginning of one to the next, and of a block that is chosen: multiples of the second.
    pub blocks: [usize; 3],
}

impl CompressedShape {
    /// Compressed blocks: those that are whole.
    pub fn entries(&self) -> usize {
        let [block, stride, _] = self.blocks;
        match self.seq[1].checked_sub(block) {
            Some(behind) => behind / stride + 1,
            None => 0,
        }
    }

    /// Blocks to choose from.
    pub fn chosen_from(&self) -> usize {
        self.seq[1].div_ceil(self.blocks[2])
    }

    /// Batch entries times heads of keys.
    pub fn lists(&self) -> usize {
        self.batch * self.heads[1]
    }

    /// Compressed blocks that begin in a block that is chosen, and those that cover a token.
    pub fn strides(&self) -> [usize; 2] {
        let [block, stride, selected] = self.blocks;
        [selected / stride, block / stride]
    }
}

/// Compressed blocks of a step.
pub const STEP: usize = 64;
/// Rows of an mma.sync: the heads of some queries.
pub const ROWS: usize = 16;
/// Blocks that a query chooses, at most: as many as a warp has units.
pub const MOST: usize = 32;
/// Warps of a cube: few, so that a multiprocessor has cubes that wait for each other's keys at other times.
const WARPS: usize = 4;
/// Warps of a cube on wgmma: two groups of four.
const GROUP_WARPS: usize = 8;
/// Numbers of a span of keys that wgmma reads.
const ROW_ELEMENTS: usize = 64;
/// Widest queries of which a warp holds two tiles in registers.
const WIDE: usize = 192;
/// Widest of all.
const WIDEST: usize = 256;
/// Compressed blocks that overlap one that is chosen, at most: a unit adds them up one after the other.
const OVERLAPPING: usize = 40;

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionSumTile {
    /// Whether tensors are bf16, and not f16.
    pub is_bf16: bool,
    /// Elements of a query, a multiple of 16.
    pub width: usize,
    /// Rows of a query: its heads, and what fills them up to a power of two.
    pub members: usize,
    /// Warps of a cube.
    pub warps: usize,
    /// Times 16 rows of a warp. With 2 what a warp reads of keys is used twice.
    pub tiles: usize,
    /// Compressed blocks that begin in one that is chosen: a power of two, no more than a step has.
    pub strides: usize,
    /// Those that cover a token.
    pub covered: usize,
    /// Whether blocks are chosen, and attention sums not written.
    pub chooses: bool,
    /// Whether products are wgmma's, and not mma.sync's.
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
            // Of many queries there would be too much beside sums. wgmma reads keys once for four warps.
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

    /// The same, with blocks chosen or attention sums written.
    pub fn choosing(self, chooses: bool) -> Self {
        Self { chooses, ..self }
    }

    /// The type of tensors.
    pub fn half(&self) -> Half {
        match self.is_bf16 {
            true => Half::Bf16,
            false => Half::F16,
        }
    }

    /// Units of a cube.
    pub fn units(&self) -> usize {
        32 * self.warps
    }

    /// Queries of a warp, and of a cube.
    pub fn queries(&self) -> [usize; 2] {
        let of_warp = self.tiles * ROWS / self.members;
        [of_warp, of_warp * self.warps]
    }

    /// Blocks of a step.
    pub fn blocks(&self) -> usize {
        STEP / self.strides
    }

    /// Products deep.
    pub fn depth(&self) -> usize {
        self.width / 16
    }

    /// Compressed blocks that have sums in registers at a time: on mma.sync half a step, so that a multiprocessor has more warps.
    pub fn chunk(&self) -> usize {
        match self.is_wgmma {
            true => STEP,
            false => STEP / 2,
        }
    }

    /// Eights of them.
    pub fn eights(&self) -> usize {
        self.chunk() / 8
    }

    /// Vectors of the words of a row that a unit has, together no fewer: an asm takes powers of two. And of its sums.
    pub fn vectors(&self) -> [usize; 3] {
        match (self.is_wgmma, self.width) {
            (false, _) => [4, 4, 4],
            (true, ..=64) => [8, 8, self.chunk() / 2],
            (true, ..=128) => [16, 16, self.chunk() / 2],
            (true, ..=192) => [32, 16, self.chunk() / 2],
            (true, _) => [32, 32, self.chunk() / 2],
        }
    }

    /// Bytes of a span of 64 numbers of a step's keys, as wgmma reads them.
    pub fn span(&self) -> usize {
        STEP * 2 * ROW_ELEMENTS
    }

    /// Bytes between two keys in shared memory: for mma.sync an odd number of 16-byte pieces, so that eight neighbours lie in different banks.
    pub fn pitch(&self) -> usize {
        match self.is_wgmma {
            true => self.width * 2,
            false => self.width * 2 + 16,
        }
    }

    /// Bytes of the keys of a step, of which there are two.
    pub fn step_bytes(&self) -> usize {
        STEP * self.pitch()
    }

    /// Where the sums over heads begin: of each query those of this step and of the one before.
    pub fn sums_offset(&self) -> usize {
        2 * self.step_bytes()
    }

    /// Bytes between the sums of two queries.
    pub fn sums_pitch(&self) -> usize {
        (2 * STEP + 4) * 4
    }

    /// Bytes of shared memory of a cube.
    pub fn shared_bytes(&self) -> usize {
        self.sums_offset() + self.queries()[1] * self.sums_pitch()
    }
}

/// How the kernel makes the attention sums of a call. It prints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompressedPlan {
    pub(crate) shape: CompressedShape,
    pub(crate) tile: AttentionSumTile,
}

impl CompressedPlan {
    /// The plan of a call of tensors of a type.
    ///
    /// # Errors
    /// Why the kernel does not take it.
    pub fn new(
        client: &Client,
        dtype: ElemType,
        shape: CompressedShape,
    ) -> Result<Self, &'static str> {
        let limit = Tuning::or_reason()?.tier;
        Self::of(client.properties(), dtype, shape, limit)
    }

    /// The plan of a call on a device that is described.
    pub(crate) fn of(
        properties: &DeviceProperties,
        dtype: ElemType,
        shape: CompressedShape,
        limit: TierLimit,
    ) -> Result<Self, &'static str> {
        let tile = AttentionSumTile::new(properties, dtype, &shape, limit)?;
        Ok(Self { shape, tile })
    }

    /// Whether it chooses so many blocks of a query.
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
