//! Weights summed over columns and diagonals: checks and launches.

use std::ops::Range;

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::device::{DeviceLinePlan, line_plan};
use super::launch::{address_of, batch_words, listing, load_width, optional, spread};
use super::launch::{strides_of, vectors_of};
use super::simt::Tile;
use super::simt::mass::{LinePartsLaunch, add_segments, line_width, masses as kernel};
use super::simt::tile::pitch;
use super::{KernelError, ScoreOptions, Sizes, TensorView, check_dtype};
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
    tile(client, layout, sizes)?;
    let hardware = &client.properties().hardware;
    // q, k, lse, sums, the plan and the scalars.
    let buffers = 6 + usize::from(sizes.alibi) + usize::from(sizes.bias);
    for (what, limit, got) in [
        ("heads", hardware.max_cube_count.1, layout.heads()),
        ("batch", hardware.max_cube_count.2, sizes.batch),
        ("the buffers of a kernel", hardware.max_bindings, buffers),
    ] {
        if got as u64 > u64::from(limit) {
            return Err(KernelError::limit(what, limit, got));
        }
    }
    Ok(())
}

/// Sums `exp(score − lse)` over the queries of each key, and over the pairs at each distance.
///
/// # Errors
/// [`KernelError`] if a limit of the device is exceeded; then nothing was launched.
pub fn masses(
    client: &Client,
    layout: &BlockLayout,
    sizes: &Sizes,
    [q, k]: [&TensorView; 2],
    lse: &Handle,
    options: &ScoreOptions,
    outputs: &MassOutputs,
) -> Result<(), KernelError> {
    check_masses(client, layout, sizes)?;
    let tile = tile(client, layout, sizes)?;
    let (heads, seq_q, seq_kv) = (layout.heads(), layout.seq_q(), layout.seq_kv());
    let accumulator = sizes.accumulator();
    let width = load_width(sizes.dtype, &[("q", q), ("k", k)])?;
    let slopes = options.device_slopes(client, layout, accumulator);
    let passes = [
        (Line::Columns, seq_kv, 0, &outputs.columns),
        (
            Line::Diagonals,
            seq_q + seq_kv - 1,
            seq_kv.next_multiple_of(tile.rows) - seq_kv,
            &outputs.diagonals,
        ),
    ];
    let hardware = &client.properties().hardware;
    let plans = passes.each_ref().map(|(line, ..)| {
        let lines = Lines {
            line: *line,
            side: tile.rows,
            queries: outputs.queries.clone(),
            most_segments: hardware.max_cube_count.0 as usize,
        };
        line_plan(client, layout, lines)
    });
    let mut largest = q.reach().max(k.reach());
    for (plan, (line, length, ..)) in plans.iter().zip(&passes) {
        let limit = hardware.max_cube_count.0;
        if plan.segments > limit as usize {
            return Err(KernelError::limit(
                "the segments of a head",
                limit,
                plan.segments,
            ));
        }
        let sums = plan.segments * line_width(*line, tile.rows);
        largest = largest.max(sizes.batch * heads * sums.max(*length));
    }
    let largest = largest.max(options.bias.as_ref().map_or(0, |bias| bias.elements()));
    let address = address_of(client, largest)?;
    for (plan, (line, length, offset, out)) in plans.iter().zip(passes) {
        let parts = || line_parts(plan, batch_words(layout));
        let words = || unsafe { BufferArg::from_raw_parts(plan.words.clone(), plan.len) };
        // A buffer has an element at least.
        let segments = plan.segments.max(1);
        let elements = sizes.batch * heads * segments * line_width(line, tile.rows);
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
                BufferArg::from_raw_parts(lse.clone(), sizes.batch * heads * seq_q),
                optional(slopes.as_ref(), heads),
                options.bias(),
                BufferArg::from_raw_parts(sums.clone(), elements),
                words(),
                strides_of(q, width),
                strides_of(k, width),
                options.bias_strides(),
                listing(None),
                parts(),
                heads / sizes.kv_heads,
                InputScalar::new(options.scale, accumulator),
                InputScalar::new(options.softcap.unwrap_or(1.0), accumulator),
                line,
                tile,
                sizes.dtype,
                accumulator,
            );
        }
        const UNITS: u32 = 64;
        let total = sizes.batch * heads * length;
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
    }
    Ok(())
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
fn tile(client: &Client, layout: &BlockLayout, sizes: &Sizes) -> Result<Tile, KernelError> {
    let hardware = &client.properties().hardware;
    let fits = |tile: &Tile| {
        let side = tile.rows;
        let numbers = 2 * side * pitch(tile.head_dim) * 4 + side * side;
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
        value_dim: sizes.head_dim,
        group: side,
        mask_words: side.div_ceil(32),
        store: None,
        softcap: sizes.softcap,
        alibi: sizes.alibi,
        dropout: false,
        bias: sizes.bias,
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
