//! Attention to a choice of keys, the layer's own or that of an earlier layer.

use burn_sparse_select::token_sparse_attention;

use crate::call::{Call, Heads, Seen};
use crate::error::Result;
use crate::shared_choice::{ChoiceSharing, Chosen, SharedChoice};
use crate::{SparseMultiHeadAttention, TransformerError};

impl SharedChoice {
    /// Computes the outputs of a layer's heads with this choice.
    pub(crate) fn attend(
        self,
        mha: &SparseMultiHeadAttention,
        heads: Heads,
        call: &Call,
    ) -> Result<Seen> {
        let heads = match &self.0 {
            Chosen::Layout(layout) => mha.attend(heads, layout, call)?,
            Chosen::Blocks(selection, lists) => {
                mha.attend_blocks(heads, selection, lists.clone(), call)?
            }
            Chosen::Indexed(op, lists) => {
                let ([q, k, v], options) = (heads, mha.options.clone());
                op.attention(q, k, v, lists.clone(), options)?.0
            }
            Chosen::Keys(lists, dispatch) => {
                let [q, k, v] = heads;
                let options = mha.options.clone().dispatch_mode(*dispatch);
                token_sparse_attention(q, k, v, lists.clone(), options)?.0
            }
        };
        let mut seen = Seen::from(heads);
        seen.aside.choice = Some(self);
        Ok(seen)
    }
}

impl Call {
    /// Computes the outputs of a layer that takes the choice of an earlier one, and passes the choice on.
    pub(crate) fn taken_by(&self, mha: &SparseMultiHeadAttention, heads: Heads) -> Result<Seen> {
        self.taken()?.clone().attend(mha, heads, self)
    }

    pub(crate) fn taken(&self) -> Result<&SharedChoice> {
        let expected = "that of an earlier layer, for one that takes it";
        let choice = self.options.choice.as_ref();
        choice.ok_or_else(|| TransformerError::argument("choice", expected, "none"))
    }
}

impl SparseMultiHeadAttention {
    /// Returns the layer's role in sharing a choice; `None` if it chooses for itself alone.
    pub fn choice_sharing(&self) -> Option<ChoiceSharing> {
        self.choice_sharing
    }

    pub(crate) fn takes_choice(&self) -> bool {
        self.choice_sharing == Some(ChoiceSharing::Takes)
    }
}
