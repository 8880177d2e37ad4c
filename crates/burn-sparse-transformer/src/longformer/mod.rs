//! Longformer: attention with a window, and global tokens with their own projections; and its encoder.

mod encoder;

pub use encoder::{
    LongformerEncoder, LongformerEncoderConfig, LongformerEncoderInput, LongformerLayer,
};

use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{Bool, Device, IndexingUpdateOp, Int, Tensor, TensorData};
use burn_blocksparse::graph::ensure_not_capturing;
use burn_blocksparse::layout::PaddingMask;
use burn_blocksparse::{Pattern, SparseAttentionCall};
use burn_fused_ops::join_heads;

use crate::call::Call;
use crate::error::{Result, ensure, ensure_none, or_panics};
use crate::input::Padding;
use crate::layouts::{Layouts, Request};
use crate::precision::project_heads;
use crate::{
    SparseMhaInput, SparseMhaOutput, SparseMultiHeadAttention, SparseMultiHeadAttentionConfig,
};

/// Configuration of [`LongformerAttention`].
#[derive(Config, Debug)]
#[must_use = "a configuration does nothing until `init`"]
pub struct LongformerAttentionConfig {
    /// Attention of ordinary tokens. Its pattern excludes the global tokens: `Pattern::window(256)`, or [`Pattern::dilated_window`]s per head. `selection`,
    /// `rope`, `qk_norm`, `dropout`, `alibi`, `relative_reach`, `sinks` and `quiet_softmax` must be unset.
    pub attention: SparseMultiHeadAttentionConfig,
}

impl LongformerAttentionConfig {
    or_panics! {
        /// Creates the module. The projections of global tokens are initialised as copies of the others (Beltagy et al., 2020, §3.1).
        pub fn init(&self, device: &Device) -> LongformerAttention;

        /// # Errors
        /// Those of [`SparseMultiHeadAttentionConfig::init`]; also if one of these is set.
        pub fn try_init { LongformerAttention::from_attention(self.attention.try_init(device)?) }
    }
}

/// Longformer's attention, with separate projections for global tokens (Beltagy et al., 2020, §3.1):
///
/// ```text
/// i not global:  softmax over { j : pattern(i, j) ∨ j global } of query(x_i) · key(x_j), of value(x_j)
/// i global:      softmax over all j of query_global(x_i) · key_global(x_j), of value_global(x_j)
/// ```
///
/// Both share the output projection. Each input states which tokens are global, which may differ per batch entry. There are two attention calls: ordinary
/// rows over the pattern and the global columns, and the few global rows over everything.
///
/// Create it with [`LongformerAttentionConfig`].
#[derive(Module, Debug)]
pub struct LongformerAttention {
    /// Attention of ordinary tokens; its output projection is shared.
    pub mha: SparseMultiHeadAttention,
    /// Query projection of global tokens, of the shape of `mha.query`.
    pub query_global: Linear,
    /// Projection of the keys that global tokens see, of the shape of `mha.key`.
    pub key_global: Linear,
    /// Projection of the values that global tokens see, of the shape of `mha.value`.
    pub value_global: Linear,
    #[module(skip)]
    everything: Layouts,
}

/// Input of [`LongformerAttention`].
#[derive(Clone, Debug)]
#[must_use = "an input does nothing until it is passed to a layer"]
pub struct LongformerInput {
    tensor: Tensor<3>,
    global: Global,
    padding: Option<Padding>,
}

#[derive(Clone, Debug)]
enum Global {
    Shared(Vec<usize>),
    PerEntry(Vec<Vec<usize>>),
}

impl LongformerInput {
    /// # Shapes
    /// - `tensor`: `[batch, seq, d_model]`
    pub fn new(tensor: Tensor<3>) -> Self {
        Self {
            tensor,
            global: Global::Shared(Vec::new()),
            padding: None,
        }
    }

    /// Sets the positions of the global tokens, the same in every batch entry.
    pub fn global(mut self, tokens: impl IntoIterator<Item = usize>) -> Self {
        self.global = Global::Shared(tokens.into_iter().collect());
        self
    }

    /// Sets the positions of the global tokens of each batch entry.
    pub fn global_per_entry(mut self, tokens: impl IntoIterator<Item = Vec<usize>>) -> Self {
        self.global = Global::PerEntry(tokens.into_iter().collect());
        self
    }

    /// Sets which positions are padding: see [`SparseMhaInput::mask_pad`]. A global token at a padded position is ignored.
    ///
    /// # Shapes
    /// - `mask`: `[batch, seq]`, `true` = padding
    pub fn mask_pad(mut self, mask: Tensor<2, Bool>) -> Self {
        self.padding = Some(Padding::Mask(Box::new(mask)));
        self
    }

    /// Sets padding at the end: batch entry `b` has `lengths[b]` real positions; all later ones are padding.
    pub fn lengths(mut self, lengths: impl IntoIterator<Item = usize>) -> Self {
        self.padding = Some(Padding::Lengths(lengths.into_iter().collect()));
        self
    }

    pub(crate) fn tensor(&self) -> &Tensor<3> {
        &self.tensor
    }

    /// Returns the global tokens of each batch entry, ascending.
    fn tokens(&self, batch: usize, seq: usize) -> Result<Vec<Vec<usize>>> {
        let mut entries = match &self.global {
            Global::Shared(tokens) => vec![tokens.clone(); batch],
            Global::PerEntry(entries) => entries.clone(),
        };
        ensure! { entries.len() == batch => "global", format!("of {batch} batch entries"), entries.len(); }
        for tokens in &mut entries {
            tokens.sort_unstable();
            tokens.dedup();
            let last = tokens.last().copied().unwrap_or(0);
            ensure! { last < seq => "global", format!("below {seq}, the number of positions"), last; }
        }
        Ok(entries)
    }
}

impl LongformerAttention {
    /// Adds projections of global tokens to a trained attention, as copies of its own.
    ///
    /// # Errors
    /// If the attention has a `selection`, `head_selections`, `content`, `rope`, `qk_norm`, `dropout`, `alibi`, relative position biases, sinks or
    /// `quiet_softmax`.
    pub fn from_attention(mha: SparseMultiHeadAttention) -> Result<Self> {
        // Global tokens are gathered queries, at other rows than their positions, which these options depend on.
        for (argument, given) in [
            ("selection", mha.selection().is_some()),
            ("head_selections", mha.head_selections().is_some()),
            ("content", mha.content.is_some()),
            ("rope", mha.rope.is_some()),
            ("qk_norm", mha.query_norm.is_some()),
            ("dropout", mha.dropout.prob > 0.0),
            ("alibi", mha.options.alibi.is_some()),
            ("relative_bias", mha.relative_bias.is_some()),
            ("sinks", mha.sinks.is_some()),
            ("quiet_softmax", mha.quiet_softmax),
        ] {
            ensure_none(argument, given, "none in LongformerAttention")?;
        }
        Ok(Self {
            query_global: copy(&mha.query),
            key_global: copy(&mha.key),
            value_global: copy(&mha.value),
            everything: Layouts::new(Pattern::dense(), mha.n_heads(), mha.block_size())?,
            mha,
        })
    }

    or_panics! {
        /// Computes attention of ordinary tokens to what the pattern allows and to the global tokens, and of global tokens to everything.
        ///
        /// # Shapes
        /// - input: `[batch, seq, d_model]`
        /// - `context`: `[batch, seq, d_model]`, 0 where padded
        ///
        /// ```
        /// use burn::tensor::{Device, Distribution, Tensor};
        /// use burn_sparse_transformer::{Pattern, SparseMultiHeadAttentionConfig};
        /// use burn_sparse_transformer::longformer::{LongformerAttentionConfig, LongformerInput};
        ///
        /// let device = Device::flex();
        /// let attention = SparseMultiHeadAttentionConfig::new(64, 4, Pattern::window(32));
        /// let longformer = LongformerAttentionConfig::new(attention).init(&device);
        /// let x = Tensor::<3>::random([2, 200, 64], Distribution::Default, &device);
        /// // The first sequence has a question of ten tokens, the second one a single token for its class.
        /// let input = LongformerInput::new(x).global_per_entry([(0..10).collect(), vec![0]]);
        /// assert_eq!(longformer.forward(input).context.dims(), [2, 200, 64]);
        /// ```
        pub fn forward(&self, input: LongformerInput) -> SparseMhaOutput;

        /// # Errors
        /// If the shape does not match, there is no layout for `seq`, or a global token or the padding is outside of the input.
        pub fn try_forward {
            self.mha.check_input("tensor", &input.tensor)?;
            let [batch, seq, _] = input.tensor.dims();
            let tokens = input.tokens(batch, seq)?;
            let x = input.tensor;
            let mut ordinary = SparseMhaInput::self_attn(x.clone());
            ordinary.padding = input.padding;
            let padded = ordinary.padding(batch, seq, seq)?;
            let rows = GlobalRows::new(&tokens, &padded, seq);
            let call = Call::new(&ordinary, &padded)?;

            let mut request = Request::new(seq, seq);
            request.restrictions = padded;
            (request.restrictions).resize_with(batch, PaddingMask::default);
            for (entry, tokens) in request.restrictions.iter_mut().zip(&tokens) {
                let queries = entry.queries.get_or_insert_with(|| vec![true; seq]);
                tokens.iter().for_each(|&token| queries[token] = false);
            }
            request.global = tokens;
            let layout = self.mha.layouts.get(&request)?;
            let heads = self.mha.project(ordinary, &call)?;
            let context = self.mha.attend(heads, &layout, &call)?;
            let mut joined = join_heads(context)?;
            if rows.width > 0 {
                let global = self.global_rows(x, &rows)?;
                joined = rows.write(joined, global)?;
            }
            self.mha.project_output(joined, &call)
        }
    }

    /// Computes the attention of the global tokens, `[batch, width, d_model]`; rows beyond an entry's tokens are 0.
    fn global_rows(&self, x: Tensor<3>, rows: &GlobalRows) -> Result<Tensor<3>> {
        let [_, seq, _] = x.dims();
        let mut request = Request::new(rows.width, seq);
        request.restrictions = rows.restrictions.clone();
        let layout = self.everything.get(&request)?;
        let mha = &self.mha;
        let (heads, kv_heads) = (mha.n_heads(), mha.n_kv_heads());
        let read = rows.read(x.clone())?;
        let [q] = project_heads(mha.precision, [&self.query_global], read, [heads])?;
        let layers = [&self.key_global, &self.value_global];
        let [k, v] = project_heads(mha.precision, layers, x, [kv_heads; 2])?;
        let context = SparseAttentionCall::new(q, k, v, &layout)
            .options(mha.options.clone())
            .run()?
            .out;
        Ok(join_heads(context)?)
    }
}

/// Gathered rows of the global tokens.
struct GlobalRows {
    /// Largest number of global tokens of a batch entry.
    width: usize,
    /// Rows of `[batch · seq, d_model]` to read, `[batch · width]`; arbitrary where an entry has fewer tokens.
    from: Vec<i64>,
    /// Rows of `[batch · width, d_model]` to write, and their destinations in `to`.
    written: Vec<i64>,
    to: Vec<i64>,
    /// Existing queries, and keys that are not padding.
    restrictions: Vec<PaddingMask>,
}

impl GlobalRows {
    fn new(tokens: &[Vec<usize>], padded: &[PaddingMask], seq: usize) -> Self {
        let width = tokens.iter().map(Vec::len).max().unwrap_or(0);
        let mut rows = Self {
            width,
            from: Vec::new(),
            written: Vec::new(),
            to: Vec::new(),
            restrictions: Vec::new(),
        };
        for (batch, tokens) in tokens.iter().enumerate() {
            let keys = padded.get(batch).and_then(|entry| entry.keys.clone());
            let kept = |token: usize| keys.as_ref().is_none_or(|keys| keys[token]);
            let mut queries = vec![false; width];
            for (place, query) in queries.iter_mut().enumerate() {
                let token = tokens.get(place).copied().unwrap_or(0);
                let row = (batch * seq + token) as i64;
                rows.from.push(row);
                *query = place < tokens.len() && kept(token);
                if *query {
                    rows.written.push((batch * width + place) as i64);
                    rows.to.push(row);
                }
            }
            let mut entry = PaddingMask::default().queries(queries);
            entry.keys = keys;
            rows.restrictions.push(entry);
        }
        rows
    }

    /// Gathers `[batch, seq, d_model]` to `[batch, width, d_model]`.
    fn read(&self, x: Tensor<3>) -> Result<Tensor<3>> {
        let [batch, seq, d_model] = x.dims();
        let device = x.device();
        Ok(x.reshape([batch * seq, d_model])
            .select(0, indices(&self.from, &device)?)
            .reshape([batch, self.width, d_model]))
    }

    /// Scatters `[batch, width, d_model]` to their rows of `[batch, seq, d_model]`, which are 0. No row is written twice.
    fn write(&self, x: Tensor<3>, rows: Tensor<3>) -> Result<Tensor<3>> {
        if self.to.is_empty() {
            return Ok(x);
        }
        let [batch, seq, d_model] = x.dims();
        let device = x.device();
        let rows = rows
            .reshape([batch * self.width, d_model])
            .select(0, indices(&self.written, &device)?);
        let to = indices(&self.to, &device)?;
        let sum = x
            .reshape([batch * seq, d_model])
            .select_assign(0, to, rows, IndexingUpdateOp::Add)
            .reshape([batch, seq, d_model]);
        Ok(sum)
    }
}

fn indices(list: &[i64], device: &Device) -> Result<Tensor<1, Int>> {
    ensure_not_capturing("positions of global tokens")?;
    let device = device.clone().without_autodiff();
    let list = TensorData::new(list.to_vec(), [list.len()]);
    Ok(Tensor::from_data(list, &device))
}

/// Copies the values to new parameters.
fn copy(linear: &Linear) -> Linear {
    Linear {
        weight: Param::from_tensor(linear.weight.val().detach()),
        bias: (linear.bias.as_ref()).map(|bias| Param::from_tensor(bias.val().detach())),
    }
}
