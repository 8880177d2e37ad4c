//! Sums of weights over columns and diagonals: checks and launches.

use std::ops::Range;
use std::sync::Arc;

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::args::{
    ScoreOptions, address_of, batch_words, buffer, listing, load_width, row_tensor, spread,
};
use super::call::{DeviceFacts, Request, ScoreKind, TableView, TensorView};
use super::device::{DeviceLinePlan, line_plan};
use super::error::KernelError;
use super::limits::most_units;
use super::pass::BackwardPass;
use super::shared::addressing::PlanWordsLaunch;
use super::simt::Tile;
use super::simt::attention_sums::{
    FOLD_UNITS, GradientInputsLaunch, LinePartsLaunch, LineScheduleLaunch, SumsConfig,
    add_segments, attention_sums as kernel, fold_distances, line_width, row_fours,
};
use super::slices::Slice;
use blocksparse::BlockLayout;
use blocksparse::lines::{Line, Lines};
use blocksparse::plan::Mainloop;

/// Which queries are summed, and the output buffers.
#[derive(Clone, Debug)]
pub struct AttentionSumOutputs {
    /// Queries included in the sums.
    pub queries: Range<usize>,
    /// `[batch, heads, seq_kv]`, in the accumulator type: each key's weights, summed over the queries.
    pub columns: Handle,
    /// `[batch, heads, seq_q + seq_kv − 1]`: the weights of query row `i` and key row `j`, summed at `i − j + seq_kv − 1`.
    pub diagonals: Handle,
}

/// Checks that a device can sum the weights of a call.
///
/// # Errors
/// [`KernelError`] if it lacks the dtype, or a limit of it is exceeded.
pub fn check_attention_sums(
    client: &Client,
    layout: &BlockLayout,
    request: &Request,
) -> Result<(), KernelError> {
    let device = DeviceFacts::of(client);
    device.check_dtype(request.dtype)?;
    // q, k, lse, sums, the plan and the scalars.
    let buffers = 6 + request.score.buffers();
    check(device, layout, request, false, buffers).map(|_| ())
}

/// Returns the tile for the gradient of the table of distances.
///
/// # Errors
/// [`KernelError`] if the device cannot compute it.
pub fn check_distances(
    device: DeviceFacts,
    layout: &BlockLayout,
    request: &Request,
) -> Result<Tile, KernelError> {
    // q, k, v, grad_out, stats, sums, the plan and the scalars.
    let buffers = 8 + usize::from(request.score.bias) + usize::from(request.score.seeds);
    check(device, layout, request, true, buffers)
}

fn check(
    device: DeviceFacts,
    layout: &BlockLayout,
    request: &Request,
    gradient: bool,
    buffers: usize,
) -> Result<Tile, KernelError> {
    let tile = tile(device.properties, layout, request, gradient)?;
    let hardware = &device.properties.hardware;
    let lines = layout.seq_q().div_ceil(tile.rows) + layout.seq_kv().div_ceil(tile.rows);
    KernelError::check("the diagonals of tiles", hardware.max_cube_count.0, lines)?;
    KernelError::check("the buffers of a kernel", hardware.max_bindings, buffers)?;
    Ok(tile)
}

/// Operands of the sums along lines.
struct Summed<'a> {
    client: &'a Client,
    layout: &'a BlockLayout,
    request: &'a Request,
    /// q and k.
    inputs: [&'a TensorView; 2],
    /// v and grad_out, if gradients of scores are summed instead of weights.
    gradient: Option<[&'a TensorView; 2]>,
    /// lse, or the stats of the backward pass.
    stats: &'a Handle,
    options: &'a ScoreOptions,
    queries: Range<usize>,
}

impl Summed<'_> {
    /// Inputs with their names in errors.
    fn named(&self) -> Vec<(&'static str, &TensorView)> {
        let [q, k] = self.inputs;
        let mut named = vec![("q", q), ("k", k)];
        if let Some([v, grad_out]) = self.gradient {
            named.extend([("v", v), ("grad_out", grad_out)]);
        }
        named
    }

    /// Returns the element of the stats at which the table of distances begins, and the number of elements of the stats: lse alone, or lse and delta, then
    /// the slopes, then the table.
    fn stats_len(&self) -> [usize; 2] {
        let rows = self.request.batch * self.layout.heads() * self.layout.seq_q();
        match self.gradient {
            Some(_) => self.options.stats_len(rows),
            None => [0, rows],
        }
    }
}

/// Sums `exp(score − lse)` over the queries of each key, and over the pairs at each distance.
///
/// # Errors
/// [`KernelError`] if a limit of the device is exceeded; then nothing was launched.
pub fn attention_sums(
    client: &Client,
    layout: &BlockLayout,
    request: &Request,
    inputs: [&TensorView; 2],
    lse: &Handle,
    options: &ScoreOptions,
    outputs: &AttentionSumOutputs,
) -> Result<(), KernelError> {
    check_attention_sums(client, layout, request)?;
    let summed = Summed {
        client,
        layout,
        request,
        inputs,
        gradient: None,
        stats: lse,
        options,
        queries: outputs.queries.clone(),
    };
    sum_lines(&summed, Line::Columns, &outputs.columns)?;
    sum_lines(&summed, Line::Diagonals, &outputs.diagonals)
}

/// Computes the gradient of the table of distances into `out`: the gradient of the scores, summed over diagonals, batch entries and the heads that share
/// the table. `stats` are those of all positions.
pub fn distance_gradient(
    pass: &BackwardPass,
    stats: &Handle,
    out: &Handle,
) -> Result<(), KernelError> {
    let (client, layout) = (pass.pass.client, pass.pass.layout);
    let (request, [q, k, v]) = (pass.pass.request, pass.pass.inputs);
    let options = pass.pass.options;
    let Some(TableView { shape, .. }) = options.relative else {
        return Ok(());
    };
    let summed = Summed {
        client,
        layout,
        request,
        inputs: [q, k],
        gradient: Some([v, pass.grads.out]),
        stats,
        options,
        queries: 0..layout.seq_q(),
    };
    let accumulator = request.accumulator();
    let length = layout.seq_q() + layout.seq_kv() - 1;
    let elements = request.batch * layout.heads() * length;
    let diagonals = client.empty(elements * accumulator.size());
    sum_lines(&summed, Line::Diagonals, &diagonals)?;
    let [own_heads, width] = shape;
    let numbers = own_heads * width;
    let cubes = spread(client, numbers as u64)?;
    let address = address_of(client, elements.max(numbers))?;
    // SAFETY: a cube reads the diagonals of one distance and writes its own element of the table.
    unsafe {
        fold_distances::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(FOLD_UNITS as u32),
            address,
            buffer(&diagonals, elements),
            buffer(out, numbers),
            request.batch,
            layout.heads(),
            own_heads,
            layout.seq_q(),
            length,
            width / 2,
            accumulator,
        );
    }
    Ok(())
}

/// Sums of the segments of lines, and how kernels index them.
struct Segments {
    tile: Tile,
    line: Line,
    plan: Arc<DeviceLinePlan>,
    sums: Handle,
    /// Segments per head, at least 1 because buffers are not empty.
    segments: usize,
    /// Number of elements of `sums`.
    elements: usize,
    /// Elements per vector load.
    width: usize,
    address: AddressType,
    /// Number of final sums per head.
    length: usize,
    /// Index of the first final sum within a line of tiles.
    offset: usize,
    /// Number of final sums of all heads.
    total: usize,
}

impl Segments {
    fn new(summed: &Summed, line: Line) -> Result<Self, KernelError> {
        let (client, layout, request) = (summed.client, summed.layout, summed.request);
        let options = summed.options;
        let properties = client.properties();
        let tile = tile(properties, layout, request, summed.gradient.is_some())?;
        let (heads, seq_q, seq_kv) = (layout.heads(), layout.seq_q(), layout.seq_kv());
        let named = summed.named();
        let width = load_width(request.dtype, &named)?;
        let (length, offset) = match line {
            Line::Columns => (seq_kv, 0),
            Line::Diagonals => (
                seq_q + seq_kv - 1,
                seq_kv.next_multiple_of(tile.rows) - seq_kv,
            ),
        };
        let lines = Lines {
            line,
            side: tile.rows,
            queries: summed.queries.clone(),
            most_segments: properties.hardware.max_cube_count.0 as usize,
        };
        let plan = line_plan(client, layout, lines)?;
        let segments = plan.segments.max(1);
        let elements = request.batch * heads * segments * line_width(line, tile.rows);
        let total = request.batch * heads * length;
        let reaches = named.iter().map(|(_, tensor)| tensor.reach());
        let [_, stats] = summed.stats_len();
        let others = [elements, total, options.bias_len(), stats];
        let largest = reaches.chain(others).max().unwrap_or(0);
        Ok(Self {
            tile,
            line,
            plan,
            sums: client.empty(elements * request.accumulator().size()),
            segments,
            elements,
            width,
            address: address_of(client, largest)?,
            length,
            offset,
            total,
        })
    }

    fn words(&self) -> BufferArg {
        buffer(&self.plan.words, self.plan.len)
    }

    fn parts(&self, layout: &BlockLayout) -> LinePartsLaunch {
        let parts = &self.plan.sections;
        LinePartsLaunch::new(
            parts.heads,
            parts.lines,
            parts.segments,
            parts.tiles,
            parts.masks,
            batch_words(layout),
        )
    }

    /// Computes the sum of each segment.
    fn sum(&self, summed: &Summed) -> Result<(), KernelError> {
        let (client, layout, request) = (summed.client, summed.layout, summed.request);
        let ([q, k], options) = (summed.inputs, summed.options);
        let (tile, width, accumulator) = (self.tile, self.width, request.accumulator());
        let heads = layout.heads();
        let gradient = summed.gradient;
        let slopes = options.device_slopes(client, layout, accumulator)?;
        let [table_start, numbers] = summed.stats_len();
        for slice in Slice::whole(request.batch, heads).cut(client) {
            // SAFETY: a cube reads the tiles that the plan lists for its segment, reads positions below the lengths in the strides and writes its own sums.
            // The buffers have the stated lengths (see `buffer`).
            unsafe {
                kernel::launch_unchecked(
                    client,
                    slice.cubes(self.segments),
                    CubeDim::new_1d(tile.units() as u32),
                    self.address,
                    width,
                    row_tensor(q, width),
                    row_tensor(k, width),
                    buffer(summed.stats, numbers),
                    options.biases(slopes.as_ref(), heads, gradient.map(|_| table_start)),
                    match gradient {
                        Some([v, grad_out]) => ComptimeOptionArgs::Some(GradientInputsLaunch::new(
                            row_tensor(v, width),
                            row_tensor(grad_out, width),
                        )),
                        None => ComptimeOptionArgs::None,
                    },
                    buffer(&self.sums, self.elements),
                    LineScheduleLaunch::new(
                        PlanWordsLaunch::new(self.words(), listing(None)),
                        self.parts(layout),
                        slice.args(),
                    ),
                    heads / request.kv_heads,
                    request.batch * heads * layout.seq_q() * 2,
                    options.score_inputs(accumulator),
                    options.dropout_inputs(accumulator),
                    SumsConfig {
                        gradient: gradient.is_some(),
                        line: self.line,
                        tile,
                    },
                    [request.dtype, accumulator],
                );
            }
        }
        Ok(())
    }

    /// Adds up the segments of each line, or of the two diagonals of tiles that a distance crosses.
    fn add(&self, summed: &Summed, out: &Handle) -> Result<(), KernelError> {
        const UNITS: u32 = 64;
        let (client, layout) = (summed.client, summed.layout);
        let cubes = spread(client, (self.total as u64).div_ceil(u64::from(UNITS)))?;
        // SAFETY: a unit below `total` reads the segments of its lines and writes its own sum.
        unsafe {
            add_segments::launch_unchecked(
                client,
                cubes,
                CubeDim::new_1d(UNITS),
                self.address,
                buffer(&self.sums, self.elements),
                buffer(out, self.total),
                self.words(),
                self.parts(layout),
                layout.heads(),
                self.segments,
                self.plan.lines,
                self.length,
                self.offset,
                self.total,
                self.line,
                self.tile.rows,
                summed.request.accumulator(),
            );
        }
        Ok(())
    }
}

/// Sums along lines into `out`.
fn sum_lines(summed: &Summed, line: Line, out: &Handle) -> Result<(), KernelError> {
    let segments = Segments::new(summed, line)?;
    segments.sum(summed)?;
    segments.add(summed, out)
}

/// Sides of tiles, each with the rows per unit.
const SIDES: [(usize, usize); 4] = [(64, 4), (32, 4), (16, 2), (8, 1)];

/// Returns the largest tile that fits a block and the device.
fn tile(
    properties: &DeviceProperties,
    layout: &BlockLayout,
    request: &Request,
    gradient: bool,
) -> Result<Tile, KernelError> {
    let hardware = &properties.hardware;
    let fits = |tile: &Tile| {
        let side = tile.rows;
        let numbers = 2 * row_fours(tile, gradient) * 4 + side * side;
        // The compiler may align each of the three arrays to 16 bytes.
        let bytes = numbers * request.accumulator().size() + 3 * 16;
        bytes <= hardware.max_shared_memory_size && tile.units() <= most_units(properties)
    };
    let tiles = SIDES.map(|(side, unit_rows)| Tile {
        mainloop: Mainloop::Rows,
        rows: side,
        units_x: side / 4,
        unit_rows,
        head_dim: request.head_dim,
        value_dim: request.value_dim,
        group: side,
        mask_words: side.div_ceil(32),
        store: None,
        score: ScoreKind {
            dropout: gradient && request.score.dropout,
            seeds: gradient && request.score.seeds,
            ..request.score
        },
        max_scores: false,
        bias_gradient: false,
        fused: false,
        planes: false,
        residue: false,
        carry: false,
        clustered: false,
    });
    (tiles.into_iter())
        .filter(|tile| tile.rows <= layout.block_size())
        .find(fits)
        .ok_or(KernelError::SharedMemory {
            head_dim: request.head_dim,
            value_dim: request.value_dim,
            available: hardware.max_shared_memory_size,
        })
}
