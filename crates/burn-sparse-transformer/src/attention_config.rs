use burn::config::Config;
use burn::module::Initializer;
use burn::nn::{DropoutConfig, LinearConfig, RotaryEncoding, RotaryEncodingConfig};
use burn::tensor::Device;
use burn_blocksparse::{AttentionOptions, AttentionTensors, Pattern, WeightsMode, alibi_slopes};
use burn_sparse_select::Selection;

use crate::content::{ContentAttention, ContentHeads};
use crate::dropout::Seeds;
use crate::error::{
    Result, ensure, ensure_above_zero, ensure_dropout, ensure_multiple, ensure_none,
    ensure_positive, ensure_scores, or_panics,
};
use crate::heads::validate_rope;
use crate::layouts::Layouts;
use crate::selected::check_selection;
use crate::shared_choice::ChoiceSharing;
use crate::{HeadNorm, Precision, QkNorm, RopeScaling, SparseMultiHeadAttention};

/// Configuration of [`SparseMultiHeadAttention`].
///
/// Fields that burn-nn's `MultiHeadAttentionConfig` also has keep their names, meanings and defaults, except `dropout`, which is 0 (Child et al., 2019, §5.4:
/// it would complicate recomputation). There is no `min_float`: masked pairs are never computed.
///
/// A configuration whose pattern is a callback ([`Pattern::from_fn`]) works, but does not serialize.
#[derive(Config, Debug)]
#[must_use = "a configuration does nothing until `init`"]
pub struct SparseMultiHeadAttentionConfig {
    /// Hidden size: width of the input and of the output.
    pub d_model: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Pattern: which query attends to which key, per head.
    pub pattern: Pattern,
    /// Selection of keys by content among those of the pattern; `moba` and `quest` need a causal or dense one. Default: none.
    pub selection: Option<Selection>,
    /// Content-based heads: some (`routing`, `lsh`; their queries are also their keys), or all (`nsa`, `dsa`, `msa`). Default: none.
    pub content: Option<ContentAttention>,
    /// With `content`: number of heads that use the pattern, which come first. Default: half of them.
    pub local_heads: Option<usize>,
    /// Role in sharing a choice with other layers, with a `selection`, `dsa` or `msa`. Default: the layer chooses for itself alone.
    pub choice_sharing: Option<ChoiceSharing>,
    /// Block size of the pattern: 8, 16, 32, 64 or 128.
    #[config(default = 32)]
    pub block_size: usize,
    /// Number of key and value heads, a divisor of `n_heads`; fewer than `n_heads` is grouped-query
    /// attention, 1 is multi-query attention. Default: `n_heads`.
    pub n_kv_heads: Option<usize>,
    /// Width of the query projection over all heads; a key head is as wide as a query head. Default: `d_model`. The paper's half-size models use
    /// `d_model / 2`.
    pub d_key: Option<usize>,
    /// Width of all heads' values. Default: `d_model`.
    pub d_value: Option<usize>,
    /// Width of a query, key and value head, if it is not the width of the input divided by the number of heads, as in Qwen3; the output projection is then
    /// `n_heads · head_dim` to `d_model`. Default: `d_key / n_heads`, and `d_model / n_heads` for values.
    pub head_dim: Option<usize>,
    /// Bounds the scores to ±`softcap` with a tanh before the softmax. Default: no bound.
    pub softcap: Option<f64>,
    /// Skips tiles of queries and keys whose scores are below the maxima of their rows by more than this, in training and in prompts
    /// ([`AttentionOptions::softmax_threshold`]). Default: nothing is skipped.
    pub softmax_threshold: Option<f64>,
    /// Factor of the scores. Default: `1 / √d_k`.
    pub scale: Option<f64>,
    /// Rotary position embeddings of queries and keys (Su et al., 2021); its `d_model` is the width of a query head. Rotations are
    /// computed in f32. Default: none.
    pub rope: Option<RotaryEncodingConfig>,
    /// Scaling of `rope` to contexts longer than a model was trained for. Default: none.
    pub rope_scaling: Option<RopeScaling>,
    /// Normalisation of every query and key head, before the rotation. Default: none.
    pub qk_norm: Option<QkNorm>,
    /// Term added to the variance, or to the mean square, in `qk_norm`.
    #[config(default = 1e-6)]
    pub qk_norm_eps: f64,
    /// Attention dropout probability in training, in `[0, 1)`.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// True if scores get ALiBi's biases, `−slope · |distance|`, with the slopes of Press et al. (2022).
    #[config(default = false)]
    pub alibi: bool,
    /// Reach of learned biases per head and distance; larger distances share the last one. They are initialised to 0. Default: none.
    pub relative_reach: Option<usize>,
    /// True if each head learns the logit of a sink: a further key whose value is 0. Initialised to 0.
    #[config(default = false)]
    pub sinks: bool,
    /// True if the softmax is burn-nn's quiet one, whose denominator has a further `exp(0)`: a sink whose logit is fixed at 0.
    #[config(default = false)]
    pub quiet_softmax: bool,
    /// True if attention probabilities are stored for the backward pass instead of recomputed.
    #[config(default = false)]
    pub store_weights: bool,
    /// Dtype of the projections and of the attention.
    #[config(default = "Precision::F32")]
    pub precision: Precision,
    /// Initialisation of the four projections.
    #[config(
        default = "Initializer::KaimingUniform{gain: 1.0 / f64::sqrt(3.0), fan_out_only: false}"
    )]
    pub initializer: Initializer,
    /// True if the query projection has a bias.
    #[config(default = true)]
    pub query_bias: bool,
    /// True if the key projection has a bias.
    #[config(default = true)]
    pub key_bias: bool,
    /// True if the value projection has a bias.
    #[config(default = true)]
    pub value_bias: bool,
    /// True if the output projection has a bias.
    #[config(default = true)]
    pub output_bias: bool,
}

impl SparseMultiHeadAttentionConfig {
    or_panics! {
        /// Creates the module, with parameters that are initialised on first use.
        pub fn init(&self, device: &Device) -> SparseMultiHeadAttention;

        /// # Errors
        /// If a value is out of its range, widths, heads, pattern and selection do not match, options exclude each other, or the device does not support
        /// `precision`. The error names the argument.
        pub fn try_init {
            self.validate()?;
            let layouts = Layouts::new(self.pattern.clone(), self.pattern_heads(), self.block_size)?;
            self.init_with(layouts, device)
        }
    }

    /// [`Self::init`] with layouts that other blocks may share.
    pub(crate) fn init_with(
        &self,
        layouts: Layouts,
        device: &Device,
    ) -> Result<SparseMultiHeadAttention> {
        self.validate()?;
        self.precision.check(device)?;
        let n_kv_heads = self.n_kv_heads.unwrap_or(self.n_heads);
        let key_heads = match &self.content {
            Some(content) if !content.is_whole_layer() => self.pattern_heads(),
            None | Some(_) => n_kv_heads,
        };
        let [d_k, d_v] = self.head_widths();
        let linear = |d_input, d_output, bias| {
            LinearConfig::new(d_input, d_output)
                .with_bias(bias)
                .with_initializer(self.initializer.clone())
                .init(device)
        };
        let norm = || {
            self.qk_norm
                .map(|kind| HeadNorm::new(kind, d_k, self.qk_norm_eps, device))
        };
        Ok(SparseMultiHeadAttention {
            query_norm: norm(),
            key_norm: norm(),
            rope: self.rope.as_ref().map(|config| match &self.rope_scaling {
                Some(scaling) => scaling.init(config, device),
                None => config.init(device),
            }),
            relative_bias: self.relative_reach.map(|reach| {
                let shape = [self.n_heads, 2 * reach + 1];
                Initializer::Zeros.init(shape, device)
            }),
            sinks: (self.sinks).then(|| Initializer::Zeros.init([self.n_heads], device)),
            dropout: DropoutConfig::new(self.dropout).init(),
            seeds: Seeds::default(),
            qk_norm_eps: self.qk_norm_eps,
            quiet_softmax: self.quiet_softmax,
            query: linear(self.d_model, self.n_heads * d_k, self.query_bias),
            key: linear(self.d_model, key_heads * d_k, self.key_bias),
            value: linear(self.d_model, n_kv_heads * d_v, self.value_bias),
            output: linear(self.n_heads * d_v, self.d_model, self.output_bias),
            d_model: self.d_model,
            d_v,
            n_heads: self.n_heads,
            n_kv_heads,
            layouts,
            selection: self.selection.clone(),
            head_selections: None,
            choice_sharing: self.choice_sharing,
            content: self.init_content(d_k, device)?,
            options: self.options(),
            precision: self.precision,
        })
    }

    or_panics! {
        /// Creates the layers of another crate's model: each has its own parameters, all share one rotation table and one set of layouts.
        ///
        /// ```
        /// use burn::tensor::Device;
        /// use burn_sparse_transformer::{Pattern, SparseMultiHeadAttentionConfig};
        ///
        /// let config = SparseMultiHeadAttentionConfig::new(64, 4, Pattern::streaming(128, 4));
        /// assert_eq!(config.init_many(12, &Device::flex()).len(), 12);
        /// ```
        pub fn init_many(&self, layers: usize, device: &Device) -> Vec<SparseMultiHeadAttention>;

        pub fn try_init_many {
            self.validate()?;
            let layouts = Layouts::new(self.pattern.clone(), self.pattern_heads(), self.block_size)?;
            // Tables that the first layer's table replaces have one row.
            let mut later = self.clone();
            if let Some(rope) = &mut later.rope {
                rope.max_sequence_length = 1;
            }
            let mut tables = RopeTables::default();
            let layer = |index| {
                let config = if index == 0 { self } else { &later };
                let mut layer = config.init_with(layouts.clone(), device)?;
                tables.share_with(&mut layer);
                Ok(layer)
            };
            (0..layers).map(layer).collect()
        }
    }

    pub(crate) fn head_widths(&self) -> [usize; 2] {
        match self.head_dim {
            Some(head_dim) => [head_dim; 2],
            None => {
                [self.d_key, self.d_value].map(|all| all.unwrap_or(self.d_model) / self.n_heads)
            }
        }
    }

    fn options(&self) -> AttentionOptions {
        let mut options = AttentionOptions::default().precision(self.precision.products());
        if self.store_weights {
            options.weights = WeightsMode::Store;
        }
        options.softcap = self.softcap;
        options.softmax_threshold = self.softmax_threshold;
        options.alibi = (self.alibi).then(|| alibi_slopes(self.n_heads).into());
        options.scale = match &self.rope_scaling {
            Some(scaling) => {
                let [d_k, _] = self.head_widths();
                let plain = || 1.0 / (d_k as f64).sqrt();
                Some(self.scale.unwrap_or_else(plain) * scaling.score_factor())
            }
            None => self.scale,
        };
        options
    }

    pub(crate) fn validate(&self) -> Result<()> {
        ensure_positive("n_heads", self.n_heads)?;
        check_selection(&self.pattern, self.selection.as_ref())?;
        self.validate_content()?;
        let indexed = (self.content.as_ref()).is_some_and(ContentAttention::has_indexer);
        let alone = self.choice_sharing.is_some() && self.selection.is_none() && !indexed;
        ensure_none(
            "choice_sharing",
            alone,
            "none without a selection, dsa or msa",
        )?;
        match self.head_dim {
            None => ensure_multiple("d_model", self.d_model, "n_heads", self.n_heads)?,
            Some(head_dim) => {
                ensure_positive("d_model", self.d_model)?;
                ensure_positive("head_dim", head_dim)?;
            }
        }
        for (argument, width) in [("d_key", self.d_key), ("d_value", self.d_value)] {
            let twice = width.is_some() && self.head_dim.is_some();
            ensure_none(argument, twice, "none with head_dim")?;
            if let Some(width) = width {
                ensure_multiple(argument, width, "n_heads", self.n_heads)?;
            }
        }
        if let Some(n_kv_heads) = self.n_kv_heads {
            ensure_multiple("n_heads", self.n_heads, "n_kv_heads", n_kv_heads)?;
        }
        if let Some(rope) = &self.rope {
            validate_rope(rope, self.head_widths()[0])?;
        }
        if let Some(scaling) = &self.rope_scaling {
            ensure_none("rope_scaling", self.rope.is_none(), "none without rope")?;
            scaling.check(self.head_widths()[0])?;
        }
        ensure_dropout(self.dropout)?;
        let twice = self.sinks && self.quiet_softmax;
        ensure_none("sinks", twice, "none with quiet_softmax, which is one")?;
        let reach = self.relative_reach.unwrap_or(0);
        let most = (AttentionTensors::MAX_DISTANCES / self.n_heads).saturating_sub(1) / 2;
        ensure! { reach <= most =>
        "relative_reach", format!("at most {most} with {} heads", self.n_heads), reach; }
        ensure_scores(self.scale, self.softcap)?;
        ensure_above_zero("softmax_threshold", self.softmax_threshold.unwrap_or(1.0))?;
        ensure_above_zero("qk_norm_eps", self.qk_norm_eps)
    }
}

/// Rotation tables of a model's first layer, which the others share.
#[derive(Default)]
pub(crate) struct RopeTables {
    heads: Option<RotaryEncoding>,
    index: Option<RotaryEncoding>,
}

impl RopeTables {
    /// Stores the tables of a first layer, and replaces those of any other.
    pub(crate) fn share_with(&mut self, layer: &mut SparseMultiHeadAttention) {
        let share = |kept: &mut Option<RotaryEncoding>, own: &mut Option<RotaryEncoding>| {
            if let Some(table) = own.take() {
                *own = Some(kept.get_or_insert(table).clone());
            }
        };
        share(&mut self.heads, &mut layer.rope);
        let content = layer.content.as_mut();
        if let Some(own) = content.and_then(ContentHeads::index_rope_mut) {
            share(&mut self.index, own);
        }
    }
}
