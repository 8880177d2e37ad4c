//! Gradients with recomputed blocks (Child et al., 2019, §5.4 and Fig. 4).
//!
//! ```text
//! forward, no graph:   H_0 = embed(tokens);  keep H before each segment but the last
//! last segment, head:  graph of the segment and of loss = cross_entropy(logits(H_N), targets), backward  →  dH before it
//! the others, back:    graph of a segment alone, backward from its dH  →  dH before it
//! embeddings:          graph of embed(tokens), backward from dH_0
//! ```
//!
//! At any time only the residual stream between segments and the graph of one segment are in memory. Both runs of a block have the same dropout, because
//! masks are functions of a seed.
//!
//! If attention results are kept, the forward pass without a graph stores them block by block, and the second run of a block reads them instead of running
//! the first steps of its attention.

use std::ops::Range;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Gradients, Int, Tensor};
use burn_blocksparse::Seed;
use burn_blocksparse::internal::{AttentionResiduals, prepare_seed, sum_all};

use crate::block::Pass;
use crate::dsa::DsaStage;
use crate::error::{Result, ensure};
use crate::in_graph::in_graph_of;
use crate::results::{Results, Slot};
use crate::shards::ShardRows;
use crate::shared_choice::SharedChoice;
use crate::stream::Stream;
use crate::{Recompute, SparseTransformer, SparseTransformerBlock, TransformerShard};

impl SparseTransformer {
    /// Returns the loss of [`SparseTransformer::loss`] and the gradients of every parameter that requires one.
    ///
    /// `recompute` selects what the backward pass computes again instead of storing it. The gradients do not depend on it, dropout included: the masks of
    /// block `k` are a function of a hash of `dropout_seed` and `k` and of the element's position, and so are the rotations of heads that choose by hashes.
    /// The backend's random generator is not used.
    ///
    /// The commitment losses of heads that choose by clusters, and the losses of indexers, are part of the gradients but not of the returned loss.
    /// [`SparseTransformer::ema_update`] moves the means. In the warm-up of indexers ([`DsaStage::WarmUp`]) only the indexers have gradients, there is no
    /// dropout, and one block at a time is differentiated, whatever `recompute` says.
    ///
    /// # Shapes
    /// - `tokens`, `targets`: `[batch, seq]`
    /// - loss: `[1]`, without autodiff
    ///
    /// # Errors
    /// Those of [`SparseTransformer::loss`]; also if the model is not on an autodiff device.
    pub fn loss_and_gradients(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        dropout_seed: impl Into<Seed>,
        recompute: impl Into<Recompute>,
    ) -> Result<(Tensor<1>, GradientsParams)> {
        self.loss_and_gradients_of_part(tokens, targets, 0, dropout_seed, recompute)
    }

    /// [`Self::loss_and_gradients`] for a part of a batch on one of several devices: the entries from `first_entry` on. Dropout of a block's branches and the
    /// rotations of hashes equal those in the whole batch, so the mean of equal parts' losses and gradients is that of the batch up to rounding. Dropout of
    /// attention *weights* counts from entry 0 in each part.
    ///
    /// # Shapes
    /// Those of [`Self::loss_and_gradients`], with the part's entries as the batch.
    ///
    /// # Errors
    /// Those of [`Self::loss_and_gradients`].
    pub fn loss_and_gradients_of_part(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        first_entry: usize,
        dropout_seed: impl Into<Seed>,
        recompute: impl Into<Recompute>,
    ) -> Result<(Tensor<1>, GradientsParams)> {
        let (losses, gradients) =
            self.losses_and_gradients(tokens, targets, first_entry, dropout_seed, recompute)?;
        Ok((losses.loss, gradients))
    }

    /// [`Self::loss_and_gradients_of_part`] that also returns the auxiliary loss.
    ///
    /// # Errors
    /// Those of [`Self::loss_and_gradients`].
    pub fn losses_and_gradients(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        first_entry: usize,
        dropout_seed: impl Into<Seed>,
        recompute: impl Into<Recompute>,
    ) -> Result<(StepLosses, GradientsParams)> {
        let [_, seq] = tokens.dims();
        let draws = Draws {
            seed: dropout_seed.into(),
            // Rows count modulo 2³².
            first_row: first_entry.wrapping_mul(seq) as u32,
            shard: None,
        };
        self.differentiated(tokens, targets, draws, recompute.into())
    }

    /// [`Self::loss_and_gradients`] for one of several devices that share sequences: the means of all devices' losses and gradients are those of the whole
    /// sequences. All devices must call it, each with its own model and with the same `recompute`. With recomputation, keys are exchanged once more.
    ///
    /// # Shapes
    /// - `tokens`, `targets`: `[batch, seq]`, this device's columns: [`TransformerShard::tokens`]
    ///
    /// # Errors
    /// Those of [`Self::loss_and_gradients`] and [`Self::try_loss_of_shard`].
    ///
    /// # Panics
    /// If another device has left when gradients are sent back to it.
    pub fn losses_and_gradients_of_shard(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        shard: &TransformerShard,
        recompute: impl Into<Recompute>,
    ) -> Result<(StepLosses, GradientsParams)> {
        let rows = self.rows_of_shard(&tokens, shard)?;
        let draws = Draws {
            // Sharded models have no dropout.
            seed: Seed::Value(0),
            first_row: 0,
            shard: Some(&rows),
        };
        self.differentiated(tokens, targets, draws, recompute.into())
    }

    fn differentiated(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        draws: Draws,
        recompute: Recompute,
    ) -> Result<(StepLosses, GradientsParams)> {
        self.check_targets(&tokens, &targets)?;
        // Initialise parameters before anything is seeded: a parameter drawn between a seed and a mask would change the mask.
        self.visit(&mut Initialise);
        let device = self.token_embedding.weight.device();
        ensure! { device.is_autodiff() => "the model's device", "an autodiff device", format!("{device:?}"); }
        // Derive all seeds before any is prepared.
        let layers = 0..self.blocks.len() as u64;
        let seeds: Vec<Seed> = layers.map(|layer| draws.seed.derive(layer)).collect();
        if let Some(last) = seeds.last() {
            prepare_seed(*last, &device)?;
        }
        let targets = targets.without_autodiff();
        if self.dsa_stage() == Some(DsaStage::WarmUp) {
            return self.warm_up(tokens, targets);
        }
        let (blocks, keep) = match recompute {
            Recompute::None => (usize::MAX, false),
            Recompute::Mlp => return self.stored(tokens, targets, draws, true),
            Recompute::Segments(blocks) => (blocks.get(), false),
            Recompute::SegmentsSavingAttention(blocks) => (blocks.get(), true),
        };
        match blocks < self.blocks.len() {
            true => self.recomputed(tokens, targets, draws, blocks, keep),
            // One segment is one graph.
            false => self.stored(tokens, targets, draws, false),
        }
    }

    /// Differentiates the whole model as one graph; with `mlp`, without storing the first products of feed-forward networks.
    fn stored(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        draws: Draws,
        mlp: bool,
    ) -> Result<(StepLosses, GradientsParams)> {
        let mut stream = self.through_blocks(draws.embed(self, tokens)?, |layer, block| Pass {
            mlp,
            ..draws.pass(block, layer)
        })?;
        let aux_loss = stream.aside.aux_loss.take();
        let loss = draws.loss(self, stream, targets)?;
        let losses = StepLosses::new(&loss, aux_loss.as_ref());
        let gradients = GradientsParams::from_grads(with_aside(loss, aux_loss).backward(), self);
        Ok((losses, gradients))
    }

    /// Differentiates one graph per segment of blocks, from the last to the first. With `keep`, the attention of blocks that run twice is computed once.
    fn recomputed(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        draws: Draws,
        segment: usize,
        keep: bool,
    ) -> Result<(StepLosses, GradientsParams)> {
        let layers = self.blocks.len();
        let starts = (0..layers).step_by(segment);
        let mut segments: Vec<Range<usize>> = starts
            .map(|start| start..layers.min(start.saturating_add(segment)))
            .collect();
        let (mut inputs, mut kept) =
            self.residual_stream(tokens.clone(), &segments, draws, keep)?;
        let mut gradients = GradientsParams::new();
        let mut later: Option<(StepLosses, Tensor<3>)> = None;
        while let (Some(range), Some((input, choice))) = (segments.pop(), inputs.pop()) {
            let x = self.leaf(input);
            let mut stream = self.segment((x.clone(), choice), range.clone(), draws, &mut kept)?;
            let aux_loss = stream.aside.aux_loss.take();
            let (losses, mut grads) = match later {
                // The last segment ends in the loss, so its blocks run only once.
                None => {
                    let loss = draws.loss(self, stream, targets.clone())?;
                    let losses = StepLosses::new(&loss, aux_loss.as_ref());
                    let mut grads = with_aside(loss, aux_loss).backward();
                    collect(&self.norm, &mut grads, &mut gradients);
                    collect(&self.output, &mut grads, &mut gradients);
                    (losses, grads)
                }
                Some((mut losses, grad)) => {
                    losses.add(aux_loss.as_ref());
                    (losses, backward_from(stream.finish()?, grad, aux_loss))
                }
            };
            later = Some((losses, input_gradient(x, &mut grads)));
            for block in &self.blocks[range] {
                collect(block, &mut grads, &mut gradients);
            }
        }
        let (losses, grad_x) = later.expect("a model has blocks");
        let embedded = draws.embed(self, tokens)?;
        // Not tracked if the embeddings are frozen.
        if embedded.is_tracked() {
            let mut grads = backward_from(embedded, grad_x, None);
            collect(&self.token_embedding, &mut grads, &mut gradients);
            collect(&self.position_embedding, &mut grads, &mut gradients);
        }
        Ok((losses, gradients))
    }

    /// Runs some blocks with autodiff; kept attention results move into the graph.
    fn segment(
        &self,
        (x, choice): SegmentInput,
        layers: Range<usize>,
        draws: Draws,
        kept: &mut [Option<AttentionResiduals>],
    ) -> Result<Stream> {
        let mut stream = Stream::new(x);
        stream.aside.choice = choice;
        for layer in layers {
            let block = &self.blocks[layer];
            let mut pass = draws.pass(block, layer);
            pass.attention.results = kept[layer].take().into();
            stream = block.step(stream, pass)?;
        }
        Ok(stream)
    }

    /// Computes the input of every segment without a graph, with the choice that its first block takes. With `keep`, also returns the attention results of
    /// each block that ran, and `None` for the others.
    fn residual_stream(
        &self,
        tokens: Tensor<2, Int>,
        segments: &[Range<usize>],
        draws: Draws,
        keep: bool,
    ) -> Result<(Vec<SegmentInput>, Vec<Option<AttentionResiduals>>)> {
        // The copy shares the parameters' memory. `no_grad` does not suffice: autodiff registers operations on its device even when nothing is tracked, and
        // with gradient checkpointing stores their inputs.
        let plain = self.valid();
        let mut inputs = Vec::with_capacity(segments.len());
        let mut kept = vec![None; self.blocks.len()];
        let mut x = draws.embed(&plain, tokens)?;
        let mut choice: Option<SharedChoice> = None;
        for (index, segment) in segments.iter().enumerate() {
            // Dropped early if the segment's first block does not take it.
            choice = choice.filter(|_| self.blocks[segment.start].mha.takes_choice());
            inputs.push((x.clone(), choice.clone()));
            if index + 1 == segments.len() {
                break;
            }
            let mut stream = Stream::new(x);
            stream.aside.choice = choice;
            for layer in segment.clone() {
                // The pass of the training block: the copy has no dropout of its own.
                let mut pass = draws.pass(&self.blocks[layer], layer);
                let slot = Slot::default();
                if keep {
                    pass.attention.results = Results::Kept(slot.clone());
                }
                stream = plain.blocks[layer].step(stream, pass)?;
                kept[layer] = slot.take();
            }
            choice = stream.aside.choice.take();
            x = stream.finish()?;
        }
        Ok((inputs, kept))
    }

    fn leaf(&self, x: Tensor<3>) -> Tensor<3> {
        self.in_graph(x).require_grad()
    }

    /// Puts a tensor on the autodiff device, with the checkpointing strategy of the parameters.
    pub(crate) fn in_graph<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        in_graph_of(&self.token_embedding.weight.val(), x)
    }
}

/// Losses of a training step, `[1]` each, without autodiff. Gradients are those of their sum.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StepLosses {
    /// Mean cross-entropy of the targets.
    pub loss: Tensor<1>,
    /// Auxiliary loss of all layers: commitments of clusters, or losses of indexers. `None` without either.
    pub aux_loss: Option<Tensor<1>>,
}

impl StepLosses {
    pub(crate) fn new(loss: &Tensor<1>, aux_loss: Option<&Tensor<1>>) -> Self {
        let mut losses = Self {
            loss: loss.clone().without_autodiff(),
            aux_loss: None,
        };
        losses.add(aux_loss);
        losses
    }

    /// Adds the auxiliary loss of further layers.
    pub(crate) fn add(&mut self, aux_loss: Option<&Tensor<1>>) {
        let more = aux_loss.map(|aux_loss| aux_loss.clone().without_autodiff());
        let parts = [self.aux_loss.take(), more].into_iter().flatten();
        self.aux_loss = parts.reduce(|sum, more| sum + more);
    }
}

/// Seed and rows of a training step.
#[derive(Clone, Copy)]
struct Draws<'a> {
    seed: Seed,
    /// Rows of the batch before those of the call, counting all positions of all entries.
    first_row: u32,
    /// Shard of the rows; `None` for whole sequences.
    shard: Option<&'a ShardRows<'a>>,
}

/// Input of a segment: the residual stream, and the choice of an earlier block, which both runs take.
type SegmentInput = (Tensor<3>, Option<SharedChoice>);

impl Draws<'_> {
    fn pass(self, block: &SparseTransformerBlock, layer: usize) -> Pass {
        let seed = self.seed.derive(layer as u64);
        Pass {
            first_row: self.first_row,
            shard: self.shard.map(|rows| rows.of_block(layer)),
            ..block.pass_of(seed)
        }
    }

    fn embed(self, model: &SparseTransformer, tokens: Tensor<2, Int>) -> Result<Tensor<3>> {
        match self.shard {
            None => model.embed(tokens, 0),
            Some(rows) => model.embed_at(tokens, &rows.positions),
        }
    }

    fn loss(
        self,
        model: &SparseTransformer,
        stream: Stream,
        targets: Tensor<2, Int>,
    ) -> Result<Tensor<1>> {
        let loss = model.head_loss(stream, targets)?;
        Ok(match self.shard {
            None => loss,
            Some(rows) => rows.share_of(loss),
        })
    }
}

/// Runs the backward pass from `output` with a known gradient. Burn starts from ones in the shape of the differentiated tensor, so a sum is needed only if a
/// loss is added.
fn backward_from(
    output: Tensor<3>,
    grad_output: Tensor<3>,
    aux_loss: Option<Tensor<1>>,
) -> Gradients {
    match aux_loss {
        Some(aux_loss) => (sum_all(output * grad_output) + aux_loss).backward(),
        None => (output * grad_output).backward(),
    }
}

/// Adds the auxiliary loss to a loss.
fn with_aside(loss: Tensor<1>, aux_loss: Option<Tensor<1>>) -> Tensor<1> {
    match aux_loss {
        Some(aux_loss) => loss + aux_loss,
        None => loss,
    }
}

/// # Panics
/// If `x` is not a leaf of the graph, which would be a bug in this module.
fn input_gradient(x: Tensor<3>, grads: &mut Gradients) -> Tensor<3> {
    x.grad_remove(grads)
        .expect("a leaf that the output depends on has a gradient")
}

struct Initialise;

impl ModuleVisitor for Initialise {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        param.base();
    }
}

/// Moves the gradients of `module`'s parameters from `grads` to `gradients`.
pub(crate) fn collect<M: Module>(
    module: &M,
    grads: &mut Gradients,
    gradients: &mut GradientsParams,
) {
    module.visit(&mut Collect { grads, gradients });
}

struct Collect<'a> {
    grads: &'a mut Gradients,
    gradients: &'a mut GradientsParams,
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = param.base().grad_remove(self.grads) {
            self.gradients.register(param.id, grad);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Factorization, Pattern, SparseTransformerConfig};
    use burn::tensor::{Device, Distribution, TensorData};

    fn model(store_weights: bool) -> SparseTransformer {
        let factorization = Factorization::from(Pattern::fixed(8, 2));
        SparseTransformerConfig::new(16, 2, factorization)
            .with_vocab_size(7)
            .with_context(24)
            .with_n_layers(3)
            .with_embedding_width(Some(8))
            .with_block_size(8)
            .with_store_weights(store_weights)
            .init(&Device::flex().autodiff())
    }

    const DRAWS: Draws<'static> = Draws {
        seed: Seed::Value(1),
        first_row: 0,
        shard: None,
    };

    /// Returns the attention results that are kept with two segments.
    fn kept(model: &SparseTransformer, keep: bool) -> Vec<Option<AttentionResiduals>> {
        let tokens = TensorData::new((0..21).map(|i| i % 7).collect::<Vec<i32>>(), [1, 21]);
        let tokens = Tensor::from_data(tokens, &Device::flex());
        let (inputs, kept) = model
            .residual_stream(tokens, &[0..2, 2..3], DRAWS, keep)
            .unwrap();
        assert_eq!(inputs.len(), 2);
        kept
    }

    #[test]
    fn attention_of_the_blocks_that_run_twice_is_kept() {
        let counts = |model: &SparseTransformer, keep| -> Vec<bool> {
            kept(model, keep).iter().map(Option::is_some).collect()
        };
        assert_eq!(counts(&model(false), true), [true, true, false]);
        assert_eq!(counts(&model(false), false), [false; 3]);
        assert_eq!(counts(&model(true), true), [false; 3]);
        let kept = kept(&model(false), true).swap_remove(0).unwrap();
        assert_eq!(kept.out.dims(), [1, 2, 21, 8]);
        assert_eq!(kept.lse.dims(), [1, 2, 21]);
        assert!(!kept.out.is_autodiff() && !kept.lse.is_autodiff());
    }

    /// Otherwise the output would not depend on what is kept.
    #[test]
    fn blocks_take_what_is_kept() {
        let model = model(false);
        let input = Tensor::<3>::random([1, 21, 16], Distribution::Default, &Device::flex());
        let run = |mut kept: Vec<Option<AttentionResiduals>>| {
            let input = (model.leaf(input.clone()), None);
            let stream = model.segment(input, 0..2, DRAWS, &mut kept).unwrap();
            // They are in the graph and nowhere else.
            assert!(kept.iter().all(Option::is_none));
            stream.finish().unwrap().into_data()
        };
        let mut altered = kept(&model, true);
        assert_ne!(run(altered.clone()), run(vec![None; 3]));
        let first = run(altered.clone());
        let last = altered[1].as_mut().unwrap();
        last.out = last.out.clone() + 1.0;
        assert_ne!(run(altered), first);
    }
}
