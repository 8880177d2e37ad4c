//! The launch of a product.

use crate::kernels::linear::epilogue::ResultShapeLaunch;
use crate::kernels::linear::line_sums::{LINE_GROUPS, line_elements};
use crate::kernels::linear::log_sums::{SeenColumns, SeenLaunch};
use crate::kernels::linear::mma::MmaTile;
use crate::kernels::linear::mma::product::FactorLaunch;
use crate::kernels::linear::places::TilesLaunch;
use crate::kernels::linear::plan::{ProductPlan, TierTile};
use crate::kernels::linear::tile::{Epilogue, Order, ProductTile, ROWS, SLAB, UNITS};
use crate::kernels::linear::view::{HEAD, MatrixView, boxes_of};
use crate::kernels::linear::{mma, product};
use crate::kernels::prelude::*;
use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::arch::tma::ROW_ELEMENTS;

/// Returns the tensor map of a factor whose depth is dimension `depth`: boxes have `width` of its rows or columns.
fn map(
    view: &MatrixView,
    depth: usize,
    order: Order,
    width: usize,
    half: Half,
) -> TensorMapArg<Tiled> {
    let across = 3 - depth;
    let (outer, inner, boxes) = match order {
        Order::Depth => (across, depth, [1, 1, width, ROW_ELEMENTS]),
        Order::Across => (depth, across, [1, 1, SLAB, ROW_ELEMENTS]),
    };
    let [runs, run_stride] = view.outer;
    let mut shape = [runs, view.run(), view.shape[outer], view.shape[inner]];
    let mut strides = [run_stride, view.strides[0], view.strides[outer], 1];
    // Strides of dimensions of length 1 are arbitrary, but those of a map have to be multiples of 16 bytes.
    for dim in 0..3 {
        if shape[dim] == 1 {
            strides[dim] = shape[3].next_multiple_of(8);
        }
    }
    if let Some(seq) = view.seq {
        let (rows, columns) = match view.strides[2] {
            1 => (view.shape[1], view.shape[2]),
            _ => (view.shape[2], view.shape[1]),
        };
        let heads = columns / HEAD;
        shape = [rows / seq, heads, seq, HEAD];
        strides = [heads * seq * HEAD, seq * HEAD, HEAD, 1];
    }
    // SAFETY: the handle holds the elements of the view's shape and strides.
    unsafe { boxes_of(&view.handle, shape, strides, boxes, half) }
}

/// Tensors that an epilogue reads and writes besides the result, all contiguous.
#[derive(Clone, Copy, Debug, Default)]
pub struct EpilogueTensors<'a> {
    /// Bias, `[columns]`, f32, added to the sums first. For heads, activations and gradients.
    pub bias: Option<&'a Handle>,
    /// Input of the activation without the bias, `[rows, columns]` in the result's type. Required for gradients, absent otherwise.
    pub before: Option<&'a Handle>,
    /// Output, `[rows, columns]` in the result's type. For activations: the activation's input without the bias. For gradients: the recomputed activation,
    /// which may overwrite `before`.
    pub second: Option<&'a Handle>,
    /// Output, `[plan.total_rows(), columns]` in f32: sums of a gradient over 64 rows each. Required for gradients planned with sums, absent otherwise.
    pub totals: Option<&'a Handle>,
    /// Rows of a batch entry, and the number of heads of each part. Required for heads, absent otherwise. The parts are contiguous in one buffer:
    /// `[batch, heads, seq, dim]` each.
    pub heads: Option<(usize, [usize; 3])>,
    /// Columns that each row sees. Required for sums of exponentials, sums over columns and top-k choices, absent otherwise. Sums of exponentials are
    /// `[batch, rows, columns / run]` in f32; tiles without a visible column are not written. For choices the columns are scores, the first row is at
    /// position `first`, and the result is `[batch, rows, most]` in i32.
    pub seen: Option<SeenColumns>,
    /// Base-2 logarithms of the rows' sums of exponentials, `[batch, rows]`, f32. Required for sums over columns, absent otherwise. The result is
    /// `[batch, tiles of columns, 2, line_elements]` in f32, one for each 64 rows; a matrix whose first logarithm is
    /// [`UNWANTED`](crate::kernels::linear::UNWANTED) or more is not written.
    pub logs: Option<&'a Handle>,
}

impl EpilogueTensors<'_> {
    /// # Errors
    /// If these are not the tensors that the plan's epilogue reads and writes.
    fn check(&self, plan: &ProductPlan) -> Result<(), KernelError> {
        let request = plan.request;
        let (gradient, sums) = match request.epilogue {
            Epilogue::Gradient { sums, .. } => (true, sums),
            _ => (false, false),
        };
        let is_lines = request.epilogue == Epilogue::LineSums;
        let is_seen = is_lines
            || matches!(
                request.epilogue,
                Epilogue::LogSums { .. } | Epilogue::Highest(_)
            );
        let is_plain =
            is_seen || matches!(request.epilogue, Epilogue::Plain | Epilogue::Maxima { .. });
        let heads = match (request.epilogue, self.heads) {
            (Epilogue::Heads { dim }, Some((seq, heads))) => {
                let count: usize = heads.iter().sum();
                seq > 0 && request.rows.is_multiple_of(seq) && count * dim == request.cols
            }
            (Epilogue::Heads { .. }, None) => false,
            (_, heads) => heads.is_none(),
        };
        let fits = self.before.is_some() == gradient
            && self.seen.is_some() == is_seen
            && self.logs.is_some() == is_lines
            && self.totals.is_some() == sums
            && !(is_plain && (self.bias.is_some() || self.second.is_some()))
            && heads
            && !(self.heads.is_some() && self.second.is_some());
        match fits {
            true => Ok(()),
            false => Err(KernelError::Factor { factor: "epilogue" }),
        }
    }
}

/// Computes `out = a · b` as planned: `out` is `[batch, parts, rows, columns]`, contiguous, or what the epilogue states.
///
/// # Errors
/// [`KernelError::Factor`] if a factor or a tensor of the epilogue differs from the plan. Nothing is launched then.
pub fn multiply(
    client: &Client,
    plan: &ProductPlan,
    [a, b]: [&MatrixView; 2],
    out: &Handle,
    beside: &EpilogueTensors,
) -> Result<(), KernelError> {
    beside.check(plan)?;
    let request = plan.request;
    for (name, view, depth, across, order) in [
        ("a", a, 2, request.rows, request.orders[0]),
        ("b", b, 1, request.cols, request.orders[1]),
    ] {
        // TMA reads zeros past the end: the result may have more columns than the right factor, up to a multiple of 8 or a whole run.
        let unit = match request.epilogue {
            Epilogue::LogSums { run } => run,
            _ => 8,
        };
        let own = match name {
            "b" => view.shape[3 - depth].next_multiple_of(unit),
            _ => view.shape[3 - depth],
        };
        let is_across = own == across || view.shape[3 - depth] == across;
        let is_shared = view.shape[0] > 0 && request.batch.is_multiple_of(view.shape[0]);
        let fits = view.shape[depth] == request.depth && is_across && is_shared;
        let lies = view.seq.is_some() == (name == "a" && request.by_heads);
        if !fits || !lies || view.order(depth) != Ok(order) {
            return Err(KernelError::Factor { factor: name });
        }
    }
    match plan.tile {
        TierTile::Wgmma(tile) => {
            launch_wgmma(client, plan, tile, [a, b], out, beside);
            Ok(())
        }
        TierTile::Mma(tile) => launch_mma(client, plan, tile, [a, b], out),
    }
}

/// Returns the tiles of a launch; `seen` is the number of tiles of a matrix if some are skipped.
fn tiles(plan: &ProductPlan, [a, b]: [&MatrixView; 2], seen: Option<usize>) -> TilesLaunch {
    let request = plan.request;
    let rows = request.rows.div_ceil(ROWS);
    let cols = request.cols.div_ceil(plan.tile.cols());
    let each = |view: &MatrixView| (request.batch / view.shape[0]) as u32;
    TilesLaunch::new(
        (request.batch * plan.parts * seen.unwrap_or(rows * cols)) as u32,
        rows as u32,
        cols as u32,
        plan.parts as u32,
        plan.part_slabs as u32,
        plan.slabs() as u32,
        each(a),
        each(b),
        a.run() as u32,
        b.run() as u32,
        a.seq.unwrap_or(1) as u32,
    )
}

/// Returns the kernel argument of a factor in a batch of `all`, with its depth in dimension `depth`. `None` if an offset exceeds the kernel's 32-bit
/// counters.
fn factor(view: &MatrixView, depth: usize, order: Order, all: usize) -> Option<FactorLaunch> {
    let across = 3 - depth;
    let outer = match order {
        Order::Depth => across,
        Order::Across => depth,
    };
    // Strides of dimensions of length 1 are arbitrary.
    let stride = |dim: usize, bytes: usize| match view.shape[dim] {
        1 => Some(0),
        _ => u32::try_from(view.strides[dim].checked_mul(2)? / bytes).ok(),
    };
    let [pitch, batch] = [stride(outer, 1)?, stride(0, 16)?];
    let sixteens = |stride: usize| u32::try_from(stride.checked_mul(2)? / 16).ok();
    let each = all / view.shape[0];
    let (in_run, run, to_next_run) = match view.outer {
        // A run consists of the matrices that share a factor's matrix.
        [1, _] if each > 1 => (0, each, if view.shape[0] > 1 { batch } else { 0 }),
        [1, _] => (batch, view.run(), 0),
        [_, stride] => (batch, view.run(), sixteens(stride)?),
    };
    Some(FactorLaunch::new(
        view.shape[across] as u32,
        pitch,
        in_run,
        run as u32,
        to_next_run,
    ))
}

/// Returns a factor's words, from the first to the last.
fn words(view: &MatrixView) -> BufferArg {
    let [_, rows, cols] = view.shape;
    let lengths = [view.run(), rows, cols].into_iter().zip(view.strides);
    let [runs, stride] = view.outer;
    let last: usize = (lengths.chain([(runs, stride)]))
        .map(|(length, stride)| (length - 1) * stride)
        .sum();
    buffer(&view.handle, (last + 1).div_ceil(2))
}

fn launch_mma(
    client: &Client,
    plan: &ProductPlan,
    tile: MmaTile,
    [a, b]: [&MatrixView; 2],
    out: &Handle,
) -> Result<(), KernelError> {
    let request = plan.request;
    let factor = |name, view, depth, order| {
        factor(view, depth, order, request.batch).ok_or(KernelError::Factor { factor: name })
    };
    let left = factor("a", a, 2, tile.a)?;
    let right = factor("b", b, 1, tile.b)?;
    let elements = request.batch * plan.parts * request.rows * request.cols;
    let depth = request.depth as u32;
    // SAFETY: rows and pieces past the ends of the factors are not read; the factors begin at multiples of 16 bytes ([`MatrixView::order`]); rows and columns
    // beyond the result are not written, and `out` has the declared length (see `buffer`).
    unsafe {
        mma::product::product::launch_unchecked(
            client,
            CubeCount::Static(plan.cubes as u32, 1, 1),
            CubeDim::new_1d(tile.units() as u32),
            if tile.wide { 2 } else { 4 },
            words(a),
            words(b),
            buffer(out, elements / tile.written()),
            left,
            right,
            depth,
            tiles(plan, [a, b], None),
            tile,
        );
    }
    Ok(())
}

fn launch_wgmma(
    client: &Client,
    plan: &ProductPlan,
    tile: ProductTile,
    [a, b]: [&MatrixView; 2],
    out: &Handle,
    beside: &EpilogueTensors,
) {
    let request = plan.request;
    let elements = request.batch * plan.parts * request.rows * request.cols;
    let written = match request.epilogue {
        Epilogue::LineSums => {
            let tiles = request.batch * request.cols.div_ceil(tile.cols);
            tiles * LINE_GROUPS * line_elements(tile.cols)
        }
        Epilogue::Highest(of) => request.batch * request.rows * of.most,
        _ => elements / tile.written(),
    };
    let bias_len = match beside.logs {
        Some(_) => request.batch * request.rows,
        None => request.cols / 4,
    };
    let seen_tiles =
        (beside.seen.filter(|_| tile.is_seen())).map(|seen| seen.tiles(request.rows, tile.cols));
    // No row sees any column.
    if seen_tiles == Some(0) {
        return;
    }
    let seen = match beside.seen {
        Some(seen) => seen.launched(seen_tiles.unwrap_or(1)),
        None => SeenLaunch::new(0, 0, 1, 0.0),
    };
    let (seq, [first, second, third]) = beside.heads.unwrap_or((request.rows, [0; 3]));
    let shape = ResultShapeLaunch::new(
        request.rows as u32,
        request.cols as u32,
        seq as u32,
        (request.rows / seq) as u32,
        first as u32,
        (first + second) as u32,
        (first + second + third) as u32,
    );
    // SAFETY: TMA reads nothing beyond its maps; rows and columns beyond the result are not written, and `out` has the declared length (see `buffer`).
    unsafe {
        product::product::launch_unchecked(
            client,
            CubeCount::Static(plan.cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            tile.cols / 2,
            tile.written_words(),
            map(a, 2, tile.a, ROWS, tile.half),
            map(b, 1, tile.b, tile.cols, tile.half),
            buffer(out, written),
            optional(beside.second, elements / 8),
            optional(beside.bias.or(beside.logs), bias_len),
            optional(beside.before, elements / 8),
            optional(beside.totals, plan.total_rows() * request.cols),
            tiles(plan, [a, b], seen_tiles),
            shape,
            seen,
            tile,
        );
    }
}
