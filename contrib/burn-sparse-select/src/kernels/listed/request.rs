//! What a call over lists of queries asks for, and which calls kernels take on which devices.

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

/// Parts of a block's list, and steps of a part: so that the list of a block that all queries chose takes no longer than everything else.
const MOST_PARTS: usize = 4;
const LEAST_STEPS: usize = 512;

/// What a call asks for, apart from the numbers in its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ListedRequest {
    /// Batch entries.
    pub batch: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values, and of lists.
    pub kv_heads: usize,
    /// Queries.
    pub seq_q: usize,
    /// Keys.
    pub seq_kv: usize,
    /// Width of queries and keys.
    pub head_dim: usize,
    /// Width of values.
    pub value_dim: usize,
    /// Type of all tensors but lse.
    pub dtype: ElemType,
    /// Neighbouring keys that a number of a list names, or 1.
    pub block: usize,
    /// Elements of a list.
    pub most: usize,
    /// Places of a tile of the lists of queries by blocks.
    pub tile: usize,
    /// Tiles of such a list.
    pub tiles: usize,
    /// Whether queries see no keys behind their own position. The last query sits at the last key.
    pub causal: bool,
    /// What neighbouring queries' lists have in common, in hundredths, as far as anybody knows: what should be faster depends on it.
    pub overlap: u8,
}

impl ListedRequest {
    /// Of batch entries, heads and heads of keys; queries and keys; widths; lists of `most` numbers of blocks; and lists by blocks in tiles.
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

    /// The same of lists of single keys. With `causal` a query sees none behind its own position, and the last query sits at the last key.
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

    /// The same whose neighbouring queries' lists have so much in common: a share from 0 to 1.
    pub fn with_overlap(self, share: f64) -> Self {
        Self {
            overlap: (share.clamp(0.0, 1.0) * 100.0).round() as u8,
            ..self
        }
    }

    /// Keys that a query sees, listed or not.
    pub(crate) fn seen(&self, query: usize) -> usize {
        let &Self { seq_q, seq_kv, .. } = self;
        match self.causal {
            true => (query + 1 + seq_kv).saturating_sub(seq_q).min(seq_kv),
            false => seq_kv,
        }
    }

    /// Whether lists are of single keys.
    pub(crate) fn is_of_keys(&self) -> bool {
        self.block == 1
    }

    /// Sizes of the lists, of whose numbers each names a key or a block.
    pub(crate) fn list_sizes(&self) -> KeyListSizes {
        let lists = self.batch * self.kv_heads;
        let things = self.seq_kv.div_ceil(self.block);
        KeyListSizes::new(lists, [self.seq_q, things], self.most)
    }

    /// What a list names, as plans print it.
    pub(crate) fn listed_things(&self) -> String {
        match self.is_of_keys() {
            true => format!("{} keys", self.most),
            false => format!("{} blocks of {} keys", self.most, self.block),
        }
    }

    /// Heads that share a list.
    pub fn rows(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Rows of queries of all heads.
    pub(crate) fn all_rows(&self) -> usize {
        self.batch * self.heads * self.seq_q
    }

    /// Rows of keys of all heads.
    pub(crate) fn all_keys(&self) -> usize {
        self.batch * self.kv_heads * self.seq_kv
    }

    /// Numbers of the lists of all queries.
    pub(crate) fn listed(&self) -> usize {
        self.batch * self.kv_heads * self.seq_q * self.most
    }

    /// A block's list has parts where it is long: of a quarter of all queries where very many chose it.
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

    /// Numbers of the parts of gradients by keys and values, 1 at least.
    pub(crate) fn partial(&self, keys: &Tile) -> usize {
        match self.list_shape(keys).parts {
            1 => 1,
            parts => parts * self.all_keys() * (self.head_dim + self.value_dim),
        }
    }

    /// Lists of a head of keys, of so many numbers, whose records are there at a time: a multiple of 32 or all; `None` if those of 32 are too many.
    pub(crate) fn lists_of_records(&self, lists: usize, most: usize) -> Option<usize> {
        /// Bytes of records of 32 lists, which are there at least.
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

/// The most that queries and keys are wide, and values.
const WIDEST: [usize; 2] = [192, 128];

/// Rows of a query at most.
const MOST_ROWS: usize = 128;

/// What the products' operands are, or why the call is not taken.
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
    // Pairs of a row of stats, and words of everything else.
    match numbers.into_iter().all(is_u32) {
        true => Ok(element),
        false => Err(TOO_LARGE),
    }
}

/// `lse · log2 e` and delta of each query: `[batch · heads, seq_q, 2]`, f32.
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
