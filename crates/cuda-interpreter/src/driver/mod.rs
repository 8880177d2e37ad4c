//! The functions of `libcuda` that CubeCL programs call, under their C names.
//!
//! Results are `CUresult`: 0 for success. Unsupported functions return 801 (not supported). Errors in a module or a launch
//! are printed to standard error.

/// Defines functions of `libcuda` that only return a value.
macro_rules! answering {
    ($($name:ident($($argument:ident: $kind:ty),*) = $answer:expr;)*) => {
        $(
            /// # Safety
            ///
            /// Pointers satisfy the requirements in CUDA's documentation of the function.
            #[unsafe(no_mangle)]
            #[allow(unused_unsafe, reason = "some answer without looking at their arguments")]
            unsafe extern "C" fn $name($($argument: $kind),*) -> Answer {
                // SAFETY: guaranteed by the caller.
                unsafe { $answer }
            }
        )*
    };
}

mod device;
mod launch;
mod listed;
mod memory;
mod stream;
mod tensor;

/// `CUresult`.
type Answer = i32;

const SUCCESS: Answer = 0;
const INVALID_VALUE: Answer = 1;
const OUT_OF_MEMORY: Answer = 2;
const INVALID_PTX: Answer = 218;
const NOT_FOUND: Answer = 500;
const LAUNCH_FAILED: Answer = 719;
const NOT_SUPPORTED: Answer = 801;

/// # Safety
///
/// `to` can be written.
unsafe fn answer<T>(to: *mut T, value: T) -> Answer {
    // SAFETY: guaranteed by the caller.
    unsafe { to.write(value) };
    SUCCESS
}
