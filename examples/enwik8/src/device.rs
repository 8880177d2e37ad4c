//! Devices by name, of the compiled backends.

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::Device;
use burn_blocksparse::check_device;

type Backend = (&'static str, fn(usize) -> Device);

/// Compiled backends, best first, with their devices by index.
#[allow(deprecated)] // Burn deprecates its NdArray backend.
const COMPILED: &[Backend] = &[
    #[cfg(feature = "cuda")]
    ("cuda", Device::cuda),
    #[cfg(feature = "wgpu")]
    ("wgpu", |_| Device::wgpu(Default::default())),
    #[cfg(feature = "flex")]
    ("flex", |_| Device::flex()),
    #[cfg(feature = "ndarray")]
    ("ndarray", |_| Device::ndarray()),
];

/// Device with its printed name.
#[derive(Clone)]
pub struct NamedDevice {
    /// Name, such as `cuda:0`.
    pub name: String,
    pub device: Device,
}

impl NamedDevice {
    /// Returns whether its memory is the machine's.
    pub fn is_cpu(&self) -> bool {
        self.name.starts_with("flex") || self.name.starts_with("ndarray")
    }
}

/// Opens the device of `--device`, or the best compiled one.
pub fn open(name: Option<&str>) -> Result<NamedDevice> {
    match name.or(compiled_names().first().copied()) {
        Some(known) => named(known).with_context(|| match name {
            Some(_) => format!("--device {known}"),
            None => format!("device {known}"),
        }),
        None => bail!("this program was built without any backend; build it with --features flex"),
    }
}

/// Opens the device called `name`.
pub fn named(name: &str) -> Result<NamedDevice> {
    let (backend, index) = match name.split_once(':') {
        Some((backend, index)) => (backend, Some(index)),
        None => (name, None),
    };
    ensure!(
        ["flex", "ndarray", "wgpu", "cuda"].contains(&backend),
        "unknown device '{name}'; the choices are flex, ndarray, wgpu, cuda and cuda:INDEX"
    );
    let index = match index {
        None => 0,
        Some(text) => match text.parse() {
            Ok(index) if backend == "cuda" => index,
            _ => bail!("unknown device '{name}'; an index goes with cuda only, as in cuda:1"),
        },
    };
    let known = COMPILED.iter().find(|(known, _)| *known == backend);
    let Some((_, device)) = known else {
        bail!(
            "device '{backend}' is not compiled in; build with --features {backend} (this program has {})",
            compiled_names().join(", ")
        );
    };
    let device = device(index);
    prefer(backend);
    // Burn would panic at the first use.
    check_device(&device)?;
    let name = match backend {
        "cuda" => format!("cuda:{index}"),
        _ => backend.to_owned(),
    };
    Ok(NamedDevice { name, device })
}

/// Returns the compiled backends, best first.
pub fn compiled_names() -> Vec<&'static str> {
    COMPILED.iter().map(|(name, _)| *name).collect()
}

/// Makes `backend` Burn's default device.
///
/// Burn puts some tensors on its default device, which would start CUDA for a run on the CPU if both are compiled. It reads the default from the environment.
fn prefer(backend: &str) {
    if compiled_names().len() > 1 && std::env::var_os("BURN_DEVICE").is_none() {
        // SAFETY: called from `main`'s thread, before any other thread that reads the environment is started.
        unsafe { std::env::set_var("BURN_DEVICE", backend) };
    }
}
