use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::nn::Dropout;
use burn_blocksparse::{Dropout as WeightDropout, Seed};

static MODULES: AtomicU64 = AtomicU64::new(0);

/// Seeds of a module's dropout, one for each of its calls. Seeds of two modules are unrelated; clones share theirs.
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
    pub(crate) fn next(&self) -> Seed {
        Seed::Value(self.module).derive(self.calls.fetch_add(1, Ordering::Relaxed))
    }
}

pub(crate) fn training_dropout(
    dropout: &Dropout,
    seed: impl FnOnce() -> Seed,
) -> Option<WeightDropout> {
    dropped(dropout).map(|probability| WeightDropout::new(probability, seed()))
}

/// Returns the probability of a module's dropout, if it is active.
pub(crate) fn dropped(Dropout { prob, training }: &Dropout) -> Option<f64> {
    (*prob > 0.0 && training.is_enabled()).then_some(*prob)
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
        let distinct: std::collections::HashSet<u64> = seeds.into_iter().map(Seed::value).collect();
        assert_eq!(distinct.len(), seeds.len());
    }
}
