//! Layouts that are built on the device: a tensor chooses the blocks, and nothing is read back.

pub mod counts;
mod keys;
pub mod ops;
mod positions;
mod read;

use std::fmt;
use std::sync::{Arc, OnceLock};

use blocksparse::{BlockLayout, BlockSource, DeviceChoice, LayoutShape, Rule};
use burn::tensor::Bool;
use burn::tensor::kind::Basic;

use crate::base::prelude::*;
use crate::base::values::DynamicBlocks;
use crate::choice::TopKOptions;

/// Options of a [`DeviceLayout`] besides the tensor that chooses its blocks. Build them from [`new`](Self::new).
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct DeviceLayoutOptions {
    /// Sizes of the layout.
    pub shape: LayoutShape,
    /// True if queries see no later keys, including within chosen blocks. The last query is aligned with the last key, as in
    /// [`Pattern::causal`](crate::Pattern::causal).
    pub causal: bool,
}

impl DeviceLayoutOptions {
    /// Creates options for a layout of these sizes, not causal.
    pub fn new(shape: LayoutShape) -> Self {
        Self {
            shape,
            causal: false,
        }
    }

    blocksparse::setters! {
        /// Sets whether queries see no later keys.
        causal: bool,
    }
}

/// A layout whose blocks a tensor on a device chooses, for patterns that depend on content. Query `i` attends to key `j` if the block of
/// the pair is chosen and, in a causal layout, `j ≤ i + seq_kv − seq_q`.
///
/// [`sparse_attention`](crate::sparse_attention) takes it like a [`BlockLayout`]. If kernels run, the launch plans by rows and by columns are computed
/// from the tensor on the device, without host synchronisation, once per layout. Use one layout for all calls with the same choice. Cloning is cheap.
/// On CPU backends the first call converts the tensor to a [`BlockLayout`].
///
/// A block row may be empty; its queries give zeros. The contents of the tensor cannot be checked, but any contents are safe: see the constructors. Launch
/// plans reserve memory for the largest possible number of blocks, about 8 bytes for each pair of blocks of a mask, and for each index.
///
/// ```
/// use burn::tensor::{Bool, Device, Distribution, Tensor};
/// use burn_blocksparse::{DeviceLayout, LayoutShape, sparse_attention};
/// use burn_blocksparse::layout::DeviceLayoutOptions;
///
/// let device = Device::flex();
/// let [q, k, v] = [(); 3]
///     .map(|_| Tensor::<4>::random([2, 4, 256, 16], Distribution::Default, &device));
/// // Half of the blocks, others for each batch entry and head.
/// let scores = Tensor::<4>::random([2, 4, 8, 8], Distribution::Default, &device);
/// let mask = scores.greater_elem(0.5);
/// let shape = LayoutShape { heads: 4, seq_q: 256, seq_kv: 256, block_size: 32 };
/// let options = DeviceLayoutOptions::new(shape).causal(true);
/// let layout = DeviceLayout::from_block_mask(mask, options)?;
/// let out = sparse_attention(q, k, v, &layout)?;
/// assert_eq!(out.dims(), [2, 4, 256, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct DeviceLayout {
    /// Sizes and the rule of the choice. Launch plans are attached to it.
    pub(crate) frame: BlockLayout,
    pub(crate) causal: bool,
    /// The tensor that chooses, on the device without autodiff.
    chooser: DynamicBlocks<Dispatch>,
    pub(crate) host: Arc<OnceLock<BlockLayout>>,
}

/// Threads may share it, like a [`BlockLayout`].
const _: () = {
    const fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<DeviceLayout>();
};

/// Expands the tensor that chooses to `patterns` batch entries and heads, where adjacent heads shared an entry. Position tensors already have one entry per
/// head.
fn expanded(
    chooser: DynamicBlocks<Dispatch>,
    by: BlockSource,
    patterns: [usize; 2],
) -> DynamicBlocks<Dispatch> {
    match chooser {
        _ if matches!(by, BlockSource::Positions(_) | BlockSource::OwnPositions(_)) => chooser,
        DynamicBlocks::Host => chooser,
        DynamicBlocks::Bools(mask) => {
            let mask = Tensor::<4, Bool>::from_dispatch(mask);
            DynamicBlocks::Bools(repeated(mask, patterns).into_dispatch())
        }
        DynamicBlocks::Ints(numbers) => {
            let numbers = Tensor::<4, Int>::from_dispatch(numbers);
            DynamicBlocks::Ints(repeated(numbers, patterns).into_dispatch())
        }
        DynamicBlocks::Floats(scores) => {
            let scores = Tensor::<4>::from_dispatch(scores);
            DynamicBlocks::Floats(repeated(scores, patterns).into_dispatch())
        }
    }
}

fn repeated<K: Basic>(x: Tensor<4, K>, [batch, heads]: [usize; 2]) -> Tensor<4, K> {
    let [own, patterns, rows, blocks] = x.dims();
    if [own, patterns] == [batch, heads] {
        return x;
    }
    let group = heads / patterns;
    let x = x.reshape([own, patterns, 1, rows * blocks]);
    let x = x.expand([batch, patterns, group, rows * blocks]);
    x.reshape([batch, heads, rows, blocks])
}

impl DeviceLayout {
    /// Creates a layout of the blocks for which `mask` is true.
    ///
    /// # Shapes
    /// - `mask`: `[batch or 1, a divisor of heads, q_blocks, kv_blocks]`; equal groups of adjacent heads share an entry
    ///
    /// # Errors
    /// [`OpError`] if the options' sizes are out of range, or the mask does not fit them.
    pub fn from_block_mask(
        mask: Tensor<4, Bool>,
        options: DeviceLayoutOptions,
    ) -> Result<Self, OpError> {
        served(&mask.device().without_autodiff())?;
        options.shape.validate()?;
        let names = ["mask's batch", "mask's heads", "mask's q_blocks"];
        let columns = Some("mask's kv_blocks");
        let patterns = rows(names, columns, mask.dims(), &options.shape)?;
        let chooser = DynamicBlocks::Bools(mask.without_autodiff().into_dispatch());
        Self::new("a mask", options, patterns, BlockSource::Mask, chooser)
    }

    /// Creates a layout of the first `counts` blocks of each row of `indices`. Indices that are negative or beyond the key blocks are ignored, and duplicates
    /// count once. Counts are clamped to the row.
    ///
    /// # Shapes
    /// - `indices`: `[batch or 1, a divisor of heads, q_blocks, most]`, of key blocks
    /// - `counts`: `[batch or 1, a divisor of heads, q_blocks]`, with the same batch and heads
    ///
    /// # Errors
    /// [`OpError`] if the options' sizes are out of range, the tensors do not fit them or each other, or `most` is 0.
    pub fn from_block_indices(
        indices: Tensor<4, Int>,
        counts: Tensor<3, Int>,
        options: DeviceLayoutOptions,
    ) -> Result<Self, OpError> {
        served(&indices.device().without_autodiff())?;
        let shape = options.shape;
        shape.validate()?;
        let dims = indices.dims();
        let names = ["indices' batch", "indices' heads", "indices' q_blocks"];
        let patterns = rows(names, None, dims, &shape)?;
        let [batch, heads, q_blocks, most] = dims;
        OpError::ensure_positive("indices' width", most)?;
        let own = [batch, heads, q_blocks];
        OpError::expect_same("counts' shape", own, "the indices'", counts.dims())?;
        let (indices, counts) = (indices.without_autodiff(), counts.without_autodiff());
        let (device, other) = (indices.device(), counts.device());
        OpError::expect_same("counts' device", device.clone(), "the indices'", other)?;
        // Invalid entries become −1 before the integers are narrowed.
        let kv_blocks = shape.seq_kv.div_ceil(shape.block_size) as i64;
        let places = Tensor::<1, Int>::arange(0..most as i64, &device).cast(counts.dtype());
        let places = places.reshape([1, 1, 1, most]).expand(dims);
        let beyond = places.greater_equal(counts.unsqueeze_dim::<4>(3).expand(dims));
        let none = indices.clone().greater_equal_elem(kv_blocks);
        let none = none.bool_or(indices.clone().lower_elem(0)).bool_or(beyond);
        let indices = indices.mask_fill(none, -1).cast(DType::I32);
        let by = BlockSource::Indices { most };
        let chooser = DynamicBlocks::Ints(indices.into_dispatch());
        Self::new("indices", options, patterns, by, chooser)
    }

    /// Creates a layout of the highest-scoring blocks of each block row, selected by `options` (whose block size must be that of the shape). Ties go to the
    /// earlier block, and NaN is the lowest. Scores are compared in f32. `top_k_blocks_on_device` computes scores from queries and keys.
    ///
    /// The choice is not differentiable, and no gradient reaches the scores.
    ///
    /// # Shapes
    /// - `scores`: `[batch or 1, a divisor of heads, q_blocks, kv_blocks]`; equal groups of adjacent heads share an entry
    ///
    /// # Errors
    /// [`OpError`] if a size or an option is out of range, or the scores do not fit the shape.
    pub fn from_block_scores(
        scores: Tensor<4>,
        shape: LayoutShape,
        options: TopKOptions,
    ) -> Result<Self, OpError> {
        served(&scores.device().without_autodiff())?;
        shape.validate()?;
        expect("options.block_size", shape.block_size, options.block_size)?;
        OpError::ensure_positive("options.k", options.k)?;
        let name = format!("the top {}", options.k);
        let chosen = DeviceLayoutOptions::new(shape).causal(options.causal);
        Self::of_scores(name, scores, options.rule(), chosen)
    }

    /// Creates a layout of the blocks that a [`Rule`] selects by the scores of each block row. Scores are compared and weighted in f32.
    ///
    /// The choice is not differentiable, and no gradient reaches the scores.
    ///
    /// # Shapes
    /// - `scores`: `[batch or 1, a divisor of heads, q_blocks, kv_blocks]`; equal groups of adjacent heads share an entry
    ///
    /// # Errors
    /// [`OpError`] if a size or a number of the rule is out of range, or the scores do not fit the shape.
    pub fn from_scores(
        scores: Tensor<4>,
        rule: Rule,
        options: DeviceLayoutOptions,
    ) -> Result<Self, OpError> {
        served(&scores.device().without_autodiff())?;
        options.shape.validate()?;
        rule.check()?;
        Self::of_scores(format!("{:?}", rule.keep), scores, rule, options)
    }

    fn of_scores(
        name: String,
        scores: Tensor<4>,
        rule: Rule,
        options: DeviceLayoutOptions,
    ) -> Result<Self, OpError> {
        let names = ["scores' batch", "scores' heads", "scores' q_blocks"];
        let columns = Some("scores' kv_blocks");
        let patterns = rows(names, columns, scores.dims(), &options.shape)?;
        let scores = scores.detach().without_autodiff();
        // A cast to the same dtype would still be an operation.
        let scores = match scores.dtype() {
            DType::F32 => scores,
            _ => scores.cast(DType::F32),
        };
        let chooser = DynamicBlocks::Floats(scores.into_dispatch());
        Self::new(&name, options, patterns, BlockSource::Scores(rule), chooser)
    }

    fn new(
        chosen_by: &str,
        options: DeviceLayoutOptions,
        patterns: [usize; 2],
        by: BlockSource,
        chooser: DynamicBlocks<Dispatch>,
    ) -> Result<Self, OpError> {
        let DeviceLayoutOptions { shape, causal } = options;
        let (block, order) = (shape.block_size, if causal { ", causal" } else { "" });
        let name = format!("blocks of {block} chosen on the device by {chosen_by}{order}");
        let choice = DeviceChoice {
            patterns,
            causal,
            by,
        };
        Ok(Self {
            frame: BlockLayout::on_device(name, shape, choice)?,
            causal,
            chooser,
            host: Arc::default(),
        })
    }

    /// Restricts the choice to the blocks of `layout`, which is on the host. A rule sees no other blocks, not even forced ones, other chosen blocks are
    /// ignored, and a chosen block keeps the pairs that it has in `layout`. So `layout` alone determines which keys queries see, instead of
    /// [`DeviceLayoutOptions::causal`]: windows, documents, padding and anything else that a layout can express.
    ///
    /// If kernels run, the launch plans of `layout` are uploaded once, and the plans of the chosen blocks are built from their entries on the device. Use one
    /// layout for all calls.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_blocksparse::{BlockLayout, DeviceLayout, LayoutShape, Pattern};
    /// use burn_blocksparse::layout::DeviceLayoutOptions;
    /// use burn_blocksparse::layout::TopKOptions;
    ///
    /// let shape = LayoutShape { heads: 4, seq_q: 256, seq_kv: 256, block_size: 32 };
    /// let near = BlockLayout::new(&Pattern::local(100), shape)?;
    /// let scores = Tensor::<4>::random([1, 4, 8, 8], Distribution::Default, &Device::flex());
    /// // The best two blocks of those that hold one of the last 100 keys, and of those the last 100 keys.
    /// let best = DeviceLayout::from_block_scores(scores, shape, TopKOptions::new(32, 2))?;
    /// let best = best.masked_by(&near)?.to_host()?;
    /// assert!((0..256).all(|i| (0..256).all(|j| !best.to_dense(0)[i][j] || near.to_dense(0)[i][j])));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`OpError`] if sizes or batches differ, or the choice is already restricted to a layout.
    pub fn masked_by(&self, layout: &BlockLayout) -> Result<Self, OpError> {
        let (expected, got) = (*self.shape(), *layout.shape());
        OpError::expect_same("layout's shape", expected, "the choice's", got)?;
        blocksparse::ensure! { OpError; self.frame.within().is_none() => "layout", "given once", layout.name(); }
        let choice = *self.choice();
        let patterns = layout.patterns_within(choice.patterns)?;
        let name = format!("{}, within {}", self.frame.name(), layout.name());
        let chooser = expanded(self.chooser(), choice.by, patterns);
        let expanded = Self::within(name, patterns, choice.by, layout, chooser)?;
        Ok(Self {
            causal: self.causal,
            ..expanded
        })
    }

    /// Creates a layout within a layout on the host.
    fn within(
        name: String,
        patterns: [usize; 2],
        by: BlockSource,
        places: &BlockLayout,
        chooser: DynamicBlocks<Dispatch>,
    ) -> Result<Self, OpError> {
        let choice = DeviceChoice {
            patterns,
            causal: false,
            by,
        };
        Ok(Self {
            frame: BlockLayout::on_device_within(name, choice, places)?,
            causal: false,
            chooser,
            host: Arc::default(),
        })
    }

    /// Returns the layout's sizes.
    pub fn shape(&self) -> &LayoutShape {
        self.frame.shape()
    }

    /// Returns the batch size of a per-batch layout; `None` if the layout fits any batch.
    pub fn batch(&self) -> Option<usize> {
        self.frame.batch()
    }

    /// Returns whether queries see no later keys, as set in the options. [Within](Self::masked_by) another layout, that layout determines which keys they see.
    pub fn is_causal(&self) -> bool {
        self.causal
    }

    /// Returns the device of the tensor that chooses, without autodiff.
    pub fn device(&self) -> Device {
        let device = match &self.chooser {
            DynamicBlocks::Host => unreachable!("a tensor chooses"),
            DynamicBlocks::Bools(tensor) => tensor.device(),
            DynamicBlocks::Ints(tensor) => tensor.device(),
            DynamicBlocks::Floats(tensor) => tensor.device(),
        };
        Device::new(device)
    }

    /// Returns the same layout on the host, for inspection. **Waits for the device** the first time.
    ///
    /// # Errors
    /// [`OpError`] if the tensor cannot be read.
    pub fn to_host(&self) -> Result<BlockLayout, OpError> {
        if let Some(known) = self.host.get() {
            return Ok(known.clone());
        }
        let read = self.read()?;
        Ok(self.host.get_or_init(|| read).clone())
    }

    #[doc(hidden)]
    pub fn choice(&self) -> &DeviceChoice {
        let choice = self.frame.device_choice();
        choice.expect("the frame of a layout on a device")
    }

    /// Returns a layout with the sizes and no blocks.
    #[doc(hidden)]
    pub fn frame(&self) -> &BlockLayout {
        &self.frame
    }

    /// Returns the tensor that chooses, for a call.
    #[doc(hidden)]
    pub fn chooser(&self) -> DynamicBlocks<Dispatch> {
        self.chooser.clone()
    }
}

pub(crate) fn expect(argument: &'static str, expected: usize, got: usize) -> Result<(), OpError> {
    OpError::expect_same(argument, expected, "the shape's", got)
}

/// Checks a tensor with rows of query blocks and returns its batch entries and heads. Unless it holds indices, it must have one column per key block.
fn rows(
    [batches, of_heads, of_rows]: [&'static str; 3],
    of_columns: Option<&'static str>,
    [batch, heads, q_blocks, width]: [usize; 4],
    shape: &LayoutShape,
) -> Result<[usize; 2], OpError> {
    OpError::ensure_positive(batches, batch)?;
    blocksparse::ensure! {
        OpError;
        heads != 0 && shape.heads.is_multiple_of(heads) => of_heads, format!("a divisor of the {} heads of the shape", shape.heads), heads;
    }
    expect(of_rows, shape.seq_q.div_ceil(shape.block_size), q_blocks)?;
    if let Some(of_columns) = of_columns {
        expect(of_columns, shape.seq_kv.div_ceil(shape.block_size), width)?;
    }
    Ok([batch, heads])
}

impl fmt::Debug for DeviceLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceLayout")
            .field("name", &self.frame.name())
            .field("shape", self.shape())
            .field("batch", &self.batch())
            .field("device", &self.device())
            .finish()
    }
}
