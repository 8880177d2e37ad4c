//! How devices add their gradients.

use anyhow::{Result, anyhow, bail, ensure};
use burn::tensor::distributed::{ReduceOperation, all_reduce};
use burn::tensor::{Device, Tensor};
use burn_blocksparse::{Exchange, OpError, check_collectives};
use clap::ValueEnum;

use crate::device::NamedDevice;

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
    /// The one that was asked for, or NCCL where it can be used.
    pub fn choose(asked: Option<Self>, named: &[NamedDevice]) -> Result<Exchange, OpError> {
        let devices: Vec<Device> = named.iter().map(|named| named.device.clone()).collect();
        match asked {
            None => Ok(Exchange::best(&devices)),
            Some(Self::Nccl) => Exchange::nccl(&devices),
            Some(Self::Host) => Ok(Exchange::default()),
        }
    }
}

/// The way of a run.
#[derive(Clone, Debug)]
pub(super) enum Strategy {
    /// Each device calls NCCL, through Burn's engine.
    Nccl { devices: Vec<Device> },
    /// The first device adds, in the order of the devices: deterministic.
    Copies {
        /// Why not NCCL, where it would have been taken.
        instead: Option<String>,
    },
}

impl Strategy {
    /// The one that was asked for, or NCCL where it can be used.
    pub fn choose(asked: Option<Reduce>, named: &[NamedDevice]) -> Result<Self> {
        // NCCL is not looked for.
        if asked == Some(Reduce::Copies) {
            return Ok(Self::Copies { instead: None });
        }
        let is_asked = asked == Some(Reduce::Nccl);
        for (index, NamedDevice { name, device }) in named.iter().enumerate() {
            let is_cuda = name.starts_with("cuda");
            let is_twice = named[..index].iter().any(|other| other.name == *name);
            if !is_asked && (!is_cuda || is_twice) {
                return Ok(Self::Copies { instead: None });
            }
            ensure!(is_cuda, "--reduce nccl is of CUDA devices, got {name}");
            ensure!(
                !is_twice,
                "--reduce nccl takes each device once, got {name} twice; with --reduce copies it can be"
            );
            match check_collectives(device) {
                Ok(()) => {}
                Err(error) if is_asked => {
                    bail!("--reduce nccl cannot be used: {error}; --reduce copies needs nothing")
                }
                Err(error) => {
                    let instead = Some(error.to_string());
                    return Ok(Self::Copies { instead });
                }
            }
        }
        let devices = named.iter().map(|named| named.device.clone()).collect();
        Ok(Self::Nccl { devices })
    }

    /// In words, after what each device does.
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

/// One device's call of NCCL: each of `buckets` becomes its sum over all `devices`, which must each call this, from a thread of their own, with as many buckets of
/// the same lengths.
///
/// Burn's engine submits it to the device's own queue, reduces in place what nobody else holds, and makes compute that is submitted later wait for it on the
/// device. From one thread for all devices it would wait for ever: with fusion the first device's `resolve` returns when its queue is
/// empty, and joining the others, which waits for them, is in that queue.
pub(super) fn nccl_sums(buckets: Vec<Tensor<1>>, devices: &[Device]) -> Vec<Tensor<1>> {
    let submit = |bucket| all_reduce(bucket, ReduceOperation::Sum, devices.to_vec());
    // All of them before the first wait.
    let sums: Vec<_> = buckets.into_iter().map(submit).collect();
    sums.into_iter().map(|sum| sum.resolve()).collect()
}

/// The sum of all devices' buckets, in the order of the devices, on the first one; `[device][bucket]`.
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

/// The numbers of a tensor on a device, by way of the host. Where NCCL is there `to_device` sends from one CUDA device to another on a stream of its own,
/// which waits neither for who else uses the memory that is received into, nor does anybody wait with what was sent from: gradients became NaN in a second
/// step (CubeCL 0.11.3, `Client::to_client_tensor`).
pub(super) fn copied(x: &Tensor<1>, device: &Device) -> Result<Tensor<1>> {
    let device = device.clone().without_autodiff();
    if x.device() == device {
        return Ok(x.clone());
    }
    let data = x.clone().try_into_data();
    let data = data.map_err(|error| anyhow!("{error:?}"))?;
    let dtype = data.dtype();
    Ok(Tensor::from_data(data, (&device, dtype)))
}

/// The elements of each bucket.
pub(super) fn lengths(buckets: &[Tensor<1>]) -> Vec<usize> {
    buckets.iter().map(|bucket| bucket.dims()[0]).collect()
}

/// That devices have gradients of the same parameters.
pub(super) fn check_lengths(expected: &[usize], got: &[usize]) -> Result<()> {
    ensure!(
        expected == got,
        "devices have gradients of different parameters: buckets of {expected:?} and {got:?} numbers"
    );
    Ok(())
}
