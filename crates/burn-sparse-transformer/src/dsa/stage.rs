//! How far the training of models with indexers is.

use crate::error::{Result, ensure};
use crate::{SparseMultiHeadAttention, SparseTransformer};

/// Training stage of layers with indexers (`dsa`, `msa`): what they attend to, and what learns. The paper trains a model with dense attention, then its indexers alone for 1,000
/// steps, and then both (DeepSeek-V3.2-Exp, 2025, §2). No parameter belongs to a stage, and records do not hold it: models begin in [`Self::Sparse`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DsaStage {
    /// Tokens attend to all that their pattern keeps, and indexers do nothing.
    Dense,
    /// Tokens attend as in [`Self::Dense`]; indexers learn to score keys as that attention does, and nothing else learns.
    WarmUp,
    /// Tokens attend to the keys that indexers choose, and indexers learn beside the model, each by its own loss.
    #[default]
    Sparse,
}

/// That there is something to put in a stage.
fn check(stage: DsaStage, found: bool, of: &str) -> Result<()> {
    ensure! { found => "dsa_stage", format!("of a {of} of dsa or msa"), format!("{stage:?} of one without"); }
    Ok(())
}

impl SparseMultiHeadAttention {
    /// The layer in another stage.
    ///
    /// # Errors
    /// [`TransformerError::Argument`](crate::TransformerError::Argument) if it is not one of `dsa` or `msa`.
    pub fn with_dsa_stage(mut self, stage: DsaStage) -> Result<Self> {
        check(stage, self.set_dsa_stage(stage), "layer")?;
        Ok(self)
    }

    /// Returns whether there is an indexer.
    fn set_dsa_stage(&mut self, stage: DsaStage) -> bool {
        let content = self.content.as_mut();
        content.is_some_and(|content| content.set_stage(stage))
    }
}

impl SparseTransformer {
    /// The model in another stage.
    ///
    /// # Errors
    /// [`TransformerError::Argument`](crate::TransformerError::Argument) if it has no layers of `dsa` or `msa`.
    pub fn with_dsa_stage(mut self, stage: DsaStage) -> Result<Self> {
        let blocks = self.blocks.iter_mut();
        let found = blocks.filter_map(|block| block.mha.set_dsa_stage(stage).then_some(()));
        check(stage, found.count() > 0, "model with layers")?;
        Ok(self)
    }

    /// The stage, of a model with layers of `dsa` or `msa`.
    pub fn dsa_stage(&self) -> Option<DsaStage> {
        let mut layers = self.blocks.iter().map(|block| &block.mha);
        layers.find_map(|mha| mha.content.as_ref()?.stage())
    }
}
