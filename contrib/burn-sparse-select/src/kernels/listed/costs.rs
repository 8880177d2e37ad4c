//! What the ways of a call over lists of single keys should take.

use crate::kernels::listed::request::ListedRequest;
use crate::kernels::listed::warpgroups;
use blocksparse_cubecl::on_device::{KEYS_OF_WORD, most_of_neighbours};
use blocksparse_cubecl::tuning::{ListedWay, Tuning};

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
        match said() {
            Some(ListedWay::Words) => Self::Words,
            Some(ListedWay::Records) => Self::Records,
            _ if costs.records < costs.words => Self::Records,
            _ => Self::Words,
        }
    }
}

/// What `BLOCKSPARSE_LISTED` says.
pub fn said() -> Option<ListedWay> {
    Tuning::or_default().listed
}

/// Rows of neighbours that walk a list together.
const NEIGHBOUR_ROWS: f64 = 128.0;

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
    /// Of neighbours that walk lists together, where they can, forward and backward.
    pub neighbours: [f64; 2],
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
    /// Of neighbours, pairs that are not listed among them.
    pub const NEIGHBOURS: f64 = 420e12;
    /// Products of the gradients by keys, of which whole words of keys are made,
    pub const WORDS: f64 = 150e12;
    /// and of those of records.
    pub const RECORDS: f64 = 170e12;
    /// Products in tiles, forward and backward.
    pub const TILES: [f64; 2] = [450e12, 350e12];
    /// Bytes of bits and masks, which are made for every call.
    pub const MASKS: f64 = 1.5e12;
    /// What else is launched around tiles, words, records and unions, in seconds.
    pub const AROUND: [f64; 4] = [1.5e-4, 3e-4, 4e-4, 1e-4];
    /// Bytes of lists that are united.
    pub const UNIONS: f64 = 2e12;
}

/// Keys that so many neighbours list, of `keys` that there are: each keeps a share of those of the one before, a random list's at least, and others are random.
fn united_things(request: &ListedRequest, own: f64, keys: f64, together: usize) -> f64 {
    let of_list = own / keys.max(1.0);
    let new = 1.0 - f64::from(request.overlap) / 100.0;
    // How often a key that one of them does not list is on the next one's.
    let begins = of_list * (new / (1.0 - of_list).max(1e-9)).min(1.0);
    keys * (1.0 - (1.0 - of_list) * (1.0 - begins).powi(together as i32 - 1))
}

/// Numbers of all lists: keys, or blocks.
struct Counts {
    /// What queries see,
    seen: f64,
    /// what they list,
    listed: f64,
    /// words that have something of it,
    of_words: f64,
    /// and what neighbours list that walk a list together.
    united: f64,
}

impl Counts {
    /// Of so many neighbours.
    fn new(request: &ListedRequest, together: usize) -> Self {
        // Of some queries, as far apart as each other.
        let step = (request.seq_q / SAMPLE).max(1);
        let (mut seen, mut listed, mut of_words, mut united) = (0.0, 0.0, 0.0, 0.0);
        for query in (step / 2..request.seq_q).step_by(step) {
            let things = (request.seen(query) / request.block) as f64;
            let own = things.min(request.most as f64);
            let words = (things / KEYS_OF_WORD as f64).ceil();
            united += united_things(request, own, things, together) / together as f64;
            seen += things;
            listed += own;
            // A word has no key of random ones, of which it has its share.
            let none = (1.0 - own / things.max(1.0)).powi(KEYS_OF_WORD as i32);
            of_words += words * (1.0 - none);
        }
        let lists = (request.batch * request.kv_heads * step) as f64;
        Self {
            seen: seen * lists,
            listed: listed * lists,
            of_words: of_words * lists,
            united: united * lists,
        }
    }
}

/// Both products, forward, of neighbours that list so many keys together.
fn walk_of_unions(united: f64, width: f64) -> f64 {
    united * NEIGHBOUR_ROWS * 2.0 * width / speeds::NEIGHBOURS
}

/// Whether neighbours should walk the union of their lists of blocks, forward.
pub fn are_faster_together(request: &ListedRequest) -> bool {
    let Some(together) = warpgroups::neighbours(request) else {
        return false;
    };
    let Counts { listed, united, .. } = Counts::new(request, together);
    let [listed, united] = [listed, united].map(|blocks| blocks * request.block as f64);
    let width = (request.head_dim + request.value_dim) as f64;
    let filled = 2.0 * request.rows().max(16) as f64 * width;
    let alone = (listed * 2.0 * width / speeds::BYTES).max(listed * filled / speeds::WALK);
    let [.., unions] = speeds::AROUND;
    walk_of_unions(united, width) + unions < alone
}

impl Costs {
    /// Of a call over lists of single keys.
    pub fn new(request: &ListedRequest) -> Self {
        let together = warpgroups::neighbours(request).unwrap_or(1);
        let Counts {
            seen,
            listed,
            of_words,
            united,
        } = Counts::new(request, together);
        let rows = request.rows() as f64;
        let width = (request.head_dim + request.value_dim) as f64;
        // Both products of a pair's rows, forward.
        let pair = 2.0 * rows * width;
        let filled = 2.0 * rows.max(16.0) * width;
        let bytes = listed * 2.0 * width;
        let read = bytes / speeds::BYTES;
        let walk = |products: f64, speed: f64| read.max(listed * filled * products / speed);
        let written = bytes / speeds::MEMORY;
        // Sums are read and written for the records of some lists at a time.
        let summed = |lists: usize, at_a_time: Option<usize>| {
            let times = lists.div_ceil(at_a_time.unwrap_or(1)) as f64;
            times * request.all_keys() as f64 * width * 8.0 / speeds::MEMORY
        };
        let summed_queries = summed(request.seq_q, request.queries_of_records());
        let masks = seen / 8.0 * 4.0 / speeds::MASKS;
        let [around, words, records, unions] = speeds::AROUND;
        let tiles = |products: f64, speed: f64| seen * pair * products / speed + masks + around;
        let [walks, of_records] = match warpgroups::filled(request) {
            Some(_) => [speeds::WARPGROUPS; 2],
            None => [speeds::WALK, speeds::RECORDS],
        };
        // Every query's list is read, and their union written.
        let unions = (listed + 2.0 * united) * 4.0 / speeds::UNIONS + unions;
        let of_union = walk_of_unions(united, width);
        let of_groups = united * 2.0 * width / speeds::MEMORY;
        let of_groups = (2.0 * of_union).max(of_groups) + of_groups;
        let groups = request.seq_q.div_ceil(together);
        let most = most_of_neighbours(&request.list_sizes(), together);
        let summed_groups = summed(groups, request.lists_of_records(groups, most));
        let by_neighbours = 1.5 * of_union + of_groups + summed_groups + around + unions;
        Self {
            neighbours: [of_union + unions, by_neighbours],
            forward: walk(1.0, walks),
            queries: walk(1.5, walks),
            words: of_words * KEYS_OF_WORD as f64 * pair * 2.0 / speeds::WORDS + words,
            records: walk(2.0, of_records).max(written) + written + summed_queries + records,
            tiles: [tiles(1.0, speeds::TILES[0]), tiles(2.5, speeds::TILES[1])],
        }
    }

    /// Walks of the backward pass.
    pub fn backward(&self) -> f64 {
        self.queries + self.words.min(self.records)
    }
}
