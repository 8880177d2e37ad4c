//! Training step of the indexers alone.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Int, Tensor};

use crate::block::Pass;
use crate::dsa::indexed::Indexed;
use crate::error::Result;
use crate::recompute::{StepLosses, collect};
use crate::stream::Stream;
use crate::{SparseMhaInput, SparseMultiHeadAttention, SparseTransformer};

impl SparseTransformer {
    /// Returns the losses of a step in [`DsaStage::WarmUp`](crate::dsa::DsaStage::WarmUp), and the gradients of the indexers' parameters. The model runs
    /// without a graph; each indexer has its own graph, which is freed before the next layer.
    pub(crate) fn warm_up(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
    ) -> Result<(StepLosses, GradientsParams)> {
        let plain = self.valid();
        let mut gradients = GradientsParams::new();
        let mut sum: Option<Tensor<1>> = None;
        let mut stream = Stream::new(plain.embed(tokens.without_autodiff(), 0)?);
        for (block, trained) in plain.blocks.iter().zip(&self.blocks) {
            let attend = |input: SparseMhaInput| {
                let loss = self.indexer_loss(&trained.mha, &block.mha, &input)?;
                if let Some(loss) = loss {
                    let mut grads = loss.backward();
                    collect(&trained.mha.content, &mut grads, &mut gradients);
                    let parts = [sum.take(), Some(loss.without_autodiff())];
                    sum = parts.into_iter().flatten().reduce(|sum, loss| sum + loss);
                }
                block.mha.forward_projected(input)
            };
            stream = block.residual(stream, attend, Pass::default())?;
        }
        let loss = plain.head_loss(stream, targets)?;
        Ok((StepLosses::new(&loss, sum.as_ref()), gradients))
    }

    /// Returns the loss of a layer's indexer, `None` if it has none. `plain` is the layer's copy without autodiff.
    fn indexer_loss(
        &self,
        trained: &SparseMultiHeadAttention,
        plain: &SparseMultiHeadAttention,
        input: &SparseMhaInput,
    ) -> Result<Option<Tensor<1>>> {
        if trained.dsa().is_none() && trained.msa().is_none() {
            return Ok(None);
        }
        let (call, _) = plain.prepare(input, 0)?;
        let tokens = (self.in_graph(input.query.clone()), &call.key);
        let [q, k, _] = plain.project(input.clone(), &call)?;
        let [q, k] = [q, k].map(|x| self.in_graph(x));
        let (pair, scale) = ([&q, &k], plain.options.scale);
        match (trained.dsa(), trained.msa()) {
            (Some(dsa), _) => dsa.warm_up_loss(tokens, pair, scale).map(Some),
            (None, Some(msa)) => msa.warm_up_loss(tokens, pair, scale).map(Some),
            (None, None) => Ok(None),
        }
    }
}
