//! Imports of kernel launchers, including CubeCL's prelude.

pub use cubecl::ir::{ElemType, FloatKind, IntKind, UIntKind};
pub use cubecl::prelude::*;
pub use cubecl::server::Handle;

pub use crate::args::{address_of, buffer, optional, spread};
pub use crate::error::KernelError;
