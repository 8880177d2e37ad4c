//! Gradients with recomputed blocks (Child et al., 2019, §5.4 and Fig. 4).
//!
//! ```text
//! forward, no graph:   H_0 = embed(tokens);  keep H_{k−1};  H_k = block_k(H_{k−1})
//! head, with graph:    loss = cross_entropy(logits(H_N), targets)  →  dH_N
//! k = N … 1:           graph of block_k(H_{k−1}) alone, backward from dH_k  →  dH_{k−1}
//! embeddings:          graph of embed(tokens), backward from dH_0
//! ```
//!
//! At any time only the residual stream between blocks and the graph of one block are in memory. Both
//! runs of a block draw the same dropout masks, because the device is seeded before each; the masks of
//! attention weights are a function of the same seed.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::Dropout;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Gradients, Int, Tensor};
use burn_blocksparse::Dropout as WeightDropout;

use crate::dropout::hash;
use crate::error::ensure;
use crate::loss::cross_entropy;
use crate::{SparseTransformer, SparseTransformerBlock, TransformerError};

/// Positions for each entry of the vocabulary from which on an embedding's gradient is a product.
const POSITIONS_PER_TOKEN: usize = 16;

impl SparseTransformer {
    /// The loss of [`SparseTransformer::loss`] and the gradients of every parameter that requires one.
    ///
    /// With `recompute` every block runs a second time in the backward pass and only the residual stream
    /// between blocks is stored, `batch · seq · d_model` numbers per block. The gradients are the same with
    /// and without, dropout included: block `k` draws its masks after the device was seeded with a hash
    /// of `dropout_seed` and `k`, and the same hash is the seed of its attention's dropout. That reseeds
    /// the backend's generator, which all threads share; a model without dropout of its residual
    /// branches leaves it alone.
    ///
    /// # Shapes
    /// - `tokens`, `targets`: `[batch, seq]`
    /// - loss: `[1]`, without autodiff
    ///
    /// # Errors
    /// As [`SparseTransformer::loss`]; also if the model is not on an autodiff device.
    pub fn loss_and_gradients(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        dropout_seed: u64,
        recompute: bool,
    ) -> Result<(Tensor<1>, GradientsParams), TransformerError> {
        self.check_targets(&tokens, &targets)?;
        // Before anything is seeded: a parameter drawn between a seed and a mask would change the mask.
        self.visit(&mut Initialise);
        let device = self.token_embedding.weight.device();
        ensure(
            device.is_autodiff(),
            "the model's device",
            || "an autodiff device".into(),
            format!("{device:?}"),
        )?;
        let masks = DropoutMasks::new(self, device, dropout_seed);
        let targets = targets.without_autodiff();
        match recompute {
            true => self.recomputed(tokens, targets, &masks),
            false => self.stored(tokens, targets, &masks),
        }
    }

    /// One graph of the whole model.
    fn stored(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        masks: &DropoutMasks,
    ) -> Result<(Tensor<1>, GradientsParams), TransformerError> {
        let embedded = self.leaf(self.embed(tokens.clone(), 0)?.without_autodiff());
        let mut x = embedded.clone();
        for (layer, block) in self.blocks.iter().enumerate() {
            x = masks.forward(layer, block, x)?;
        }
        let loss = cross_entropy(self.logits(x), targets);
        let mut grads = loss.backward();
        let grad_embedded = input_gradient(&embedded, &mut grads);
        let mut gradients = GradientsParams::from_grads(grads, self);
        self.embedding_gradients(tokens, grad_embedded, &mut gradients)?;
        Ok((loss.without_autodiff(), gradients))
    }

    /// One graph per block, from the last to the first.
    fn recomputed(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        masks: &DropoutMasks,
    ) -> Result<(Tensor<1>, GradientsParams), TransformerError> {
        let (mut inputs, last) = self.residual_stream(tokens.clone(), masks)?;
        let mut gradients = GradientsParams::new();

        let x = self.leaf(last);
        let loss = cross_entropy(self.logits(x.clone()), targets);
        let mut grads = loss.backward();
        let mut grad_x = input_gradient(&x, &mut grads);
        collect(&self.norm, &mut grads, &mut gradients);
        collect(&self.output, &mut grads, &mut gradients);

        for (layer, block) in self.blocks.iter().enumerate().rev() {
            let Some(input) = inputs.pop() else { break };
            let x = self.leaf(input);
            let mut grads = backward_from(masks.forward(layer, block, x.clone())?, grad_x);
            grad_x = input_gradient(&x, &mut grads);
            collect(block, &mut grads, &mut gradients);
        }

        self.embedding_gradients(tokens, grad_x, &mut gradients)?;
        Ok((loss.without_autodiff(), gradients))
    }

    /// Gradients of the embeddings from that of `H_0`.
    ///
    /// The gradient of a lookup is a scatter, which backends make row by row of the table: with few tokens
    /// and many positions a GPU is idle. There it is a product with one-hot rows.
    fn embedding_gradients(
        &self,
        tokens: Tensor<2, Int>,
        grad: Tensor<3>,
        gradients: &mut GradientsParams,
    ) -> Result<(), TransformerError> {
        let [batch, seq, d_model] = grad.dims();
        let table = &self.token_embedding.weight;
        let [vocab, _] = table.dims();
        let positions = batch * seq;
        let as_product = positions >= POSITIONS_PER_TOKEN * vocab && table.is_require_grad();
        let embedded = match as_product {
            true => (self.position_embedding.as_ref()).map(|positions| positions.forward(0, seq)),
            false => Some(self.embed(tokens.clone(), 0)?),
        };
        // Not tracked if the embeddings are frozen.
        if let Some(embedded) = embedded.filter(|embedded| embedded.is_tracked()) {
            let grad = match as_product {
                true => grad.clone().sum_dim(0),
                false => grad.clone(),
            };
            let mut grads = backward_from(embedded, grad);
            collect(&self.token_embedding, &mut grads, gradients);
            collect(&self.position_embedding, &mut grads, gradients);
        }
        if as_product {
            let device = grad.device();
            let tokens = tokens.without_autodiff().reshape([1, positions]);
            let ids = Tensor::<1, Int>::arange(0..vocab as i64, &device).reshape([vocab, 1]);
            let one_hot = ids.cast(tokens.dtype()).equal(tokens).float();
            let grad = self.precision.round(grad.reshape([positions, d_model]));
            let grad = one_hot.cast(grad.dtype()).matmul(grad);
            gradients.register(table.id, grad.cast(table.val().dtype()));
        }
        Ok(())
    }

    /// The input of every block and the output of the last one, computed without a graph.
    fn residual_stream(
        &self,
        tokens: Tensor<2, Int>,
        masks: &DropoutMasks,
    ) -> Result<(Vec<Tensor<3>>, Tensor<3>), TransformerError> {
        // Shares the parameters' memory. `no_grad` would not do: autodiff registers operations on its
        // device even when nothing is tracked, and with gradient checkpointing keeps their inputs.
        let plain = self.valid();
        let mut inputs = Vec::with_capacity(self.blocks.len());
        let mut x = plain.embed(tokens, 0)?;
        for (layer, (block, plain)) in self.blocks.iter().zip(&plain.blocks).enumerate() {
            inputs.push(x.clone());
            let weights = masks.draw(layer, block);
            x = plain.forward_with(x, weights, |branch| drop_plain(&block.dropout, branch))?;
        }
        Ok((inputs, x))
    }

    /// A leaf of a new graph, with the checkpointing strategy of the parameters it will meet.
    fn leaf(&self, x: Tensor<3>) -> Tensor<3> {
        let x = x.autodiff();
        let strategy = self
            .token_embedding
            .weight
            .gradient_checkpointing_strategy();
        match strategy {
            Some(strategy) => x.with_gradient_checkpointing_strategy(strategy),
            None => x,
        }
        .require_grad()
    }
}

/// Training's dropout on a tensor without autodiff: burn's own, so that it draws the same mask.
fn drop_plain(dropout: &Dropout, x: Tensor<3>) -> Tensor<3> {
    dropout.forward(x.autodiff()).without_autodiff()
}

/// Backward from `output` when its gradient is already known. Burn starts from ones in the shape of the
/// tensor that it is asked about, so a sum would only add a pass.
fn backward_from(output: Tensor<3>, grad_output: Tensor<3>) -> Gradients {
    (output * grad_output).backward()
}

/// # Panics
/// If `x` is no leaf of the graph, which would be a defect of this module.
fn input_gradient(x: &Tensor<3>, grads: &mut Gradients) -> Tensor<3> {
    x.grad_remove(grads)
        .expect("a leaf that the output depends on has a gradient")
}

/// Where the dropout masks of each block come from.
struct DropoutMasks {
    device: Device,
    seed: u64,
    /// Whether a block drops something of a residual branch, for which the backend draws masks.
    draws: bool,
}

impl DropoutMasks {
    fn new(model: &SparseTransformer, device: Device, seed: u64) -> Self {
        let draws = model.blocks.iter().any(|block| block.dropout.prob > 0.0);
        Self {
            device,
            seed,
            draws,
        }
    }

    /// The next masks drawn are those of `block`, number `layer`; returns the dropout of its attention weights.
    fn draw(&self, layer: usize, block: &SparseTransformerBlock) -> Option<WeightDropout> {
        let seed = hash(self.seed, layer as u64);
        if self.draws {
            self.device.seed(seed);
        }
        block.mha.training_dropout(|| seed)
    }

    /// `block`, number `layer`, with its masks.
    fn forward(
        &self,
        layer: usize,
        block: &SparseTransformerBlock,
        x: Tensor<3>,
    ) -> Result<Tensor<3>, TransformerError> {
        let weights = self.draw(layer, block);
        block.forward_with(x, weights, |branch| block.dropout.forward(branch))
    }
}

/// Forces lazy parameters.
struct Initialise;

impl ModuleVisitor for Initialise {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        param.base();
    }
}

/// Moves the gradients of `module`'s parameters from `grads` to `gradients`.
fn collect<M: Module>(module: &M, grads: &mut Gradients, gradients: &mut GradientsParams) {
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
    use std::collections::HashSet;

    #[test]
    fn neighbouring_seeds_and_layers_hash_apart() {
        let hashes: HashSet<u64> = (0..64)
            .flat_map(|seed| (0..64).map(move |layer| hash(seed, layer)))
            .collect();
        assert_eq!(hashes.len(), 64 * 64);
    }
}
