//! Kernel that writes rows into pages.

use blocksparse_cubecl::limits::{check_types, most_units, vector_of};
use blocksparse_cubecl::prelude::*;

/// Units of a cube.
const UNITS: usize = 256;

/// Shape of a call: new rows and pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppendShape {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub kv_heads: usize,
    /// Table rows of a sequence: 1 or `kv_heads`.
    pub tables: usize,
    /// New rows of each head.
    pub rows: usize,
    /// Slots of a page.
    pub page: usize,
    /// Pages of the pool.
    pub pages: usize,
    /// Widths of keys and values.
    pub widths: [usize; 2],
    /// Dtype of rows and pages.
    pub dtype: ElemType,
}

impl AppendShape {
    /// Returns the new rows of all heads and sequences.
    pub(crate) fn count(&self) -> usize {
        self.batch * self.kv_heads * self.rows
    }

    pub(crate) fn sizes(&self) -> RowsLaunch {
        RowsLaunch::new(
            self.count(),
            self.rows,
            self.kv_heads,
            self.tables,
            self.page,
            self.pages,
        )
    }
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Rows {
    /// New rows of all heads and sequences.
    pub count: usize,
    /// New rows of a head.
    pub rows: usize,
    pub kv_heads: usize,
    pub tables: usize,
    pub page: usize,
    pub pages: usize,
}

/// Returns the slot of a row among those of all pages; their number if it is not stored.
#[cube]
pub(crate) fn row_slot(slots: &[i32], row: usize, sizes: &Rows) -> usize {
    let head = row / sizes.rows % sizes.kv_heads;
    let batch = row / sizes.rows / sizes.kv_heads;
    let page_list = batch * sizes.tables + head % sizes.tables;
    let slot = slots[page_list * sizes.rows + row % sizes.rows];
    let mut to = sizes.pages * sizes.page;
    if slot >= 0i32 {
        let slot = slot as usize;
        let shared = sizes.kv_heads / sizes.tables;
        let page = slot / sizes.page * shared + head % shared;
        if page < sizes.pages {
            to = page * sizes.page + slot % sizes.page;
        }
    }
    to
}

/// A unit copies one vector of a new key and of its value.
#[cube(launch_unchecked, address_type = "dynamic")]
fn append<E: Float, N: Size>(
    k: &[Vector<E, N>],
    v: &[Vector<E, N>],
    slots: &[i32],
    keys: &mut [Vector<E, N>],
    values: &mut [Vector<E, N>],
    sizes: Rows,
    #[comptime] vectors: [usize; 2],
    #[define(E)] _element: ElemType,
) {
    let both = comptime!(vectors[0] + vectors[1]);
    let row = ABSOLUTE_POS / both;
    let vector = ABSOLUTE_POS % both;
    if row < sizes.count {
        let to = row_slot(slots, row, &sizes);
        if to < sizes.pages * sizes.page {
            if vector < comptime!(vectors[0]) {
                keys[to * comptime!(vectors[0]) + vector] = k[row * comptime!(vectors[0]) + vector];
            } else {
                let vector = vector - comptime!(vectors[0]);
                values[to * comptime!(vectors[1]) + vector] =
                    v[row * comptime!(vectors[1]) + vector];
            }
        }
    }
}

/// Writes rows `[batch, kv_heads, rows, ·]` into pages, in place. `slots` `[batch, tables, rows]`, i32: `x · page + s` is slot `s` of table entry
/// `x`; negative: the row is not written. Contiguous. Slots that do not exist are skipped.
///
/// # Errors
/// [`KernelError`] if the device cannot index the pages or lacks the dtype.
pub fn append_rows(
    client: &Client,
    shape: &AppendShape,
    [k, v]: [&Handle; 2],
    slots: &Handle,
    [keys, values]: [&Handle; 2],
) -> Result<(), KernelError> {
    let AppendShape {
        batch,
        tables,
        rows,
        page,
        pages,
        widths,
        ..
    } = *shape;
    let properties = client.properties();
    check_types(properties, [shape.dtype])?;
    let count = shape.count();
    let vector = vector_of(properties, shape.dtype.size(), &widths);
    let vectors = widths.map(|width| width / vector);
    let units = UNITS.min(most_units(properties));
    let all = count * (vectors[0] + vectors[1]);
    let largest = (pages * page * widths[0].max(widths[1])).max(all + units);
    let address = address_of(client, largest)?;
    let cubes = spread(client, all.div_ceil(units) as u64)?;
    if count == 0 || pages == 0 {
        return Ok(());
    }
    // SAFETY: a unit reads its vector of a row below `count` and that row's slot, and writes the vector of a slot of a page below `pages`; the
    // buffers have the stated lengths (see `buffer`).
    unsafe {
        append::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(units as u32),
            address,
            vector,
            buffer(k, count * vectors[0]),
            buffer(v, count * vectors[1]),
            buffer(slots, batch * tables * rows),
            buffer(keys, pages * page * vectors[0]),
            buffer(values, pages * page * vectors[1]),
            shape.sizes(),
            vectors,
            shape.dtype,
        );
    }
    Ok(())
}
