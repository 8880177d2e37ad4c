//! The devices of a run.

use anyhow::{Context, Result};
use burn_blocksparse::Exchange;
use burn_sparse_transformer::content::ContentAttention;

use super::error::DevicesError;
use super::reduce::{Crossing, Reduce, Shard, Strategy};
use crate::config::RunConfig;
use crate::device::{self, NamedDevice};

/// One device or several, and how the latter add their gradients.
pub struct Group {
    devices: Vec<NamedDevice>,
    /// None of one device, unless it was asked for.
    strategy: Option<Strategy>,
    shard: Shard,
    /// How many devices have the same windows, and how keys cross between those of each such set.
    share: usize,
    exchanges: Vec<Exchange>,
}

impl Group {
    /// Of `--device`, `--devices`, `--reduce`, `--shard`, `--exchange` and `--share`.
    ///
    /// # Errors
    /// [`DevicesError`], and what [`device::open`] says of one of them.
    pub fn open(
        device: Option<&str>,
        devices: Option<&str>,
        reduce: Option<Reduce>,
        shard: Shard,
        crossing: Option<Crossing>,
        share: Option<usize>,
    ) -> Result<Self> {
        if shard == Shard::Batch && (crossing.is_some() || share.is_some()) {
            return Err(DevicesError::NoKeys.into());
        }
        let Some(devices) = devices else {
            return Ok(Self {
                devices: vec![device::open(device)?],
                strategy: None,
                shard: Shard::Batch,
                share: 1,
                exchanges: Vec::new(),
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
        let share = match shard {
            Shard::Batch => 1,
            Shard::Sequence => share.unwrap_or(devices.len()),
        };
        if !devices.len().is_multiple_of(share) {
            let devices = devices.len();
            return Err(DevicesError::Share { devices, share }.into());
        }
        let exchanges = match shard {
            Shard::Batch => Vec::new(),
            Shard::Sequence => (devices.chunks(share))
                .map(|set| Crossing::choose(crossing, set))
                .collect::<Result<_, _>>()?,
        };
        Ok(Self {
            devices,
            strategy,
            shard,
            share,
            exchanges,
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

    /// Each of them.
    pub(super) fn devices(&self) -> &[NamedDevice] {
        &self.devices
    }

    /// How they add their gradients, if steps are to be divided.
    pub(super) fn strategy(&self) -> Option<&Strategy> {
        self.strategy.as_ref()
    }

    /// How many devices have the same windows.
    pub(super) fn share(&self) -> usize {
        self.share
    }

    /// How keys cross between the devices of each set that shares windows.
    pub(super) fn exchanges(&self) -> &[Exchange] {
        &self.exchanges
    }

    /// Parts of a batch.
    fn sets(&self) -> usize {
        self.devices.len() / self.share
    }

    /// Whether steps are to be divided.
    pub fn spreads(&self) -> bool {
        self.strategy.is_some()
    }

    /// Whether they can train `config`.
    ///
    /// # Errors
    /// [`DevicesError`] names the flag.
    pub fn check(&self, config: &RunConfig, graph: bool) -> Result<(), DevicesError> {
        if self.strategy.is_none() {
            return match self.shard {
                Shard::Batch => Ok(()),
                Shard::Sequence => Err(DevicesError::Alone),
            };
        }
        let (devices, sets, batch) = (self.devices.len(), self.sets(), config.recipe.batch);
        let dropout = config.model.dropout;
        match self.shard {
            Shard::Batch if !batch.is_multiple_of(devices) => {
                return Err(DevicesError::Batch { devices, batch });
            }
            Shard::Sequence if dropout > 0.0 => return Err(DevicesError::Dropout(dropout)),
            Shard::Sequence if !batch.is_multiple_of(sets) => {
                return Err(DevicesError::Sets { sets, batch });
            }
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
        let windows = batch / self.sets();
        let part = match self.exchanges.first() {
            None => format!("{windows} windows of a step each"),
            Some(exchange) => {
                let which = match self.sets() {
                    1 => "every window".to_owned(),
                    _ => format!("{windows} of {batch} windows"),
                };
                format!("some positions of {which} each, keys cross by {exchange}")
            }
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
        let three =
            Group::open(None, Some("cpu,flex,cpu"), None, Shard::Batch, None, None).unwrap();
        assert_eq!(three.first().name, "flex, flex, flex");
        let tiny = config(&Overrides::default());
        let (devices, batch) = (3, 4);
        let uneven = DevicesError::Batch { devices, batch };
        assert_eq!(three.check(&tiny, false), Err(uneven));
        let two = Group::open(None, Some("cpu,cpu"), None, Shard::Batch, None, None).unwrap();
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
        let one =
            |reduce| Group::open(None, Some("cpu"), reduce, Shard::Batch, None, None).unwrap();
        assert!(one(None).describe(4).is_none());
        assert!(one(Some(Reduce::Copies)).describe(4).is_some());
        let two = |reduce, shard, crossing| {
            let group = Group::open(None, Some("cpu,cpu"), reduce, shard, crossing, None);
            group.map_err(|error| format!("{error:#}"))
        };
        let error = two(Some(Reduce::Nccl), Shard::Batch, None).err().unwrap();
        assert!(error.contains("is of CUDA devices"), "{error}");
        // What crosses, and how.
        let nccl = Some(Crossing::Nccl);
        let error = two(None, Shard::Batch, nccl).err().unwrap();
        assert_eq!(error, DevicesError::NoKeys.to_string());
        let error = two(None, Shard::Sequence, nccl).err().unwrap();
        assert_eq!(error, "--exchange nccl is of CUDA devices, got flex");
        let of_three = |share| {
            let devices = Some("cpu,cpu,cpu");
            let group = Group::open(None, devices, None, Shard::Sequence, None, Some(share));
            group.map_err(|error| error.to_string())
        };
        let (devices, share) = (3, 2);
        let error = DevicesError::Share { devices, share }.to_string();
        assert_eq!(of_three(2).err().unwrap(), error);
        let (sets, batch) = (3, 4);
        let error = DevicesError::Sets { sets, batch };
        let text = "--dropout 0 --batch 4";
        let alone = of_three(1).unwrap();
        assert_eq!(
            alone.check(&config(&Overrides::read(text)), false),
            Err(error)
        );
        for crossing in [None, Some(Crossing::Host)] {
            let line = two(None, Shard::Sequence, crossing).unwrap().describe(1);
            let expected = "each, keys cross by the host, gradients added by copies";
            assert!(line.as_ref().unwrap().contains(expected), "{line:?}");
        }
    }
}
