//! Slot index lists of page lists and of selected keys, and scatter of integers.

use blocksparse_cubecl::prelude::*;

const UNITS: usize = 256;

/// Page lists over region one of a table that all KV heads share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotShape {
    /// Number of page lists.
    pub page_lists: usize,
    /// Entries of the table of a page list.
    pub entries: usize,
    /// Slots of a page, a power of two.
    pub page: usize,
}

impl SlotShape {
    /// Returns the most slots of a page list.
    pub fn slots(&self) -> usize {
        self.entries * self.page
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn slots_in_order(
    table: &[i32],
    spans: &[i32],
    slots: &mut [i32],
    entries: usize,
    count: usize,
    #[comptime] page: usize,
) {
    let at = ABSOLUTE_POS;
    if at < count {
        let page_list = at / (entries * page);
        let place = at % (entries * page);
        let entry = table[page_list * entries + place / page];
        let is_there = entry >= 0i32 && (place as i32) < spans[page_list * 4];
        let slot = entry * comptime!(page as i32) + (place % page) as i32;
        slots[at] = select(is_there, slot, -1i32);
    }
}

/// Lists the slots of page lists, i32 `[page_lists, entries · page]`: `x · page + slot` for table entry `x`; −1 after the last and for missing
/// entries. The table is i32 `[page_lists, entries]`, spans are i32 `[page_lists, 4]`, of which only region one is used; contiguous.
///
/// # Errors
/// [`KernelError`] if there are more slots than a launch has units, or more than the device can index.
pub fn page_list_slots(
    client: &Client,
    shape: &SlotShape,
    [table, spans]: [&Handle; 2],
    slots: &Handle,
) -> Result<(), KernelError> {
    let count = shape.page_lists * shape.slots();
    if count == 0 {
        return Ok(());
    }
    let address = address_of(client, count)?;
    let cubes = spread(client, count.div_ceil(UNITS) as u64)?;
    // SAFETY: a unit below the count reads an entry and the span of its page list, and writes its own slot; the buffers have the stated lengths.
    unsafe {
        slots_in_order::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            address,
            buffer(table, shape.page_lists * shape.entries),
            buffer(spans, shape.page_lists * 4),
            buffer(slots, count),
            shape.entries,
            count,
            shape.page,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn picked(
    places: &[i32],
    table: &[i32],
    slots: &mut [i32],
    entries: usize,
    heads: usize,
    most: usize,
    count: usize,
    #[comptime] page: usize,
) {
    let at = ABSOLUTE_POS;
    if at < count {
        let page_list = at / most / heads;
        let head = at / most % heads;
        let listed = places[page_list * most + at % most];
        let place = max(listed, 0i32) as usize;
        let is_within = place / page < entries;
        let entry = table[page_list * entries + select(is_within, place / page, 0usize)];
        let of_head = entry * (heads as i32) + head as i32;
        let slot = of_head * comptime!(page as i32) + (place % page) as i32;
        let is_there = listed >= 0i32 && is_within && entry >= 0i32;
        slots[at] = select(is_there, slot, -1i32);
    }
}

/// Maps places along page lists to the slots of each of `heads` KV heads, i32 `[page_lists, heads, most]`: indices among the slots of all pages,
/// where a table entry has adjacent pages, one per head. `places` are i32 `[page_lists, most]`; negative places give negative slots. Contiguous.
pub fn picked_slots(
    client: &Client,
    shape: &SlotShape,
    [heads, most]: [usize; 2],
    [places, table]: [&Handle; 2],
    slots: &Handle,
) -> Result<(), KernelError> {
    let count = shape.page_lists * heads * most;
    if count * shape.entries == 0 {
        return Ok(());
    }
    let address = address_of(client, count.max(shape.page_lists * shape.entries))?;
    let cubes = spread(client, count.div_ceil(UNITS) as u64)?;
    // SAFETY: a unit below the count reads a place of its page list and an existing entry, and writes its own slot; the buffers have the stated
    // lengths.
    unsafe {
        picked::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            address,
            buffer(places, shape.page_lists * most),
            buffer(table, shape.page_lists * shape.entries),
            buffer(slots, count),
            shape.entries,
            heads,
            most,
            count,
            shape.page,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn written(at: &[i32], values: &[i32], to: &mut [i32], count: usize, length: usize) {
    if ABSOLUTE_POS < count {
        let place = at[ABSOLUTE_POS];
        if place >= 0i32 && (place as usize) < length {
            to[place as usize] = values[ABSOLUTE_POS];
        }
    }
}

/// Scatters `count` integers into `to` of `length` elements, all i32, in place; indices out of range are skipped. Indices must differ, because the
/// order of writes is undefined.
pub fn write_integers(
    client: &Client,
    [count, length]: [usize; 2],
    [at, values]: [&Handle; 2],
    to: &Handle,
) -> Result<(), KernelError> {
    if count * length == 0 {
        return Ok(());
    }
    let address = address_of(client, count.max(length))?;
    let cubes = spread(client, count.div_ceil(UNITS) as u64)?;
    // SAFETY: a unit below the count reads its index and its value, and writes to an index below the length; the buffers have the stated lengths.
    unsafe {
        written::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            address,
            buffer(at, count),
            buffer(values, count),
            buffer(to, length),
            count,
            length,
        );
    }
    Ok(())
}
