//! Attention within clusters of similar tokens (Roy et al., 2021).

use std::sync::{Mutex, PoisonError};

use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Int, Tensor};
use burn_blocksparse::layout::PositionMask;
use burn_blocksparse::{
    AttentionOptions, BlockLayout, DeviceLayout, Layout, LayoutShape, Pattern, ProductPrecision,
    Seed, SparseAttentionCall,
};
use burn_sparse_select::internal::LayoutCache;

use super::clusters::Clusters;
use super::means::{commitment, followed, nearest, settled, similarities};
use super::{in_dtype, unit};
use crate::error::{Result, ensure, ensure_positive, ensure_shape, or_panics};
use crate::in_graph::in_graph_of;

const AXES: [&str; 4] = ["batch", "heads", "seq", "head_dim"];

/// Iterations of k-means from random tokens (Roy et al., 2021, and lucidrains' `routing_transformer`).
const ITERATIONS: usize = 10;

/// Configuration of [`RoutingHeads`].
#[derive(Config, Debug, PartialEq)]
#[must_use = "a configuration does nothing until `init`"]
pub struct RoutingHeadsConfig {
    /// Tokens of a cluster.
    pub window: usize,
    /// Clusters of each head. Default: the longest sequence divided by `window`, rounded up.
    pub clusters: Option<usize>,
    /// Decay of the moving averages: share of a mean that an update keeps.
    #[config(default = 0.999)]
    pub means_decay: f64,
    /// Factor of the commitment loss, the mean square of the distances of queries from their means.
    #[config(default = 1e-4)]
    pub commitment: f64,
}

impl RoutingHeadsConfig {
    /// Returns the clusters of a head, for sequences of up to `context` tokens.
    ///
    /// # Errors
    /// If a number is out of range.
    pub fn clusters(&self, context: usize) -> Result<usize> {
        ensure_positive("window", self.window)?;
        let clusters = self.clusters.unwrap_or(context.div_ceil(self.window));
        ensure_positive("clusters", clusters)?;
        let places = clusters.checked_mul(self.window);
        ensure! { places.is_some_and(|places| places <= 1 << 30) =>
        "clusters", "such that clusters · window is at most 2³⁰", clusters; }
        Ok(clusters)
    }

    pub(crate) fn validate(&self) -> Result<()> {
        // Independent of the context.
        self.clusters(1)?;
        let decay = self.means_decay;
        ensure! { (0.0..=1.0).contains(&decay) => "means_decay", "from 0 to 1", decay; }
        let factor = self.commitment;
        ensure! { factor >= 0.0 && factor.is_finite() => "commitment", "at least 0 and finite", factor; }
        Ok(())
    }

    or_panics! {
        /// Creates `heads` heads of width `head_dim`, for sequences of up to `context` tokens. Means begin in random directions; [`RoutingHeads::settle`]
        /// moves them to the tokens.
        pub fn init(&self, heads: usize, head_dim: usize, context: usize, device: &Device) -> RoutingHeads;

        /// # Errors
        /// If a number is out of range.
        pub fn try_init {
            self.validate()?;
            ensure_positive("heads", heads)?;
            ensure_positive("head_dim", head_dim)?;
            let clusters = self.clusters(context)?;
            // Standard deviation that gives means a length of about 1.
            let std = 1.0 / (head_dim as f64).sqrt();
            let normal = Initializer::Normal { mean: 0.0, std };
            let means: Param<Tensor<3>> = normal.init([heads, clusters, head_dim], device);
            Ok(RoutingHeads {
                means: means.set_require_grad(false),
                window: self.window,
                means_decay: self.means_decay,
                commitment: self.commitment,
                products: ProductPrecision::Full,
                followed: Followed::default(),
                layouts: LayoutCache::default(),
            })
        }
    }
}

/// Heads of the Routing Transformer (Roy et al., 2021, §4; after lucidrains' `routing_transformer`): each head has means, each mean attracts the `window`
/// tokens most similar to it, and tokens attend within such clusters.
///
/// ```text
/// x = unit(query);  cluster c = the `window` tokens with the largest x · means[c], ties go to the earlier, by position
/// causal:      keys are x, scores query · x / √head_dim; a token sees the earlier tokens of its cluster, and itself if it is the first
/// unshared:    x = [unit(query); unit(key)]; cluster c = `window` queries and `window` keys, which all see each other, or, if it is causal, of which a query
///              sees the keys up to its own position
/// out = the mean over the clusters that a token is in, or 0 if it is in none
/// ```
///
/// Which tokens are in a cluster depends on the whole sequence, so this is **not prefix-stable**: a language model trained with it gets slightly optimistic
/// scores, and cannot generate token by token from a cache.
///
/// Means are state, not parameters: records store them, they have no gradient, and they follow the queries of a training pass when [`Self::ema_update`] is
/// called after the optimizer's step. Passes of a module that is not on an autodiff device do not change them.
#[derive(Module, Debug)]
pub struct RoutingHeads {
    /// Means, `[heads, clusters, head_dim]`.
    pub means: Param<Tensor<3>>,
    pub(crate) window: usize,
    pub(crate) means_decay: f64,
    pub(crate) commitment: f64,
    #[module(skip)]
    pub(crate) products: ProductPrecision,
    #[module(skip)]
    followed: Followed,
    #[module(skip)]
    layouts: LayoutCache,
}

/// Output of [`RoutingHeads::forward`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RoutingOutput {
    /// Output, `[batch, heads, seq, value_dim]`.
    pub context: Tensor<4>,
    /// Commitment loss, `[1]`, to add to the loss: `commitment` times the mean square of the distances of queries (and keys, if they have their own clusters)
    /// from their nearest means. Only on an autodiff device.
    pub commitment: Option<Tensor<1>>,
}

impl RoutingHeads {
    or_panics! {
        /// Computes causal attention of queries that are also keys.
        ///
        /// # Shapes
        /// - `query`: `[batch, heads, seq, head_dim]`
        /// - `value`: `[batch, heads, seq, value_dim]`
        /// - context: `[batch, heads, seq, value_dim]`, in the dtype of `value`
        pub fn forward(&self, query: Tensor<4>, value: Tensor<4>) -> RoutingOutput;

        /// # Errors
        /// If shapes do not match each other or the means.
        pub fn try_forward {
            self.check(&query, &value)?;
            let x = unit(query.clone());
            let choice = self.choose(&x)?;
            let dtype = value.dtype();
            let heads = [
                choice.clusters.take(in_dtype(query, dtype))?,
                choice.clusters.take(in_dtype(x.clone(), dtype))?,
                choice.clusters.take(value)?,
            ];
            let out = self.attend(heads, &self.layout(&choice.clusters, true)?)?;
            self.finish(choice.clusters.mean(out)?, x, choice.nearest)
        }
    }

    or_panics! {
        /// Computes attention of queries to keys, in which every query of a cluster sees each of its keys.
        ///
        /// # Shapes
        /// - `query`: `[batch, heads, seq, head_dim]`
        /// - `key`: like `query`
        /// - `value`: `[batch, heads, seq, value_dim]`
        /// - context: `[batch, heads, seq, value_dim]`, in the dtype of `value`
        pub fn forward_unshared(&self, query: Tensor<4>, key: Tensor<4>, value: Tensor<4>) -> RoutingOutput;

        /// # Errors
        /// If shapes do not match each other or the means.
        pub fn try_forward_unshared { self.unshared([query, key, value], None) }
    }

    or_panics! {
        /// [`Self::forward_unshared`] in which a query sees only keys up to its own position. In a cluster without such keys its output is 0, which counts in
        /// its mean. The published code has a learned key and value in each cluster instead.
        ///
        /// # Shapes
        /// Those of [`Self::forward_unshared`].
        pub fn forward_unshared_causal(&self, query: Tensor<4>, key: Tensor<4>, value: Tensor<4>) -> RoutingOutput;

        pub fn try_forward_unshared_causal { self.unshared([query, key, value], Some(PositionMask::UpTo)) }
    }

    fn unshared(
        &self,
        [query, key, value]: [Tensor<4>; 3],
        rule: Option<PositionMask>,
    ) -> Result<RoutingOutput> {
        self.check(&query, &value)?;
        let expected = query.dims().map(Some);
        ensure_shape("key", key.dims(), expected, AXES)?;
        let [x, y] = [query.clone(), key].map(unit);
        let of_queries = self.choose(&x)?;
        let of_keys = self.choose(&y)?;
        let dtype = value.dtype();
        let heads = [
            of_queries.clusters.take(in_dtype(query, dtype))?,
            of_keys.clusters.take(in_dtype(y.clone(), dtype))?,
            of_keys.clusters.take(value)?,
        ];
        let layout = self.layout(&of_queries.clusters, false)?;
        let out = match rule {
            None => self.attend(heads, &layout)?,
            Some(rule) => {
                let [queries, keys] = [&of_queries, &of_keys].map(|of| of.clusters.index());
                let layout = DeviceLayout::from_positions(&layout, queries, keys, rule)?;
                self.attend(heads, &layout)?
            }
        };
        let context = of_queries.clusters.mean(out)?;
        let nearest = of_queries.nearest.zip(of_keys.nearest);
        let nearest = nearest.map(|(one, other)| Tensor::cat(vec![one, other], 2));
        self.finish(context, Tensor::cat(vec![x, y], 2), nearest)
    }

    /// Returns the tokens of each cluster, ascending: `[batch, heads, clusters, min(window, seq)]`, i32, without autodiff.
    ///
    /// # Shapes
    /// - `x`: queries or keys, `[batch, heads, seq, head_dim]`
    ///
    /// # Errors
    /// If the shape does not match the means.
    pub fn clusters(&self, x: Tensor<4>) -> Result<Tensor<4, Int>> {
        self.check(&x, &x)?;
        Ok(self.choose(&unit(x))?.clusters.tokens)
    }

    /// Initialises the means: from random tokens, drawn with `seed`, by ten iterations of k-means (Roy et al., 2021; the published code does so in its first
    /// call). Call it before training.
    ///
    /// # Shapes
    /// - `x`: queries, or concatenated queries and keys, `[batch, heads, seq, head_dim]`
    ///
    /// # Errors
    /// If the shape does not match the means, or there are fewer tokens than clusters.
    pub fn settle(&mut self, x: Tensor<4>, seed: impl Into<Seed>) -> Result<()> {
        self.check(&x, &x)?;
        let [_, clusters, _] = self.means.lazy_shape().dims();
        let x = unit(x.without_autodiff());
        let means = settled(x, clusters, ITERATIONS, seed.into())?;
        self.set_means(means);
        Ok(())
    }

    /// Updates the means with the queries of the latest training pass: `decay · mean + (1 − decay) · unit(sum of the queries nearest to it)`, over the batch.
    /// Means without nearest queries, or whose queries sum to zero, are unchanged. Call it once in each training step, after the optimizer's; it does nothing
    /// without a training pass since the last call.
    pub fn ema_update(&mut self) {
        if let Some(means) = self.followed.take() {
            self.set_means(means);
        }
    }

    pub(crate) fn set_means(&mut self, means: Tensor<3>) {
        let means = means.cast(self.means.val().dtype());
        let old = self.means.clone();
        self.means = old.map(|old| in_graph_of(&old, means).set_require_grad(false));
    }

    fn check(&self, query: &Tensor<4>, value: &Tensor<4>) -> Result<()> {
        let [heads, _, head_dim] = self.means.lazy_shape().dims();
        let expected = [None, Some(heads), None, Some(head_dim)];
        ensure_shape("query", query.dims(), expected, AXES)?;
        let [batch, _, seq, _] = query.dims();
        let expected = [Some(batch), Some(heads), Some(seq), None];
        ensure_shape("value", value.dims(), expected, AXES)
    }

    /// Returns the layout over slots, which does not depend on the tokens.
    fn layout(&self, clusters: &Clusters, causal: bool) -> Result<BlockLayout> {
        let [_, heads, count, width] = clusters.tokens.dims();
        let shape = LayoutShape::square(heads, count * width, block_size(width));
        let seen = format!("clusters of {width}, causal: {causal}");
        let make = || Ok(BlockLayout::new(&pattern(width, causal), shape)?);
        self.layouts.get(seen, shape, make)
    }

    fn attend<'a>(
        &self,
        [query, key, value]: [Tensor<4>; 3],
        layout: impl Into<Layout<'a>>,
    ) -> Result<Tensor<4>> {
        let options = AttentionOptions::default().precision(self.products);
        let call = SparseAttentionCall::new(query, key, value, layout);
        Ok(call.options(options).run()?.out)
    }

    /// Returns the clusters of unit vectors. No gradient flows through the choice.
    fn choose(&self, x: &Tensor<4>) -> Result<Choice> {
        let means = in_dtype(self.means.val().without_autodiff(), x.dtype());
        let [_, _, seq, _] = x.dims();
        let similarities = similarities(x.clone().without_autodiff(), means);
        Ok(Choice {
            nearest: x.is_autodiff().then(|| nearest(&similarities)),
            clusters: Clusters::new(similarities, self.window.min(seq))?,
        })
    }

    /// Builds the output; in training also the loss and the updated means.
    fn finish(
        &self,
        context: Tensor<4>,
        x: Tensor<4>,
        nearest: Option<Tensor<3, Int>>,
    ) -> Result<RoutingOutput> {
        let Some(nearest) = nearest else {
            return Ok(RoutingOutput {
                context,
                commitment: None,
            });
        };
        let means = in_dtype(self.means.val().without_autodiff(), x.dtype());
        let fixed = x.clone().without_autodiff();
        let moved = followed(means.clone(), fixed, nearest.clone(), self.means_decay)?;
        self.followed.put(moved);
        Ok(RoutingOutput {
            context,
            commitment: Some(commitment(x, means, nearest) * self.commitment),
        })
    }

    /// Returns the number of pairs that one head attends to in a sequence of `seq` tokens with causal attention.
    pub fn pairs(&self, seq: usize) -> u64 {
        let [_, clusters, _] = self.means.lazy_shape().dims();
        let width = self.window.min(seq) as u64;
        // Each token sees the earlier ones, and the first itself.
        clusters as u64 * (width * (width - 1) / 2 + 1)
    }
}

struct Choice {
    clusters: Clusters,
    /// Nearest mean of each token, in training: `[batch, heads, length]`.
    nearest: Option<Tensor<3, Int>>,
}

/// Updated means of the latest training pass. A copy of a module begins without.
#[derive(Debug, Default)]
struct Followed(Mutex<Option<Tensor<3>>>);

impl Clone for Followed {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Followed {
    fn put(&self, means: Tensor<3>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(means);
    }

    fn take(&self) -> Option<Tensor<3>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Returns the pattern over the slots of clusters of `width`. Slots of a cluster are in token order.
fn pattern(width: usize, causal: bool) -> Pattern {
    let own = Pattern::chunked(width);
    if !causal {
        return own;
    }
    let size = width as i64;
    let earlier = Pattern::from_pair_fn("earlier, the first itself", move |i, j| {
        j < i || (j == i && i % size == 0)
    });
    Pattern::intersection([own.and_causal(), earlier])
}

/// Returns the block size of the layout: one that divides clusters, if there is one.
pub(super) fn block_size(width: usize) -> usize {
    let fits = |size: &usize| width.is_multiple_of(*size);
    [64, 32, 16, 8].into_iter().find(fits).unwrap_or(32)
}
