//! The shape of a launch, and where its parts lie in shared memory.

use crate::kernels::clusters::ClusterSizes;
use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::arch::swizzled::Spans;
use blocksparse_cubecl::arch::tma::ROW_ELEMENTS;

/// Rows of a warpgroup's product, and of a step.
pub const STEP: usize = 64;

/// The comptime shape of a launch: its key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClusterTile {
    /// The type of the tensors.
    pub half: Half,
    /// Width of queries, a multiple of 64.
    pub head_dim: usize,
    /// Width of values, a multiple of 64.
    pub value_dim: usize,
    /// Rows of a cluster.
    pub width: usize,
    /// Whether rows of a list are more than 4 GB apart.
    pub far: bool,
}

impl ClusterTile {
    /// Of rows as wgmma reads them.
    pub fn new(of: &ClusterSizes, half: Half) -> Option<Self> {
        let [head_dim, value_dim] = of.dims;
        let is_wide = |dim: usize| (ROW_ELEMENTS..=256).contains(&dim);
        let are_taken = (of.dims).map(|dim| is_wide(dim) && dim.is_multiple_of(ROW_ELEMENTS));
        let list = of.length * head_dim.max(value_dim) * 2;
        (are_taken == [true; 2] && of.width > 0).then_some(Self {
            half,
            head_dim,
            value_dim,
            width: of.width,
            far: u32::try_from(list).is_err(),
        })
    }

    /// Rows of a cluster, filled up.
    pub fn rows(&self) -> usize {
        self.width.next_multiple_of(STEP)
    }

    /// Of which each warpgroup has so many of [`STEP`] rows, one after the other.
    pub fn steps(&self) -> usize {
        self.rows() / STEP
    }

    /// Half as many as there are tiles, so that more cubes are under way at once, whose copies hide each other; and no more than a multiprocessor has registers for.
    pub fn warpgroups(&self) -> usize {
        let most = match self.value_dim {
            64 => 4,
            128 => 3,
            _ => 2,
        };
        self.steps().div_ceil(2).min(most)
    }

    pub fn warps(&self) -> usize {
        4 * self.warpgroups()
    }

    pub fn units(&self) -> usize {
        32 * self.warps()
    }

    /// Registers of sums of a row: a vector has a power of two of them.
    pub fn sums(&self) -> usize {
        (self.value_dim / 2).next_power_of_two()
    }

    /// The cluster's rows, at the beginning,
    pub fn x(&self) -> Spans {
        Spans {
            rows: self.rows(),
            dim: self.head_dim,
            far: self.far,
        }
    }

    /// and behind them their values.
    pub fn values(&self) -> Spans {
        Spans {
            dim: self.value_dim,
            ..self.x()
        }
    }

    /// One over the length of each row.
    pub fn inverses(&self) -> u32 {
        (self.x().bytes() + self.values().bytes()) as u32
    }

    /// Bytes of shared memory of a cube.
    pub fn shared_bytes(&self) -> usize {
        self.inverses() as usize + self.rows() * 4
    }
}
