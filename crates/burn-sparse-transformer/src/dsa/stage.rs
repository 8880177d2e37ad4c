//! Training stages of models with indexers.

use crate::error::{Result, ensure};
use crate::{SparseMultiHeadAttention, SparseTransformer};

/// Training stage of layers with indexers (`dsa`, `msa`): what they attend to, and what learns. The paper trains a model with dense attention, then its
/// indexers alone for 1,000 steps, and then both (DeepSeek-V3.2-Exp, 2025, §2). A stage has no parameters, and records do not store it: models begin in
/// [`Self::Sparse`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DsaStage {
    /// Tokens attend to all keys of their pattern; indexers are unused.
    Dense,
    /// Tokens attend as in [`Self::Dense`]; only the indexers learn, to score keys as that attention does.
    WarmUp,
    /// Tokens attend to the keys that indexers choose. Model and indexers learn, each indexer by its own loss.
    #[default]
    Sparse,
}

/// Checks that there is an indexer.
fn check(stage: DsaStage, found: bool, of: &str) -> Result<()> {
    ensure! { found => "dsa_stage", format!("of a {of} of dsa or msa"), format!("{stage:?} of one without"); }
    Ok(())
}

impl SparseMultiHeadAttention {
    /// Returns the layer in another stage.
    ///
    /// # Errors
    /// [`TransformerError::Argument`](crate::TransformerError::Argument) if it is not a layer of `dsa` or `msa`.
    pub fn with_dsa_stage(mut self, stage: DsaStage) -> Result<Self> {
        check(stage, self.set_dsa_stage(stage), "layer")?;
        Ok(self)
    }

    /// Sets the stage and returns whether there is an indexer.
    fn set_dsa_stage(&mut self, stage: DsaStage) -> bool {
        let content = self.content.as_mut();
        content.is_some_and(|content| content.set_stage(stage))
    }
}

impl SparseTransformer {
    /// Returns the model in another stage.
    ///
    /// # Errors
    /// [`TransformerError::Argument`](crate::TransformerError::Argument) if it has no layers of `dsa` or `msa`.
    pub fn with_dsa_stage(mut self, stage: DsaStage) -> Result<Self> {
        let blocks = self.blocks.iter_mut();
        let found = blocks.filter_map(|block| block.mha.set_dsa_stage(stage).then_some(()));
        check(stage, found.count() > 0, "model with layers")?;
        Ok(self)
    }

    /// Returns the stage of a model with layers of `dsa` or `msa`.
    pub fn dsa_stage(&self) -> Option<DsaStage> {
        let mut layers = self.blocks.iter().map(|block| &block.mha);
        layers.find_map(|mha| mha.content.as_ref()?.stage())
    }
}
