//! Uploads layouts to devices, once per device, and keeps them as long as the layout lives.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use blocksparse::BlockLayout;
use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, Dispatch};
use burn::tensor::{Bool, Device, Tensor, TensorData};

use crate::base::values::{DynamicBlocks, KernelPlan, LayoutTensors};
use crate::error::OpError;
use crate::graph::recording;

/// Uploaded tensors of layouts. The key is the address of a token that lives as long as the layout's data.
///
/// The layout itself must not own these tensors: an operation in flight may be the last holder of the layout, and a tensor dropped on the device's own thread
/// would call that thread from itself. Tensors of dropped layouts are released when the next layout is uploaded.
static UPLOADED: LazyLock<Mutex<HashMap<usize, Uploaded>>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Token;

struct Uploaded {
    layout: Weak<Token>,
    on_devices: Vec<(Device, Tensor<2, Bool>)>,
}

/// Returns the layout for a call on `device`. Its tensors are on the device without autodiff: an autodiff layout would silently turn plain outputs into
/// autodiff ones. Kernels read no mask table: if they run, `blocked` is a single element.
///
/// # Errors
/// [`OpError::Recording`] if the tensors are not uploaded yet and this thread records.
pub fn layout_tensors(
    layout: &BlockLayout,
    device: &Device,
    kernels: bool,
) -> Result<LayoutTensors<Dispatch>, OpError> {
    let device = device.clone().without_autodiff();
    let token = match kernels {
        false => layout.attachment(Token::default),
        true => NO_LAYOUT.clone(),
    };
    let key = Arc::as_ptr(&token) as usize;
    let mut uploaded = UPLOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = (uploaded.get(&key))
        .filter(|entry| entry.layout.strong_count() > 0)
        .and_then(|entry| entry.on_devices.iter().find(|(known, _)| *known == device));
    let mut gone = Vec::new();
    let blocked = match known {
        Some((_, blocked)) => blocked.clone(),
        None => {
            recording::ensure_not_capturing("the masks of a layout")?;
            let dead: Vec<usize> = (uploaded.iter())
                .filter(|(_, entry)| entry.layout.strong_count() == 0)
                .map(|(key, _)| *key)
                .collect();
            gone.extend(dead.iter().filter_map(|key| uploaded.remove(key)));
            let blocked = match kernels {
                false => blocked(layout, &device),
                true => Tensor::from_data(TensorData::new(vec![false], [1, 1]), &device),
            };
            let entry = uploaded.entry(key).or_insert_with(|| Uploaded {
                layout: Arc::downgrade(&token),
                on_devices: Vec::new(),
            });
            entry.on_devices.push((device, blocked.clone()));
            blocked
        }
    };
    // Dropping tensors takes the device's locks, so our lock is released first.
    drop(uploaded);
    drop(gone);
    Ok(LayoutTensors {
        blocked: blocked.into_dispatch(),
        choice: DynamicBlocks::Host,
        host: layout.clone(),
        plan: KernelPlan::default(),
    })
}

/// Uploads indices for an op in primitives.
pub fn indices<B: Backend>(device: &B::Device, indices: Vec<i32>) -> IntTensor<B> {
    recording::doom_by_upload(device, "indices of an op in primitives");
    let length = indices.len();
    B::int_from_data(TensorData::new(indices, [length]), device)
}

/// Token of the single element that stands for a missing mask table.
static NO_LAYOUT: LazyLock<Arc<Token>> = LazyLock::new(Arc::default);

fn blocked(layout: &BlockLayout, device: &Device) -> Tensor<2, Bool> {
    let b = layout.block_size();
    let bits: Vec<bool> = (layout.masks().iter())
        .flat_map(|mask| (0..b * b).map(move |bit| !mask.get(bit / b, bit % b)))
        .collect();
    Tensor::from_data(TensorData::new(bits, [layout.masks().len(), b * b]), device)
}
