//! The devices of a run.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use burn_blocksparse::{Exchange, Processes};
use burn_sparse_transformer::content::ContentAttention;
use burn_sparse_transformer::{SparseTransformer, TransformerShard};

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
    /// Where each device has one, this one.
    processes: Option<Arc<Processes>>,
}

impl Group {
    /// Of `--device`, `--devices`, `--reduce`, `--shard`, `--exchange` and `--share`.
    pub fn open(
        device: Option<&str>,
        devices: Option<&str>,
        reduce: Option<Reduce>,
        shard: Shard,
        crossing: Option<Crossing>,
        share: Option<usize>,
    ) -> Result<Self> {
        ensure!(
            shard == Shard::Sequence || crossing.is_none() && share.is_none(),
            "--exchange and --share are of --shard sequence, whose keys cross between devices"
        );
        let Some(devices) = devices else {
            return Ok(Self {
                devices: vec![device::open(device)?],
                strategy: None,
                shard: Shard::Batch,
                share: 1,
                exchanges: Vec::new(),
                processes: None,
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
        ensure!(
            devices.len().is_multiple_of(share),
            "--share must divide the {} devices of --devices, got {share}",
            devices.len()
        );
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
            processes: None,
        })
    }

    /// Of processes with a device each, of which this one has `device`: the CUDA device of its place on its host, unless another is named.
    pub fn of_processes(
        processes: &Arc<Processes>,
        device: Option<&str>,
        reduce: Option<Reduce>,
        shard: Shard,
        share: Option<usize>,
    ) -> Result<Self> {
        let (rank, count) = (processes.rank(), processes.count());
        let best = device::compiled_names().first().copied();
        let own = match device.or(best) {
            Some("cuda") => device::open(Some(&format!("cuda:{}", processes.local_rank())))?,
            _ => device::open(device)?,
        };
        let strategy = match reduce {
            Some(Reduce::Nccl) => Strategy::nccl_between(processes, &own)?,
            Some(Reduce::Copies) | None => Strategy::Copies { instead: None },
        };
        let name = |of: usize| match of == rank {
            true => own.name.clone(),
            false => format!("rank {of}"),
        };
        let devices = (0..count).map(|of| NamedDevice {
            name: name(of),
            device: own.device.clone(),
        });
        ensure!(
            shard == Shard::Sequence || share.is_none(),
            "--share is of --shard sequence, whose keys cross between devices"
        );
        let share = match shard {
            Shard::Batch => 1,
            Shard::Sequence => share.unwrap_or(count),
        };
        ensure!(
            count.is_multiple_of(share),
            "--share must divide the {count} processes, got {share}"
        );
        let first = rank / share * share;
        let exchanges = match shard {
            Shard::Batch => Vec::new(),
            Shard::Sequence => vec![Exchange::processes(processes, first..first + share)?],
        };
        Ok(Self {
            devices: devices.collect(),
            strategy: Some(strategy),
            shard,
            share,
            exchanges,
            processes: Some(processes.clone()),
        })
    }

    /// Where each device has a process, this one.
    pub fn processes(&self) -> Option<&Arc<Processes>> {
        self.processes.as_ref()
    }

    /// This process's first device.
    pub(super) fn own(&self) -> &NamedDevice {
        let rank = self.processes.as_ref().map_or(0, |of| of.rank());
        &self.devices[rank]
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

    /// How many devices have the same windows.
    pub(super) fn share(&self) -> usize {
        self.share
    }

    /// The parts of all devices of this process, if they share windows.
    pub(super) fn shards(&self, model: &SparseTransformer) -> Result<Vec<TransformerShard>> {
        let mut shards = Vec::new();
        for exchange in &self.exchanges {
            let set = TransformerShard::group_by(model, model.context(), self.share, exchange);
            shards.extend(set.context("--shard sequence")?);
        }
        Ok(shards)
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
    pub fn check(&self, config: &RunConfig, graph: bool) -> Result<()> {
        let is_shared = self.shard == Shard::Sequence;
        if self.strategy.is_none() {
            ensure!(
                !is_shared,
                "--shard sequence is of several devices: name them with --devices"
            );
            return Ok(());
        }
        let (devices, sets, batch) = (self.devices.len(), self.sets(), config.recipe.batch);
        let flag = match self.processes {
            None => "--devices",
            Some(_) => "--processes",
        };
        ensure!(
            is_shared || batch.is_multiple_of(devices),
            "--batch must be a multiple of the {devices} devices of {flag}, got {batch}"
        );
        ensure!(
            batch.is_multiple_of(sets),
            "--batch must be a multiple of the {sets} sets of devices that share sequences, got {batch}"
        );
        // The masks of rows follow their place in a batch.
        let dropout = config.model.dropout;
        ensure!(
            !is_shared || dropout == 0.0,
            "--shard sequence is without dropout, got --dropout {dropout}"
        );
        ensure!(
            !graph,
            "--graph replays the steps of one device alone; leave it out with {flag}"
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
        let between = match (&self.processes, strategy) {
            (Some(_), Strategy::Copies { .. }) => ", between processes by TCP",
            _ => "",
        };
        Some(format!(
            "devices   {}: {part}, {}{between}",
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
        let three =
            Group::open(None, Some("cpu,flex,cpu"), None, Shard::Batch, None, None).unwrap();
        assert_eq!(three.first().name, "flex, flex, flex");
        let tiny = config(&Overrides::read(""));
        let two = Group::open(None, Some("cpu,cpu"), None, Shard::Batch, None, None).unwrap();
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
        assert!(
            error.starts_with("--exchange and --share are of --shard sequence"),
            "{error}"
        );
        let error = two(None, Shard::Sequence, nccl).err().unwrap();
        assert_eq!(error, "--exchange nccl is of CUDA devices, got flex");
        let of_three = |share| {
            let devices = Some("cpu,cpu,cpu");
            let group = Group::open(None, devices, None, Shard::Sequence, None, Some(share));
            group.map_err(|error| error.to_string())
        };
        let error = of_three(2).err().unwrap();
        assert_eq!(
            error,
            "--share must divide the 3 devices of --devices, got 2"
        );
        let tiny = config(&Overrides::read("--dropout 0 --batch 4"));
        let error = of_three(1).unwrap().check(&tiny, false).unwrap_err();
        assert_eq!(
            error.to_string(),
            "--batch must be a multiple of the 3 sets of devices that share sequences, got 4"
        );
        for crossing in [None, Some(Crossing::Host)] {
            let line = two(None, Shard::Sequence, crossing).unwrap().describe(1);
            let expected = "each, keys cross by the host, gradients added by copies";
            assert!(line.as_ref().unwrap().contains(expected), "{line:?}");
        }
    }
}
