//! [`WeightLayout`]: the kept blocks of a weight.

mod build;
#[cfg(feature = "draw")]
mod draw;
mod graphs;
mod numbers;
mod pattern;
mod serial;
mod text;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::layout::attachments::Attachments;

pub use pattern::WeightPattern;

/// Valid block sizes of a weight.
pub const WEIGHT_BLOCK_SIZES: [usize; 4] = [16, 32, 64, 128];

/// The kept blocks of a weight `[inputs, outputs]` that is cut into `block × block` blocks. The other blocks are zero and are neither stored nor
/// multiplied (Gray, Radford, Kingma, "GPU Kernels for Block-Sparse Weights", 2017).
///
/// The kept blocks are listed by output block, then by input block. A block's index in the list is its index in the weight tensor
/// `[blocks, block, block]`. Within a block, inputs run along the first axis and outputs along the second, as in the dense weight. Below, six of
/// the twelve blocks of a weight `[48, 64]` in blocks of 16, and their indices.
///
/// ```text
///               output block          by output: output_offsets 0 1 3 4 6
///                0  1  2  3                      input_blocks   0 0 1 2 0 2
/// input block 0  0  1  .  4           by input:  input_offsets  0 3 4 6
///             1  .  2  .  .                      input_order    0 1 4 2 3 5
///             2  .  .  3  5                      … its outputs  0 1 3 1 2 3
/// ```
///
/// ```
/// use blocksparse::WeightLayout;
///
/// let layout = WeightLayout::random([1024, 4096], 64, 0.25, 1)?;
/// assert_eq!(layout.to_string(), "random(16×64 blocks of 64, 25.0 %, seed 1)");
/// assert_eq!(layout.len(), 256);
/// // The blocks that make the first 64 outputs.
/// let blocks = layout.blocks_of_output(0);
/// assert!(blocks.clone().all(|index| layout.output_blocks()[index] == 0));
/// # Ok::<(), blocksparse::LayoutError>(())
/// ```
///
/// Cloning is cheap because the data is shared. Layouts compare by the blocks they keep, draw themselves with `{:#}`, and serialize with serde.
/// Deserialization checks everything.
#[derive(Clone, Serialize, Deserialize)]
#[serde(
    try_from = "crate::weights::serial::WeightLayoutData",
    into = "crate::weights::serial::WeightLayoutData"
)]
pub struct WeightLayout {
    inner: Arc<Inner>,
}

struct Inner {
    /// Name of the constructor, as it prints.
    name: String,
    seed: Option<u64>,
    block: usize,
    kept: Kept,
    attachments: Attachments,
}

/// The kept blocks, by output and by input.
struct Kept {
    in_blocks: usize,
    output_offsets: Vec<u32>,
    input_blocks: Vec<u32>,
    output_blocks: Vec<u32>,
    input_offsets: Vec<u32>,
    input_order: Vec<u32>,
    output_blocks_by_input: Vec<u32>,
}

impl Kept {
    /// Creates the lists from the kept input blocks of each output block, in ascending order.
    fn new(in_blocks: usize, by_output: &[Vec<u32>]) -> Self {
        let mut output_offsets = vec![0];
        let (mut input_blocks, mut output_blocks) = (Vec::new(), Vec::new());
        for (output, inputs) in by_output.iter().enumerate() {
            input_blocks.extend_from_slice(inputs);
            output_blocks.resize(input_blocks.len(), output as u32);
            output_offsets.push(input_blocks.len() as u32);
        }
        let mut input_offsets = vec![0; in_blocks + 1];
        for &input in &input_blocks {
            input_offsets[input as usize + 1] += 1;
        }
        for input in 0..in_blocks {
            input_offsets[input + 1] += input_offsets[input];
        }
        let mut next = input_offsets.clone();
        let mut input_order = vec![0; input_blocks.len()];
        for (index, &input) in input_blocks.iter().enumerate() {
            let place = &mut next[input as usize];
            input_order[*place as usize] = index as u32;
            *place += 1;
        }
        let outputs = input_order
            .iter()
            .map(|&index| output_blocks[index as usize]);
        Self {
            in_blocks,
            output_offsets,
            output_blocks_by_input: outputs.collect(),
            input_blocks,
            output_blocks,
            input_offsets,
            input_order,
        }
    }
}

impl WeightLayout {
    fn from_parts(name: &str, seed: Option<u64>, block: usize, kept: Kept) -> Self {
        Self {
            inner: Arc::new(Inner {
                name: name.to_owned(),
                seed,
                block,
                kept,
                attachments: Attachments::default(),
            }),
        }
    }

    /// Returns the layout's origin: the name of a [`WeightPattern`], `mask` or `magnitude`.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Returns the seed of a random layout.
    pub fn seed(&self) -> Option<u64> {
        self.inner.seed
    }

    /// Returns the side of a block.
    pub fn block(&self) -> usize {
        self.inner.block
    }

    /// Returns the number of input blocks, kept or not.
    pub fn in_blocks(&self) -> usize {
        self.inner.kept.in_blocks
    }

    /// Returns the number of output blocks, kept or not.
    pub fn out_blocks(&self) -> usize {
        self.inner.kept.output_offsets.len() - 1
    }

    /// Returns the number of rows of the weight.
    pub fn inputs(&self) -> usize {
        self.in_blocks() * self.block()
    }

    /// Returns the number of columns of the weight.
    pub fn outputs(&self) -> usize {
        self.out_blocks() * self.block()
    }

    /// Returns the number of kept blocks.
    pub fn len(&self) -> usize {
        self.inner.kept.input_blocks.len()
    }

    /// Returns whether no block is kept.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the shape of the weight tensor: `[blocks, block, block]`.
    pub fn shape(&self) -> [usize; 3] {
        [self.len(), self.block(), self.block()]
    }

    /// Returns the share of kept blocks, in `[0, 1]`.
    pub fn density(&self) -> f64 {
        self.len() as f64 / (self.in_blocks() * self.out_blocks()) as f64
    }

    /// Returns the kept blocks, `(input block, output block)`, in the order of their indices.
    pub fn kept_blocks(&self) -> impl ExactSizeIterator<Item = (u32, u32)> + Clone + '_ {
        let kept = &self.inner.kept;
        let inputs = kept.input_blocks.iter().copied();
        inputs.zip(kept.output_blocks.iter().copied())
    }

    /// Returns the number of kept blocks before each output block; `out_blocks + 1` entries.
    pub fn output_offsets(&self) -> &[u32] {
        &self.inner.kept.output_offsets
    }

    /// Returns the input block of each kept block, by index.
    pub fn input_blocks(&self) -> &[u32] {
        &self.inner.kept.input_blocks
    }

    /// Returns the output block of each kept block, by index.
    pub fn output_blocks(&self) -> &[u32] {
        &self.inner.kept.output_blocks
    }

    /// Returns the number of kept blocks before each input block, in [`input_order`](Self::input_order); `in_blocks + 1` entries.
    pub fn input_offsets(&self) -> &[u32] {
        &self.inner.kept.input_offsets
    }

    /// Returns the indices of the kept blocks, by input block, then by output block.
    pub fn input_order(&self) -> &[u32] {
        &self.inner.kept.input_order
    }

    /// Returns the output block of each entry of [`input_order`](Self::input_order).
    pub fn output_blocks_by_input(&self) -> &[u32] {
        &self.inner.kept.output_blocks_by_input
    }

    /// Returns the indices of an output block's kept blocks.
    ///
    /// # Panics
    /// If there is no such output block.
    pub fn blocks_of_output(&self, output_block: usize) -> std::ops::Range<usize> {
        let offsets = self.output_offsets();
        offsets[output_block] as usize..offsets[output_block + 1] as usize
    }

    /// Returns the index of a block, if it is kept.
    pub fn index_of(&self, input_block: usize, output_block: usize) -> Option<usize> {
        if output_block >= self.out_blocks() {
            return None;
        }
        let blocks = self.blocks_of_output(output_block);
        let inputs = &self.input_blocks()[blocks.clone()];
        let place = inputs.binary_search_by_key(&input_block, |&input| input as usize);
        place.ok().map(|place| blocks.start + place)
    }

    /// Returns whether a block is kept.
    pub fn contains(&self, input_block: usize, output_block: usize) -> bool {
        self.index_of(input_block, output_block).is_some()
    }

    /// Returns a value of a type that is made on first use, lives as long as the layout's data and is shared with its clones. Kernels store their device
    /// tables this way.
    #[doc(hidden)]
    pub fn attachment<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> Arc<T> {
        self.inner.attachments.get_or_make(make)
    }
}

/// Layouts are equal if they keep the same blocks of equal weights, however they were made.
impl PartialEq for WeightLayout {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
            || (self.block() == other.block()
                && self.in_blocks() == other.in_blocks()
                && self.output_offsets() == other.output_offsets()
                && self.input_blocks() == other.input_blocks())
    }
}

impl Eq for WeightLayout {}

impl fmt::Debug for WeightLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WeightLayout({self})")
    }
}
