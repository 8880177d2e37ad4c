//! The public attention functions: argument checks, defaults, and the conversion from tensors to the backend trait.
#[cfg(feature = "autodiff")]
pub mod autodiff;
pub mod kept;
pub mod plan;
pub mod reference;
pub mod tensors;

#[cfg(feature = "cube")]
pub mod backend;
pub mod ops;

use std::sync::Arc;

use blocksparse::{Dropout, ProductPrecision};

use crate::attention::kept::{AttentionResiduals, check_options};
use crate::attention::ops::BlockSparseOps;
use crate::attention::plan::{AttentionPlan, Chosen};
use crate::attention::tensors::AttentionTensors;
use crate::base::prelude::*;
use crate::base::values::{AttentionInputs, AttentionOutput, ScoreTensors};
use crate::call_layout::Layout;
use crate::merge::{Shares, shares};
use crate::options::{AttentionOptions, WeightsMode};
use crate::weights::BlockSparseTensor;
use crate::{check, upload};

/// Computes softmax attention over the pairs that `layout` allows: `out[i] = Σ_j p[i, j] · v[j]`, `p[i, ·] = softmax over the allowed j of scale · q[i] ·
/// k[j]`.
///
/// `layout` is a [`BlockLayout`](blocksparse::BlockLayout), built on the host, or a [`DeviceLayout`](crate::DeviceLayout), built on the device of the
/// tensors. Use [`SparseAttentionCall`] for biases, sinks, softcap, dropout, lse and weights.
///
/// The result is exact and deterministic. It is differentiable once in `q`, `k` and `v`; for second derivatives use
/// [`attention_gradients`](crate::gradients::attention_gradients). Rows with no allowed key give zeros and zero gradients.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{Pattern, sparse_attention};
///
/// let device = Device::flex();
/// let [q, k, v] = [(); 3].map(|_| Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &device));
/// let layout = Pattern::local(16).layout(2, 64, 16)?;
/// let out = sparse_attention(q, k, v, &layout)?;
/// assert_eq!(out.dims(), [1, 2, 64, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `q`: `[batch, heads, seq_q, head_dim]`
/// - `k`: `[batch, kv_heads, seq_kv, head_dim]`; `kv_heads` divides `heads`, and query head `h` uses
///   key head `h / (heads / kv_heads)` (grouped-query attention, GQA)
/// - `v`: `[batch, kv_heads, seq_kv, value_dim]`
/// - returns `[batch, heads, seq_q, value_dim]` in the inputs' dtype
///
/// # Errors
/// [`OpError`] if shapes, dtypes or devices do not fit each other or the layout, or if the device cannot run the call. [`SparseAttentionCall::explain`] returns
/// the plan of a call, and [`check_device`](crate::check_device) checks whether a device can be used at all.
pub fn sparse_attention<'a>(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    layout: impl Into<Layout<'a>>,
) -> Result<Tensor<4>, OpError> {
    Ok(SparseAttentionCall::new(q, k, v, layout).run()?.out)
}

/// A call of [`sparse_attention`] with options, additional tensors and additional outputs.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{Pattern, SparseAttentionCall};
///
/// let device = Device::flex().autodiff();
/// let q = Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &device);
/// let sinks = Tensor::<1>::zeros([2], &device).require_grad();
/// let layout = Pattern::local(16).layout(2, 64, 16)?;
/// let call = SparseAttentionCall::new(q.clone(), q.clone(), q, &layout)
///     .sinks(sinks.clone())
///     .softcap(30.0)
///     .lse();
/// println!("{}", call.explain()?);
/// let output = call.run()?;
/// assert_eq!(output.lse.unwrap().dims(), [1, 2, 64]);
/// let grads = output.out.sum().backward();
/// assert_eq!(sinks.grad(&grads).unwrap().dims(), [2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a call computes nothing until `run`"]
pub struct SparseAttentionCall<'a> {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    layout: Layout<'a>,
    tensors: AttentionTensors,
    options: AttentionOptions,
    lse: bool,
    max_scores: bool,
    weights: bool,
}

/// Results of a [`SparseAttentionCall`]: the output and the requested additional results.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SparseAttentionOutput {
    /// `[batch, heads, seq_q, value_dim]`, in the inputs' dtype.
    pub out: Tensor<4>,
    /// `[batch, heads, seq_q]`, in f32 (f64 for f64 inputs). Set if [`lse`](SparseAttentionCall::lse) was called.
    pub lse: Option<Tensor<3>>,
    /// `[batch, heads, seq_q]`, in the dtype of lse. Set if [`max_scores`](SparseAttentionCall::max_scores) was called.
    pub max_scores: Option<Tensor<3>>,
    /// In f32 (f64 for f64 inputs). Set if [`weights`](SparseAttentionCall::weights) was called.
    pub weights: Option<BlockSparseTensor>,
}

impl<'a> SparseAttentionCall<'a> {
    /// Creates a call with the arguments of [`sparse_attention`] and default options.
    pub fn new(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, layout: impl Into<Layout<'a>>) -> Self {
        Self {
            q,
            k,
            v,
            layout: layout.into(),
            tensors: AttentionTensors::default(),
            options: AttentionOptions::default(),
            lse: false,
            max_scores: false,
            weights: false,
        }
    }

    blocksparse::setters! {
        /// Sets all options at once and replaces earlier ones.
        options: AttentionOptions,
        /// Sets bias, sinks and relative bias at once and replaces earlier ones.
        tensors: AttentionTensors,
        /// Sets the factor of the scores `q · kᵀ`; default `1 / √head_dim`.
        scale => options.scale: Some(f64),
        /// Sets the softcap `c`: scores become `c · tanh(score / c)` after scaling (Gemma 2).
        softcap => options.softcap: Some(f64),
        /// Applies attention dropout after the softmax: [`AttentionOptions::dropout`].
        dropout => options.dropout: Some(Dropout),
        /// Skips tiles whose scores are far below the row maximum: [`AttentionOptions::softmax_threshold`].
        softmax_threshold => options.softmax_threshold: Some(f64),
        /// Sets the precision of matmul operands.
        precision => options.precision: ProductPrecision,
        /// Sets what is stored for the backward pass. [`weights`](Self::weights), which returns the weights, implies [`WeightsMode::Store`].
        weights_mode => options.weights: WeightsMode,
        /// Sets a bias that is added to the scores, `[batch or 1, heads or 1, seq_q or 1, seq_kv]`: [`AttentionTensors::bias`].
        bias => tensors.bias: Some(Tensor<4>),
        /// Sets biases by distance, `[heads or 1, 2 · reach + 1]`: [`AttentionTensors::relative_bias`].
        relative_bias => tensors.relative_bias: Some(Tensor<2>),
        /// Sets sink logits, `[heads]`: [`AttentionTensors::sinks`].
        ///
        /// `out = out₀ · exp(lse₀ − lse)` and `lse = ln(exp(lse₀) + exp(sinks[head]))`, where out₀ and lse₀ are the results without sinks.
        /// Rows with no allowed key give zeros, and the sink as lse.
        sinks => tensors.sinks: Some(Tensor<1>),
    }

    /// Adds ALiBi biases, one slope per head: [`AttentionOptions::alibi`].
    pub fn alibi(mut self, slopes: impl Into<Arc<[f64]>>) -> Self {
        self.options = self.options.alibi(slopes);
        self
    }

    /// Requests `lse[i] = ln Σ_j exp(score[i, j])` over the allowed keys and the sink. It is −∞ for a row with neither.
    ///
    /// Two outputs over the same queries and disjoint layouts can be merged with it: [`merge_attention`](crate::merge_attention). Like the output, lse is
    /// differentiable, and both share one backward pass.
    pub fn lse(mut self) -> Self {
        self.lse = true;
        self
    }

    /// Requests the largest score of each row over its allowed keys, after scale, softcap and biases and before sinks. It is −∞ for a row with no
    /// allowed key. No gradient flows through it.
    ///
    /// Attention logits that grow from step to step are an early sign that training will diverge. Log the maximum of each head, or act on it:
    /// QK-clip (MuonClip; Kimi K2, 2025) scales a head's query and key weights down after a step in which its largest score exceeds a threshold.
    /// FlexAttention has the same output.
    ///
    /// For disjoint layouts over the same queries, the maximum over their union is the larger of the two.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_blocksparse::{Pattern, SparseAttentionCall};
    ///
    /// let q = Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &Device::flex());
    /// let layout = Pattern::local(16).layout(2, 64, 16)?;
    /// let call = SparseAttentionCall::new(q.clone(), q.clone(), q, &layout).max_scores();
    /// let max_scores = call.run()?.max_scores.unwrap();
    /// // QK-clip: what each head's queries and keys are multiplied by, half of it each.
    /// let largest = max_scores.max_dim(2).max_dim(0).reshape([2]);
    /// let threshold = 100.0;
    /// let factors = (largest.clamp_min(threshold).recip() * threshold).sqrt();
    /// # assert_eq!(factors.into_data().to_vec::<f32>().unwrap(), [1.0, 1.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn max_scores(mut self) -> Self {
        self.max_scores = true;
        self
    }

    /// Requests the attention probabilities `p` in block-sparse form, after biases and before dropout. With sinks a row sums to less than 1. No
    /// gradient flows through them. Implies [`WeightsMode::Store`] and requires a layout built on the host.
    pub fn weights(mut self) -> Self {
        self.weights = true;
        self
    }

    /// Returns the plan of [`run`](Self::run) on this device: the tier of each pass, and why no faster tier is used. Computes nothing.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_blocksparse::{Pattern, SparseAttentionCall};
    ///
    /// let q = Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &Device::flex());
    /// let layout = Pattern::local(16).layout(2, 64, 16)?;
    /// let plan = SparseAttentionCall::new(q.clone(), q.clone(), q, &layout).explain()?;
    /// assert!(plan.to_string().contains("reference"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn explain(&self) -> Result<AttentionPlan, OpError> {
        let Self {
            q, k, v, layout, ..
        } = self;
        let options = self.all_options();
        check::call(q, k, v, *layout, &options)?;
        self.tensors.check(q, layout.sizes())?;
        let scores = self.tensors.clone().scores(q);
        Ok(AttentionPlan::choose(q, k, v, &scores, *layout, &options)?.plan)
    }

    /// Computes the attention.
    ///
    /// # Errors
    /// As [`sparse_attention`], and if options or tensors do not fit the layout or each other.
    pub fn run(self) -> Result<SparseAttentionOutput, OpError> {
        let (lse, weights, layout) = (self.lse, self.weights, self.layout);
        let (output, shares) = self.output(None)?;
        let weights = weights.then(|| {
            let values = output.weights.into_option();
            let values = values.expect("WeightsMode::Store returns the weights");
            // Weights require a host layout, so `layout.sizes()` is the layout itself.
            let weights =
                BlockSparseTensor::new(Tensor::from_dispatch(values), layout.sizes().clone());
            match shares {
                Some(shares) => weights.times_rows(shares.detach()),
                None => weights,
            }
        });
        Ok(SparseAttentionOutput {
            out: Tensor::from_dispatch(output.out),
            lse: lse.then(|| Tensor::from_dispatch(output.lse)),
            max_scores: output.max_scores.into_option().map(Tensor::from_dispatch),
            weights,
        })
    }

    /// Computes the attention and returns `out` and [`lse`](Self::lse), the inputs of [`merge_attention`](crate::merge_attention).
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_with_lse(self) -> Result<(Tensor<4>, Tensor<3>), OpError> {
        let (output, _) = self.output(None)?;
        Ok(out_and_lse(output))
    }

    /// Runs [`run_with_lse`](Self::run_with_lse) and also returns residuals from which a later call with the same arguments can skip the computation.
    ///
    /// Use it for recomputation (gradient checkpointing) around attention. The first pass, without autodiff, stores the residuals of each call. The second
    /// pass, with autodiff, uses [`run_from_residuals`](Self::run_from_residuals) and recomputes everything except attention (selective recomputation;
    /// Korthikanti et al., 2022, recompute what is cheap relative to its memory, and attention is not).
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_blocksparse::{Pattern, SparseAttentionCall};
    ///
    /// let x = Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &Device::flex());
    /// let layout = Pattern::local(16).layout(2, 64, 16)?;
    /// let call = |x: &Tensor<4>| SparseAttentionCall::new(x.clone(), x.clone(), x.clone(), &layout);
    /// let (out, _, kept) = call(&x).run_with_residuals()?;
    /// // Nothing is computed before the backward pass.
    /// let x = x.autodiff().require_grad();
    /// let (again, _) = call(&x).run_from_residuals(kept)?;
    /// assert_eq!(again.to_data(), out.into_data());
    /// let grads = again.sum().backward();
    /// assert_eq!(x.grad(&grads).unwrap().dims(), [1, 2, 64, 16]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`run`](Self::run); also if the options request stored weights or row maxima, which residuals do not contain.
    #[doc(hidden)]
    pub fn run_with_residuals(
        mut self,
    ) -> Result<(Tensor<4>, Tensor<3>, AttentionResiduals), OpError> {
        round_no_more(&mut self.options);
        check_options(&self.all_options())?;
        let (output, sinks) = self.without_sinks(None)?;
        let (out, lse) = out_and_lse(output.clone());
        let kept = AttentionResiduals::new(out, lse);
        let (out, lse) = out_and_lse(with_sinks(output, sinks).0);
        Ok((out, lse, kept))
    }

    /// Returns the results of [`run_with_lse`](Self::run_with_lse) from known ones: no attention kernel runs, the graph stores the given results, and sinks are
    /// applied to them.
    ///
    /// `kept` must come from [`run_with_residuals`](Self::run_with_residuals) of a call with the same values of all arguments, including the dropout seed. This
    /// cannot be checked. The gradients with respect to everything but `kept` are then bit-identical to those of the original call. No gradient flows into
    /// `kept`.
    ///
    /// # Errors
    /// As [`run_with_residuals`](Self::run_with_residuals); also if shapes, dtypes or devices of `kept` do not fit q and v.
    #[doc(hidden)]
    pub fn run_from_residuals(
        self,
        kept: AttentionResiduals,
    ) -> Result<(Tensor<4>, Tensor<3>), OpError> {
        let (output, _) = self.output(Some(kept))?;
        Ok(out_and_lse(output))
    }

    /// Returns the options with those that the requested outputs need.
    fn all_options(&self) -> AttentionOptions {
        let mut options = self.options.clone();
        options.max_scores |= self.max_scores;
        if self.q.device().is_autodiff() {
            round_no_more(&mut options);
        }
        if self.weights {
            options.weights = WeightsMode::Store;
        }
        options
    }

    /// Returns the backend's or the given results, with sinks applied to `out` and `lse`, and each row's softmax share of the keys if there are sinks.
    fn output(
        self,
        given: Option<AttentionResiduals>,
    ) -> Result<(AttentionOutput<Dispatch>, Option<Tensor<3>>), OpError> {
        let (output, sinks) = self.without_sinks(given)?;
        Ok(with_sinks(output, sinks))
    }

    /// Returns the backend's or the given results before sinks, and the sinks.
    fn without_sinks(
        self,
        given: Option<AttentionResiduals>,
    ) -> Result<(AttentionOutput<Dispatch>, Option<Tensor<1>>), OpError> {
        let options = self.all_options();
        let Self {
            q,
            k,
            v,
            layout,
            tensors,
            ..
        } = self;
        check::shapes(&q, &k, &v, layout.sizes())?;
        tensors.check(&q, layout.sizes())?;
        let sinks = tensors.sinks.clone();
        let scores = tensors.scores(&q);
        let output = call(q, k, v, scores, given, layout, options)?;
        Ok((output, sinks))
    }
}

/// Disables FP8: a forward pass whose gradients are needed must compute what the backward pass recomputes, from unrounded tensors.
fn round_no_more(options: &mut AttentionOptions) {
    if options.precision == ProductPrecision::Fp8 {
        options.precision = ProductPrecision::Full;
    }
}

fn out_and_lse(output: AttentionOutput<Dispatch>) -> (Tensor<4>, Tensor<3>) {
    let AttentionOutput { out, lse, .. } = output;
    (Tensor::from_dispatch(out), Tensor::from_dispatch(lse))
}

/// Applies sinks to `out` and `lse`, and returns each row's softmax share of the keys.
fn with_sinks(
    mut output: AttentionOutput<Dispatch>,
    sinks: Option<Tensor<1>>,
) -> (AttentionOutput<Dispatch>, Option<Tensor<3>>) {
    let Some(sinks) = sinks else {
        return (output, None);
    };
    let Shares { a, lse, .. } = shares_with(sinks, Tensor::from_dispatch(output.lse));
    output.out = scaled(Tensor::from_dispatch(output.out), a.clone()).into_dispatch();
    output.lse = lse.into_dispatch();
    (output, Some(a))
}

/// Returns the backend's output, or `given` in its place.
pub fn call(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: ScoreTensors<Dispatch>,
    given: Option<AttentionResiduals>,
    layout: Layout,
    options: AttentionOptions,
) -> Result<AttentionOutput<Dispatch>, OpError> {
    check::call(&q, &k, &v, layout, &options)?;
    if let Some(given) = &given {
        given.check(&q, &v, &options)?;
    }
    let Chosen { plan, packed } = AttentionPlan::choose(&q, &k, &v, &scores, layout, &options)?;
    let [batch, heads, seq_q, head_dim] = q.dims();
    let kv_heads = k.dims()[1];
    // The reference needs the blocks on the host.
    let read = match layout {
        Layout::Device(layout) if !plan.is_kernels() => Some(layout.to_host()?),
        _ => None,
    };
    let host = read.as_ref().unwrap_or(layout.sizes());
    // No copy: heads that share a key head are adjacent.
    let own = match &packed {
        Some(packed) => q.reshape([batch, kv_heads, packed.seq_q(), head_dim]),
        None => q,
    };
    let host = packed.as_ref().unwrap_or(host);
    let mut tensors = upload::layout_tensors(host, &own.device(), plan.is_kernels())?;
    tensors.plan = plan.kernels();
    if let (Layout::Device(layout), None) = (layout, &read) {
        tensors.choice = layout.chooser();
    }
    let inputs = AttentionInputs {
        q: own.into_dispatch(),
        k: k.into_dispatch(),
        v: v.into_dispatch(),
        scores,
    };
    let mut output = match given {
        None => <Dispatch as BlockSparseOps>::block_sparse_attention(inputs, tensors, options),
        Some(given) => {
            let packed = packed.as_ref().map(|packed| [kv_heads, packed.seq_q()]);
            let given = given.into_given(packed);
            <Dispatch as BlockSparseOps>::block_sparse_attention_known(
                inputs, given, tensors, options,
            )
        }
    };
    if packed.is_some() {
        let out = Tensor::<4>::from_dispatch(output.out);
        let value_dim = out.dims()[3];
        let out = out.reshape([batch, heads, seq_q, value_dim]);
        let rows = |rows| Tensor::<3>::from_dispatch(rows).reshape([batch, heads, seq_q]);
        output.out = out.into_dispatch();
        output.lse = rows(output.lse).into_dispatch();
        let max_scores = output.max_scores.into_option();
        output.max_scores = max_scores.map(|scores| rows(scores).into_dispatch()).into();
    }
    Ok(output)
}

/// Returns the shares of the keys and the sink. The sink is a further key with value 0.
pub fn shares_with(sinks: Tensor<1>, lse: Tensor<3>) -> Shares {
    let heads = sinks.dims()[0];
    let sinks = sinks.cast(lse.dtype()).reshape([1, heads, 1]);
    let sinks = sinks.expand(lse.dims());
    shares(lse, sinks)
}

/// Multiplies the rows of `out` by their shares.
pub fn scaled(out: Tensor<4>, shares: Tensor<3>) -> Tensor<4> {
    let dtype = out.dtype();
    let out = out.cast(shares.dtype()) * shares.unsqueeze_dim(3);
    out.cast(dtype)
}
