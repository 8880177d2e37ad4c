//! A model on a pool.

use burn::tensor::{Int, Tensor};

use super::store::ints;
use super::{KvPool, KvPoolConfig, KvStep, Rows, Step, check_steps};
use crate::error::{ensure_shape, or_panic};
use crate::stream::Stream;
use crate::{SparseMultiHeadAttention, SparseTransformer, TransformerError};

impl SparseTransformer {
    /// An empty pool for [`Self::forward_pool`].
    ///
    /// # Errors
    /// As [`KvPool::for_attention`].
    pub fn new_pool(&self, config: &KvPoolConfig) -> Result<KvPool, TransformerError> {
        KvPool::for_layers(&self.attentions(), Some(self.context()), config)
    }

    /// Logits for new tokens of sequences of a pool, which may have unequal lengths and unequally many new tokens.
    ///
    /// Feeding sequences in pieces gives what [`Self::forward`] gives for the whole; with patterns that are not causal pieces must end where every block's
    /// pattern allows a boundary. A sequence's first tokens are read with the planned kernels if all of the batch are new to the pool, later ones attend to the
    /// pages where they are. Where the pattern leaves out keys that are live, as a strided one does, or scores have ALiBi or a relative bias,
    /// the slots that are read are gathered first. After an error the pool is as it was. Call it on [`Module::valid`](burn::module::Module::valid)'s copy.
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_sparse_transformer::{Factorization, Pattern, SparseTransformerConfig};
    /// use burn_sparse_transformer::pool::{KvPoolConfig, KvStep};
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
    /// # Ok::<(), burn_sparse_transformer::TransformerError>(())
    /// ```
    ///
    /// # Shapes
    /// - `tokens`: `[batch, seq]`; of entry `b` the first `steps[b].tokens` count, and all are tokens of the vocabulary
    /// - output: `[batch, seq, vocab_size]`, with numbers of no meaning in the other rows
    ///
    /// # Panics
    /// With the text of [`Self::try_forward_pool`]'s error.
    #[track_caller]
    pub fn forward_pool(
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
    /// As [`SparseMultiHeadAttention::try_forward_pool`].
    pub fn try_forward_pool(
        &self,
        tokens: Tensor<2, Int>,
        steps: &[KvStep],
        pool: &mut KvPool,
    ) -> Result<Tensor<3>, TransformerError> {
        let x = self.pooled(tokens, steps, pool, false)?;
        self.logits(Stream::new(x))
    }

    /// [`Self::forward_pool`] for the last tokens of sequences, which may end anywhere.
    ///
    /// # Panics
    /// With the text of [`Self::try_forward_pool_end`]'s error.
    #[track_caller]
    pub fn forward_pool_end(
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
    /// As [`Self::try_forward_pool`].
    pub fn try_forward_pool_end(
        &self,
        tokens: Tensor<2, Int>,
        steps: &[KvStep],
        pool: &mut KvPool,
    ) -> Result<Tensor<3>, TransformerError> {
        let x = self.pooled(tokens, steps, pool, true)?;
        self.logits(Stream::new(x))
    }

    /// [`Self::forward_pool`], of which only the logits behind each sequence's last token are computed.
    ///
    /// # Shapes
    /// - output: `[batch, vocab_size]`
    ///
    /// # Errors
    /// As [`Self::forward_pool`].
    pub fn next_logits(
        &self,
        tokens: Tensor<2, Int>,
        steps: &[KvStep],
        pool: &mut KvPool,
    ) -> Result<Tensor<2>, TransformerError> {
        let x = self.pooled(tokens, steps, pool, false)?;
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
        let logits = self.logits(Stream::new(x))?;
        let [_, _, vocab] = logits.dims();
        Ok(logits.reshape([batch, vocab]))
    }

    fn pooled(
        &self,
        tokens: Tensor<2, Int>,
        steps: &[KvStep],
        pool: &mut KvPool,
        last: bool,
    ) -> Result<Tensor<3>, TransformerError> {
        ensure_shape("tokens", tokens.dims(), [None, None], ["batch", "seq"])?;
        let [batch, seq] = tokens.dims();
        check_steps(steps, batch)?;
        pool.check_layers(&self.attentions(), &self.output.weight.device())?;
        let step = pool.begin(steps, seq, last)?;
        let stream = self.pass(tokens, &step, pool);
        let stream = stream.and_then(|stream| pool.settle(steps).map(|()| stream));
        if stream.is_err() {
            pool.take_back(step);
        }
        stream
    }

    /// The residual stream of a step's rows.
    pub(super) fn pass(
        &self,
        tokens: Tensor<2, Int>,
        step: &Step,
        pool: &mut KvPool,
    ) -> Result<Tensor<3>, TransformerError> {
        let mut stream = Stream::new(self.embed_rows(tokens, &step.rows)?);
        for (layer, block) in self.blocks.iter().enumerate() {
            stream = block.pooled(stream, pool, step, layer)?;
        }
        stream.finish()
    }

    /// `H_0` of tokens at their positions.
    fn embed_rows(
        &self,
        tokens: Tensor<2, Int>,
        rows: &Rows,
    ) -> Result<Tensor<3>, TransformerError> {
        if let Some(start) = rows.start {
            return self.embed(tokens, start);
        }
        let device = tokens.device();
        let embedded = self.embed_tokens(tokens)?;
        let Some(positions) = &self.position_embedding else {
            return Ok(embedded);
        };
        let dims = embedded.dims();
        if let Some([row, column]) = &rows.places {
            let places = positions.at(row.clone(), column.clone());
            return Ok(embedded + places.reshape(dims));
        }
        let width = positions.width();
        let count = rows.listed.len();
        let place = |of: fn(usize, usize) -> usize| {
            let places = rows
                .listed
                .iter()
                .map(|&position| of(position, width) as i32);
            ints(places.collect(), [count], &device)
        };
        let places = positions.at(place(|p, width| p / width), place(|p, width| p % width));
        Ok(embedded + places.reshape(dims))
    }

    pub(super) fn attentions(&self) -> Vec<&SparseMultiHeadAttention> {
        self.blocks.iter().map(|block| &block.mha).collect()
    }
}
