use burn::config::Config;
use burn::module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay, Param};
use burn::nn::{
    Dropout, DropoutConfig, Linear, LinearConfig, RotaryEncoding, RotaryEncodingConfig,
};
use burn::tensor::{Bool, DType, Device, Tensor};
use burn_blocksparse::{
    AttentionError, AttentionOptions, AttentionTensors, BlockLayout, BlockSparseTensor,
    Dropout as WeightDropout, Layout, Pattern, WeightsMode, alibi_slopes, attention_with_tensors,
    attention_with_tensors_and_weights,
};

use crate::dropout::Seeds;
use crate::error::{
    ensure, ensure_dropout, ensure_multiple, ensure_none, ensure_positive, ensure_shape,
};
use crate::heads::{Positions, rotate, validate_rope};
use crate::input::PaddedBatch;
use crate::layouts::{Layouts, Request};
use crate::{HeadNorm, Precision, QkNorm, SparseMhaCache, SparseMhaInput, TransformerError};

const INPUT_AXES: [&str; 3] = ["batch", "seq", "d_model"];

/// Configuration of [`SparseMultiHeadAttention`].
///
/// Fields that burn-nn's `MultiHeadAttentionConfig` also has keep their names, meanings and defaults, but for `dropout`, which is 0 (Child et
/// al., 2019, §5.4: it would complicate recomputation). There is no `min_float`: what the pattern leaves out is never computed.
///
/// A configuration whose pattern is a callback ([`Pattern::from_fn`]) works, but does not serialize.
#[derive(Config, Debug)]
pub struct SparseMultiHeadAttentionConfig {
    /// Width of the input and of the output.
    pub d_model: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Which query attends to which key, per head.
    pub pattern: Pattern,
    /// Side of the blocks the pattern is cut into: 8, 16, 32, 64 or 128.
    #[config(default = 32)]
    pub block_size: usize,
    /// Number of key and value heads, a divisor of `n_heads`; fewer than `n_heads` is grouped-query
    /// attention, 1 is multi-query attention. Default: `n_heads`.
    pub n_kv_heads: Option<usize>,
    /// Width of the query projection, all heads together; the key projection has as much per head.
    /// Default: `d_model`. The paper's half-size models use `d_model / 2`.
    pub d_key: Option<usize>,
    /// Bounds the scores to ±`softcap` with a tanh before the softmax. Default: no bound.
    pub softcap: Option<f64>,
    /// Factor of the scores. Default: `1 / √d_k`.
    pub scale: Option<f64>,
    /// Rotary position embeddings of queries and keys (Su et al., 2021); its `d_model` is the width of a query head. Rotations are
    /// computed in f32. Default: none.
    pub rope: Option<RotaryEncodingConfig>,
    /// Normalisation of every query and key head, before the rotation. Default: none.
    pub qk_norm: Option<QkNorm>,
    /// Added to the variance, or to the mean square, in `qk_norm`.
    #[config(default = 1e-6)]
    pub qk_norm_eps: f64,
    /// Probability that an attention weight is dropped while training, in `[0, 1)`.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// Whether scores get ALiBi's biases, `−slope · |distance|`, with the slopes of Press et al. (2022).
    #[config(default = false)]
    pub alibi: bool,
    /// Learns a bias for each head and each distance up to so many positions, those further away sharing the last one; they begin
    /// at 0. Default: none.
    pub relative_reach: Option<usize>,
    /// Whether each head learns the score of a further key whose value is 0, from 0 on.
    #[config(default = false)]
    pub sinks: bool,
    /// Whether the softmax is burn-nn's quiet one, whose denominator has a further `exp(0)`: a sink whose logit stays 0.
    #[config(default = false)]
    pub quiet_softmax: bool,
    /// Whether the attention weights of the kept blocks are stored for the backward pass rather than
    /// computed again.
    #[config(default = false)]
    pub store_weights: bool,
    /// Dtype of the projections and of the attention.
    #[config(default = "Precision::F32")]
    pub precision: Precision,
    /// How the four projections are initialised.
    #[config(
        default = "Initializer::KaimingUniform{gain: 1.0 / f64::sqrt(3.0), fan_out_only: false}"
    )]
    pub initializer: Initializer,
    /// Whether the query projection has a bias.
    #[config(default = true)]
    pub query_bias: bool,
    /// Whether the key projection has a bias.
    #[config(default = true)]
    pub key_bias: bool,
    /// Whether the value projection has a bias.
    #[config(default = true)]
    pub value_bias: bool,
    /// Whether the output projection has a bias.
    #[config(default = true)]
    pub output_bias: bool,
}

impl SparseMultiHeadAttentionConfig {
    /// Creates the module, with parameters that are initialised on first use.
    ///
    /// # Errors
    /// If `n_heads` does not divide `d_model` or `d_key`, `n_kv_heads` does not divide `n_heads`,
    /// `softcap` or `qk_norm_eps` is not positive, `scale` is not finite, `dropout` is outside `[0, 1)`, `relative_reach` needs more
    /// than 2³⁰ numbers, there are `sinks` and the `quiet_softmax`, `rope` does not fit the heads, the pattern does not fit the heads and the block size, or the device does not
    /// compute in `precision`.
    pub fn init(&self, device: &Device) -> Result<SparseMultiHeadAttention, TransformerError> {
        self.validate()?;
        let layouts = Layouts::new(self.pattern.clone(), self.n_heads, self.block_size)?;
        self.init_with(layouts, device)
    }

    /// [`Self::init`] with layouts that other blocks may share.
    pub(crate) fn init_with(
        &self,
        layouts: Layouts,
        device: &Device,
    ) -> Result<SparseMultiHeadAttention, TransformerError> {
        self.validate()?;
        self.precision.check(device)?;
        let n_kv_heads = self.n_kv_heads.unwrap_or(self.n_heads);
        let d_k = self.d_key.unwrap_or(self.d_model) / self.n_heads;
        let d_v = self.d_model / self.n_heads;
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
            rope: self.rope.as_ref().map(|config| config.init(device)),
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
            key: linear(self.d_model, n_kv_heads * d_k, self.key_bias),
            value: linear(self.d_model, n_kv_heads * d_v, self.value_bias),
            output: linear(self.d_model, self.d_model, self.output_bias),
            d_model: self.d_model,
            n_heads: self.n_heads,
            n_kv_heads,
            layouts,
            options: self.options(),
            precision: self.precision,
        })
    }

    fn options(&self) -> AttentionOptions {
        let weights = match self.store_weights {
            true => WeightsMode::Store,
            false => WeightsMode::Recompute,
        };
        let products = self.precision.products();
        let options = AttentionOptions::default()
            .weights(weights)
            .precision(products);
        let options = match self.softcap {
            Some(softcap) => options.softcap(softcap),
            None => options,
        };
        let options = match self.scale {
            Some(scale) => options.scale(scale),
            None => options,
        };
        match self.alibi {
            true => options.alibi(alibi_slopes(self.n_heads)),
            false => options,
        }
    }

    pub(crate) fn validate(&self) -> Result<(), TransformerError> {
        ensure_positive("n_heads", self.n_heads)?;
        ensure_multiple("d_model", self.d_model, "n_heads", self.n_heads)?;
        if let Some(d_key) = self.d_key {
            ensure_multiple("d_key", d_key, "n_heads", self.n_heads)?;
        }
        if let Some(n_kv_heads) = self.n_kv_heads {
            ensure_multiple("n_heads", self.n_heads, "n_kv_heads", n_kv_heads)?;
        }
        if let Some(rope) = &self.rope {
            validate_rope(rope, self.d_key.unwrap_or(self.d_model) / self.n_heads)?;
        }
        ensure_dropout(self.dropout)?;
        let twice = self.sinks && self.quiet_softmax;
        ensure_none("sinks", twice, "none with quiet_softmax, which is one")?;
        let reach = self.relative_reach.unwrap_or(0);
        let most = (AttentionTensors::MAX_DISTANCES / self.n_heads).saturating_sub(1) / 2;
        ensure(
            reach <= most,
            "relative_reach",
            || format!("at most {most} with {} heads", self.n_heads),
            reach,
        )?;
        let scale = self.scale.unwrap_or(1.0);
        let finite = (scale as f32).is_finite();
        ensure(finite, "scale", || "finite, as f32".into(), scale)?;
        for (argument, value) in [
            ("softcap", self.softcap.unwrap_or(1.0)),
            ("qk_norm_eps", self.qk_norm_eps),
        ] {
            ensure(
                value > 0.0 && value.is_finite(),
                argument,
                || "positive and finite".into(),
                value,
            )?;
        }
        Ok(())
    }
}

/// Multi-head attention over the pairs a [`Pattern`] allows: burn-nn's `MultiHeadAttention` with a
/// pattern in place of masks.
///
/// ```text
/// context = concat_h(softmax(q_h k_hᵀ / √d_k over the allowed keys) v_h) W_output + b_output
/// ```
///
/// where `q_h` and `k_h` may be normalised and rotated before (`qk_norm`, `rope`).
///
/// Its parameters have the names and shapes of burn-nn's module, so that a `MultiHeadAttention` record
/// loads into it; those of `qk_norm`, `relative_reach` and `sinks` come on top. The layout of a pair of sequence lengths is built once and kept for reuse.
///
/// Should be created with [`SparseMultiHeadAttentionConfig`].
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct SparseMultiHeadAttention {
    /// `d_model` to `n_heads · d_k`.
    pub query: Linear,
    /// `d_model` to `n_kv_heads · d_k`.
    pub key: Linear,
    /// `d_model` to `n_kv_heads · d_v`, where `d_v = d_model / n_heads`.
    pub value: Linear,
    /// `d_model` to `d_model`.
    pub output: Linear,
    /// Of each query head.
    pub query_norm: Option<HeadNorm>,
    /// Of each key head.
    pub key_norm: Option<HeadNorm>,
    /// Of queries and keys; no parameters.
    pub rope: Option<RotaryEncoding>,
    /// Biases of distances, `[n_heads, 2 · reach + 1]`: see [`AttentionTensors::relative_bias`].
    pub relative_bias: Option<Param<Tensor<2>>>,
    /// Sink logits, `[n_heads]`: see [`AttentionTensors::sinks`].
    pub sinks: Option<Param<Tensor<1>>>,
    /// Of the attention weights. Its masks are not drawn from the backend's generator but depend on a seed, see [`SparseMhaInput::dropout_seed`].
    pub dropout: Dropout,
    #[module(skip)]
    seeds: Seeds,
    qk_norm_eps: f64,
    pub(crate) quiet_softmax: bool,
    d_model: usize,
    n_heads: usize,
    n_kv_heads: usize,
    #[module(skip)]
    pub(crate) layouts: Layouts,
    #[module(skip)]
    pub(crate) options: AttentionOptions,
    #[module(skip)]
    pub(crate) precision: Precision,
}

/// Output of [`SparseMultiHeadAttention`].
#[derive(Clone, Debug)]
pub struct SparseMhaOutput {
    /// `[batch, seq_q, d_model]`, in the query's dtype.
    pub context: Tensor<3>,
}

impl SparseMultiHeadAttention {
    /// Attention of each query to the keys its pattern allows.
    ///
    /// With `seq_q ≠ seq_kv` the queries are the last positions: query `i` sits at
    /// `i + seq_kv − seq_q`. A query with nothing to attend to contributes zeros, so that its output
    /// is the output projection's bias; that of padding is 0.
    ///
    /// # Shapes
    /// - input: `[batch, seq_q, d_model]`, `[batch, seq_kv, d_model]`
    /// - `context`: `[batch, seq_q, d_model]`
    ///
    /// # Errors
    /// If the shapes do not fit the module or each other, there is no layout for these lengths, or a position is past the end of
    /// `rope`.
    pub fn forward(&self, input: SparseMhaInput) -> Result<SparseMhaOutput, TransformerError> {
        let (call, request) = self.prepare(&input, 0)?;
        let layout = self.layouts.get(&request)?;
        let heads = self.project(input, &call);
        let context = self.attend(heads, &layout, &call)?;
        Ok(self.finish(context, &call))
    }

    /// [`Self::forward`] over a layout that depends on the projected queries and keys, normalised and rotated, in place of the
    /// module's pattern: `choose` gets `[batch, n_heads, seq_q, d_k]` and `[batch, n_kv_heads, seq_kv, d_k]`.
    ///
    /// # Errors
    /// As [`Self::forward`] and `choose`; also if the input has padding, which the layout would have to leave out.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_blocksparse::{TopKOptions, top_k_blocks_on_device};
    /// use burn_sparse_transformer::{Pattern, SparseMhaInput, SparseMultiHeadAttentionConfig};
    ///
    /// let device = Device::flex();
    /// let mha = SparseMultiHeadAttentionConfig::new(64, 4, Pattern::causal()).init(&device)?;
    /// let x = Tensor::<3>::random([1, 500, 64], Distribution::Default, &device);
    /// // Each block sees four: the first, its own, the one before it, and of the others the one most alike.
    /// let four = TopKOptions::new(32, 4);
    /// let choose = |query, key| top_k_blocks_on_device(query, key, four);
    /// let y = mha.forward_choosing(SparseMhaInput::self_attn(x), choose)?.context;
    /// assert_eq!(y.dims(), [1, 500, 64]);
    /// # Ok::<(), burn_sparse_transformer::TransformerError>(())
    /// ```
    pub fn forward_choosing<L>(
        &self,
        input: SparseMhaInput,
        choose: impl FnOnce(Tensor<4>, Tensor<4>) -> Result<L, AttentionError>,
    ) -> Result<SparseMhaOutput, TransformerError>
    where
        for<'a> &'a L: Into<Layout<'a>>,
    {
        let expected = "none: a chosen layout says what takes part";
        ensure_none("padding", input.padding.is_some(), expected)?;
        let (call, _) = self.prepare(&input, 0)?;
        let heads = self.project(input, &call);
        let layout = choose(heads.0.clone(), heads.1.clone())?;
        let context = self.attend(heads, &layout, &call)?;
        Ok(self.finish(context, &call))
    }

    /// [`Self::forward`], which also returns the attention weights of the kept blocks: after biases, before dropout, and with sinks or
    /// the quiet softmax less than 1 in all.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_with_weights(
        &self,
        input: SparseMhaInput,
    ) -> Result<(SparseMhaOutput, BlockSparseTensor), TransformerError> {
        let (call, request) = self.prepare(&input, 0)?;
        let layout = self.layouts.get(&request)?;
        let (query, key, value) = self.project(input, &call);
        let tensors = self.tensors_of(&query, &call);
        let options = self.options_of(&query, &call);
        let (context, _, weights) =
            attention_with_tensors_and_weights(query, key, value, tensors, &layout, options)?;
        Ok((self.finish(context, &call), weights))
    }

    /// Attention of new positions to themselves and to those in `cache`, for autoregressive decoding.
    ///
    /// The keys and values of `input` are appended to the cache, keys normalised and rotated; its queries are the last positions of
    /// what the cache then holds. With a causal pattern, feeding a sequence in pieces gives what
    /// [`Self::forward`] gives for the whole. After an error the cache is as it was.
    ///
    /// # Shapes
    /// - input: `[batch, new, d_model]`, new positions only
    /// - `context`: `[batch, new, d_model]`
    ///
    /// # Errors
    /// As [`Self::forward`]; also if the batch differs from the cache's, or the cache is full.
    pub fn forward_cache(
        &self,
        input: SparseMhaInput,
        cache: &mut SparseMhaCache,
    ) -> Result<SparseMhaOutput, TransformerError> {
        let (_, new) = self.check(&input)?;
        let [batch, ..] = input.key.dims();
        cache.check([batch, self.n_kv_heads, self.d_k()], new)?;
        let before = cache.len();
        let (call, request) = self.prepare(&input, before)?;
        let layout = self.layouts.get(&request)?;
        let (query, key, value) = self.project(input, &call);
        let (key, value) = cache.append(key, value);
        match self.attend((query, key, value), &layout, &call) {
            Ok(context) => Ok(self.finish(context, &call)),
            Err(error) => {
                cache.truncate(before);
                Err(error)
            }
        }
    }

    /// Self-attention of several sequences that lie one after the other in one, without padding: in each of them the pattern holds,
    /// and `rope` counts, as if it stood alone.
    ///
    /// # Shapes
    /// - `x`: `[1, total, d_model]`
    /// - `cu_seqlens`: where the sequences begin, and `total`: `[0, n_0, n_0 + n_1, …, total]`, as FlashAttention's
    /// - `context`: `[1, total, d_model]`
    ///
    /// # Errors
    /// If the shape does not fit, `cu_seqlens` does not rise from 0 to `total`, or a sequence is longer than `rope`'s table.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_sparse_transformer::{Pattern, SparseMultiHeadAttentionConfig};
    ///
    /// let device = Device::flex();
    /// let mha = SparseMultiHeadAttentionConfig::new(64, 4, Pattern::fixed(128, 32)).init(&device)?;
    /// let x = Tensor::<3>::random([1, 1000, 64], Distribution::Default, &device);
    /// let y = mha.forward_packed(x, &[0, 300, 420, 1000])?.context;
    /// assert_eq!(y.dims(), [1, 1000, 64]);
    /// # Ok::<(), burn_sparse_transformer::TransformerError>(())
    /// ```
    pub fn forward_packed(
        &self,
        x: Tensor<3>,
        cu_seqlens: &[usize],
    ) -> Result<SparseMhaOutput, TransformerError> {
        let input = SparseMhaInput::self_attn(x);
        let (call, request) = self.prepare_packed(&input, cu_seqlens)?;
        let layout = self.layouts.get(&request)?;
        let heads = self.project(input, &call);
        let context = self.attend(heads, &layout, &call)?;
        Ok(self.finish(context, &call))
    }

    /// Which query attends to which key.
    pub fn pattern(&self) -> &Pattern {
        self.layouts.pattern()
    }

    /// Number of query heads.
    pub fn n_heads(&self) -> usize {
        self.n_heads
    }

    /// Number of key and value heads.
    pub fn n_kv_heads(&self) -> usize {
        self.n_kv_heads
    }

    /// Side of the blocks the pattern is cut into.
    pub fn block_size(&self) -> usize {
        self.layouts.block_size()
    }

    /// The layout that [`Self::forward`] uses for `seq_q` queries and `seq_kv` keys.
    ///
    /// # Errors
    /// If there is no layout for these lengths.
    pub fn layout(&self, seq_q: usize, seq_kv: usize) -> Result<BlockLayout, TransformerError> {
        self.layouts.get(&Request::new(seq_q, seq_kv))
    }

    /// Operations of the four projections for one position, forward: two per weight.
    pub fn matmul_flops_per_token(&self) -> u64 {
        [&self.query, &self.key, &self.value, &self.output]
            .map(linear_flops)
            .iter()
            .sum()
    }

    /// Operations of the attention itself for one sequence, forward: four per allowed pair and
    /// channel when keys and values are equally wide (q·k and p·v).
    ///
    /// # Errors
    /// If there is no layout for this length.
    pub fn attention_flops(&self, seq: usize) -> Result<u64, TransformerError> {
        let d_v = self.d_model / self.n_heads;
        let pairs = self.layout(seq, seq)?.allowed_pairs();
        Ok(2 * pairs * (self.d_k() + d_v) as u64)
    }

    /// Width of a query or key head.
    fn d_k(&self) -> usize {
        let [_, d_query] = self.query.weight.lazy_shape().dims();
        d_query / self.n_heads
    }

    /// The lengths `(seq_q, seq_kv)`, once every shape fits.
    fn check(&self, input: &SparseMhaInput) -> Result<(usize, usize), TransformerError> {
        self.check_input("query", &input.query)?;
        let [batch, seq_q, _] = input.query.dims();
        let [_, seq_kv, _] = input.key.dims();
        let expected = [Some(batch), None, Some(self.d_model)];
        ensure_shape("key", input.key.dims(), expected, INPUT_AXES)?;
        let expected = [Some(batch), Some(seq_kv), Some(self.d_model)];
        ensure_shape("value", input.value.dims(), expected, INPUT_AXES)?;
        Ok((seq_q, seq_kv))
    }

    /// `x` must be `[batch, seq, d_model]` and not empty.
    pub(crate) fn check_input(
        &self,
        name: &'static str,
        x: &Tensor<3>,
    ) -> Result<(), TransformerError> {
        let expected = [None, None, Some(self.d_model)];
        ensure_shape(name, x.dims(), expected, INPUT_AXES)
    }

    /// A call and the layout that it asks for, once its input is in order; nothing is computed yet. `cached` keys precede the input's.
    fn prepare(
        &self,
        input: &SparseMhaInput,
        cached: usize,
    ) -> Result<(Call, Request), TransformerError> {
        let (seq_q, new) = self.check(input)?;
        let [batch, ..] = input.query.dims();
        let seq_kv = cached + new;
        let mut request = Request::new(seq_q, seq_kv);
        let padded = input.padding(batch, seq_q, seq_kv)?;
        if let Some(padded) = &padded {
            request.restrictions = padded.restrictions();
        }
        let (mut query, key) = (Positions::From(0), Positions::From(cached));
        if let Some(rope) = &self.rope {
            let Some(first) = seq_kv.checked_sub(seq_q) else {
                return Err(TransformerError::argument(
                    "query",
                    format!("at most {seq_kv} positions, as many as keys, with rope"),
                    seq_q,
                ));
            };
            query = Positions::From(first);
            query.check(rope, seq_q)?;
            key.check(rope, new)?;
        }
        let call = Call {
            query,
            key,
            ..Call::new(input, padded)
        };
        Ok((call, request))
    }

    fn prepare_packed(
        &self,
        input: &SparseMhaInput,
        cu_seqlens: &[usize],
    ) -> Result<(Call, Request), TransformerError> {
        let dims = input.query.dims();
        let [_, total, _] = dims;
        let expected = [Some(1), None, Some(self.d_model)];
        ensure_shape("x", dims, expected, INPUT_AXES)?;
        let rises = cu_seqlens.windows(2).all(|pair| pair[0] <= pair[1]);
        let ends = (cu_seqlens.first(), cu_seqlens.last());
        ensure(
            rises && ends == (Some(&0), Some(&total)),
            "cu_seqlens",
            || format!("rising from 0 to {total}, the length of x"),
            format!("{cu_seqlens:?}"),
        )?;
        let sequences = cu_seqlens.windows(2).filter(|pair| pair[0] < pair[1]);
        let mut request = Request::new(total, total);
        request.documents = sequences.clone().map(|pair| pair[0]).collect();
        let positions = Positions::Documents(sequences.map(|pair| pair[1] - pair[0]).collect());
        if let Some(rope) = &self.rope {
            positions.check(rope, total)?;
        }
        let call = Call {
            query: positions.clone(),
            key: positions,
            ..Call::new(input, None)
        };
        Ok((call, request))
    }

    pub(crate) fn project(
        &self,
        input: SparseMhaInput,
        call: &Call,
    ) -> (Tensor<4>, Tensor<4>, Tensor<4>) {
        let linear = |layer, x| self.precision.linear(layer, x);
        let (q, k) = (
            linear(&self.query, input.query),
            linear(&self.key, input.key),
        );
        (
            self.heads(q, self.n_heads, &self.query_norm, &call.query),
            self.heads(k, self.n_kv_heads, &self.key_norm, &call.key),
            split_heads(linear(&self.value, input.value), self.n_kv_heads),
        )
    }

    /// Attention of projected queries, keys and values.
    pub(crate) fn attend<'a>(
        &self,
        (query, key, value): (Tensor<4>, Tensor<4>, Tensor<4>),
        layout: impl Into<Layout<'a>>,
        call: &Call,
    ) -> Result<Tensor<4>, TransformerError> {
        let tensors = self.tensors_of(&query, call);
        let options = self.options_of(&query, call);
        let (context, _) = attention_with_tensors(query, key, value, tensors, layout, options)?;
        Ok(context)
    }

    /// Sinks and biases of a call.
    fn tensors_of(&self, query: &Tensor<4>, call: &Call) -> AttentionTensors {
        let mut tensors = AttentionTensors::default();
        tensors.sinks = match &self.sinks {
            None if self.quiet_softmax => Some(Tensor::zeros([self.n_heads], &query.device())),
            sinks => sinks.as_ref().map(Param::val),
        };
        tensors.relative_bias = self.relative_bias.as_ref().map(Param::val);
        tensors.bias = (call.bias.clone()).map(|bias| bias.cast(query.dtype()));
        tensors
    }

    /// The options of a call, with dropout where burn-nn's module would drop.
    fn options_of(&self, query: &Tensor<4>, call: &Call) -> AttentionOptions {
        let options = self.options.clone();
        let seed = || call.dropout_seed.unwrap_or_else(|| self.seeds.next());
        let dropout = match call.dropout {
            None if query.device().is_autodiff() => self.training_dropout(seed),
            decided => decided,
        };
        match dropout {
            Some(dropout) => options.dropout(dropout),
            None => options,
        }
    }

    /// What a training pass drops of the attention weights.
    pub(crate) fn training_dropout(&self, seed: impl FnOnce() -> u64) -> Option<WeightDropout> {
        let Dropout { prob, training } = &self.dropout;
        let drops = *prob > 0.0 && training.is_enabled();
        drops.then(|| WeightDropout::new(*prob, seed()))
    }

    /// Queries or keys `[batch, seq, heads · d_k]` as `[batch, heads, seq, d_k]`, normalised and rotated.
    fn heads(
        &self,
        x: Tensor<3>,
        heads: usize,
        norm: &Option<HeadNorm>,
        positions: &Positions,
    ) -> Tensor<4> {
        let dtype = x.dtype();
        let x = match norm {
            Some(norm) => norm.forward(x, heads, self.qk_norm_eps),
            None => x,
        };
        let x = split_heads(x, heads);
        let x = match &self.rope {
            Some(rope) => rotate(rope, x, positions),
            None => x,
        };
        x.cast(dtype)
    }

    fn finish(&self, context: Tensor<4>, call: &Call) -> SparseMhaOutput {
        self.project_output(self.join(context), call)
    }

    /// The heads `[batch, heads, seq, d_v]` as `[batch, seq, d_model]`.
    pub(crate) fn join(&self, context: Tensor<4>) -> Tensor<3> {
        let [batch, _, seq, _] = context.dims();
        context.swap_dims(1, 2).reshape([batch, seq, self.d_model])
    }

    pub(crate) fn project_output(&self, joined: Tensor<3>, call: &Call) -> SparseMhaOutput {
        let context = self.precision.linear(&self.output, joined).cast(call.dtype);
        SparseMhaOutput {
            context: match &call.padding {
                Some(padding) => context.mask_fill(padding.clone(), 0.0),
                None => context,
            },
        }
    }
}

/// What a call computes, decided before it.
pub(crate) struct Call {
    query: Positions,
    key: Positions,
    /// Queries that are padding, `[batch, seq_q, 1]`.
    padding: Option<Tensor<3, Bool>>,
    /// Of the output.
    dtype: DType,
    /// Of the scores, `[batch or 1, heads or 1, seq_q or 1, seq_kv]`.
    bias: Option<Tensor<4>>,
    dropout_seed: Option<u64>,
    /// In place of the module's own.
    dropout: Option<WeightDropout>,
}

impl Call {
    /// One whose positions count from 0.
    pub(crate) fn new(input: &SparseMhaInput, padded: Option<PaddedBatch>) -> Self {
        let device = input.query.device();
        Self {
            query: Positions::From(0),
            key: Positions::From(0),
            padding: padded.and_then(|padded| padded.queries_mask(&device)),
            dtype: input.query.dtype(),
            bias: input.bias.clone(),
            dropout_seed: input.dropout_seed,
            dropout: input.dropout,
        }
    }
}

/// `[batch, seq, heads · width]` as `[batch, heads, seq, width]`.
pub(crate) fn split_heads(x: Tensor<3>, heads: usize) -> Tensor<4> {
    let [batch, seq, width] = x.dims();
    x.reshape([batch, seq, heads, width / heads])
        .swap_dims(1, 2)
}

/// Operations of a linear layer for one position: a multiplication and an addition per weight.
pub(crate) fn linear_flops(linear: &Linear) -> u64 {
    2 * linear.weight.lazy_shape().num_elements() as u64
}

impl ModuleDisplay for SparseMultiHeadAttention {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new()
            .with_new_line_after_attribute(false)
            .optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content
            .add("d_model", &self.d_model)
            .add("n_heads", &self.n_heads)
            .add("n_kv_heads", &self.n_kv_heads)
            .add("pattern", &self.pattern().to_string())
            .add("block_size", &self.block_size())
            .optional()
    }
}
