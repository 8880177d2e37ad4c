//! Tensor types and dequantisation. Quantised elements are in blocks with their own scales, in ggml's layouts.

use burn::tensor::{DType, Shape, TensorData, f16};

use Numbers::{Blocks, Plain};

/// Supported tensor type.
pub struct TensorType {
    pub name: &'static str,
    id: u32,
    /// Elements of a block.
    pub elements: usize,
    /// Bytes of a block.
    pub bytes: usize,
    numbers: Numbers,
}

enum Numbers {
    /// Not quantised.
    Plain(DType),
    /// Quantised: appends the elements of one block.
    Blocks(fn(&[u8], &mut Vec<f32>)),
}

const fn of(
    name: &'static str,
    id: u32,
    [elements, bytes]: [usize; 2],
    numbers: Numbers,
) -> TensorType {
    TensorType {
        name,
        id,
        elements,
        bytes,
        numbers,
    }
}

static TYPES: [TensorType; 12] = [
    of("F32", 0, [1, 4], Plain(DType::F32)),
    of("F16", 1, [1, 2], Plain(DType::F16)),
    of("BF16", 30, [1, 2], Plain(DType::BF16)),
    of("F64", 28, [1, 8], Plain(DType::F64)),
    of("Q4_0", 2, [32, 18], Blocks(q4_0)),
    of("Q4_1", 3, [32, 20], Blocks(q4_1)),
    of("Q5_0", 6, [32, 22], Blocks(q5_0)),
    of("Q5_1", 7, [32, 24], Blocks(q5_1)),
    of("Q8_0", 8, [32, 34], Blocks(q8_0)),
    of("Q4_K", 12, [256, 144], Blocks(q4_k)),
    of("Q5_K", 13, [256, 176], Blocks(q5_k)),
    of("Q6_K", 14, [256, 210], Blocks(q6_k)),
];

/// Names of unsupported types, for messages.
const OTHERS: &str = "9=Q8_1 10=Q2_K 11=Q3_K 15=Q8_K 16=IQ2_XXS 17=IQ2_XS 18=IQ3_XXS 19=IQ1_S 20=IQ4_NL 21=IQ3_S 22=IQ2_S \
    23=IQ4_XS 24=I8 25=I16 26=I32 27=I64 29=IQ1_M 34=TQ1_0 35=TQ2_0 39=MXFP4 40=NVFP4 41=Q1_0";

/// Returns the type with this number in the format, if it is supported.
pub fn of_id(id: u32) -> Option<&'static TensorType> {
    TYPES.iter().find(|kind| kind.id == id)
}

/// Returns the name of an unsupported type.
pub fn name_of(id: u32) -> String {
    let id = id.to_string();
    let mut others = OTHERS.split(' ').filter_map(|other| other.split_once('='));
    match others.find(|(other, _)| *other == id) {
        Some((_, name)) => format!("{name} ({id})"),
        None => id,
    }
}

/// Returns the names of the supported types.
pub fn names() -> String {
    TYPES.each_ref().map(|kind| kind.name).join(", ")
}

impl TensorType {
    /// Returns the dtype of the elements after reading.
    pub fn dtype(&self) -> DType {
        match self.numbers {
            Plain(dtype) => dtype,
            Blocks(_) => DType::F32,
        }
    }

    /// Returns the bytes of whole blocks.
    pub fn length(&self, elements: usize) -> usize {
        elements / self.elements * self.bytes
    }

    /// Converts the bytes of a tensor to its elements.
    pub fn data(&self, bytes: Vec<u8>, shape: Vec<usize>) -> TensorData {
        match self.numbers {
            Plain(dtype) => TensorData::from_bytes_vec(bytes, Shape::from(shape), dtype),
            Blocks(block) => {
                let blocks = bytes.chunks_exact(self.bytes);
                let mut numbers = Vec::with_capacity(blocks.len() * self.elements);
                blocks.for_each(|bytes| block(bytes, &mut numbers));
                TensorData::new(numbers, Shape::from(shape))
            }
        }
    }
}

fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Iterates over 32 four-bit integers: the lower halves of 16 bytes, then the upper ones.
fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> {
    let lower = bytes.iter().map(|byte| byte & 15);
    lower.chain(bytes.iter().map(|byte| byte >> 4))
}

/// Iterates over 32 five-bit integers: [`nibbles`], with the fifth bits in a word before them.
fn five_bits(high: &[u8], low: &[u8]) -> impl Iterator<Item = u8> {
    let high = [high[0], high[1], high[2], high[3]];
    let high = u32::from_le_bytes(high);
    let bits = (0..32).map(move |bit| (high >> bit & 1) as u8);
    nibbles(low).zip(bits).map(|(low, high)| low | high << 4)
}

/// Half-precision scale; 16 bytes of integers minus 8.
fn q4_0(block: &[u8], numbers: &mut Vec<f32>) {
    let scale = half(block, 0);
    numbers.extend(nibbles(&block[2..]).map(|q| (f32::from(q) - 8.0) * scale));
}

/// Half-precision scale and minimum; 16 bytes.
fn q4_1(block: &[u8], numbers: &mut Vec<f32>) {
    let (scale, min) = (half(block, 0), half(block, 2));
    numbers.extend(nibbles(&block[4..]).map(|q| f32::from(q) * scale + min));
}

/// Half-precision scale; fifth bits; 16 bytes, of integers minus 16.
fn q5_0(block: &[u8], numbers: &mut Vec<f32>) {
    let scale = half(block, 0);
    let five = five_bits(&block[2..6], &block[6..]);
    numbers.extend(five.map(|q| (f32::from(q) - 16.0) * scale));
}

/// Half-precision scale and minimum; fifth bits; 16 bytes.
fn q5_1(block: &[u8], numbers: &mut Vec<f32>) {
    let (scale, min) = (half(block, 0), half(block, 2));
    let five = five_bits(&block[4..8], &block[8..]);
    numbers.extend(five.map(|q| f32::from(q) * scale + min));
}

/// Half-precision scale; 32 signed bytes.
fn q8_0(block: &[u8], numbers: &mut Vec<f32>) {
    let scale = half(block, 0);
    let signed = block[2..].iter().map(|byte| byte.cast_signed());
    numbers.extend(signed.map(|q| f32::from(q) * scale));
}

/// Unpacks eight scales and eight minima of six bits each from 12 bytes. The first four of both have one byte each, whose upper two bits belong to the last
/// four.
fn scales_and_minima(packed: &[u8]) -> [(f32, f32); 8] {
    std::array::from_fn(|part| {
        let (scale, min) = match part {
            0..4 => (packed[part] & 63, packed[part + 4] & 63),
            _ => {
                let low = packed[part + 4];
                let high = |at: usize| packed[at] >> 6 << 4;
                (low & 15 | high(part - 4), low >> 4 | high(part))
            }
        };
        (f32::from(scale), f32::from(min))
    })
}

/// Eight parts of 32 elements: half-precision scale and scale of the minima, then the parts' own scales and minima, fifth bits if any, and 128 bytes.
fn parts_of_32(block: &[u8], fifth: Option<&[u8]>, low: &[u8], numbers: &mut Vec<f32>) {
    let (scale, min) = (half(block, 0), half(block, 2));
    let parts = scales_and_minima(&block[4..16]);
    for (part, (own_scale, own_min)) in parts.into_iter().enumerate() {
        let (scale, min) = (scale * own_scale, min * own_min);
        // Two parts share their bytes.
        let bytes = &low[part / 2 * 32..][..32];
        numbers.extend((0..32).map(|at| {
            let low = bytes[at] >> (part % 2 * 4) & 15;
            let high = fifth.map_or(0, |fifth| fifth[at] >> part & 1);
            f32::from(low | high << 4) * scale - min
        }));
    }
}

fn q4_k(block: &[u8], numbers: &mut Vec<f32>) {
    parts_of_32(block, None, &block[16..], numbers);
}

fn q5_k(block: &[u8], numbers: &mut Vec<f32>) {
    parts_of_32(block, Some(&block[16..48]), &block[48..], numbers);
}

/// 128 bytes of lower four bits, 64 of upper two bits, 16 signed scales, and their half-precision scale; integers minus 32.
fn q6_k(block: &[u8], numbers: &mut Vec<f32>) {
    let scale = half(block, 208);
    // Quarters of each half: 32 elements with two scales.
    for part in 0..8 {
        let (of_half, quarter) = (part / 4, part % 4);
        let low = &block[of_half * 64 + quarter % 2 * 32..][..32];
        let high = &block[128 + of_half * 32..][..32];
        let scales = &block[192 + part * 2..][..2];
        numbers.extend((0..32).map(|at| {
            let low = low[at] >> (quarter / 2 * 4) & 15;
            let high = high[at] >> (quarter * 2) & 3;
            let own = f32::from(scales[at / 16].cast_signed());
            scale * own * (f32::from(low | high << 4) - 32.0)
        }));
    }
}
