//! How far the training of models with indexers is.

use crate::{SparseTransformer, TransformerError};

/// What layers of DeepSeek sparse attention attend to, and what learns. The paper trains a model with dense attention, then its indexers alone for 1,000
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

impl SparseTransformer {
    /// The model in another stage.
    ///
    /// # Errors
    /// [`TransformerError::Argument`] if it has no layers of DeepSeek sparse attention.
    pub fn with_dsa_stage(mut self, stage: DsaStage) -> Result<Self, TransformerError> {
        let mut found = false;
        for block in &mut self.blocks {
            let content = block.mha.content.as_mut();
            if let Some(dsa) = content.and_then(|content| content.dsa.as_mut()) {
                dsa.stage = stage;
                found = true;
            }
        }
        match found {
            true => Ok(self),
            false => Err(TransformerError::argument(
                "dsa_stage",
                "of a model with layers of dsa",
                format!("{stage:?} of one without"),
            )),
        }
    }

    /// The stage, of a model with layers of DeepSeek sparse attention.
    pub fn dsa_stage(&self) -> Option<DsaStage> {
        let mut layers = self.blocks.iter();
        layers.find_map(|block| Some(block.mha.dsa()?.stage))
    }
}
