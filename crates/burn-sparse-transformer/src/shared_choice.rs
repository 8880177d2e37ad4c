//! Choices of keys that layers share: one layer chooses, and later ones attend to the same keys.

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
    /// Chooses, and returns the choice for the next layers in its output: [`SparseMhaOutput::choice`](crate::SparseMhaOutput::choice).
    Gives,
    /// Attends to the choice in its input ([`SparseMhaInput::choice`](crate::SparseMhaInput::choice)), and has no indexer.
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

/// Keys that a layer chose, with what attention to them needs, on the device and without autodiff. Clones share memory.
#[derive(Clone, Debug)]
pub struct SharedChoice(pub(crate) Chosen);

#[derive(Clone, Debug)]
pub(crate) enum Chosen {
    /// Blocks of keys for blocks of queries.
    Layout(DeviceLayout),
    /// Blocks for each query, in addition to the forced ones, of a selection by which every query chooses for itself.
    Blocks(Box<Selection>, Option<SelectedBlocks>),
    /// Blocks of an index branch, in addition to a token's own block.
    Indexed(Msa, Option<SelectedBlocks>),
    /// Single keys of an indexer.
    Keys(TokenIndices, DispatchMode),
}

/// Outputs of a layer besides the heads' outputs.
#[derive(Clone, Debug, Default)]
pub struct Aside {
    /// Auxiliary loss.
    pub aux_loss: Option<Tensor<1>>,
    /// Choice for later layers.
    pub choice: Option<SharedChoice>,
}

impl Aside {
    /// Combines with the outputs of a later layer.
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
    /// Returns the layout, if blocks of queries chose together.
    pub(crate) fn layout(&self) -> Option<&DeviceLayout> {
        match &self.0 {
            Chosen::Layout(layout) => Some(layout),
            Chosen::Blocks(..) | Chosen::Indexed(..) | Chosen::Keys(..) => None,
        }
    }
}
