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
        hash(self.module, self.calls.fetch_add(1, Ordering::Relaxed))
    }
}

/// One step of SplitMix64 (Steele et al., 2014), so that neighbouring seeds and layers, modules or calls share no masks.
pub(crate) fn hash(seed: u64, index: u64) -> u64 {
    let mix = |z: u64| {
        let z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    mix(mix(seed) ^ index)
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
