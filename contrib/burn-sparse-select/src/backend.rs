//! Backend traits and the values they exchange. For crates that add a backend, not for users of the ops.

#[cfg(feature = "cube")]
pub use crate::dsa::ops::{
    AmongKeys, BlockMaxima, ComparedKeys, IndexInputs, IndexerChoice, IndexerGrads, IndexerLoss,
    IndexerOps, IndexerScores, TargetInputs,
};
pub use crate::gates::ops::{GateOps, GatedGrads, GatedInputs, GatedSaved, GatedTask};
pub use crate::pages::ops::PageChoiceOps;
#[cfg(feature = "cube")]
pub use crate::selection::estimate_ops::{BlockScores, CompressedCall, EstimateOps, ScoredBy};
pub use crate::selection::ops::SelectionOps;
pub use crate::selection::token_sparse::ops::{
    BlockLists, QueryLists, Sparsity, TokenSparseCall, TokenSparseGrads, TokenSparseInputs,
    TokenSparseOps, TokenSparseOutput, TokenSparseSaved,
};
pub use crate::selection::values::{
    QueriesOfBlocks, QueryTiles, TopKBlocks, TopKLists, UniqueKeys,
};
