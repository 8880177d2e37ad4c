//! Values in block-sparse form: attention weights, and what operators make of them.

use blocksparse::BlockLayout;
use burn::tensor::{Tensor, TensorData};

/// Shape of the stored weights: `[batch, blocks, block_size, block_size]`. A per-batch layout has as many
/// blocks as its fullest batch entry; the others' last blocks are zero.
pub(crate) fn shape(layout: &BlockLayout, batch: usize) -> [usize; 4] {
    let b = layout.block_size();
    let blocks = (0..layout.batch().unwrap_or(1))
        .map(|entry| head_offsets(layout, entry)[layout.heads()])
        .max()
        .unwrap_or(0);
    [batch, blocks, b, b]
}

/// Index of each head's first block among the blocks of a batch entry, and their number: `[heads + 1]`.
pub(crate) fn head_offsets(layout: &BlockLayout, batch: usize) -> Vec<usize> {
    let mut offsets = vec![0];
    for head in 0..layout.heads() {
        let blocks = layout.pattern_blocks(layout.pattern_of(batch, head));
        offsets.push(offsets[head] + blocks);
    }
    offsets
}

/// A value for each pair of the kept blocks of a layout: the weights of
/// [`SparseAttentionCall::weights`](crate::SparseAttentionCall::weights), or what the operators below make.
///
/// Blocks come head by head, row by row, key blocks ascending; masked pairs are 0.
#[derive(Clone, Debug)]
pub struct BlockSparseTensor {
    values: Tensor<4>,
    layout: BlockLayout,
}

impl BlockSparseTensor {
    pub(crate) fn new(values: Tensor<4>, layout: BlockLayout) -> Self {
        Self { values, layout }
    }

    /// `[batch, blocks, block_size, block_size]`, in f32 or f64.
    pub fn values(&self) -> Tensor<4> {
        self.values.clone()
    }

    /// The layout whose blocks these are.
    pub fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    pub(crate) fn into_values(self) -> (Tensor<4>, BlockLayout) {
        (self.values, self.layout)
    }

    /// The values as `[batch, heads, seq_q, seq_kv]`, 0 where nothing is retained: O(n²) memory, for plots and tests.
    pub fn to_dense(&self) -> Tensor<4> {
        let layout = &self.layout;
        let [batch, stored, b, _] = self.values.dims();
        let (heads, q_blocks, kv_blocks) = (layout.heads(), layout.q_blocks(), layout.kv_blocks());
        let device = self.values.device();
        // For every block of the dense tensor its place among the stored ones, or that of a block of zeros.
        let absent = batch * stored;
        let mut places = vec![absent as i32; batch * heads * q_blocks * kv_blocks];
        for entry in 0..batch {
            let offsets = head_offsets(layout, entry);
            for (head, offset) in offsets[..heads].iter().enumerate() {
                let pattern = layout.pattern_of(entry, head);
                for q_block in 0..q_blocks {
                    let first = entry * stored + offset + layout.row_offsets(pattern)[q_block];
                    let row = ((entry * heads + head) * q_blocks + q_block) * kv_blocks;
                    for (place, kept) in (first..).zip(layout.row(pattern, q_block)) {
                        places[row + kept.block as usize] = place as i32;
                    }
                }
            }
        }
        let zeros = Tensor::zeros([1, b, b], (&device, self.values.dtype()));
        let blocks = match absent {
            0 => zeros,
            _ => Tensor::cat(vec![self.values().reshape([absent, b, b]), zeros], 0),
        };
        crate::graph::recording::expect_no_upload("the places of stored blocks");
        let places = TensorData::new(places, [batch * heads * q_blocks * kv_blocks]);
        blocks
            .select(0, Tensor::from_data(places, &device))
            .reshape([batch * heads, q_blocks, kv_blocks, b, b])
            .permute([0, 1, 3, 2, 4])
            .reshape([batch, heads, q_blocks * b, kv_blocks * b])
            .slice([0..batch, 0..heads, 0..layout.seq_q(), 0..layout.seq_kv()])
    }
}
