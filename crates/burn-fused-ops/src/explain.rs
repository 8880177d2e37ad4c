//! Plans of the ops that have no options. The other ops have `explain` on their options.

pub use crate::dropout::explain as dropout;
pub use crate::embedding::explain as embedding;
pub use crate::linear::heads::explain as split_heads;
