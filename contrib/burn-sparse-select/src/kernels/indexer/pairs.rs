//! What a call is of: pairs, what is added up of them, and what becomes of the sums.

use crate::kernels::indexer::rows::{ACROSS, DEPTH, SIDE};
use blocksparse_cubecl::arch::ptx::exp2;
use blocksparse_cubecl::prelude::*;

/// Elements of a query or a key, at most.
pub const MOST_WIDTH: usize = 256;

/// Queries of several heads, some of them at a time, and keys. The last query sits at the last key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairSizes {
    /// Batch entries.
    pub batch: usize,
    /// Heads of queries, and of keys, which divide them.
    pub heads: [usize; 2],
    /// Queries and keys.
    pub seq: [usize; 2],
    /// Elements of a query or a key.
    pub width: usize,
    /// The first query that is computed, and how many are.
    pub rows: [usize; 2],
    /// How many keys a query lists, if it lists any.
    pub listed: Option<usize>,
    /// Keys that have numbers, from the first on, if none are listed: sums need none for keys that no query sees, gradients need all.
    pub keys: usize,
}

impl PairSizes {
    /// Of queries `[batch, heads, seq_q, width]` and keys `[batch, kv_heads, seq_kv, width]`.
    pub fn new(
        [batch, heads, seq_q, width]: [usize; 4],
        [_, kv_heads, seq_kv, _]: [usize; 4],
        rows: [usize; 2],
        listed: Option<usize>,
    ) -> Self {
        Self {
            batch,
            heads: [heads, kv_heads],
            seq: [seq_q, seq_kv],
            width,
            rows,
            listed,
            keys: seq_kv,
        }
    }

    /// Elements of a query: one for each key that has some, or for each that is listed.
    pub fn columns(&self) -> usize {
        self.listed.unwrap_or(self.keys)
    }

    /// Elements of all queries that are computed.
    pub fn elements(&self) -> usize {
        self.batch * self.rows[1] * self.columns()
    }

    /// Elements of all keys that they list.
    pub(crate) fn list_elements(&self) -> usize {
        self.batch * self.seq[0] * self.listed.unwrap_or(0)
    }

    /// Elements of queries and of keys.
    pub(crate) fn inputs(&self) -> [usize; 2] {
        [0, 1].map(|at| self.batch * self.heads[at] * self.seq[at] * self.width)
    }

    /// Elements of weights, or of sums of exponentials.
    pub(crate) fn row_elements(&self) -> usize {
        self.batch * self.heads[0] * self.seq[0]
    }

    pub(crate) fn launch(&self) -> SizesLaunch {
        let [start, rows] = self.rows;
        let [seq_q, seq_kv] = self.seq;
        SizesLaunch::new(
            self.batch,
            self.heads[0],
            self.heads[1],
            seq_q,
            seq_kv,
            start,
            rows,
            self.columns(),
        )
    }
}

/// How cubes share a gradient.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct SharedGradient {
    /// Tiles of a query that lists keys, or of a batch entry,
    pub row_tiles: usize,
    /// and of all.
    pub tiles: usize,
    /// Cubes that share a mainloop.
    pub parts: usize,
    /// Of the gradient.
    pub factor: f32,
}

/// [`PairSizes`] in a kernel.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Sizes {
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub seq_q: usize,
    pub seq_kv: usize,
    pub start: usize,
    pub rows: usize,
    pub columns: usize,
}

#[cube]
impl Sizes {
    /// The position of a query, by its place among those that are computed.
    pub fn position(&self, row: usize) -> usize {
        self.start + row + self.seq_kv - self.seq_q
    }
}

/// The key of a column of a query: the column itself, or what is listed there, which is none if it is below 0.
#[cube]
pub(crate) fn key_of(
    keys: &ComptimeOption<Box<[i32]>>,
    entry: usize,
    row: usize,
    column: usize,
    s: &Sizes,
    #[comptime] is_listed: bool,
) -> i32 {
    if comptime!(is_listed) {
        let keys = keys.clone().unwrap();
        keys[(entry * s.seq_q + s.start + row) * s.columns + column]
    } else {
        column as i32
    }
}

/// Keys in bytes, for kernels that take them.
#[derive(Clone, Debug)]
pub struct KeyBytes {
    /// `[batch, seq_kv, width]`
    pub(crate) numbers: Handle,
    /// What elements of a key are multiplied by, `[batch, seq_kv]`.
    pub(crate) scales: Handle,
}

/// Contiguous tensors of a call.
#[derive(Clone, Copy, Debug)]
pub struct PairInputs<'a> {
    /// Of q and k: f32, f16 or bf16.
    pub element: ElemType,
    /// `[batch, heads, seq_q, width]`
    pub q: &'a Handle,
    /// `[batch, kv_heads, seq_kv, width]`
    pub k: &'a Handle,
    /// Of each query and head a number, f32 `[batch, heads, seq_q]`: an indexer's weights, or attention's lse.
    pub of_rows: &'a Handle,
    /// i32 `[batch, seq_q, listed]`, −1 behind the last, if keys are listed.
    pub keys: Option<&'a Handle>,
    /// The keys in bytes, where queries and keys are what [`round_rows`](crate::kernels::indexer::round_rows) made and a kernel takes them so.
    pub bytes: Option<&'a KeyBytes>,
}

impl PairInputs<'_> {
    /// Elements of a load.
    pub(crate) fn vector(&self, client: &Client, width: usize) -> usize {
        vector(client, self.element, width, [self.q, self.k])
    }
}

/// Elements of a load of contiguous rows of such a width.
pub(crate) fn vector(
    client: &Client,
    element: ElemType,
    width: usize,
    buffers: [&Handle; 2],
) -> usize {
    let most = client.properties().hardware.max_vector_size.clamp(1, 4);
    let [first, second] = buffers.map(|of| of.offset_start.unwrap_or(0) as usize / element.size());
    let fits = |vector: &usize| {
        let divides = |number: usize| number.is_multiple_of(*vector);
        *vector <= most && [width, first, second].into_iter().all(divides)
    };
    [4, 2, 1].into_iter().find(fits).unwrap_or(1)
}

/// That a device has cubes of so many units, and elements of a type.
pub(crate) fn check_device(
    client: &Client,
    element: ElemType,
    units: usize,
    what: &'static str,
) -> Result<(), KernelError> {
    let properties = client.properties();
    let hardware = &properties.hardware;
    let most = (hardware.max_units_per_cube as usize).min(hardware.max_cube_dim.0 as usize);
    if most < units {
        return Err(KernelError::limit(what, most as u32, units));
    }
    match properties.supports_type(element) {
        true => Ok(()),
        false => Err(KernelError::Dtype {
            dtype: format!("{element:?}"),
        }),
    }
}

/// That a device runs these kernels for elements of a type and such sizes.
///
/// # Errors
/// [`KernelError`] if its cubes are too small, it lacks the type, queries are wider than [`MOST_WIDTH`], or there are more numbers than kernels count.
pub fn check(client: &Client, element: ElemType, sizes: &PairSizes) -> Result<(), KernelError> {
    let units = ACROSS * ACROSS;
    check_device(client, element, units, "units of a cube that scores keys")?;
    if sizes.width > MOST_WIDTH {
        let what = "numbers of a query";
        return Err(KernelError::limit(what, MOST_WIDTH as u32, sizes.width));
    }
    // Of what the gradients hold at once.
    let fours = 2 * SIDE * (DEPTH + 1) + SIDE * (ACROSS + 1);
    let available = client.properties().hardware.max_shared_memory_size;
    let bytes = 16 * fours;
    if bytes > available {
        let what = "bytes of shared memory";
        return Err(KernelError::limit(what, available as u32, bytes));
    }
    let [q, k] = sizes.inputs();
    let largest = [q, k, sizes.elements(), sizes.list_elements()];
    let largest = largest.into_iter().max().unwrap_or(0);
    match i32::try_from(largest) {
        Ok(_) => Ok(()),
        Err(_) => {
            let what = "numbers of a tensor that keys are scored by";
            Err(KernelError::limit(what, i32::MAX as u32, largest))
        }
    }
}

/// What is added.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PairSum {
    /// `factor · Σ w · relu(q · k)`, and the highest number for so many keys up to a query's own; also of later keys, if `all` are wanted: otherwise their numbers
    /// say nothing, or are not written.
    Scores {
        /// What sums are multiplied by.
        factor: f64,
        /// Keys up to a query's own that have no score.
        near: usize,
        /// Whether later keys count.
        all: bool,
    },
    /// `Σ exp(scale · q · k − lse) / heads`, and 0 for keys behind a query's position.
    Weights {
        /// What products are multiplied by.
        scale: f64,
    },
}

/// What sums meet in the end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epilogue {
    /// What scores are multiplied by, or products.
    pub factor: f64,
    /// The number of near keys.
    pub highest: f32,
    pub near: usize,
}

impl Epilogue {
    pub fn new(sizes: &PairSizes, sum: &PairSum) -> Self {
        let (factor, near) = match sum {
            PairSum::Scores { factor, near, .. } => (*factor, *near),
            PairSum::Weights { scale } => (*scale, 0),
        };
        // No key is nearer than the one after the last.
        let near = near.min(sizes.seq[1]);
        let highest = match near {
            0 => 0.0,
            _ => f32::INFINITY,
        };
        Self {
            factor,
            highest,
            near,
        }
    }

    /// As kernels have it.
    pub(crate) fn ending(&self, is_weights: bool) -> EndingLaunch {
        let factor = match is_weights {
            true => self.factor * std::f64::consts::LOG2_E,
            false => self.factor,
        };
        EndingLaunch::new(factor as f32, self.highest, self.near)
    }
}

/// What becomes of sums.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Ending {
    /// What scores are multiplied by; or products, of an exponential to base 2.
    pub factor: f32,
    pub highest: f32,
    pub near: usize,
}

/// What a head gives a pair. What a row has of lse is in powers of 2 here.
#[cube]
pub(crate) fn term(
    product: f32,
    of_row: f32,
    ending: &Ending,
    #[comptime] is_weights: bool,
) -> f32 {
    if comptime!(is_weights) {
        exp2(product * ending.factor - of_row)
    } else {
        of_row * max(product, 0.0f32)
    }
}

/// The number of a pair whose heads give `sum`.
#[cube]
pub(crate) fn finished(
    sum: f32,
    key: i32,
    position: usize,
    heads: usize,
    ending: &Ending,
    #[comptime] is_weights: bool,
) -> f32 {
    if comptime!(is_weights) {
        let is_seen = key <= position as i32;
        select(is_seen, sum / f32::cast_from(heads), 0.0f32)
    } else {
        let near = ending.near;
        let is_near = near > 0 && key + near as i32 > position as i32;
        select(is_near, ending.highest, sum * ending.factor)
    }
}
