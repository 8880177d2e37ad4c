//! Launch plan of a call.

use std::fmt;

use crate::kernels::paged::attend::attend;
use crate::kernels::paged::join::{JoinedLaunch, ShareOutsLaunch};
use crate::kernels::paged::merge::{MergeSizesLaunch, MergeTile, merge};
use crate::kernels::paged::mma::attend_mma;
use crate::kernels::paged::mma_tile::MmaTile;
use crate::kernels::paged::page_list::{
    CANDIDATES, PageListsLaunch, ScalesLaunch, SizesLaunch, VisibilityLaunch, least_pages,
};
use crate::kernels::paged::shape::PagedShape;
use crate::kernels::paged::tile::Tile;
use blocksparse_cubecl::args::address_in;
use blocksparse_cubecl::limits::check_types;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::rows::accumulator_of;
use blocksparse_cubecl::tuning::{TierLimit, Tuning};

/// Assumed number of multiprocessors if the device does not report it.
const MULTIPROCESSORS: usize = 16;
/// Most bytes of partial outputs, besides one output per query.
const PARTIAL_BYTES: usize = 16 << 20;
/// With at least this many cubes at a time per page list, a single wave is best. With fewer, a single wave would leave too many cubes idle.
const SINGLE_WAVE: usize = 4;

/// Bounds the number of shares of several page lists, for a device that computes `at_a_time` at once. An unused share costs a cube that ends at
/// once, so the bound is close to the useful number: for page lists of equal length, and for one much longer than the others.
fn most_shares(page_lists: usize, at_a_time: usize) -> usize {
    if page_lists * SINGLE_WAVE <= at_a_time {
        return at_a_time;
    }
    if page_lists * 4 <= 3 * at_a_time {
        return 2 * at_a_time;
    }
    // In hundredths of a page list: shares in waves, and the fixed cost of a share.
    let time = |shares: &usize| (page_lists * shares).div_ceil(at_a_time) * (100 / shares + 2);
    let shares = (1..=4).min_by_key(time).unwrap_or(1);
    page_lists * shares + at_a_time
}

/// Kernel variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tier {
    /// Any runtime.
    Simt(Tile),
    /// Tensor cores.
    Mma(MmaTile),
}

impl Tier {
    /// Returns the fastest tier that supports a call, and why faster ones do not.
    fn choose(
        properties: &DeviceProperties,
        shape: &PagedShape,
        limit: TierLimit,
    ) -> Option<(Self, Option<&'static str>)> {
        let simt = || Some(Self::Simt(Tile::new(properties, shape)?));
        if limit.is_simt() {
            return Some((simt()?, Some("BLOCKSPARSE_TIER says simt")));
        }
        match MmaTile::new(properties, shape) {
            Ok(tile) => Some((Self::Mma(tile), None)),
            Err(reason) => Some((simt()?, Some(reason))),
        }
    }

    /// Returns the queries of a cube.
    fn rows(&self) -> usize {
        match self {
            Self::Simt(tile) => tile.rows,
            Self::Mma(tile) => tile.rows(),
        }
    }

    /// Enables joining in the same launch, if it pays for this many shares of a page list.
    fn joining(self, shape: &PagedShape, shares: usize) -> Self {
        match self {
            Self::Simt(_) => self,
            Self::Mma(tile) => Self::Mma(tile.joining(shape, shares)),
        }
    }

    /// Returns whether the kernel joins the shares of a page list itself.
    fn is_joining(&self) -> bool {
        match self {
            Self::Simt(_) => false,
            Self::Mma(tile) => tile.fused,
        }
    }

    /// Returns the units of a cube.
    fn units(&self) -> usize {
        match self {
            Self::Simt(tile) => tile.units(),
            Self::Mma(tile) => tile.units(),
        }
    }

    /// Returns the cubes that are resident on a multiprocessor.
    fn cubes(&self) -> usize {
        match self {
            Self::Simt(_) => 1,
            Self::Mma(tile) => tile.cubes,
        }
    }

    fn shared_bytes(&self, accumulator: ElemType) -> usize {
        match self {
            Self::Simt(tile) => tile.shared_bytes(accumulator),
            Self::Mma(tile) => tile.shared_bytes(),
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.rows();
        match self {
            Self::Simt(tile) => {
                let Tile { keys, lanes, .. } = tile;
                let exchange = if tile.shuffles { "planes" } else { "no planes" };
                write!(
                    f,
                    "simt  {} units a cube of {rows} queries, {keys} keys of {lanes} lanes at a time, {} numbers a load, {exchange}",
                    tile.units(),
                    tile.load(),
                )
            }
            Self::Mma(tile) => write!(
                f,
                "mma  {} units a cube of {rows} queries, 16 keys of a warp at a time",
                tile.units(),
            ),
        }
    }
}

/// Launch plan of a call: a function of its shape and the device. It prints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagedPlan {
    shape: PagedShape,
    tier: Tier,
    /// Why no faster tier is used.
    reason: Option<&'static str>,
    merge: MergeTile,
    address: AddressType,
    /// Cubes that split the queries of a KV head.
    row_blocks: usize,
    /// Number of shares besides one per page list; the most in total if `wave` is set.
    work: usize,
    /// Shares that the device computes at a time; 0 unless it chooses their length from the real lengths.
    wave: usize,
    /// Most shares of all page lists.
    items: usize,
}

impl PagedPlan {
    /// Makes the plan of a call, without the tiers that the environment variable `BLOCKSPARSE_TIER` excludes.
    ///
    /// # Errors
    /// [`KernelError`] if the device lacks the dtype, the call exceeds a device limit, or the variable's value is invalid.
    pub fn new(client: &Client, shape: PagedShape) -> Result<Self, KernelError> {
        Self::of(client.properties(), shape, Tuning::of_process()?.tier)
    }

    /// Makes the plan of a call without some tiers, for measurements and comparisons.
    pub fn with_limit(
        client: &Client,
        shape: PagedShape,
        limit: TierLimit,
    ) -> Result<Self, KernelError> {
        Self::of(client.properties(), shape, limit)
    }

    /// Makes the plan of a call on a described device.
    pub(crate) fn of(
        properties: &DeviceProperties,
        shape: PagedShape,
        limit: TierLimit,
    ) -> Result<Self, KernelError> {
        let accumulator = accumulator_of(shape.dtype);
        check_types(properties, [shape.dtype, accumulator])?;
        let hardware = &properties.hardware;
        let [width, value_width] = shape.widths;
        let shared = || KernelError::SharedMemory {
            head_dim: width,
            value_dim: value_width,
            available: hardware.max_shared_memory_size,
        };
        let (tier, reason) = Tier::choose(properties, &shape, limit).ok_or_else(shared)?;
        if tier.shared_bytes(accumulator) > hardware.max_shared_memory_size {
            return Err(shared());
        }
        // Includes the buffer in which CubeCL passes scalars.
        let buffers = 8
            + 2 * usize::from(shape.quantization.is_some())
            + 3 * usize::from(shape.visibility)
            + usize::from(shape.selected.is_some());
        if buffers > hardware.max_bindings as usize {
            let most = hardware.max_bindings;
            return Err(KernelError::limit("buffers of a launch", most, buffers));
        }
        let group_rows = shape.group_rows().max(1);
        let row_blocks = group_rows.div_ceil(tier.rows());
        let page_lists = shape.page_lists();
        let entries = shape.selected.unwrap_or(shape.entries).max(1);
        let heads = shape.shared_heads();
        let (work, wave, items) = match shape.fixed_split {
            Some(pages) => (0, 0, page_lists * entries.div_ceil(pages)),
            None => {
                let multiprocessors = hardware
                    .num_streaming_multiprocessors
                    .map_or(MULTIPROCESSORS, |count| count as usize);
                let at_a_time = (multiprocessors * tier.cubes() / (heads * row_blocks)).max(1);
                let bytes = heads * group_rows * value_width * accumulator.size();
                let most = page_lists * entries.div_ceil(least_pages(shape.page));
                let most = most.min(PARTIAL_BYTES / bytes.max(1)).max(1);
                // Each unit of a cube holds the length of one page list.
                match (2..=tier.units()).contains(&page_lists) {
                    true => {
                        // With fewer shares there is nothing to choose.
                        let least = page_lists + page_lists.div_ceil(CANDIDATES);
                        let work = most_shares(page_lists, at_a_time).min(most).max(least);
                        (work, at_a_time, work)
                    }
                    false => {
                        let wanted = at_a_time * page_lists.clamp(1, 2);
                        let work = wanted.min(most);
                        (work, 0, page_lists + work)
                    }
                }
            }
        };
        // With fixed splits, the order of sums must not depend on the possible number of shares.
        let shares = match shape.fixed_split {
            Some(_) => usize::MAX >> 1,
            None => items.div_ceil(page_lists.max(1)),
        };
        let tier = tier.joining(&shape, shares);
        let merge = MergeTile::new(properties, value_width, accumulator, shares, shape.sinks);
        let partial = items * heads * group_rows * value_width.max(2) + 2 * page_lists;
        // The statistics store share indices in the accumulation dtype; f32 is exact up to 2^24.
        let counted = items <= 1 << 24;
        if !counted {
            return Err(KernelError::limit("parts of sequences", 1u32 << 24, items));
        }
        let largest = [
            shape.pages * shape.page * width.max(value_width),
            partial,
            shape.batch * shape.heads * shape.rows * width.max(value_width),
            page_lists * shape.entries,
            shape.batch * shape.kv_heads * entries,
        ];
        Ok(Self {
            shape,
            tier,
            reason,
            merge,
            address: address_in(properties, largest.into_iter().max().unwrap_or(0))?,
            row_blocks,
            work,
            wave,
            items,
        })
    }
}

#[cfg(test)]
impl PagedPlan {
    /// Returns `work` and `items`.
    pub(crate) fn shares(&self) -> [usize; 2] {
        [self.work, self.items]
    }
}

impl fmt::Display for PagedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [page, page_lists, items] = [self.shape.page, self.shape.page_lists(), self.items];
        let MergeTile { ways, columns, .. } = self.merge;
        if let Some(quantization) = self.shape.quantization {
            write!(f, "{quantization} ")?;
        }
        if let Some(reason) = self.reason {
            writeln!(f, "pages of {page}  not on the mma tier: {reason}")?;
        }
        write!(
            f,
            "pages of {page}  {}; up to {items} parts of {page_lists} page lists, merged by ",
            self.tier
        )?;
        match self.tier.is_joining() {
            true => write!(f, "the last cube of each"),
            false => write!(f, "{ways} × {columns} units"),
        }
    }
}

/// The tensors of a call, contiguous. Optional ones match the plan's [`PagedShape`]; integers are i32.
#[derive(Clone, Copy, Debug)]
pub struct PagedBuffers<'a> {
    /// `[batch, heads, rows, width]`
    pub q: &'a Handle,
    /// `[pages, page, width]`; four elements in 32 bits if quantized.
    pub keys: &'a Handle,
    /// `[pages, page, value_width]`, in the same format.
    pub values: &'a Handle,
    /// `[pages, page]` twice, f32: scales of quantized keys and values.
    pub scales: Option<[&'a Handle; 2]>,
    /// `[batch, tables, entries]`: pages; if heads share the table, `x` is the pages `x · kv_heads + κ`. Negative: none.
    pub table: &'a Handle,
    /// `[batch, tables, 4]`: slots of region one; first entry, first slot and number of slots of region two.
    pub spans: &'a Handle,
    /// `[pages of the table, page]` twice, and `[batch]`: positions of slots, last queries that see them, and position of the first query.
    pub visibility: Option<[&'a Handle; 3]>,
    /// `[batch, kv_heads, selected]`: indices of table entries; negative: none.
    pub selected: Option<&'a Handle>,
    /// `[heads]`, in the accumulation dtype.
    pub sinks: Option<&'a Handle>,
    /// `[batch, kv_heads, heads / kv_heads · rows]`, u32: zeros, which a call restores. Concurrent calls need separate counters.
    pub counters: Option<&'a Handle>,
    /// `[batch, heads, rows, value_width]`, the output.
    pub out: &'a Handle,
    /// `[batch, heads, rows]`, the output lse in the accumulation dtype.
    pub lse: &'a Handle,
}

/// Runs a planned call in two launches, or, with counters on tensor cores, in one: then the cube that ends last joins the shares of a page list.
///
/// # Errors
/// [`KernelError`] if a launch has more cubes than the device supports, or planned counters are missing.
pub fn paged_attention(
    client: &Client,
    plan: &PagedPlan,
    buffers: &PagedBuffers,
    scale: f64,
    softcap: Option<f64>,
) -> Result<(), KernelError> {
    let PagedPlan {
        shape,
        tier,
        merge: merge_tile,
        address,
        row_blocks,
        work,
        wave,
        items,
        ..
    } = *plan;
    if shape.is_empty() {
        return Ok(());
    }
    if shape.counters && buffers.counters.is_none() {
        return Err(KernelError::Factor { factor: "counters" });
    }
    if shape.quantization.is_some() != buffers.scales.is_some() {
        return Err(KernelError::Factor { factor: "scales" });
    }
    let accumulator = accumulator_of(shape.dtype);
    let (page_lists, heads, group_rows) =
        (shape.page_lists(), shape.shared_heads(), shape.group_rows());
    let [width, value_width] = shape.widths;
    let query_rows = shape.batch * shape.heads * shape.rows;
    let partial_rows = items * heads * group_rows;
    let partial_len = partial_rows * value_width;
    let stats_len = partial_rows + 2 * page_lists;
    let partial = client.empty(partial_len * accumulator.size());
    let stats = client.empty(stats_len * accumulator.size());
    let slots = shape.pages * shape.page;
    let ids = slots / heads;
    let selected = shape.selected.unwrap_or(0);
    let cubes = spread(client, (items * heads * row_blocks) as u64)?;
    let merge_cubes = spread(client, query_rows as u64)?;
    let sizes = SizesLaunch::new(
        page_lists,
        shape.tables,
        heads,
        shape.entries,
        selected,
        shape.pages,
        group_rows,
        shape.rows,
        row_blocks,
        work,
        wave,
        shape.fixed_split.unwrap_or(0),
        partial_rows,
    );
    let visibility = buffers.visibility.map(|[positions, last, queries]| {
        let [positions, last] = [positions, last].map(|of_slots| buffer(of_slots, ids));
        VisibilityLaunch::new(positions, last, buffer(queries, shape.batch))
    });
    let lists = PageListsLaunch::new(
        buffer(buffers.table, page_lists * shape.entries),
        buffer(buffers.spans, page_lists * 4),
        visibility.into(),
        optional(buffers.selected, shape.batch * shape.kv_heads * selected),
        sizes,
    );
    let scales = (buffers.scales)
        .map(|[keys, values]| ScalesLaunch::new(buffer(keys, slots), buffer(values, slots)));
    let stored = match shape.quantization {
        Some(_) => ElemType::UInt(UIntKind::U32),
        None => shape.dtype,
    };
    match tier {
        // SAFETY: a unit reads rows of q below `group_rows` of its head, table entries below `entries`, and slots and positions of pages below
        // `pages`; it writes its row of a share below `items`. The buffers have the stated lengths (see `buffer`).
        Tier::Simt(tile) => unsafe {
            attend::launch_unchecked(
                client,
                cubes,
                CubeDim::new_1d(tile.units() as u32),
                address,
                tile.vector,
                tile.stored_vector(),
                buffer(buffers.q, query_rows * width / tile.vector),
                buffer(buffers.keys, slots * tile.vectors()),
                buffer(buffers.values, slots * tile.value_vectors()),
                scales.into(),
                lists,
                ShareOutsLaunch::new(buffer(&partial, partial_len), buffer(&stats, stats_len)),
                InputScalar::new(scale, accumulator),
                InputScalar::new(softcap.unwrap_or(1.0), accumulator),
                tile,
                [shape.dtype, stored, accumulator],
            );
        },
        Tier::Mma(tile) => {
            use core::f64::consts::LOG2_E;
            let [factor, bound] = match softcap {
                Some(softcap) => [scale / softcap, softcap * LOG2_E],
                None => [scale * LOG2_E, 1.0],
            };
            let joined = buffers.counters.filter(|_| tile.fused).map(|counters| {
                JoinedLaunch::new(
                    buffer(counters, page_lists * heads * row_blocks),
                    optional(buffers.sinks, shape.heads),
                    buffer(buffers.out, query_rows * value_width / 2),
                    buffer(buffers.lse, query_rows),
                )
            });
            // SAFETY: as above.
            unsafe {
                attend_mma::launch_unchecked(
                    client,
                    cubes,
                    CubeDim::new_1d(tile.units() as u32),
                    address,
                    tile.value_words(),
                    buffer(buffers.q, query_rows * width / 8),
                    buffer(buffers.keys, slots * 4 * tile.key_loads()),
                    buffer(buffers.values, slots * 8 * tile.value_loads()),
                    scales.into(),
                    lists,
                    ShareOutsLaunch::new(buffer(&partial, partial_len), buffer(&stats, stats_len)),
                    joined.into(),
                    factor as f32,
                    bound as f32,
                    tile,
                );
            }
        }
    }
    if tier.is_joining() {
        return Ok(());
    }
    // SAFETY: a unit reads shares that were written, and writes its own row; the buffers have the stated lengths.
    unsafe {
        merge::launch_unchecked(
            client,
            merge_cubes,
            CubeDim::new_1d(merge_tile.units() as u32),
            address,
            merge_tile.vector,
            buffer(&partial, partial_len / merge_tile.vector),
            buffer(&stats, stats_len),
            optional(buffers.sinks, shape.heads),
            buffer(buffers.out, query_rows * value_width / merge_tile.vector),
            buffer(buffers.lse, query_rows),
            MergeSizesLaunch::new(
                query_rows,
                group_rows,
                shape.rows,
                shape.heads,
                heads,
                partial_rows,
            ),
            InputScalar::new(f64::NEG_INFINITY, accumulator),
            merge_tile,
            [shape.dtype, accumulator],
        );
    }
    Ok(())
}
