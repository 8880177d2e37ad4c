use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn_blocksparse::{BlockLayout, LayoutShape, Pattern};

use crate::TransformerError;

/// Layouts kept at most. Training, evaluation and decoding each need one at a time; decoding asks for
/// a new `(1, n)` at every step and would grow the list without bound.
const KEPT: usize = 8;

/// One pattern and the layouts built from it so far, by sequence lengths.
///
/// Clones share what was built: a model's blocks with equal patterns hold clones of one `Layouts`, and
/// so do the copies that `Module::valid` or an optimizer step make of a model.
#[derive(Clone)]
pub(crate) struct Layouts {
    pattern: Pattern,
    heads: usize,
    block_size: usize,
    /// Least recently used first.
    built: Arc<Mutex<Vec<BlockLayout>>>,
}

impl Layouts {
    /// # Errors
    /// If no layout can be built from `pattern`, `heads` and `block_size`, whatever the lengths.
    pub(crate) fn new(
        pattern: Pattern,
        heads: usize,
        block_size: usize,
    ) -> Result<Self, TransformerError> {
        let layouts = Self {
            pattern,
            heads,
            block_size,
            built: Arc::default(),
        };
        // The smallest layout meets every check that does not depend on the lengths.
        layouts.build(1, 1)?;
        Ok(layouts)
    }

    pub(crate) fn pattern(&self) -> &Pattern {
        &self.pattern
    }

    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    /// The layout for `seq_q` queries that are the last ones of `seq_kv` positions.
    pub(crate) fn get(&self, seq_q: usize, seq_kv: usize) -> Result<BlockLayout, TransformerError> {
        // Built under the lock, so that threads that ask for the same layout build it once.
        let mut built = self.built.lock().unwrap_or_else(PoisonError::into_inner);
        let found = built
            .iter()
            .position(|layout| layout.seq_q() == seq_q && layout.seq_kv() == seq_kv);
        let layout = match found {
            Some(index) => built.remove(index),
            None => self.build(seq_q, seq_kv)?,
        };
        if built.len() == KEPT {
            built.remove(0);
        }
        built.push(layout.clone());
        Ok(layout)
    }

    fn build(&self, seq_q: usize, seq_kv: usize) -> Result<BlockLayout, TransformerError> {
        let shape = LayoutShape {
            heads: self.heads,
            seq_q,
            seq_kv,
            block_size: self.block_size,
        };
        Ok(BlockLayout::new(&self.pattern, shape)?)
    }
}

impl fmt::Debug for Layouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in blocks of {}", self.pattern, self.block_size)
    }
}

/// Hands out one [`Layouts`] per distinct pattern.
#[derive(Default)]
pub(crate) struct LayoutPool(Vec<Layouts>);

impl LayoutPool {
    pub(crate) fn get(
        &mut self,
        pattern: &Pattern,
        heads: usize,
        block_size: usize,
    ) -> Result<Layouts, TransformerError> {
        let same =
            |l: &&Layouts| l.pattern == *pattern && l.heads == heads && l.block_size == block_size;
        if let Some(layouts) = self.0.iter().find(same) {
            return Ok(layouts.clone());
        }
        let layouts = Layouts::new(pattern.clone(), heads, block_size)?;
        self.0.push(layouts.clone());
        Ok(layouts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Factorization, SparseTransformerConfig};
    use burn::module::Module;
    use burn::tensor::{Device, Int, Tensor};

    fn built(layouts: &Layouts) -> usize {
        layouts.built.lock().unwrap().len()
    }

    #[test]
    fn stays_bounded_and_keeps_what_is_used() {
        let layouts = Layouts::new(Pattern::causal(), 2, 8).unwrap();
        layouts.get(32, 32).unwrap();
        for total in 1..100 {
            layouts.get(1, total).unwrap();
            layouts.get(32, 32).unwrap();
            assert!(built(&layouts) <= KEPT);
        }
        let kept = layouts.built.lock().unwrap();
        assert!(kept.iter().any(|l| l.seq_q() == 32 && l.seq_kv() == 32));
        assert!(kept.iter().any(|l| l.seq_q() == 1 && l.seq_kv() == 99));
    }

    #[test]
    fn clones_share_what_was_built() {
        let layouts = Layouts::new(Pattern::local(4), 1, 8).unwrap();
        layouts.clone().get(16, 16).unwrap();
        assert_eq!(built(&layouts), 1);
        layouts.get(16, 16).unwrap();
        assert_eq!(built(&layouts), 1);
    }

    #[test]
    fn the_pool_shares_by_pattern() {
        let mut pool = LayoutPool::default();
        let a = pool.get(&Pattern::local(4), 2, 8).unwrap();
        let b = pool.get(&Pattern::strided(4), 2, 8).unwrap();
        let c = pool.get(&Pattern::local(4), 2, 8).unwrap();
        assert!(Arc::ptr_eq(&a.built, &c.built) && !Arc::ptr_eq(&a.built, &b.built));
    }

    #[test]
    fn blocks_with_equal_patterns_and_copies_of_the_model_share() {
        let patterns = vec![Pattern::local(8), Pattern::strided(8)];
        let factorization = Factorization::Interleaved(patterns);
        let model = SparseTransformerConfig::new(7, 16, 8, 4, 2, factorization, 8)
            .with_block_size(8)
            .init(&Device::flex())
            .unwrap();
        let tokens = Tensor::<2, Int>::zeros([1, 16], &Device::flex());
        model.valid().forward(tokens).unwrap();
        let layouts: Vec<_> = model.blocks.iter().map(|b| &b.mha.layouts).collect();
        for (layer, own) in layouts.iter().enumerate() {
            assert_eq!(built(own), 1);
            assert!(Arc::ptr_eq(&own.built, &layouts[layer % 2].built));
        }
        assert!(!Arc::ptr_eq(&layouts[0].built, &layouts[1].built));
    }

    #[test]
    fn what_can_never_fit_is_refused_at_once() {
        assert!(Layouts::new(Pattern::causal(), 2, 7).is_err());
        assert!(Layouts::new(Pattern::fixed_heads(8, 2, 3), 8, 8).is_err());
    }
}
