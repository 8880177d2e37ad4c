//! What backward passes know of each row of queries.

use cubecl::ir::FloatKind;

use crate::kernels::listed::request::ListedRequest;
use blocksparse_cubecl::args::{ScoreOptions, load_width};
use blocksparse_cubecl::call::{OutputGrads, Outputs};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::stats;
use blocksparse_cubecl::stats::{Known, Wanted};

/// `lse · log2 e` and delta of each query: `[batch · heads, seq_q, 2]`, f32.
pub fn stats_of(
    client: &Client,
    request: &ListedRequest,
    outputs: Outputs,
    grads: OutputGrads,
    scale: f64,
) -> Result<Handle, KernelError> {
    let largest = (request.all_rows() * request.value_dim).max(grads.out.reach());
    let known = Known {
        client,
        batch: request.batch,
        heads: request.heads,
        value_dim: request.value_dim,
        dtypes: [request.dtype, ElemType::Float(FloatKind::F32)],
        outputs,
        grads,
        options: &ScoreOptions::new(scale),
        slopes: None,
        width: load_width(request.dtype, &[("grad_out", grads.out)])?,
        address: address_of(client, largest)?,
    };
    let wanted = Wanted {
        pitch: request.seq_q,
        lse_factor: std::f64::consts::LOG2_E,
        by_class: false,
    };
    stats::of_queries(&known, None, wanted)
}
