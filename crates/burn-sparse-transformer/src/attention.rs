use burn::module::{Content, DisplaySettings, Module, ModuleDisplay, Param};
use burn::nn::{Dropout, Linear, RotaryEncoding};
use burn::tensor::{DType, Tensor};
use burn_blocksparse::{
    AttentionOptions, AttentionTensors, BlockLayout, BlockSparseTensor, Dropout as WeightDropout,
    Layout, Pattern, Seed, SparseAttentionCall,
};
use burn_sparse_select::Selection;

use crate::call::{Call, Heads, Seen};
use crate::content::ContentHeads;
use crate::dropout::{Seeds, training_dropout};
use crate::error::{Result, ensure, ensure_none, ensure_shape, or_panics};
use crate::heads::{Positions, rotate, rotate_both};
use crate::layouts::{Layouts, Request};
use crate::precision::project_heads;
use crate::shared_choice::{ChoiceSharing, SharedChoice};
use crate::stream::Projected;
use crate::{HeadNorm, HeadSelections, Precision, SparseMhaCache, SparseMhaInput};

const INPUT_AXES: [&str; 3] = ["batch", "seq", "d_model"];

/// Multi-head attention over the pairs a [`Pattern`] allows: burn-nn's `MultiHeadAttention` with a
/// pattern in place of masks.
///
/// ```text
/// context = concat_h(softmax(q_h k_hᵀ / √d_k over the allowed keys) v_h) W_output + b_output
/// ```
///
/// where `q_h` and `k_h` may be normalised and rotated first (`qk_norm`, `rope`).
///
/// Its parameters have the names and shapes of burn-nn's module, so that a `MultiHeadAttention` record loads into it; `qk_norm`, `relative_reach` and `sinks`
/// add parameters. The layout of a pair of sequence lengths is built once and reused.
///
/// Create it with [`SparseMultiHeadAttentionConfig`](crate::SparseMultiHeadAttentionConfig).
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct SparseMultiHeadAttention {
    /// Projection from `d_model` to `n_heads · d_k`.
    pub query: Linear,
    /// Projection from `d_model` to `n_kv_heads · d_k`.
    pub key: Linear,
    /// Projection from `d_model` to `n_kv_heads · d_v`, where `d_v` is `d_model / n_heads` unless `d_value` or `head_dim` is set.
    pub value: Linear,
    /// Projection from `n_heads · d_v` to `d_model`.
    pub output: Linear,
    /// Norm of each query head.
    pub query_norm: Option<HeadNorm>,
    /// Norm of each key head.
    pub key_norm: Option<HeadNorm>,
    /// Rotation of queries and keys; no parameters.
    pub rope: Option<RotaryEncoding>,
    /// Relative position biases, `[n_heads, 2 · reach + 1]`: see [`AttentionTensors::relative_bias`].
    pub relative_bias: Option<Param<Tensor<2>>>,
    /// Sink logits, `[n_heads]`: see [`AttentionTensors::sinks`].
    pub sinks: Option<Param<Tensor<1>>>,
    /// Heads that choose keys by content, after those of the pattern.
    pub content: Option<ContentHeads>,
    /// Attention dropout. Its masks are not drawn from the backend's generator but are a function of a seed, see [`SparseMhaInput::dropout_seed`].
    pub dropout: Dropout,
    #[module(skip)]
    pub(crate) seeds: Seeds,
    pub(crate) qk_norm_eps: f64,
    pub(crate) quiet_softmax: bool,
    pub(crate) d_model: usize,
    pub(crate) d_v: usize,
    pub(crate) n_heads: usize,
    pub(crate) n_kv_heads: usize,
    #[module(skip)]
    pub(crate) layouts: Layouts,
    #[module(skip)]
    pub(crate) selection: Option<Selection>,
    #[module(skip)]
    pub(crate) head_selections: Option<HeadSelections>,
    #[module(skip)]
    pub(crate) choice_sharing: Option<ChoiceSharing>,
    #[module(skip)]
    pub(crate) options: AttentionOptions,
    #[module(skip)]
    pub(crate) precision: Precision,
}

/// Output of [`SparseMultiHeadAttention`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SparseMhaOutput {
    /// `[batch, seq_q, d_model]`, in the query's dtype.
    pub context: Tensor<3>,
    /// Auxiliary loss, `[1]`, to add to the loss in training: the [commitment](crate::content::RoutingOutput::commitment) of heads that choose by clusters,
    /// or the loss of an indexer that chooses keys ([`DsaStage`](crate::dsa::DsaStage)).
    pub aux_loss: Option<Tensor<1>>,
    /// Choice of keys of a layer that shares one, for [`SparseMhaInput::choice`] of the next layer.
    pub choice: Option<SharedChoice>,
}

impl SparseMultiHeadAttention {
    or_panics! {
        /// Computes attention of each query to the keys that its pattern allows.
        ///
        /// With `seq_q ≠ seq_kv` the queries are the last positions: query `i` is at `i + seq_kv − seq_q`. A query without keys gets the output projection's
        /// bias; a query that is padding gets 0.
        ///
        /// # Shapes
        /// - input: `[batch, seq_q, d_model]`, `[batch, seq_kv, d_model]`
        /// - `context`: `[batch, seq_q, d_model]`
        pub fn forward(&self, input: SparseMhaInput) -> SparseMhaOutput;

        /// # Errors
        /// If the shapes do not match the module or each other, there is no layout for these lengths, or a position is past the end of `rope`. Also if there
        /// is padding and heads choose by content, or a selection meets padding that is not at the end of self-attention's sequences. Heads that choose by
        /// content also refuse a bias, and queries that are not the keys' tokens.
        pub fn try_forward { self.finish_seen(self.context(input)?) }
    }

    /// [`Self::forward`] without the output's bias, and without zeros at padding.
    pub(crate) fn forward_projected(&self, input: SparseMhaInput) -> Result<Projected> {
        self.project_seen(self.context(input)?)
    }

    /// Computes the heads' outputs.
    pub(crate) fn context(&self, input: SparseMhaInput) -> Result<(Seen, Call)> {
        self.context_with(input, None)
    }

    pub(crate) fn context_with(
        &self,
        input: SparseMhaInput,
        cache: Option<&mut SparseMhaCache>,
    ) -> Result<(Seen, Call)> {
        let kind = self.kind();
        kind.check_input(&input)?;
        let (seen, call) = kind.context(self, input, cache)?;
        Ok((self.handing_on(seen), call))
    }

    /// Drops a choice that no layer takes, to free its memory.
    pub(crate) fn handing_on(&self, mut seen: Seen) -> Seen {
        seen.aside.choice = (seen.aside.choice).filter(|_| self.choice_sharing.is_some());
        seen
    }

    or_panics! {
        /// [`Self::forward`] that also returns the attention weights of the kept blocks: after biases, before dropout. With sinks or the quiet softmax, rows
        /// sum to less than 1.
        pub fn forward_with_weights(&self, input: SparseMhaInput) -> (SparseMhaOutput, BlockSparseTensor);

        pub fn try_forward_with_weights {
            self.kind().ensure_pattern()?;
            let (call, request) = self.prepare(&input, 0)?;
            let layout = self.layouts.get(&request)?;
            let heads = self.project(input, &call)?;
            let attention = self.call_of(heads, &layout, &call).weights().run()?;
            let weights = attention.weights.expect("the call asks for weights");
            Ok((self.finish(attention.out, &call)?, weights))
        }
    }

    or_panics! {
        /// Self-attention of several sequences concatenated without padding: the pattern holds, and `rope` counts, in each of them as if it stood alone.
        ///
        /// # Shapes
        /// - `x`: `[1, total, d_model]`
        /// - `cu_seqlens`: offsets of the sequences, and `total`: `[0, n_0, n_0 + n_1, …, total]`, as in FlashAttention
        /// - `context`: `[1, total, d_model]`
        ///
        /// ```
        /// use burn::tensor::{Device, Distribution, Tensor};
        /// use burn_sparse_transformer::{Pattern, SparseMultiHeadAttentionConfig};
        ///
        /// let device = Device::flex();
        /// let mha = SparseMultiHeadAttentionConfig::new(64, 4, Pattern::fixed(128, 32)).init(&device);
        /// let x = Tensor::<3>::random([1, 1000, 64], Distribution::Default, &device);
        /// let y = mha.forward_packed(x, &[0, 300, 420, 1000]).context;
        /// assert_eq!(y.dims(), [1, 1000, 64]);
        /// ```
        pub fn forward_packed(&self, x: Tensor<3>, cu_seqlens: &[usize]) -> SparseMhaOutput;

        /// # Errors
        /// If the shape does not match, `cu_seqlens` does not increase from 0 to `total`, or a sequence is longer than `rope`'s table.
        pub fn try_forward_packed { self.finish_seen(self.packed_context(SparseMhaInput::self_attn(x), cu_seqlens)?) }
    }

    /// Computes the heads' outputs for packed sequences.
    pub(crate) fn packed_context(
        &self,
        input: SparseMhaInput,
        cu_seqlens: &[usize],
    ) -> Result<(Seen, Call)> {
        self.kind().ensure_pattern()?;
        let (call, request) = self.prepare_packed(&input, cu_seqlens)?;
        let layout = self.layouts.get(&request)?;
        let heads = self.project(input, &call)?;
        Ok((self.attend(heads, &layout, &call)?.into(), call))
    }

    /// Returns the pattern.
    pub fn pattern(&self) -> &Pattern {
        self.layouts.pattern()
    }

    /// Returns the number of query heads.
    pub fn n_heads(&self) -> usize {
        self.n_heads
    }

    /// Returns the number of key and value heads.
    pub fn n_kv_heads(&self) -> usize {
        self.n_kv_heads
    }

    /// Returns the block size of the pattern.
    pub fn block_size(&self) -> usize {
        self.layouts.block_size()
    }

    /// Returns the layout that [`Self::forward`] uses for `seq_q` queries and `seq_kv` keys.
    ///
    /// # Errors
    /// If there is no layout for these lengths.
    pub fn layout(&self, seq_q: usize, seq_kv: usize) -> Result<BlockLayout> {
        self.layouts.get(&Request::new(seq_q, seq_kv))
    }

    /// Caches the `most` recently used layouts, by lengths, padding and documents, for this module and all that share its layouts: its copies and, in a
    /// model, the blocks with the same pattern. The default is 8. A server whose requests have more lengths than that rebuilds layouts again and again. 0
    /// keeps none.
    pub fn keep_layouts(&self, most: usize) {
        self.layouts.keep(most);
    }

    pub(crate) fn d_k(&self) -> usize {
        let [_, d_query] = self.query.weight.lazy_shape().dims();
        d_query / self.n_heads
    }

    /// Checks all shapes and returns the lengths `(seq_q, seq_kv)`.
    pub(crate) fn check(&self, input: &SparseMhaInput) -> Result<(usize, usize)> {
        self.check_input("query", &input.query)?;
        let [batch, seq_q, _] = input.query.dims();
        let [_, seq_kv, _] = input.key.dims();
        let expected = [Some(batch), None, Some(self.d_model)];
        ensure_shape("key", input.key.dims(), expected, INPUT_AXES)?;
        let expected = [Some(batch), Some(seq_kv), Some(self.d_model)];
        ensure_shape("value", input.value.dims(), expected, INPUT_AXES)?;
        Ok((seq_q, seq_kv))
    }

    /// Checks that `x` is `[batch, seq, d_model]` and not empty.
    pub(crate) fn check_input(&self, name: &'static str, x: &Tensor<3>) -> Result<()> {
        let expected = [None, None, Some(self.d_model)];
        ensure_shape(name, x.dims(), expected, INPUT_AXES)
    }

    /// Checks an input and returns its call and the layout request. Computes nothing on the device. `cached` keys precede the input's.
    pub(crate) fn prepare(&self, input: &SparseMhaInput, cached: usize) -> Result<(Call, Request)> {
        let (seq_q, new) = self.check(input)?;
        let unwanted = input.options.choice.is_some() && !self.takes_choice();
        let expected = "none for a layer that chooses its keys itself, or by its pattern";
        ensure_none("choice", unwanted, expected)?;
        let [batch, ..] = input.query.dims();
        let seq_kv = cached + new;
        let mut request = Request::new(seq_q, seq_kv);
        request.restrictions = input.padding(batch, seq_q, seq_kv)?;
        let (mut query, key) = (Positions::From(0), Positions::From(cached));
        if let Some(rope) = &self.rope {
            ensure! { seq_q <= seq_kv =>
            "query", format!("at most {seq_kv} positions, as many as keys, with rope"), seq_q; }
            query = Positions::From(seq_kv - seq_q);
            query.check(rope, seq_q)?;
            key.check(rope, new)?;
        }
        let call = Call {
            query,
            key,
            ..Call::new(input, &request.restrictions)?
        };
        Ok((call, request))
    }

    fn prepare_packed(
        &self,
        input: &SparseMhaInput,
        cu_seqlens: &[usize],
    ) -> Result<(Call, Request)> {
        let dims = input.query.dims();
        let [_, total, _] = dims;
        let expected = [Some(1), None, Some(self.d_model)];
        ensure_shape("x", dims, expected, INPUT_AXES)?;
        let rises = cu_seqlens.windows(2).all(|pair| pair[0] <= pair[1]);
        let ends = (cu_seqlens.first(), cu_seqlens.last());
        ensure! { rises && ends == (Some(&0), Some(&total)) =>
        "cu_seqlens", format!("rising from 0 to {total}, the length of x"), format!("{cu_seqlens:?}"); }
        let sequences = cu_seqlens.windows(2).filter(|pair| pair[0] < pair[1]);
        let mut request = Request::new(total, total);
        request.documents = sequences.clone().map(|pair| pair[0]).collect();
        let positions = Positions::Documents(sequences.map(|pair| pair[1] - pair[0]).collect());
        if let Some(rope) = &self.rope {
            positions.check(rope, total)?;
        }
        Ok((Call::at(input, positions)?, request))
    }

    /// Projects to queries, keys and values by heads, normalised and rotated.
    pub(crate) fn project(&self, input: SparseMhaInput, call: &Call) -> Result<Heads> {
        let [key_heads, value_heads] = self.kv_heads();
        let same_rows = input.is_self_attention();
        let [query, key, value] = match same_rows {
            // One product for all three, so that the input is read once.
            true => {
                let layers = [&self.query, &self.key, &self.value];
                let heads = [self.n_heads, key_heads, value_heads];
                project_heads(self.precision, layers, input.query, heads)?
            }
            false => {
                let one = |layer, x, heads| -> Result<Tensor<4>> {
                    let [x] = project_heads(self.precision, [layer], x, [heads])?;
                    Ok(x)
                };
                [
                    one(&self.query, input.query, self.n_heads)?,
                    one(&self.key, input.key, key_heads)?,
                    one(&self.value, input.value, value_heads)?,
                ]
            }
        };
        let Some(rope) = self.rope.as_ref().filter(|_| same_rows) else {
            return Ok([
                self.place(query, &self.query_norm, &call.query)?,
                self.place(key, &self.key_norm, &call.key)?,
                value,
            ]);
        };
        let dtype = query.dtype();
        let query = self.normed(query, &self.query_norm)?;
        let key = self.normed(key, &self.key_norm)?;
        let [query, key] = rotate_both(rope, [query, key], &call.query, dtype)?;
        Ok([query, key, value])
    }

    pub(crate) fn attend<'a>(
        &self,
        heads: Heads,
        layout: impl Into<Layout<'a>>,
        call: &Call,
    ) -> Result<Tensor<4>> {
        let attention = self.call_of(heads, layout, call);
        Ok((call.options.results).of(attention, self.options.weights)?)
    }

    /// Builds the attention call.
    pub(crate) fn call_of<'a>(
        &self,
        [query, key, value]: Heads,
        layout: impl Into<Layout<'a>>,
        call: &Call,
    ) -> SparseAttentionCall<'a> {
        let tensors = self.tensors_of(&query, call);
        let options = self.options_of(&query, call);
        SparseAttentionCall::new(query, key, value, layout)
            .tensors(tensors)
            .options(options)
    }

    /// Returns sinks and biases of a call.
    pub(crate) fn tensors_of(&self, query: &Tensor<4>, call: &Call) -> AttentionTensors {
        let mut tensors = AttentionTensors::default();
        tensors.sinks = self.sink_logits();
        tensors.relative_bias = self.relative_bias.as_ref().map(Param::val);
        tensors.bias = (call.options.bias.clone()).map(|bias| bias.cast(query.dtype()));
        tensors
    }

    /// Returns the options of a call. Dropout is active where burn-nn's module would drop.
    pub(crate) fn options_of(&self, query: &Tensor<4>, call: &Call) -> AttentionOptions {
        let options = self.options.clone();
        let seed = || {
            call.options
                .dropout_seed
                .unwrap_or_else(|| self.seeds.next())
        };
        let dropout = match call.options.dropout {
            None if query.device().is_autodiff() => self.training_dropout(seed),
            decided => decided,
        };
        match dropout {
            Some(dropout) => options.dropout(dropout),
            None => options,
        }
    }

    pub(crate) fn training_dropout(&self, seed: impl FnOnce() -> Seed) -> Option<WeightDropout> {
        training_dropout(&self.dropout, seed)
    }

    /// Normalises and rotates queries or keys `[batch, heads, seq, d_k]`.
    fn place(
        &self,
        x: Tensor<4>,
        norm: &Option<HeadNorm>,
        positions: &Positions,
    ) -> Result<Tensor<4>> {
        self.place_by(rotate, x, norm, positions)
    }

    /// [`Self::place`] with a given rotation: [`rotate`] or [`rotate_apart`](crate::heads::rotate_apart).
    pub(crate) fn place_by(
        &self,
        rotate: impl FnOnce(&RotaryEncoding, Tensor<4>, &Positions, DType) -> Result<Tensor<4>>,
        x: Tensor<4>,
        norm: &Option<HeadNorm>,
        positions: &Positions,
    ) -> Result<Tensor<4>> {
        let dtype = x.dtype();
        let x = self.normed(x, norm)?;
        match &self.rope {
            Some(rope) => rotate(rope, x, positions, dtype),
            None => Ok(x.cast(dtype)),
        }
    }

    fn normed(&self, x: Tensor<4>, norm: &Option<HeadNorm>) -> Result<Tensor<4>> {
        Ok(match norm {
            Some(norm) => norm.forward(x, self.qk_norm_eps)?,
            None => x,
        })
    }

    /// Projects the heads' outputs, without the bias.
    pub(crate) fn output_product(&self, context: Tensor<4>) -> Result<Projected> {
        let x = (self.precision).merged(&self.output, context)?;
        let bias = self.output.bias.as_ref().map(Param::val);
        Ok(Projected::new(x, bias))
    }

    /// [`Self::output_product`] with auxiliary loss and choice.
    pub(crate) fn project_seen(&self, (seen, _): (Seen, Call)) -> Result<Projected> {
        Ok(Projected {
            aside: seen.aside,
            ..self.output_product(seen.heads)?
        })
    }

    /// [`Self::finish`] with auxiliary loss and choice.
    pub(crate) fn finish_seen(&self, (seen, call): (Seen, Call)) -> Result<SparseMhaOutput> {
        Ok(SparseMhaOutput {
            aux_loss: seen.aside.aux_loss,
            choice: seen.aside.choice,
            ..self.finish(seen.heads, &call)?
        })
    }

    pub(crate) fn finish(&self, context: Tensor<4>, call: &Call) -> Result<SparseMhaOutput> {
        self.padded(self.output_projection(context)?, call)
    }

    pub(crate) fn project_output(&self, joined: Tensor<3>, call: &Call) -> Result<SparseMhaOutput> {
        self.padded(self.precision.linear(&self.output, joined)?, call)
    }

    /// Casts the result of a call and sets queries that are padding to 0.
    fn padded(&self, context: Tensor<3>, call: &Call) -> Result<SparseMhaOutput> {
        let context = context.cast(call.dtype);
        Ok(SparseMhaOutput {
            aux_loss: None,
            choice: None,
            context: match &call.padding {
                Some(padding) => context.mask_fill(padding.clone(), 0.0),
                None => context,
            },
        })
    }
}

impl ModuleDisplay for SparseMultiHeadAttention {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new()
            .with_new_line_after_attribute(false)
            .optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let content = content
            .add("d_model", &self.d_model)
            .add("n_heads", &self.n_heads)
            .add("n_kv_heads", &self.n_kv_heads)
            .add("pattern", &self.pattern().to_string())
            .add("block_size", &self.block_size());
        let content = match &self.choice_sharing {
            Some(sharing) => content.add("choice_sharing", &sharing.to_string()),
            None => content,
        };
        let content = self.kind().display(content);
        content.optional()
    }
}
