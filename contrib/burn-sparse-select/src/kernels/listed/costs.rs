//! Estimated seconds of each strategy of a call, from rates measured on one H100 with lists of random keys and widths of 128.

use crate::kernels::listed::request::ListedRequest;
use crate::kernels::listed::warpgroups;
use blocksparse_cubecl::on_device::most_of_neighbours;

/// Bytes per second of listed keys and values from the L2 cache, and of memory.
const CACHE: f64 = 4.8e12;
const MEMORY: f64 = 2.0e12;

/// Operations per second of a mainloop on mma.sync, on wgmma, and of groups of adjacent queries on wgmma, including pairs that are not listed.
const MAINLOOP: f64 = 295e12;
const WARPGROUPS: f64 = 460e12;
const NEIGHBOURS: f64 = 420e12;

/// Operations per second of records on mma.sync.
const RECORDS: f64 = 170e12;

/// Operations per second in tiles, forward and backward, on wgmma and on mma.sync.
const TILES: [[f64; 2]; 2] = [[450e12, 350e12], [300e12, 200e12]];

/// By blocks: bytes per second of memory for rows of queries and outputs, and operations per second.
const BY_BLOCK: [f64; 2] = [3.0e12, 400e12];

/// Seconds of the other launches of tiles, records and unions.
const AROUND: [f64; 3] = [1.5e-4, 4e-4, 1e-4];

/// Number of rows of a group of adjacent queries that share a list.
const NEIGHBOUR_ROWS: f64 = 128.0;

/// Number of queries to sample, at least, if there are as many.
const SAMPLE: usize = 128;

/// Estimated seconds, forward and backward.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// Each query attends to its own list.
    pub alone: [f64; 2],
    /// Groups of adjacent queries share the union of their lists, where possible.
    pub together: [f64; 2],
    /// Masked tiles.
    pub tiles: [f64; 2],
    /// Forward by blocks. The dQ pass costs half as much again, as for mainloops.
    pub by_block: f64,
}

/// Numbers of keys over all lists.
struct Counts {
    /// Keys that queries see.
    seen: f64,
    /// Keys that queries list.
    listed: f64,
    /// Keys of the unions, summed over groups.
    united: f64,
}

impl Counts {
    /// Estimates the counts for groups of `together` queries.
    fn new(request: &ListedRequest, together: usize) -> Self {
        // Samples queries at equal distances.
        let step = (request.seq_q / SAMPLE).max(1);
        let (mut seen, mut listed, mut united) = (0.0, 0.0, 0.0);
        for query in (step / 2..request.seq_q).step_by(step) {
            let things = (request.seen(query) / request.block) as f64;
            let own = things.min(request.most as f64);
            united += united_things(request, own, things, together) / together as f64;
            seen += things;
            listed += own;
        }
        let keys = (request.batch * request.kv_heads * step * request.block) as f64;
        Self {
            seen: seen * keys,
            listed: listed * keys,
            united: united * keys,
        }
    }
}

/// Estimates the size of the union of `together` adjacent lists, of `things` visible keys or blocks. Each list keeps a share of the one before, at least that
/// of random lists; its other entries are random.
fn united_things(request: &ListedRequest, own: f64, things: f64, together: usize) -> f64 {
    let of_list = own / things.max(1.0);
    let new = 1.0 - f64::from(request.overlap) / 100.0;
    // Probability that a key that is not on one list is on the next.
    let begins = of_list * (new / (1.0 - of_list).max(1e-9)).min(1.0);
    things * (1.0 - (1.0 - of_list) * (1.0 - begins).powi(together as i32 - 1))
}

impl Costs {
    /// Estimates the costs on a device with or without wgmma.
    pub fn new(request: &ListedRequest, wgmma: bool) -> Self {
        let group = warpgroups::neighbours(request).unwrap_or(1);
        let Counts {
            seen,
            listed,
            united,
        } = Counts::new(request, group);
        let rows = request.rows() as f64;
        let width = (request.head_dim + request.value_dim) as f64;
        let [around_tiles, around_records, around_unions] = AROUND;
        // Bytes of a key and its value, and operations of both forward matmuls for a key.
        let (bytes, filled) = (2.0 * width, 2.0 * rows.max(16.0) * width);
        let [mainloops, of_records] = match wgmma && warpgroups::filled(request).is_some() {
            true => [WARPGROUPS; 2],
            false => [MAINLOOP, RECORDS],
        };
        let mainloop = |products: f64, rate: f64| {
            let read = listed * bytes / CACHE;
            read.max(listed * filled * products / rate)
        };
        // Sums are read and written once per chunk of lists with records.
        let summed = |lists: usize, most: usize| {
            let at_a_time = request.lists_of_records(lists, most).unwrap_or(1);
            let times = lists.div_ceil(at_a_time) as f64;
            times * request.all_keys() as f64 * width * 8.0 / MEMORY
        };
        let written = listed * bytes / MEMORY;
        let summed_alone = summed(request.seq_q, request.most);
        let records = mainloop(2.0, of_records).max(written) + written + summed_alone;
        // Every list is read, and unions are written.
        let numbers = (listed + 2.0 * united) / request.block as f64;
        let unions = numbers * 4.0 / MEMORY + around_unions;
        let of_unions = united * NEIGHBOUR_ROWS * bytes / NEIGHBOURS;
        let most = most_of_neighbours(&request.list_sizes(), group);
        let written = united * bytes / MEMORY;
        let summed_together = summed(request.seq_q.div_ceil(group), most);
        let by_unions = (2.0 * of_unions).max(written) + written + summed_together;
        // Bits and masks are built in every call.
        let masks = seen / 8.0 * 5.3 / MEMORY + around_tiles;
        let pairs = seen * 2.0 * rows * width;
        // Each place of a query reads a row of q, and writes and reads a part of the output.
        let places = (request.batch * request.kv_heads * request.tiles * request.tile) as f64;
        let [memory, operations] = BY_BLOCK;
        let moved = places * rows * 2.0 * (request.head_dim + 2 * request.value_dim) as f64;
        let multiplied = places * rows * 2.0 * width * request.block as f64;
        let [forward, backward] = TILES[usize::from(!wgmma)];
        Self {
            alone: [
                mainloop(1.0, mainloops),
                mainloop(1.5, mainloops) + records + around_records,
            ],
            together: [
                of_unions + unions,
                1.5 * of_unions + by_unions + around_tiles + unions,
            ],
            tiles: [pairs / forward + masks, 2.5 * pairs / backward + masks],
            by_block: (moved / memory).max(multiplied / operations) + around_unions,
        }
    }
}
