//! The devices of a test: `BURN_SPARSE_DEVICE` (`flex`, `ndarray`, `wgpu`, `cuda`), or all CPU backends that are compiled in.

use burn::tensor::{DType, Device, Tensor};

pub fn devices() -> Vec<Device> {
    match std::env::var("BURN_SPARSE_DEVICE") {
        Ok(name) => vec![
            device(&name)
                .unwrap_or_else(|| panic!("BURN_SPARSE_DEVICE={name}: unknown or not compiled in")),
        ],
        Err(_) => {
            let found: Vec<Device> = ["flex", "ndarray"].into_iter().filter_map(device).collect();
            assert!(!found.is_empty(), "no CPU backend compiled in");
            found
        }
    }
}

/// Returns two devices of different backends, if two are compiled in.
pub fn two_devices() -> Option<[Device; 2]> {
    let mut found = ["flex", "ndarray", "wgpu"].into_iter().filter_map(device);
    Some([found.next()?, found.next()?])
}

/// Returns all CUDA devices, at most four, if the tests run on CUDA and there are several.
pub fn cuda_devices() -> Option<Vec<Device>> {
    if std::env::var("BURN_SPARSE_DEVICE").as_deref() != Ok("cuda") {
        return None;
    }
    #[cfg(feature = "cuda")]
    let found: Vec<Device> = (0..4)
        .map(|index: usize| Device::cuda(index))
        .take_while(|device| burn_blocksparse::check_device(device).is_ok())
        .collect();
    #[cfg(not(feature = "cuda"))]
    let found: Vec<Device> = Vec::new();
    (found.len() > 1).then_some(found)
}

#[allow(deprecated)]
fn device(name: &str) -> Option<Device> {
    match name {
        #[cfg(feature = "flex")]
        "flex" => Some(Device::flex()),
        #[cfg(feature = "ndarray")]
        "ndarray" => Some(Device::ndarray()),
        #[cfg(feature = "wgpu")]
        "wgpu" => Some(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
        #[cfg(feature = "cuda")]
        "cuda" => Some(Device::cuda(0)),
        _ => None,
    }
}

/// Returns whether the environment selects the reference instead of kernels.
pub fn uses_reference() -> bool {
    std::env::var_os("BLOCKSPARSE_REFERENCE").is_some_and(|value| value == "1")
}

/// Dtypes that backends lack. A dtype that is missing anywhere else is an error, so that checks do not pass vacuously.
const WITHOUT: [(&str, &[DType]); 2] = [
    ("NdArray", &[DType::F16, DType::BF16]),
    // f16 depends on the driver. f64 elements may exist, but f64 exponentials do not.
    ("Wgpu", &[DType::F16, DType::BF16, DType::F64]),
];

/// Returns the exact dtypes of a device, each with the relative tolerance of its results against f64.
pub fn exact_dtypes(device: &Device) -> Vec<(DType, f64)> {
    [(DType::F32, 1e-5), (DType::F64, 1e-12)]
        .into_iter()
        .filter(|(dtype, _)| supports(device, *dtype))
        .collect()
}

/// Returns whether a device can compute attention in a dtype. Panics if it cannot and `WITHOUT` does not list it.
pub fn supports(device: &Device, dtype: DType) -> bool {
    let name = format!("{device:?}");
    let wgpu = name.contains("Wgpu");
    let supported = device.supports_dtype(dtype) && !(wgpu && dtype == DType::F64);
    let may_lack =
        (WITHOUT.iter()).any(|(part, dtypes)| name.contains(part) && dtypes.contains(&dtype));
    let is_right = supported || may_lack;
    assert!(
        is_right,
        "{device:?} must support {dtype:?}, or be listed as a device without"
    );
    supported
}

/// Returns the half-precision dtypes of a device.
pub fn half_dtypes(device: &Device) -> Vec<DType> {
    [DType::F16, DType::BF16]
        .into_iter()
        .filter(|dtype| supports(device, *dtype))
        .collect()
}

/// Returns the last half-precision dtype of a device, or else f32.
pub fn half_or_f32(device: &Device) -> DType {
    half_dtypes(device).pop().unwrap_or(DType::F32)
}

/// Returns each device with each of its exact dtypes and the relative tolerance.
pub fn exact(devices: &[Device]) -> impl Iterator<Item = (&Device, DType, f64)> {
    let of = |device| {
        exact_dtypes(device)
            .into_iter()
            .map(move |(dtype, tolerance)| (device, dtype, tolerance))
    };
    devices.iter().flat_map(of)
}

/// Returns each device with each of its half-precision dtypes.
pub fn halves(devices: &[Device]) -> impl Iterator<Item = (&Device, DType)> {
    let of = |device| {
        half_dtypes(device)
            .into_iter()
            .map(move |dtype| (device, dtype))
    };
    devices.iter().flat_map(of)
}

/// Returns the devices that support a dtype.
pub fn with(devices: &[Device], dtype: DType) -> impl Iterator<Item = &Device> {
    devices.iter().filter(move |device| supports(device, dtype))
}

/// Returns each device with each of the given dtypes that it supports.
pub fn with_each<'a>(
    devices: &'a [Device],
    dtypes: &'a [DType],
) -> impl Iterator<Item = (&'a Device, DType)> {
    let pairs = devices
        .iter()
        .flat_map(|device| dtypes.iter().map(move |&dtype| (device, dtype)));
    pairs.filter(|(device, dtype)| supports(device, *dtype))
}

/// Returns a device with autodiff, without and with gradient checkpointing.
pub fn tracked(device: &Device) -> [Device; 2] {
    let device = device.clone().autodiff();
    [device.clone(), device.gradient_checkpointing()]
}

/// Returns whether products may run on tensor cores (f32 in tf32), with kernels compiled for each size.
pub fn is_cuda(device: &Device) -> bool {
    format!("{device:?}").contains("Cuda")
}

/// Returns whether the backend has kernels, whatever the environment selects.
pub fn is_cube(device: &Device) -> bool {
    format!("{device:?}").contains("Cube")
}

/// Returns zeros in f32.
pub fn zeros(shape: [usize; 4], device: &Device) -> Tensor<4> {
    Tensor::zeros(shape, (device, DType::F32))
}

/// Returns the unit roundoff of a half-precision dtype; 0 for other dtypes.
pub fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => 0.0,
    }
}

/// Raises a tolerance for f32 results where Burn's products run in tf32 on tensor cores.
pub fn product_tolerance(device: &Device, dtype: DType, tolerance: f64) -> f64 {
    match dtype == DType::F32 && is_cuda(device) {
        true => tolerance.max(2e-3),
        false => tolerance,
    }
}

/// Panics if a check that selects among cases, devices or dtypes has compared nothing.
pub fn assert_ran(check: &str, ran: usize) {
    assert!(ran > 0, "{check} compared nothing");
}
