//! Comptime shape of a cube's work.

use std::fmt;

use crate::kernels::linear::asm::{MainLoop, STEPS};
use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::arch::tma::{DEPTH, ROW, ROW_ELEMENTS};
use blocksparse_cubecl::shared::curve::ActivationKind;

/// Contiguous dimension of a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// The depth, over which products are summed: "K-major".
    Depth,
    /// The rows of the left factor, the columns of the right one: "MN-major".
    Across,
}

impl Order {
    /// Returns the offset of each step of depth 16 in a slab with rows of 128 bytes, in units of 16 bytes.
    pub(crate) fn offsets(self) -> [usize; STEPS] {
        let step = match self {
            Self::Depth => (2 * DEPTH) >> 4,
            Self::Across => (DEPTH * ROW) >> 4,
        };
        [0, step, 2 * step, 3 * step]
    }
}

/// Parameters of a top-k choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Highest {
    /// Columns that a row chooses: at most 8.
    pub most: usize,
    /// Adjacent columns that are added to one score: 1 or 2.
    pub parts: usize,
    /// Row `i` may choose scores with an index below `(first + i) / step`.
    pub step: usize,
}

/// Most columns that a row chooses: each is kept in registers.
pub const MOST_HIGHEST: usize = 8;

/// Epilogue: operation on the sums of a tile. Epilogues need results in half precision, except [`LogSums`](Self::LogSums), [`Maxima`](Self::Maxima),
/// [`LineSums`](Self::LineSums) and [`Highest`](Self::Highest), which need f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// Writes the sums unchanged.
    #[default]
    Plain,
    /// Adds a bias, and writes columns by heads.
    Heads {
        /// Columns of a head.
        dim: usize,
    },
    /// Adds a bias and applies an activation.
    Activation(ActivationKind),
    /// Converts the gradient with respect to an activation to that with respect to its input.
    Gradient {
        activation: ActivationKind,
        /// True if sums over rows are wanted.
        sums: bool,
    },
    /// Log-sum-exp of f32 scores over each run of columns, restricted to the columns that the row sees.
    LogSums {
        /// Columns of a run: 8, 16, 32 or 64.
        run: usize,
    },
    /// Maximum of f32 scores over each run of columns.
    Maxima {
        /// Columns of a run: 8, 16, 32, 64 or 128.
        run: usize,
    },
    /// Softmax weights of f32 scores, summed over the rows for each column and along each diagonal. At most 128 rows, whose sums of exponentials are known.
    LineSums,
    /// Columns of the highest f32 scores of each row.
    Highest(Highest),
}

impl fmt::Display for Epilogue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain => Ok(()),
            Self::Heads { dim } => write!(f, ", written by heads of {dim}"),
            Self::Activation(activation) => write!(f, ", through {activation:?}"),
            Self::Gradient { activation, .. } => write!(f, ", back through {activation:?}"),
            Self::LogSums { run } => write!(f, ", as logarithms of sums over {run} columns"),
            Self::Maxima { run } => write!(f, ", as the highest of {run} columns"),
            Self::LineSums => write!(f, ", as sums over columns and diagonals of weights"),
            Self::Highest(of) => write!(f, ", as the {} highest of a row", of.most),
        }
    }
}

/// Rows of a tile: 64 for each of two warpgroups.
pub const ROWS: usize = 128;
/// Rows of a warpgroup.
const GROUP_ROWS: usize = 64;
/// Depth of a slab.
pub const SLAB: usize = ROW_ELEMENTS;
/// Bytes of 64 rows, or 64 columns, of a slab.
pub const SPAN_BYTES: usize = GROUP_ROWS * ROW;
/// Units that multiply.
pub const MULTIPLIERS: usize = 256;
/// Units of a cube, including the warp that loads.
pub const UNITS: usize = MULTIPLIERS + 32;
/// Warps that multiply.
pub const WARPS: u32 = (MULTIPLIERS / 32) as u32;
/// Bytes of the barriers, before the slabs.
const BARRIERS: usize = 1024;

/// Returns the words of a row that a warp of [`Epilogue::LineSums`] writes: its columns, and the eight before the first, which belong to its lower rows.
pub(crate) fn line_row(cols: usize) -> usize {
    cols + 8
}

/// Returns the words of shared memory of such a warp.
pub(crate) fn line_words(cols: usize) -> usize {
    8 * line_row(cols)
}

/// Comptime shape of the kernel: its key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProductTile {
    /// Type of the factors.
    pub half: Half,
    /// Columns: 64, 128 or 256.
    pub cols: usize,
    /// Slabs in shared memory.
    pub stages: usize,
    /// Contiguous dimension of the left factor.
    pub a: Order,
    /// Contiguous dimension of the right factor.
    pub b: Order,
    /// True if results are f32.
    pub wide: bool,
    /// Operation on the sums.
    pub epilogue: Epilogue,
    /// True if the left factor is laid out by heads.
    pub by_heads: bool,
}

/// Cycles by which the second warpgroup starts later, so that one multiplies while the other writes: about the time a warpgroup takes to write its results,
/// or for two of its own slabs at 256 columns.
pub const STAGGER: u32 = 1024;

impl ProductTile {
    /// Returns a tile with `cols` columns and one slab.
    pub fn new(half: Half, cols: usize, [a, b]: [Order; 2], wide: bool) -> Self {
        Self {
            half,
            cols,
            stages: 1,
            a,
            b,
            wide,
            epilogue: Epilogue::Plain,
            by_heads: false,
        }
    }

    /// Sets the most slabs that fit in shared memory. None: fewer than two fit.
    pub fn with_slabs(mut self, shared: usize) -> Option<Self> {
        let room = shared.checked_sub(BARRIERS + self.totals_bytes())?;
        self.stages = (room / self.slab_bytes()).min(8);
        (self.stages >= 2).then_some(self)
    }

    pub(crate) fn a_bytes(&self) -> usize {
        ROWS * ROW
    }

    pub(crate) fn slab_bytes(&self) -> usize {
        self.a_bytes() + self.cols * ROW
    }

    pub(crate) fn full(&self) -> u32 {
        0
    }

    pub(crate) fn empty(&self) -> u32 {
        8 * self.stages as u32
    }

    pub(crate) fn slabs(&self) -> u32 {
        BARRIERS as u32
    }

    pub(crate) fn shared_bytes(&self) -> usize {
        BARRIERS + self.stages * self.slab_bytes() + self.totals_bytes()
    }

    /// Returns whether sums over rows are wanted.
    pub(crate) fn sums(&self) -> bool {
        matches!(self.epilogue, Epilogue::Gradient { sums: true, .. })
    }

    /// Returns whether line sums are wanted.
    pub(crate) fn is_lines(&self) -> bool {
        self.epilogue == Epilogue::LineSums
    }

    /// Returns the offset of the sums over each warp's rows in shared memory.
    pub(crate) fn totals(&self) -> u32 {
        (BARRIERS + self.stages * self.slab_bytes()) as u32
    }

    fn totals_bytes(&self) -> usize {
        let words = match self.epilogue {
            Epilogue::LineSums => line_words(self.cols),
            _ if self.sums() => self.cols,
            _ => 0,
        };
        WARPS as usize * words * 4
    }

    pub(crate) fn main_loop(&self) -> MainLoop {
        MainLoop {
            half: self.half,
            cols: self.cols,
            stages: self.stages,
            slab_bytes: self.slab_bytes(),
            empty: self.empty(),
            across: [self.a, self.b].map(|order| order == Order::Across),
            offsets: [self.a, self.b].map(Order::offsets),
        }
    }

    /// Returns the columns that a unit writes at a time.
    pub(crate) fn written(&self) -> usize {
        match self.epilogue {
            Epilogue::LogSums { run } | Epilogue::Maxima { run } => run,
            _ if self.wide => 2,
            _ => 8,
        }
    }

    /// Returns the words of such a write.
    pub(crate) fn written_words(&self) -> usize {
        match self.epilogue {
            Epilogue::LogSums { .. }
            | Epilogue::Maxima { .. }
            | Epilogue::LineSums
            | Epilogue::Highest(_) => 1,
            _ if self.wide => 2,
            _ => 4,
        }
    }

    /// Returns whether maxima of runs are wanted.
    pub(crate) fn is_maxima(&self) -> bool {
        matches!(self.epilogue, Epilogue::Maxima { .. })
    }

    /// Returns whether rows choose columns.
    pub(crate) fn is_highest(&self) -> bool {
        matches!(self.epilogue, Epilogue::Highest(_))
    }

    /// Returns the parameters of the top-k choice.
    pub(crate) fn highest(&self) -> Highest {
        match self.epilogue {
            Epilogue::Highest(of) => of,
            _ => unreachable!("of tiles that choose"),
        }
    }

    /// Returns whether tiles that no row sees are skipped.
    pub(crate) fn is_seen(&self) -> bool {
        matches!(self.epilogue, Epilogue::LogSums { .. } | Epilogue::LineSums)
    }
}

impl fmt::Display for ProductTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "tiles of {ROWS} × {}, {} slabs of {SLAB}{}{}",
            self.cols,
            self.stages,
            if self.by_heads { ", read by heads" } else { "" },
            self.epilogue
        )
    }
}
