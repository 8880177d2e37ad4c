//! Weights summed over columns and diagonals: checks and launches.

use std::ops::Range;

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::device::{DeviceLinePlan, line_plan};
use super::launch::{address_of, batch_words, listing, load_width, optional, spread};
use super::launch::{strides_of, vectors_of};
use super::simt::Tile;
use super::simt::mass::{
    FOLD_UNITS, LinePartsLaunch, add_segments, fold_distances, line_width, masses as kernel,
    row_fours,
};
use super::{KernelError, ScoreOptions, Sizes, TableView, TensorView, check_dtype};
use crate::BlockLayout;
use crate::lines::{Line, Lines};

/// What the sums are of, and where they go.
#[derive(Clone, Debug)]
pub struct MassOutputs {
    /// Queries that count.
    pub queries: Range<usize>,
    /// `[batch, heads, seq_kv]`, in the type of sums: over the queries of each key.
    pub columns: Handle,
    /// `[batch, heads, seq_q + seq_kv − 1]`: over the pairs of query row `i` and key row `j`, at `i − j + seq_kv − 1`.
    pub diagonals: Handle,
}

/// Checks that a device can sum the weights of a call.
///
/// # Errors
/// [`KernelError`] if it lacks the dtype, or a limit of it is exceeded.
pub fn check_masses(
    client: &Client,
    layout: &BlockLayout,
    sizes: &Sizes,
) -> Result<(), KernelError> {
    check_dtype(client, sizes.dtype)?;
    // q, k, lse, sums, the plan and the scalars.
    let buffers = 6 + [sizes.alibi, sizes.bias, sizes.relative]
        .map(usize::from)
        .iter()
        .sum::<usize>();
    check(client, layout, sizes, false, buffers).map(|_| ())
}

/// The tile that makes the gradient of biases of distances, if a device can make it.
pub(super) fn check_distances(
    client: &Client,
    layout: &BlockLayout,
    sizes: &Sizes,
) -> Result<Tile, KernelError> {
    // q, k, v, grad_out, stats, sums, the plan and the scalars.
    check(client, layout, sizes, true, 8 + usize::from(sizes.bias))
}

fn check(
    client: &Client,
    layout: &BlockLayout,
    sizes: &Sizes,
    gradient: bool,
    buffers: usize,
) -> Result<Tile, KernelError> {
    let tile = tile(client, layout, sizes, gradient)?;
    let hardware = &client.properties().hardware;
    let lines = layout.seq_q().div_ceil(tile.rows) + layout.seq_kv().div_ceil(tile.rows);
    for (what, limit, got) in [
        ("the diagonals of tiles", hardware.max_cube_count.0, lines),
        ("heads", hardware.max_cube_count.1, layout.heads()),
        ("batch", hardware.max_cube_count.2, sizes.batch),
        ("the buffers of a kernel", hardware.max_bindings, buffers),
    ] {
        if got as u64 > u64::from(limit) {
            return Err(KernelError::limit(what, limit, got));
        }
    }
    Ok(tile)
}

/// What is summed along lines.
struct Summed<'a> {
    inputs: [&'a TensorView; 2],
    /// v and grad_out, for the gradient of scores in the place of weights.
    gradient: Option<[&'a TensorView; 2]>,
    /// lse, or the stats of the backward pass.
    stats: &'a Handle,
    options: &'a ScoreOptions,
    queries: Range<usize>,
}

/// Sums `exp(score − lse)` over the queries of each key, and over the pairs at each distance.
///
/// # Errors
/// [`KernelError`] if a limit of the device is exceeded; then nothing was launched.
pub fn masses(
    client: &Client,
    layout: &BlockLayout,
    sizes: &Sizes,
    inputs: [&TensorView; 2],
    lse: &Handle,
    options: &ScoreOptions,
    outputs: &MassOutputs,
) -> Result<(), KernelError> {
    check_masses(client, layout, sizes)?;
    let summed = Summed {
        inputs,
        gradient: None,
        stats: lse,
        options,
        queries: outputs.queries.clone(),
    };
    sum_lines(
        client,
        layout,
        sizes,
        &summed,
        Line::Columns,
        &outputs.columns,
    )?;
    sum_lines(
        client,
        layout,
        sizes,
        &summed,
        Line::Diagonals,
        &outputs.diagonals,
    )
}

/// The gradient of biases of distances: that of the scores, summed over diagonals, batch entries and what shares a bias. `stats` are those of the
/// backward pass.
pub(super) fn distance_gradient(
    client: &Client,
    layout: &BlockLayout,
    sizes: &Sizes,
    [q, k, v, grad_out]: [&TensorView; 4],
    stats: &Handle,
    options: &ScoreOptions,
    table: &Handle,
) -> Result<(), KernelError> {
    let Some(TableView { shape, .. }) = options.relative else {
        return Ok(());
    };
    let summed = Summed {
        inputs: [q, k],
        gradient: Some([v, grad_out]),
        stats,
        options,
        queries: 0..layout.seq_q(),
    };
    let accumulator = sizes.accumulator();
    let length = layout.seq_q() + layout.seq_kv() - 1;
    let elements = sizes.batch * layout.heads() * length;
    let diagonals = client.empty(elements * accumulator.size());
    sum_lines(client, layout, sizes, &summed, Line::Diagonals, &diagonals)?;
    let [own_heads, width] = shape;
    let cubes = spread(client, (own_heads * width) as u64)?;
    unsafe {
        fold_distances::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(FOLD_UNITS as u32),
            address_of(client, elements)?,
            BufferArg::from_raw_parts(diagonals, elements),
            BufferArg::from_raw_parts(table.clone(), own_heads * width),
            sizes.batch,
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

/// Sums along lines into `out`.
fn sum_lines(
    client: &Client,
    layout: &BlockLayout,
    sizes: &Sizes,
    summed: &Summed,
    line: Line,
    out: &Handle,
) -> Result<(), KernelError> {
    let [q, k] = summed.inputs;
    let options = summed.options;
    let tile = tile(client, layout, sizes, summed.gradient.is_some())?;
    let (heads, seq_q, seq_kv) = (layout.heads(), layout.seq_q(), layout.seq_kv());
    let accumulator = sizes.accumulator();
    let mut named = vec![("q", q), ("k", k)];
    if let Some([v, grad_out]) = summed.gradient {
        named.extend([("v", v), ("grad_out", grad_out)]);
    }
    let width = load_width(sizes.dtype, &named)?;
    let (length, offset) = match line {
        Line::Columns => (seq_kv, 0),
        Line::Diagonals => (
            seq_q + seq_kv - 1,
            seq_kv.next_multiple_of(tile.rows) - seq_kv,
        ),
    };
    let limit = client.properties().hardware.max_cube_count.0;
    let lines = Lines {
        line,
        side: tile.rows,
        queries: summed.queries.clone(),
        most_segments: limit as usize,
    };
    let plan = line_plan(client, layout, lines);
    // A buffer has an element at least.
    let segments = plan.segments.max(1);
    let elements = sizes.batch * heads * segments * line_width(line, tile.rows);
    let total = sizes.batch * heads * length;
    let reaches = named.iter().map(|(_, tensor)| tensor.reach());
    let bias = options.bias.as_ref().map_or(0, |bias| bias.elements());
    let largest = reaches.chain([elements, total, bias]).max().unwrap_or(0);
    let address = address_of(client, largest)?;
    // lse and delta, then the slopes and the biases of distances.
    let rows = sizes.batch * heads * seq_q;
    let gradient = summed.gradient.is_some();
    let slopes = options.device_slopes(client, layout, accumulator);
    let [table_start, numbers] = match gradient {
        true => options.stats_len(rows),
        false => [0, rows],
    };
    let [v, grad_out] = summed.gradient.unwrap_or(summed.inputs);
    let parts = || line_parts(&plan, batch_words(layout));
    let words = || unsafe { BufferArg::from_raw_parts(plan.words.clone(), plan.len) };
    let sums = client.empty(elements * accumulator.size());
    unsafe {
        kernel::launch_unchecked(
            client,
            CubeCount::Static(segments as u32, heads as u32, sizes.batch as u32),
            CubeDim::new_1d(tile.units() as u32),
            address,
            width,
            vectors_of(q, width),
            vectors_of(k, width),
            BufferArg::from_raw_parts(summed.stats.clone(), numbers),
            match gradient {
                true => ComptimeOptionArgs::None,
                false => optional(slopes.as_ref(), heads),
            },
            options.bias(),
            match gradient {
                true => ComptimeOptionArgs::None,
                false => options.table(),
            },
            vectors_if(gradient, v, width),
            vectors_if(gradient, grad_out, width),
            BufferArg::from_raw_parts(sums.clone(), elements),
            words(),
            strides_of(q, width),
            strides_of(k, width),
            strides_of(v, width),
            strides_of(grad_out, width),
            options.bias_strides(),
            options.distances(table_start),
            listing(None),
            parts(),
            heads / sizes.kv_heads,
            rows * 2,
            InputScalar::new(options.scale, accumulator),
            InputScalar::new(options.softcap.unwrap_or(1.0), accumulator),
            options.mask(),
            options.dropout_factor(accumulator),
            gradient,
            line,
            tile,
            sizes.dtype,
            accumulator,
        );
    }
    const UNITS: u32 = 64;
    let cubes = spread(client, (total as u64).div_ceil(u64::from(UNITS)))?;
    unsafe {
        add_segments::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS),
            address,
            BufferArg::from_raw_parts(sums, elements),
            BufferArg::from_raw_parts(out.clone(), total),
            words(),
            parts(),
            heads,
            segments,
            plan.lines,
            length,
            offset,
            total,
            line,
            tile.rows,
            accumulator,
        );
    }
    Ok(())
}

/// A tensor in vectors, if it is asked for.
fn vectors_if<T: LaunchArg<RuntimeArg = BufferArg>>(
    wanted: bool,
    tensor: &TensorView,
    width: usize,
) -> ComptimeOptionArgs<T> {
    match wanted {
        true => ComptimeOptionArgs::Some(vectors_of(tensor, width)),
        false => ComptimeOptionArgs::None,
    }
}

fn line_parts(plan: &DeviceLinePlan, batch_words: usize) -> LinePartsLaunch {
    let parts = &plan.sections;
    LinePartsLaunch::new(
        parts.heads,
        parts.lines,
        parts.segments,
        parts.tiles,
        parts.masks,
        batch_words,
    )
}

/// Sides of tiles with the rows of a unit.
const SIDES: [(usize, usize); 4] = [(64, 4), (32, 4), (16, 2), (8, 1)];

/// The largest tile that fits a block and the device.
fn tile(
    client: &Client,
    layout: &BlockLayout,
    sizes: &Sizes,
    gradient: bool,
) -> Result<Tile, KernelError> {
    let hardware = &client.properties().hardware;
    let fits = |tile: &Tile| {
        let side = tile.rows;
        let numbers = 2 * row_fours(tile, gradient) * 4 + side * side;
        // The compiler may align each of the three arrays.
        let bytes = numbers * sizes.accumulator().size() + 3 * 16;
        bytes <= hardware.max_shared_memory_size
            && tile.units() <= hardware.max_units_per_cube as usize
            && tile.units() <= hardware.max_cube_dim.0 as usize
    };
    let tiles = SIDES.map(|(side, unit_rows)| Tile {
        rows: side,
        units_x: side / 4,
        unit_rows,
        head_dim: sizes.head_dim,
        value_dim: sizes.value_dim,
        group: side,
        mask_words: side.div_ceil(32),
        store: None,
        softcap: sizes.softcap,
        alibi: sizes.alibi,
        dropout: gradient && sizes.dropout,
        bias: sizes.bias,
        relative: sizes.relative,
        bias_gradient: false,
        planes: false,
        residue: false,
        carry: false,
        clustered: false,
    });
    (tiles.into_iter())
        .filter(|tile| tile.rows <= layout.block_size())
        .find(fits)
        .ok_or(KernelError::SharedMemory {
            head_dim: sizes.head_dim,
            value_dim: sizes.value_dim,
            available: hardware.max_shared_memory_size,
        })
}
