//! Attention within clusters of rows, which kernels gather themselves: on wgmma, for GPUs of compute capability 9.0.
//!
//! Queries are keys, as the Routing Transformer has them (Roy et al., 2021): a key is the query at its place made as long as 1. So a cube loads the rows of a
//! cluster once, multiplies them by themselves, and keys are numbers of columns: one over the length of each.
//!
//! ```text
//! tile     the shape of a launch, and where its parts lie in shared memory
//! attend   attention, by place
//! mean     the mean of what clusters have of a token
//! ```

mod attend;
mod mean;
mod tile;

use std::fmt;

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use self::mean::MeanTile;
use self::tile::ClusterTile;
use crate::kernels::rows::highest::{holds_rows, words_of_flags};
use blocksparse_cubecl::args::{buffer, spread};
use blocksparse_cubecl::call::check_hopper;
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::tensor::{check_scale, half_of, scales};
use blocksparse_cubecl::tuning::{TierLimit, Tuning};

/// Clusters of each list of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClusterSizes {
    /// Batch entries times heads.
    pub lists: usize,
    /// Rows of a list.
    pub length: usize,
    /// Clusters of a list.
    pub clusters: usize,
    /// Rows of a cluster.
    pub width: usize,
    /// Numbers of a row of queries, and of values.
    pub dims: [usize; 2],
}

impl ClusterSizes {
    /// Of lists of so many rows, with so many clusters of so many rows each.
    pub fn new(
        [lists, length]: [usize; 2],
        [clusters, width]: [usize; 2],
        dims: [usize; 2],
    ) -> Self {
        Self {
            lists,
            length,
            clusters,
            width,
            dims,
        }
    }

    /// Rows of all clusters.
    fn places(&self) -> usize {
        self.lists * self.clusters * self.width
    }
}

/// Attention within clusters on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterPlan {
    sizes: ClusterSizes,
    tile: ClusterTile,
}

impl ClusterPlan {
    /// For rows of a type. `None` if no kernel takes them, or the device has none. `BLOCKSPARSE_TIER=mma`, and what leaves out more, leaves it out.
    pub fn new(client: &Client, sizes: ClusterSizes, element: ElemType) -> Option<Self> {
        let properties = client.properties();
        let limit = Tuning::or_default().tier;
        if limit.is_simt() || limit == TierLimit::Mma || check_hopper(properties).is_err() {
            return None;
        }
        let tile = ClusterTile::new(&sizes, half_of(element).ok()?)?;
        // Of as many rows one cube says which are a cluster's.
        let fits = holds_rows(client, sizes.length)
            && tile.shared_bytes() <= properties.hardware.max_shared_memory_size;
        fits.then_some(Self { sizes, tile })
    }

    /// Causal attention within clusters: `tokens` i32 `[lists, clusters, width]` are their rows, ascending; a row sees the earlier ones of its cluster, the
    /// first itself. `x` `[lists, length, dims[0]]` and `value` `[lists, length, dims[1]]` are contiguous, `out` is `[lists, clusters · width, dims[1]]` of their
    /// type, and `lse` f32 without the last dimension.
    ///
    /// ```text
    /// score(i, j) = scale · x[i] · x[j] / √max(|x[j]|², 10⁻²⁴)
    /// ```
    ///
    /// # Errors
    /// [`KernelError`] if there are more clusters than a launch has cubes, or more rows than 32 bits count, or the scale is not positive. Then nothing was
    /// launched.
    pub fn attend(
        &self,
        client: &Client,
        [x, value, tokens]: [&Handle; 3],
        [out, lse]: [&Handle; 2],
        scale: f64,
    ) -> Result<(), KernelError> {
        let Self { sizes: of, tile } = *self;
        check_scale(scale, None)?;
        let [head_dim, value_dim] = of.dims;
        let (places, rows) = (of.places(), of.lists * of.length);
        KernelError::check_u32("rows of clusters", places)?;
        KernelError::check_u32("rows", rows)?;
        let cubes = of.lists * of.clusters;
        let count = spread(client, cubes as u64)?;
        let (log2_scale, _) = scales(scale, None);
        // SAFETY: a unit copies pieces of rows that there are, whatever tokens say, and writes its own rows of its cube's cluster. The buffers have the lengths
        // they say (see `buffer`).
        unsafe {
            attend::attend::launch_unchecked(
                client,
                count,
                CubeDim::new_1d(tile.units() as u32),
                tile::STEP / 2,
                tile::STEP / 4,
                tile.sums(),
                buffer(x, rows * head_dim / 2),
                buffer(value, rows * value_dim / 2),
                buffer(tokens, places),
                buffer(out, places * value_dim / 8),
                buffer(lse, places),
                cubes as u32,
                of.clusters as u32,
                of.length as u32,
                log2_scale as f32,
                tile,
            );
        }
        Ok(())
    }

    /// The mean of what [`Self::attend`] gave a token in its clusters, 0 where it is in none: of `rows`, its `out`, by the `flags` that
    /// [`highest_flags_of_rows`](crate::kernels::rows::highest::highest_flags_of_rows) wrote with its `tokens`. `out` is `[lists, length, dims[1]]`.
    ///
    /// # Errors
    /// [`KernelError`] if there are more tokens than a launch has cubes for.
    pub fn mean(
        &self,
        client: &Client,
        [rows, flags]: [&Handle; 2],
        out: &Handle,
    ) -> Result<(), KernelError> {
        let of = self.sizes;
        let [_, dim] = of.dims;
        let words = words_of_flags(of.length);
        let count = of.lists * words;
        let cubes = spread(client, count as u64)?;
        let half = self.tile.half;
        // SAFETY: a unit reads rows of its list's clusters, whose flags have no more bits than those have rows, and writes its own part of a token below the
        // length. The buffers have the lengths they say (see `buffer`).
        unsafe {
            mean::mean::launch_unchecked(
                client,
                cubes,
                CubeDim::new_1d(mean::UNITS as u32),
                buffer(rows, of.places() * dim / 8),
                buffer(flags, of.lists * of.clusters * words),
                buffer(out, of.lists * of.length * dim / 8),
                count,
                words,
                of.clusters,
                of.length,
                of.width,
                MeanTile { half, dim },
            );
        }
        Ok(())
    }
}

impl fmt::Display for ClusterPlan {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let ClusterTile { width, half, .. } = self.tile;
        let [head_dim, value_dim] = self.sizes.dims;
        write!(
            f,
            "clusters of {width} rows of {head_dim} and {value_dim} {}: gathered, on wgmma, {} units, {} KiB shared",
            half.ptx(),
            self.tile.units(),
            self.tile.shared_bytes().div_ceil(1024),
        )
    }
}
