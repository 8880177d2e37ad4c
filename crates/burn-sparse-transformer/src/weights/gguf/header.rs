use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::{BufReader, Read};

use super::GgufValue;
use super::blocks;

/// Header of a file: everything before the tensors.
#[derive(Debug, Clone)]
pub struct Header {
    pub metadata: BTreeMap<String, GgufValue>,
    pub tensors: BTreeMap<String, TensorInfo>,
}

/// Location, shape and type of a tensor.
#[derive(Debug, Clone)]
pub struct TensorInfo {
    /// Shape in PyTorch's order: the last axis is the innermost.
    pub shape: Vec<usize>,
    /// Number of its type, which may be unsupported.
    pub kind: u32,
    /// Offset from the beginning of the file.
    pub start: u64,
}

/// Most axes of a ggml tensor.
const MAX_DIMS: u32 = 4;

/// Reads a file's header, or returns why it is damaged.
pub fn read(file: impl Read, length: u64) -> Result<Header, String> {
    let mut source = Source {
        reader: BufReader::new(file),
        at: 0,
        length,
    };
    let magic: [u8; 4] = source.array()?;
    if &magic != b"GGUF" {
        return Err(format!("it must begin with GGUF, got {magic:?}"));
    }
    let version = source.u32()?;
    if (1..=3).contains(&version.swap_bytes()) {
        return Err("it is big endian, and what is read is little endian".into());
    }
    if !(2..=3).contains(&version) {
        return Err(format!("version must be 2 or 3, got {version}"));
    }
    let (n_tensors, n_keys) = (source.u64()?, source.u64()?);
    let metadata = source.named(n_keys, ["key", ""], |source| {
        let kind = source.u32()?;
        source.value(kind)
    })?;
    let whole = |key| metadata.get(key).map(GgufValue::as_u64);
    if let Some(parts @ (None | Some(2..))) = whole("split.count") {
        let got = parts.map_or("no number".into(), |parts| parts.to_string());
        return Err(format!("split.count must be 1: one file, got {got}"));
    }
    let alignment = match whole("general.alignment") {
        None => 32,
        Some(Some(alignment)) if alignment.is_power_of_two() => alignment,
        Some(_) => return Err("general.alignment must be a power of two".into()),
    };
    let mut tensors = source.named(n_tensors, ["tensor", "tensor "], |source| {
        source.tensor(alignment)
    })?;
    let data = source
        .at
        .checked_next_multiple_of(alignment)
        .ok_or("general.alignment is longer than the file")?;
    for (name, info) in &mut tensors {
        place(info, data, length).map_err(|reason| format!("tensor {name} {reason}"))?;
    }
    Ok(Header { metadata, tensors })
}

/// Turns an offset in the data into one in the file, and checks that the whole tensor is in the file.
fn place(info: &mut TensorInfo, data: u64, length: u64) -> Result<(), String> {
    let elements = info
        .shape
        .iter()
        .try_fold(1_usize, |product, &dim| product.checked_mul(dim))
        .ok_or_else(|| format!("must have fewer elements, got shape {:?}", info.shape))?;
    let offset = info.start;
    let end = match blocks::of_id(info.kind) {
        // The length of an unsupported type is unknown; reading the tensor is an error.
        None => Some(data),
        Some(kind) => {
            let row = info.shape.last().copied().unwrap_or(1);
            let (block, name) = (kind.elements, kind.name);
            if !row.is_multiple_of(block) {
                return Err(format!(
                    "of type {name} must have rows of a multiple of {block}, got {row}"
                ));
            }
            u64::try_from(elements / block)
                .ok()
                .and_then(|blocks| blocks.checked_mul(kind.bytes as u64))
                .and_then(|bytes| bytes.checked_add(data.checked_add(offset)?))
        }
    };
    info.start = data.saturating_add(offset);
    match end {
        Some(end) if end <= length => Ok(()),
        _ => Err(format!(
            "must end within the file of {length} bytes, got offset {offset} and shape {:?}",
            info.shape
        )),
    }
}

struct Source<R> {
    reader: BufReader<R>,
    at: u64,
    length: u64,
}

impl<R: Read> Source<R> {
    /// Reads `count` names, each followed by a value. Errors refer to an unreadable name by `what` and its index, and to others by `before` and the name.
    fn named<T>(
        &mut self,
        count: u64,
        [what, before]: [&str; 2],
        read: impl Fn(&mut Self) -> Result<T, String>,
    ) -> Result<BTreeMap<String, T>, String> {
        let mut found = BTreeMap::new();
        for index in 0..count {
            let name = self.string();
            let name = name.map_err(|reason| format!("{what} {index} of {count}: {reason}"))?;
            let value = read(self).map_err(|reason| format!("{before}{name}: {reason}"))?;
            match found.entry(name) {
                Entry::Vacant(entry) => entry.insert(value),
                Entry::Occupied(entry) => return Err(format!("{} is there twice", entry.key())),
            };
        }
        Ok(found)
    }

    fn tensor(&mut self, alignment: u64) -> Result<TensorInfo, String> {
        let rank = self.u32()?;
        if !(1..=MAX_DIMS).contains(&rank) {
            return Err(format!("it must have 1 to {MAX_DIMS} axes, got {rank}"));
        }
        let mut shape = Vec::new();
        for _ in 0..rank {
            let dim = self.u64()?;
            match usize::try_from(dim) {
                Ok(dim @ 1..) => shape.insert(0, dim),
                _ => return Err(format!("an axis must be of 1 or more, got {dim}")),
            }
        }
        let (kind, start) = (self.u32()?, self.u64()?);
        match start.is_multiple_of(alignment) {
            true => Ok(TensorInfo { shape, kind, start }),
            false => Err(format!(
                "its offset must be a multiple of {alignment}, got {start}"
            )),
        }
    }

    /// Reads a value of the type with this number in the format.
    fn value(&mut self, kind: u32) -> Result<GgufValue, String> {
        Ok(match kind {
            0 | 2 | 4 | 10 => GgufValue::Unsigned(self.unsigned(kind)?),
            1 | 3 | 5 | 11 => GgufValue::Signed(self.signed(kind)?),
            6 | 12 => GgufValue::Float(self.float(kind)?),
            7 => GgufValue::Bool(self.bool()?),
            8 => GgufValue::String(self.string()?),
            9 => {
                let (kind, count) = (self.u32()?, self.u64()?);
                self.values(kind, count)?
            }
            _ => return Err(format!("no value is of type {kind}")),
        })
    }

    fn values(&mut self, kind: u32, count: u64) -> Result<GgufValue, String> {
        // A string takes at least the bytes of its length.
        self.room(count, if kind == 8 { 8 } else { width(kind) as u64 })?;
        fn all<T>(
            count: u64,
            mut read: impl FnMut() -> Result<T, String>,
        ) -> Result<Vec<T>, String> {
            (0..count).map(|_| read()).collect()
        }
        Ok(match kind {
            0 | 2 | 4 | 10 => GgufValue::UnsignedArray(all(count, || self.unsigned(kind))?),
            1 | 3 | 5 | 11 => GgufValue::SignedArray(all(count, || self.signed(kind))?),
            6 | 12 => GgufValue::FloatArray(all(count, || self.float(kind))?),
            7 => GgufValue::BoolArray(all(count, || self.bool())?),
            8 => GgufValue::StringArray(all(count, || self.string())?),
            // ggml has no nested arrays, and a file of nothing but nesting would overflow the stack.
            _ => return Err(format!("no array is of type {kind}")),
        })
    }

    fn unsigned(&mut self, kind: u32) -> Result<u64, String> {
        let mut bytes = [0; 8];
        self.fill(&mut bytes[..width(kind)])?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn signed(&mut self, kind: u32) -> Result<i64, String> {
        let unused = 64 - 8 * width(kind);
        // Shifting back extends the sign.
        Ok((self.unsigned(kind)? << unused).cast_signed() >> unused)
    }

    fn float(&mut self, kind: u32) -> Result<f64, String> {
        Ok(match kind {
            6 => f32::from_le_bytes(self.array()?).into(),
            _ => f64::from_le_bytes(self.array()?),
        })
    }

    fn bool(&mut self) -> Result<bool, String> {
        match self.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(format!("a bool must be 0 or 1, got {other}")),
        }
    }

    fn string(&mut self) -> Result<String, String> {
        let length = self.u64()?;
        let mut bytes = vec![0; self.room(length, 1)?];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes).map_err(|error| format!("a string must be UTF-8: {error}"))
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), String> {
        self.room(bytes.len() as u64, 1)?;
        let result = self.reader.read_exact(bytes);
        result.map_err(|error| format!("at byte {}: {error}", self.at))?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Returns `count` if the rest of the file can hold that many items of `bytes` bytes.
    fn room(&self, count: u64, bytes: u64) -> Result<usize, String> {
        let left = self.length.saturating_sub(self.at);
        let needed = count.checked_mul(bytes).filter(|&needed| needed <= left);
        match (needed, usize::try_from(count)) {
            (Some(_), Ok(count)) => Ok(count),
            _ => Err(format!(
                "the file ends too early: {count} · {bytes} bytes of {left} at byte {}",
                self.at
            )),
        }
    }
}

fn width(kind: u32) -> usize {
    match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        _ => 8,
    }
}
