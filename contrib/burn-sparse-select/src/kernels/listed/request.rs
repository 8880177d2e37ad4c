//! Parameters of a call over lists of queries, and which calls kernels serve on which devices.

use crate::kernels::listed::keys::ListShape;
use blocksparse_cubecl::arch::sm80::Element;
use blocksparse_cubecl::args::{ScoreOptions, load_width};
use blocksparse_cubecl::call::{OutputGrads, Outputs, check_ampere};
use blocksparse_cubecl::mma::tile::Tile;
use blocksparse_cubecl::on_device::KeyListSizes;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::stats;
use blocksparse_cubecl::stats::{Known, Wanted};
use blocksparse_cubecl::tensor::{TOO_LARGE, half_of, is_u32};
use blocksparse_cubecl::tuning::Tuning;

/// Maximum number of parts of a block's list, and least number of steps of a part. With these, the list of a block that all queries selected does not dominate
/// the launch.
const MOST_PARTS: usize = 4;
const LEAST_STEPS: usize = 512;

/// Sizes and options of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ListedRequest {
    pub batch: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of KV heads, which have one list each.
    pub kv_heads: usize,
    /// Number of queries.
    pub seq_q: usize,
    /// Number of keys.
    pub seq_kv: usize,
    /// Width of queries and keys.
    pub head_dim: usize,
    /// Width of values.
    pub value_dim: usize,
    /// Type of all tensors except lse.
    pub dtype: ElemType,
    /// Number of adjacent keys per list entry, 1 for single keys.
    pub block: usize,
    /// Number of entries of a list.
    pub most: usize,
    /// Number of places of a tile, for lists by blocks.
    pub tile: usize,
    /// Number of tiles of a list by blocks.
    pub tiles: usize,
    /// True if queries see no keys after their own position. The last query is at the position of the last key.
    pub causal: bool,
    /// Expected overlap of the lists of adjacent queries in percent, used to estimate costs.
    pub overlap: u8,
}

impl ListedRequest {
    /// Creates the request of a call with lists of `most` blocks, and lists by blocks in tiles.
    pub fn new(
        [batch, heads, kv_heads]: [usize; 3],
        [seq_q, seq_kv]: [usize; 2],
        [head_dim, value_dim]: [usize; 2],
        dtype: ElemType,
        [block, most]: [usize; 2],
        [tile, tiles]: [usize; 2],
    ) -> Self {
        Self {
            batch,
            heads,
            kv_heads,
            seq_q,
            seq_kv,
            head_dim,
            value_dim,
            dtype,
            block,
            most,
            tile,
            tiles,
            causal: true,
            overlap: 0,
        }
    }

    /// Creates the request of a call with lists of single keys. With `causal` a query sees no keys after its own position, and the last query is at the
    /// position of the last key.
    pub fn of_keys(
        heads: [usize; 3],
        lengths: [usize; 2],
        widths: [usize; 2],
        dtype: ElemType,
        most: usize,
        causal: bool,
    ) -> Self {
        Self {
            causal,
            ..Self::new(heads, lengths, widths, dtype, [1, most], [1; 2])
        }
    }

    /// Sets the expected overlap of the lists of adjacent queries, from 0 to 1.
    pub fn with_overlap(self, share: f64) -> Self {
        Self {
            overlap: (share.clamp(0.0, 1.0) * 100.0).round() as u8,
            ..self
        }
    }

    /// Returns the number of keys that a query sees, listed or not.
    pub(crate) fn seen(&self, query: usize) -> usize {
        let &Self { seq_q, seq_kv, .. } = self;
        match self.causal {
            true => (query + 1 + seq_kv).saturating_sub(seq_q).min(seq_kv),
            false => seq_kv,
        }
    }

    /// Returns whether lists are of single keys.
    pub(crate) fn is_of_keys(&self) -> bool {
        self.block == 1
    }

    /// Returns the sizes of the lists, whose entries are keys or blocks.
    pub(crate) fn list_sizes(&self) -> KeyListSizes {
        let lists = self.batch * self.kv_heads;
        let things = self.seq_kv.div_ceil(self.block);
        KeyListSizes::new(lists, [self.seq_q, things], self.most)
    }

    /// Describes the entries of a list in a plan's text.
    pub(crate) fn listed_things(&self) -> String {
        match self.is_of_keys() {
            true => format!("{} keys", self.most),
            false => format!("{} blocks of {} keys", self.most, self.block),
        }
    }

    /// Returns the number of heads that share a list.
    pub fn rows(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns the number of query rows of all heads.
    pub(crate) fn all_rows(&self) -> usize {
        self.batch * self.heads * self.seq_q
    }

    /// Returns the number of key rows of all heads.
    pub(crate) fn all_keys(&self) -> usize {
        self.batch * self.kv_heads * self.seq_kv
    }

    /// Returns the number of entries of all lists.
    pub(crate) fn listed(&self) -> usize {
        self.batch * self.kv_heads * self.seq_q * self.most
    }

    /// Returns the sizes of lists by blocks. Long lists of a block are split, down to a quarter of all queries if very many selected it.
    pub(crate) fn list_shape(&self, keys: &Tile) -> ListShape {
        let steps = self.seq_q * self.rows() / keys.cols;
        ListShape {
            rows: self.rows(),
            block: self.block,
            tile: self.tile,
            parts: (steps / LEAST_STEPS).clamp(1, MOST_PARTS),
            least: LEAST_STEPS,
        }
    }

    /// Returns the number of elements of the partial gradients of keys and values, at least 1.
    pub(crate) fn partial(&self, keys: &Tile) -> usize {
        match self.list_shape(keys).parts {
            1 => 1,
            parts => parts * self.all_keys() * (self.head_dim + self.value_dim),
        }
    }

    /// Returns the number of lists per KV head, of `most` entries, whose records are in memory at a time: a multiple of 32 or all. `None` if those of 32 lists
    /// are too large.
    pub(crate) fn lists_of_records(&self, lists: usize, most: usize) -> Option<usize> {
        /// Upper bound of the bytes of the records of 32 lists, the smallest chunk.
        const MOST: usize = 1 << 33;
        let of_record = (self.head_dim + self.value_dim) * 2;
        let of_list = self.batch * self.kv_heads * most * of_record;
        if of_list * 32 > MOST {
            return None;
        }
        let fit = Tuning::or_default().records.saturating_mul(1 << 20) / of_list.max(1);
        let fit = fit.max(32) / 32 * 32;
        Some(fit.min(lists))
    }
}

/// Largest widths of queries and keys, and of values.
const WIDEST: [usize; 2] = [192, 128];

/// Maximum number of rows of a query.
const MOST_ROWS: usize = 128;

/// Returns the type of the matmuls' operands, or the reason why the call is not served.
pub fn check(
    properties: &DeviceProperties,
    request: &ListedRequest,
) -> Result<Element, &'static str> {
    check_ampere(properties)?;
    if Tuning::or_reason()?.tier.is_simt() {
        return Err("BLOCKSPARSE_TIER says simt");
    }
    let element = Element::Half(half_of(request.dtype)?);
    let rows = request.rows();
    if rows > MOST_ROWS || rows == 0 {
        return Err("more than 128 heads share a list");
    }
    let widths = [request.head_dim, request.value_dim].into_iter();
    let is_served =
        |(width, widest): (usize, usize)| width.is_multiple_of(16) && (1..=widest).contains(&width);
    if !widths.zip(WIDEST).all(is_served) {
        return Err("head_dim is no multiple of 16 up to 192, or value_dim of 16 up to 128");
    }
    if !(matches!(request.block, 1 | 16 | 32) || request.block.is_multiple_of(64)) {
        return Err("blocks are not of 1, 16, 32, 64 or a multiple of 64 keys");
    }
    if request.is_of_keys() && i32::try_from(request.listed()).is_err() {
        return Err(TOO_LARGE);
    }
    let widest = request.head_dim.max(request.value_dim);
    let numbers = [
        request.all_rows() * widest.max(2),
        request.all_keys() * widest,
        request.listed(),
        request.batch * request.kv_heads * request.tiles * request.tile,
    ];
    // Pairs of stats per row, and words of everything else.
    match numbers.into_iter().all(is_u32) {
        true => Ok(element),
        false => Err(TOO_LARGE),
    }
}

/// Computes `lse · log2 e` and delta of each query: f32 `[batch · heads, seq_q, 2]`.
pub fn stats_of(
    client: &Client,
    request: &ListedRequest,
    outputs: Outputs,
    grads: OutputGrads,
    scale: f64,
) -> Result<Handle, KernelError> {
    let largest = (request.all_rows() * request.value_dim).max(grads.out.reach());
    let known = Known {
        client,
        batch: request.batch,
        heads: request.heads,
        value_dim: request.value_dim,
        dtypes: [request.dtype, ElemType::Float(FloatKind::F32)],
        outputs,
        grads,
        options: &ScoreOptions::new(scale),
        slopes: None,
        width: load_width(request.dtype, &[("grad_out", grads.out)])?,
        address: address_of(client, largest)?,
    };
    let wanted = Wanted {
        pitch: request.seq_q,
        lse_factor: std::f64::consts::LOG2_E,
        residue: None,
    };
    stats::of_queries(&known, wanted)
}
