//! Partition of a product into tiles.

use std::fmt;

use cubecl::client::Client;
use cubecl::ir::features::Tma;

use crate::kernels::linear::mma::{MmaTile, VARIANTS};
use crate::kernels::linear::tile::{
    Epilogue, Highest, MOST_HIGHEST, Order, ProductTile, ROWS, SLAB,
};
use crate::kernels::linear::view::MatrixView;
use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::call::{check_ampere, check_hopper};
use blocksparse_cubecl::tuning::{TierLimit, Tuning};

/// Most columns of a tile.
const MOST_COLUMNS: usize = 256;

/// Error messages of epilogues.
const NOT_HALF: &str = "only a result in half precision becomes anything else";
const NOT_ONE: &str = "heads and gradients are of one matrix";

/// Shapes, layout and epilogue of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductRequest {
    /// True if the factors are bf16, false if they are f16.
    pub bf16: bool,
    /// Number of matrices of the batch.
    pub batch: usize,
    /// Rows of the left factor.
    pub rows: usize,
    /// Columns of the right factor.
    pub cols: usize,
    /// Columns of the left factor, rows of the right one.
    pub depth: usize,
    /// Contiguous dimension of the left and of the right factor.
    pub orders: [Order; 2],
    /// True if the result is f32, false if it has the type of the factors.
    pub wide: bool,
    /// True if the depth may be split into parts, each with its own result. Requires an f32 result.
    pub parts: bool,
    /// Operation on the sums.
    pub epilogue: Epilogue,
    /// True if the left factor is laid out by heads.
    pub by_heads: bool,
}

impl ProductRequest {
    /// Returns the request for the product of two batches of matrices.
    ///
    /// # Errors
    /// The reason why the kernel cannot read them.
    pub fn of(
        bf16: bool,
        [a, b]: [&MatrixView; 2],
        wide: bool,
        parts: bool,
    ) -> Result<Self, &'static str> {
        let batch = a.shape[0].max(b.shape[0]);
        let is_shared = |of: &&MatrixView| of.shape[0] > 0 && batch.is_multiple_of(of.shape[0]);
        let runs = [a, b]
            .iter()
            .all(|of| of.outer[0] == 1 || of.shape[0] == batch);
        if a.shape[2] != b.shape[1] || ![a, b].iter().all(is_shared) || !runs {
            return Err("the factors' lengths do not fit");
        }
        Ok(Self {
            bf16,
            batch,
            rows: a.shape[1],
            cols: b.shape[2],
            depth: a.shape[2],
            orders: [a.order(2)?, b.order(1)?],
            wide,
            parts,
            epilogue: Epilogue::Plain,
            by_heads: match (a.seq, b.seq) {
                (_, Some(_)) => return Err("the right factor lies by heads"),
                (seq, None) => seq.is_some(),
            },
        })
    }

    /// Returns the request for one product in half precision, with contiguous rows in both the left factor, `[rows, depth]`, and the right one,
    /// `[depth, cols]`.
    pub fn plain(bf16: bool, [rows, cols, depth]: [usize; 3]) -> Self {
        Self {
            bf16,
            batch: 1,
            rows,
            cols,
            depth,
            orders: [Order::Depth, Order::Across],
            wide: false,
            parts: false,
            epilogue: Epilogue::Plain,
            by_heads: false,
        }
    }

    /// Sets the epilogue.
    #[must_use]
    pub fn with(mut self, epilogue: Epilogue) -> Self {
        self.epilogue = epilogue;
        self
    }

    /// # Errors
    /// The epilogue's requirement that is not met.
    fn check_epilogue(&self) -> Result<(), &'static str> {
        let whole = self.wide && !self.parts && !self.by_heads;
        let are_runs = |of: &[usize], run| of.contains(&run) && self.cols.is_multiple_of(run);
        let need = |holds: bool, why| if holds { Ok(()) } else { Err(why) };
        match self.epilogue {
            Epilogue::Plain => Ok(()),
            Epilogue::LogSums { run } => {
                need(whole, "sums of exponentials are of whole sums in f32")?;
                let is_run = are_runs(&[8, 16, 32, 64], run);
                need(is_run, "the columns are no runs of 8, 16, 32 or 64")
            }
            Epilogue::Maxima { run } => {
                need(whole, "the highest are of whole sums in f32")?;
                let is_run = are_runs(&[8, 16, 32, 64, 128], run);
                need(is_run, "the columns are no runs of 8, 16, 32, 64 or 128")
            }
            Epilogue::LineSums => {
                need(whole, "sums over columns are of whole sums in f32")?;
                let why = "sums over columns are of the rows of one tile";
                need(self.rows <= ROWS, why)
            }
            Epilogue::Highest(Highest { most, parts, step }) => {
                need(whole, "choices are by whole sums in f32")?;
                let is_choice = (1..=MOST_HIGHEST).contains(&most) && [1, 2].contains(&parts);
                let fits = is_choice && step > 0 && self.cols <= MOST_COLUMNS;
                need(fits, "a row chooses up to 8 scores of up to 256 columns")
            }
            Epilogue::Activation(_) => need(!self.wide, NOT_HALF),
            Epilogue::Gradient { .. } => {
                need(!self.wide, NOT_HALF)?;
                need(self.batch <= 1, NOT_ONE)
            }
            Epilogue::Heads { dim } => {
                need(!self.wide, NOT_HALF)?;
                need(self.batch <= 1, NOT_ONE)?;
                let is_whole = dim.is_multiple_of(8) && dim > 0;
                need(is_whole, "a head's columns are not a multiple of 8")
            }
        }
    }

    fn half(&self) -> Half {
        if self.bf16 { Half::Bf16 } else { Half::F16 }
    }
}

/// Checks that this module multiplies anything on a device.
///
/// # Errors
/// The reason why it does not.
pub fn available(client: &Client) -> Result<(), &'static str> {
    hopper(client).map(|_| ())
}

/// Returns the multiprocessors and the bytes of shared memory of a device with wgmma.
///
/// # Errors
/// If the device has no wgmma or no TMA, or the environment selects another tier.
pub(crate) fn hopper(client: &Client) -> Result<(usize, usize), &'static str> {
    let properties = client.properties();
    check_hopper(properties)?;
    if !properties.features.tma.contains(Tma::Base) {
        return Err("the device has no TMA");
    }
    match Tuning::or_reason()?.tier {
        limit if limit.is_simt() => Err("BLOCKSPARSE_TIER says simt"),
        TierLimit::Mma => Err("BLOCKSPARSE_TIER says mma"),
        _ => Ok(room(client, 132)),
    }
}

/// Returns the same for a device with half-precision mma.sync, ldmatrix and cp.async.
///
/// # Errors
/// If the device lacks them, or the environment selects another tier.
pub(crate) fn ampere(client: &Client) -> Result<(usize, usize), &'static str> {
    check_ampere(client.properties())?;
    match Tuning::or_reason()?.tier.is_simt() {
        true => Err("BLOCKSPARSE_TIER says simt"),
        false => Ok(room(client, 64)),
    }
}

/// Returns the multiprocessors, or the given default if the device does not report them, and the bytes of shared memory.
fn room(client: &Client, multiprocessors: u32) -> (usize, usize) {
    let hardware = &client.properties().hardware;
    let multiprocessors = hardware
        .num_streaming_multiprocessors
        .unwrap_or(multiprocessors);
    (multiprocessors as usize, hardware.max_shared_memory_size)
}

/// Tile of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TierTile {
    /// wgmma and TMA, on compute capability 9.0.
    Wgmma(ProductTile),
    /// mma.sync and cp.async, from compute capability 8.0 on.
    Mma(MmaTile),
}

impl TierTile {
    pub(crate) fn cols(&self) -> usize {
        match self {
            Self::Wgmma(tile) => tile.cols,
            Self::Mma(tile) => tile.cols,
        }
    }
}

impl fmt::Display for TierTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wgmma(tile) => write!(f, "wgmma, {tile}"),
            Self::Mma(tile) => write!(f, "mma, {tile}"),
        }
    }
}

/// Tile with its cost by a model of the device.
struct Costed {
    tile: TierTile,
    /// Cubes that share a multiprocessor.
    cubes: usize,
    /// Cycles of a slab.
    slab: usize,
    /// Cycles of a tile's prologue and epilogue.
    tile_cycles: usize,
}

/// Plan of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductPlan {
    pub(crate) request: ProductRequest,
    pub(crate) tile: TierTile,
    pub(crate) parts: usize,
    pub(crate) part_slabs: usize,
    pub(crate) cubes: usize,
}

/// Columns of a tile, and the cycles in which the tensor cores multiply a slab by them for both warpgroups. Narrow tiles are bound by reads of shared memory.
const SLAB_CYCLES: [(usize, usize); 3] = [(256, 1024), (128, 600), (64, 380)];
/// Cycles of a tile's prologue and epilogue that nothing overlaps, and of writing 64 of its columns.
const TILE_CYCLES: usize = 500;
const WRITE_CYCLES: usize = 250;
/// Bandwidth of the device's memory, in bytes per cycle.
const MEMORY_BYTES: usize = 2200;
/// Least slabs of a part, and most parts.
const LEAST_SLABS: usize = 8;
const MOST_PARTS: usize = 128;

impl ProductPlan {
    /// Returns the fastest plan by a model of the device.
    ///
    /// # Errors
    /// The reason why the kernel does not support the product.
    pub fn new(client: &Client, request: ProductRequest) -> Result<Self, &'static str> {
        Ok(Self::all(client, request)?[0])
    }

    /// Returns all plans, the fastest by the model first.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn all(client: &Client, request: ProductRequest) -> Result<Vec<Self>, &'static str> {
        match hopper(client) {
            Ok((multiprocessors, shared)) => Self::on_wgmma(request, multiprocessors, shared),
            Err(_) => {
                let (multiprocessors, shared) = ampere(client)?;
                Self::on_mma(request, multiprocessors, shared)
            }
        }
    }

    fn on_wgmma(
        request: ProductRequest,
        multiprocessors: usize,
        shared: usize,
    ) -> Result<Vec<Self>, &'static str> {
        let ProductRequest { wide, epilogue, .. } = request;
        // Registers suffice for what a gradient reads, and for line sums, only next to the sums of half a tile.
        let is_half = matches!(epilogue, Epilogue::Gradient { .. } | Epilogue::LineSums);
        let shapes = SLAB_CYCLES.into_iter().filter_map(|(cols, slab)| {
            // A top-k choice needs all columns in one tile, and a run lies within a tile.
            let is_whole = match epilogue {
                Epilogue::Highest(_) => request.cols <= cols,
                Epilogue::Maxima { run } => run <= cols,
                _ => true,
            };
            let tile = (is_whole && (!is_half || cols < MOST_COLUMNS)).then(|| ProductTile {
                by_heads: request.by_heads,
                epilogue,
                ..ProductTile::new(request.half(), cols, request.orders, wide)
            })?;
            let width = if wide { 2 } else { 1 };
            Some(Costed {
                tile: TierTile::Wgmma(tile.with_slabs(shared)?),
                cubes: 1,
                slab,
                tile_cycles: TILE_CYCLES + WRITE_CYCLES * width * cols / 64,
            })
        });
        Self::of(request, multiprocessors, shapes)
    }

    fn on_mma(
        request: ProductRequest,
        multiprocessors: usize,
        shared: usize,
    ) -> Result<Vec<Self>, &'static str> {
        if request.epilogue != Epilogue::Plain {
            return Err("on mma.sync sums are the result, and become nothing else");
        }
        if request.by_heads {
            return Err("on mma.sync a factor does not lie by heads");
        }
        let wide = request.wide;
        let whole = request.depth.is_multiple_of(8)
            && (request.orders[0] == Order::Depth || request.rows.is_multiple_of(8));
        let shapes = VARIANTS.into_iter().filter_map(|variant| {
            let tile = MmaTile {
                whole,
                ..MmaTile::new(request.half(), variant, request.orders, wide, shared)?
            };
            let width = if wide { 2 } else { 1 };
            Some(Costed {
                tile: TierTile::Mma(tile),
                cubes: variant.cubes,
                slab: variant.cycles,
                // While one cube writes, the other multiplies.
                tile_cycles: (TILE_CYCLES + WRITE_CYCLES * width * variant.cols / 64)
                    / variant.cubes,
            })
        });
        Self::of(request, multiprocessors, shapes)
    }

    /// Returns the plans for the tiles of a tier.
    fn of(
        request: ProductRequest,
        multiprocessors: usize,
        shapes: impl Iterator<Item = Costed>,
    ) -> Result<Vec<Self>, &'static str> {
        let (batch, rows, cols) = (request.batch, request.rows, request.cols);
        let (depth, wide) = (request.depth, request.wide);
        request.check_epilogue()?;
        if [batch, rows, cols, depth].contains(&0) {
            return Err("a factor is empty");
        }
        if !cols.is_multiple_of(8) {
            return Err("the columns are not a multiple of 8");
        }
        let written = match request.epilogue {
            Epilogue::Maxima { run } => cols / run,
            _ => cols,
        };
        if [batch, rows, cols, depth]
            .iter()
            .any(|length| i32::try_from(*length).is_err())
            || (batch * rows)
                .checked_mul(written)
                .is_none_or(|all| u32::try_from(all / 2).is_err())
        {
            return Err(
                "a length or the result has more numbers than the kernel counts in 32 bits",
            );
        }
        let slabs = depth.div_ceil(SLAB);
        let most_parts = match request.parts && wide {
            true => (slabs / LEAST_SLABS).clamp(1, MOST_PARTS),
            false => 1,
        };
        let plans = shapes.flat_map(|shape| {
            (1..=most_parts).map(move |parts| {
                let part_slabs = slabs.div_ceil(parts);
                let parts = slabs.div_ceil(part_slabs);
                let tile_cols = shape.tile.cols();
                let tiles = batch * parts * rows.div_ceil(ROWS) * cols.div_ceil(tile_cols);
                let of_tile = part_slabs * shape.slab + shape.tile_cycles;
                // Parts are written, read, and written once more when they are added.
                let sums = match parts {
                    1 => 0,
                    _ => batch * rows * cols * 4 * (2 * parts + 1) / MEMORY_BYTES,
                };
                let most_cubes = multiprocessors * shape.cubes;
                let plan = Self {
                    request,
                    tile: shape.tile,
                    parts,
                    part_slabs,
                    cubes: tiles.min(most_cubes),
                };
                (tiles.div_ceil(most_cubes) * of_tile + sums, plan)
            })
        });
        let mut plans: Vec<_> = plans.collect();
        plans.sort_by_key(|(cycles, _)| *cycles);
        // Different numbers of parts can round to the same plan.
        plans.dedup_by_key(|(_, plan)| *plan);
        match plans.is_empty() {
            true => Err("no tile fits the shared memory"),
            false => Ok(plans.into_iter().map(|(_, plan)| plan).collect()),
        }
    }

    /// Returns the number of parts of the depth: the result is `[batch, parts, rows, columns]`, to be added.
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// Returns the number of rows of the sums over 64 rows each, for gradients with sums.
    pub fn total_rows(&self) -> usize {
        2 * self.request.rows.div_ceil(ROWS)
    }

    /// Returns the columns of a tile.
    pub fn tile_cols(&self) -> usize {
        self.tile.cols()
    }

    pub(crate) fn slabs(&self) -> usize {
        self.request.depth.div_ceil(SLAB)
    }
}

impl fmt::Display for ProductPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} cubes", self.tile, self.cubes)?;
        match self.parts {
            1 => Ok(()),
            parts => write!(f, ", the depth in {parts} parts"),
        }
    }
}

#[cfg(test)]
mod tests;
