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
        let share = shared(shard, share, devices.len(), "devices of --devices")?;
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
        let share = shared(shard, share, count, "processes")?;
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

/// How many of `count` devices have the same windows.
fn shared(shard: Shard, share: Option<usize>, count: usize, of: &str) -> Result<usize> {
    let share = match shard {
        Shard::Batch => 1,
        Shard::Sequence => share.unwrap_or(count),
    };
    ensure!(
        count.is_multiple_of(share),
        "--share must divide the {count} {of}, got {share}"
    );
    Ok(share)
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
