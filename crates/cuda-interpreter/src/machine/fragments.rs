//! Fragments (`wmma`). Their register layout is our own: element `e`, row-major, is in lane `e % 32`.

use half::f16;

use super::cube::Cube;
use super::matrix::{Element, number, shape};
use super::op::Op;
use super::warp::Warp;
use crate::error::Fault;
use crate::ptx::{Address, Decoded, Reader, Slot, Space, Type};

/// A matrix in registers with an opaque layout (PTX ISA, section 9.7.14.4).
struct Fragment {
    rows: usize,
    columns: usize,
    element_bytes: usize,
    slots: Vec<Slot>,
}

/// A fragment in memory: the address of its first element, the distance between rows or columns, and which of the two.
struct FragmentPlace {
    space: Space,
    at: Address,
    stride: Option<Slot>,
    by_rows: bool,
}

/// Decodes `wmma`: loads, stores and products of fragments.
pub fn fragments(reader: &mut Reader) -> Decoded<Op> {
    let Some([rows, columns, depth]) = shape(reader) else {
        return reader.unknown();
    };
    if reader.has("mma") {
        return fragment_product(reader, [rows, columns, depth]);
    }
    let of = |name: &str| reader.modifiers.get(1) == Some(&name);
    let [rows, columns] = match () {
        () if of("a") => [rows, depth],
        () if of("b") => [depth, columns],
        () => [rows, columns],
    };
    let element_bytes = match reader.modifiers.last() {
        Some(&"tf32") => 4,
        Some(name) => Type::named(name).map_or(0, Type::bytes),
        None => 0,
    };
    let (space, by_rows) = (reader.space(), reader.has("row"));
    let of = [rows, columns, element_bytes];
    let loads = reader.has("load");
    let loaded = if loads {
        Some(fragment(reader, of)?)
    } else {
        None
    };
    let at = reader.address()?;
    let fragment = loaded.map_or_else(|| fragment(reader, of), Ok)?;
    let place = FragmentPlace {
        space,
        at,
        stride: reader.optional()?,
        by_rows,
    };
    Ok(match loads {
        true => Op::whole(move |warp, cube, _| load(warp, cube, &fragment, &place)),
        false => Op::whole(move |warp, cube, _| store(warp, cube, &fragment, &place)),
    })
}

/// Reads a fragment with these rows, columns and bytes per element. The registers must have room for it.
fn fragment(reader: &mut Reader, [rows, columns, element_bytes]: [usize; 3]) -> Decoded<Fragment> {
    let slots = reader.slots()?;
    match [2, 4].contains(&element_bytes) && rows * columns <= 32 * slots.len() * 4 / element_bytes
    {
        true => Ok(Fragment {
            rows,
            columns,
            element_bytes,
            slots,
        }),
        false => reader.unknown(),
    }
}

fn fragment_product(reader: &mut Reader, [rows, columns, depth]: [usize; 3]) -> Decoded<Op> {
    let element = match () {
        () if reader.has("bf16") => Element::BF16,
        () if reader.has("tf32") => Element::TF32,
        () => Element::F16,
    };
    let of_factors = element.bytes();
    // The types of the result and of the accumulator stand before and after those of the operands.
    let shape_at = reader
        .modifiers
        .iter()
        .position(|text| text.starts_with('m') && text.contains('k'));
    let kinds = &reader.modifiers[shape_at.map_or(0, |at| at + 1)..];
    let bytes = |name: Option<&&str>| {
        name.and_then(|name| Type::named(name))
            .map_or(0, Type::bytes)
    };
    let (of_out, of_sums) = (bytes(kinds.first()), bytes(kinds.last()));
    let out = fragment(reader, [rows, columns, of_out])?;
    let left = fragment(reader, [rows, depth, of_factors])?;
    let right = fragment(reader, [depth, columns, of_factors])?;
    let sums = fragment(reader, [rows, columns, of_sums])?;
    Ok(Op::whole(move |warp, _, _| {
        multiply(warp, element, &out, [&left, &right, &sums]);
        Ok(())
    }))
}

/// Returns the lane, the register and the bit offset of an element.
fn place_of(fragment: &Fragment, index: usize) -> (usize, usize, usize) {
    let each = 4 / fragment.element_bytes;
    let (lane, at) = (index % 32, index / 32);
    (lane, at / each, at % each * 8 * fragment.element_bytes)
}

fn get(warp: &Warp, fragment: &Fragment, index: usize) -> u32 {
    let (lane, register, low) = place_of(fragment, index);
    (warp.at(fragment.slots[register])[lane] >> low) as u32
}

fn put(warp: &mut Warp, fragment: &Fragment, index: usize, bits: u32) {
    let (lane, register, low) = place_of(fragment, index);
    let mask = (u64::MAX >> (64 - 8 * fragment.element_bytes)) << low;
    let held = &mut warp.registers[fragment.slots[register] as usize][lane];
    *held = *held & !mask | u64::from(bits) << low & mask;
}

/// Returns the address of each element.
fn addresses(warp: &Warp, fragment: &Fragment, place: &FragmentPlace) -> Vec<u64> {
    let (rows, columns) = (fragment.rows as u64, fragment.columns as u64);
    let dense = if place.by_rows { columns } else { rows };
    let stride = place
        .stride
        .map_or(dense, |slot| warp.at(slot)[0] & u64::from(u32::MAX));
    let start = warp.address(place.at, 0);
    let at = |row: u64, column: u64| match place.by_rows {
        true => row * stride + column,
        false => column * stride + row,
    };
    let size = fragment.element_bytes as u64;
    (0..rows)
        .flat_map(|row| (0..columns).map(move |column| start + at(row, column) * size))
        .collect()
}

/// # Errors
///
/// [`Fault`] for invalid accesses.
fn load(
    warp: &mut Warp,
    cube: &mut Cube,
    fragment: &Fragment,
    from: &FragmentPlace,
) -> Result<(), Fault> {
    for (index, address) in addresses(warp, fragment, from).into_iter().enumerate() {
        let place = (from.space, address, fragment.element_bytes);
        let bits = warp.load(cube, place, index % 32)?;
        put(warp, fragment, index, bits as u32);
    }
    Ok(())
}

/// # Errors
///
/// [`Fault`] for invalid accesses.
fn store(
    warp: &mut Warp,
    cube: &mut Cube,
    fragment: &Fragment,
    to: &FragmentPlace,
) -> Result<(), Fault> {
    for (index, address) in addresses(warp, fragment, to).into_iter().enumerate() {
        let place = (to.space, address, fragment.element_bytes);
        warp.store(cube, place, index % 32, get(warp, fragment, index).into())?;
    }
    Ok(())
}

/// Multiplies two fragments and adds a third.
fn multiply(
    warp: &mut Warp,
    element: Element,
    out: &Fragment,
    [left, right, sums]: [&Fragment; 3],
) {
    let numbers = |fragment: &Fragment, element: Element| -> Vec<f32> {
        let count = fragment.rows * fragment.columns;
        (0..count)
            .map(|index| number(element, get(warp, fragment, index)))
            .collect()
    };
    let (factors, others) = (numbers(left, element), numbers(right, element));
    let results: Vec<u32> = (0..out.rows * out.columns)
        .map(|index| {
            let (row, column) = (index / out.columns, index % out.columns);
            let bits = get(warp, sums, index);
            let sum = if sums.element_bytes == 2 {
                number(Element::F16, bits)
            } else {
                f32::from_bits(bits)
            };
            let terms = (0..left.columns).map(|depth| {
                factors[row * left.columns + depth] * others[depth * right.columns + column]
            });
            let sum = terms.fold(sum, |sum, term| sum + term);
            if out.element_bytes == 2 {
                f16::from_f32(sum).to_bits().into()
            } else {
                sum.to_bits()
            }
        })
        .collect();
    for (index, bits) in results.into_iter().enumerate() {
        put(warp, out, index, bits);
    }
}
