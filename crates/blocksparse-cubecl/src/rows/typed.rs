//! Buffers with element types.

use cubecl::ir::ElemType;
use cubecl::server::Handle;

/// A buffer and its element type.
pub type Typed<'a> = (&'a Handle, ElemType);
