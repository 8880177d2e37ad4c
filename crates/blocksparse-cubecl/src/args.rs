//! Kernel arguments: buffers, strides and scalars. [`buffer`] is the one place where a buffer is passed to a kernel with an unchecked length.

use std::sync::Arc;

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::call::{BiasView, Request, TableView, TensorView};
use super::error::KernelError;
use super::seeds;
use super::shared::addressing::{
    ListingLaunch, PlanPartsLaunch, PlanWordsLaunch, RowTensorLaunch, ScheduleLaunch, StridesLaunch,
};
use super::shared::biases::{BiasStridesLaunch, DistancesLaunch, ScoreBiasesLaunch};
use super::shared::distances::{TableArgs, TableArgsLaunch};
use super::shared::dropout::{DropoutArgsLaunch, MaskLaunch};
use super::shared::score::{ScoreInputsLaunch, ScoreScalarsLaunch};
use super::slices::Slice;
use super::uploaded::{self, DevicePlan};
use blocksparse::plan::Sections;
use blocksparse::{BlockLayout, Dropout, Residue, Seed};

/// The parameters of a call's scores, apart from q and k. The options set must match the request's [`ScoreKind`](super::call::ScoreKind).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ScoreOptions {
    /// Factor of the products `q · k`.
    pub scale: f64,
    /// Softcap: scores become `softcap · tanh(score / softcap)`.
    pub softcap: Option<f64>,
    /// ALiBi slopes, `[heads]`: scores get `−slope · |distance|` after the softcap.
    pub slopes: Option<Arc<[f64]>>,
    /// Dropout of attention weights.
    pub dropout: Option<Dropout>,
    /// Bias of the scores, added after the softcap.
    pub bias: Option<BiasView>,
    /// Bias of each distance, also added after the softcap.
    pub relative: Option<TableView>,
    /// Tiles are skipped if all their scores are below the largest ones of their rows (in the forward pass, those so far) by more than this.
    pub threshold: Option<f64>,
}

impl ScoreOptions {
    /// Scaled products with no other option. Set the rest field by field.
    pub fn new(scale: f64) -> Self {
        Self {
            scale,
            softcap: None,
            slopes: None,
            dropout: None,
            bias: None,
            relative: None,
            threshold: None,
        }
    }

    /// Whether scores have slopes, a bias or a table of distances.
    pub fn biased(&self) -> bool {
        self.slopes.is_some() || self.bias.is_some() || self.relative.is_some()
    }

    /// Number of elements of the bias, 0 without one.
    pub fn bias_len(&self) -> usize {
        self.bias.as_ref().map_or(0, BiasView::elements)
    }

    pub fn bias<T: LaunchArg<RuntimeArg = BufferArg>>(&self) -> ComptimeOptionArgs<T> {
        let handle = self.bias.as_ref().map(|bias| &bias.handle);
        optional(handle, self.bias_len())
    }

    /// Returns the biases that the `simt` tier adds to scores. If slopes and the table of distances are stored in the stats, they begin at element
    /// `in_stats`.
    pub fn biases<E: Float, A: Float>(
        &self,
        slopes: Option<&Handle>,
        heads: usize,
        in_stats: Option<usize>,
    ) -> ScoreBiasesLaunch<E, A> {
        let ([batch, head, row], [table_head, reach]) = (self.bias_steps(), self.table_steps());
        ScoreBiasesLaunch::new(
            optional(slopes.filter(|_| in_stats.is_none()), heads),
            self.bias(),
            match in_stats {
                Some(_) => ComptimeOptionArgs::None,
                None => self.table(),
            },
            BiasStridesLaunch::new(batch, head, row),
            DistancesLaunch::new(in_stats.unwrap_or(0), table_head, reach),
        )
    }

    /// Returns the bias's strides in elements over batch entries, heads and queries. The stride of a dimension of length 1 is 0.
    fn bias_steps(&self) -> [usize; 3] {
        let [batch, heads, rows, keys] = self.bias.as_ref().map_or([1; 4], |bias| bias.shape);
        let step = |length: usize, step: usize| if length == 1 { 0 } else { step };
        [
            step(batch, heads * rows * keys),
            step(heads, rows * keys),
            step(rows, keys),
        ]
    }

    /// Returns the bias's strides in bytes, for elements of `element` bytes.
    pub fn bias_bytes(&self, element: usize) -> [u64; 3] {
        self.bias_steps()
            .map(|elements| (elements * element) as u64)
    }

    /// Layout of the backward pass's stats of `rows` queries: `[rows, 2]`, then the slopes, then the table of distances. Returns the element at which the
    /// table begins, and the number of elements in all.
    pub fn stats_len(&self, rows: usize) -> [usize; 2] {
        let table_start = rows * 2 + self.slopes.as_ref().map_or(0, |slopes| slopes.len());
        [table_start, table_start + self.table_len()]
    }

    pub fn table<T: LaunchArg<RuntimeArg = BufferArg>>(&self) -> ComptimeOptionArgs<T> {
        let handle = self.relative.as_ref().map(|table| &table.handle);
        optional(handle, self.table_len())
    }

    /// Number of elements of the table of distances, 0 without one.
    pub fn table_len(&self) -> usize {
        (self.relative.as_ref()).map_or(0, |table| table.shape.iter().product())
    }

    /// Returns the table's stride over heads, 0 if heads share it, and its reach.
    fn table_steps(&self) -> [usize; 2] {
        let [heads, width] = self.relative.as_ref().map_or([1; 2], |table| table.shape);
        [if heads == 1 { 0 } else { width }, width / 2]
    }

    /// Returns the table of distances as the tensor-core tiers read it.
    pub fn table_args(&self) -> ComptimeOptionArgs<TableArgs> {
        let Some(table) = &self.relative else {
            return ComptimeOptionArgs::None;
        };
        let [head, reach] = self.table_steps();
        let numbers = buffer(&table.handle, self.table_len());
        ComptimeOptionArgs::Some(TableArgsLaunch::new(numbers, head as u32, reach as u32))
    }

    /// Returns the dropout arguments of the tensor-core tiers.
    pub fn dropout_args(&self) -> DropoutArgsLaunch<f32> {
        DropoutArgsLaunch::new(self.mask(), self.kept_factor() as f32)
    }

    /// Returns the dropout arguments of the `simt` tier.
    pub fn dropout_inputs(&self, accumulator: ElemType) -> DropoutArgsLaunch<InputScalar> {
        let factor = InputScalar::new(self.kept_factor(), accumulator);
        DropoutArgsLaunch::new(self.mask(), factor)
    }

    /// Returns the scalars of the tensor-core tiers, with the factors `log2_scale` and `cap_scale` of products.
    pub fn scalars(&self, (log2_scale, cap_scale): (f64, f64)) -> ScoreScalarsLaunch {
        let softcap = self.softcap.unwrap_or(1.0);
        ScoreScalarsLaunch::new(
            self.scale as f32,
            log2_scale as f32,
            softcap as f32,
            cap_scale as f32,
            (self.threshold)
                .map(|threshold| (threshold * std::f64::consts::LOG2_E) as f32)
                .into(),
        )
    }

    /// Returns the scalars of the `simt` tier.
    pub fn score_inputs(&self, accumulator: ElemType) -> ScoreInputsLaunch {
        let softcap = self.softcap.unwrap_or(1.0);
        ScoreInputsLaunch::new(
            InputScalar::new(self.scale, accumulator),
            InputScalar::new(softcap, accumulator),
            (self.threshold)
                .map(|threshold| InputScalar::new(threshold, accumulator))
                .into(),
        )
    }

    pub fn mask(&self) -> MaskLaunch {
        match &self.dropout {
            Some(dropout) => seeds::mask(dropout.seed, dropout.threshold()),
            None => seeds::mask(Seed::Value(0), 1),
        }
    }

    /// Factor of the weights that dropout keeps.
    pub fn kept_factor(&self) -> f64 {
        self.dropout.map_or(1.0, |dropout| dropout.factor())
    }

    /// Returns the slopes on the device, and uploads them if needed.
    pub fn device_slopes(
        &self,
        client: &Client,
        layout: &BlockLayout,
        accumulator: ElemType,
    ) -> Result<Option<Handle>, KernelError> {
        (self.slopes.as_ref())
            .map(|slopes| uploaded::slopes(client, layout, slopes, accumulator))
            .transpose()
    }
}

/// Indexing of a call's tensors in the scalar kernels.
#[derive(Clone, Copy)]
pub struct Indexing {
    /// Elements per vector load.
    pub width: usize,
    /// Type of indices.
    pub address: AddressType,
    /// Stored blocks per batch entry, 0 if weights are not stored.
    pub weight_blocks: usize,
}

impl Indexing {
    /// Checks the tensors, and returns how kernels index them.
    ///
    /// # Errors
    /// [`KernelError`] if a tensor's rows are not contiguous, or the device cannot index the largest one.
    pub fn new(
        client: &Client,
        request: &Request,
        layout: &BlockLayout,
        tensors: &[(&'static str, &TensorView)],
        options: &ScoreOptions,
    ) -> Result<Self, KernelError> {
        let width = load_width(request.dtype, tensors)?;
        let weight_blocks = match request.store {
            false => 0,
            true => stored_blocks(layout),
        };
        let seq = layout.seq_q().max(layout.seq_kv());
        let contiguous = request.batch * layout.heads() * seq;
        let [_, stats] = options.stats_len(request.batch * layout.heads() * layout.seq_q());
        let reaches = tensors.iter().map(|(_, tensor)| tensor.reach());
        let others = [
            options.bias_len(),
            stats,
            contiguous * (request.head_dim + request.value_dim),
            request.batch * weight_blocks * layout.block_size().pow(2),
        ];
        let largest = reaches.chain(others).max().unwrap_or(0);
        Ok(Self {
            width,
            address: address_of(client, largest)?,
            weight_blocks,
        })
    }
}

/// Returns the largest number of blocks of a batch entry.
fn stored_blocks(layout: &BlockLayout) -> usize {
    let entry_blocks = |entry| {
        let heads = 0..layout.heads();
        heads
            .map(|head| layout.pattern_blocks(layout.pattern_of(entry, head)))
            .sum()
    };
    (0..layout.batch().unwrap_or(1))
        .map(entry_blocks)
        .max()
        .unwrap_or(0)
}

/// Returns a buffer argument of `elements` elements, or of as many vectors.
pub fn buffer(handle: &Handle, elements: usize) -> BufferArg {
    debug_assert!(elements as u64 <= handle.size_in_used());
    // SAFETY: kernels read and write below the buffer's stated length, so it must not exceed what the handle holds. Callers count elements in the kernel's
    // element type: `TensorView::reach` of inputs, whose handle begins at the first element and holds the last; the product of the shape of contiguous
    // outputs, which the fields of `Outputs`, `Gradients` and `ScoreOptions` require of callers; and the size just allocated of everything else.
    unsafe { BufferArg::from_raw_parts(handle.clone(), elements) }
}

/// Returns a buffer argument of `elements` elements, or none.
pub fn optional<T: LaunchArg<RuntimeArg = BufferArg>>(
    handle: Option<&Handle>,
    elements: usize,
) -> ComptimeOptionArgs<T> {
    match handle {
        Some(handle) => ComptimeOptionArgs::Some(buffer(handle, elements)),
        None => ComptimeOptionArgs::None,
    }
}

/// Returns the arguments of a plan on the device.
pub fn plan_words(plan: &DevicePlan, residue: Option<Residue>) -> PlanWordsLaunch {
    PlanWordsLaunch::new(buffer(&plan.words, plan.len), listing(residue))
}

/// Returns the elements per vector load: the largest power of two, at most 4, that divides the rows, offsets and strides of all tensors.
pub fn load_width(
    dtype: ElemType,
    tensors: &[(&'static str, &TensorView)],
) -> Result<usize, KernelError> {
    let mut width = 4;
    for (name, tensor) in tensors {
        tensor.check_rows(name)?;
        let offset = tensor.handle.offset_start.unwrap_or(0) as usize / dtype.size();
        for number in tensor.outer_strides().chain([tensor.shape[3], offset]) {
            while !number.is_multiple_of(width) {
                width /= 2;
            }
        }
    }
    Ok(width)
}

/// Returns the index type for `largest` elements.
pub fn address_of(client: &Client, largest: usize) -> Result<AddressType, KernelError> {
    address_in(client.properties(), largest)
}

/// [`address_of`] for device properties.
pub fn address_in(
    properties: &DeviceProperties,
    largest: usize,
) -> Result<AddressType, KernelError> {
    let address = match u32::try_from(largest) {
        Ok(_) => AddressType::U32,
        Err(_) => AddressType::U64,
    };
    match properties.supports_address(address) {
        true => Ok(address),
        false => Err(KernelError::limit(
            "the elements of a tensor",
            u32::MAX,
            largest,
        )),
    }
}

/// Returns a tensor in vectors of `width` elements, with its strides.
pub fn row_tensor<T: CubePrimitive>(tensor: &TensorView, width: usize) -> RowTensorLaunch<T>
where
    Box<[T]>: LaunchArg<RuntimeArg = BufferArg>,
{
    let [batch, head, row, _] = tensor.strides;
    RowTensorLaunch::new(
        buffer(&tensor.handle, tensor.reach().div_ceil(width)),
        StridesLaunch::new(batch / width, head / width, row / width, tensor.shape[2]),
    )
}

/// Returns a tensor map of 16-bit elements with boxes of these lengths. The swizzle is as wide as a row of the box.
///
/// # Safety
/// The handle must hold the elements of this shape and these strides.
pub unsafe fn boxes_of(
    handle: &Handle,
    shape: &[usize],
    strides: &[usize],
    boxes: &[usize],
    dtype: ElemType,
) -> TensorMapArg<Tiled> {
    // SAFETY: the caller guarantees it.
    let tensor = unsafe { TensorArg::from_raw_parts(handle.clone(), strides.into(), shape.into()) };
    let swizzle = match boxes.last() {
        Some(16) => TensorMapSwizzle::B32,
        Some(32) => TensorMapSwizzle::B64,
        _ => TensorMapSwizzle::B128,
    };
    let tile_size = boxes.into();
    TensorMapArg::new(TiledArgs { tile_size }, tensor, dtype).with_swizzle(swizzle)
}

/// Returns how a part lists its positions.
pub fn listing(residue: Option<Residue>) -> ListingLaunch {
    let residue = residue.unwrap_or(Residue {
        stride: 1,
        class_len: 1,
    });
    ListingLaunch::new(residue.stride, residue.class_len)
}

/// Number of words between the heads of two batch entries in a plan, 0 if batch entries share a layout.
pub fn batch_words(layout: &BlockLayout) -> usize {
    match layout.batch() {
        Some(_) => layout.heads(),
        None => 0,
    }
}

/// Returns the arguments by which a launch finds its tiles: the layout's plan on the device and the slice.
pub fn schedule(
    plan: &DevicePlan,
    layout: &BlockLayout,
    residue: Option<Residue>,
    slice: Slice,
) -> ScheduleLaunch {
    let parts = plan_parts(&plan.sections, batch_words(layout));
    ScheduleLaunch::new(parts, plan_words(plan, residue), slice.args())
}

pub fn plan_parts(parts: &Sections, batch_words: usize) -> PlanPartsLaunch {
    PlanPartsLaunch::new(
        parts.heads,
        parts.places,
        parts.order,
        parts.rows,
        parts.tiles,
        parts.entries,
        parts.masks,
        batch_words,
    )
}

/// Spreads `cubes` cubes over the first two dimensions of a grid.
///
/// # Errors
/// [`KernelError::Limit`] if the grid is too small.
pub fn spread(client: &Client, cubes: u64) -> Result<CubeCount, KernelError> {
    let (x_most, y_most, _) = client.properties().hardware.max_cube_count;
    let x = cubes.min(u64::from(x_most));
    let y = cubes.div_ceil(x.max(1));
    match y <= u64::from(y_most) {
        true => Ok(CubeCount::Static(x as u32, y as u32, 1)),
        false => {
            let most = u64::from(x_most) * u64::from(y_most);
            Err(KernelError::limit("cubes", most, cubes as usize))
        }
    }
}
