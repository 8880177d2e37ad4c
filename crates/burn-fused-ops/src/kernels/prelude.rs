//! Imports that the kernels share.

pub use cubecl::ir::{ElemType, FloatKind};
pub use cubecl::prelude::*;
pub use cubecl::server::Handle;

pub use blocksparse_cubecl::args::{address_of, buffer, optional, spread};
pub use blocksparse_cubecl::error::KernelError;
pub use blocksparse_cubecl::limits::{check_types, most_units, vector_of};
pub use blocksparse_cubecl::rows::columns::{accumulator_of, column_sums};
pub use blocksparse_cubecl::rows::typed::Typed;
