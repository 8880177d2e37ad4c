//! Choices of a step that layers share.

use burn::tensor::{Int, Tensor};
use burn_sparse_transformer::TransformerError;
use burn_sparse_transformer::content::{ChoiceSharing, SharedChoice};

/// Choice of the latest layer of a step that gives one, for the layers that take it.
#[derive(Default)]
pub(super) struct Shared {
    /// Of whole prompts.
    pub prompt: Option<SharedChoice>,
    /// Pages or slots of each piece of the rows, as attention runs over them; none where there is nothing to choose.
    pieces: Vec<Option<Tensor<3, Int>>>,
    /// Pieces that the present layer has taken.
    taken: usize,
    sharing: Option<ChoiceSharing>,
}

impl Shared {
    /// Begins a layer.
    pub(super) fn begin(&mut self, sharing: Option<ChoiceSharing>) {
        let before = match sharing {
            Some(ChoiceSharing::Takes) => std::mem::take(self),
            None | Some(ChoiceSharing::Gives) => Self::default(),
        };
        *self = Self {
            taken: 0,
            sharing,
            ..before
        };
    }

    /// Keeps the choice of a prompt, if the layer gives it.
    pub(super) fn give_prompt(&mut self, choice: Option<SharedChoice>) {
        self.prompt = choice.filter(|_| self.sharing == Some(ChoiceSharing::Gives));
    }

    /// The choice of the next piece: what `choose` finds, or what the layer takes.
    pub(super) fn piece(
        &mut self,
        choose: impl FnOnce() -> Result<Option<Tensor<3, Int>>, TransformerError>,
    ) -> Result<Option<Tensor<3, Int>>, TransformerError> {
        match self.sharing {
            None => choose(),
            Some(ChoiceSharing::Gives) => {
                let chosen = choose()?;
                self.pieces.push(chosen.clone());
                Ok(chosen)
            }
            Some(ChoiceSharing::Takes) => {
                let piece = self.pieces.get(self.taken).cloned();
                self.taken += 1;
                let expected = "that of an earlier layer, for one that takes it";
                piece.ok_or_else(|| TransformerError::argument("choice", expected, "none"))
            }
        }
    }
}
