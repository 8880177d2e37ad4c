//! The backward pass of a call.

use cubecl::prelude::*;

use super::args::ScoreOptions;
use super::attention_sums::distance_gradient;
use super::call::{Gradients, OutputGrads, Outputs, TensorView};
use super::choice::AttentionPlan;
use super::error::KernelError;
use super::pass::{BackwardPass, Pass};
use super::tier::KnownStats;
use blocksparse::BlockLayout;

/// Runs the backward pass. `outputs` must hold the forward pass's results.
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
    let beside = [("grad_out", grads.out)];
    let pass = BackwardPass {
        pass: Pass::new(client, layout, request, inputs, outputs, options, &beside)?,
        grads,
        gradients,
    };
    let mut known = KnownStats::default();
    for plan in plan.parts() {
        let part = plan.part(layout);
        // The bias's gradient has its own launch, whichever tier computes the gradients of the inputs.
        if let (Some(bias), Some(out)) = (&options.bias, &gradients.bias) {
            plan.bias
                .tile
                .launch(&pass, part, (bias, out), &mut known)?;
        }
        plan.backward.tile.launch(&pass, part, &mut known)?;
    }
    if let Some(table) = &gradients.relative {
        let stats = known.plain(&pass)?;
        distance_gradient(&pass, &stats, table)?;
    }
    Ok(())
}
