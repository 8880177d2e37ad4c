//! Llama-style models with RMS norm, SwiGLU, grouped-query attention and rotary embedding: Llama, Mistral, Qwen2, Qwen3 and SmolLM2.

// config         sizes and options; hugging_face reads them from a checkpoint's `config.json`, `weights::gguf` from a GGUF file
// model          the layers and their computation

mod config;
mod hugging_face;
mod model;

pub use config::LlamaConfig;
#[cfg(feature = "store")]
pub(crate) use hugging_face::Keys;
pub use model::{Llama, LlamaBlock, LlamaMlp};
