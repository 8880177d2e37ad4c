//! Stats of each query for the backward pass: lse and delta.

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::args::{ScoreOptions, buffer, listing, optional, row_tensor, spread};
use super::call::{OutputGrads, Outputs};
use super::error::KernelError;
use super::pass::{BackwardPass, Part};
use crate::shared::delta::{self, DeltaConfig, OutputRowsLaunch, StatsLengthsLaunch};
use blocksparse::Residue;

/// Units per cube.
const UNITS: u32 = 64;

/// Queries whose stats to compute, and their layout.
#[derive(Clone, Copy)]
pub struct Wanted {
    /// Places per head.
    pub pitch: usize,
    /// Factor of lse.
    pub lse_factor: f64,
    /// Order of positions, by residue class. `None` means consecutive positions.
    pub residue: Option<Residue>,
}

impl Wanted {
    /// All places of a part, padded to a multiple, with lse in base 2: the layout of tensor-core kernels.
    pub fn of_places(part: Part, multiple: usize) -> Self {
        Self {
            pitch: part.layout.seq_q().next_multiple_of(multiple),
            lse_factor: std::f64::consts::LOG2_E,
            residue: part.residue,
        }
    }
}

/// Operands from which the stats are computed.
pub struct Known<'a> {
    pub client: &'a Client,
    pub batch: usize,
    pub heads: usize,
    pub value_dim: usize,
    /// Types of the tensors and of the accumulator.
    pub dtypes: [ElemType; 2],
    pub outputs: Outputs<'a>,
    pub grads: OutputGrads<'a>,
    pub options: &'a ScoreOptions,
    /// The slopes on the device.
    pub slopes: Option<&'a Handle>,
    /// Elements per vector load.
    pub width: usize,
    pub address: AddressType,
}

/// Computes the stats `[batch · heads, pitch, 2]` in the accumulator type: `lse · lse_factor` and delta of the query at each place of a part, followed by
/// the slopes and the table of distances.
///
/// # Errors
/// [`KernelError`] if there are more cubes than the device launches.
pub fn make(pass: &BackwardPass, wanted: Wanted) -> Result<Handle, KernelError> {
    let request = pass.request;
    let known = Known {
        client: pass.client,
        batch: request.batch,
        heads: pass.layout.heads(),
        value_dim: request.value_dim,
        dtypes: [request.dtype, request.accumulator()],
        outputs: pass.outputs,
        grads: pass.grads,
        options: pass.options,
        slopes: pass.slopes.as_ref(),
        width: pass.indexing.width,
        address: pass.indexing.address,
    };
    of_queries(&known, wanted)
}

/// Like [`make`], without a pass.
///
/// # Errors
/// Those of [`make`].
pub fn of_queries(known: &Known, wanted: Wanted) -> Result<Handle, KernelError> {
    let (client, batch, heads) = (known.client, known.batch, known.heads);
    let (value_dim, [dtype, accumulator]) = (known.value_dim, known.dtypes);
    let (outputs, grads, options) = (known.outputs, known.grads, known.options);
    let (slopes, width, address) = (known.slopes, known.width, known.address);
    let outs = batch * heads * grads.out.shape[2];
    let rows = batch * heads * wanted.pitch;
    let [table_start, numbers] = options.stats_len(rows);
    let stats = client.empty(numbers * accumulator.size());
    let lanes = delta::delta_lanes(client.properties(), value_dim / width);
    let units = rows as u64 * lanes as u64;
    let cubes = spread(client, units.div_ceil(u64::from(UNITS)))?;
    // SAFETY: a unit reads the row of the query at its place, if there is one, and writes its own two elements and some of those after all rows. The buffers
    // have the stated lengths (see `buffer`).
    unsafe {
        delta::delta::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS),
            address,
            width,
            OutputRowsLaunch::new(
                buffer(outputs.out, outs * value_dim / width),
                row_tensor(grads.out, width),
                buffer(outputs.lse, outs),
                optional(grads.lse, outs),
            ),
            optional(slopes, heads),
            options.table(),
            buffer(&stats, numbers),
            listing(wanted.residue),
            StatsLengthsLaunch::new(heads, rows, wanted.pitch, table_start, options.table_len()),
            InputScalar::new(wanted.lse_factor, accumulator),
            DeltaConfig {
                value_dim,
                lanes,
                residue: wanted.residue.is_some(),
            },
            [dtype, accumulator],
        );
    }
    Ok(stats)
}

/// Computes the stats of all positions in order, which the `simt` tier reads.
///
/// # Errors
/// Those of [`make`].
pub fn make_plain(pass: &BackwardPass) -> Result<Handle, KernelError> {
    let wanted = Wanted {
        pitch: pass.layout.seq_q(),
        lse_factor: 1.0,
        residue: None,
    };
    make(pass, wanted)
}
