//! What `tools/gate` asks of checks: a hash of all numbers that they read, and to go on where kernels are not run.

use std::sync::{LazyLock, Mutex, PoisonError};

use burn::tensor::TensorData;

/// `BURN_SPARSE_GATE`: `hash`, or `launch` where kernels are launched and not run, so that no number means anything.
static MODE: LazyLock<Option<String>> = LazyLock::new(|| std::env::var("BURN_SPARSE_GATE").ok());

/// How many tensors were read, and the sum of their hashes: some are read by several threads.
static SEEN: Mutex<(usize, u64)> = Mutex::new((0, 0));

pub fn is_on() -> bool {
    MODE.is_some()
}

/// Whether numbers are those of kernels.
pub fn kernels_run() -> bool {
    MODE.as_deref() != Some("launch")
}

/// Adds a tensor that a check has read: the FNV-1a hash of its dtype, shape and bytes.
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

/// Prints a plan that a check has asked for, on one line.
pub fn note_plan(text: &str) {
    if is_on() {
        println!("  plan: {}", text.trim_end().replace('\n', " | "));
    }
}

/// What was read since the last call.
pub fn take() -> String {
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    let (count, sum) = std::mem::take(&mut *seen);
    format!("{count} {sum:016x}")
}
