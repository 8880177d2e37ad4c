use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::Path;

use burn::module::Module;
use burn::store::burn_pack::Tensor as Stored;
use burn::store::{
    BurnpackStore, ModuleSnapshot, ModuleStore, PytorchStore, SafetensorsStore, bridge,
};
use burn::tensor::{DType, TensorData};

use super::error::{Result, WeightsError, WrongTensor};
use super::parameters::{Wanted, wanted};
use super::{Form, Gguf, KeyMap};
use crate::linear::fnv;

const ENDINGS: &str =
    ".safetensors, .pt, .pth, .bin (PyTorch), .gguf (llama.cpp) or .bpk, .burnpack (Burn)";

/// Files in a Hugging Face folder: a list of shards, or a single file.
const INDEX: &str = "model.safetensors.index.json";
const WHOLE: &str = "model.safetensors";

/// Tensors of a file. Elements are read on request.
#[derive(Debug)]
pub struct WeightsFile {
    path: String,
    tensors: BTreeMap<String, Stored>,
}

impl WeightsFile {
    /// Opens a file. The format follows from the ending of its name: `.safetensors`, `.pt`, `.pth` or `.bin` for a state dict that PyTorch saved, `.gguf` for
    /// llama.cpp's, `.bpk` or `.burnpack` for a Burn record. A `.safetensors.index.json` is read with all shards that it lists, and a folder by its
    /// `model.safetensors.index.json` or `model.safetensors`.
    ///
    /// PyTorch's files are read without running pickled code. Quantised blocks are dequantised when they are read: [`Gguf`].
    ///
    /// # Errors
    /// [`WeightsError::Format`] for another ending, [`WeightsError::Read`] if the file cannot be read or is damaged.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path.is_dir() {
            let index = path.join(INDEX);
            return match index.exists() {
                true => Self::shards(&index),
                false => Self::open(path.join(WHOLE)),
            };
        }
        if path.to_string_lossy().ends_with(".safetensors.index.json") {
            return Self::shards(path);
        }
        let ending = path.extension().and_then(|ending| ending.to_str());
        match ending.unwrap_or_default() {
            "safetensors" => Self::read(path, SafetensorsStore::from_file(path)),
            "pt" | "pth" | "bin" => Self::read(path, pytorch(path)),
            "gguf" => Self::of_gguf(&Gguf::open(path)?),
            "bpk" | "burnpack" => {
                let store = BurnpackStore::from_file(path).auto_extension(false);
                Self::read(path, store)
            }
            _ => Err(WeightsError::Format {
                path: path.display().to_string(),
                expected: ENDINGS,
            }),
        }
    }

    /// Returns the tensors of an open GGUF file, without reading its header again.
    ///
    /// # Errors
    /// [`WeightsError::Read`] if a tensor has an unsupported type.
    pub fn of_gguf(gguf: &Gguf) -> Result<Self> {
        Ok(Self {
            tensors: gguf.tensors()?,
            path: gguf.path().to_owned(),
        })
    }

    /// Opens a PyTorch file that has its state dict under a key, such as `model` in `torch.save({"model": model.state_dict(), ..}, path)`.
    ///
    /// # Errors
    /// [`WeightsError::Read`] if the file cannot be read or has no such key.
    pub fn open_pytorch(path: impl AsRef<Path>, key: &str) -> Result<Self> {
        let path = path.as_ref();
        Self::read(path, pytorch(path).with_top_level_key(key))
    }

    /// Opens all shards that an index lists.
    fn shards(index: &Path) -> Result<Self> {
        let path = index.display().to_string();
        let failed = |reason: &dyn Display| WeightsError::read(&path, reason);
        let text = std::fs::read_to_string(index).map_err(|reason| failed(&reason))?;
        let listed: Index = serde_json::from_str(&text).map_err(|reason| failed(&reason))?;
        let mut tensors = BTreeMap::new();
        let files: BTreeSet<&String> = listed.weight_map.values().collect();
        for file in files {
            // An index that lists itself would be read without end.
            if file.contains(['/', '\\']) || !file.ends_with(".safetensors") {
                return Err(failed(&format!(
                    "{file:?} is no name of a safetensors file"
                )));
            }
            for (name, tensor) in Self::open(index.with_file_name(file))?.tensors {
                if let Some(listed) = listed.weight_map.get(&name)
                    && listed != file
                {
                    return Err(failed(&format!(
                        "{name} is in {file}, but listed in {listed}"
                    )));
                }
                tensors.insert(name, tensor);
            }
        }
        match listed
            .weight_map
            .iter()
            .find(|(name, _)| !tensors.contains_key(*name))
        {
            Some((name, file)) => Err(failed(&format!("{file} has no tensor {name}"))),
            None => Ok(Self { path, tensors }),
        }
    }

    fn read<S: ModuleStore>(path: &Path, mut store: S) -> Result<Self> {
        let path = path.display().to_string();
        match store.get_all_tensors() {
            Ok(tensors) => Ok(Self {
                tensors: tensors.clone(),
                path,
            }),
            Err(reason) => Err(WeightsError::read(&path, reason)),
        }
    }

    /// Returns the names of the tensors, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns the shape of the tensor of this name, if there is one.
    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let tensor = self.tensors.get(name)?;
        Some(tensor.shape.iter().copied().collect())
    }

    /// Reads the elements of the tensor of this name in the file's dtype, if there is one.
    ///
    /// # Errors
    /// [`WeightsError::Read`] if they cannot be read.
    pub fn tensor(&self, name: &str) -> Result<Option<TensorData>> {
        let tensor = self.tensors.get(name);
        tensor.map(|tensor| self.data(tensor)).transpose()
    }

    /// Returns the module with its parameters from this file. Every parameter must be in the file, unless `map` keeps it, and every tensor of the file must
    /// belong to a parameter, unless `map` ignores it; otherwise nothing is loaded. Elements are converted to the parameters' dtypes, on the module's device;
    /// parameters keep their ids.
    ///
    /// # Errors
    /// [`WeightsError::Mismatch`] names everything that does not match, [`WeightsError::Read`] what could not be read.
    pub fn load<M: Module>(&self, module: &M, map: &KeyMap) -> Result<M> {
        let plan = self.plan(module, map)?;
        let mut tensors = Vec::with_capacity(plan.len());
        for (parameter, form, source) in plan {
            let dtype = parameter.dtype;
            let data = match source {
                Some(source) => form.take(self.data(source)?),
                None => TensorData::full_dtype(parameter.shape, 0, dtype),
            };
            // The mask of kept blocks is identified by its id.
            let id = dtype
                .is_bool()
                .then(|| fnv(data.as_bytes().iter().copied()));
            let data = data.convert_dtype(dtype);
            tensors.push(bridge::from_data(data, parameter.name, id));
        }
        let mut loaded = module.clone();
        let result = loaded.apply(tensors, None, None, false);
        match result.errors.first() {
            Some(error) => Err(WeightsError::read(&self.path, error)),
            None => Ok(loaded),
        }
    }

    /// Returns the source of each parameter, if all of them match.
    fn plan<M: Module>(&self, module: &M, map: &KeyMap) -> Result<Vec<Planned<'_>>> {
        let mut named: BTreeMap<&str, (&str, &Stored)> = BTreeMap::new();
        let mut unexpected = BTreeSet::new();
        for (name, tensor) in &self.tensors {
            let short = map.without_prefix(name);
            if map.is_ignored(short) {
                continue;
            }
            unexpected.insert(name.as_str());
            // If a name occurs with and without a prefix, the second is unexpected.
            named.entry(short).or_insert((name, tensor));
        }
        let (mut missing, mut wrong) = (BTreeSet::new(), Vec::new());
        let mut plan = Vec::new();
        for parameter in wanted(module) {
            let candidates = map.candidates(&parameter.name);
            let found = candidates.iter().find_map(|(name, form)| match form {
                Form::Zeros => Some(("", *form, None)),
                _ => {
                    let &(name, tensor) = named.get(map.without_prefix(name))?;
                    Some((name, *form, Some(tensor)))
                }
            });
            let Some((name, form, source)) = found else {
                if map.is_kept(&parameter.name) {
                    continue;
                }
                let names: Vec<_> = candidates.into_iter().map(|(name, _)| name).collect();
                missing.insert(names.join(" or "));
                continue;
            };
            // All tensors that a parameter may be read from are expected, such as a stored head that is tied to an embedding.
            for (name, _) in &candidates {
                if let Some((name, _)) = named.get(map.without_prefix(name)) {
                    unexpected.remove(name);
                }
            }
            if let Some(source) = source {
                wrong.extend(differing(name, form, &parameter, source));
            }
            plan.push((parameter, form, source));
        }
        wrong.sort_by(|a, b| a.name.cmp(&b.name));
        wrong.dedup();
        match missing.is_empty() && unexpected.is_empty() && wrong.is_empty() {
            true => Ok(plan),
            false => Err(WeightsError::Mismatch {
                path: self.path.clone(),
                missing: missing.into_iter().collect(),
                unexpected: unexpected.into_iter().map(str::to_owned).collect(),
                wrong,
            }),
        }
    }

    fn data(&self, tensor: &Stored) -> Result<TensorData> {
        bridge::to_data(tensor).map_err(|reason| WeightsError::read(&self.path, reason))
    }
}

/// Shard of each tensor.
#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Parameter, its form in the file, and its tensor there; a parameter without a tensor is 0.
type Planned<'a> = (Wanted, Form, Option<&'a Stored>);

fn pytorch(path: &Path) -> PytorchStore {
    // Names are translated by the map alone.
    PytorchStore::from_file(path).map_indices_contiguous(false)
}

/// Returns how a tensor differs from what its parameter needs.
fn differing(name: &str, form: Form, parameter: &Wanted, source: &Stored) -> Option<WrongTensor> {
    let wrong = |expected: String, got: String| {
        Some(WrongTensor {
            name: name.to_owned(),
            expected,
            got,
        })
    };
    let shape = &parameter.shape;
    let got: Vec<usize> = source.shape.iter().copied().collect();
    match form.in_file(shape) {
        Some(expected) if expected == got => {}
        Some(expected) => return wrong(format!("{expected:?}"), format!("{got:?}")),
        None => return wrong(format!("one for a parameter {shape:?}"), format!("{form}")),
    }
    let fits = match parameter.dtype {
        dtype if dtype.is_float() => source.dtype.is_float(),
        dtype if dtype.is_bool() => {
            // Formats without bools use small integers.
            source.dtype.is_bool() || matches!(source.dtype, DType::U8 | DType::U32)
        }
        _ => source.dtype.is_int() || source.dtype.is_uint(),
    };
    match fits {
        true => None,
        false => wrong(
            format!("of a kind with {:?}", parameter.dtype),
            format!("{:?}", source.dtype),
        ),
    }
}
