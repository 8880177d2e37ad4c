//! Seeds of dropout that lie on devices, where recorded launches find those of the step.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::shared::dropout::{MaskLaunch, mask_launch};
use crate::Seed;
use crate::seed::SLOTS;

/// The words of tables, by their number. A table is on one device.
static TABLES: Mutex<Option<HashMap<u32, Handle>>> = Mutex::new(None);

/// Says where the words of a table lie ([`SeedTable::words`](crate::SeedTable::words)): in this buffer from now on, which is overwritten in place.
pub fn register(table: u32, words: Handle) {
    let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
    tables.get_or_insert_with(HashMap::new).insert(table, words);
}

/// What a kernel gets of a seed and a threshold.
pub(super) fn mask(seed: Seed, threshold: u32) -> MaskLaunch {
    match seed {
        Seed::Value(seed) => {
            let halves = [seed as u32, (seed >> 32) as u32];
            mask_launch(halves, ComptimeOptionArgs::None, threshold)
        }
        Seed::Place(place) => {
            let tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
            let words = tables
                .as_ref()
                .and_then(|tables| tables.get(&place.table()));
            let words = words.expect("the words of a table of seeds are on the device");
            // SAFETY: tables have so many words.
            let words = unsafe { BufferArg::from_raw_parts(words.clone(), 2 * SLOTS) };
            let words = ComptimeOptionArgs::Some(words);
            mask_launch([2 * place.slot(), 0], words, threshold)
        }
    }
}

/// Buffers that a kernel binds for a seed.
pub(super) fn buffers(seed: Option<Seed>) -> usize {
    usize::from(matches!(seed, Some(Seed::Place(_))))
}
