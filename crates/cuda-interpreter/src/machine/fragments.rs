//! Fragments (`wmma`). Where their numbers lie in registers is ours: number `e`, row by row, is in lane `e % 32`.

use super::cube::Cube;
use super::matrix::number;
use super::warp::Warp;
use crate::error::Fault;
use crate::ptx::{Element, Fragment, FragmentPlace, FragmentProduct, f16_to_f32, f32_to_f16};

/// Of a number the lane, the register and the bits below it there.
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

/// The address of each number.
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
/// [`Fault`] where a device would stop.
pub fn load(
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
/// [`Fault`] where a device would stop.
pub fn store(
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

/// The product of two fragments, and a third.
pub fn multiply(warp: &mut Warp, product: &FragmentProduct) {
    let FragmentProduct {
        element,
        out,
        left,
        right,
        sums,
    } = product;
    let numbers = |fragment: &Fragment, element: Element| -> Vec<f32> {
        let count = fragment.rows * fragment.columns;
        (0..count)
            .map(|index| number(element, get(warp, fragment, index)))
            .collect()
    };
    let (factors, others) = (numbers(left, *element), numbers(right, *element));
    let results: Vec<u32> = (0..out.rows * out.columns)
        .map(|index| {
            let (row, column) = (index / out.columns, index % out.columns);
            let bits = get(warp, sums, index);
            let sum = if sums.element_bytes == 2 {
                f16_to_f32(bits as u16)
            } else {
                f32::from_bits(bits)
            };
            let terms = (0..left.columns).map(|depth| {
                factors[row * left.columns + depth] * others[depth * right.columns + column]
            });
            let sum = terms.fold(sum, |sum, term| sum + term);
            if out.element_bytes == 2 {
                f32_to_f16(sum).into()
            } else {
                sum.to_bits()
            }
        })
        .collect();
    for (index, bits) in results.into_iter().enumerate() {
        put(warp, out, index, bits);
    }
}
