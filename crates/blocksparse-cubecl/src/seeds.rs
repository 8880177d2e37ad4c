//! Seeds of dropout that lie on devices, where recorded launches find those of the step.

use std::sync::Arc;

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::shared::dropout::{MaskLaunch, mask_launch};
use blocksparse::Seed;
use blocksparse::internal::{self, Read, SLOTS};

/// Says where the words of a table lie ([`SeedTable::words`](blocksparse::SeedTable::words)): in this buffer from now on, which is overwritten in place, and which the
/// table holds as long as it lives.
pub fn register(table: u32, words: Handle) {
    internal::keep_on_device(table, Arc::new(words));
}

/// What a kernel gets of a seed and a threshold.
///
/// # Panics
/// If the words of a table that lives are not on the device.
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
        // Nobody writes it any more, and no recording that begins now may have it.
        Read::Number(seed) => return by_value(seed),
        Read::OnDevice(words) => words.and_then(|words| words.downcast::<Handle>().ok()),
    };
    let words = words.expect("the words of a table of seeds are on the device");
    // SAFETY: tables have so many words.
    let words = unsafe { BufferArg::from_raw_parts(Handle::clone(&words), 2 * SLOTS) };
    let words = ComptimeOptionArgs::Some(words);
    mask_launch([2 * place.slot(), 0], words, threshold)
}

/// Buffers that a kernel binds for a seed.
pub fn buffers(seed: Option<Seed>) -> usize {
    usize::from(matches!(seed, Some(Seed::Place(_))))
}
