//! Support for `tools/gate`: hashes of all tensors that checks read, and a mode in which kernels are launched but not run.

use std::sync::{LazyLock, Mutex, PoisonError};

use burn::tensor::TensorData;

/// `BURN_SPARSE_GATE`: `hash`, or `launch` if kernels are launched but not run, so that results are meaningless.
static MODE: LazyLock<Option<String>> = LazyLock::new(|| std::env::var("BURN_SPARSE_GATE").ok());

/// Number of tensors read, and the sum of their hashes; a sum, because threads read in any order.
static SEEN: Mutex<(usize, u64)> = Mutex::new((0, 0));

pub fn is_on() -> bool {
    MODE.is_some()
}

/// Returns whether results come from kernels that ran.
pub fn kernels_run() -> bool {
    MODE.as_deref() != Some("launch")
}

/// Adds a tensor that a check has read, by the FNV-1a hash of its dtype, shape and bytes.
pub fn note(data: &TensorData) {
    if !is_on() {
        return;
    }
    let head = format!("{:?} {:?}", data.dtype(), data.shape());
    let bytes = head.as_bytes().iter().chain(data.as_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    *seen = (seen.0 + 1, seen.1.wrapping_add(hash));
}

/// Prints a plan that a check has requested, on one line.
pub fn note_plan(text: &str) {
    if is_on() {
        println!("  plan: {}", text.trim_end().replace('\n', " | "));
    }
}

/// Returns the count and hash of the tensors read since the last call.
pub fn take() -> String {
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    let (count, sum) = std::mem::take(&mut *seen);
    format!("{count} {sum:016x}")
}
