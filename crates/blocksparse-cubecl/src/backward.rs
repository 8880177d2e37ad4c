//! The backward pass of a call.

use cubecl::prelude::*;

use super::args::{Indexing, ScoreOptions};
use super::attention_sums::distance_gradient;
use super::call::{Gradients, OutputGrads, Outputs, TensorView};
use super::choice::AttentionPlan;
use super::error::KernelError;
use super::pass::BackwardPass;
use super::tier::KnownStats;
use blocksparse::BlockLayout;

/// Runs the backward pass: `outputs` as the forward pass left them.
///
/// # Errors
/// [`KernelError`] if a limit of the device is exceeded; then nothing was launched.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    client: &Client,
    plan: &AttentionPlan,
    layout: &BlockLayout,
    inputs: [&TensorView; 3],
    outputs: Outputs,
    grads: OutputGrads,
    gradients: &Gradients,
    options: &ScoreOptions,
) -> Result<(), KernelError> {
    plan.check_backward()?;
    let request = plan.request();
    let [q, k, v] = inputs;
    let named = [("q", q), ("k", k), ("v", v), ("grad_out", grads.out)];
    let pass = BackwardPass {
        client,
        layout,
        request,
        inputs,
        outputs,
        grads,
        gradients,
        options,
        slopes: options.device_slopes(client, layout, request.accumulator())?,
        indexing: Indexing::new(client, request, layout, &named, options)?,
    };
    let mut known = KnownStats::default();
    for plan in plan.parts() {
        let part = plan.part(layout);
        // Whatever tier the gradients of the inputs are made on.
        if let (Some(bias), Some(out)) = (&options.bias, &gradients.bias) {
            plan.bias
                .tile
                .launch(&pass, part, (bias, out), &mut known)?;
        }
        plan.backward.tile.launch(&pass, part, &mut known)?;
    }
    if let Some(table) = &gradients.relative {
        let first = plan.parts()[0].part(layout);
        let stats = known.plain(&pass, first)?;
        distance_gradient(&pass, &stats, table)?;
    }
    Ok(())
}
