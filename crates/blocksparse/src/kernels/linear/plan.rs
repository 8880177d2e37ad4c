//! How a product is cut into tiles.

use std::fmt;

use cubecl::client::Client;
use cubecl::ir::features::Tma;

use super::tile::{Epilogue, Order, ProductTile, ROWS, SLAB};
use super::view::MatrixView;
use crate::kernels::call::TierLimit;
use crate::kernels::shared::asm::Half;

/// What a product is, without its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductRequest {
    /// Whether the factors are bf16 and not f16.
    pub bf16: bool,
    /// Matrices of the batch.
    pub batch: usize,
    /// Rows of the left factor.
    pub rows: usize,
    /// Columns of the right factor.
    pub cols: usize,
    /// Columns of the left factor, rows of the right one.
    pub depth: usize,
    /// What is contiguous in the left and in the right factor.
    pub orders: [Order; 2],
    /// Whether the result is f32, and not of the type of the factors.
    pub wide: bool,
    /// Whether the depth may be taken in parts, each with a result of its own. Only with an f32 result.
    pub parts: bool,
    /// What becomes of the sums.
    pub epilogue: Epilogue,
    /// Whether the left factor lies by heads.
    pub by_heads: bool,
}

impl ProductRequest {
    /// The product of two batches of matrices.
    ///
    /// # Errors
    /// Why the kernel cannot read them.
    pub fn of(
        bf16: bool,
        [a, b]: [&MatrixView; 2],
        wide: bool,
        parts: bool,
    ) -> Result<Self, &'static str> {
        let batch = a.shape[0].max(b.shape[0]);
        if a.shape[2] != b.shape[1] || !([a, b].iter().all(|of| [1, batch].contains(&of.shape[0])))
        {
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

    /// With something that becomes of the sums.
    #[must_use]
    pub fn with(mut self, epilogue: Epilogue) -> Self {
        self.epilogue = epilogue;
        self
    }

    /// # Errors
    /// What the epilogue does not take.
    fn check_epilogue(&self) -> Result<(), &'static str> {
        match self.epilogue {
            Epilogue::Plain => Ok(()),
            _ if self.wide => Err("only a result in half precision becomes anything else"),
            Epilogue::Heads { .. } | Epilogue::Gradient { .. } if self.batch > 1 => {
                Err("heads and gradients are of one matrix")
            }
            Epilogue::Heads { dim } if !dim.is_multiple_of(8) || dim == 0 => {
                Err("a head's columns are not a multiple of 8")
            }
            _ => Ok(()),
        }
    }
}

/// Whether a device multiplies anything here.
///
/// # Errors
/// Why it does not.
pub fn available(client: &Client) -> Result<(), &'static str> {
    hopper(client).map(|_| ())
}

/// Multiprocessors and bytes of shared memory of a device that has wgmma.
///
/// # Errors
/// If it is another one, or if the environment wants another tier.
pub(super) fn hopper(client: &Client) -> Result<(usize, usize), &'static str> {
    let properties = client.properties();
    let hardware = &properties.hardware;
    if properties.identity.fingerprint != "ptx_sm90" || !properties.features.tma.contains(Tma::Base)
    {
        return Err("the device is not of compute capability 9.0");
    }
    let multiprocessors = hardware.num_streaming_multiprocessors.unwrap_or(132) as usize;
    match TierLimit::from_env() {
        Ok(TierLimit::Simt) => return Err("BLOCKSPARSE_TIER says simt"),
        Ok(TierLimit::Mma) => return Err("BLOCKSPARSE_TIER says mma"),
        _ => {}
    }
    Ok((multiprocessors, hardware.max_shared_memory_size))
}

/// What a product will run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductPlan {
    pub(super) request: ProductRequest,
    pub(super) tile: ProductTile,
    pub(super) parts: usize,
    pub(super) part_slabs: usize,
    pub(super) cubes: usize,
}

/// Cycles in which tensor cores multiply a slab by so many columns, for both warpgroups: narrow tiles are bound by what is read from shared memory.
const SLAB_CYCLES: [(usize, usize); 3] = [(256, 1024), (128, 600), (64, 380)];
/// Cycles of a tile's beginning and end that nothing else fills, and of writing 64 columns of it.
const TILE_CYCLES: usize = 500;
const WRITE_CYCLES: usize = 250;
/// Bytes a cycle of the device's memory.
const MEMORY_BYTES: usize = 2200;
/// The fewest slabs of a part, and the most parts.
const LEAST_SLABS: usize = 8;
const MOST_PARTS: usize = 128;

impl ProductPlan {
    /// The fastest plan by a model of the device.
    ///
    /// # Errors
    /// Why the kernel does not run the product.
    pub fn new(client: &Client, request: ProductRequest) -> Result<Self, &'static str> {
        Ok(Self::all(client, request)?[0])
    }

    /// All plans, the fastest by the model first.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn all(client: &Client, request: ProductRequest) -> Result<Vec<Self>, &'static str> {
        let (multiprocessors, shared) = hopper(client)?;
        Self::on(request, multiprocessors, shared)
    }

    fn on(
        request: ProductRequest,
        multiprocessors: usize,
        shared: usize,
    ) -> Result<Vec<Self>, &'static str> {
        let ProductRequest {
            batch,
            rows,
            cols,
            depth,
            wide,
            epilogue,
            ..
        } = request;
        request.check_epilogue()?;
        if [batch, rows, cols, depth].contains(&0) {
            return Err("a factor is empty");
        }
        if !cols.is_multiple_of(8) {
            return Err("the columns are not a multiple of 8");
        }
        if [batch, rows, cols, depth]
            .iter()
            .any(|length| i32::try_from(*length).is_err())
            || (batch * rows)
                .checked_mul(cols)
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
        let plans = SLAB_CYCLES.into_iter().flat_map(|(tile_cols, cycles)| {
            // Registers have room for what a gradient reads beside the sums of half a tile.
            let is_read = matches!(epilogue, Epilogue::Gradient { .. });
            let tile = (!is_read || tile_cols < 256)
                .then(|| {
                    let half = if request.bf16 { Half::Bf16 } else { Half::F16 };
                    ProductTile {
                        by_heads: request.by_heads,
                        epilogue,
                        ..ProductTile::new(half, tile_cols, request.orders, wide)
                    }
                    .with_slabs(shared)
                })
                .flatten();
            tile.into_iter().flat_map(move |tile| {
                (1..=most_parts).map(move |parts| {
                    let part_slabs = slabs.div_ceil(parts);
                    let parts = slabs.div_ceil(part_slabs);
                    let tiles = batch * parts * rows.div_ceil(ROWS) * cols.div_ceil(tile_cols);
                    let width = if wide { 2 } else { 1 };
                    let of_tile =
                        part_slabs * cycles + TILE_CYCLES + WRITE_CYCLES * width * tile_cols / 64;
                    // Parts are written, read, and written once more when they are added up.
                    let sums = match parts {
                        1 => 0,
                        _ => batch * rows * cols * 4 * (2 * parts + 1) / MEMORY_BYTES,
                    };
                    let plan = Self {
                        request,
                        tile,
                        parts,
                        part_slabs,
                        cubes: tiles.min(multiprocessors),
                    };
                    (tiles.div_ceil(multiprocessors) * of_tile + sums, plan)
                })
            })
        });
        let mut plans: Vec<_> = plans.collect();
        plans.sort_by_key(|(cycles, _)| *cycles);
        // Numbers of parts that come to the same number of slabs are one plan.
        plans.dedup_by_key(|(_, plan)| *plan);
        match plans.is_empty() {
            true => Err("no tile fits the shared memory"),
            false => Ok(plans.into_iter().map(|(_, plan)| plan).collect()),
        }
    }

    /// The same with the second warpgroup so many cycles later: for measurements.
    #[must_use]
    pub fn with_stagger(mut self, cycles: u32) -> Self {
        self.tile.stagger = cycles;
        self
    }

    /// Parts of the depth: the result is `[batch, parts, rows, columns]`, to be added up.
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// Rows of the sums over 64 rows each, where those are wanted.
    pub fn total_rows(&self) -> usize {
        2 * self.request.rows.div_ceil(ROWS)
    }

    pub(super) fn slabs(&self) -> usize {
        self.request.depth.div_ceil(SLAB)
    }
}

impl fmt::Display for ProductPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "wgmma, {}, {} cubes", self.tile, self.cubes)?;
        match self.parts {
            1 => Ok(()),
            parts => write!(f, ", the depth in {parts} parts"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An H200's.
    const MULTIPROCESSORS: usize = 132;
    const SHARED: usize = 232_448;

    fn request([rows, cols, depth]: [usize; 3], parts: bool) -> ProductRequest {
        ProductRequest {
            bf16: true,
            batch: 1,
            rows,
            cols,
            depth,
            orders: [Order::Depth, Order::Across],
            wide: parts,
            parts,
            epilogue: Epilogue::Plain,
            by_heads: false,
        }
    }

    fn best(request: ProductRequest) -> ProductPlan {
        ProductPlan::on(request, MULTIPROCESSORS, SHARED).unwrap()[0]
    }

    #[test]
    fn products_of_layers_are_planned_as_they_were_measured() {
        for (lengths, parts, expected) in [
            (
                [49_152, 1536, 512],
                false,
                "tiles of 128 × 256, 4 slabs of 64, 132 cubes",
            ),
            (
                [49_152, 512, 512],
                false,
                "tiles of 128 × 256, 4 slabs of 64, 132 cubes",
            ),
            (
                [8192, 8192, 8192],
                false,
                "tiles of 128 × 256, 4 slabs of 64, 132 cubes",
            ),
            (
                [512, 2048, 49_152],
                true,
                "tiles of 128 × 256, 4 slabs of 64, 128 cubes, the depth in 4 parts",
            ),
            (
                [512, 512, 49_152],
                true,
                "tiles of 128 × 128, 7 slabs of 64, 128 cubes, the depth in 8 parts",
            ),
            (
                [1, 8, 8],
                false,
                "tiles of 128 × 64, 8 slabs of 64, 1 cubes",
            ),
        ] {
            let plan = best(request(lengths, parts));
            assert_eq!(
                plan.to_string(),
                format!("wgmma, {expected}"),
                "{lengths:?}"
            );
        }
    }

    /// Every slab of the depth is in one part, no part is empty, and a cube has at least a tile.
    #[test]
    fn parts_cover_the_depth() {
        for depth in [1, 8, 64, 65, 511, 512, 4097, 12_288, 49_152, 100_000] {
            for lengths in [[8, 8, depth], [512, 1536, depth], [2048, 512, depth]] {
                for plan in ProductPlan::on(request(lengths, true), 132, SHARED).unwrap() {
                    let slabs = depth.div_ceil(SLAB);
                    assert!((plan.parts - 1) * plan.part_slabs < slabs, "{plan}");
                    assert!(plan.parts * plan.part_slabs >= slabs, "{plan}");
                    assert!(plan.tile.shared_bytes() <= SHARED, "{plan}");
                    let [rows, cols, _] = lengths;
                    let tiles = rows.div_ceil(ROWS) * cols.div_ceil(plan.tile.cols) * plan.parts;
                    assert!(plan.cubes > 0 && plan.cubes <= tiles.min(132), "{plan}");
                }
            }
        }
    }

    #[test]
    fn what_the_kernel_does_not_take_is_said() {
        let refused = |request| ProductPlan::on(request, MULTIPROCESSORS, SHARED).unwrap_err();
        assert_eq!(
            refused(request([64, 12, 64], false)),
            "the columns are not a multiple of 8"
        );
        assert_eq!(refused(request([64, 16, 0], false)), "a factor is empty");
        assert_eq!(
            refused(request([1 << 20, 1 << 16, 64], false)),
            "a length or the result has more numbers than the kernel counts in 32 bits"
        );
        assert_eq!(
            ProductPlan::on(request([64, 16, 64], false), 132, 16 << 10).unwrap_err(),
            "no tile fits the shared memory"
        );
        // Without parts there are none, however deep the product is.
        assert_eq!(best(request([64, 64, 1 << 20], false)).parts(), 1);
    }
}
