//! Launch plans on devices: made and uploaded once, kept as long as the layout lives.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{DeviceKey, device_key};
use crate::BlockLayout;
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
    let mut plans = match plans.0.lock() {
        Ok(guard) => guard,
        Err(poisoned) => poisoned.into_inner(),
    };
    let key = (device_key(client), tiling);
    let made = plans.entry(key).or_insert_with(|| {
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
