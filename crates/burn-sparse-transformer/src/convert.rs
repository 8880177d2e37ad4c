//! Conversion of burn-nn's modules: the same weights, a pattern instead of masks.

use burn::nn::attention::MultiHeadAttention;
use burn_blocksparse::Pattern;

use crate::error::{Result, ensure_shape};
use crate::layouts::Layouts;
use crate::{SparseMultiHeadAttention, SparseMultiHeadAttentionConfig};

impl SparseMultiHeadAttention {
    /// Converts burn-nn's attention. The parameters of `mha` are shared and keep their ids, so that an optimizer's state for them remains valid. With
    /// [`Pattern::dense`] the output is the same up to rounding. Dropout has the same probability, but its masks are functions of seeds
    /// ([`SparseMhaInput::dropout_seed`](crate::SparseMhaInput::dropout_seed)).
    ///
    /// # Errors
    /// If `mha`'s projections are not square, or the pattern does not match its heads and the block size.
    ///
    /// ```
    /// use burn::nn::attention::MultiHeadAttentionConfig;
    /// use burn::tensor::Device;
    /// use burn_sparse_transformer::{Pattern, SparseMultiHeadAttention};
    ///
    /// let trained = MultiHeadAttentionConfig::new(64, 4).init(&Device::flex());
    /// let same = SparseMultiHeadAttention::from_dense(&trained, Pattern::dense(), 32)?;
    /// let sparse = same.with_pattern(Pattern::window(128), 32)?;
    /// # Ok::<(), burn_sparse_transformer::TransformerError>(())
    /// ```
    pub fn from_dense(
        mha: &MultiHeadAttention,
        pattern: Pattern,
        block_size: usize,
    ) -> Result<Self> {
        let layouts = Layouts::new(pattern, mha.n_heads, block_size)?;
        Self::from_dense_with(mha, layouts)
    }

    /// [`Self::from_dense`] with layouts that other layers may share.
    pub(crate) fn from_dense_with(mha: &MultiHeadAttention, layouts: Layouts) -> Result<Self> {
        let d_model = mha.d_model;
        for (name, linear) in [
            ("query", &mha.query),
            ("key", &mha.key),
            ("value", &mha.value),
            ("output", &mha.output),
        ] {
            let expected = [Some(d_model); 2];
            let dims = linear.weight.lazy_shape().dims();
            ensure_shape(name, dims, expected, ["d_model"; 2])?;
        }
        let pattern = layouts.pattern().clone();
        let config = SparseMultiHeadAttentionConfig::new(d_model, mha.n_heads, pattern)
            .with_block_size(layouts.block_size())
            .with_quiet_softmax(mha.quiet_softmax)
            .with_dropout(mha.dropout.prob);
        let mut sparse = config.init_with(layouts, &mha.query.weight.device())?;
        sparse.query = mha.query.clone();
        sparse.key = mha.key.clone();
        sparse.value = mha.value.clone();
        sparse.output = mha.output.clone();
        sparse.dropout = mha.dropout.clone();
        Ok(sparse)
    }

    /// Returns the same module with another pattern.
    ///
    /// # Errors
    /// If the pattern does not match the heads, the block size or the module's selection.
    pub fn with_pattern(self, pattern: Pattern, block_size: usize) -> Result<Self> {
        self.kind().check_pattern(&pattern)?;
        let layouts = Layouts::new(pattern, self.pattern_heads(), block_size)?;
        Ok(self.with_layouts(layouts))
    }

    pub(crate) fn with_layouts(mut self, layouts: Layouts) -> Self {
        self.layouts = layouts;
        self
    }
}
