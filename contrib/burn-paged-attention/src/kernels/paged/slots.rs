//! Slots one by one: those of page lists in their order, those of keys that were picked among them, and what is known of each.

/// Units of a cube.
use blocksparse_cubecl::prelude::*;

const UNITS: usize = 256;

/// Page lists over region one of a table that all heads of keys share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotShape {
    /// Page lists.
    pub page_lists: usize,
    /// Entries of the table of a page list.
    pub entries: usize,
    /// Slots of a page, a power of two.
    pub page: usize,
}

impl SlotShape {
    /// Slots of a page list, at most.
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

/// The slots of page lists, i32 `[page_lists, entries · page]`: `x · page + slot` of the table's entry `x`, and −1 behind the last and where there is no entry. The
/// table is i32 `[page_lists, entries]`, spans are i32 `[page_lists, 4]`, of which region one counts; contiguous.
///
/// # Errors
/// [`KernelError`] if there are more slots than a launch has units, or more than the device counts.
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
    // SAFETY: a unit below the count reads an entry and the span of its page list, and writes its own slot; the buffers have the lengths they say.
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

/// The slots of each of so many heads of keys at some places of page lists, i32 `[page_lists, heads, most]`: of all pages, of which an entry of the table has one for
/// each head, one behind the other. `places` are i32 `[page_lists, most]`, below 0 where there is none, and so is then the slot. Contiguous.
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
    // SAFETY: a unit below the count reads a place of its page list and an entry that there is, and writes its own slot; the buffers have the lengths they say.
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

/// Writes so many numbers at places of `length` others, all i32, in place; what has no place there is left out. No two may have the same one.
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
    // SAFETY: a unit below the count reads its place and its number, and writes at a place below the length; the buffers have the lengths they say.
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
