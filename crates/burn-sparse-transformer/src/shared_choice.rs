//! Choices of keys that layers share: one layer chooses, and later ones attend to the same.

use std::fmt;

use burn::tensor::Tensor;
use burn_blocksparse::DeviceLayout;
use burn_sparse_select::msa::Msa;
use burn_sparse_select::{DispatchMode, SelectedBlocks, Selection, TokenIndices};
use serde::{Deserialize, Serialize};

/// Role of a layer that shares a choice of keys with others: see [`SparseTransformerConfig::share_every`](crate::SparseTransformerConfig::share_every).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChoiceSharing {
    /// It chooses, and its output has the choice for the next layers: [`SparseMhaOutput::choice`](crate::SparseMhaOutput::choice).
    Gives,
    /// It attends to the choice in its input ([`SparseMhaInput::choice`](crate::SparseMhaInput::choice)), and has no indexer.
    Takes,
}

impl fmt::Display for ChoiceSharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gives => "gives",
            Self::Takes => "takes",
        })
    }
}

/// Keys that a layer chose, with what attention to them needs: on the device, without autodiff. Clones share them.
#[derive(Clone, Debug)]
pub struct SharedChoice(pub(crate) Chosen);

#[derive(Clone, Debug)]
pub(crate) enum Chosen {
    /// Blocks, by blocks of queries.
    Layout(DeviceLayout),
    /// Blocks beside the forced ones of a selection by which every query chooses for itself.
    Blocks(Box<Selection>, Option<SelectedBlocks>),
    /// Blocks beside the own one, of an index branch.
    Indexed(Msa, Option<SelectedBlocks>),
    /// Single keys, of an indexer.
    Keys(TokenIndices, DispatchMode),
}

/// What a layer gives beside what heads see.
#[derive(Clone, Debug, Default)]
pub struct Aside {
    /// To be added to the loss.
    pub aux_loss: Option<Tensor<1>>,
    /// For the layers behind this one.
    pub choice: Option<SharedChoice>,
}

impl Aside {
    /// With what a later layer gives.
    pub(crate) fn then(self, later: Self) -> Self {
        let losses = [self.aux_loss, later.aux_loss].into_iter().flatten();
        Self {
            aux_loss: losses.reduce(|a, b| a + b),
            choice: later.choice.or(self.choice),
        }
    }
}

impl From<Chosen> for SharedChoice {
    fn from(chosen: Chosen) -> Self {
        Self(chosen)
    }
}

impl SharedChoice {
    /// The blocks, where blocks of queries chose together.
    pub(crate) fn layout(&self) -> Option<&DeviceLayout> {
        match &self.0 {
            Chosen::Layout(layout) => Some(layout),
            Chosen::Blocks(..) | Chosen::Indexed(..) | Chosen::Keys(..) => None,
        }
    }
}
