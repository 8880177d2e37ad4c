//! Hugging Face's `config.json`.

use burn_blocksparse::Pattern;
use serde_json::Value;

use super::LlamaConfig;
use crate::{RopeScaling, TransformerError};

/// Values of `model_type` that are read.
const MODEL_TYPES: [&str; 4] = ["llama", "mistral", "qwen2", "qwen3"];

impl LlamaConfig {
    /// The configuration that a checkpoint of Hugging Face has in its `config.json`: of `model_type` llama, mistral, qwen2 or qwen3. A sliding window that all
    /// layers have becomes the pattern.
    ///
    /// ```
    /// use burn_sparse_transformer::llama::LlamaConfig;
    ///
    /// let json = r#"{"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
    ///     "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152, "max_position_embeddings": 8192,
    ///     "rms_norm_eps": 1e-5, "rope_theta": 100000, "tie_word_embeddings": true}"#;
    /// assert_eq!(LlamaConfig::from_hugging_face(json)?.n_kv_heads, Some(3));
    /// # Ok::<(), burn_sparse_transformer::TransformerError>(())
    /// ```
    ///
    /// # Errors
    /// If the text is no JSON object, lacks a key or has one that is not a number as expected, or asks for what [`Llama`](super::Llama) does not have.
    pub fn from_hugging_face(json: &str) -> Result<Self, TransformerError> {
        let value: Value = serde_json::from_str(json)
            .map_err(|error| TransformerError::argument("config.json", "a JSON object", error))?;
        let of = Keys(&value);
        let kind = of.text("model_type").unwrap_or("none");
        if !MODEL_TYPES.contains(&kind) {
            let expected = "llama, mistral, qwen2 or qwen3";
            return Err(TransformerError::argument("model_type", expected, kind));
        }
        if of.text("hidden_act").is_some_and(|act| act != "silu") {
            return Err(of.refused("hidden_act", "silu"));
        }
        if of.flag("mlp_bias") == Some(true) {
            return Err(of.refused("mlp_bias", "false"));
        }
        let context = of.count("max_position_embeddings")?;
        let attention_bias = of.flag("attention_bias").unwrap_or(false);
        let rope = of.get("rope_scaling").or_else(|| of.get("rope_parameters"));
        let theta = match of.number("rope_theta")? {
            Some(theta) => theta,
            None => rope
                .map_or(Ok(None), |rope| Keys(rope).number("rope_theta"))?
                .unwrap_or(10_000.0),
        };
        Ok(
            Self::new(of.count("hidden_size")?, of.count("num_attention_heads")?)
                .with_n_kv_heads(of.maybe_count("num_key_value_heads")?)
                .with_head_dim(of.maybe_count("head_dim")?)
                .with_vocab_size(of.count("vocab_size")?)
                .with_n_layers(of.count("num_hidden_layers")?)
                .with_d_ff(Some(of.count("intermediate_size")?))
                .with_context(context)
                .with_rope_theta(theta)
                .with_rope_scaling(rope.map_or(Ok(None), |rope| scaling(rope, context))?)
                .with_qk_norm(kind == "qwen3")
                .with_qkv_bias(attention_bias || kind == "qwen2")
                .with_output_bias(attention_bias)
                .with_tied_embedding(of.flag("tie_word_embeddings").unwrap_or(false))
                .with_rms_norm_eps(of.number("rms_norm_eps")?.unwrap_or(1e-6))
                .with_pattern(pattern(&of, context)?),
        )
    }
}

/// Which keys a sliding window leaves.
fn pattern(of: &Keys, context: usize) -> Result<Pattern, TransformerError> {
    let is_off = of.flag("use_sliding_window") == Some(false);
    let window = of
        .maybe_count("sliding_window")?
        .filter(|&window| !is_off && window < context);
    let Some(window) = window else {
        return Ok(Pattern::causal());
    };
    let layers = of.get("layer_types").and_then(Value::as_array);
    let is_sliding = |layer: &Value| layer.as_str() == Some("sliding_attention");
    match layers {
        Some(layers) if layers.iter().all(|layer| !is_sliding(layer)) => Ok(Pattern::causal()),
        Some(layers) if !layers.iter().all(is_sliding) => {
            Err(of.refused("layer_types", "of one kind in all layers"))
        }
        _ => Ok(Pattern::local(window)),
    }
}

/// How rotations are scaled.
fn scaling(rope: &Value, context: usize) -> Result<Option<RopeScaling>, TransformerError> {
    let of = Keys(rope);
    let kind = of
        .text("rope_type")
        .or_else(|| of.text("type"))
        .unwrap_or("default");
    let original = || {
        let given = of.maybe_count("original_max_position_embeddings")?;
        Ok::<_, TransformerError>(given.unwrap_or(context))
    };
    Ok(Some(match kind {
        "default" => return Ok(None),
        "linear" => RopeScaling::Linear {
            factor: of.required("factor")?,
        },
        "llama3" => RopeScaling::Llama3 {
            factor: of.required("factor")?,
            low_freq_factor: of.required("low_freq_factor")?,
            high_freq_factor: of.required("high_freq_factor")?,
            original_max_position_embeddings: original()?,
        },
        "yarn" => RopeScaling::Yarn {
            factor: of.required("factor")?,
            original_max_position_embeddings: original()?,
            beta_fast: of.number("beta_fast")?.unwrap_or(32.0),
            beta_slow: of.number("beta_slow")?.unwrap_or(1.0),
            attention_factor: of.number("attention_factor")?,
        },
        _ => {
            let expected = "default, linear, llama3 or yarn";
            return Err(TransformerError::argument("rope_type", expected, kind));
        }
    }))
}

/// Keys of an object.
struct Keys<'a>(&'a Value);

impl<'a> Keys<'a> {
    /// What is there and not null.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn refused(&self, key: &'static str, expected: &str) -> TransformerError {
        let got = self.get(key).map_or("nothing".into(), Value::to_string);
        TransformerError::argument(key, expected, got)
    }

    fn text(&self, key: &str) -> Option<&'a str> {
        self.get(key).and_then(Value::as_str)
    }

    fn flag(&self, key: &str) -> Option<bool> {
        self.get(key).and_then(Value::as_bool)
    }

    fn number(&self, key: &'static str) -> Result<Option<f64>, TransformerError> {
        let read = |value: &Value| value.as_f64().ok_or_else(|| self.refused(key, "a number"));
        self.get(key).map(read).transpose()
    }

    fn required(&self, key: &'static str) -> Result<f64, TransformerError> {
        self.number(key)?
            .ok_or_else(|| self.refused(key, "a number"))
    }

    fn maybe_count(&self, key: &'static str) -> Result<Option<usize>, TransformerError> {
        let read = |value: &Value| {
            let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
            count.ok_or_else(|| self.refused(key, "a whole number"))
        };
        self.get(key).map(read).transpose()
    }

    fn count(&self, key: &'static str) -> Result<usize, TransformerError> {
        self.maybe_count(key)?
            .ok_or_else(|| self.refused(key, "a whole number"))
    }
}
