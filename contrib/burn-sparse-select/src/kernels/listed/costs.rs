//! What the ways of a call should take, in seconds, by what one H100 did of lists of random keys and widths of 128.

use crate::kernels::listed::request::ListedRequest;
use crate::kernels::listed::warpgroups;
use blocksparse_cubecl::on_device::most_of_neighbours;

/// Bytes of listed keys and values that mainloops read from the L2 cache, and bytes of memory.
const CACHE: f64 = 4.8e12;
const MEMORY: f64 = 2.0e12;

/// Operations of a mainloop on mma.sync, on wgmma, and of neighbours on wgmma, pairs that are not listed among them.
const MAINLOOP: f64 = 295e12;
const WARPGROUPS: f64 = 460e12;
const NEIGHBOURS: f64 = 420e12;

/// Those of records on mma.sync.
const RECORDS: f64 = 170e12;

/// Those in tiles, forward and backward, on wgmma and on mma.sync.
const TILES: [[f64; 2]; 2] = [[450e12, 350e12], [300e12, 200e12]];

/// Bytes of memory where rows of queries and of outputs come and go by blocks, and operations there.
const BY_BLOCK: [f64; 2] = [3.0e12, 400e12];

/// What else is launched around tiles, records and unions.
const AROUND: [f64; 3] = [1.5e-4, 4e-4, 1e-4];

/// Rows of neighbours that share a list.
const NEIGHBOUR_ROWS: f64 = 128.0;

/// Queries that stand for all, or some more.
const SAMPLE: usize = 128;

/// Forward and backward.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// Of queries that attend to their lists each,
    pub alone: [f64; 2],
    /// of neighbours that share them, where they can,
    pub together: [f64; 2],
    /// and in tiles;
    pub tiles: [f64; 2],
    /// forward where blocks meet the queries that list them. Backward dQ has half as much again of everything, as it has in mainloops.
    pub by_block: f64,
}

/// Keys of all lists.
struct Counts {
    /// That queries see,
    seen: f64,
    /// list,
    listed: f64,
    /// and those of the unions of neighbours.
    united: f64,
}

impl Counts {
    /// Of so many neighbours.
    fn new(request: &ListedRequest, together: usize) -> Self {
        // Of some queries, as far apart as each other.
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

/// Keys or blocks that so many neighbours list, of `things` that there are: each keeps a share of those of the one before, a random list's at least, and others
/// are random.
fn united_things(request: &ListedRequest, own: f64, things: f64, together: usize) -> f64 {
    let of_list = own / things.max(1.0);
    let new = 1.0 - f64::from(request.overlap) / 100.0;
    // How often a key that one of them does not list is on the next one's.
    let begins = of_list * (new / (1.0 - of_list).max(1e-9)).min(1.0);
    things * (1.0 - (1.0 - of_list) * (1.0 - begins).powi(together as i32 - 1))
}

impl Costs {
    /// On a device with wgmma or without.
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
        // Both products of a key's rows, forward; bytes of its key and value.
        let (bytes, filled) = (2.0 * width, 2.0 * rows.max(16.0) * width);
        let [mainloops, of_records] = match wgmma && warpgroups::filled(request).is_some() {
            true => [WARPGROUPS; 2],
            false => [MAINLOOP, RECORDS],
        };
        let mainloop = |products: f64, rate: f64| {
            let read = listed * bytes / CACHE;
            read.max(listed * filled * products / rate)
        };
        // Sums are read and written for the records of some lists at a time.
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
        // Bits and masks, which are made for every call.
        let masks = seen / 8.0 * 5.3 / MEMORY + around_tiles;
        let pairs = seen * 2.0 * rows * width;
        // Of each place of a query a row of q is read, and a part of the output written and read.
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
