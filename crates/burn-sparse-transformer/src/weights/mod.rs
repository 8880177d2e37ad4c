//! Weights of other programs: safetensors, PyTorch's state dicts and burnpack files, through Burn's store, and GGUF files.
//!
//! A [`KeyMap`] gives each parameter's tensor in a file and its form there: PyTorch's linear layers have transposed weights, and GPT-2 has concatenated
//! queries, keys and values. Either every tensor of a file matches the module, or nothing is loaded and the error names what is missing, what is unexpected
//! and what has another shape.
//!
//! ```
//! use burn::tensor::Device;
//! use burn_sparse_transformer::weights::{KeyMap, WeightsFile, save_safetensors};
//! use burn_sparse_transformer::{Factorization, Pattern, SparseTransformerConfig};
//!
//! let config = SparseTransformerConfig::new(16, 2, Factorization::from(Pattern::fixed(8, 2)))
//!     .with_vocab_size(256)
//!     .with_context(32)
//!     .with_n_layers(1);
//! let model = config.init(&Device::flex());
//! let path = std::env::temp_dir().join(format!("weights-{}.safetensors", std::process::id()));
//! save_safetensors(&model, &path, &KeyMap::pytorch(), true)?;
//!
//! let file = WeightsFile::open(&path)?;
//! assert_eq!(file.shape("blocks.0.pwff.linear_inner.weight"), Some(vec![64, 16])); // as PyTorch has it
//! let model = file.load(&config.init(&Device::flex()), &KeyMap::pytorch())?;
//! # std::fs::remove_file(&path)?;
//! # let _ = model;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod file;
mod form;
mod gguf;
mod key_map;
mod maps;
mod models;
mod parameters;
mod save;

pub use error::{WeightsError, WrongTensor};
pub use file::WeightsFile;
pub use form::Form;
pub use gguf::{Gguf, GgufValue};
pub use key_map::KeyMap;
pub use models::{gpt2_config, longformer_config};
pub use save::save_safetensors;
