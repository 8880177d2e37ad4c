//! Decoding of a model from a pool.

use burn::tensor::{Int, Tensor};
use burn_sparse_transformer::decoder::Decoder;
use burn_sparse_transformer::internal::{ensure_shape, or_panic};

use super::store::ints;
use super::{KvPool, KvPoolConfig, KvStep};
use crate::PoolError;

/// Decoding of any model from a [`KvPool`].
pub trait PagedDecoder: Decoder {
    /// Makes an empty pool for [`Self::forward_pool`].
    ///
    /// # Errors
    /// Those of [`KvPool::for_attention`].
    fn new_pool(&self, config: &KvPoolConfig) -> Result<KvPool, PoolError> {
        KvPool::for_layers(&self.attentions(), self.max_positions(), config)
    }

    /// Returns logits for new tokens of a pool's sequences. Lengths and numbers of new tokens may differ.
    ///
    /// Sequences fed in pieces give the same rows as the whole; with patterns that are not causal, pieces must end where every block's pattern
    /// allows a boundary. A sequence's first tokens use the planned kernels if all sequences of the batch are empty; later ones attend to the pages
    /// in place. If the pattern leaves out live keys, like a strided one, or scores have ALiBi or a relative bias, the slots are gathered first.
    /// After an error the pool is unchanged. Call it on a copy from [`Module::valid`](burn::module::Module::valid).
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_paged_attention::pool::{KvPoolConfig, KvStep, PagedDecoder};
    /// use burn_sparse_transformer::{Factorization, Pattern, SparseTransformerConfig};
    ///
    /// let device = Device::flex();
    /// let model = SparseTransformerConfig::new(16, 2, Factorization::from(Pattern::local(8)))
    ///     .with_vocab_size(256)
    ///     .with_context(64)
    ///     .with_n_layers(2)
    ///     .init(&device);
    /// let mut pool = model.new_pool(&KvPoolConfig::new(2, 64).with_page_size(16))?;
    /// let (a, b) = (pool.join()?, pool.join()?);
    /// // Prompts of three and of two tokens; the last place of the second one is not read.
    /// let prompts = Tensor::<2, Int>::from_data([[84, 104, 101], [65, 110, 0]], &device);
    /// let logits = model.forward_pool(prompts, &[KvStep::new(a, 3), KvStep::new(b, 2)], &mut pool);
    /// assert_eq!(logits.dims(), [2, 3, 256]);
    /// let next = Tensor::<2, Int>::from_data([[32], [32]], &device);
    /// model.forward_pool(next, &[KvStep::new(b, 1), KvStep::new(a, 1)], &mut pool);
    /// assert_eq!((pool.len(a)?, pool.len(b)?), (4, 3));
    /// # Ok::<(), burn_paged_attention::PoolError>(())
    /// ```
    ///
    /// # Shapes
    /// - `tokens`: `[batch, seq]`; the first `steps[b].tokens` of entry `b` are used, and all must be in the vocabulary
    /// - output: `[batch, seq, vocab_size]`, with arbitrary values in the other rows
    ///
    /// # Panics
    /// With the message of [`Self::try_forward_pool`]'s error.
    #[track_caller]
    fn forward_pool(
        &self,
        tokens: Tensor<2, Int>,
        steps: &[KvStep],
        pool: &mut KvPool,
    ) -> Tensor<3> {
        or_panic(self.try_forward_pool(tokens, steps, pool))
    }

    /// [`Self::forward_pool`] that returns its error.
    ///
    /// # Errors
    /// Those of [`KvPool::try_forward_attention`].
    fn try_forward_pool(
        &self,
        tokens: Tensor<2, Int>,
        steps: &[KvStep],
        pool: &mut KvPool,
    ) -> Result<Tensor<3>, PoolError> {
        Ok(self.logits(pooled(self, tokens, steps, pool, false)?)?)
    }

    /// Like [`Self::forward_pool`], for the last tokens of sequences, which may end anywhere.
    ///
    /// # Panics
    /// With the message of [`Self::try_forward_pool_end`]'s error.
    #[track_caller]
    fn forward_pool_end(
        &self,
        tokens: Tensor<2, Int>,
        steps: &[KvStep],
        pool: &mut KvPool,
    ) -> Tensor<3> {
        or_panic(self.try_forward_pool_end(tokens, steps, pool))
    }

    /// [`Self::forward_pool_end`] that returns its error.
    ///
    /// # Errors
    /// Those of [`Self::try_forward_pool`].
    fn try_forward_pool_end(
        &self,
        tokens: Tensor<2, Int>,
        steps: &[KvStep],
        pool: &mut KvPool,
    ) -> Result<Tensor<3>, PoolError> {
        Ok(self.logits(pooled(self, tokens, steps, pool, true)?)?)
    }

    /// Like [`Self::forward_pool`], but computes only the logits after each sequence's last token.
    ///
    /// # Shapes
    /// - output: `[batch, vocab_size]`
    ///
    /// # Errors
    /// Those of [`Self::try_forward_pool`].
    fn next_logits(
        &self,
        tokens: Tensor<2, Int>,
        steps: &[KvStep],
        pool: &mut KvPool,
    ) -> Result<Tensor<2>, PoolError> {
        let x = pooled(self, tokens, steps, pool, false)?;
        let [batch, seq, d_model] = x.dims();
        let x = match seq {
            1 => x,
            _ => {
                let last = steps.iter().enumerate();
                let last = last.map(|(entry, step)| (entry * seq + step.tokens - 1) as i32);
                let last = ints(last.collect(), [batch], &x.device());
                let rows = x.reshape([batch * seq, d_model]).select(0, last);
                rows.reshape([batch, 1, d_model])
            }
        };
        let logits = self.logits(x)?;
        let [_, _, vocab] = logits.dims();
        Ok(logits.reshape([batch, vocab]))
    }
}

impl<M: Decoder> PagedDecoder for M {}

/// Returns the last layer's output for a step's rows.
fn pooled<M: Decoder>(
    model: &M,
    tokens: Tensor<2, Int>,
    steps: &[KvStep],
    pool: &mut KvPool,
    last: bool,
) -> Result<Tensor<3>, PoolError> {
    ensure_shape("tokens", tokens.dims(), [None, None], ["batch", "seq"])?;
    let layers = model.attentions();
    pool.check_layers(&layers, &layers[0].key.weight.device())?;
    let dims = tokens.dims();
    pool.run(&layers, steps, dims, last, |positions, attend| {
        model.hidden(tokens, positions, attend)
    })
}
