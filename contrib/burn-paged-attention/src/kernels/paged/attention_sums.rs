//! Sums of the attention of a few queries per key in pages.
//!
//! A unit has a slot of a KV head and is the only writer of its elements. It adds `exp(f · q · k − lse)` of all queries that share the head, in the
//! order of rows and heads. The last rows, which may be rolled back, are stored in a ring after the sum and are added when they are overwritten.

// Comptime conditions stay separate from runtime ones.
#![allow(clippy::collapsible_if)]

use crate::kernels::paged::shape::PagedShape;
use blocksparse_cubecl::limits::{most_units, vector_of};
use blocksparse_cubecl::prelude::*;

/// Units of a cube.
const UNITS: usize = 128;
/// Queries that are multiplied with a key at a time.
const MEMBERS: usize = 4;

/// Comptime shape of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Summed {
    /// Vectors of a key.
    vectors: usize,
    /// Slots of a page, a power of two.
    page: usize,
    softcap: bool,
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    batch: usize,
    kv_heads: usize,
    /// Query heads of a KV head.
    group: usize,
    /// Queries of a head.
    rows: usize,
    tables: usize,
    entries: usize,
    pages: usize,
    /// Cubes of a head.
    chunks: usize,
    /// Seats, slots of a seat, and rows of the ring.
    seats: usize,
    width: usize,
    ring: usize,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn attention_sums_kernel<E: Float, N: Size>(
    q: &[Vector<E, N>],
    lse: &[f32],
    keys: &[Vector<E, N>],
    table: &[i32],
    spans: &[i32],
    calls: &[i32],
    sums: &mut [f32],
    sizes: Sizes,
    scale: f32,
    softcap: f32,
    #[comptime] t: Summed,
    #[define(E)] _element: ElemType,
) {
    let chunk = CUBE_POS % sizes.chunks;
    let head = CUBE_POS / sizes.chunks % sizes.kv_heads;
    let batch = CUBE_POS / sizes.chunks / sizes.kv_heads;
    let slot = chunk * CUBE_DIM as usize + UNIT_POS as usize;
    if batch < sizes.batch {
        let page_list = batch * sizes.tables + head % sizes.tables;
        let stored = spans[page_list * 4];
        let seat = calls[batch * 4];
        let tokens = calls[batch * 4 + 1];
        let loose = calls[batch * 4 + 2] as usize;
        let first = calls[batch * 4 + 3] as usize;
        let is_own = (slot as i32) < stored
            && slot < sizes.width
            && slot / comptime!(t.page) < sizes.entries
            && seat >= 0i32
            && (seat as usize) < sizes.seats;
        if is_own {
            let shared = sizes.kv_heads / sizes.tables;
            let listed = table[page_list * sizes.entries + slot / comptime!(t.page)];
            let page = max(listed, 0i32) as usize * shared + head % shared;
            let planes = 1 + sizes.ring;
            let to = ((seat as usize * sizes.kv_heads + head) * sizes.width + slot) * planes;
            // Clear the elements of new slots.
            if slot as i32 >= stored - tokens {
                for plane in 0..planes {
                    sums[to + plane] = 0.0f32;
                }
            }
            if listed >= 0i32 && page < sizes.pages {
                let key =
                    (page * comptime!(t.page) + slot % comptime!(t.page)) * comptime!(t.vectors);
                for row in 0..min(tokens as usize, sizes.rows) {
                    let mut attention = 0.0f32.runtime();
                    if (slot as i32) < stored - tokens + row as i32 + 1i32 {
                        let mut member = 0usize;
                        while member < sizes.group {
                            let mut products = Array::<f32>::new(MEMBERS);
                            #[unroll]
                            for i in 0..MEMBERS {
                                products[i] = 0.0f32;
                            }
                            for vector in 0..comptime!(t.vectors) {
                                let k = Vector::<f32, N>::cast_from(keys[key + vector]);
                                #[unroll]
                                for i in 0..MEMBERS {
                                    let of = head * sizes.group + min(member + i, sizes.group - 1);
                                    let query = (batch * sizes.kv_heads * sizes.group + of)
                                        * sizes.rows
                                        + row;
                                    let x = q[query * comptime!(t.vectors) + vector];
                                    let product = Vector::<f32, N>::cast_from(x) * k;
                                    #[unroll]
                                    for c in 0..N::value() {
                                        products[i] += product.extract(c);
                                    }
                                }
                            }
                            #[unroll]
                            for i in 0..MEMBERS {
                                if member + i < sizes.group {
                                    let of = head * sizes.group + member + i;
                                    let query = (batch * sizes.kv_heads * sizes.group + of)
                                        * sizes.rows
                                        + row;
                                    let mut score = products[i] * scale;
                                    if comptime!(t.softcap) {
                                        score = (score / softcap).tanh() * softcap;
                                    }
                                    attention += (score - lse[query]).exp();
                                }
                            }
                            member += MEMBERS;
                        }
                    }
                    if sizes.ring == 0 {
                        sums[to] += attention;
                    } else {
                        let place = to + 1 + (first + row) % sizes.ring;
                        if loose + row >= sizes.ring {
                            let settled = sums[place];
                            sums[to] += settled;
                        }
                        sums[place] = attention;
                    }
                }
            }
        }
    }
}

/// The tensors of a call, contiguous; integers are i32.
#[derive(Clone, Copy, Debug)]
pub struct SumsBuffers<'a> {
    /// `[batch, heads, rows, width]`
    pub q: &'a Handle,
    /// `[batch, heads, rows]`, f32.
    pub lse: &'a Handle,
    /// `[pages, page, width]`
    pub keys: &'a Handle,
    /// `[batch, tables, entries]`
    pub table: &'a Handle,
    /// `[batch, tables, 4]`; only region one is used.
    pub spans: &'a Handle,
    /// `[batch, 4]`
    pub calls: &'a Handle,
    /// `[seats · kv_heads, width, 1 + ring]`, f32.
    pub sums: &'a Handle,
}

/// Adds the queries' attention to the sums of the keys in region one of page lists: see `PagedOps::attention_sums`.
///
/// # Errors
/// [`KernelError`] if the device cannot index the tensors or lacks the dtype, or the elements have eight bits or more than four bytes.
pub fn attention_sums(
    client: &Client,
    shape: &PagedShape,
    [seats, width, ring]: [usize; 3],
    buffers: &SumsBuffers,
    scale: f64,
    softcap: Option<f64>,
) -> Result<(), KernelError> {
    let properties = client.properties();
    if shape.quantization.is_some()
        || !properties.supports_type(shape.dtype)
        || shape.dtype.size() > 4
    {
        let dtype = format!("{:?}", shape.dtype);
        return Err(KernelError::Dtype { dtype });
    }
    let vector = vector_of(properties, shape.dtype.size(), &[shape.widths[0]]);
    let tile = Summed {
        vectors: shape.widths[0] / vector,
        page: shape.page,
        softcap: shape.softcap,
    };
    let units = UNITS.min(most_units(properties));
    let chunks = (shape.entries * shape.page).min(width).div_ceil(units);
    let chunks = chunks.max(1);
    let queries = shape.batch * shape.heads * shape.rows;
    let page_lists = shape.batch * shape.tables;
    let largest = [
        shape.pages * shape.page * shape.widths[0],
        queries * shape.widths[0],
        seats * shape.kv_heads * width * (1 + ring),
        page_lists * shape.entries,
    ];
    let address = address_of(client, largest.into_iter().max().unwrap_or(0))?;
    let cubes = spread(client, (shape.batch * shape.kv_heads * chunks) as u64)?;
    if queries * shape.entries * shape.pages * seats * width == 0 {
        return Ok(());
    }
    // SAFETY: a unit below the slots of its page list and seat reads queries of its head and the key of a page below `pages`, and writes the
    // elements of its own slot of an existing seat; the buffers have the stated lengths.
    unsafe {
        attention_sums_kernel::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(units as u32),
            address,
            vector,
            buffer(buffers.q, queries * tile.vectors),
            buffer(buffers.lse, queries),
            buffer(buffers.keys, shape.pages * shape.page * tile.vectors),
            buffer(buffers.table, page_lists * shape.entries),
            buffer(buffers.spans, page_lists * 4),
            buffer(buffers.calls, shape.batch * 4),
            buffer(buffers.sums, seats * shape.kv_heads * width * (1 + ring)),
            SizesLaunch::new(
                shape.batch,
                shape.kv_heads,
                shape.heads / shape.kv_heads,
                shape.rows,
                shape.tables,
                shape.entries,
                shape.pages,
                chunks,
                seats,
                width,
                ring,
            ),
            scale as f32,
            softcap.unwrap_or(1.0) as f32,
            tile,
            shape.dtype,
        );
    }
    Ok(())
}
