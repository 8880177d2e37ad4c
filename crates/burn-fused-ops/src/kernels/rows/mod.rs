//! Row-wise kernels of layers: norms, activations, dropout, losses, embeddings, heads.

pub(crate) mod activation;
pub(crate) mod beside;
pub(crate) mod cross_entropy;
pub(crate) mod dropout;
pub(crate) mod embedding;
pub(crate) mod heads;
pub(crate) mod norm;
pub(crate) mod norm_backward;
pub(crate) mod rope;
#[doc(hidden)]
pub(crate) mod scaled;
mod strips;

pub use activation::{
    ActivationBackward, activation_text, bias_activation, bias_activation_backward,
};
pub use beside::{BesideMatrix, rounded_beside};
pub use cross_entropy::{
    CrossEntropyKind, CrossEntropyRows, cross_entropy_loss, cross_entropy_plan, cross_entropy_rows,
};
pub use dropout::{stream_dropout, stream_dropout_text};
pub use embedding::{EmbeddingKind, embedding_table_gradient, embedding_text};
pub use heads::{HeadsPart, heads_text, join_heads, split_heads};
pub use norm::{NormBranch, NormOf, add_norm};
pub use norm_backward::{
    NormBackward, NormGrad, RowSums, StreamGrad, residual_norm_backward, residual_norm_text,
};
pub use rope::{RopeTable, rope, rope_both};
pub use scaled::scaled;
