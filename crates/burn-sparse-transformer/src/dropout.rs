use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Modules made so far in this process.
static MODULES: AtomicU64 = AtomicU64::new(0);

/// Seeds of a module's dropout, one for each of its calls. Those of two modules have nothing to do with each other; clones share
/// theirs.
#[derive(Clone, Debug)]
pub(crate) struct Seeds {
    module: u64,
    calls: Arc<AtomicU64>,
}

impl Default for Seeds {
    fn default() -> Self {
        Self {
            module: MODULES.fetch_add(1, Ordering::Relaxed),
            calls: Arc::default(),
        }
    }
}

impl Seeds {
    pub(crate) fn next(&self) -> u64 {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        mix(mix(self.module).wrapping_add(call))
    }
}

/// SplitMix64's output function (Steele et al., "Fast splittable pseudorandom number generators", 2014): numbers side by side become
/// unlike.
fn mix(number: u64) -> u64 {
    let x = number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_differ_between_calls_and_modules_and_clones_go_on() {
        let (a, b) = (Seeds::default(), Seeds::default());
        let clone = a.clone();
        let seeds = [
            a.next(),
            a.next(),
            clone.next(),
            a.next(),
            b.next(),
            b.next(),
        ];
        let distinct: std::collections::HashSet<u64> = seeds.into_iter().collect();
        assert_eq!(distinct.len(), seeds.len());
    }
}
