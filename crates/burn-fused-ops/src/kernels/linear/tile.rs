//! The shape of a cube's work.

use std::fmt;

use crate::kernels::linear::asm::{MainLoop, STEPS};
use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::arch::tma::{DEPTH, ROW, ROW_ELEMENTS};
use blocksparse_cubecl::shared::curve::ActivationKind;

/// What is contiguous in a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// The depth, over which products are summed: "K-major".
    Depth,
    /// The rows of the left factor, the columns of the right one: "MN-major".
    Across,
}

impl Order {
    /// From a slab in rows of 128 bytes to each 16 of its depth, in 16 bytes.
    pub(crate) fn offsets(self) -> [usize; STEPS] {
        let step = match self {
            Self::Depth => (2 * DEPTH) >> 4,
            Self::Across => (DEPTH * ROW) >> 4,
        };
        [0, step, 2 * step, 3 * step]
    }
}

/// What rows choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Highest {
    /// Columns that a row chooses: 8 at most.
    pub most: usize,
    /// Neighbouring columns whose sums are one score: 1 or 2.
    pub parts: usize,
    /// Row `i` may choose the scores before number `(first + i) / step`.
    pub step: usize,
}

/// Columns that a row chooses, at most: each is kept in registers.
pub const MOST_HIGHEST: usize = 8;

/// What becomes of the sums of a tile. Only results in half precision become anything, but for [`LogSums`](Self::LogSums),
/// [`Maxima`](Self::Maxima), [`LineSums`](Self::LineSums) and [`Highest`](Self::Highest).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// They are the result.
    #[default]
    Plain,
    /// A bias is added, and columns are written by heads of so many.
    Heads {
        /// Columns of a head.
        dim: usize,
    },
    /// They meet a bias and an activation.
    Activation(ActivationKind),
    /// They are the gradient by an activation, and become that by what came into it.
    Gradient {
        /// The activation.
        activation: ActivationKind,
        /// Whether sums over rows are wanted.
        sums: bool,
    },
    /// They are scores, in f32: of each run of so many columns the logarithm of the sum of their exponentials, as far as the row sees them.
    LogSums {
        /// Columns of a run: 8, 16, 32 or 64.
        run: usize,
    },
    /// They are scores, in f32: of each run of so many columns the highest.
    Maxima {
        /// Columns of a run: 8, 16, 32, 64 or 128.
        run: usize,
    },
    /// They are scores, in f32: of up to 128 rows whose sums of exponentials are known the softmax's sums over rows, of each column and along each diagonal.
    LineSums,
    /// They are scores, in f32: of each row the columns of the highest are the result.
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
/// Rows of a warpgroup, and bytes of them or of its columns in a slab.
const GROUP_ROWS: usize = 64;
/// Depth of a slab.
pub const SLAB: usize = ROW_ELEMENTS;
/// Bytes of 64 rows of a slab, or of 64 columns.
pub const SPAN_BYTES: usize = GROUP_ROWS * ROW;
/// Units that multiply.
pub const MULTIPLIERS: usize = 256;
/// Units of a cube: a warp loads.
pub const UNITS: usize = MULTIPLIERS + 32;
/// Warps that multiply.
pub const WARPS: u32 = (MULTIPLIERS / 32) as u32;
/// Bytes before the slabs, for barriers.
const BARRIERS: usize = 1024;

/// Words of a row that a warp of [`Epilogue::LineSums`] writes: its columns, and the eight before the first, which are those of its lower rows.
pub(crate) fn line_row(cols: usize) -> usize {
    cols + 8
}

/// Words of shared memory of such a warp.
pub(crate) fn line_words(cols: usize) -> usize {
    8 * line_row(cols)
}

/// The comptime shape of the kernel: its key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProductTile {
    /// The type of the factors.
    pub half: Half,
    /// Columns: 64, 128 or 256.
    pub cols: usize,
    /// Slabs in shared memory.
    pub stages: usize,
    /// How the left factor lies.
    pub a: Order,
    /// How the right factor lies.
    pub b: Order,
    /// Whether results are f32.
    pub wide: bool,
    /// What becomes of the sums.
    pub epilogue: Epilogue,
    /// Whether the left factor lies by heads.
    pub by_heads: bool,
}

/// Cycles by which the second warpgroup begins later, so that one multiplies while the other writes: about two slabs of a warpgroup of its own at 256
/// columns, as long as it takes to write its results.
pub const STAGGER: u32 = 1024;

impl ProductTile {
    /// The tile of so many columns.
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

    /// With as many slabs as fit. None: too few do.
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

    /// Whether sums over rows are wanted.
    pub(crate) fn sums(&self) -> bool {
        matches!(self.epilogue, Epilogue::Gradient { sums: true, .. })
    }

    /// Whether sums over columns and diagonals of weights are wanted.
    pub(crate) fn is_lines(&self) -> bool {
        self.epilogue == Epilogue::LineSums
    }

    /// Where the sums over each warp's rows lie.
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

    /// Columns of the sums that a unit writes at a time.
    pub(crate) fn written(&self) -> usize {
        match self.epilogue {
            Epilogue::LogSums { run } | Epilogue::Maxima { run } => run,
            _ if self.wide => 2,
            _ => 8,
        }
    }

    /// Words that it writes them as.
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

    /// Whether the highest of runs of columns are wanted.
    pub(crate) fn is_maxima(&self) -> bool {
        matches!(self.epilogue, Epilogue::Maxima { .. })
    }

    /// Whether rows choose columns.
    pub(crate) fn is_highest(&self) -> bool {
        matches!(self.epilogue, Epilogue::Highest(_))
    }

    /// What rows choose, if that is what becomes of the sums.
    pub(crate) fn highest(&self) -> Highest {
        match self.epilogue {
            Epilogue::Highest(of) => of,
            _ => unreachable!("of tiles that choose"),
        }
    }

    /// Whether tiles that no row sees are left out.
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
