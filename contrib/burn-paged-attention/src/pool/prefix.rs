//! Sequences that begin as others did.

use super::KvPool;
use crate::PoolError;
use crate::pages::SequenceId;

impl KvPool {
    /// Tells what the tokens of a sequence are, from its first one on: sequences that begin alike find its full pages with
    /// [`join_with_prefix`](Self::join_with_prefix), also after it has left, until the pages are needed. In a pool made with
    /// [`KvPoolConfig::with_prefix_reuse`](super::KvPoolConfig::with_prefix_reuse).
    ///
    /// # Errors
    /// [`PoolError::Cache`] if there is no such sequence, it has fewer tokens, or the pool does not know pages again.
    pub fn remember(&mut self, id: SequenceId, tokens: &[u32]) -> Result<(), PoolError> {
        // All patterns are asked the same, and what is wrong with it is wrong for the first.
        self.each(|books| books.remember(id, tokens))
    }

    /// A new sequence that has as much of a prompt's beginning as is known of all layers, in whole pages and without its last token, and how many tokens that
    /// is: the rest is fed as always.
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_sparse_transformer::{Factorization, Pattern, SparseTransformerConfig};
    /// use burn_paged_attention::pool::{KvPoolConfig, KvStep, PagedDecoder};
    ///
    /// let device = Device::flex();
    /// let model = SparseTransformerConfig::new(16, 2, Factorization::from(Pattern::causal()))
    ///     .with_vocab_size(256)
    ///     .with_context(64)
    ///     .with_n_layers(2)
    ///     .init(&device);
    /// let config = KvPoolConfig::new(2, 64).with_page_size(16).with_prefix_reuse();
    /// let mut pool = model.new_pool(&config)?;
    /// let mut read = |prompt: &[u32]| {
    ///     let (id, known) = pool.join_with_prefix(prompt)?;
    ///     let rest = Tensor::<1, Int>::from_data(&prompt[known..], &device).unsqueeze::<2>();
    ///     model.next_logits(rest, &[KvStep::new(id, prompt.len() - known)], &mut pool)?;
    ///     pool.remember(id, prompt)?;
    ///     Ok::<usize, burn_paged_attention::PoolError>(known)
    /// };
    /// let instructions = [7; 40];
    /// assert_eq!(read(&[&instructions[..], &[1, 2]].concat())?, 0);
    /// // Two pages of the forty tokens.
    /// assert_eq!(read(&[&instructions[..], &[3]].concat())?, 32);
    /// # Ok::<(), burn_paged_attention::PoolError>(())
    /// ```
    ///
    /// # Errors
    /// [`PoolError::Cache`] if the pool does not know pages again.
    pub fn join_with_prefix(&mut self, prompt: &[u32]) -> Result<(SequenceId, usize), PoolError> {
        let residency = self.residency;
        // Layers forget, and patterns allow stops, at different places.
        let mut prompt = prompt;
        loop {
            let known = self
                .page_pools()
                .map(|books| books.known_prefix(residency, prompt));
            let known = known.collect::<Result<Vec<usize>, _>>()?;
            let least = known.iter().copied().min().unwrap_or(0);
            if known.iter().all(|&known| known == least) {
                break;
            }
            prompt = &prompt[..least + 1];
        }
        for group in &mut self.groups {
            // Pages that nobody named are not in it.
            group.sight = None;
        }
        self.each(|books| books.join_with_prefix(residency, prompt, usize::MAX))
    }
}
