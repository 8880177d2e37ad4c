use burn::tensor::DType;
use burn_blocksparse::Pattern;

use super::{Gguf, GgufValue};
use crate::error::{Result, ensure};
use crate::llama::{Keys, LlamaConfig};
use crate::{RopeScaling, TransformerError};

/// Supported values of `general.architecture`.
const ARCHITECTURES: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// Frequency factors of Llama 3.1, for which the metadata has no keys.
const ROPE_FREQS: &str = "rope_freqs.weight";

impl LlamaConfig {
    /// Reads the configuration from the metadata of a GGUF file with `general.architecture` llama, which Mistral's models have too, qwen2 or qwen3.
    /// [`KeyMap::llama_gguf`](crate::weights::KeyMap::llama_gguf) is the map for its tensors.
    ///
    /// ```no_run
    /// use burn::tensor::Device;
    /// use burn_sparse_transformer::llama::LlamaConfig;
    /// use burn_sparse_transformer::weights::{Gguf, KeyMap, WeightsFile};
    ///
    /// let path = "SmolLM2-135M-Instruct-Q8_0.gguf";
    /// let gguf = Gguf::open(path)?;
    /// let model = LlamaConfig::from_gguf(&gguf)?.try_init(&Device::flex())?;
    /// let model = WeightsFile::open(path)?.load(&model, &KeyMap::llama_gguf(&gguf)?)?;
    /// # let _ = model;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the file has another architecture, lacks a key or has one of another type, or requires a feature that [`Llama`](crate::llama::Llama) does not have.
    /// Names of keys in errors omit the architecture.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let architecture = gguf.architecture().unwrap_or("none");
        ensure! { ARCHITECTURES.contains(&architecture) =>
        "general.architecture", "llama, qwen2 or qwen3", architecture; }
        let of = GgufKeys { gguf, architecture };
        of.only("expert_count", 0.0)?;
        of.only("attention.scale", 0.0)?;
        if of.get("attention.causal").and_then(GgufValue::as_bool) == Some(false) {
            return Err(of.refused("attention.causal", "true"));
        }
        let (d_model, n_heads) = (
            of.count("embedding_length")?,
            of.count("attention.head_count")?,
        );
        let key_length = of.maybe_count("attention.key_length")?;
        let head_dim = key_length.unwrap_or(d_model.checked_div(n_heads).unwrap_or(0));
        for key in ["attention.value_length", "rope.dimension_count"] {
            if of.maybe_count(key)?.is_some_and(|width| width != head_dim) {
                return Err(of.refused(key, &format!("{head_dim}, a head's width")));
            }
        }
        let context = of.count("context_length")?;
        let window = of
            .maybe_count("attention.sliding_window")?
            .filter(|&window| window > 0 && window < context);
        let has = |tensor: &str| gguf.shape(tensor).is_some();
        Ok(Self::new(d_model, n_heads)
            .with_n_kv_heads(of.maybe_count("attention.head_count_kv")?)
            .with_head_dim(key_length)
            .with_vocab_size(of.vocab_size()?)
            .with_n_layers(of.count("block_count")?)
            .with_d_ff(Some(of.count("feed_forward_length")?))
            .with_context(context)
            .with_rope_theta(of.number("rope.freq_base")?.unwrap_or(10_000.0))
            .with_rope_scaling(of.rope_scaling(context)?)
            .with_qk_norm(architecture == "qwen3")
            .with_qkv_bias(architecture == "qwen2" || has("blk.0.attn_q.bias"))
            .with_output_bias(has("blk.0.attn_output.bias"))
            .with_tied_embedding(!has("output.weight"))
            .with_rms_norm_eps(of.required("attention.layer_norm_rms_epsilon")?)
            .with_pattern(window.map_or_else(Pattern::causal, Pattern::local)))
    }
}

struct GgufKeys<'a> {
    gguf: &'a Gguf,
    architecture: &'a str,
}

impl<'a> Keys<'a> for GgufKeys<'a> {
    type Value = GgufValue;

    fn get(&self, key: &str) -> Option<&'a GgufValue> {
        self.gguf.get(&format!("{}.{key}", self.architecture))
    }

    fn as_f64(value: &GgufValue) -> Option<f64> {
        value.as_f64()
    }

    fn as_u64(value: &GgufValue) -> Option<u64> {
        value.as_u64()
    }
}

impl GgufKeys<'_> {
    /// Rejects a key that changes the computation, unless it has the neutral value.
    fn only(&self, key: &'static str, neutral: f64) -> Result<()> {
        match self.number(key)? {
            Some(number) if number != neutral => Err(self.refused(key, &neutral.to_string())),
            _ => Ok(()),
        }
    }

    /// Returns the size of the embedding, which may have rows without a token.
    fn vocab_size(&self) -> Result<usize> {
        if let Some(&[vocab_size, _]) = self.gguf.shape("token_embd.weight") {
            return Ok(vocab_size);
        }
        let tokens = self.gguf.get("tokenizer.ggml.tokens");
        match tokens.and_then(GgufValue::as_strings) {
            Some(tokens) => Ok(tokens.len()),
            None => self.count("vocab_size"),
        }
    }

    fn rope_scaling(&self, context: usize) -> Result<Option<RopeScaling>> {
        let kind = self.get("rope.scaling.type");
        let kind = kind.map_or(Some("linear"), GgufValue::as_str);
        // Older files use another name; 0 means none.
        let factor = match self.number("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.number("rope.scale_linear")?,
        };
        let factor = factor.filter(|&factor| factor != 0.0 && factor != 1.0);
        self.only("rope.scaling.attn_factor", 1.0)?;
        let scaling = match (kind, factor) {
            (Some("none"), _) | (Some("linear" | "yarn"), None) => None,
            (Some("linear"), Some(factor)) => Some(RopeScaling::Linear { factor }),
            (Some("yarn"), Some(factor)) => {
                self.only("rope.scaling.yarn_ext_factor", 1.0)?;
                self.only("rope.scaling.yarn_attn_factor", 1.0)?;
                self.only("rope.scaling.yarn_log_multiplier", 0.0)?;
                let original = self.maybe_count("rope.scaling.original_context_length")?;
                let turns =
                    |key, usual| Ok::<_, TransformerError>(self.number(key)?.unwrap_or(usual));
                Some(RopeScaling::Yarn {
                    factor,
                    original_max_position_embeddings: original.unwrap_or(context),
                    beta_fast: turns("rope.scaling.yarn_beta_fast", 32.0)?,
                    beta_slow: turns("rope.scaling.yarn_beta_slow", 1.0)?,
                    attention_factor: None,
                })
            }
            _ => return Err(self.refused("rope.scaling.type", "none, linear or yarn")),
        };
        let refused = |got: String| {
            let expected = "a vector, where there is no other scaling";
            TransformerError::argument(ROPE_FREQS, expected, got)
        };
        let factors = self.gguf.tensor(ROPE_FREQS);
        match (
            factors.map_err(|error| refused(error.to_string()))?,
            scaling,
        ) {
            (None, scaling) => Ok(scaling),
            (Some(_), Some(scaling)) => Err(refused(format!("{scaling:?}"))),
            (Some(factors), None) => {
                let factors = factors.convert_dtype(DType::F64);
                let factors = factors.try_to_vec::<f64>();
                let factors = factors.map_err(|error| refused(format!("{error:?}")))?;
                Ok(Some(RopeScaling::Factors { factors }))
            }
        }
    }
}
