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

/// A map of a factor whose depth is in dimension `depth`: boxes have `width` of its rows or columns.
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
    // Strides of dimensions of length 1 are arbitrary, but a map's have to be multiples of 16 bytes.
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
    // SAFETY: the view's shape and strides, whose elements its handle holds.
    unsafe { boxes_of(&view.handle, shape, strides, boxes, half) }
}

/// What an epilogue reads and writes beside the result. All of it is contiguous.
#[derive(Clone, Copy, Debug, Default)]
pub struct EpilogueTensors<'a> {
    /// `[columns]`, f32: what sums get before they become anything. Of heads and activations.
    pub bias: Option<&'a Handle>,
    /// What came into the activation, without the bias: `[rows, columns]` in the result's type. Of gradients alone, which need it.
    pub before: Option<&'a Handle>,
    /// To be written, `[rows, columns]` in the result's type: of an activation what comes into it, without the bias; of a gradient the activation again,
    /// for which `before`'s buffer will do.
    pub second: Option<&'a Handle>,
    /// To be written, `[plan.total_rows(), columns]` in f32: sums of a gradient over 64 rows each. Of gradients that are planned with sums alone.
    pub totals: Option<&'a Handle>,
    /// Rows of a batch entry, and the heads of each part. Of heads alone, whose parts lie one behind the other: `[batch, heads, seq, dim]` each.
    pub heads: Option<(usize, [usize; 3])>,
    /// Which columns rows see. Of sums of exponentials alone, which need it; the result is `[batch, rows, columns / run]` in f32. Where a tile has no column that
    /// any of its rows sees, nothing is written. Of choices, too: the columns are scores there, the first row is at position `first`, and the result is
    /// `[batch, rows, most]` in i32.
    pub seen: Option<SeenColumns>,
    /// `[batch, rows]`, f32: the logarithms, to base 2, of rows' sums of exponentials; of a matrix whose first one is [`UNWANTED`](crate::kernels::linear::UNWANTED) or more
    /// nothing is written. Of sums over columns alone, which need them; the result is `[batch, tiles of columns, 2, line_elements]` in f32, of each 64 rows.
    pub logs: Option<&'a Handle>,
}

impl EpilogueTensors<'_> {
    /// # Errors
    /// If it is not what the plan's epilogue reads and writes.
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

/// `out = a · b`, as planned: `out` is `[batch, parts, rows, columns]`, contiguous, or as the epilogue says.
///
/// # Errors
/// [`KernelError::Factor`] if a factor or what belongs to the epilogue is not what was planned. Then nothing was launched.
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
        // What is behind the last row is read as 0: the columns of the result may be more than the right factor has, up to a multiple of 8, or a whole run.
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

/// Where tiles are; a matrix has so many, if not all of its rows and columns.
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

/// A factor of a batch of `all`, of which the `depth`-th dimension is the depth, or nothing if the kernel does not count so far.
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
        // A run is of those that share a matrix.
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

/// A factor's words, from the first to the last.
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
    // SAFETY: rows and pieces behind the factors' ends are not read, which begin at multiples of 16 bytes ([`MatrixView::order`]); rows and columns
    // beyond the result are not written, and `out` has the length it says (see `buffer`).
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
    // Nobody sees anything.
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
    // SAFETY: TMA reads nothing beyond its maps; rows and columns beyond the result are not written, and `out` has the length it says (see
    // `buffer`).
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
