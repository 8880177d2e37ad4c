//! What calls without options of their own will run; the others have `explain` on their options.

pub use crate::dropout::explain as dropout;
pub use crate::embedding::explain as embedding;
pub use crate::linear::heads::explain as split_heads;
