//! Launch plans that a layout caches per device, uploaded or made there once.

use std::sync::Arc;

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::device_key::{DeviceKey, device_key};
use super::error::KernelError;
use super::uploaded::DevicePlan;
use super::{on_device, recording};
use blocksparse::BlockLayout;
use blocksparse::internal::Slots;
use blocksparse::lines::{LinePlan, LineSections, Lines};
use blocksparse::plan::{TilePlan, Tiling};

type Key = (DeviceKey, Tiling);

#[derive(Default)]
struct DevicePlans(Slots<Key, Option<Arc<DevicePlan>>>);

/// Uploads the words of a plan.
fn upload(client: &Client, words: &[u32]) -> Result<Handle, KernelError> {
    check_words(words.len())?;
    recording::upload(client, words, "the launch plan of a layout")
}

/// Checks that kernels can index the words of a plan in 32 bits.
fn check_words(words: usize) -> Result<(), KernelError> {
    KernelError::check_u32("the words of a launch plan", words).map(|_| ())
}

/// Returns the plan of a layout under a tiling, on the client's device. Making it takes seconds for a million positions; only callers that need the same
/// plan wait.
///
/// # Errors
/// [`KernelError::Limit`] if it has more words than kernels can index.
pub fn plan(
    client: &Client,
    layout: &BlockLayout,
    tiling: Tiling,
) -> Result<Arc<DevicePlan>, KernelError> {
    let plans = layout.attachment(DevicePlans::default);
    let key = (device_key(client), tiling);
    plans.0.get_or_try_make(key, || {
        Ok(Arc::new(match layout.device_choice() {
            Some(choice) => {
                let whole = layout.within().map(|whole| plan(client, whole, tiling));
                let whole = whole.transpose()?;
                on_device::plan(client, layout, choice, tiling, whole.as_deref())?
            }
            None => {
                let plan = TilePlan::new(layout, tiling);
                DevicePlan {
                    words: upload(client, &plan.words)?,
                    len: plan.words.len(),
                    sections: plan.sections,
                    tiles: plan.tiles,
                    apart: plan.apart,
                    between: plan.between,
                    complete: plan.complete,
                    steps: plan.pattern_steps(),
                }
            }
        }))
    })
}

/// A [`LinePlan`] whose words are on a device.
pub struct DeviceLinePlan {
    pub words: Handle,
    pub len: usize,
    pub sections: LineSections,
    pub segments: usize,
    pub lines: usize,
}

#[derive(Default)]
struct DeviceLinePlans(Slots<(DeviceKey, Lines), Option<Arc<DeviceLinePlan>>>);

/// Returns the line plan of a layout, on the client's device.
///
/// # Errors
/// Those of [`plan`].
pub fn line_plan(
    client: &Client,
    layout: &BlockLayout,
    lines: Lines,
) -> Result<Arc<DeviceLinePlan>, KernelError> {
    let plans = layout.attachment(DeviceLinePlans::default);
    let key = (device_key(client), lines.clone());
    plans.0.get_or_try_make(key, || {
        let plan = LinePlan::new(layout, &lines);
        Ok(Arc::new(DeviceLinePlan {
            words: upload(client, &plan.words)?,
            len: plan.words.len(),
            sections: plan.sections,
            segments: plan.segments,
            lines: plan.lines,
        }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_have_no_more_words_than_kernels_index() {
        assert_eq!(check_words(u32::MAX as usize), Ok(()));
        let error = check_words(1 << 32).unwrap_err().to_string();
        assert!(
            error.contains("the words of a launch plan must be at most 4294967295")
                && error.contains("got 4294967296"),
            "{error}"
        );
    }
}
