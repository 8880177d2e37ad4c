//! The forward pass of a call.

use cubecl::prelude::*;

use super::args::ScoreOptions;
use super::call::{Outputs, TensorView};
use super::choice::AttentionPlan;
use super::error::KernelError;
use super::pass::Pass;
use blocksparse::BlockLayout;

/// Runs the forward pass.
///
/// # Errors
/// [`KernelError`] if a limit of the device is exceeded, or an output that the request asks for has no buffer; then nothing was launched.
pub fn forward(
    client: &Client,
    plan: &AttentionPlan,
    layout: &BlockLayout,
    inputs: [&TensorView; 3],
    outputs: Outputs,
    options: &ScoreOptions,
) -> Result<(), KernelError> {
    let request = plan.request();
    for (output, asked, handle) in [
        ("weights", request.store, outputs.weights),
        ("max_scores", request.max_scores, outputs.max_scores),
    ] {
        if asked && handle.is_none() {
            return Err(KernelError::Output { output });
        }
    }
    let pass = Pass::new(client, layout, request, inputs, outputs, options, &[])?;
    (plan.parts().iter()).try_for_each(|plan| plan.forward.tile.launch(&pass, plan.part(layout)))
}
