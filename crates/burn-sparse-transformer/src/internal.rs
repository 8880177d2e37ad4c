//! Helpers for sister crates. Nothing here is stable.

pub use crate::dsa::indexed::Indexed;
pub use crate::error::{ensure_none, ensure_positive, ensure_shape, or_panic};
pub use crate::heads::rotate_back;
pub use crate::nsa::heads::{Branches, Placing, Projections};
