//! The devices of a run.

use anyhow::{Context, Result};
use burn_sparse_transformer::content::ContentAttention;

use super::error::DevicesError;
use super::reduce::{Reduce, Shard, Strategy};
use crate::config::RunConfig;
use crate::device::{self, NamedDevice};

/// One device or several, and how the latter add their gradients.
pub struct Group {
    devices: Vec<NamedDevice>,
    /// None of one device, unless it was asked for.
    strategy: Option<Strategy>,
    shard: Shard,
}

impl Group {
    /// Of `--device`, `--devices`, `--reduce` and `--shard`.
    pub fn open(
        device: Option<&str>,
        devices: Option<&str>,
        reduce: Option<Reduce>,
        shard: Shard,
    ) -> Result<Self> {
        let Some(devices) = devices else {
            return Ok(Self {
                devices: vec![device::open(device)?],
                strategy: None,
                shard: Shard::Batch,
            });
        };
        let devices = names(devices)?
            .iter()
            .map(|name| device::named(name).context("--devices"))
            .collect::<Result<Vec<_>>>()?;
        let strategy = match (devices.len(), reduce) {
            (1, None) => None,
            _ => Some(Strategy::choose(reduce, &devices)?),
        };
        Ok(Self {
            devices,
            strategy,
            shard,
        })
    }

    /// All of them by name, the first by what it is: where evaluation runs, and memory is measured.
    pub fn first(&self) -> NamedDevice {
        let names: Vec<&str> = (self.devices.iter())
            .map(|device| device.name.as_str())
            .collect();
        NamedDevice {
            name: names.join(", "),
            device: self.devices[0].device.clone(),
        }
    }

    pub(super) fn devices(&self) -> &[NamedDevice] {
        &self.devices
    }

    /// How they add their gradients, if steps are to be divided.
    pub(super) fn strategy(&self) -> Option<&Strategy> {
        self.strategy.as_ref()
    }

    /// What the devices share.
    pub(super) fn shard(&self) -> Shard {
        self.shard
    }

    /// Whether steps are to be divided.
    pub fn spreads(&self) -> bool {
        self.strategy.is_some()
    }

    /// Whether they can train `config`.
    pub fn check(&self, config: &RunConfig, graph: bool) -> Result<(), DevicesError> {
        if self.strategy.is_none() {
            return match self.shard {
                Shard::Batch => Ok(()),
                Shard::Sequence => Err(DevicesError::Alone),
            };
        }
        let (devices, batch) = (self.devices.len(), config.recipe.batch);
        let dropout = config.model.dropout;
        match self.shard {
            Shard::Batch if !batch.is_multiple_of(devices) => {
                return Err(DevicesError::Batch { devices, batch });
            }
            Shard::Sequence if dropout > 0.0 => return Err(DevicesError::Dropout(dropout)),
            _ => {}
        }
        match &config.model.content {
            _ if graph => Err(DevicesError::Graph),
            Some(content @ ContentAttention::Routing(_)) => {
                Err(DevicesError::Means(content.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// What to tell the user of steps with so many windows.
    pub fn describe(&self, batch: usize) -> Option<String> {
        let strategy = self.strategy.as_ref()?;
        let part = match self.shard {
            Shard::Batch => format!("{} windows of a step each", batch / self.devices.len()),
            Shard::Sequence => "some positions of every window each".to_owned(),
        };
        Some(format!(
            "devices   {}: {part}, {}",
            self.first().name,
            strategy.describe(&self.devices[0].name),
        ))
    }
}

/// Names as `--device` has them, all of one kind. A number is a CUDA device's, and `cpu` the best CPU backend.
fn names(text: &str) -> Result<Vec<String>, DevicesError> {
    let names: Vec<String> = text.split(',').map(|name| spelt(name.trim())).collect();
    if names.iter().any(String::is_empty) {
        return Err(DevicesError::Empty(text.to_owned()));
    }
    let kind = |name: &str| name.split(':').next().map(str::to_owned);
    let first = &names[0];
    match names.iter().find(|name| kind(name) != kind(first)) {
        None => Ok(names),
        Some(other) => Err(DevicesError::Kinds {
            first: first.clone(),
            other: other.clone(),
        }),
    }
}

fn spelt(name: &str) -> String {
    match name {
        "cpu" if cfg!(feature = "flex") => "flex".to_owned(),
        "cpu" => "ndarray".to_owned(),
        index if !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit()) => {
            format!("cuda:{index}")
        }
        name => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::overrides::Overrides;
    use crate::presets::Preset;

    #[test]
    fn names_are_read() {
        assert_eq!(
            names("0, 1,cuda:2").unwrap(),
            ["cuda:0", "cuda:1", "cuda:2"]
        );
        assert_eq!(names("wgpu").unwrap(), ["wgpu"]);
        for text in ["", "0,", ",", " , 1"] {
            assert_eq!(names(text), Err(DevicesError::Empty(text.to_owned())));
        }
        let kinds = DevicesError::Kinds {
            first: "cuda:0".to_owned(),
            other: "wgpu".to_owned(),
        };
        assert_eq!(names("0,wgpu"), Err(kinds));
    }

    #[test]
    #[cfg(feature = "flex")]
    fn what_cannot_be_shared_out_is_refused() {
        let config = |overrides: &Overrides| RunConfig::new(Preset::Tiny, overrides).unwrap();
        let three = Group::open(None, Some("cpu,flex,cpu"), None, Shard::Batch).unwrap();
        assert_eq!(three.first().name, "flex, flex, flex");
        let tiny = config(&Overrides::default());
        let (devices, batch) = (3, 4);
        let uneven = DevicesError::Batch { devices, batch };
        assert_eq!(three.check(&tiny, false), Err(uneven));
        let two = Group::open(None, Some("cpu,cpu"), None, Shard::Batch).unwrap();
        assert_eq!(two.check(&tiny, false), Ok(()));
        assert_eq!(two.check(&tiny, true), Err(DevicesError::Graph));
        let line = two.describe(4).unwrap();
        assert!(
            line.contains("2 windows of a step each") && line.contains("copies"),
            "{line}"
        );
        let routing = Overrides::read("--attention routing:64");
        assert!(matches!(
            two.check(&config(&routing), false),
            Err(DevicesError::Means(_))
        ));
        // One device is what --device is, unless a way to add is asked for.
        let one = |reduce| Group::open(None, Some("cpu"), reduce, Shard::Batch).unwrap();
        assert!(one(None).describe(4).is_none());
        assert!(one(Some(Reduce::Copies)).describe(4).is_some());
        let error = Group::open(None, Some("cpu,cpu"), Some(Reduce::Nccl), Shard::Batch).err();
        assert!(error.unwrap().to_string().contains("is of CUDA devices"));
    }
}
