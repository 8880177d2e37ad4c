//! GGUF, llama.cpp's format: metadata, and quantised tensors.

// header        everything before the tensors, read once
// value         values of the metadata
// blocks        tensor types, and dequantisation
// llama         configurations from the metadata

mod blocks;
mod header;
mod llama;
mod value;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use burn::store::bridge;
use burn::store::burn_pack::{Error, Tensor as Stored};
use burn::tensor::{Shape, TensorData};

use super::error::{Result, WeightsError};
use blocks::TensorType;
use header::{Header, TensorInfo};

pub use value::GgufValue;

/// GGUF file of version 2 or 3, little endian. Metadata is in memory; tensors are read on request.
///
/// [`WeightsFile::open`](super::WeightsFile::open) returns the tensors, [`LlamaConfig::from_gguf`](crate::llama::LlamaConfig::from_gguf) the configuration
/// and [`KeyMap::llama_gguf`](super::KeyMap::llama_gguf) the map of a model. The metadata also describes the tokenizer.
///
/// ```no_run
/// use burn_sparse_transformer::weights::Gguf;
///
/// let gguf = Gguf::open("SmolLM2-135M-Instruct-Q8_0.gguf")?;
/// let tokens = gguf.get("tokenizer.ggml.tokens").and_then(|tokens| tokens.as_strings());
/// println!("{} tokens", tokens.map_or(0, <[_]>::len));
/// # Ok::<(), burn_sparse_transformer::weights::WeightsError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Gguf {
    path: String,
    file: Arc<Mutex<File>>,
    header: Header,
}

impl Gguf {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// [`WeightsError::Read`] if the file cannot be read, is damaged, has another version, is big endian or is one of several parts.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let opened = || {
            let file = File::open(path).map_err(|error| error.to_string())?;
            let length = file.metadata().map_err(|error| error.to_string())?.len();
            let header = header::read(&file, length)?;
            Ok((Arc::new(Mutex::new(file)), header))
        };
        let path = path.display().to_string();
        let (file, header) =
            opened().map_err(|reason: String| WeightsError::read(&path, reason))?;
        Ok(Self { path, file, header })
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Returns all keys and their values.
    pub fn metadata(&self) -> &BTreeMap<String, GgufValue> {
        &self.header.metadata
    }

    /// Returns the value of a key, such as `general.architecture`.
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.header.metadata.get(key)
    }

    pub(super) fn architecture(&self) -> Option<&str> {
        self.get("general.architecture")?.as_str()
    }

    fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.header.tensors.get(name)?.shape)
    }

    fn tensor(&self, name: &str) -> Result<Option<TensorData>> {
        let Some(info) = self.header.tensors.get(name) else {
            return Ok(None);
        };
        let kind = self.known(name, info)?;
        let data = read(&self.file, name, info, kind);
        data.map(Some).map_err(|error| self.failed(error))
    }

    /// Returns the tensors, each read from the file on request.
    pub(super) fn tensors(&self) -> Result<BTreeMap<String, Stored>> {
        let stored = |(name, info): (&String, &TensorInfo)| {
            let kind = self.known(name, info)?;
            let (file, shape) = (self.file.clone(), Shape::from(info.shape.clone()));
            let (own_name, info) = (name.clone(), info.clone());
            let read = move || read(&file, &own_name, &info, kind);
            let tensor = bridge::deferred(name.clone(), kind.dtype(), shape, None, read);
            Ok((name.clone(), tensor))
        };
        self.header.tensors.iter().map(stored).collect()
    }

    /// Returns the type of a tensor, if it is supported.
    fn known(&self, name: &str, info: &TensorInfo) -> Result<&'static TensorType> {
        blocks::of_id(info.kind).ok_or_else(|| {
            let (got, read) = (blocks::name_of(info.kind), blocks::names());
            self.failed(format!(
                "tensor {name} is of type {got}, and those that are read are {read}"
            ))
        })
    }

    fn failed(&self, reason: impl Display) -> WeightsError {
        WeightsError::read(&self.path, reason)
    }
}

fn read(
    file: &Mutex<File>,
    name: &str,
    info: &TensorInfo,
    kind: &TensorType,
) -> Result<TensorData, Error> {
    // Bounded by the file's length: the header's reader has checked it.
    let mut bytes = vec![0; kind.length(info.shape.iter().product())];
    {
        // A poisoned lock is harmless: the file position is set anew.
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        let place = file.seek(SeekFrom::Start(info.start));
        place
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(|error| Error::IoError(format!("tensor {name}: {error}")))?;
    }
    Ok(kind.data(bytes, info.shape.clone()))
}
