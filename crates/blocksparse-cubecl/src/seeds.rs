//! Dropout seeds on devices, where recorded launches read the seed of the step.

use std::sync::Arc;

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::shared::dropout::{MaskLaunch, mask_launch};
use blocksparse::Seed;
use blocksparse::internal::{self, Read, SLOTS};

/// Registers the buffer of a seed table's words ([`SeedTable::words`](blocksparse::SeedTable::words)). The buffer is overwritten in place from now on, and
/// the table holds it as long as it lives.
pub fn register(table: u32, words: Handle) {
    internal::keep_on_device(table, Arc::new(words));
}

/// Returns the kernel arguments of a seed and a threshold.
///
/// # Panics
/// If the words of a live table are not on the device.
pub fn mask(seed: Seed, threshold: u32) -> MaskLaunch {
    let by_value = |seed: u64| {
        let halves = [seed as u32, (seed >> 32) as u32];
        mask_launch(halves, ComptimeOptionArgs::None, threshold)
    };
    let place = match seed {
        Seed::Value(seed) => return by_value(seed),
        Seed::Place(place) => place,
    };
    let words = match internal::read_place(place) {
        // The slot is no longer written, and no recording that begins now may use it.
        Read::Number(seed) => return by_value(seed),
        Read::OnDevice(words) => words.and_then(|words| words.downcast::<Handle>().ok()),
    };
    let words = words.expect("the words of a table of seeds are on the device");
    // SAFETY: tables have `2 * SLOTS` words.
    let words = unsafe { BufferArg::from_raw_parts(Handle::clone(&words), 2 * SLOTS) };
    let words = ComptimeOptionArgs::Some(words);
    mask_launch([2 * place.slot(), 0], words, threshold)
}

/// Number of buffers that a kernel binds for a seed.
pub fn buffers(seed: Option<Seed>) -> usize {
    usize::from(matches!(seed, Some(Seed::Place(_))))
}
