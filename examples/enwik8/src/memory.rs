//! Resources that a run takes: `resources.json`, so that a report can include processes that have ended.

use std::fs;
use std::path::Path;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::device::NamedDevice;
use crate::files::write_whole;

/// Device of a run, and the peak memory of its processes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Device of the last process.
    pub device: String,
    /// Peak resident memory; unknown without `/proc`.
    pub process_bytes: Option<u64>,
    /// Memory that the device's pools reserved; unknown on devices that do not report it.
    pub device_bytes: Option<u64>,
}

impl Resources {
    /// Returns the resources of this process so far.
    pub fn now(device: &NamedDevice) -> Self {
        Self {
            device: device.name.clone(),
            process_bytes: peak_resident_bytes(),
            device_bytes: (device.device.memory_pool_usage()).map(|usage| usage.bytes_reserved),
        }
    }

    /// Reads the resources of a run folder; `None` if the file is missing or of another version.
    pub fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }

    /// Stores the resources, with the maximum of each number and the stored one.
    pub fn merge_into(&self, path: &Path) -> Result<()> {
        let earlier = Self::read(path).unwrap_or_default();
        let merged = Self {
            device: self.device.clone(),
            process_bytes: self.process_bytes.max(earlier.process_bytes),
            device_bytes: self.device_bytes.max(earlier.device_bytes),
        };
        write_whole(path, serde_json::to_string_pretty(&merged)?)
    }
}

/// Returns `VmHWM` of this process; `None` without `/proc`.
pub fn peak_resident_bytes() -> Option<u64> {
    bytes_of(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// Returns the bytes of a line `NAME: N kB`.
fn bytes_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes * 1024)
}

/// Returns the memory of this machine with its swap, or the limit of its control group; `None` without `/proc`.
pub fn machine_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let swap = bytes_of(&text, "SwapTotal:").unwrap_or(0);
    let all = bytes_of(&text, "MemTotal:")? + swap;
    let group = fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    let group = group.and_then(|text| text.trim().parse::<u64>().ok());
    Some(group.map_or(all, |most| all.min(most.saturating_add(swap))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_of_all_processes_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("resources.json");
        assert_eq!(Resources::read(&path), None);
        let of = |device: &str, process_bytes, device_bytes| Resources {
            device: device.to_owned(),
            process_bytes,
            device_bytes,
        };
        of("cuda:0", Some(5), Some(9)).merge_into(&path).unwrap();
        of("flex", Some(7), None).merge_into(&path).unwrap();
        assert_eq!(Resources::read(&path), Some(of("flex", Some(7), Some(9))));
    }
}
