//! Scores of pages by their summaries.
//!
//! ```text
//! bounds   x[J] = f · Σ_h Σ_c max(q[h,c] · most[J,c], q[h,c] · least[J,c])
//!               = Σ_c (f · Σ_h max(q[h,c], 0)) · most[J,c] + (f · Σ_h min(q[h,c], 0)) · least[J,c]
//! mean     x[J] = Σ_c (f · Σ_h q[h,c]) · mean[J,c]
//! ```
//!
//! Thus the queries of the heads `h` that share a KV head become one row, and a summary is read once for all of them. A cube has some pages of one
//! KV head. Adjacent units, the lanes, share a page; their partial sums meet in shared memory, once for all pages of the cube.

use crate::kernels::paged::summary::check_float;
use blocksparse_cubecl::limits::{most_units, vector_of};
use blocksparse_cubecl::prelude::*;
use burn_sparse_select::PageSummary;

/// Units of a cube.
const UNITS: usize = 256;
/// Most units of a page.
const MOST_LANES: usize = 16;
/// Most pages of a unit.
const ROUNDS: usize = 8;

/// Shape of a call: one query of each head per page list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageScoreShape {
    /// Number of page lists, one per sequence or per query.
    pub batch: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of KV heads.
    pub kv_heads: usize,
    /// Table rows of a page list: 1 or `kv_heads`.
    pub tables: usize,
    /// Entries of a table row.
    pub entries: usize,
    /// Pages of the pool.
    pub pages: usize,
    /// Slots of a page, a power of two.
    pub page: usize,
    /// Width of keys.
    pub width: usize,
    /// Dtype of queries.
    pub dtype: ElemType,
    /// Kind of summary.
    pub summary: PageSummary,
    /// Dtype of summaries.
    pub summary_dtype: ElemType,
}

/// Comptime shape of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Scored {
    summary: PageSummary,
    /// Vectors of a key.
    vectors: usize,
    /// Units of a page, a power of two.
    lanes: usize,
    /// Units of a cube.
    units: usize,
    /// Pages of a unit.
    rounds: usize,
    /// Slots of a page.
    page: usize,
}

impl Scored {
    /// Returns the pages that a cube processes at a time.
    fn groups(&self) -> usize {
        self.units / self.lanes
    }

    /// Returns the pages of a cube.
    fn pages(&self) -> usize {
        self.groups() * self.rounds
    }

    /// Returns the most vectors of a lane, for each row of a summary.
    fn lane_vectors(&self) -> usize {
        self.vectors.div_ceil(self.lanes)
    }

    /// Returns the stride of pages in shared memory: odd, so that units that add up different pages use different banks.
    fn pitch(&self) -> usize {
        self.lanes + 1
    }
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// Page lists times KV heads.
    rows: usize,
    kv_heads: usize,
    /// Query heads of a KV head.
    group: usize,
    tables: usize,
    entries: usize,
    pages: usize,
    /// Cubes of a row.
    chunks: usize,
}

/// Computes scores `[batch, kv_heads, entries]` of the pages of page lists; elements after them are not written.
#[cube(launch_unchecked, address_type = "dynamic")]
fn score<Q: Float, S: Float, N: Size>(
    q: &[Vector<Q, N>],
    summaries: &[Vector<S, N>],
    table: &[i32],
    spans: &[i32],
    scores: &mut [f32],
    sizes: Sizes,
    factor: f32,
    #[comptime] t: Scored,
    #[define(Q, S)] _types: [ElemType; 2],
) {
    // Heads are innermost, because their pages are adjacent.
    let head = CUBE_POS % sizes.kv_heads;
    let chunk = CUBE_POS / sizes.kv_heads % sizes.chunks;
    let batch = CUBE_POS / sizes.kv_heads / sizes.chunks;
    let row = batch * sizes.kv_heads + head;
    let mut count = 0usize;
    let mut page_list = 0usize;
    if row < sizes.rows {
        page_list = batch * sizes.tables + head % sizes.tables;
        let slots = max(spans[page_list * 4], 0i32) as usize;
        count = min(
            (slots + comptime!(t.page - 1)) / comptime!(t.page),
            sizes.entries,
        );
    }
    let first = chunk * comptime!(t.pages());
    if first < count {
        let unit = UNIT_POS as usize;
        let lane = unit % comptime!(t.lanes);
        let group = unit / comptime!(t.lanes);
        let shared_heads = sizes.kv_heads / sizes.tables;
        let shared_head = head % shared_heads;

        // Page indices first: the loads of summaries depend on them.
        let mut ids = Array::<u32>::new(comptime!(t.rounds));
        #[unroll]
        for round in 0..comptime!(t.rounds) {
            let entry = first + comptime!(round * t.groups()) + group;
            let mut id = 0u32.runtime();
            if entry < count {
                let listed = table[page_list * sizes.entries + entry];
                let page = max(listed, 0i32) as usize * shared_heads + shared_head;
                id = select(
                    listed >= 0i32 && page < sizes.pages,
                    page as u32 + 1u32,
                    0u32,
                );
            }
            ids[round] = id;
        }

        let lane_vectors = comptime!(t.lane_vectors());
        let summary_rows = comptime!(t.summary.rows());
        let mut queries = Array::<Vector<f32, N>>::new(comptime!(summary_rows * lane_vectors));
        #[unroll]
        for i in 0..comptime!(summary_rows * lane_vectors) {
            queries[i] = Vector::<f32, N>::zeroed();
        }
        for member in 0..sizes.group {
            let at = (batch * sizes.kv_heads + head) * sizes.group + member;
            #[unroll]
            for i in 0..lane_vectors {
                let vector = lane + comptime!(i * t.lanes);
                if vector < comptime!(t.vectors) {
                    let x = Vector::<f32, N>::cast_from(q[at * comptime!(t.vectors) + vector]);
                    match comptime!(t.summary) {
                        PageSummary::Bounds => {
                            let mut above = Vector::<f32, N>::zeroed();
                            let mut below = Vector::<f32, N>::zeroed();
                            #[unroll]
                            for c in 0..N::value() {
                                above.insert(c, max(x.extract(c), 0.0f32));
                                below.insert(c, min(x.extract(c), 0.0f32));
                            }
                            queries[i] += above;
                            queries[comptime!(lane_vectors + i)] += below;
                        }
                        PageSummary::Mean => {
                            queries[i] += x;
                        }
                    }
                }
            }
        }

        let mut sums = Shared::<[f32]>::new_slice(comptime!(t.pages() * t.pitch()));
        #[unroll]
        for round in 0..comptime!(t.rounds) {
            let mut sum = Vector::<f32, N>::zeroed();
            if ids[round] > 0u32 {
                let page = (ids[round] - 1u32) as usize;
                #[unroll]
                for of in 0..summary_rows {
                    #[unroll]
                    for i in 0..lane_vectors {
                        let vector = lane + comptime!(i * t.lanes);
                        if vector < comptime!(t.vectors) {
                            let at = (page * summary_rows + of) * comptime!(t.vectors) + vector;
                            let x = Vector::<f32, N>::cast_from(summaries[at]);
                            sum += queries[comptime!(of * lane_vectors + i)] * x;
                        }
                    }
                }
            }
            let mut own = sum.extract(0usize);
            #[unroll]
            for c in 1..N::value() {
                own += sum.extract(c);
            }
            let place = comptime!(round * t.groups()) + group;
            sums[place * comptime!(t.pitch()) + lane] = own;
        }
        sync_cube();
        let mut place = unit;
        while place < comptime!(t.pages()) {
            if first + place < count {
                let mut sum = sums[place * comptime!(t.pitch())];
                #[unroll]
                for other in 1..comptime!(t.lanes) {
                    sum += sums[place * comptime!(t.pitch()) + other];
                }
                scores[row * sizes.entries + first + place] = sum * factor;
            }
            place += comptime!(t.units);
        }
    }
}

/// The tensors of a call, contiguous; integers are i32.
#[derive(Clone, Copy, Debug)]
pub struct PageScoreBuffers<'a> {
    /// `[batch, heads, width]`
    pub q: &'a Handle,
    /// `[pages, rows of a summary, width]`
    pub summaries: &'a Handle,
    /// `[batch, tables, entries]`, as in paged attention.
    pub table: &'a Handle,
    /// `[batch, tables, 4]`; only region one is used.
    pub spans: &'a Handle,
    /// `[batch, kv_heads, entries]`, f32.
    pub scores: &'a Handle,
}

/// Computes the scores of the pages of region one of page lists, times `factor`, summed over the query heads of a KV head. Elements after the pages
/// of a page list are not written. Pages that do not exist have score 0.
///
/// # Errors
/// [`KernelError`] if the device cannot index the pages or lacks a dtype.
pub fn page_scores(
    client: &Client,
    shape: &PageScoreShape,
    buffers: &PageScoreBuffers,
    factor: f64,
) -> Result<(), KernelError> {
    let properties = client.properties();
    for dtype in [shape.dtype, shape.summary_dtype] {
        check_float(properties, dtype)?;
    }
    let bytes = shape.dtype.size().max(shape.summary_dtype.size());
    let vector = vector_of(properties, bytes, &[shape.width]);
    let vectors = shape.width / vector;
    let units = 1 << UNITS.min(most_units(properties)).ilog2();
    let mut tile = Scored {
        summary: shape.summary,
        vectors,
        lanes: vectors.next_power_of_two().min(MOST_LANES).min(units),
        units,
        rounds: ROUNDS,
        page: shape.page,
    };
    let rows = shape.batch * shape.kv_heads;
    // Fewer pages per cube if there are few pages, so that more multiprocessors take part.
    let multiprocessors = properties.hardware.num_streaming_multiprocessors;
    let wanted = multiprocessors.unwrap_or(1) as usize * 4;
    while tile.rounds > 1 && rows * shape.entries.div_ceil(tile.pages()) < wanted {
        tile.rounds /= 2;
    }
    let chunks = shape.entries.div_ceil(tile.pages());
    let page_lists = shape.batch * shape.tables;
    let largest = [
        shape.pages * shape.summary.rows() * shape.width,
        shape.batch * shape.heads * shape.width,
        rows * shape.entries,
        page_lists * shape.entries,
    ];
    // Page indices have 32 bits, and one value means none.
    if u32::try_from(shape.pages + 1).is_err() {
        return Err(KernelError::limit("pages", u32::MAX, shape.pages));
    }
    let address = address_of(client, largest.into_iter().max().unwrap_or(0))?;
    let cubes = spread(client, (rows * chunks) as u64)?;
    if rows * shape.entries * shape.pages == 0 {
        return Ok(());
    }
    // SAFETY: a cube below rows times chunks reads the queries of its row, entries of its page list and summaries of pages below `pages`, and writes
    // scores of its row; the buffers have the stated lengths.
    unsafe {
        score::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(tile.units as u32),
            address,
            vector,
            buffer(buffers.q, shape.batch * shape.heads * vectors),
            buffer(
                buffers.summaries,
                shape.pages * shape.summary.rows() * vectors,
            ),
            buffer(buffers.table, page_lists * shape.entries),
            buffer(buffers.spans, page_lists * 4),
            buffer(buffers.scores, rows * shape.entries),
            SizesLaunch::new(
                rows,
                shape.kv_heads,
                shape.heads / shape.kv_heads,
                shape.tables,
                shape.entries,
                shape.pages,
                chunks,
            ),
            factor as f32,
            tile,
            [shape.dtype, shape.summary_dtype],
        );
    }
    Ok(())
}
