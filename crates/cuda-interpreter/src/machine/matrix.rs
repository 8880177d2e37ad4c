//! Tensor cores: products of low-precision tiles, and the layout of their operands in registers and shared memory (PTX
//! ISA, sections 9.7.14 and 9.7.15).

use blocksparse::Quantization;
use half::{bf16, f16};

use super::cube::Cube;
use super::memory::{part, read};
use super::op::Op;
use super::tensor_map::Swizzle;
use super::warp::Warp;
use crate::error::Fault;
use crate::ptx::{Decoded, Lanes, Reader, Slot, Space};

/// Number of rows of a warp's tile.
const ROWS: usize = 16;

/// Element types of tensor cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F16,
    BF16,
    TF32,
    E4M3,
}

impl Element {
    pub fn bytes(self) -> usize {
        match self {
            Self::E4M3 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::TF32 => 4,
        }
    }
}

/// Returns the element type of both operands of a product with f32 sums.
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

/// Returns rows, columns and depth: `m64n128k16`.
pub fn shape(reader: &Reader) -> Option<[usize; 3]> {
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

/// Returns the value of an element.
pub fn number(element: Element, bits: u32) -> f32 {
    match element {
        Element::F16 => f16::from_bits(bits as u16).to_f32(),
        Element::BF16 => bf16::from_bits(bits as u16).to_f32(),
        // Ten bits of the fraction remain.
        Element::TF32 => f32::from_bits(bits & !0x1fff),
        Element::E4M3 => Quantization::Fp8E4m3.decode(bits as u8),
    }
}

/// Returns a left operand in registers, by depth and row. Two registers hold the columns of 16 bytes of depth.
fn left_of(warp: &Warp, element: Element, slots: &[Slot]) -> Vec<[f32; ROWS]> {
    let each = 4 / element.bytes();
    let mut numbers = vec![[0.0; ROWS]; slots.len() / 2 * 4 * each];
    for (register, &slot) in slots.iter().enumerate() {
        for lane in 0..32 {
            for part in 0..each {
                let row = lane / 4 + register % 2 * 8;
                let depth = register / 2 * 4 * each + lane % 4 * each + part;
                let bits = (warp.at(slot)[lane] >> (32 / each * part)) as u32;
                numbers[depth][row] = number(element, bits);
            }
        }
    }
    numbers
}

/// Decodes `mma.sync` with 16 rows and 8 columns (PTX ISA, section 9.7.14).
pub fn product(reader: &mut Reader) -> Decoded<Op> {
    let element = element(reader)?;
    let Some([16, 8, depth]) = shape(reader) else {
        return reader.unknown();
    };
    let [out, left] = [reader.slots()?, reader.slots()?];
    let [right, sums] = [reader.slots()?, reader.slots()?];
    let numbers = 4 / element.bytes();
    if [out.len(), left.len() * numbers, right.len() * numbers] != [4, depth / 2, depth / 4] {
        return reader.unknown();
    }
    let reads = sums.clone();
    Ok(Op::whole(move |warp, _, lanes| {
        multiply(warp, element, depth, [&out, &left, &right, &sums], lanes);
        Ok(())
    })
    .reading(&reads))
}

fn multiply(
    warp: &mut Warp,
    element: Element,
    depth: usize,
    [out, left, right, sums]: [&[Slot]; 4],
    lanes: u32,
) {
    let left = left_of(warp, element, left);
    let numbers = 4 / element.bytes();
    let mut others = vec![[0.0; 8]; depth];
    for (register, &slot) in right.iter().enumerate() {
        for lane in 0..32 {
            for part in 0..numbers {
                let depth = register * 4 * numbers + lane % 4 * numbers + part;
                let bits = (warp.at(slot)[lane] >> (32 / numbers * part)) as u32;
                others[depth][lane / 4] = number(element, bits);
            }
        }
    }
    for register in 0..4 {
        let sums: Lanes = std::array::from_fn(|lane| {
            let (row, column) = (lane / 4 + register / 2 * 8, lane % 4 * 2 + register % 2);
            let sum = f32::from_bits(warp.at(sums[register])[lane] as u32);
            let terms = left.iter().zip(&others);
            let sum = terms.fold(sum, |sum, (left, right)| sum + left[row] * right[column]);
            sum.to_bits().into()
        });
        warp.set(out[register], &sums, lanes);
    }
}

/// A matrix in shared memory given by a descriptor (PTX ISA, section 9.7.15.5.1).
struct Described {
    start: u64,
    leading: u64,
    stride: u64,
    swizzle: Swizzle,
    row_bytes: u64,
    element: Element,
    /// True if consecutive elements run along rows or columns of the sums rather than along depth.
    transposed: bool,
}

impl Described {
    fn new(bits: u64, element: Element, transposed: bool) -> Result<Self, Fault> {
        let field = |low: u32| (bits >> low & 0x3fff) << 4;
        let row_bytes = match bits >> 62 {
            0 => 16,
            1 => 128,
            2 => 64,
            _ => 32,
        };
        if bits >> 49 & 7 != 0 {
            return Err(Fault::Launch(
                "a descriptor's base offset is not known here".to_owned(),
            ));
        }
        Ok(Self {
            start: field(0),
            leading: field(16),
            stride: field(32),
            swizzle: Swizzle::of_bytes(row_bytes),
            row_bytes,
            element,
            transposed,
        })
    }

    /// Returns the address of an element, given its row or column of the sums and its depth.
    fn place(&self, line: u64, depth: u64) -> u64 {
        let size = self.element.bytes() as u64;
        let (unit, pitch) = (16 / size, self.row_bytes);
        let offset = match (self.transposed, self.swizzle) {
            // A core matrix has eight rows of sixteen bytes, along depth or along rows or columns of the sums.
            (false, Swizzle::None) => {
                line / 8 * self.stride
                    + line % 8 * pitch
                    + depth / unit * self.leading
                    + depth % unit * size
            }
            (true, Swizzle::None) => {
                line / unit * self.stride
                    + depth / 8 * self.leading
                    + depth % 8 * pitch
                    + line % unit * size
            }
            (false, Swizzle::Rows(_)) => line / 8 * self.stride + line % 8 * pitch + depth * size,
            (true, Swizzle::Rows(_)) => {
                let wide = pitch / size;
                line / wide * self.leading
                    + depth / 8 * self.stride
                    + depth % 8 * pitch
                    + line % wide * size
            }
        };
        self.swizzle.place(self.start + offset)
    }

    fn read(&self, cube: &mut Cube, warp: usize, line: u64, depth: u64) -> Result<f32, Fault> {
        let (size, address) = (self.element.bytes(), self.place(line, depth));
        if let Some(races) = &mut cube.races {
            races.read_by_product(warp, address, size)?;
        }
        let place = part(&mut cube.shared, Space::Shared, address, size)?;
        // SAFETY: `part` has checked the bounds of the access.
        let bits = unsafe { read(place, size) } as u32;
        Ok(number(self.element, bits))
    }
}

/// Left operand of a warpgroup product.
enum Left {
    Described(Slot),
    Registers(Vec<Slot>),
}

/// `wgmma.mma_async` (PTX ISA, section 9.7.15).
struct GroupProduct {
    element: Element,
    columns: usize,
    sums: Vec<Slot>,
    left: Left,
    right: Slot,
    adds: Slot,
    signs: [Slot; 2],
    /// Whether the rows of each operand run along the dimension of the sums.
    transposed: [Option<Slot>; 2],
}

pub fn group_product(reader: &mut Reader) -> Decoded<Op> {
    if reader.has("fence") {
        return Ok(Op::nothing());
    }
    if reader.has("commit_group") {
        return Ok(Op::then(|warp, cube, _| {
            cube.watched(|races| races.commit_products(warp.number));
            Ok(())
        }));
    }
    // Waits until at most so many groups of products are pending.
    if reader.has("wait_group") {
        let left = reader.slot()?;
        return Ok(Op::then(move |warp, cube, _| match &mut cube.races {
            Some(races) => races.wait_products(warp.number, warp.at(left)[0] as usize),
            None => Ok(()),
        }));
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
    let product = GroupProduct {
        element,
        columns,
        sums,
        left,
        right,
        adds,
        signs,
        transposed,
    };
    Ok(Op::whole(move |warp, cube, _| {
        multiply_group(warp, cube, &product)?;
        cube.watched(|races| races.hold_registers(warp.number, &product.sums));
        Ok(())
    }))
}

/// Computes `wgmma.mma_async` for a warp's sixteen rows of the warpgroup's 64. The result is available immediately.
///
/// # Errors
///
/// [`Fault`] for operands outside of shared memory.
fn multiply_group(warp: &mut Warp, cube: &mut Cube, product: &GroupProduct) -> Result<(), Fault> {
    let element = product.element;
    let depths = 32 / element.bytes();
    let value = |slot: Slot| warp.uniform(slot, u32::MAX);
    let turned = |slot: Option<Slot>| slot.is_some_and(|slot| value(slot) == 1);
    let sign = |slot: Slot| if value(slot) as i32 == -1 { -1.0 } else { 1.0 };
    let sign = sign(product.signs[0]) * sign(product.signs[1]);
    let left = match &product.left {
        Left::Registers(slots) => left_of(warp, element, slots),
        Left::Described(slot) => {
            let matrix = Described::new(value(*slot), element, turned(product.transposed[0]))?;
            let first = warp.number % 4 * ROWS;
            let mut numbers = vec![[0.0; ROWS]; depths];
            for (depth, column) in numbers.iter_mut().enumerate() {
                for (row, number) in column.iter_mut().enumerate() {
                    *number = matrix.read(cube, warp.number, (first + row) as u64, depth as u64)?;
                }
            }
            numbers
        }
    };
    let matrix = Described::new(value(product.right), element, turned(product.transposed[1]))?;
    let adds = value(product.adds) & 1 == 1;
    let columns = product.columns;
    let mut sums = vec![0.0; ROWS * columns];
    if adds {
        for (register, &slot) in product.sums.iter().enumerate() {
            for lane in 0..32 {
                sums[place_of(register, lane, columns)] =
                    f32::from_bits(warp.at(slot)[lane] as u32);
            }
        }
    }
    let mut line = vec![0.0; columns];
    for (depth, column) in left.iter().enumerate() {
        for (at, number) in line.iter_mut().enumerate() {
            *number = sign * matrix.read(cube, warp.number, at as u64, depth as u64)?;
        }
        for (row, &factor) in column.iter().enumerate() {
            for (sum, number) in sums[row * columns..][..columns].iter_mut().zip(&line) {
                *sum += factor * number;
            }
        }
    }
    for (register, &slot) in product.sums.iter().enumerate() {
        let values: Lanes =
            std::array::from_fn(|lane| sums[place_of(register, lane, columns)].to_bits().into());
        warp.set(slot, &values, u32::MAX);
    }
    Ok(())
}

/// Returns the index of the sum that a lane's register holds.
fn place_of(register: usize, lane: usize, columns: usize) -> usize {
    let row = lane / 4 + register / 2 % 2 * 8;
    row * columns + register / 4 * 8 + lane % 4 * 2 + register % 2
}
