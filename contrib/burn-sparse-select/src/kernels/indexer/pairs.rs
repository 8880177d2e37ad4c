//! Inputs of a call: pairs of queries and keys, the sums over heads, and their epilogue.

use crate::kernels::indexer::rows::{ACROSS, DEPTH, SIDE};
use blocksparse_cubecl::arch::ptx::exp2;
use blocksparse_cubecl::prelude::*;

/// Maximum number of elements of a query or a key.
pub const MOST_WIDTH: usize = 256;

/// Sizes of queries with several heads, of which a range is computed at a time, and of keys. The last query is at the position of the last key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairSizes {
    pub batch: usize,
    /// Number of heads of queries and of keys; the latter divides the former.
    pub heads: [usize; 2],
    /// Number of queries and keys.
    pub seq: [usize; 2],
    /// Number of elements of a query or a key.
    pub width: usize,
    /// First computed query and number of computed queries.
    pub rows: [usize; 2],
    /// Number of keys that a query lists, if keys are listed.
    pub listed: Option<usize>,
    /// Number of keys with entries, from the first on, without lists. Sums need none for keys that no query sees; gradients need all.
    pub keys: usize,
}

impl PairSizes {
    /// Creates the sizes of queries `[batch, heads, seq_q, width]` and keys `[batch, kv_heads, seq_kv, width]`.
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

    /// Returns the number of entries of a query: one per key with an entry, or per listed key.
    pub fn columns(&self) -> usize {
        self.listed.unwrap_or(self.keys)
    }

    /// Returns the number of entries of all computed queries.
    pub fn elements(&self) -> usize {
        self.batch * self.rows[1] * self.columns()
    }

    /// Returns the number of elements of all lists.
    pub(crate) fn list_elements(&self) -> usize {
        self.batch * self.seq[0] * self.listed.unwrap_or(0)
    }

    /// Returns the number of elements of queries and of keys.
    pub(crate) fn inputs(&self) -> [usize; 2] {
        [0, 1].map(|at| self.batch * self.heads[at] * self.seq[at] * self.width)
    }

    /// Returns the number of elements of weights or of lse.
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

/// Distribution of a gradient over cubes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct SharedGradient {
    /// Number of tiles of a listing query or of a batch entry.
    pub row_tiles: usize,
    /// Number of all tiles.
    pub tiles: usize,
    /// Number of cubes that split a mainloop.
    pub parts: usize,
    /// Factor of the gradient.
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
    /// Returns the position of the `row`-th computed query.
    pub fn position(&self, row: usize) -> usize {
        self.start + row + self.seq_kv - self.seq_q
    }
}

/// Returns the key of a query's column: the column itself, or the listed key, which is absent if negative.
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

/// Keys in fp8, for kernels that read them.
#[derive(Clone, Debug)]
pub struct KeyBytes {
    /// `[batch, seq_kv, width]`
    pub(crate) numbers: Handle,
    /// Factors of the elements of each key, `[batch, seq_kv]`.
    pub(crate) scales: Handle,
}

/// Contiguous tensors of a call.
#[derive(Clone, Copy, Debug)]
pub struct PairInputs<'a> {
    /// Type of q and k: f32, f16 or bf16.
    pub element: ElemType,
    /// `[batch, heads, seq_q, width]`
    pub q: &'a Handle,
    /// `[batch, kv_heads, seq_kv, width]`
    pub k: &'a Handle,
    /// Number per query and head, f32 `[batch, heads, seq_q]`: an indexer's weights, or attention's lse.
    pub of_rows: &'a Handle,
    /// i32 `[batch, seq_q, listed]`, −1 after the last, if keys are listed.
    pub keys: Option<&'a Handle>,
    /// Keys in fp8, if queries and keys come from [`round_rows`](crate::kernels::indexer::round_rows) and a kernel reads them in this form.
    pub bytes: Option<&'a KeyBytes>,
}

impl PairInputs<'_> {
    /// Returns the number of elements of a vector load.
    pub(crate) fn vector(&self, client: &Client, width: usize) -> usize {
        vector(client, self.element, width, [self.q, self.k])
    }
}

/// Returns the number of elements of a vector load of contiguous rows of this width.
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

/// Checks that a device has cubes of `units` units, and the element type.
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

/// Checks that a device runs these kernels for this element type and these sizes.
///
/// # Errors
/// [`KernelError`] if its cubes are too small, it lacks the type, queries are wider than [`MOST_WIDTH`], or kernels cannot index the elements.
pub fn check(client: &Client, element: ElemType, sizes: &PairSizes) -> Result<(), KernelError> {
    let units = ACROSS * ACROSS;
    check_device(client, element, units, "units of a cube that scores keys")?;
    if sizes.width > MOST_WIDTH {
        let what = "numbers of a query";
        return Err(KernelError::limit(what, MOST_WIDTH as u32, sizes.width));
    }
    // Shared memory of the gradient kernels, in vectors of four.
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

/// Kind of sum over heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PairSum {
    /// `factor · Σ w · relu(q · k)`, and the highest number for the last `near` keys up to a query's own. Entries of later keys are only computed if `all` is
    /// true; otherwise they are unspecified or not written.
    Scores {
        /// Factor of the sums.
        factor: f64,
        /// Number of keys up to a query's own that get the highest number instead of a score.
        near: usize,
        /// True to include later keys.
        all: bool,
    },
    /// `Σ exp(scale · q · k − lse) / heads`, and 0 for keys after a query's position.
    Weights {
        /// Factor of the products.
        scale: f64,
    },
}

/// Parameters of the epilogue of sums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epilogue {
    /// Factor of scores, or of products.
    pub factor: f64,
    /// Number that near keys get.
    pub highest: f32,
    pub near: usize,
}

impl Epilogue {
    pub fn new(sizes: &PairSizes, sum: &PairSum) -> Self {
        let (factor, near) = match sum {
            PairSum::Scores { factor, near, .. } => (*factor, *near),
            PairSum::Weights { scale } => (*scale, 0),
        };
        // Near keys are at most all keys.
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

    /// Returns the parameters as a launch argument.
    pub(crate) fn ending(&self, is_weights: bool) -> EndingLaunch {
        let factor = match is_weights {
            true => self.factor * std::f64::consts::LOG2_E,
            false => self.factor,
        };
        EndingLaunch::new(factor as f32, self.highest, self.near)
    }
}

/// Parameters of the epilogue of sums, in a kernel.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Ending {
    /// Factor of scores, or of products in a base-2 exponential.
    pub factor: f32,
    pub highest: f32,
    pub near: usize,
}

/// Returns the term of a head for a pair. For weights, `of_row` is a base-2 lse.
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

/// Returns the entry of a pair from the sum over heads.
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
