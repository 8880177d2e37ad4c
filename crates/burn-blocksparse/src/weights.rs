//! The attention weights in block-sparse form.

use blocksparse::BlockLayout;
use burn::tensor::{Bool, Tensor, TensorData};

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

/// Attention weights over the kept blocks of a layout.
///
/// Blocks come head by head, row by row, key blocks ascending; pairs that are not computed are 0.
#[derive(Clone, Debug)]
pub struct BlockSparseWeights {
    values: Tensor<4>,
    layout: BlockLayout,
}

impl BlockSparseWeights {
    pub(crate) fn new(values: Tensor<4>, layout: BlockLayout) -> Self {
        Self { values, layout }
    }

    /// `[batch, blocks, block_size, block_size]`, in f32 (f64 for f64 inputs).
    pub fn values(&self) -> Tensor<4> {
        self.values.clone()
    }

    /// The layout whose blocks these are.
    pub fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    /// The weights as `[batch, heads, seq_q, seq_kv]`: O(n²) memory, for plots and tests.
    pub fn to_dense(&self) -> Tensor<4> {
        let layout = &self.layout;
        let [batch, _, b, _] = self.values.dims();
        let (heads, seq_q, seq_kv) = (layout.heads(), layout.seq_q(), layout.seq_kv());
        let device = self.values.device();
        let blocks = shape(layout, 1)[1];
        // For every dense element, its place among the stored values; masked elements get place 0.
        let mut places = vec![0i64; batch * heads * seq_q * seq_kv];
        let mut absent = vec![true; places.len()];
        for entry in 0..batch {
            let offsets = head_offsets(layout, entry);
            for (head, offset) in offsets[..heads].iter().enumerate() {
                let pattern = layout.pattern_of(entry, head);
                for i in 0..seq_q {
                    let row = layout.row(pattern, i / b);
                    let first = entry * blocks + offset + layout.row_offsets(pattern)[i / b];
                    for (k, kept) in row.iter().enumerate() {
                        let j0 = kept.block as usize * b;
                        for j in j0..(j0 + b).min(seq_kv) {
                            let at = ((entry * heads + head) * seq_q + i) * seq_kv + j;
                            places[at] = (((first + k) * b + i % b) * b + j - j0) as i64;
                            absent[at] = false;
                        }
                    }
                }
            }
        }
        let count = places.len();
        let shape = [batch, heads, seq_q, seq_kv];
        if blocks == 0 {
            return Tensor::zeros(shape, (&device, self.values.dtype()));
        }
        let places =
            Tensor::<1, burn::tensor::Int>::from_data(TensorData::new(places, [count]), &device);
        let absent = Tensor::<4, Bool>::from_data(TensorData::new(absent, shape), &device);
        self.values
            .clone()
            .reshape([batch * blocks * b * b])
            .select(0, places)
            .reshape(shape)
            .mask_fill(absent, 0.0)
    }
}
