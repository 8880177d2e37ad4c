//! What the ways of a call over lists of single keys should take.

use super::request::ListedRequest;
use super::warpgroups;
use crate::kernels::on_device::KEYS_OF_WORD;

/// How the gradients by keys and values are made of lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByKeys {
    /// Neighbouring keys walk the queries that listed one of them.
    Words,
    /// Queries walk their lists, write records of pairs, and those are added up.
    Records,
}

impl ByKeys {
    /// What should be faster, or what `BLOCKSPARSE_LISTED` says.
    pub fn of(request: &ListedRequest) -> Self {
        let costs = Costs::new(request);
        match said().as_deref() {
            Some("words") => Self::Words,
            Some("records") => Self::Records,
            _ if costs.records < costs.words => Self::Records,
            _ => Self::Words,
        }
    }
}

/// What `BLOCKSPARSE_LISTED` says.
pub fn said() -> Option<String> {
    std::env::var("BLOCKSPARSE_LISTED").ok()
}

/// Queries that stand for all, or some more.
const SAMPLE: usize = 128;

/// Estimates, in seconds.
pub struct Costs {
    /// Walks of lists, forward,
    pub forward: f64,
    /// for dQ,
    pub queries: f64,
    /// and for dK and dV, either way.
    pub words: f64,
    pub records: f64,
    /// In tiles, forward and backward.
    pub tiles: [f64; 2],
}

/// What an H100 did, of lists of random keys and widths of 128.
mod speeds {
    /// Bytes of listed keys and values that walks read from the L2 cache.
    pub const BYTES: f64 = 4.8e12;
    /// Bytes of memory.
    pub const MEMORY: f64 = 2.0e12;
    /// Products of walks, forward and for dQ.
    pub const WALK: f64 = 295e12;
    /// And on wgmma, those of records, too.
    pub const WARPGROUPS: f64 = 460e12;
    /// Products of the gradients by keys, of which whole words of keys are made,
    pub const WORDS: f64 = 150e12;
    /// and of those of records.
    pub const RECORDS: f64 = 170e12;
    /// Products in tiles, forward and backward.
    pub const TILES: [f64; 2] = [450e12, 350e12];
    /// Bytes of bits and masks, which are made for every call.
    pub const MASKS: f64 = 1.5e12;
    /// What else is launched around tiles, words and records, in seconds.
    pub const AROUND: [f64; 3] = [1.5e-4, 3e-4, 4e-4];
}

impl Costs {
    /// Of a call.
    pub fn new(request: &ListedRequest) -> Self {
        // Of some queries, as far apart as each other.
        let step = (request.seq_q / SAMPLE).max(1);
        let lists = (request.batch * request.kv_heads * step) as f64;
        let (mut seen, mut listed, mut of_words) = (0.0, 0.0, 0.0);
        for query in (step / 2..request.seq_q).step_by(step) {
            let keys = request.seen(query) as f64;
            let own = keys.min(request.most as f64);
            let words = (keys / KEYS_OF_WORD as f64).ceil();
            seen += keys;
            listed += own;
            // A word has no key of random ones, of which it has its share.
            let none = (1.0 - own / keys.max(1.0)).powi(KEYS_OF_WORD as i32);
            of_words += words * (1.0 - none);
        }
        let [seen, listed, of_words] = [seen, listed, of_words].map(|count| count * lists);
        let rows = request.rows() as f64;
        let width = (request.head_dim + request.value_dim) as f64;
        // Both products of a pair's rows, forward.
        let pair = 2.0 * rows * width;
        let filled = 2.0 * rows.max(16.0) * width;
        let bytes = listed * 2.0 * width;
        let read = bytes / speeds::BYTES;
        let walk = |products: f64, speed: f64| read.max(listed * filled * products / speed);
        let written = bytes / speeds::MEMORY;
        // Sums are read and written for the records of some queries at a time.
        let at_a_time = request.queries_of_records().unwrap_or(1);
        let times = request.seq_q.div_ceil(at_a_time) as f64;
        let summed = times * request.all_keys() as f64 * width * 8.0 / speeds::MEMORY;
        let masks = seen / 8.0 * 4.0 / speeds::MASKS;
        let [around, words, records] = speeds::AROUND;
        let tiles = |products: f64, speed: f64| seen * pair * products / speed + masks + around;
        let [walks, of_records] = match warpgroups::filled(request) {
            Some(_) => [speeds::WARPGROUPS; 2],
            None => [speeds::WALK, speeds::RECORDS],
        };
        Self {
            forward: walk(1.0, walks),
            queries: walk(1.5, walks),
            words: of_words * KEYS_OF_WORD as f64 * pair * 2.0 / speeds::WORDS + words,
            records: walk(2.0, of_records).max(written) + written + summed + records,
            tiles: [tiles(1.0, speeds::TILES[0]), tiles(2.5, speeds::TILES[1])],
        }
    }

    /// Walks of the backward pass.
    pub fn backward(&self) -> f64 {
        self.queries + self.words.min(self.records)
    }
}
