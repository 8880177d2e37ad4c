use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_blocksparse::layout::PaddingMask;
use burn_blocksparse::{BlockLayout, LayoutError, LayoutShape, Pattern};

use crate::TransformerError;
use crate::error::Result;

/// Most layouts that are cached by default, see [`Layouts::keep`]. Training, evaluation and decoding each need one at a time; decoding requests a new
/// `(1, n)` at every step and would grow the list without bound.
const KEPT: usize = 8;

/// A pattern, and the layouts built from it so far, by sequence lengths.
///
/// Clones share the layouts: a model's blocks with equal patterns hold clones of one `Layouts`, and so do the copies of a model that `Module::valid` or an
/// optimizer step make.
#[derive(Clone)]
pub(crate) struct Layouts {
    pattern: Pattern,
    heads: usize,
    block_size: usize,
    built: Arc<Mutex<Built>>,
    /// Layouts of the same pattern for other numbers of heads and block sizes.
    siblings: Arc<Mutex<LayoutPool>>,
}

/// Cached layouts, and those that threads are building or about to use.
struct Built {
    most: usize,
    /// Least recently used first.
    entries: Vec<(Request, Slot)>,
}

/// Layout, once it is built. A thread that finds it empty builds it while it holds this lock and no other: threads that request the same layout wait, all
/// others proceed.
type Slot = Arc<Mutex<Option<BlockLayout>>>;

impl Built {
    /// Returns the slot of `request` and makes it the most recently used one.
    fn slot(&mut self, request: &Request) -> Slot {
        let found = self.entries.iter().position(|(known, _)| known == request);
        let entry = match found {
            Some(index) => self.entries.remove(index),
            None => (request.clone(), Slot::default()),
        };
        let slot = entry.1.clone();
        self.entries.push(entry);
        self.forget();
        slot
    }

    /// Evicts the least recently used layouts down to the limit. Layouts in use stay, so that they are found and not rebuilt. Slots are handed out under this
    /// list's lock only, so none becomes used meanwhile.
    fn forget(&mut self) {
        let mut excess = self.entries.len().saturating_sub(self.most);
        self.entries.retain(|(_, slot)| {
            let forgotten = excess > 0 && Arc::strong_count(slot) == 1;
            excess -= usize::from(forgotten);
            !forgotten
        });
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Request {
    /// Number of heads. None: that of the [`Layouts`].
    pub(crate) heads: Option<usize>,
    pub(crate) seq_q: usize,
    /// Number of positions; the queries are the last ones.
    pub(crate) seq_kv: usize,
    /// Offsets of documents, in each of which the pattern holds by itself; empty for a single document.
    pub(crate) documents: Vec<usize>,
    /// Global tokens in addition to the pattern, per batch entry; empty if there are none.
    pub(crate) global: Vec<Vec<usize>>,
    /// Padding, per batch entry; empty if there is none.
    pub(crate) restrictions: Vec<PaddingMask>,
}

impl Request {
    pub(crate) fn new(seq_q: usize, seq_kv: usize) -> Self {
        Self {
            seq_q,
            seq_kv,
            ..Self::default()
        }
    }

    pub(crate) fn with_heads(mut self, heads: usize) -> Self {
        self.heads = Some(heads);
        self
    }
}

impl Layouts {
    pub(crate) fn new(pattern: Pattern, heads: usize, block_size: usize) -> Result<Self> {
        let layouts = Self::unchecked(pattern, heads, block_size);
        // The smallest layout triggers every check that does not depend on the lengths.
        layouts.build(&Request::new(1, 1))?;
        Ok(layouts)
    }

    /// Returns layouts whose requests state the number of heads.
    pub(crate) fn of_any_heads(pattern: Pattern, block_size: usize) -> Result<Self> {
        let layouts = Self::unchecked(pattern, 1, block_size);
        match layouts.build(&Request::new(1, 1)) {
            // Other numbers of heads may match.
            Ok(_)
            | Err(TransformerError::Layout(LayoutError::Pattern {
                argument: "heads", ..
            })) => Ok(layouts),
            Err(error) => Err(error),
        }
    }

    fn unchecked(pattern: Pattern, heads: usize, block_size: usize) -> Self {
        Self {
            pattern,
            heads,
            block_size,
            built: Arc::new(Mutex::new(Built {
                most: KEPT,
                entries: Vec::new(),
            })),
            siblings: Arc::default(),
        }
    }

    pub(crate) fn pattern(&self) -> &Pattern {
        &self.pattern
    }

    pub(crate) fn heads(&self) -> usize {
        self.heads
    }

    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    /// Returns the layouts of the same pattern for `heads` heads and blocks of `block_size`.
    pub(crate) fn of_shape(&self, heads: usize, block_size: usize) -> Result<Self> {
        if self.block_size == block_size && self.heads == heads {
            return Ok(self.clone());
        }
        let mut siblings = self.siblings.lock().unwrap_or_else(PoisonError::into_inner);
        siblings.get(&self.pattern, heads, block_size)
    }

    pub(crate) fn keep(&self, most: usize) {
        let mut built = self.built();
        built.most = most;
        built.forget();
    }

    pub(crate) fn get(&self, request: &Request) -> Result<BlockLayout> {
        let slot = self.built().slot(request);
        let layout = self.fill(&slot, request);
        drop(slot);
        let mut built = self.built();
        if layout.is_err() {
            // A request that cannot be built evicts no layout.
            (built.entries).retain(|(known, _)| known != request);
        }
        built.forget();
        layout
    }

    fn fill(&self, slot: &Mutex<Option<BlockLayout>>, request: &Request) -> Result<BlockLayout> {
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(layout) = &*slot {
            return Ok(layout.clone());
        }
        let layout = match request.restrictions.is_empty() {
            true => self.build(request)?,
            false => {
                let whole = Request {
                    restrictions: Vec::new(),
                    ..request.clone()
                };
                self.get(&whole)?.mask_padding(&request.restrictions)?
            }
        };
        *slot = Some(layout.clone());
        Ok(layout)
    }

    fn built(&self) -> MutexGuard<'_, Built> {
        self.built.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn build(&self, request: &Request) -> Result<BlockLayout> {
        let shape = LayoutShape::new(
            request.heads.unwrap_or(self.heads),
            [request.seq_q, request.seq_kv],
            self.block_size,
        );
        let pattern = match &request.documents[..] {
            [] => self.pattern.clone(),
            documents => Pattern::packed(documents.iter().copied(), self.pattern.clone()),
        };
        if request.global.iter().all(Vec::is_empty) {
            return Ok(BlockLayout::new(&pattern, shape)?);
        }
        let mut entries: Vec<BlockLayout> = Vec::with_capacity(request.global.len());
        for (index, tokens) in request.global.iter().enumerate() {
            let same = request.global[..index]
                .iter()
                .position(|known| known == tokens);
            entries.push(match same {
                Some(known) => entries[known].clone(),
                None => {
                    let global = Pattern::global(tokens.iter().copied());
                    BlockLayout::new(&Pattern::union([pattern.clone(), global]), shape)?
                }
            });
        }
        Ok(BlockLayout::stack_batch(&entries)?)
    }
}

impl fmt::Debug for Layouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in blocks of {}", self.pattern, self.block_size)
    }
}

/// Layouts, one for each pattern, number of heads and block size.
#[derive(Default)]
pub(crate) struct LayoutPool(Vec<Layouts>);

impl LayoutPool {
    pub(crate) fn get(
        &mut self,
        pattern: &Pattern,
        heads: usize,
        block_size: usize,
    ) -> Result<Layouts> {
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
    use std::collections::HashSet;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::{Factorization, SparseTransformerConfig};
    use burn::module::Module;
    use burn::tensor::{Device, Int, Tensor};

    fn built(layouts: &Layouts) -> usize {
        layouts.built().entries.len()
    }

    #[test]
    fn stays_bounded_and_keeps_what_is_used() {
        let layouts = Layouts::new(Pattern::causal(), 2, 8).unwrap();
        let square = Request::new(32, 32);
        layouts.get(&square).unwrap();
        for total in 1..100 {
            layouts.get(&Request::new(1, total)).unwrap();
            layouts.get(&square).unwrap();
            assert!(built(&layouts) <= KEPT);
        }
        let kept = &layouts.built().entries;
        assert!(kept.iter().any(|(request, _)| *request == square));
        assert!(kept.iter().any(|(request, _)| request.seq_kv == 99));
    }

    #[test]
    fn layouts_of_different_lengths_are_built_side_by_side() {
        let (began, limit) = (Instant::now(), Duration::from_secs(5));
        let builders = Arc::new(Mutex::new(HashSet::new()));
        let seen = Arc::clone(&builders);
        // Threads that build wait for each other.
        let pattern = Pattern::from_fn("meeting", move |_, i, j| {
            let arrived = || {
                let mut builders = seen.lock().unwrap();
                builders.insert(thread::current().id());
                builders.len()
            };
            while i > 0 && i == j && arrived() < 3 && began.elapsed() < limit {
                thread::yield_now();
            }
            j <= i
        });
        let layouts = Layouts::new(pattern, 1, 8).unwrap();
        thread::scope(|scope| {
            for seq in [8, 16, 24] {
                let layouts = &layouts;
                scope.spawn(move || layouts.get(&Request::new(seq, seq)).unwrap());
            }
        });
        assert_eq!(builders.lock().unwrap().len(), 3);
        assert!(
            began.elapsed() < limit,
            "a thread waited for another one's layout"
        );
    }

    #[test]
    fn threads_with_many_lengths_build_each_layout_once() {
        let built = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&built);
        let pattern = Pattern::from_fn("counted", move |_, i, j| {
            // Last query and key of each layout.
            if i == j && i % 8 == 7 {
                seen.lock().unwrap().push(i);
            }
            j <= i
        });
        let layouts = Layouts::new(pattern, 1, 8).unwrap();
        let requests: Vec<_> = (1..=12).map(|blocks| Request::new(8, 8 * blocks)).collect();
        layouts.keep(requests.len());
        built.lock().unwrap().clear();
        let ask = |first: usize| {
            for index in 0..10 * requests.len() {
                let request = &requests[(first + index) % requests.len()];
                assert_eq!(layouts.get(request).unwrap().seq_kv(), request.seq_kv);
            }
        };
        thread::scope(|scope| {
            for first in [0, 0, 5, 9] {
                scope.spawn(move || ask(first));
            }
        });
        let once = built.lock().unwrap().len();
        built.lock().unwrap().clear();
        let fresh = Layouts::new(layouts.pattern.clone(), 1, 8).unwrap();
        fresh.keep(requests.len());
        built.lock().unwrap().clear();
        requests
            .iter()
            .for_each(|request| drop(fresh.get(request).unwrap()));
        assert_eq!(once, built.lock().unwrap().len());
        layouts.keep(2);
        assert_eq!(layouts.built().entries.len(), 2);
    }

    #[test]
    fn a_request_without_a_layout_takes_no_place() {
        let layouts = Layouts::new(Pattern::causal(), 2, 8).unwrap();
        let mut request = Request::new(16, 16);
        request.restrictions = vec![PaddingMask::default().keys([true; 9])];
        layouts.get(&request).unwrap_err();
        let built = layouts.built();
        assert!(built.entries.iter().all(|(known, _)| *known != request));
    }

    #[test]
    fn clones_share_what_was_built() {
        let layouts = Layouts::new(Pattern::local(4), 1, 8).unwrap();
        layouts.clone().get(&Request::new(16, 16)).unwrap();
        assert_eq!(built(&layouts), 1);
        layouts.get(&Request::new(16, 16)).unwrap();
        assert_eq!(built(&layouts), 1);
    }

    #[test]
    fn padding_and_documents_are_part_of_the_request() {
        let layouts = Layouts::new(Pattern::causal(), 2, 8).unwrap();
        let mut padded = Request::new(16, 16);
        padded.restrictions = vec![PaddingMask::default().keys((0..16).map(|j| j < 5))];
        let mut packed = Request::new(16, 16);
        packed.documents = vec![0, 9];
        for _ in 0..2 {
            assert_eq!(layouts.get(&padded).unwrap().batch(), Some(1));
            let layout = layouts.get(&packed).unwrap();
            assert!(layout.to_dense(0)[8][0] && !layout.to_dense(0)[9][0]);
            // Both, and the layout without padding.
            assert_eq!(built(&layouts), 3);
        }
    }

    /// A batch of another length every step: layouts are reused, and the cache stays bounded. The time is in `docs/dev/benchmark-tables.md`.
    #[test]
    fn a_hundred_lengths_in_a_row() {
        let layouts = Layouts::new(Pattern::fixed(128, 32), 8, 32).unwrap();
        for step in 0..100 {
            let seq = 8_000 + 41 * step;
            let mut request = Request::new(seq, seq);
            let whole = layouts.get(&request).unwrap();
            let lengths = [seq, seq - 1_000, seq / 2, seq / 3];
            let keys =
                lengths.map(|length| PaddingMask::default().keys((0..seq).map(|j| j < length)));
            request.restrictions = keys.to_vec();
            let padded = layouts.get(&request).unwrap();
            assert!(padded.allowed_pairs() < 4 * whole.allowed_pairs());
            assert!(built(&layouts) <= KEPT);
        }
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
        let model = SparseTransformerConfig::new(8, 2, factorization)
            .with_vocab_size(7)
            .with_context(16)
            .with_n_layers(4)
            .with_embedding_width(Some(8))
            .with_block_size(8)
            .init(&Device::flex());
        let tokens = Tensor::<2, Int>::zeros([1, 16], &Device::flex());
        model.valid().forward(tokens);
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
