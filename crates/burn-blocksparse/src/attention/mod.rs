//! The public functions: checks, defaults, and the step from tensors to the backend trait.
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

/// Softmax attention over the pairs that `layout` allows:
/// `out[i] = Σ_j p[i, j] · v[j]`, `p[i, ·] = softmax over the allowed j of scale · q[i] · k[j]`.
///
/// `layout` is a [`BlockLayout`](blocksparse::BlockLayout), built on the host, or a [`DeviceLayout`](crate::DeviceLayout), made on the device of
/// tensors. [`SparseAttentionCall`] is for everything else: biases, sinks, softcap, dropout, lse, weights.
///
/// Exact, differentiable (once; [`attention_gradients`](crate::gradients::attention_gradients) is for second derivatives) in `q`, `k` and `v`, deterministic.
/// Rows with no allowed key give zeros and zero gradients.
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
/// [`OpError`] if shapes, dtypes or devices do not fit each other or the layout, or if the
/// device cannot run the call ([`SparseAttentionCall::explain`] says what it runs, [`check_device`](crate::check_device) whether a device can be
/// used at all).
pub fn sparse_attention<'a>(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    layout: impl Into<Layout<'a>>,
) -> Result<Tensor<4>, OpError> {
    Ok(SparseAttentionCall::new(q, k, v, layout).run()?.out)
}

/// A call of [`sparse_attention`] with options, further tensors and further outputs.
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

/// Results of a [`SparseAttentionCall`]: the output, and what else was asked for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SparseAttentionOutput {
    /// `[batch, heads, seq_q, value_dim]`, in the inputs' dtype.
    pub out: Tensor<4>,
    /// `[batch, heads, seq_q]`, in f32 (f64 for f64 inputs), of a call with [`lse`](SparseAttentionCall::lse).
    pub lse: Option<Tensor<3>>,
    /// `[batch, heads, seq_q]`, in lse's dtype, of a call with [`max_scores`](SparseAttentionCall::max_scores).
    pub max_scores: Option<Tensor<3>>,
    /// In f32 (f64 for f64 inputs), of a call with [`weights`](SparseAttentionCall::weights).
    pub weights: Option<BlockSparseTensor>,
}

impl<'a> SparseAttentionCall<'a> {
    /// A call with the arguments of [`sparse_attention`], and nothing else yet.
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
        /// Sets all options at once, in place of those set so far.
        options: AttentionOptions,
        /// Sets bias, sinks and relative bias at once, in place of those set so far.
        tensors: AttentionTensors,
        /// Sets the factor of the scores `q · kᵀ`; default `1 / √head_dim`.
        scale => options.scale: Some(f64),
        /// Sets the softcap `c`: scores become `c · tanh(score / c)` after scaling (Gemma 2).
        softcap => options.softcap: Some(f64),
        /// Applies attention dropout after the softmax: [`AttentionOptions::dropout`].
        dropout => options.dropout: Some(Dropout),
        /// Skips tiles whose scores are far below the largest ones: [`AttentionOptions::softmax_threshold`].
        softmax_threshold => options.softmax_threshold: Some(f64),
        /// Sets the precision of the factors of matmuls.
        precision => options.precision: ProductPrecision,
        /// Sets what is stored for the backward pass. [`weights`](Self::weights), which returns them, implies [`WeightsMode::Store`].
        weights_mode => options.weights: WeightsMode,
        /// Sets a bias of the scores, `[batch or 1, heads or 1, seq_q or 1, seq_kv]`: [`AttentionTensors::bias`].
        bias => tensors.bias: Some(Tensor<4>),
        /// Sets biases of distances, `[heads or 1, 2 · reach + 1]`: [`AttentionTensors::relative_bias`].
        relative_bias => tensors.relative_bias: Some(Tensor<2>),
        /// Sets sink logits, `[heads]`: [`AttentionTensors::sinks`].
        ///
        /// `out = out₀ · exp(lse₀ − lse)` and `lse = ln(exp(lse₀) + exp(sinks[head]))`, where out₀ and lse₀ are those without.
        /// Rows with no allowed key give zeros, and the sink as lse.
        sinks => tensors.sinks: Some(Tensor<1>),
    }

    /// Adds ALiBi's biases, one slope for each head: [`AttentionOptions::alibi`].
    pub fn alibi(mut self, slopes: impl Into<Arc<[f64]>>) -> Self {
        self.options = self.options.alibi(slopes);
        self
    }

    /// Also returns `lse[i] = ln Σ_j exp(score[i, j])` over the allowed keys and the sink; −∞ for a row with neither.
    ///
    /// With two disjoint layouts over the same queries it merges two outputs into the attention over their union:
    /// [`merge_attention`](crate::merge_attention). It is differentiable, as the output is, and both take one backward pass.
    pub fn lse(mut self) -> Self {
        self.lse = true;
        self
    }

    /// Also returns each row's largest score: over the keys it attends to, after scale, softcap and biases and before sinks; −∞ for a row with no
    /// allowed key. No gradient flows through it.
    ///
    /// Attention logits that grow from step to step are an early sign of training that will diverge: log the largest of each head, or act on it.
    /// QK-clip (MuonClip; Kimi K2, 2025) scales a head's query and key weights down after a step in which its largest score was above a threshold.
    /// FlexAttention has the same output.
    ///
    /// Of disjoint layouts over the same queries, the largest score over their union is the larger one.
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

    /// Also returns the attention probabilities `p` in block-sparse form, after biases and before dropout; with sinks a row sums to less than 1. No
    /// gradient flows through them. Implies [`WeightsMode::Store`], and a layout that is built on the host.
    pub fn weights(mut self) -> Self {
        self.weights = true;
        self
    }

    /// Returns the plan of [`run`](Self::run) on this device: the tier of each pass, and why not a faster one. Computes nothing.
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
    /// As [`sparse_attention`], and if options or tensors do not fit the layout or the others.
    pub fn run(self) -> Result<SparseAttentionOutput, OpError> {
        let (lse, weights, layout) = (self.lse, self.weights, self.layout);
        let (output, shares) = self.output(None)?;
        let weights = weights.then(|| {
            let values = output.weights.into_option();
            let values = values.expect("WeightsMode::Store returns the weights");
            // Weights are refused for other layouts than the host's, whose sizes are the layout itself.
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

    /// Computes the attention and returns out and [`lse`](Self::lse), which [`merge_attention`](crate::merge_attention) takes.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_with_lse(self) -> Result<(Tensor<4>, Tensor<3>), OpError> {
        let (output, _) = self.output(None)?;
        Ok(out_and_lse(output))
    }

    /// [`run_with_lse`](Self::run_with_lse), and what of its results a later call with the same arguments can take in place of computing it.
    ///
    /// It is for recomputation (gradient checkpointing) around attention: a first pass without autodiff keeps this of each call, and a second pass with
    /// autodiff, by [`run_from_residuals`](Self::run_from_residuals), computes again all but the attention (selective recomputation; Korthikanti et al., 2022,
    /// choose what is cheap to compute for its memory, and here attention is what is not).
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
    /// As [`run`](Self::run); also if the options ask for stored weights or largest scores, which are not kept.
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

    /// [`run_with_lse`](Self::run_with_lse) with known results: no kernel of attention runs, the graph keeps what is given, and sinks are applied to it.
    ///
    /// `kept` must be what [`run_with_residuals`](Self::run_with_residuals) kept of a call with the same values of all arguments, dropout's seed among them; which
    /// values they are cannot be checked. The gradients, of all but `kept`, are then those of the call itself, to the bit; no gradient flows into `kept`.
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

    /// The options, with what the outputs need.
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

    /// What the backend returns or what is given of it, with sinks in out and lse, and what the keys have of each row's softmax with sinks.
    fn output(
        self,
        given: Option<AttentionResiduals>,
    ) -> Result<(AttentionOutput<Dispatch>, Option<Tensor<3>>), OpError> {
        let (output, sinks) = self.without_sinks(given)?;
        Ok(with_sinks(output, sinks))
    }

    /// What the backend returns or what is given of it, and the sinks.
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

/// The forward pass that gradients are of computes what the backward pass computes again, of tensors as they are.
fn round_no_more(options: &mut AttentionOptions) {
    if options.precision == ProductPrecision::Fp8 {
        options.precision = ProductPrecision::Full;
    }
}

fn out_and_lse(output: AttentionOutput<Dispatch>) -> (Tensor<4>, Tensor<3>) {
    let AttentionOutput { out, lse, .. } = output;
    (Tensor::from_dispatch(out), Tensor::from_dispatch(lse))
}

/// Out and lse with sinks in them, and then what the keys have of each row's softmax.
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

/// The output, or what is given of it in its place.
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
    // The reference computes what the host knows.
    let read = match layout {
        Layout::Device(layout) if !plan.is_kernels() => Some(layout.to_host()?),
        _ => None,
    };
    let host = read.as_ref().unwrap_or(layout.sizes());
    // The same memory: heads that share a key head are neighbours.
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

/// The sink is one more part of the keys, whose output is 0.
pub fn shares_with(sinks: Tensor<1>, lse: Tensor<3>) -> Shares {
    let heads = sinks.dims()[0];
    let sinks = sinks.cast(lse.dtype()).reshape([1, heads, 1]);
    let sinks = sinks.expand(lse.dims());
    shares(lse, sinks)
}

/// The rows of `out` times their shares.
pub fn scaled(out: Tensor<4>, shares: Tensor<3>) -> Tensor<4> {
    let dtype = out.dtype();
    let out = out.cast(shares.dtype()) * shares.unsqueeze_dim(3);
    out.cast(dtype)
}
