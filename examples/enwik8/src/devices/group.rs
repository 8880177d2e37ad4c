//! The devices of a run.

use anyhow::{Context, Result, bail, ensure};
use burn_sparse_transformer::content::ContentAttention;

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
    pub fn check(&self, config: &RunConfig, graph: bool) -> Result<()> {
        let is_shared = self.shard == Shard::Sequence;
        if self.strategy.is_none() {
            ensure!(
                !is_shared,
                "--shard sequence is of several devices: name them with --devices"
            );
            return Ok(());
        }
        let (devices, batch) = (self.devices.len(), config.recipe.batch);
        ensure!(
            is_shared || batch.is_multiple_of(devices),
            "--batch must be a multiple of the {devices} devices of --devices, got {batch}"
        );
        // The masks of rows follow their place in a batch.
        let dropout = config.model.dropout;
        ensure!(
            !is_shared || dropout == 0.0,
            "--shard sequence is without dropout, got --dropout {dropout}"
        );
        ensure!(
            !graph,
            "--graph replays the steps of one device alone; leave it out with --devices"
        );
        if let Some(content @ ContentAttention::Routing(_)) = &config.model.content {
            bail!(
                "--attention {content} has means that follow all bytes of a batch, of which each device sees a part; train it with --device"
            );
        }
        Ok(())
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
fn names(text: &str) -> Result<Vec<String>> {
    let names: Vec<String> = text.split(',').map(|name| spelt(name.trim())).collect();
    ensure!(
        !names.iter().any(String::is_empty),
        "--devices must name one device at least, as in 0,1 or cuda:0,cuda:1, got '{text}'"
    );
    let kind = |name: &str| name.split(':').next().map(str::to_owned);
    let first = &names[0];
    if let Some(other) = names.iter().find(|name| kind(name) != kind(first)) {
        bail!("--devices must be of one kind, got {first} and {other}");
    }
    Ok(names)
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
        for (text, message) in [
            ("", "must name one device at least"),
            ("0,", "must name one device at least"),
            (",", "must name one device at least"),
            (" , 1", "must name one device at least"),
            ("0,wgpu", "must be of one kind, got cuda:0 and wgpu"),
        ] {
            let error = names(text).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    #[cfg(feature = "flex")]
    fn what_cannot_be_shared_out_is_refused() {
        let config = |overrides: &Overrides| RunConfig::new(Preset::Tiny, overrides).unwrap();
        let three = Group::open(None, Some("cpu,flex,cpu"), None, Shard::Batch).unwrap();
        assert_eq!(three.first().name, "flex, flex, flex");
        let tiny = config(&Overrides::default());
        let two = Group::open(None, Some("cpu,cpu"), None, Shard::Batch).unwrap();
        two.check(&tiny, false).unwrap();
        let line = two.describe(4).unwrap();
        assert!(
            line.contains("2 windows of a step each") && line.contains("copies"),
            "{line}"
        );
        let routing = config(&Overrides::read("--attention routing:64"));
        for (refused, message) in [
            (
                three.check(&tiny, false),
                "a multiple of the 3 devices of --devices, got 4",
            ),
            (
                two.check(&tiny, true),
                "--graph replays the steps of one device",
            ),
            (
                two.check(&routing, false),
                "has means that follow all bytes of a batch",
            ),
        ] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        // One device is what --device is, unless a way to add is asked for.
        let one = |reduce| Group::open(None, Some("cpu"), reduce, Shard::Batch).unwrap();
        assert!(one(None).describe(4).is_none());
        assert!(one(Some(Reduce::Copies)).describe(4).is_some());
        let error = Group::open(None, Some("cpu,cpu"), Some(Reduce::Nccl), Shard::Batch).err();
        assert!(error.unwrap().to_string().contains("is of CUDA devices"));
    }
}
