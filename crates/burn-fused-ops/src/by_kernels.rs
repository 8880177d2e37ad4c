//! What kernels make, where they run.

use blocksparse_cubecl::KernelError;
use burn_blocksparse::internal::cube::uses_reference;

/// What `run` makes. None where kernels are left out, or do not take the call: plans say so.
pub(crate) fn by_kernels<T>(run: impl FnOnce() -> Result<T, KernelError>) -> Option<T> {
    match uses_reference() {
        true => None,
        false => run().ok(),
    }
}
