//! Matmuls of rows, `a · bᵀ`, with results in f32.

use crate::kernels::rows::blocks::{OnlyLists, is_wanted, numbers_of};
use crate::kernels::selection::UNITS;
use blocksparse_cubecl::on_device::bits::{Grid, GridLaunch, last_position};
use blocksparse_cubecl::prelude::*;
use burn_fused_ops::kernels::linear::{
    Epilogue, EpilogueTensors, MatrixView, Order, ProductPlan, ProductRequest, SeenColumns,
    multiply,
};

/// Matrices of rows whose elements are contiguous.
#[derive(Clone, Debug)]
pub struct RowsView {
    /// Buffer, starting at the first element.
    pub handle: Handle,
    /// Number of matrices. If the other factor has more, adjacent ones share a matrix.
    pub matrices: usize,
    /// Number of rows of a matrix.
    pub rows: usize,
    /// Number of elements of a row.
    pub width: usize,
    /// Number of elements from one matrix to the next, and from one row to the next.
    pub strides: [usize; 2],
}

impl RowsView {
    /// Creates a view of contiguous matrices.
    pub fn new(handle: &Handle, [matrices, rows, width]: [usize; 3]) -> Self {
        Self {
            handle: handle.clone(),
            matrices,
            rows,
            width,
            strides: [rows * width, width],
        }
    }

    /// Returns `rows` rows from `first` on, of elements of `bytes` bytes.
    pub fn rows(&self, first: usize, rows: usize, bytes: usize) -> Self {
        Self {
            handle: self.from(first * self.strides[1], bytes),
            rows,
            ..self.clone()
        }
    }

    /// Returns `matrices` matrices from `first` on, of elements of `bytes` bytes.
    pub fn matrices(&self, first: usize, matrices: usize, bytes: usize) -> Self {
        Self {
            handle: self.from(first * self.strides[0], bytes),
            matrices,
            ..self.clone()
        }
    }

    fn from(&self, numbers: usize, bytes: usize) -> Handle {
        self.handle.clone().offset_start((numbers * bytes) as u64)
    }

    /// Returns the number of elements from the first to the last.
    fn reach(&self) -> usize {
        let last = (self.matrices - 1) * self.strides[0] + (self.rows - 1) * self.strides[1];
        last + self.width
    }
}

/// Returns the number of elements of a row of a result, as tensor cores write it.
pub fn pitch(columns: usize) -> usize {
    columns.next_multiple_of(8)
}

/// Computes `a · bᵀ` of each matrix: f32 `[a.matrices, a.rows, pitch(b.rows)]`, 0 after the rows of `b`. Uses tensor cores for half precision, where the device
/// has them.
///
/// # Errors
/// [`KernelError`] if a buffer is larger than the device can index, or a factor is empty.
pub fn products(
    client: &Client,
    element: ElemType,
    [a, b]: [&RowsView; 2],
    out: &Handle,
) -> Result<(), KernelError> {
    if a.matrices * a.rows * b.matrices * b.rows * a.width == 0
        || a.width != b.width
        || !a.matrices.is_multiple_of(b.matrices)
    {
        return Err(KernelError::Factor { factor: "b" });
    }
    match on_tensor_cores(client, element, [a, b], out) {
        true => Ok(()),
        false => dots(
            client,
            element,
            [a, b],
            (out, pitch(b.rows)),
            1.0,
            Wanted::default(),
        ),
    }
}

/// Returns the request to tensor cores for rows of half precision, `[matrices, rows, columns, width]`, with an epilogue. `None` for other types, or if rows are
/// not aligned to 16 bytes.
pub(crate) fn request_of(
    element: ElemType,
    [batch, rows, cols, depth]: [usize; 4],
    epilogue: Epilogue,
) -> Option<ProductRequest> {
    let is_fit = batch * rows * cols > 0 && depth.is_multiple_of(8);
    let request = ProductRequest {
        batch,
        orders: [Order::Depth; 2],
        wide: true,
        epilogue,
        ..ProductRequest::plain(is_bf16(element)?, [rows, cols, depth])
    };
    is_fit.then_some(request)
}

/// Returns whether the type is bf16 (true) or f16 (false). `None` for other types.
fn is_bf16(element: ElemType) -> Option<bool> {
    match element {
        ElemType::Float(FloatKind::BF16) => Some(true),
        ElemType::Float(FloatKind::F16) => Some(false),
        _ => None,
    }
}

/// Returns both factors and the request of a matmul on tensor cores. `None` for other types, or if tensor cores cannot read the factors.
pub(crate) fn asked(
    element: ElemType,
    [a, b]: [&RowsView; 2],
) -> Option<([MatrixView; 2], ProductRequest)> {
    let is_bf16 = is_bf16(element)?;
    let view = |of: &RowsView| {
        let strides = [of.strides[0], of.strides[1], 1];
        MatrixView::new(of.handle.clone(), [of.matrices, of.rows, of.width], strides)
    };
    let (left, right) = (view(a), view(b).transposed());
    let request = ProductRequest::of(is_bf16, [&left, &right], true, false).ok()?;
    let request = ProductRequest {
        cols: pitch(request.cols),
        ..request
    };
    Some(([left, right], request))
}

/// Launches the matmul on tensor cores, and returns whether they served it.
fn on_tensor_cores(
    client: &Client,
    element: ElemType,
    factors: [&RowsView; 2],
    out: &Handle,
) -> bool {
    let Some(([left, right], request)) = asked(element, factors) else {
        return false;
    };
    let Ok(plan) = ProductPlan::new(client, request) else {
        return false;
    };
    let beside = EpilogueTensors::default();
    multiply(client, &plan, [&left, &right], out, &beside).is_ok()
}

/// Request for sums of exponentials over runs of columns of a product.
#[derive(Clone, Copy, Debug)]
pub struct RunSums {
    /// Number of columns of a run.
    pub run: usize,
    /// Row `i` sees the columns before `first + i`; with `None` it sees all.
    pub first: Option<i64>,
    /// Factor of the products.
    pub factor: f64,
}

impl RunSums {
    /// Returns the plan of a matmul with these sums, if the device has one.
    fn planned(
        &self,
        client: &Client,
        element: ElemType,
        factors: [&RowsView; 2],
    ) -> Option<([MatrixView; 2], ProductPlan)> {
        let (views, request) = asked(element, factors)?;
        let request = ProductRequest {
            cols: factors[1].rows.next_multiple_of(self.run),
            epilogue: Epilogue::LogSums { run: self.run },
            ..request
        };
        Some((views, ProductPlan::new(client, request).ok()?))
    }

    /// Returns whether tensor cores serve these sums.
    pub fn is_served(&self, client: &Client, element: ElemType, factors: [&RowsView; 2]) -> bool {
        self.planned(client, element, factors).is_some()
    }

    /// Computes the natural logarithms of the sums: f32 `[a.matrices, a.rows, ⌈b.rows / run⌉]`. Runs that a row does not see are below any product, or are not
    /// written if the rows around it do not see them either.
    ///
    /// # Errors
    /// [`KernelError`] if the product is not [served](Self::is_served).
    pub fn log_sums(
        &self,
        client: &Client,
        element: ElemType,
        factors: [&RowsView; 2],
        out: &Handle,
    ) -> Result<(), KernelError> {
        let planned = self.planned(client, element, factors);
        let ([left, right], plan) = planned.ok_or(KernelError::Factor { factor: "b" })?;
        let beside = EpilogueTensors {
            seen: Some(SeenColumns {
                first: self.first.unwrap_or(i64::from(i32::MAX)),
                columns: factors[1].rows,
                factor: self.factor,
            }),
            ..EpilogueTensors::default()
        };
        multiply(client, &plan, [&left, &right], out, &beside)
    }
}

/// Tile of the result that a cube computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct DotTile {
    /// Number of rows, and of columns.
    side: usize,
    /// Number of elements along the depth at a time.
    depth: usize,
    /// Number of rows, and of columns, of a unit.
    own: usize,
    /// Number of elements between two columns in shared memory, chosen to limit bank conflicts of writes.
    column: usize,
}

/// Tile that reads the fewest elements.
const LARGE: DotTile = DotTile {
    side: 64,
    depth: 32,
    own: 4,
    column: 68,
};

/// Tile for small problems, where the latency of each step dominates: more tiles, with fewer steps.
const SMALL: DotTile = DotTile {
    side: 32,
    depth: 64,
    own: 2,
    column: 33,
};

/// Number of adjacent elements of a row that a unit loads.
const LOADED: usize = 4;

impl DotTile {
    /// Returns the tile for this many matrices, rows and columns.
    fn new(client: &Client, matrices: usize, rows: usize, columns: usize) -> Self {
        let known = client.properties().hardware.num_streaming_multiprocessors;
        let tiles = matrices * LARGE.down(rows) * LARGE.down(columns);
        match tiles * 2 <= known.unwrap_or(64) as usize {
            true => SMALL,
            false => LARGE,
        }
    }

    /// Returns the number of tiles along `rows` rows or columns.
    fn down(&self, rows: usize) -> usize {
        rows.div_ceil(self.side)
    }

    /// Returns the number of units along a tile's columns.
    fn across(&self) -> usize {
        self.side / self.own
    }

    /// Returns the number of units that load a row's elements.
    fn loaders(&self) -> usize {
        self.depth / LOADED
    }
}

/// Sizes of a product.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct DotSizes {
    rows: usize,
    columns: usize,
    /// Number of elements of a row of the result.
    pitch: usize,
    depth: usize,
    /// Number of tiles along a matrix's columns, and of a matrix.
    column_tiles: usize,
    tiles: usize,
    /// Number of matrices of `a` that share one of `b`.
    share: usize,
    /// Number of all tiles.
    count: usize,
    a_matrix: usize,
    a_row: usize,
    b_matrix: usize,
    b_row: usize,
    factor: f32,
}

/// Visibility of blocks, if products of hidden ones are left out.
pub struct SeenBlocks {
    pub grid: GridLaunch,
    /// Index of the first row's block of queries.
    pub first: usize,
}

/// Restriction of the products to compute. The default is all.
#[derive(Default)]
pub struct Wanted<'a> {
    pub seen: Option<SeenBlocks>,
    /// Condition that selects matrices of `a`.
    pub only: Option<OnlyLists<'a>>,
}

/// Computes the product of rows in f32, times a factor. `pitch` is the number of elements of a row of `out`, at least the columns. Hidden tiles and matrices
/// that are not selected are 0.
pub fn dots(
    client: &Client,
    element: ElemType,
    [a, b]: [&RowsView; 2],
    (out, pitch): (&Handle, usize),
    factor: f32,
    wanted: Wanted,
) -> Result<(), KernelError> {
    crate::kernels::selection::check(client)?;
    let most = client.properties().hardware.max_vector_size.clamp(1, 4);
    let begins = |of: &RowsView| of.handle.offset_start.unwrap_or(0) as usize / element.size();
    let numbers = [a, b].map(|of| [of.width, of.strides[0], of.strides[1], begins(of)]);
    let is_aligned = |width: usize| numbers.as_flattened().iter().all(|n| n % width == 0);
    let vector = [4, 2, 1]
        .into_iter()
        .find(|&width| width <= most && is_aligned(width))
        .unwrap_or(1);
    let elements = a.matrices * a.rows * pitch;
    crate::kernels::selection::counted("the products of rows", elements)?;
    let address = address_of(client, a.reach().max(b.reach()).max(elements))?;
    let tile = DotTile::new(client, a.matrices, a.rows, pitch);
    let (column_tiles, row_tiles) = (tile.down(pitch), tile.down(a.rows));
    let count = a.matrices * row_tiles * column_tiles;
    let cubes = spread(client, count as u64)?;
    let Wanted { seen, only } = wanted;
    let is_seen = seen.is_some();
    let none = || SeenBlocks {
        grid: GridLaunch::new(1, 1, 1, 1, 1, 1, 0),
        first: 0,
    };
    let SeenBlocks { grid, first } = seen.unwrap_or_else(none);
    let sizes = DotSizesLaunch::new(
        a.rows,
        b.rows,
        pitch,
        a.width,
        column_tiles,
        row_tiles * column_tiles,
        a.matrices / b.matrices,
        count,
        a.strides[0],
        a.strides[1],
        b.strides[0],
        b.strides[1],
        factor,
    );
    // SAFETY: a unit reads elements of existing rows and writes its own elements, of rows and columns within the result.
    unsafe {
        dot_rows::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            address,
            vector,
            buffer(&a.handle, a.reach() / vector),
            buffer(&b.handle, b.reach() / vector),
            buffer(out, elements),
            numbers_of(only),
            sizes,
            grid,
            first,
            only.map_or(0.0, |only| only.limit),
            only.is_some_and(|only| only.above),
            is_seen,
            tile,
            element,
        );
    }
    Ok(())
}

/// A factor's matrix: its offset, the elements from one row to the next, and its rows.
#[derive(CubeType, Clone, Copy)]
struct Factor {
    matrix: usize,
    stride: usize,
    rows: usize,
}

/// Fills a unit's share of a tile's columns, for rows from `row0` and elements from `first` on, with zeros out of bounds.
#[cube]
fn fill<E: Float, N: Size>(
    x: &[Vector<E, N>],
    shared: &mut [f32],
    factor: &Factor,
    row0: usize,
    depth: usize,
    first: usize,
    #[comptime] tile: DotTile,
) {
    let width = N::value();
    let unit = UNIT_POS as usize;
    let own = unit % comptime!(tile.loaders()) * comptime!(LOADED);
    #[unroll]
    for pass in 0..comptime!(tile.side * tile.loaders() / UNITS) {
        let row = unit / comptime!(tile.loaders()) + comptime!(pass * UNITS / tile.loaders());
        let is_row = row0 + row < factor.rows;
        let start = factor.matrix + (row0 + row).min(factor.rows - 1) * factor.stride;
        #[unroll]
        for i in 0..comptime!(LOADED / width) {
            let within = own + comptime!(i * width);
            let at = first + within;
            let inside = is_row && at < depth;
            let place = (start + select(inside, at, 0usize)) / width;
            let numbers = Vector::<f32, N>::cast_from(x[place]);
            #[unroll]
            for c in 0..width {
                let number = select(inside, numbers.extract(c), 0.0f32);
                shared[(within + c) * comptime!(tile.column) + row] = number;
            }
        }
    }
}

/// Multiplies rows, with a tile of the result per cube. A unit has `tile.own` adjacent rows, and as many columns that are `tile.across()` apart.
#[cube(launch_unchecked, address_type = "dynamic")]
fn dot_rows<E: Float, N: Size>(
    a: &[Vector<E, N>],
    b: &[Vector<E, N>],
    out: &mut [f32],
    only: ComptimeOption<Box<[f32]>>,
    sizes: DotSizes,
    grid: Grid,
    first_block: usize,
    limit: f32,
    #[comptime] above: bool,
    #[comptime] is_seen: bool,
    #[comptime] tile: DotTile,
    #[define(E)] _element: ElemType,
) {
    // Surplus cubes repeat the last tile.
    let at = CUBE_POS.min(sizes.count - 1);
    let matrix = at / sizes.tiles;
    let of_matrix = at % sizes.tiles;
    let row0 = of_matrix / sizes.column_tiles * comptime!(tile.side);
    let column0 = of_matrix % sizes.column_tiles * comptime!(tile.side);
    let unit = UNIT_POS as usize;
    let across = unit % comptime!(tile.across());
    let down = unit / comptime!(tile.across()) * comptime!(tile.own);
    let mut left = Shared::<[f32]>::new_slice(comptime!(tile.depth * tile.column));
    let mut right = Shared::<[f32]>::new_slice(comptime!(tile.depth * tile.column));
    let mut sums = Array::<f32>::new(comptime!(tile.own * tile.own));
    #[unroll]
    for i in 0..comptime!(tile.own * tile.own) {
        sums[i] = 0.0f32;
    }
    let mut steps = sizes.depth.div_ceil(comptime!(tile.depth));
    if comptime!(is_seen) {
        let last = (row0 + comptime!(tile.side - 1)).min(sizes.rows - 1) + first_block;
        if (column0 * grid.block) as i32 > last_position(last, &grid) {
            steps = 0usize.runtime();
        }
    }
    if !is_wanted(&only, matrix, limit, above) {
        steps = 0usize.runtime();
    }
    let of_a = Factor {
        matrix: matrix * sizes.a_matrix,
        stride: sizes.a_row,
        rows: sizes.rows,
    };
    let of_b = Factor {
        matrix: matrix / sizes.share * sizes.b_matrix,
        stride: sizes.b_row,
        rows: sizes.columns,
    };
    for step in 0..steps {
        let first = step * comptime!(tile.depth);
        fill::<E, N>(a, &mut left, &of_a, row0, sizes.depth, first, tile);
        fill::<E, N>(b, &mut right, &of_b, column0, sizes.depth, first, tile);
        sync_cube();
        #[unroll]
        for k in 0..comptime!(tile.depth) {
            let mut own = Array::<f32>::new(comptime!(tile.own));
            #[unroll]
            for i in 0..comptime!(tile.own) {
                own[i] = left[comptime!(k * tile.column + i).runtime() + down];
            }
            #[unroll]
            for j in 0..comptime!(tile.own) {
                let other =
                    right[comptime!(k * tile.column + j * tile.across()).runtime() + across];
                #[unroll]
                for i in 0..comptime!(tile.own) {
                    sums[comptime!(i * tile.own + j)] += own[i] * other;
                }
            }
        }
        sync_cube();
    }
    #[unroll]
    for i in 0..comptime!(tile.own) {
        let row = row0 + down + comptime!(i);
        #[unroll]
        for j in 0..comptime!(tile.own) {
            let column = column0 + across + comptime!(j * tile.across());
            if row < sizes.rows && column < sizes.pitch {
                out[(matrix * sizes.rows + row) * sizes.pitch + column] =
                    sums[comptime!(i * tile.own + j)] * sizes.factor;
            }
        }
    }
}
