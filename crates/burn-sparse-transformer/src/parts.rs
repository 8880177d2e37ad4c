//! Parts of a layer, for models and caches that combine them themselves.

use burn::module::Param;
use burn::tensor::{FloatDType, Tensor};
use burn_blocksparse::AttentionOptions;
use burn_blocksparse::layout::PaddingMask;

use crate::call::Call;
use crate::error::Result;
use crate::heads::Positions;
use crate::layouts::Request;
use crate::shared_choice::SharedChoice;
use crate::{Precision, SparseMhaCache, SparseMhaInput, SparseMultiHeadAttention};

impl SparseMultiHeadAttention {
    /// Returns the heads' outputs for `x`, `[batch, seq, d_model]`: `[batch, n_heads, seq, d_v]`, the input of [`Self::output_projection`].
    ///
    /// # Errors
    /// Those of [`Self::try_forward`].
    pub fn forward_heads(&self, x: Tensor<3>) -> Result<Tensor<4>> {
        let (seen, _) = self.context(SparseMhaInput::self_attn(x))?;
        Ok(seen.heads)
    }

    /// [`Self::forward_heads`] for new positions, which also attend to those in `cache`.
    ///
    /// # Errors
    /// Those of [`Self::try_forward_cache`].
    pub fn forward_heads_cache(
        &self,
        x: Tensor<3>,
        cache: &mut SparseMhaCache,
    ) -> Result<Tensor<4>> {
        let (seen, _) = self.cached_context(SparseMhaInput::self_attn(x), cache, false)?;
        Ok(seen.heads)
    }

    /// Returns queries, keys and values of `x`, `[batch, seq, d_model]`, by heads, normalised and rotated.
    ///
    /// # Errors
    /// If the parameters do not match `x`.
    pub fn project_heads(&self, x: Tensor<3>, positions: &Positions) -> Result<[Tensor<4>; 3]> {
        let input = SparseMhaInput::self_attn(x);
        let call = Call::at(&input, positions.clone())?;
        self.project(input, &call)
    }

    /// Applies the output projection to the heads' outputs, `[batch, n_heads, seq, d_v]`.
    ///
    /// # Errors
    /// If `heads` do not match the module.
    pub fn output_projection(&self, heads: Tensor<4>) -> Result<Tensor<3>> {
        Ok((self.precision).merged_linear(&self.output, heads)?)
    }

    /// Returns the widths of a key and of a value.
    pub fn head_widths(&self) -> [usize; 2] {
        [self.d_k(), self.d_v]
    }

    /// Returns the options of its attention. Dropout is set in each call.
    pub fn attention_options(&self) -> &AttentionOptions {
        &self.options
    }

    /// Returns the sink logits, `[n_heads]`, if there are sinks; those of the quiet softmax are 0.
    pub fn sink_logits(&self) -> Option<Tensor<1>> {
        match &self.sinks {
            None if self.quiet_softmax => {
                Some(Tensor::zeros([self.n_heads], &self.query.weight.device()))
            }
            sinks => sinks.as_ref().map(Param::val),
        }
    }

    /// Returns the precision of its products.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Returns the dtype of its products.
    pub fn product_dtype(&self) -> FloatDType {
        self.precision.dtype(self.key.weight.val().dtype())
    }

    /// Computes attention of the projected heads of whole sequences, padded to one length if `lengths` are given. Rows after a sequence's end are undefined.
    /// A layer that takes a choice reads `choice`; one that shares its own writes it.
    #[doc(hidden)]
    pub fn attend_sequences(
        &self,
        heads: [Tensor<4>; 3],
        lengths: Option<&[usize]>,
        choice: &mut Option<SharedChoice>,
    ) -> Result<Tensor<4>> {
        let [_, _, seq, _] = heads[0].dims();
        let mut request = Request::new(seq, seq);
        let (mut call, kind) = (Call::of_heads(heads[0].dtype()), self.kind());
        call.options.choice = choice.take();
        // Rows past a sequence's end are padding and take no part in its choice. Where later rows cannot affect earlier ones, no restriction is needed.
        if let Some(lengths) = lengths.filter(|_| !kind.ignores_later_rows()) {
            let entry = |&length: &usize| {
                let real: Vec<bool> = (0..seq).map(|row| row < length).collect();
                PaddingMask::default().queries(real.clone()).keys(real)
            };
            request.restrictions = lengths.iter().map(entry).collect();
        }
        let seen = self.handing_on(kind.attend(self, heads, &request, &call)?);
        *choice = seen.aside.choice;
        Ok(seen.heads)
    }

    /// Returns whether keys are chosen by content from projected heads alone.
    #[doc(hidden)]
    pub fn chooses(&self) -> bool {
        self.kind().chooses()
    }

    /// Computes [`Self::attend_sequences`] by the pattern alone, and the lse of each row, `[batch, n_heads, seq]`.
    #[doc(hidden)]
    pub fn attend_sequences_with_lse(
        &self,
        heads: [Tensor<4>; 3],
    ) -> Result<(Tensor<4>, Tensor<3>)> {
        let [_, _, seq, _] = heads[0].dims();
        let call = Call::of_heads(heads[0].dtype());
        let layout = self.layout(seq, seq)?;
        let attention = self.call_of(heads, &layout, &call);
        Ok(attention.run_with_lse()?)
    }
}
