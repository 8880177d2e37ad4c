//! Plans and slopes on devices.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::device_key::{DeviceKey, device_key};
use super::error::KernelError;
use super::recording;
use blocksparse::BlockLayout;
use blocksparse::plan::Sections;

/// A [`TilePlan`](blocksparse::plan::TilePlan) whose words are on a device.
pub struct DevicePlan {
    pub words: Handle,
    pub len: usize,
    pub sections: Sections,
    pub tiles: usize,
    /// Number of first tiles in launch order that add to separate sums.
    pub apart: usize,
    /// See [`TilePlan::between`](blocksparse::plan::TilePlan::between). 0 if blocks are chosen on the device.
    pub between: usize,
    /// See [`TilePlan::complete`](blocksparse::plan::TilePlan::complete).
    pub complete: bool,
    /// Steps of each pattern's tiles, tile by tile. Empty if blocks are chosen on the device.
    pub steps: Vec<usize>,
}

/// Slopes and their buffer.
type Known = (Arc<[f64]>, Handle);

#[derive(Default)]
struct DeviceSlopes(Mutex<HashMap<(DeviceKey, ElemType), Known>>);

/// Returns ALiBi slopes `[heads]` in the accumulator type. They seldom change between calls, and are uploaded only if they do.
///
/// # Errors
/// [`KernelError::Recording`] if they would be uploaded inside a recording.
pub fn slopes(
    client: &Client,
    layout: &BlockLayout,
    slopes: &Arc<[f64]>,
    accumulator: ElemType,
) -> Result<Handle, KernelError> {
    const WHAT: &str = "the slopes of heads";
    let known = layout.attachment(DeviceSlopes::default);
    let mut known = known.0.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (device_key(client), accumulator);
    if let Some((same, handle)) = known.get(&key)
        && same == slopes
    {
        return Ok(handle.clone());
    }
    let handle = match accumulator {
        ElemType::Float(FloatKind::F64) => recording::upload(client, slopes, WHAT)?,
        _ => {
            let slopes: Vec<f32> = slopes.iter().map(|&slope| slope as f32).collect();
            recording::upload(client, &slopes, WHAT)?
        }
    };
    known.insert(key, (slopes.clone(), handle.clone()));
    Ok(handle)
}
