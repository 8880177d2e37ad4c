//! Values in block-sparse form: attention weights, and results of the block-sparse operators.

use blocksparse::BlockLayout;
use burn::tensor::Tensor;

/// Returns the shape of the stored weights: `[batch, blocks, block_size, block_size]`. A per-batch layout has as many blocks as its fullest batch entry;
/// surplus blocks of the others are zero.
pub(crate) fn shape(layout: &BlockLayout, batch: usize) -> [usize; 4] {
    let b = layout.block_size();
    let blocks = (0..layout.batch().unwrap_or(1))
        .map(|entry| head_offsets(layout, entry)[layout.heads()])
        .max()
        .unwrap_or(0);
    [batch, blocks, b, b]
}

/// Returns the index of each head's first block within a batch entry, and the total number: `[heads + 1]`.
pub(crate) fn head_offsets(layout: &BlockLayout, batch: usize) -> Vec<usize> {
    let mut offsets = vec![0];
    for head in 0..layout.heads() {
        let blocks = layout.pattern_blocks(layout.pattern_of(batch, head));
        offsets.push(offsets[head] + blocks);
    }
    offsets
}

/// A value for each pair of the kept blocks of a layout: the weights of
/// [`SparseAttentionCall::weights`](crate::SparseAttentionCall::weights), or results of the operators below.
///
/// Blocks are ordered by head, block row and key block. Masked pairs are 0.
#[derive(Clone, Debug)]
pub struct BlockSparseTensor {
    values: Tensor<4>,
    layout: BlockLayout,
}

impl BlockSparseTensor {
    pub(crate) fn new(values: Tensor<4>, layout: BlockLayout) -> Self {
        Self { values, layout }
    }

    /// Returns the values, `[batch, blocks, block_size, block_size]`, in f32 or f64.
    pub fn values(&self) -> Tensor<4> {
        self.values.clone()
    }

    /// Returns the layout of the blocks.
    pub fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    pub(crate) fn into_values(self) -> (Tensor<4>, BlockLayout) {
        (self.values, self.layout)
    }
}
