//! Hugging Face's `config.json`.

use burn_blocksparse::Pattern;
use serde_json::Value;

use super::LlamaConfig;
use crate::error::{Result, ensure};
use crate::{RopeScaling, TransformerError};

/// Supported values of `model_type`.
const MODEL_TYPES: [&str; 4] = ["llama", "mistral", "qwen2", "qwen3"];

impl LlamaConfig {
    /// Reads the configuration from `config.json` of a Hugging Face checkpoint with `model_type` llama, mistral, qwen2 or qwen3. A sliding window that all
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
    /// If the text is not a JSON object, a key is missing or has an unexpected value, or a key requires a feature that [`Llama`](super::Llama) does not have.
    pub fn from_hugging_face(json: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(json)
            .map_err(|error| TransformerError::argument("config.json", "a JSON object", error))?;
        let of = JsonKeys(&value);
        let kind = of.text("model_type")?.unwrap_or("none");
        ensure! { MODEL_TYPES.contains(&kind) => "model_type", "llama, mistral, qwen2 or qwen3", kind; }
        if of.text("hidden_act")?.is_some_and(|act| act != "silu") {
            return Err(of.refused("hidden_act", "silu"));
        }
        if of.flag("mlp_bias")? {
            return Err(of.refused("mlp_bias", "false"));
        }
        // Versions of transformers have one or the other key, with the base inside or outside.
        let rope = of.get("rope_scaling").or_else(|| of.get("rope_parameters"));
        let rope = rope.map(JsonKeys);
        let in_rope = |key| match &rope {
            Some(rope) => rope.number(key),
            None => Ok(None),
        };
        let theta = of.number("rope_theta")?.or(in_rope("rope_theta")?);
        let rotated = of.number("partial_rotary_factor")?;
        let rotated = rotated.or(in_rope("partial_rotary_factor")?).unwrap_or(1.0);
        ensure! { rotated == 1.0 => "partial_rotary_factor", "1: rotations of whole heads", rotated; }
        let trained = of.count("max_position_embeddings")?;
        let scaling = match &rope {
            Some(rope) => scaling(rope, trained)?,
            None => None,
        };
        let context = match &scaling {
            // Qwen's files state the original context as the largest position.
            Some(RopeScaling::Yarn {
                factor,
                original_max_position_embeddings,
                ..
            }) => trained.max((*original_max_position_embeddings as f64 * factor) as usize),
            _ => trained,
        };
        // Qwen2 always has biases; neither it nor Mistral reads the key.
        let attention_bias = of.flag("attention_bias")? && matches!(kind, "llama" | "qwen3");
        let usual_head_dim = (kind == "qwen3").then_some(128);
        Ok(
            Self::new(of.count("hidden_size")?, of.count("num_attention_heads")?)
                .with_n_kv_heads(of.maybe_count("num_key_value_heads")?)
                .with_head_dim(of.maybe_count("head_dim")?.or(usual_head_dim))
                .with_vocab_size(of.count("vocab_size")?)
                .with_n_layers(of.count("num_hidden_layers")?)
                .with_d_ff(Some(of.count("intermediate_size")?))
                .with_context(context)
                .with_rope_theta(theta.unwrap_or(10_000.0))
                .with_rope_scaling(scaling)
                .with_qk_norm(kind == "qwen3")
                .with_qkv_bias(attention_bias || kind == "qwen2")
                .with_output_bias(attention_bias)
                .with_tied_embedding(of.flag("tie_word_embeddings")?)
                .with_rms_norm_eps(of.number("rms_norm_eps")?.unwrap_or(1e-6))
                .with_pattern(pattern(&of, kind, context)?),
        )
    }
}

/// Returns the pattern of the sliding window. As in `transformers`, Llama has none, and Qwen has one if it is switched on, after some layers without it.
fn pattern(of: &JsonKeys, kind: &str, context: usize) -> Result<Pattern> {
    let is_on = match kind {
        "mistral" => true,
        "qwen2" | "qwen3" => of.flag("use_sliding_window")?,
        _ => false,
    };
    // Default of Mistral if the key is missing; null means no window.
    let usual = (kind == "mistral" && of.0.get("sliding_window").is_none()).then_some(4096);
    let window = of
        .maybe_count("sliding_window")?
        .or(usual)
        .filter(|&window| is_on && window < context);
    let Some(window) = window else {
        return Ok(Pattern::causal());
    };
    let n_layers = of.count("num_hidden_layers")?;
    let sliding = match (of.get("layer_types").and_then(Value::as_array), kind) {
        (Some(layers), _) => {
            let is_sliding = |layer: &&Value| layer.as_str() == Some("sliding_attention");
            layers.iter().filter(is_sliding).count()
        }
        (None, "mistral") => n_layers,
        (None, _) => n_layers.saturating_sub(of.maybe_count("max_window_layers")?.unwrap_or(28)),
    };
    ensure! { sliding == 0 || sliding == n_layers =>
    "sliding_window", format!("in all {n_layers} layers or in none"), format!("a window in {sliding}"); }
    Ok(match sliding {
        0 => Pattern::causal(),
        _ => Pattern::local(window),
    })
}

fn scaling(of: &JsonKeys, trained: usize) -> Result<Option<RopeScaling>> {
    let kind = match of.text("rope_type")? {
        Some(kind) => kind,
        None => of.text("type")?.unwrap_or("default"),
    };
    let original = || {
        let given = of.maybe_count("original_max_position_embeddings")?;
        Ok::<_, TransformerError>(given.unwrap_or(trained))
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
        "yarn" => {
            for key in ["mscale", "mscale_all_dim"] {
                if of.get(key).is_some() {
                    return Err(of.refused(key, "nothing: attention_factor says it"));
                }
            }
            if of.get("truncate").is_some() && !of.flag("truncate")? {
                return Err(of.refused("truncate", "true"));
            }
            RopeScaling::Yarn {
                factor: of.required("factor")?,
                original_max_position_embeddings: original()?,
                beta_fast: of.number("beta_fast")?.unwrap_or(32.0),
                beta_slow: of.number("beta_slow")?.unwrap_or(1.0),
                attention_factor: of.number("attention_factor")?,
            }
        }
        _ => {
            let expected = "default, linear, llama3 or yarn";
            return Err(TransformerError::argument("rope_type", expected, kind));
        }
    }))
}

struct JsonKeys<'a>(&'a Value);

impl<'a> JsonKeys<'a> {
    fn text(&self, key: &'static str) -> Result<Option<&'a str>> {
        self.read(key, "a text", Value::as_str)
    }

    /// Returns false if the key is missing.
    fn flag(&self, key: &'static str) -> Result<bool> {
        let flag = self.read(key, "true or false", Value::as_bool)?;
        Ok(flag.unwrap_or(false))
    }
}

impl<'a> Keys<'a> for JsonKeys<'a> {
    type Value = Value;

    /// Returns the value if it is present and not null.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn as_f64(value: &Value) -> Option<f64> {
        value.as_f64()
    }

    fn as_u64(value: &Value) -> Option<u64> {
        value.as_u64()
    }
}

/// Metadata of a checkpoint, by key.
pub(crate) trait Keys<'a> {
    type Value: ToString + 'a;

    fn get(&self, key: &str) -> Option<&'a Self::Value>;

    fn as_f64(value: &Self::Value) -> Option<f64>;

    fn as_u64(value: &Self::Value) -> Option<u64>;

    fn refused(&self, key: &'static str, expected: &str) -> TransformerError {
        let got = self
            .get(key)
            .map_or("nothing".into(), Self::Value::to_string);
        TransformerError::argument(key, expected, got)
    }

    /// Returns the value if present; it must match `expected`.
    fn read<T>(
        &self,
        key: &'static str,
        expected: &str,
        of: impl Fn(&'a Self::Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let read = |value| of(value).ok_or_else(|| self.refused(key, expected));
        self.get(key).map(read).transpose()
    }

    fn number(&self, key: &'static str) -> Result<Option<f64>> {
        self.read(key, "a number", Self::as_f64)
    }

    fn required(&self, key: &'static str) -> Result<f64> {
        self.number(key)?
            .ok_or_else(|| self.refused(key, "a number"))
    }

    fn maybe_count(&self, key: &'static str) -> Result<Option<usize>> {
        let count = |value| usize::try_from(Self::as_u64(value)?).ok();
        self.read(key, "a whole number", count)
    }

    fn count(&self, key: &'static str) -> Result<usize> {
        self.maybe_count(key)?
            .ok_or_else(|| self.refused(key, "a whole number"))
    }
}
