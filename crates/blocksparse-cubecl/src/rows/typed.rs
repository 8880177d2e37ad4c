//! Buffers with the type of their numbers.

use cubecl::ir::ElemType;
use cubecl::server::Handle;

/// A buffer and its type.
pub type Typed<'a> = (&'a Handle, ElemType);
