//! Checks, arguments and launches.

use std::sync::{Arc, OnceLock};

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::device::{self, DevicePlan, plan};
use super::masses::distance_gradient;
#[cfg(feature = "cuda-asm")]
use super::shared::distances::{TableArgs, TableArgsLaunch};
use super::shared::dropout::MaskLaunch;
use super::shared::walk::{ListingLaunch, PlanPartsLaunch, StridesLaunch};
use super::simt::score::{BiasStridesLaunch, DistancesLaunch};
use super::simt::{Tile, backward, forward};
use super::{AttentionPlan, Kernel, KernelError, PartPlan, Sizes, TensorView};
use crate::plan::{Sections, Tiling, Walk};
use crate::{BlockLayout, Dropout, Residue};

/// What the scores of a call are, apart from its tensors.
#[derive(Clone, Debug)]
pub struct ScoreOptions {
    /// Factor of the products.
    pub scale: f64,
    /// Bound of the scores.
    pub softcap: Option<f64>,
    /// ALiBi slopes, `[heads]`: scores get `−slope · |distance|` after the softcap. Given if and only if the sizes say so.
    pub slopes: Option<Arc<[f64]>>,
    /// Dropout of weights. Given if and only if the sizes say so.
    pub dropout: Option<Dropout>,
    /// A bias of the scores, added after the softcap. Given if and only if the sizes say so.
    pub bias: Option<BiasView>,
    /// A bias of each distance, likewise.
    pub relative: Option<TableView>,
}

/// Biases of distances.
#[derive(Clone, Debug)]
pub struct TableView {
    /// The buffer, contiguous, in the type of sums.
    pub handle: Handle,
    /// `[heads or 1, 2 · reach + 1]`
    pub shape: [usize; 2],
}

/// A bias of scores.
#[derive(Clone, Debug)]
pub struct BiasView {
    /// The buffer, contiguous, in the inputs' type.
    pub handle: Handle,
    /// `[batch or 1, heads or 1, seq_q or 1, seq_kv]`
    pub shape: [usize; 4],
}

impl BiasView {
    pub(super) fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl ScoreOptions {
    pub(super) fn bias<T: LaunchArg<RuntimeArg = BufferArg>>(&self) -> ComptimeOptionArgs<T> {
        let elements = self.bias.as_ref().map_or(0, BiasView::elements);
        optional(self.bias.as_ref().map(|bias| &bias.handle), elements)
    }

    /// Elements of the bias between batch entries, heads and queries: 0 where it is 1.
    fn bias_steps(&self) -> [usize; 3] {
        let [batch, heads, rows, keys] = self.bias.as_ref().map_or([1; 4], |bias| bias.shape);
        let step = |length: usize, step: usize| if length == 1 { 0 } else { step };
        [
            step(batch, heads * rows * keys),
            step(heads, rows * keys),
            step(rows, keys),
        ]
    }

    pub(super) fn bias_strides(&self) -> BiasStridesLaunch {
        let [batch, head, row] = self.bias_steps();
        BiasStridesLaunch::new(batch, head, row)
    }

    /// The same in bytes, of a half-precision bias.
    #[cfg(feature = "cuda-asm")]
    pub(super) fn bias_bytes(&self) -> [u64; 3] {
        self.bias_steps().map(|elements| elements as u64 * 2)
    }

    /// What the backward pass knows of its `rows` queries, `[rows, 2]`, with slopes and the table behind: where the table begins, and how
    /// many numbers it is in all.
    pub(super) fn stats_len(&self, rows: usize) -> [usize; 2] {
        let table_start = rows * 2 + self.slopes.as_ref().map_or(0, |slopes| slopes.len());
        [table_start, table_start + self.table_len()]
    }

    pub(super) fn table<T: LaunchArg<RuntimeArg = BufferArg>>(&self) -> ComptimeOptionArgs<T> {
        let handle = self.relative.as_ref().map(|table| &table.handle);
        optional(handle, self.table_len())
    }

    /// Numbers of the table, 0 if there is none.
    pub(super) fn table_len(&self) -> usize {
        (self.relative.as_ref()).map_or(0, |table| table.shape.iter().product())
    }

    /// Numbers of the table between heads, 0 if they share it, and its reach.
    fn table_steps(&self) -> [usize; 2] {
        let [heads, width] = self.relative.as_ref().map_or([1; 2], |table| table.shape);
        [if heads == 1 { 0 } else { width }, width / 2]
    }

    /// The table, which begins at element `start`.
    pub(super) fn distances(&self, start: usize) -> DistancesLaunch {
        let [head, reach] = self.table_steps();
        DistancesLaunch::new(start, head, reach)
    }

    /// The table, as the tensor-core tiers get it.
    #[cfg(feature = "cuda-asm")]
    pub(super) fn table_args(&self) -> ComptimeOptionArgs<TableArgs> {
        let Some(table) = &self.relative else {
            return ComptimeOptionArgs::None;
        };
        let [head, reach] = self.table_steps();
        let numbers = unsafe { BufferArg::from_raw_parts(table.handle.clone(), self.table_len()) };
        ComptimeOptionArgs::Some(TableArgsLaunch::new(numbers, head as u32, reach as u32))
    }

    pub(super) fn mask(&self) -> MaskLaunch {
        let (seed, threshold) =
            (self.dropout.as_ref()).map_or((0, 0), |dropout| (dropout.seed, dropout.threshold()));
        MaskLaunch::new(seed as u32, (seed >> 32) as u32, threshold)
    }

    pub(super) fn dropout_factor(&self, accumulator: ElemType) -> InputScalar {
        InputScalar::new(
            self.dropout.map_or(1.0, |dropout| dropout.factor()),
            accumulator,
        )
    }

    /// The slopes on the device.
    pub(super) fn device_slopes(
        &self,
        client: &Client,
        layout: &BlockLayout,
        accumulator: ElemType,
    ) -> Option<Handle> {
        let slopes = self.slopes.as_ref()?;
        Some(device::slopes(client, layout, slopes, accumulator))
    }
}

/// What the forward pass writes and the backward pass reads.
#[derive(Clone, Copy, Debug)]
pub struct Outputs<'a> {
    /// `[batch, heads, seq_q, value_dim]`, contiguous.
    pub out: &'a Handle,
    /// `[batch, heads, seq_q]`, contiguous.
    pub lse: &'a Handle,
    /// `[batch, blocks, b, b]`, if the sizes say that weights are stored. Holds zeros before the forward pass.
    pub weights: Option<&'a Handle>,
}

/// Runs the forward pass.
///
/// # Errors
/// [`KernelError`] if a limit of the device is exceeded; then nothing was launched.
pub fn forward(
    client: &Client,
    plan: &AttentionPlan,
    layout: &BlockLayout,
    [q, k, v]: [&TensorView; 3],
    outputs: Outputs,
    options: &ScoreOptions,
) -> Result<(), KernelError> {
    let Outputs { out, lse, weights } = outputs;
    let &ScoreOptions { scale, softcap, .. } = options;
    let sizes = plan.sizes;
    let (heads, seq_q) = (layout.heads(), layout.seq_q());
    let rows = sizes.batch * heads * seq_q;
    let accumulator = sizes.accumulator();
    let slopes = options.device_slopes(client, layout, accumulator);
    let named = [("q", q), ("k", k), ("v", v)];
    let calls = (plan.parts.iter())
        .map(|part| {
            Call::new(
                client,
                sizes,
                part,
                layout,
                Kernel::Forward,
                &named,
                options,
            )
        })
        .collect::<Result<Vec<_>, _>>()?;
    for (call, part) in calls.iter().zip(&plan.parts) {
        #[cfg(feature = "cuda-asm")]
        if let Ok(tile) = part.hopper {
            let walked = part.layout(layout);
            let inputs = [q, k, v];
            let asked = super::hopper::Asked {
                options,
                slopes: slopes.as_ref(),
            };
            super::hopper::forward(
                client,
                tile,
                walked,
                &sizes,
                part.residue,
                inputs,
                out,
                lse,
                asked,
            )?;
            continue;
        }
        #[cfg(feature = "cuda-asm")]
        if let Ok(tile) = part.mma {
            let walked = part.layout(layout);
            let inputs = [q, k, v];
            super::mma::forward(
                client,
                tile,
                walked,
                &sizes,
                part.residue,
                inputs,
                out,
                lse,
                slopes.as_ref(),
                options,
            )?;
            continue;
        }
        #[cfg(not(feature = "cuda-asm"))]
        let _ = part;
        unsafe {
            forward::forward::launch_unchecked(
                client,
                call.count(heads),
                call.dim(),
                call.address,
                call.width,
                call.input(q),
                call.input(k),
                call.input(v),
                BufferArg::from_raw_parts(out.clone(), rows * sizes.value_dim / call.width),
                BufferArg::from_raw_parts(lse.clone(), rows),
                call.weights(weights, layout),
                optional(slopes.as_ref(), heads),
                options.bias(),
                options.table(),
                call.words(),
                call.strides(q),
                call.strides(k),
                call.strides(v),
                options.bias_strides(),
                options.distances(0),
                call.listing(),
                call.parts(),
                heads / sizes.kv_heads,
                call.weight_blocks,
                InputScalar::new(scale, accumulator),
                InputScalar::new(softcap.unwrap_or(1.0), accumulator),
                InputScalar::new(f64::NEG_INFINITY, accumulator),
                options.mask(),
                options.dropout_factor(accumulator),
                call.tile,
                sizes.dtype,
                accumulator,
            );
        }
    }
    Ok(())
}

/// Gradients by the outputs.
#[derive(Clone, Copy, Debug)]
pub struct OutputGrads<'a> {
    /// `[batch, heads, seq_q, value_dim]`
    pub out: &'a TensorView,
    /// `[batch, heads, seq_q]`, contiguous, in lse's type. None: 0.
    pub lse: Option<&'a Handle>,
}

/// Where the gradients go.
pub struct Gradients {
    /// `[batch, heads, seq_q, head_dim]`
    pub q: Handle,
    /// dK `[batch, kv_heads, seq_kv, head_dim]`, and from element `v_offset` on dV
    /// `[batch, kv_heads, seq_kv, value_dim]`: one buffer, since some devices bind only eight.
    pub kv: Handle,
    /// Elements before dV, a multiple of 4.
    pub v_offset: usize,
    /// The bias's, if it is wanted: of the bias's shape, in the type of sums. Holds zeros before.
    pub bias: Option<Handle>,
    /// That of the biases of distances, if it is wanted: of their shape, in the type of sums.
    pub relative: Option<Handle>,
}

/// Runs the backward pass: `outputs` as the forward pass left them.
///
/// # Errors
/// [`KernelError`] if a limit of the device is exceeded; then nothing was launched.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    client: &Client,
    plan: &AttentionPlan,
    layout: &BlockLayout,
    [q, k, v]: [&TensorView; 3],
    outputs: Outputs,
    grads: OutputGrads,
    gradients: &Gradients,
    options: &ScoreOptions,
) -> Result<(), KernelError> {
    let Outputs { out, lse, weights } = outputs;
    let &ScoreOptions { scale, softcap, .. } = options;
    let grad_out = grads.out;
    let named = [("q", q), ("k", k), ("v", v), ("grad_out", grad_out)];
    plan.check_backward()?;
    let sizes = plan.sizes;
    let call = |part, kernel| Call::new(client, sizes, part, layout, kernel, &named, options);
    let calls = (plan.parts.iter())
        .map(|part| {
            Ok([
                call(part, Kernel::BackwardRows)?,
                call(part, Kernel::BackwardColumns)?,
            ])
        })
        .collect::<Result<Vec<_>, KernelError>>()?;
    let Call { width, address, .. } = calls[0][0];
    let (heads, kv_heads) = (layout.heads(), sizes.kv_heads);

    let rows = sizes.batch * heads * layout.seq_q();
    let accumulator = sizes.accumulator();
    let slopes = options.device_slopes(client, layout, accumulator);
    // lse and delta of the query at each place of a part.
    let make_stats = |call: &Call, pitch: usize, lse_factor: f64, by_class: bool| {
        let rows = sizes.batch * heads * pitch;
        let [table_start, numbers] = options.stats_len(rows);
        let stats = client.empty(numbers * accumulator.size());
        const UNITS: u32 = 64;
        let lanes = backward::delta_lanes(client.properties(), sizes.value_dim / width);
        let units = rows as u64 * lanes as u64;
        let cubes = spread(client, units.div_ceil(u64::from(UNITS)))?;
        unsafe {
            backward::delta::launch_unchecked(
                client,
                cubes,
                CubeDim::new_1d(UNITS),
                address,
                width,
                BufferArg::from_raw_parts(
                    out.clone(),
                    sizes.batch * heads * layout.seq_q() * sizes.value_dim / width,
                ),
                call.input(grad_out),
                BufferArg::from_raw_parts(lse.clone(), sizes.batch * heads * layout.seq_q()),
                optional(grads.lse, sizes.batch * heads * layout.seq_q()),
                optional(slopes.as_ref(), heads),
                options.table(),
                BufferArg::from_raw_parts(stats.clone(), numbers),
                call.strides(grad_out),
                call.listing(),
                heads,
                rows,
                pitch,
                table_start,
                options.table_len(),
                InputScalar::new(lse_factor, accumulator),
                sizes.value_dim,
                lanes,
                by_class,
                sizes.dtype,
                accumulator,
            );
        }
        Ok::<Handle, KernelError>(stats)
    };
    let kv_rows = sizes.batch * kv_heads * layout.seq_kv();
    let passes: [Pass; 2] = [
        (
            Walk::Rows,
            heads,
            [q, grad_out, k, v],
            &gradients.q,
            rows * sizes.head_dim,
        ),
        (
            Walk::Columns,
            kv_heads,
            [k, v, q, grad_out],
            &gradients.kv,
            gradients.v_offset + kv_rows * sizes.value_dim,
        ),
    ];
    let [table_start, numbers] = options.stats_len(rows);
    let launch = |stats: &Handle, call: &Call, pass: &Pass, tile: Tile, slice: Slice| {
        let &(walk, _, [a1, a2, b1, b2], target, elements) = pass;
        let bias_grad = gradients.bias.as_ref().filter(|_| tile.bias_gradient);
        let bias_elements = options.bias.as_ref().map_or(0, BiasView::elements);
        unsafe {
            backward::backward::launch_unchecked(
                client,
                CubeCount::Static(
                    call.plan().tiles as u32,
                    slice.heads as u32,
                    slice.batches as u32,
                ),
                CubeDim::new_1d(tile.units() as u32),
                address,
                width,
                call.input(a1),
                call.input(a2),
                call.input(b1),
                call.input(b2),
                BufferArg::from_raw_parts(stats.clone(), numbers),
                call.weights(weights, layout),
                options.bias(),
                optional(bias_grad, bias_elements),
                BufferArg::from_raw_parts(target.clone(), elements / width),
                call.words(),
                call.strides(a1),
                call.strides(a2),
                call.strides(b1),
                call.strides(b2),
                options.bias_strides(),
                options.distances(table_start),
                call.listing(),
                call.parts(),
                heads,
                heads / kv_heads,
                slice.first_batch,
                slice.first_head,
                call.weight_blocks,
                gradients.v_offset / width,
                rows * 2,
                InputScalar::new(scale, accumulator),
                InputScalar::new(softcap.unwrap_or(1.0), accumulator),
                options.mask(),
                options.dropout_factor(accumulator),
                walk,
                tile,
                sizes.dtype,
                accumulator,
            );
        }
    };
    let mut made = None;
    // Those of all positions, for the simt tier.
    let mut plain_stats = |call: &Call| match &made {
        Some(stats) => Ok::<Handle, KernelError>(Handle::clone(stats)),
        None => Ok(made
            .insert(make_stats(call, layout.seq_q(), 1.0, false)?)
            .clone()),
    };
    #[cfg(feature = "cuda-asm")]
    let mut fused_stats = None;
    #[cfg(feature = "cuda-asm")]
    let asked = super::hopper::Asked {
        options,
        slopes: slopes.as_ref(),
    };
    for (part, part_plan) in calls.iter().zip(&plan.parts) {
        // Whatever tier the gradients of the inputs are made on.
        if let (Some(bias), true) = (&options.bias, gradients.bias.is_some()) {
            let index = usize::from(bias.shape[2] == 1);
            let tile = Tile {
                bias_gradient: true,
                ..part[index].tile
            };
            let stats = plain_stats(&part[0])?;
            for slice in Slice::sharing(bias.shape, sizes.batch, heads) {
                launch(&stats, &part[index], &passes[index], tile, slice);
            }
        }
        #[cfg(feature = "cuda-asm")]
        if let Ok(super::hopper::Backward::Fused(tile)) = part_plan.hopper_backward {
            let walked = part_plan.layout(layout);
            let inputs = [q, k, v, grad_out];
            let made = super::hopper::backward(
                client,
                tile,
                walked,
                &sizes,
                part_plan.residue,
                inputs,
                outputs,
                grads.lse,
                fused_stats.take(),
                gradients,
                asked,
            )?;
            fused_stats = Some(made);
            continue;
        }
        #[cfg(feature = "cuda-asm")]
        if let Ok(super::hopper::Backward::Walks(tiles)) = part_plan.hopper_backward {
            let walked = part_plan.layout(layout);
            let pitch = walked.seq_q().next_multiple_of(2);
            let by_class = part_plan.residue.is_some();
            let stats = make_stats(&part[0], pitch, std::f64::consts::LOG2_E, by_class)?;
            for (tile, (walk, _, [a1, a2, b1, b2], target, _)) in tiles.into_iter().zip(passes) {
                let operands = super::tensor::WalkOperands {
                    a: [a1, a2],
                    b: [b1, b2],
                    stats: &stats,
                    pitch,
                    out: target,
                    second: if walk == Walk::Rows {
                        0
                    } else {
                        gradients.v_offset
                    },
                };
                let residue = part_plan.residue;
                super::hopper::walk(
                    client, tile, walk, walked, &sizes, residue, &operands, asked,
                )?;
            }
            continue;
        }
        #[cfg(feature = "cuda-asm")]
        if let Ok(tiles) = part_plan.mma_backward {
            let walked = part_plan.layout(layout);
            let residue = part_plan.residue;
            let pitch = walked.seq_q();
            let log2_e = std::f64::consts::LOG2_E;
            let stats = make_stats(&part[0], pitch, log2_e, residue.is_some())?;
            for (tile, (walk, _, [a1, a2, b1, b2], target, _)) in tiles.into_iter().zip(passes) {
                let operands = super::tensor::WalkOperands {
                    a: [a1, a2],
                    b: [b1, b2],
                    stats: &stats,
                    pitch,
                    out: target,
                    second: match walk {
                        Walk::Rows => 0,
                        Walk::Columns => gradients.v_offset,
                    },
                };
                super::mma::backward(
                    client, tile, walk, walked, &sizes, residue, &operands, options,
                )?;
            }
            continue;
        }
        #[cfg(not(feature = "cuda-asm"))]
        let _ = part_plan;
        let stats = plain_stats(&part[0])?;
        for (call, pass) in part.iter().zip(&passes) {
            let all = Slice {
                first_batch: 0,
                batches: sizes.batch,
                first_head: 0,
                heads: pass.1,
            };
            launch(&stats, call, pass, call.tile, all);
        }
    }
    if let Some(table) = &gradients.relative {
        let stats = plain_stats(&calls[0][0])?;
        let inputs = [q, k, v, grad_out];
        distance_gradient(client, layout, &sizes, inputs, &stats, options, table)?;
    }
    Ok(())
}

/// A walk, the heads it is launched for, its operands and its output with the output's elements.
type Pass<'a> = (Walk, usize, [&'a TensorView; 4], &'a Handle, usize);

/// Batch entries and heads of a launch.
#[derive(Clone, Copy)]
struct Slice {
    first_batch: usize,
    batches: usize,
    first_head: usize,
    heads: usize,
}

impl Slice {
    /// Launches in each of which no two batch entries or heads share a bias of `shape`.
    fn sharing([batches, own_heads, ..]: [usize; 4], batch: usize, heads: usize) -> Vec<Self> {
        let firsts = |own: usize, all: usize| if own == 1 { 0..all } else { 0..1 };
        firsts(batches, batch)
            .flat_map(|first_batch| {
                firsts(own_heads, heads).map(move |first_head| Self {
                    first_batch,
                    batches,
                    first_head,
                    heads: own_heads,
                })
            })
            .collect()
    }
}

/// A buffer of `elements`, or none.
pub(super) fn optional<T: LaunchArg<RuntimeArg = BufferArg>>(
    handle: Option<&Handle>,
    elements: usize,
) -> ComptimeOptionArgs<T> {
    match handle {
        Some(handle) => {
            let buffer = unsafe { BufferArg::from_raw_parts(handle.clone(), elements) };
            ComptimeOptionArgs::Some(buffer)
        }
        None => ComptimeOptionArgs::None,
    }
}

/// What the launches of a call share.
struct Call {
    batch: usize,
    tile: Tile,
    client: Client,
    walked: BlockLayout,
    tiling: Tiling,
    /// Made where the simt tier launches something: the others have plans of their own.
    plan: OnceLock<Arc<DevicePlan>>,
    residue: Option<Residue>,
    /// Elements of a load.
    width: usize,
    address: AddressType,
    /// Stored blocks of a batch entry.
    weight_blocks: usize,
    /// Words between two batch entries' heads in the plan.
    batch_words: usize,
}

impl Call {
    fn new(
        client: &Client,
        sizes: Sizes,
        part: &PartPlan,
        layout: &BlockLayout,
        kernel: Kernel,
        tensors: &[(&'static str, &TensorView)],
        options: &ScoreOptions,
    ) -> Result<Self, KernelError> {
        let width = load_width(sizes.dtype, tensors)?;
        let mut largest = options.bias.as_ref().map_or(0, BiasView::elements);
        for (_, tensor) in tensors {
            largest = largest.max(tensor.reach());
        }
        let batches = layout.batch().unwrap_or(1);
        let weight_blocks = match sizes.store {
            false => 0,
            true => (0..batches)
                .map(|entry| {
                    let heads = 0..layout.heads();
                    heads
                        .map(|head| layout.pattern_blocks(layout.pattern_of(entry, head)))
                        .sum()
                })
                .max()
                .unwrap_or(0),
        };
        let contiguous = sizes.batch * layout.heads() * layout.seq_q().max(layout.seq_kv());
        largest = largest
            .max(contiguous * (sizes.head_dim + sizes.value_dim))
            .max(sizes.batch * weight_blocks * layout.block_size().pow(2));
        let address = address_of(client, largest)?;
        Ok(Self {
            batch: sizes.batch,
            tile: part.tile(kernel),
            client: client.clone(),
            walked: part.layout(layout).clone(),
            tiling: part.tiling(kernel),
            plan: OnceLock::new(),
            residue: part.residue,
            width,
            address,
            weight_blocks,
            batch_words: batch_words(layout),
        })
    }

    fn plan(&self) -> &DevicePlan {
        let make = || plan(&self.client, &self.walked, self.tiling);
        self.plan.get_or_init(make)
    }

    fn count(&self, heads: usize) -> CubeCount {
        CubeCount::Static(self.plan().tiles as u32, heads as u32, self.batch as u32)
    }

    fn dim(&self) -> CubeDim {
        CubeDim::new_1d(self.tile.units() as u32)
    }

    fn input(&self, tensor: &TensorView) -> BufferArg {
        vectors_of(tensor, self.width)
    }

    fn strides(&self, tensor: &TensorView) -> StridesLaunch {
        strides_of(tensor, self.width)
    }

    fn listing(&self) -> ListingLaunch {
        listing(self.residue)
    }

    fn weights<T: LaunchArg<RuntimeArg = BufferArg>>(
        &self,
        weights: Option<&Handle>,
        layout: &BlockLayout,
    ) -> ComptimeOptionArgs<T> {
        let elements = self.batch * self.weight_blocks * layout.block_size().pow(2);
        optional(weights, elements)
    }

    fn words(&self) -> BufferArg {
        let plan = self.plan();
        unsafe { BufferArg::from_raw_parts(plan.words.clone(), plan.len) }
    }

    fn parts(&self) -> PlanPartsLaunch {
        plan_parts(&self.plan().sections, self.batch_words)
    }
}

/// Elements of a load: as many as divide the rows and strides of all tensors, 4 at most.
pub(super) fn load_width(
    dtype: ElemType,
    tensors: &[(&'static str, &TensorView)],
) -> Result<usize, KernelError> {
    let mut width = 4;
    for (name, tensor) in tensors {
        if tensor.strides[3] != 1 && tensor.shape[3] != 1 {
            return Err(KernelError::Stride {
                tensor: name,
                stride: tensor.strides[3],
            });
        }
        let offset = tensor.handle.offset_start.unwrap_or(0) as usize / dtype.size();
        let mut aligned = vec![tensor.shape[3], offset];
        for (length, stride) in tensor.shape.iter().zip(&tensor.strides).take(3) {
            if *length > 1 {
                aligned.push(*stride);
            }
        }
        while aligned.iter().any(|number| number % width != 0) {
            width /= 2;
        }
    }
    Ok(width)
}

/// The type of indices into `largest` elements.
pub(super) fn address_of(client: &Client, largest: usize) -> Result<AddressType, KernelError> {
    let address = match u32::try_from(largest) {
        Ok(_) => AddressType::U32,
        Err(_) => AddressType::U64,
    };
    match client.properties().supports_address(address) {
        true => Ok(address),
        false => Err(KernelError::limit(
            "the elements of a tensor",
            u32::MAX,
            largest,
        )),
    }
}

/// A tensor in vectors of `width`.
pub(super) fn vectors_of(tensor: &TensorView, width: usize) -> BufferArg {
    let vectors = tensor.reach().div_ceil(width);
    unsafe { BufferArg::from_raw_parts(tensor.handle.clone(), vectors) }
}

pub(super) fn strides_of(tensor: &TensorView, width: usize) -> StridesLaunch {
    let [batch, head, row, _] = tensor.strides;
    StridesLaunch::new(batch / width, head / width, row / width, tensor.shape[2])
}

/// The listing of a part's positions.
pub(super) fn listing(residue: Option<Residue>) -> ListingLaunch {
    let residue = residue.unwrap_or(Residue {
        stride: 1,
        class_len: 1,
    });
    ListingLaunch::new(residue.stride, residue.class_len)
}

/// Words between two batch entries' heads in a plan.
pub(super) fn batch_words(layout: &BlockLayout) -> usize {
    match layout.batch() {
        Some(_) => layout.heads(),
        None => 0,
    }
}

pub(super) fn plan_parts(parts: &Sections, batch_words: usize) -> PlanPartsLaunch {
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

/// `cubes` cubes over the first two dimensions of a launch.
pub(super) fn spread(client: &Client, cubes: u64) -> Result<CubeCount, KernelError> {
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
