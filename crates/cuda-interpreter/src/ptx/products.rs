//! Products of tensor cores: `mma.sync` and `wgmma`.

use super::instruction::{Element, GroupProduct, Left, Op, Product};
use super::reader::{Decoded, Reader};

/// The element that both operands of a product have, of sums in f32.
fn element(reader: &Reader) -> Decoded<Element> {
    let kinds: Vec<&str> = reader
        .modifiers
        .iter()
        .rev()
        .copied()
        .take_while(|text| !text.starts_with('m'))
        .collect();
    let of = |name: &str| kinds.iter().filter(|text| **text == name).count();
    match (of("f32"), of("bf16"), of("f16"), of("tf32")) {
        (1 | 2, 2, 0, 0) => Ok(Element::BF16),
        (1 | 2, 0, 2, 0) => Ok(Element::F16),
        (1 | 2, 0, 0, 2) => Ok(Element::TF32),
        _ => reader.unknown(),
    }
}

/// Rows, columns and depth: `m64n128k16`.
fn shape(reader: &Reader) -> Option<[usize; 3]> {
    reader.modifiers.iter().find_map(|text| {
        let (rows, rest) = text.strip_prefix('m')?.split_once('n')?;
        let (columns, depth) = rest.split_once('k')?;
        Some([
            rows.parse().ok()?,
            columns.parse().ok()?,
            depth.parse().ok()?,
        ])
    })
}

pub fn product(reader: &mut Reader) -> Decoded<Op> {
    let element = element(reader)?;
    let Some([16, 8, depth]) = shape(reader) else {
        return reader.unknown();
    };
    let product = Product {
        element,
        depth,
        out: reader.slots()?,
        left: reader.slots()?,
        right: reader.slots()?,
        sums: reader.slots()?,
    };
    let numbers = if element == Element::TF32 { 1 } else { 2 };
    let counts = [
        product.out.len(),
        product.left.len() * numbers,
        product.right.len() * numbers,
    ];
    if counts == [4, depth / 2, depth / 4] {
        Ok(Op::Product(product))
    } else {
        reader.unknown()
    }
}

pub fn group_product(reader: &mut Reader) -> Decoded<Op> {
    if reader.has("fence") || reader.has("commit_group") || reader.has("wait_group") {
        return Ok(Op::Nothing);
    }
    let element = element(reader)?;
    let Some([64, columns, depth]) = shape(reader) else {
        return reader.unknown();
    };
    if depth != (if element == Element::TF32 { 8 } else { 16 }) {
        return reader.unknown();
    }
    let sums = reader.slots()?;
    let left = match reader.slots()? {
        one if one.len() == 1 => Left::Described(one[0]),
        registers => Left::Registers(registers),
    };
    let (right, adds) = (reader.slot()?, reader.slot()?);
    let signs = [reader.slot()?, reader.slot()?];
    let turned_left = match &left {
        Left::Described(_) => reader.optional()?,
        Left::Registers(_) => None,
    };
    let transposed = [turned_left, reader.optional()?];
    if sums.len() != columns / 2 || reader.left() > 0 {
        return reader.unknown();
    }
    Ok(Op::GroupProduct(Box::new(GroupProduct {
        element,
        columns,
        sums,
        left,
        right,
        adds,
        signs,
        transposed,
    })))
}
