//! Layouts on devices: uploaded once per device, kept as long as the layout lives.

use std::sync::Mutex;

use blocksparse::BlockLayout;
use burn::backend::Dispatch;
use burn::tensor::{Bool, Device, Tensor, TensorData};

use crate::ops::LayoutTensors;

#[derive(Default)]
struct OnDevices(Mutex<Vec<(Device, Tensor<2, Bool>)>>);

/// The layout for a call on `device`. Its tensors are on the device without autodiff: an autodiff layout
/// would silently turn plain outputs into autodiff ones.
pub(crate) fn layout_tensors(layout: &BlockLayout, device: &Device) -> LayoutTensors<Dispatch> {
    let device = device.clone().without_autodiff();
    let cache = layout.attachment(OnDevices::default);
    let mut on_devices = match cache.0.lock() {
        Ok(guard) => guard,
        Err(poisoned) => poisoned.into_inner(),
    };
    let known = on_devices.iter().find(|(known, _)| *known == device);
    let blocked = match known {
        Some((_, blocked)) => blocked.clone(),
        None => {
            let blocked = blocked(layout, &device);
            on_devices.push((device, blocked.clone()));
            blocked
        }
    };
    LayoutTensors {
        blocked: blocked.into_dispatch(),
        host: layout.clone(),
    }
}

fn blocked(layout: &BlockLayout, device: &Device) -> Tensor<2, Bool> {
    let b = layout.block_size();
    let bits: Vec<bool> = (layout.masks().iter())
        .flat_map(|mask| (0..b * b).map(move |bit| !mask.get(bit / b, bit % b)))
        .collect();
    Tensor::from_data(TensorData::new(bits, [layout.masks().len(), b * b]), device)
}
