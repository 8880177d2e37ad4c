//! Products of tensor cores: `mma.sync` and `wgmma`.

use super::Type;
use super::instruction::{
    Element, Fragment, FragmentPlace, FragmentProduct, GroupProduct, Left, Op, Product,
};
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
    let elements = [
        ("bf16", Element::BF16),
        ("f16", Element::F16),
        ("tf32", Element::TF32),
        ("e4m3", Element::E4M3),
    ];
    let factors = elements.into_iter().find(|(name, _)| of(name) == 2);
    match factors {
        Some((_, element)) if (1..=2).contains(&of("f32")) => Ok(element),
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
    let numbers = 4 / element.bytes();
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
    if reader.has("fence") {
        return Ok(Op::Nothing);
    }
    if reader.has("commit_group") {
        return Ok(Op::CommitProducts);
    }
    if reader.has("wait_group") {
        return Ok(Op::WaitProducts(reader.slot()?));
    }
    let element = element(reader)?;
    let Some([64, columns, depth]) = shape(reader) else {
        return reader.unknown();
    };
    if depth != 32 / element.bytes() {
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

/// `wmma`: loads, stores and products of fragments.
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
        true => Op::LoadFragment(fragment, place),
        false => Op::StoreFragment(fragment, place),
    })
}

/// A fragment of rows, columns and bytes of an element, for which registers have room.
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
    // Types of the result and of what is added stand before and behind those of the factors.
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
    Ok(Op::FragmentProduct(Box::new(FragmentProduct {
        element,
        out: fragment(reader, [rows, columns, of_out])?,
        left: fragment(reader, [rows, depth, of_factors])?,
        right: fragment(reader, [depth, columns, of_factors])?,
        sums: fragment(reader, [rows, columns, of_sums])?,
    })))
}
