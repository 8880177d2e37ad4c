//! Choice between kernels and reference implementations.

use blocksparse_cubecl::KernelError;
use burn_blocksparse::internal::cube::uses_reference;

/// Returns the result of `run`. Returns `None` if kernels are turned off or do not support the call; plans say which.
pub(crate) fn by_kernels<T>(run: impl FnOnce() -> Result<T, KernelError>) -> Option<T> {
    match uses_reference() {
        true => None,
        false => run().ok(),
    }
}
