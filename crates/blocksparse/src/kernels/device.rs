//! What a layout keeps on devices: its launch plans, uploaded once or made there, as long as it lives, and the ALiBi slopes of its last call.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{DeviceKey, device_key, on_device};
use crate::BlockLayout;
use crate::lines::{LinePlan, LineSections, Lines};
use crate::plan::{Sections, TilePlan, Tiling};

/// A [`TilePlan`] whose words are on a device.
pub struct DevicePlan {
    pub words: Handle,
    pub len: usize,
    pub sections: Sections,
    pub tiles: usize,
}

type Key = (DeviceKey, Tiling);

#[derive(Default)]
struct DevicePlans(Mutex<HashMap<Key, Arc<DevicePlan>>>);

/// The plan of a layout under a tiling, on the client's device.
pub fn plan(client: &Client, layout: &BlockLayout, tiling: Tiling) -> Arc<DevicePlan> {
    let plans = layout.attachment(DevicePlans::default);
    let mut plans = plans.0.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (device_key(client), tiling);
    let made = plans.entry(key).or_insert_with(|| {
        if let Some(choice) = layout.device_choice() {
            return Arc::new(on_device::plan(client, layout, choice, tiling));
        }
        let plan = TilePlan::new(layout, tiling);
        Arc::new(DevicePlan {
            words: client.create_from_slice(bytemuck::cast_slice(&plan.words)),
            len: plan.words.len(),
            sections: plan.sections,
            tiles: plan.tiles,
        })
    });
    made.clone()
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

/// A [`LinePlan`] whose words are on a device.
pub struct DeviceLinePlan {
    pub words: Handle,
    pub len: usize,
    pub sections: LineSections,
    pub segments: usize,
    pub lines: usize,
}

#[derive(Default)]
struct DeviceLinePlans(Mutex<HashMap<(DeviceKey, Lines), Arc<DeviceLinePlan>>>);

/// The lines of a layout, on the client's device.
pub fn line_plan(client: &Client, layout: &BlockLayout, lines: Lines) -> Arc<DeviceLinePlan> {
    let plans = layout.attachment(DeviceLinePlans::default);
    let mut plans = plans.0.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (device_key(client), lines);
    if let Some(known) = plans.get(&key) {
        return known.clone();
    }
    let plan = LinePlan::new(layout, &key.1);
    let made = Arc::new(DeviceLinePlan {
        words: client.create_from_slice(bytemuck::cast_slice(&plan.words)),
        len: plan.words.len(),
        sections: plan.sections,
        segments: plan.segments,
        lines: plan.lines,
    });
    plans.insert(key, made.clone());
    made
}
