//! Checkpoint: configuration, weights and tokenizer.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_sparse_transformer::Precision;
use burn_sparse_transformer::llama::{Llama, LlamaConfig};
use burn_sparse_transformer::weights::{Gguf, KeyMap, WeightsFile};
use clap::{Args, ValueEnum};

use crate::device;
use crate::text::Text;

/// Dtype of products; with fp8 those of the attention are rounded to E4M3, and all others are bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    F32,
    Bf16,
    Fp8,
}

/// Which model, and where.
#[derive(Args, Debug)]
pub struct ModelArgs {
    /// A folder of Hugging Face: config.json, tokenizer.json, and model.safetensors or its shards; or a .gguf file
    #[arg(value_name = "MODEL")]
    pub path: PathBuf,
    /// flex (CPU), wgpu, cuda or cuda:INDEX [default: the best that was compiled in]
    #[arg(long)]
    pub device: Option<String>,
    /// Dtype of weights and matmuls
    #[arg(long, value_enum, default_value = "f32")]
    pub dtype: Dtype,
    /// Longest sequence, in tokens [default: the checkpoint's]
    #[arg(long)]
    pub context: Option<usize>,
    /// Block size of patterns
    #[arg(long, default_value_t = 64)]
    pub block_size: usize,
    /// Skip tiles of prompts' queries and keys whose scores are all below the largest ones by more than T [default: nothing]
    #[arg(long, value_name = "T")]
    pub softmax_threshold: Option<f64>,
}

impl ModelArgs {
    pub fn device(&self) -> Result<Device> {
        device::open(self.device.as_deref())
    }

    /// Opens the checkpoint and reads its configuration, or the header of a GGUF file.
    pub fn open(&self) -> Result<Checkpoint<'_>> {
        let is_gguf = self.path.extension().is_some_and(|ending| ending == "gguf");
        ensure!(
            is_gguf || self.path.is_dir(),
            "MODEL must be a folder of Hugging Face on this machine or a .gguf file, got {}",
            self.path.display()
        );
        let gguf = is_gguf.then(|| Gguf::open(&self.path)).transpose()?;
        let config = match &gguf {
            Some(gguf) => {
                LlamaConfig::from_gguf(gguf).with_context(|| self.path.display().to_string())?
            }
            None => {
                let path = self.path.join("config.json");
                let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
                let config = LlamaConfig::from_hugging_face(&text);
                config.with_context(|| path.display().to_string())?
            }
        };
        let context = self.context.unwrap_or(config.context);
        let config = config
            .with_block_size(self.block_size)
            .with_context(context)
            .with_softmax_threshold(self.softmax_threshold)
            .with_precision(match self.dtype {
                Dtype::F32 => Precision::F32,
                Dtype::Bf16 => Precision::Bf16,
                Dtype::Fp8 => Precision::Fp8,
            });
        Ok(Checkpoint {
            args: self,
            gguf,
            config,
        })
    }
}

/// Checkpoint whose weights are read on request.
pub struct Checkpoint<'a> {
    args: &'a ModelArgs,
    /// Header, if the model is a GGUF file.
    gguf: Option<Gguf>,
    pub config: LlamaConfig,
}

impl Checkpoint<'_> {
    /// Returns the model with its weights.
    pub fn load(&self, device: &Device) -> Result<Llama> {
        let config = &self.config;
        let model = config.try_init(device)?;
        let (weights, map) = match &self.gguf {
            Some(gguf) => (WeightsFile::of_gguf(gguf)?, KeyMap::llama_gguf(gguf)?),
            None => {
                let kv_heads = config.n_kv_heads.unwrap_or(config.n_heads);
                let map = KeyMap::llama(config.n_heads, kv_heads, config.tied_embedding);
                (WeightsFile::open(&self.args.path)?, map)
            }
        };
        Ok(self.cast(weights.load(&model, &map)?))
    }

    /// Returns the model with random weights, for times without weight files.
    pub fn random(&self, device: &Device) -> Result<Llama> {
        Ok(self.cast(self.config.try_init(device)?))
    }

    pub fn text(&self) -> Result<Text> {
        let path = &self.args.path;
        match &self.gguf {
            Some(gguf) => Text::of_gguf(gguf).with_context(|| path.display().to_string()),
            None => Text::open(path),
        }
    }

    fn cast(&self, model: Llama) -> Llama {
        match self.args.dtype {
            Dtype::F32 => model,
            Dtype::Bf16 | Dtype::Fp8 => model.map(&mut Cast(FloatDType::BF16)),
        }
    }
}

/// Casts parameters to another dtype.
struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(self.0))
    }
}

pub fn read_text(path: &Path) -> Result<String> {
    let bytes = fs::read(path).with_context(|| format!("--text {}", path.display()))?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    if text.is_empty() {
        bail!("--text {} is empty", path.display());
    }
    Ok(text)
}
