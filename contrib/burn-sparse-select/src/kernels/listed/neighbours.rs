//! Neighbouring queries that walk the union of their lists together, on wgmma.
//!
//! Where few heads share a list, a query's walk makes few products of the bytes it reads, and the L2 cache is what it waits for. Queries that choose for
//! themselves, but by scores that change little from one to the next, list nearly the same keys: the heads of neighbours fill two warpgroups, which read every
//! key or block that one of them listed once, with a bit for each query. The more alike lists are, the fewer those keys.
//!
//! The lists of some groups of neighbours are there at a time.

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::listed::neighbour_plan::NeighbourPlan;
use crate::kernels::listed::row_stats::stats_of;
use crate::kernels::listed::spread_launch::{Spread, SpreadKernel};
use crate::kernels::listed::views::{ListedGradients, check_inputs};
use crate::kernels::listed::warpgroups;
use crate::kernels::listed::warpgroups::{WalkedLists, WarpgroupTile};
use blocksparse_cubecl::call::{OutputGrads, Outputs, TensorView};
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::on_device::{
    BitsOfKeys, NeighbourLists, Queries, Uniting, neighbour_lists,
};

/// Launches over the lists of all groups, some at a time.
fn for_lists(
    client: &Client,
    plan: &NeighbourPlan,
    given: &Handle,
    with_bits: bool,
    mut launch: impl FnMut(&WalkedLists) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let (groups, at_a_time) = (plan.groups(), plan.at_a_time());
    let uniting = Uniting {
        together: plan.together,
        ascending: plan.request.is_of_keys(),
        with_bits,
    };
    for first in (0..groups).step_by(at_a_time) {
        let count = at_a_time.min(groups - first);
        let sizes = plan.request.list_sizes();
        let lists = neighbour_lists(client, &sizes, given, Queries { first, count }, uniting)?;
        let bits = lists.bits.as_ref().map(|by_rows| {
            let lengths = [count, sizes.seq_kv];
            BitsOfKeys::new(client, by_rows, sizes.lists, lengths)
        });
        let NeighbourLists {
            keys,
            masks,
            counts,
            sizes,
            ..
        } = &lists;
        launch(&WalkedLists {
            keys,
            masks,
            counts,
            bits: bits.as_ref(),
            first,
            count,
            most: sizes.most,
        })?;
    }
    Ok(())
}

/// Attention to what lists name into `out` and `lse`, which hold attention to other keys with `carry`, and are carried on. `lists` are of single keys as
/// [`ListedLists::Keys`](crate::kernels::listed::ListedLists::Keys) has them, or of blocks, each once.
///
/// # Errors
/// [`KernelError`] if cp.async cannot read a tensor, or the scale is not positive. Then nothing was launched.
pub fn forward(
    client: &Client,
    plan: &NeighbourPlan,
    inputs: [&TensorView; 3],
    lists: &Handle,
    outputs: Outputs,
    scale: f64,
    carry: bool,
) -> Result<(), KernelError> {
    check_inputs(&inputs, scale)?;
    let tile = WarpgroupTile {
        carry,
        ..plan.forward
    };
    for_lists(client, plan, lists, false, |lists| {
        let request = &plan.request;
        warpgroups::forward(client, request, inputs, lists, outputs, scale, tile);
        Ok(())
    })
}

/// Adds the gradient by queries of `[q, k, v, grad_out]`, with the queries' `stats`.
pub(crate) fn queries(
    client: &Client,
    plan: &NeighbourPlan,
    inputs: [&TensorView; 4],
    (stats, lists): (&Handle, &Handle),
    gradient: &Handle,
    scale: f64,
) -> Result<(), KernelError> {
    for_lists(client, plan, lists, false, |lists| {
        let (request, tile) = (&plan.request, plan.queries);
        let of = (stats, lists);
        warpgroups::queries(client, request, inputs, of, gradient, scale, tile);
        Ok(())
    })
}

/// Adds the gradients by what lists of single keys name, as [`backward`](crate::kernels::listed::backward) does of lists of queries.
///
/// # Errors
/// As [`forward`].
///
/// # Panics
/// If the plan is of blocks.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    client: &Client,
    plan: &NeighbourPlan,
    [q, k, v]: [&TensorView; 3],
    keys: &Handle,
    outputs: Outputs,
    grads: OutputGrads,
    gradients: ListedGradients,
    scale: f64,
) -> Result<(), KernelError> {
    let request = &plan.request;
    let inputs = [q, k, v, grads.out];
    check_inputs(&inputs, scale)?;
    let stats = stats_of(client, request, outputs, grads, scale)?;
    let spread = Spread {
        client,
        request,
        inputs,
        stats: &stats,
        gradients,
        scale,
        kernel: SpreadKernel::Warpgroups(plan.spread.expect("of single keys")),
    };
    let room = spread.room([plan.groups(), plan.at_a_time()], plan.most())?;
    for_lists(client, plan, keys, true, |lists| {
        let (of, tile) = ((&stats, lists), plan.queries);
        warpgroups::queries(client, request, inputs, of, gradients.q, scale, tile);
        spread.launch(&room, lists)
    })
}
