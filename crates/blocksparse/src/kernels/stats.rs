//! What the backward pass needs of each query: lse and delta.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::args::{buffer, listing, optional, spread, strides_of, vectors_of};
use super::error::KernelError;
use super::pass::{BackwardPass, Part};
use super::simt::delta;

/// Units of a cube.
const UNITS: u32 = 64;

/// Which of a query's numbers are wanted, and where.
#[derive(Clone, Copy)]
pub struct Wanted {
    /// Places of a head.
    pub pitch: usize,
    /// Factor of lse.
    pub lse_factor: f64,
    /// Whether places are those of a listing by residue class, or else positions.
    pub by_class: bool,
}

/// `[batch · heads, pitch, 2]` in the type of sums: `lse · lse_factor` and delta of the query at each place of a part, with slopes and the
/// table of distances behind.
///
/// # Errors
/// [`KernelError`] if there are more cubes than the device launches.
pub fn make(pass: &BackwardPass, part: Part, wanted: Wanted) -> Result<Handle, KernelError> {
    let &BackwardPass {
        client,
        request,
        indexing,
        options,
        ..
    } = pass;
    let (width, accumulator) = (indexing.width, request.accumulator());
    let (heads, value_dim) = (pass.layout.heads(), request.value_dim);
    let rows = request.batch * heads * wanted.pitch;
    let [table_start, numbers] = options.stats_len(rows);
    let stats = client.empty(numbers * accumulator.size());
    let lanes = delta::delta_lanes(client.properties(), value_dim / width);
    let units = rows as u64 * lanes as u64;
    let cubes = spread(client, units.div_ceil(u64::from(UNITS)))?;
    // SAFETY: a unit reads the row of a query, if there is one at its place, and writes its own two numbers and some behind all rows; the
    // buffers have the lengths they say (see `buffer`).
    unsafe {
        delta::delta::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS),
            indexing.address,
            width,
            buffer(pass.outputs.out, pass.rows() * value_dim / width),
            vectors_of(pass.grads.out, width),
            buffer(pass.outputs.lse, pass.rows()),
            optional(pass.grads.lse, pass.rows()),
            optional(pass.slopes.as_ref(), heads),
            options.table(),
            buffer(&stats, numbers),
            strides_of(pass.grads.out, width),
            listing(part.residue),
            heads,
            rows,
            wanted.pitch,
            table_start,
            options.table_len(),
            InputScalar::new(wanted.lse_factor, accumulator),
            value_dim,
            lanes,
            wanted.by_class,
            request.dtype,
            accumulator,
        );
    }
    Ok(stats)
}

/// Those of all positions in order, which the `simt` tier reads.
///
/// # Errors
/// As [`make`].
pub fn make_plain(pass: &BackwardPass, part: Part) -> Result<Handle, KernelError> {
    let wanted = Wanted {
        pitch: pass.layout.seq_q(),
        lse_factor: 1.0,
        by_class: false,
    };
    make(pass, part, wanted)
}
