//! The devices of a run.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use burn_blocksparse::{Exchange, Processes};
use burn_sparse_transformer::content::ContentAttention;
use burn_sparse_transformer::{SparseTransformer, TransformerShard};
use clap::Args;

use super::reduce::{Crossing, Reduce, Shard, Strategy};
use super::worker::Post;
use crate::arguments;
use crate::config::RunConfig;
use crate::device::{self, NamedDevice};
use crate::flags::ensure_all;

/// Heading of these flags.
pub const DEVICE: &str = "Device";

/// Flags of the devices that train.
#[derive(Args, Debug)]
pub struct DeviceArgs {
    /// flex, ndarray, wgpu, cuda or cuda:INDEX [default: the best that is compiled in]
    #[arg(long, help_heading = DEVICE)]
    device: Option<String>,
    /// Several devices, each with an equal part of every batch: numbers of CUDA devices, or names of one kind
    #[arg(long, value_name = "0,1,..", conflicts_with = "device", group = "several", help_heading = DEVICE)]
    devices: Option<String>,
    /// Run as one of several processes with a device each. Which one: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, set by torchrun, or the
    /// variables of OpenMPI
    #[arg(long, group = "several", help_heading = DEVICE)]
    pub processes: bool,
    /// Sum of gradients over several devices [default: nccl where it can be used; copies between processes]
    #[arg(long, value_enum, requires = "several", help_heading = DEVICE)]
    reduce: Option<Reduce>,
    /// Split of the work over several devices
    #[arg(long, value_enum, default_value_t, requires = "several", help_heading = DEVICE)]
    shard: Shard,
    /// Exchange of keys between devices that share sequences [default: nccl where it can be used]
    #[arg(long, value_enum, requires = "devices", help_heading = DEVICE)]
    exchange: Option<Crossing>,
    /// Number of devices that share each sequence; others have other windows of the batch [default: all]
    #[arg(long, value_parser = arguments::positive, requires = "several", help_heading = DEVICE)]
    share: Option<usize>,
}

impl DeviceArgs {
    /// Connects this process with the others, with `--processes`.
    pub fn processes(&self) -> Result<Processes> {
        ensure!(
            !matches!(self.exchange, Some(Crossing::Nccl)),
            "--exchange nccl is of devices in one process; processes exchange keys by the host and TCP"
        );
        Processes::from_env().context("--processes")
    }
}

/// One device, or several with a strategy to add their gradients.
pub struct Group {
    devices: Vec<NamedDevice>,
    /// None for a single device, unless it was requested.
    strategy: Option<Strategy>,
    shard: Shard,
    /// Number of devices with the same windows, and the exchange of keys within each such set.
    share: usize,
    exchanges: Vec<Exchange>,
    /// This process, if each device has its own.
    processes: Option<Arc<Processes>>,
}

impl Group {
    /// Opens the devices of this process.
    pub fn open(args: &DeviceArgs) -> Result<Self> {
        let devices = match &args.devices {
            None => vec![device::open(args.device.as_deref())?],
            Some(devices) => names(devices)?
                .iter()
                .map(|name| device::named(name).context("--devices"))
                .collect::<Result<_>>()?,
        };
        let strategy = match (devices.len(), args.reduce) {
            (1, None) => None,
            (_, reduce) => Some(Strategy::choose(reduce, &devices)?),
        };
        let group = Self {
            devices,
            strategy,
            shard: args.shard,
            share: 1,
            exchanges: Vec::new(),
            processes: None,
        };
        group.sharing(args, "devices of --devices", |group| {
            let sets = group.devices.chunks(group.share);
            sets.map(|set| Crossing::choose(args.exchange, set))
                .collect()
        })
    }

    /// Returns the group of processes with a device each. This one's is that of `--device`, or the CUDA device of its local rank.
    pub fn of_processes(processes: &Arc<Processes>, args: &DeviceArgs) -> Result<Self> {
        let (rank, count) = (processes.rank(), processes.count());
        let best = device::compiled_names().first().copied();
        let own = match args.device.as_deref().or(best) {
            Some("cuda") => device::open(Some(&format!("cuda:{}", processes.local_rank())))?,
            _ => device::open(args.device.as_deref())?,
        };
        let strategy = match args.reduce {
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
        let group = Self {
            devices: devices.collect(),
            strategy: Some(strategy),
            shard: args.shard,
            share: 1,
            exchanges: Vec::new(),
            processes: Some(processes.clone()),
        };
        group.sharing(args, "processes", |Self { share, .. }| {
            let first = rank / share * share;
            Ok(vec![Exchange::processes(processes, first..first + share)?])
        })
    }

    /// Applies the flags about sequences that devices share; `of` names the devices in errors.
    fn sharing(
        mut self,
        args: &DeviceArgs,
        of: &str,
        exchanges: impl FnOnce(&Self) -> Result<Vec<Exchange>>,
    ) -> Result<Self> {
        if self.shard == Shard::Batch {
            ensure!(
                args.exchange.is_none() && args.share.is_none(),
                "--exchange and --share are of --shard sequence, whose keys cross between devices"
            );
            return Ok(self);
        }
        let count = self.devices.len();
        self.share = args.share.unwrap_or(count);
        ensure!(
            count.is_multiple_of(self.share),
            "--share must divide the {count} {of}, got {}",
            self.share
        );
        self.exchanges = exchanges(&self)?;
        Ok(self)
    }

    /// Returns this process, if each device has its own.
    pub fn processes(&self) -> Option<&Arc<Processes>> {
        self.processes.as_ref()
    }

    /// Returns the first device, where evaluation runs and memory is measured, with the names of all.
    pub fn first(&self) -> NamedDevice {
        let names: Vec<&str> = (self.devices.iter())
            .map(|device| device.name.as_str())
            .collect();
        NamedDevice {
            name: names.join(", "),
            device: self.devices[0].device.clone(),
        }
    }

    /// Returns the post of each device, if steps are divided.
    pub(super) fn posts(&self) -> Option<Vec<Post>> {
        let strategy = self.strategy.as_ref()?;
        let of = |(rank, device): (usize, &NamedDevice)| Post {
            rank,
            count: self.devices.len(),
            device: device.clone(),
            strategy: strategy.clone(),
        };
        Some(self.devices.iter().enumerate().map(of).collect())
    }

    /// Returns the number of devices with the same windows.
    pub(super) fn share(&self) -> usize {
        self.share
    }

    /// Returns the shards of all devices of this process, if they share windows.
    pub(super) fn shards(&self, model: &SparseTransformer) -> Result<Vec<TransformerShard>> {
        let mut shards = Vec::new();
        for exchange in &self.exchanges {
            let set = TransformerShard::group_by(model, model.context(), self.share, exchange);
            shards.extend(set.context("--shard sequence")?);
        }
        Ok(shards)
    }

    /// Returns the number of parts of a batch.
    fn sets(&self) -> usize {
        self.devices.len() / self.share
    }

    pub(super) fn adds_by_nccl(&self) -> bool {
        matches!(self.strategy, Some(Strategy::Nccl { .. }))
    }

    /// Returns whether steps are divided.
    pub fn spreads(&self) -> bool {
        self.strategy.is_some()
    }

    /// Checks that the devices can train `config`.
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
        let dropout = config.model.dropout;
        ensure_all! {
            is_shared || batch.is_multiple_of(devices) =>
                "--batch must be a multiple of the {devices} devices of {flag}, got {batch}";
            batch.is_multiple_of(sets) =>
                "--batch must be a multiple of the {sets} sets of devices that share sequences, got {batch}";
            // Masks depend on a row's index in the batch.
            !is_shared || dropout == 0.0 => "--shard sequence is without dropout, got --dropout {dropout}";
            !graph => "--graph replays the steps of one device alone; leave it out with {flag}";
        }
        if let Some(content @ ContentAttention::Routing(_)) = &config.model.content {
            bail!(
                "--attention {content} has means that follow all bytes of a batch, of which each device sees a part; train it with --device"
            );
        }
        Ok(())
    }

    /// Describes the division of steps with `batch` windows.
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

/// Parses device names, all of one kind. A number is a CUDA device's, and `cpu` the best CPU backend.
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
