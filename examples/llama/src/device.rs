//! Devices by name, of the compiled backends.

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use burn_blocksparse::check_device;

/// Opens the device of `--device`, or the best compiled one.
pub fn open(name: Option<&str>) -> Result<Device> {
    let (backend, index) = match name.map(|name| name.split_once(':').unwrap_or((name, "0"))) {
        Some((backend, index)) => {
            let index = index.parse::<usize>();
            let index = index.with_context(|| format!("--device {backend}: its index"))?;
            (backend, index)
        }
        None => (BEST, 0),
    };
    let device = match (backend, index) {
        #[cfg(feature = "cuda")]
        ("cuda", index) => Device::cuda(index),
        #[cfg(feature = "wgpu")]
        ("wgpu", 0) => Device::wgpu(Default::default()),
        #[cfg(feature = "flex")]
        ("flex", 0) => Device::flex(),
        _ => bail!(
            "--device must be flex, wgpu, cuda or cuda:INDEX, and this program be built with that feature: got {}",
            name.unwrap_or(backend)
        ),
    };
    check_device(&device)?;
    Ok(device)
}

const BEST: &str = if cfg!(feature = "cuda") {
    "cuda"
} else if cfg!(feature = "wgpu") {
    "wgpu"
} else {
    "flex"
};

/// Returns the memory that the device's pools reserved, or else this process's peak, in GiB.
pub fn memory(device: &Device) -> Option<f64> {
    let reserved = device.memory_pool_usage().map(|usage| usage.bytes_reserved);
    let bytes = reserved.or_else(|| {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let peak = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:"))?;
        Some(peak.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
    })?;
    Some(bytes as f64 / f64::from(1 << 30))
}
