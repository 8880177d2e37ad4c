//! Sums of gradients over devices.

use std::net::TcpListener;

use anyhow::{Context, Result, anyhow, ensure};
use burn::tensor::distributed::{ReduceOperation, all_reduce};
use burn::tensor::{Device, Tensor, TensorData};
use burn_blocksparse::{Exchange, Message, OpError, Processes, check_collectives};
use clap::ValueEnum;

use crate::device::{self, NamedDevice};
use crate::flags::ensure_all;

/// A way to add gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Reduce {
    /// NCCL: CUDA devices among themselves
    Nccl,
    /// Copies to the first device, which adds them in order, and back: on any device
    Copies,
}

/// What devices share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Shard {
    /// Each has some windows of a batch
    #[default]
    Batch,
    /// Each has some positions of every window, and gets the keys that they attend to
    Sequence,
}

/// A way for keys to cross.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Crossing {
    /// NCCL: CUDA devices among themselves
    Nccl,
    /// By way of the host: between any devices
    Host,
}

impl Crossing {
    /// Returns the requested exchange, or NCCL if it can be used.
    pub fn choose(asked: Option<Self>, named: &[NamedDevice]) -> Result<Exchange> {
        let devices = devices(named);
        match asked {
            None => Ok(Exchange::best(&devices)),
            Some(Self::Host) => Ok(Exchange::default()),
            Some(Self::Nccl) => {
                let flags = ["--exchange nccl", "--exchange host"];
                check_cuda(flags, named)?;
                Exchange::nccl(&devices).map_err(|error| no_nccl(flags, &error))
            }
        }
    }
}

fn devices(named: &[NamedDevice]) -> Vec<Device> {
    named.iter().map(|named| named.device.clone()).collect()
}

/// Checks that NCCL supports the devices, for a flag's value `way`; `other` is the alternative in errors.
fn check_cuda([way, other]: [&str; 2], named: &[NamedDevice]) -> Result<()> {
    for (index, NamedDevice { name, .. }) in named.iter().enumerate() {
        let is_twice = named[..index].iter().any(|other| other.name == *name);
        ensure_all! {
            name.starts_with("cuda") => "{way} is of CUDA devices, got {name}";
            !is_twice => "{way} takes each device once, got {name} twice; with {other} it can be";
        }
    }
    Ok(())
}

fn no_nccl([way, other]: [&str; 2], error: &OpError) -> anyhow::Error {
    anyhow!("{way} cannot be used: {error}; {other} needs nothing")
}

/// Strategy of a run.
#[derive(Clone, Debug)]
pub(super) enum Strategy {
    /// Each device calls NCCL, through Burn's engine.
    Nccl { devices: Vec<Device> },
    /// The first device adds, in the order of the devices: deterministic.
    Copies {
        /// Why NCCL is not used, where it would have been the default.
        instead: Option<String>,
    },
}

impl Strategy {
    /// Returns the requested strategy, or NCCL if it can be used.
    pub fn choose(asked: Option<Reduce>, named: &[NamedDevice]) -> Result<Self> {
        let flags = ["--reduce nccl", "--reduce copies"];
        match (asked, check_cuda(flags, named)) {
            // NCCL is not looked for.
            (Some(Reduce::Copies), _) | (None, Err(_)) => {
                return Ok(Self::Copies { instead: None });
            }
            (_, known) => known?,
        }
        let works = (named.iter()).try_for_each(|named| check_collectives(&named.device));
        match works {
            Ok(()) => Ok(Self::Nccl {
                devices: devices(named),
            }),
            Err(error) if asked.is_some() => Err(no_nccl(flags, &error)),
            Err(error) => Ok(Self::Copies {
                instead: Some(error.to_string()),
            }),
        }
    }

    /// NCCL between processes of one host, each of which has the CUDA device of its rank and sees all others.
    pub fn nccl_between(processes: &Processes, own: &NamedDevice) -> Result<Self> {
        let (rank, count) = (processes.rank(), processes.count());
        ensure_all! {
            processes.are_of_one_host() =>
                "--reduce nccl is of processes of one host, whose LOCAL_WORLD_SIZE is WORLD_SIZE, {count}; with --reduce copies they can be of several";
            own.name == format!("cuda:{rank}") =>
                "--reduce nccl needs each process on the CUDA device of its rank, got {} in rank {rank}", own.name;
        }
        let all = (0..count).map(|index| device::named(&format!("cuda:{index}")));
        let strategy = Self::choose(Some(Reduce::Nccl), &all.collect::<Result<Vec<_>>>()?)?;
        let port = common_port(processes)?;
        // SAFETY: no other thread reads the environment: so far, only the connections to processes have threads.
        unsafe { std::env::set_var("NCCL_COMM_ID", format!("127.0.0.1:{port}")) };
        Ok(strategy)
    }

    /// Describes the strategy; `first` is the name of the first device.
    pub fn describe(&self, first: &str) -> String {
        match self {
            Self::Nccl { .. } => "gradients added by NCCL".to_owned(),
            Self::Copies { instead } => {
                let why = instead
                    .as_ref()
                    .map(|reason| format!(" (not by NCCL: {reason})"));
                format!(
                    "gradients added by copies to {first} and back{}",
                    why.unwrap_or_default()
                )
            }
        }
    }
}

/// Returns a free port that rank 0 finds for all processes. CubeCL asks NCCL for an identifier in each of them, and NCCL derives it from the address in
/// `NCCL_COMM_ID`, where it then listens in rank 0.
fn common_port(processes: &Processes) -> Result<u64> {
    const LANE: u16 = 2;
    if processes.rank() > 0 {
        let port = processes.receive(0, LANE)?.words.pop();
        return port.context("no port");
    }
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let message = Message {
        words: vec![port.into()],
        tensors: Vec::new(),
    };
    (1..processes.count()).try_for_each(|rank| processes.send(rank, LANE, &message))?;
    Ok(port.into())
}

/// One device's call of NCCL: each of `buckets` becomes its mean over all `devices`. Each device must call this from its own thread, with the same number and
/// lengths of buckets.
///
/// Burn's engine submits it to the device's own queue, reduces in place if no one else holds the bucket, and makes later compute wait for it on the device. A
/// single thread for all devices would deadlock: with fusion the first device's `resolve` returns when its queue is empty, and that queue contains the join,
/// which waits for the other devices.
pub(super) fn nccl_means(buckets: Vec<Tensor<1>>, devices: &[Device]) -> Vec<Tensor<1>> {
    let submit = |bucket| all_reduce(bucket, ReduceOperation::Mean, devices.to_vec());
    // Submit all before the first wait.
    let means: Vec<_> = buckets.into_iter().map(submit).collect();
    means.into_iter().map(|mean| mean.resolve()).collect()
}

/// Sums all devices' buckets, `[device][bucket]`, in the order of the devices, on the first one.
pub(super) fn sum_on_first(parts: Vec<Vec<Tensor<1>>>, first: &Device) -> Result<Vec<Tensor<1>>> {
    let mut parts = parts.into_iter();
    let mut sums = parts.next().unwrap_or_default();
    for part in parts {
        let [got, expected] = [&part, &sums].map(|buckets| lengths(buckets));
        check_lengths(&expected, &got)?;
        sums = (sums.into_iter().zip(part))
            .map(|(sum, bucket)| Ok(sum + copied(&bucket, first)?))
            .collect::<Result<_>>()?;
    }
    Ok(sums)
}

/// Copies a tensor to a device through the host. With NCCL, `to_device` sends between CUDA devices on a stream of its own, without waiting for other uses of
/// the receiving memory, and nothing waits for it before the sending memory is reused: gradients became NaN in a second step (CubeCL 0.11.3,
/// `Client::to_client_tensor`).
pub(super) fn copied(x: &Tensor<1>, device: &Device) -> Result<Tensor<1>> {
    let device = device.clone().without_autodiff();
    if x.device() == device {
        return Ok(x.clone());
    }
    let data = read(x)?;
    let dtype = data.dtype();
    Ok(Tensor::from_data(data, (&device, dtype)))
}

/// Reads a tensor to the host.
pub(super) fn read(x: &Tensor<1>) -> Result<TensorData> {
    let data = x.clone().try_into_data();
    data.map_err(|error| anyhow!("{error:?}"))
}

/// Returns the number of elements of each bucket.
pub(super) fn lengths(buckets: &[Tensor<1>]) -> Vec<usize> {
    buckets.iter().map(|bucket| bucket.dims()[0]).collect()
}

/// Checks that devices have gradients of the same parameters.
pub(super) fn check_lengths(expected: &[usize], got: &[usize]) -> Result<()> {
    ensure!(
        expected == got,
        "devices have gradients of different parameters: buckets of {expected:?} and {got:?} elements"
    );
    Ok(())
}
