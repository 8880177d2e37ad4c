//! What lies on devices, and how they are told apart.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cubecl::device::DeviceId;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::BlockLayout;
use crate::plan::Sections;

/// A device of a runtime.
pub type DeviceKey = (&'static str, DeviceId);

/// A client's device.
pub fn device_key(client: &Client) -> DeviceKey {
    (client.name(), client.service_id().device)
}

/// A [`TilePlan`](crate::plan::TilePlan) whose words are on a device.
pub struct DevicePlan {
    pub words: Handle,
    pub len: usize,
    pub sections: Sections,
    pub tiles: usize,
}

/// Slopes, and where they are.
type Known = (Arc<[f64]>, Handle);

#[derive(Default)]
struct DeviceSlopes(Mutex<HashMap<(DeviceKey, ElemType), Known>>);

/// ALiBi slopes in the type of sums, `[heads]`. They seldom change between calls: uploaded again only if they do.
pub fn slopes(
    client: &Client,
    layout: &BlockLayout,
    slopes: &Arc<[f64]>,
    accumulator: ElemType,
) -> Handle {
    let known = layout.attachment(DeviceSlopes::default);
    let mut known = known.0.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (device_key(client), accumulator);
    if let Some((same, handle)) = known.get(&key)
        && same == slopes
    {
        return handle.clone();
    }
    let handle = match accumulator {
        ElemType::Float(FloatKind::F64) => client.create_from_slice(bytemuck::cast_slice(slopes)),
        _ => {
            let slopes: Vec<f32> = slopes.iter().map(|&slope| slope as f32).collect();
            client.create_from_slice(bytemuck::cast_slice(&slopes))
        }
    };
    known.insert(key, (slopes.clone(), handle.clone()));
    handle
}
