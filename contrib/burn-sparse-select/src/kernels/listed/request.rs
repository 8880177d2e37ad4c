//! What a call over lists of queries asks for.

use cubecl::ir::ElemType;

use crate::kernels::listed::keys::ListShape;
use blocksparse_cubecl::mma::tile::Tile;
use blocksparse_cubecl::on_device::{KEYS_OF_WORD, KeyListSizes};
use blocksparse_cubecl::tuning::Tuning;

/// Parts of a block's list, and steps of a part: so that the list of a block that all queries chose takes no longer than everything else.
const MOST_PARTS: usize = 4;
const LEAST_STEPS: usize = 512;

/// Places of a tile of the queries that listed keys of a word.
const KEY_TILE: usize = 32;

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
    /// Numbers of a list.
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
        [batch, heads, kv_heads]: [usize; 3],
        [seq_q, seq_kv]: [usize; 2],
        dims: [usize; 2],
        dtype: ElemType,
        most: usize,
        causal: bool,
    ) -> Self {
        let mut request = Self::new(
            [batch, heads, kv_heads],
            [seq_q, seq_kv],
            dims,
            dtype,
            [1, most],
            [KEY_TILE, 1],
        );
        request.causal = causal;
        let words = seq_kv.div_ceil(KEYS_OF_WORD);
        let entries = request.words_of_lists();
        let tiles = (entries + (KEY_TILE - 1) * words) / KEY_TILE;
        Self {
            tiles: tiles.max(1),
            ..request
        }
    }

    /// The same whose neighbouring queries' lists have so much in common: a share from 0 to 1.
    pub fn with_overlap(self, share: f64) -> Self {
        Self {
            overlap: (share.clamp(0.0, 1.0) * 100.0).round() as u8,
            ..self
        }
    }

    /// Words of keys that the queries of a list are listed by, at most: each by as many as it has keys, or as it sees.
    fn words_of_lists(&self) -> usize {
        let most = self.most;
        if !self.causal {
            return self.seq_q * most.min(self.seq_kv.div_ceil(KEYS_OF_WORD));
        }
        // Of the queries that see 1, 2, … `seen` keys.
        let up_to = |seen: usize| {
            let rising = seen.min(most * KEYS_OF_WORD);
            let (words, rest) = (rising / KEYS_OF_WORD, rising % KEYS_OF_WORD);
            let of_rising = words * (words + 1) / 2 * KEYS_OF_WORD + rest * (words + 1);
            of_rising + (seen - rising) * most
        };
        up_to(self.seq_kv) - up_to(self.seq_kv.saturating_sub(self.seq_q))
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

    /// Neighbouring keys that have a list of queries.
    pub(crate) fn keys_of_list(&self) -> usize {
        match self.is_of_keys() {
            true => KEYS_OF_WORD,
            false => self.block,
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
            block: self.keys_of_list(),
            tile: self.tile,
            masked: self.is_of_keys(),
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

    /// Numbers of a record: what a query's heads give a key, and its value.
    fn record(&self) -> usize {
        self.head_dim + self.value_dim
    }

    /// Queries whose records are there at a time, a multiple of 32 or all; `None` if those of 32 are too many.
    pub(crate) fn queries_of_records(&self) -> Option<usize> {
        self.lists_of_records(self.seq_q, self.most)
    }

    /// The same of as many lists of a head of keys, of so many numbers.
    pub(crate) fn lists_of_records(&self, lists: usize, most: usize) -> Option<usize> {
        /// Bytes of records of 32 lists, which are there at least.
        const MOST: usize = 1 << 31;
        let of_list = self.batch * self.kv_heads * most * self.record() * 2;
        if of_list * 32 > MOST {
            return None;
        }
        let fit = Tuning::or_default().records.saturating_mul(1 << 20) / of_list.max(1);
        let fit = fit.max(32) / 32 * 32;
        Some(fit.min(lists))
    }
}
