//! Writer of llama.cpp's format, byte by byte.

use std::fs;

use burn_sparse_transformer::weights::Gguf;

use crate::support::Scratch;

pub const F32: u32 = 0;
pub const Q8_0: u32 = 8;

/// Contents of a file.
#[derive(Clone)]
pub struct Writer {
    pub version: u32,
    pub alignment: usize,
    pub n_keys: u64,
    pub keys: Vec<u8>,
    pub n_tensors: u64,
    pub infos: Vec<u8>,
    pub data: Vec<u8>,
}

impl Writer {
    pub fn new(architecture: &str) -> Self {
        let empty = Self {
            version: 3,
            alignment: 32,
            n_keys: 0,
            keys: Vec::new(),
            n_tensors: 0,
            infos: Vec::new(),
            data: Vec::new(),
        };
        empty.text("general.architecture", architecture)
    }

    /// Adds a value of a type, by its type id.
    pub fn key(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.n_keys += 1;
        put_text(&mut self.keys, key);
        self.keys.extend(kind.to_le_bytes());
        self.keys.extend(value);
        self
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.key(key, 4, &value.to_le_bytes())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.key(key, 6, &value.to_le_bytes())
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        let mut bytes = Vec::new();
        put_text(&mut bytes, value);
        self.key(key, 8, &bytes)
    }

    pub fn texts(self, key: &str, values: &[&str]) -> Self {
        let mut bytes = 8_u32.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| put_text(&mut bytes, value));
        self.key(key, 9, &bytes)
    }

    /// Adds a tensor of a shape in PyTorch's order.
    pub fn tensor(mut self, name: &str, shape: &[usize], kind: u32, bytes: &[u8]) -> Self {
        let start = self.data.len().next_multiple_of(self.alignment);
        self.data.resize(start, 0);
        self.data.extend(bytes);
        self.info(name, shape, kind, start as u64)
    }

    pub fn info(mut self, name: &str, shape: &[usize], kind: u32, offset: u64) -> Self {
        self.n_tensors += 1;
        put_text(&mut self.infos, name);
        self.infos.extend((shape.len() as u32).to_le_bytes());
        for &dim in shape.iter().rev() {
            self.infos.extend((dim as u64).to_le_bytes());
        }
        self.infos.extend(kind.to_le_bytes());
        self.infos.extend(offset.to_le_bytes());
        self
    }

    pub fn numbers(self, name: &str, shape: &[usize], numbers: &[f32]) -> Self {
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.tensor(name, shape, F32, &bytes)
    }

    pub fn header(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.n_tensors.to_le_bytes());
        bytes.extend(self.n_keys.to_le_bytes());
        bytes.extend(&self.keys);
        bytes.extend(&self.infos);
        bytes
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.header();
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        bytes.extend(&self.data);
        bytes
    }

    pub fn file(&self, name: &str) -> Scratch {
        let file = Scratch::new(&format!("{name}.gguf"));
        fs::write(&file.0, self.bytes()).unwrap();
        file
    }

    pub fn open(&self, name: &str) -> Gguf {
        // An open file needs no name where open files may be removed.
        Gguf::open(&self.file(name).0).unwrap()
    }
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// Permutes `[outputs, inputs]` to the row order of each head in llama.cpp's files of architecture llama: the halves interleaved.
pub fn interleaved(numbers: &[f32], heads: usize, outputs: usize) -> Vec<f32> {
    let (row, width) = (numbers.len() / outputs, outputs / heads);
    let mut rows = Vec::with_capacity(numbers.len());
    for head in 0..heads {
        for pair in 0..width / 2 {
            for half in 0..2 {
                let from = head * width + half * (width / 2) + pair;
                rows.extend_from_slice(&numbers[from * row..][..row]);
            }
        }
    }
    rows
}

/// Returns blocks of 32 signed bytes, each with a power-of-two scale in half precision; and the dequantized elements.
pub fn q8_0(numbers: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let (mut bytes, mut rounded) = (Vec::new(), Vec::new());
    for block in numbers.chunks_exact(32) {
        let largest = block
            .iter()
            .fold(f32::MIN_POSITIVE, |max, x| max.max(x.abs()));
        let exponent = ((largest / 127.0).log2().ceil() as i32).clamp(-14, 15);
        // The exponent of a half-precision number begins at bit 10, with bias 15.
        bytes.extend((((exponent + 15) as u16) << 10).to_le_bytes());
        for number in block {
            let quantised = (number / 2_f32.powi(exponent)).round() as i8;
            bytes.push(quantised.cast_unsigned());
            rounded.push(f32::from(quantised) * 2_f32.powi(exponent));
        }
    }
    (bytes, rounded)
}
