//! Maps of known models.

use super::{Form, Gguf, KeyMap};
use crate::error::Result;
use crate::llama::LlamaConfig;

use Form::{Same, Transposed};

/// Parameter of a module, its tensor's name in the file's module, and its form.
type Part = (&'static str, &'static str, Form);

/// PyTorch's linear layer.
const LINEAR: [Part; 2] = linear(Transposed, Same);

/// Layer norm, whose gain and offset PyTorch calls `weight` and `bias`.
const NORM: [Part; 2] = [("gamma", "weight", Same), ("beta", "bias", Same)];

/// Returns a linear layer whose weight and bias have these forms.
const fn linear(weight: Form, bias: Form) -> [Part; 2] {
    [("weight", "weight", weight), ("bias", "bias", bias)]
}

impl KeyMap {
    /// Adds rules for the parameters of modules with names beginning with `within`, in the module and in the file.
    fn modules(mut self, within: [&str; 2], modules: &[(&str, &str)], parts: &[Part]) -> Self {
        let [of_module, of_file] = within;
        for (module, name) in modules {
            for (parameter, tensor, form) in parts {
                self = self.rule(
                    format!("{of_module}{module}.{parameter}"),
                    format!("{of_file}{name}.{tensor}"),
                    *form,
                );
            }
        }
        self
    }
}

/// Modules of a Llama layer.
const LLAMA: &str = "attention_norm mlp_norm attention.query_norm.Rms attention.key_norm.Rms attention.query attention.key \
    attention.value attention.output mlp.gate mlp.up mlp.down";

impl KeyMap {
    /// Adds the rules of Llama layers for a file with these names of the modules of [`LLAMA`], these numbers of query and key heads, and channels rotated in
    /// halves or in adjacent pairs.
    fn llama_layers(
        self,
        within: &str,
        names: &str,
        [heads, kv_heads]: [usize; 2],
        in_halves: bool,
    ) -> Self {
        let within = ["layers.{}.", within];
        let rotated = |form, heads| match in_halves {
            true => Form::RotaryHalves { heads },
            false => form,
        };
        let turned = |heads| linear(rotated(Transposed, heads), rotated(Same, heads));
        let gain = |form| [("gamma", "weight", form)];
        let modules: Vec<_> = LLAMA.split(' ').zip(names.split(' ')).collect();
        self.modules(within, &modules[..2], &gain(Same))
            .modules(within, &modules[2..4], &gain(rotated(Same, 1)))
            .modules(within, &modules[4..5], &turned(heads))
            .modules(within, &modules[5..6], &turned(kv_heads))
            .modules(within, &modules[6..], &LINEAR)
    }

    /// PyTorch's conventions under this crate's own names: weights of linear layers are `[outputs, inputs]`, the parameters of layer norms are `weight` and
    /// `bias`. For [`SparseTransformer`](crate::SparseTransformer) and [`SparseTransformerEncoder`](crate::SparseTransformerEncoder).
    ///
    /// Each block of a block-sparse weight is transposed; the order of blocks is unchanged.
    pub fn pytorch() -> Self {
        let linears =
            "mha.query mha.key mha.value mha.output pwff.linear_inner pwff.linear_outer".split(' ');
        let linears: Vec<_> = linears.map(|name| (name, name)).collect();
        let norms = ["norm_1", "norm_2"].map(|name| (name, name));
        let mut map = Self::default();
        for within in [["blocks.{}."; 2], ["layers.{}."; 2]] {
            map = map.modules(within, &linears, &LINEAR);
            map = map.modules(within, &norms, &NORM);
        }
        map.modules([""; 2], &[("norm", "norm")], &NORM).rule(
            "output.weight",
            "output.weight",
            Transposed,
        )
    }

    /// GPT-2's names (Radford et al., 2019) in `transformers`, for a [`SparseTransformer`](crate::SparseTransformer) of [`gpt2_config`](super::gpt2_config):
    /// with or without the prefix `transformer.`, with a head that is tied to the embedding or a tensor of its own.
    ///
    /// Its linear layers have Burn's layout, with queries, keys and values concatenated. Its table of positions becomes the column embeddings of a matrix of
    /// one row.
    pub fn gpt2() -> Self {
        let within = ["blocks.{}.", "h.{}."];
        let norms = [("norm_1", "ln_1"), ("norm_2", "ln_2")];
        let linears = [
            ("mha.output", "attn.c_proj"),
            ("pwff.linear_inner", "mlp.c_fc"),
            ("pwff.linear_outer", "mlp.c_proj"),
        ];
        let mut map = Self::default()
            .prefix("transformer.")
            .rule("token_embedding.weight", "wte.weight", Same)
            .rule("position_embedding.column", "wpe.weight", Same)
            .rule("position_embedding.row", "", Form::Zeros)
            .modules(within, &norms, &NORM)
            .modules([""; 2], &[("norm", "ln_f")], &NORM)
            .modules(within, &linears, &linear(Same, Same));
        for (index, name) in ["mha.query", "mha.key", "mha.value"].iter().enumerate() {
            let part = Form::Part { index, count: 3 };
            map = map.modules(within, &[(name, "attn.c_attn")], &linear(part, part));
        }
        map.rule("output.weight", "lm_head.weight", Transposed)
            .rule("output.weight", "wte.weight", Transposed)
            // A mask and a number, in files of older versions.
            .ignore("h.{}.attn.bias")
            .ignore("h.{}.attn.masked_bias")
    }

    /// Names of Llama, Mistral, Qwen2 and Qwen3 in `transformers`, for a [`Llama`](crate::llama::Llama) with these numbers of query and key heads, and with a
    /// head that is the embedding if it is `tied`; with or without the prefix `model.`. Weights of queries and keys are permuted to adjacent channels:
    /// [`Form::RotaryHalves`].
    pub fn llama(n_heads: usize, n_kv_heads: usize, tied: bool) -> Self {
        let map = Self::default()
            .prefix("model.")
            .rule("embed.weight", "model.embed_tokens.weight", Same)
            .rule("norm.gamma", "model.norm.weight", Same)
            // Frequencies, in files of older versions.
            .ignore("layers.{}.self_attn.rotary_emb.inv_freq");
        let names = "input_layernorm post_attention_layernorm self_attn.q_norm self_attn.k_norm self_attn.q_proj self_attn.k_proj \
            self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj";
        let map = map.llama_layers("model.layers.{}.", names, [n_heads, n_kv_heads], true);
        match tied {
            true => map.ignore("lm_head.weight"),
            false => map.rule("head.weight", "lm_head.weight", Transposed),
        }
    }

    /// Longformer's names (Beltagy et al., 2020) in `transformers`, for a [`LongformerEncoder`](crate::longformer::LongformerEncoder) of
    /// [`longformer_config`](super::longformer_config): with or without the prefix `longformer.`. The pooler and the heads of tasks are ignored.
    ///
    /// Positions begin at row 2, after those of the padding token.
    pub fn longformer() -> Self {
        let linears = [
            ("attention.mha.query", "attention.self.query"),
            ("attention.mha.key", "attention.self.key"),
            ("attention.mha.value", "attention.self.value"),
            ("attention.query_global", "attention.self.query_global"),
            ("attention.key_global", "attention.self.key_global"),
            ("attention.value_global", "attention.self.value_global"),
            ("attention.mha.output", "attention.output.dense"),
            ("linear_inner", "intermediate.dense"),
            ("linear_outer", "output.dense"),
        ];
        let norms = [
            ("norm_1", "attention.output.LayerNorm"),
            ("norm_2", "output.LayerNorm"),
        ];
        let within = ["layers.{}.", "encoder.layer.{}."];
        let embeddings = |name: &str| format!("embeddings.{name}_embeddings.weight");
        let map = Self::default()
            .prefix("longformer.")
            .rule("token_embedding.weight", embeddings("word"), Same)
            .rule("type_embedding.weight", embeddings("token_type"), Same)
            .rule(
                "position_embedding.weight",
                embeddings("position"),
                Form::Rows { skipped: 2 },
            )
            .modules([""; 2], &[("norm", "embeddings.LayerNorm")], &NORM)
            .modules(within, &linears, &LINEAR)
            .modules(within, &norms, &NORM);
        let tasks = "
            embeddings.position_ids pooler.dense.weight pooler.dense.bias
            lm_head.bias lm_head.decoder.weight lm_head.decoder.bias lm_head.dense.weight lm_head.dense.bias
            lm_head.layer_norm.weight lm_head.layer_norm.bias
            classifier.dense.weight classifier.dense.bias classifier.out_proj.weight classifier.out_proj.bias
            classifier.weight classifier.bias qa_outputs.weight qa_outputs.bias
        ";
        tasks.split_whitespace().fold(map, Self::ignore)
    }

    /// Names of Llama, Mistral, Qwen2 and Qwen3 in a GGUF file, for a [`Llama`](crate::llama::Llama) of [`LlamaConfig::from_gguf`]. In files of the
    /// architecture llama, which Mistral's models have too, rotary embedding rotates adjacent channels, as in this library. In Qwen's it rotates halves,
    /// which are permuted to adjacent channels: [`Form::RotaryHalves`].
    ///
    /// # Errors
    /// Those of [`LlamaConfig::from_gguf`].
    pub fn llama_gguf(gguf: &Gguf) -> Result<Self> {
        let config = LlamaConfig::from_gguf(gguf)?;
        let map = Self::default()
            .rule("embed.weight", "token_embd.weight", Same)
            .rule("norm.gamma", "output_norm.weight", Same)
            .rule("head.weight", "output.weight", Transposed)
            // The configuration contains them.
            .ignore("rope_freqs.weight");
        let names = "attn_norm ffn_norm attn_q_norm attn_k_norm attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down";
        let heads = [config.n_heads, config.n_kv_heads.unwrap_or(config.n_heads)];
        let in_halves = gguf.architecture() != Some("llama");
        Ok(map.llama_layers("blk.{}.", names, heads, in_halves))
    }
}
