//! Prefix reuse: sequences that begin with the same tokens.

use super::KvPool;
use crate::PoolError;
use crate::pages::SequenceId;

impl KvPool {
    /// Registers the tokens of a sequence, from its first one on, so that [`join_with_prefix`](Self::join_with_prefix) finds its full pages, even
    /// after it has left, until the pages are needed. The pool must be made with
    /// [`KvPoolConfig::with_prefix_reuse`](super::KvPoolConfig::with_prefix_reuse).
    ///
    /// # Errors
    /// [`PoolError::Cache`] if the sequence does not exist or has fewer tokens, or the pool has no prefix reuse.
    pub fn remember(&mut self, id: SequenceId, tokens: &[u32]) -> Result<(), PoolError> {
        // All block tables get the same arguments, so an error occurs in the first or in none.
        self.each(|books| books.remember(id, tokens))
    }

    /// Adds a sequence with as much of a prompt's beginning as is known in all layers, in whole pages and without its last token. Also returns the
    /// number of those tokens; feed the rest as usual.
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
    /// [`PoolError::Cache`] if the pool has no prefix reuse.
    pub fn join_with_prefix(&mut self, prompt: &[u32]) -> Result<(SequenceId, usize), PoolError> {
        let residency = self.residency;
        // Layers forget pages, and patterns allow boundaries, at different places.
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
            // It lacks pages that no sequence referenced.
            group.sight = None;
        }
        self.each(|books| books.join_with_prefix(residency, prompt, usize::MAX))
    }
}
