//! Exchange of blocks: each device sends blocks to every other one and receives theirs.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use burn::tensor::try_read_sync;

use crate::base::device::index;
use crate::base::prelude::*;
use crate::sharded::ShardEnd;
use crate::sharded::exchange::Exchange;
use crate::sharded::lane::Lane;
use crate::sharded::links::{Carrier, Links, Stage};
use crate::sharded::ops::ShardOps;

/// Keys and values, or the gradients with respect to them: `[batch, blocks, block_size · dim]`.
pub type Blocks<B> = [FloatTensor<B>; 2];

/// One device's connection to the others.
pub enum Way {
    Host(Box<dyn Carrier<[TensorData; 2]>>),
    /// Devices exchange data directly, identified by their CUDA indices, once each knows that the other is ready.
    Nccl {
        links: Links<Ready>,
        indices: Vec<u16>,
    },
}

/// Values that two devices compare before they wait for each other without a time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    batch: usize,
    widths: [usize; 2],
    dtype: DType,
}

impl Way {
    /// Creates the connections of those devices of a group that belong to this process, with their ranks.
    pub fn group(exchange: &Exchange, devices: usize) -> Vec<(usize, Self)> {
        let ways = match exchange {
            Exchange::Host { .. } => {
                let links = Links::group(devices).into_iter();
                links.map(|links| Self::Host(Box::new(links))).collect()
            }
            Exchange::Processes { processes, ranks } => {
                let lane = Lane::new(processes, ranks);
                let rank = processes.rank() - ranks.start;
                return vec![(rank, Self::Host(Box::new(lane)))];
            }
            Exchange::Nccl { devices: all } => {
                let indices: Vec<u16> = all.iter().filter_map(index).collect();
                let nccl = |links| Self::Nccl {
                    links,
                    indices: indices.clone(),
                };
                Links::group(devices)
                    .into_iter()
                    .map(nccl)
                    .collect::<Vec<_>>()
            }
        };
        ways.into_iter().enumerate().collect()
    }

    /// Leaves the group.
    pub fn leave(&self) {
        match self {
            Self::Host(links) => links.leave(),
            Self::Nccl { links, .. } => links.leave(),
        }
    }
}

impl ShardEnd {
    /// Sends each other device the blocks of `x` that `give` lists for it. Returns the blocks received from each device for which `get` lists some, in order.
    pub fn cross<B: ShardOps>(
        &self,
        x: &Blocks<B>,
        give: &[Vec<i32>],
        get: &[Vec<i32>],
        stage: Stage,
    ) -> Result<Vec<Blocks<B>>, OpError> {
        match &self.way {
            Way::Host(links) => self.by_host::<B>(&**links, x, give, get, stage),
            Way::Nccl { links, indices } => {
                self.by_nccl::<B>((links, indices), x, give, get, stage)
            }
        }
    }

    fn by_host<B: Backend>(
        &self,
        links: &dyn Carrier<[TensorData; 2]>,
        x: &Blocks<B>,
        give: &[Vec<i32>],
        get: &[Vec<i32>],
        stage: Stage,
    ) -> Result<Vec<Blocks<B>>, OpError> {
        for (to, numbers) in some(give) {
            let [k, v] = x.each_ref().map(|x| read::<B>(chosen::<B>(x, numbers)));
            let blocks = [k?, v?];
            self.count(blocks.iter().map(|data| data.as_bytes().len()).sum());
            links.send(to, stage, blocks)?;
        }
        let arrived = some(get).map(|(from, numbers)| {
            let [k, v] = links.receive(from, stage)?;
            let of = |data, x| of_host::<B>(data, x, numbers.len());
            Ok([of(k, &x[0])?, of(v, &x[1])?])
        });
        arrived.collect()
    }

    /// Exchanges blocks by NCCL: pairs of devices swap one list each, in the order of [`rounds`].
    fn by_nccl<B: ShardOps>(
        &self,
        (links, indices): (&Links<Ready>, &[u16]),
        x: &Blocks<B>,
        give: &[Vec<i32>],
        get: &[Vec<i32>],
        stage: Stage,
    ) -> Result<Vec<Blocks<B>>, OpError> {
        let device = x[0].device();
        let [batch, _, _] = x[0].shape().dims::<3>();
        let ready = Ready {
            batch,
            widths: x.each_ref().map(|x| x.shape()[2]),
            dtype: x[0].dtype(),
        };
        let with = |peer: &usize| !give[*peer].is_empty() || !get[*peer].is_empty();
        let peers: Vec<usize> = rounds(self.rank, indices.len()).filter(with).collect();
        for &peer in &peers {
            links.send(peer, stage, ready)?;
        }
        // Receives from all peers before the first swap, which waits on the device.
        for &peer in &peers {
            let theirs = links.receive(peer, stage)?;
            OpError::expect_same("another device's blocks", ready, "this device's", theirs)?;
        }
        let mut arrived = BTreeMap::new();
        for &peer in &peers {
            let length = ready.elements(&give[peer]).max(ready.elements(&get[peer]));
            self.count(length * ready.dtype.size());
            let own = packed::<B>(x, &give[peer], length);
            let theirs = B::swapped(own, indices[peer]);
            // The other device may wait for work that is still in fusion's queue.
            B::sync_collective(&device);
            if !get[peer].is_empty() {
                arrived.insert(peer, unpacked::<B>(theirs, ready, get[peer].len()));
            }
        }
        Ok(arrived.into_values().collect())
    }

    fn count(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl Ready {
    /// Returns the number of elements of these blocks of keys and values.
    fn elements(&self, blocks: &[i32]) -> usize {
        self.batch * blocks.len() * (self.widths[0] + self.widths[1])
    }
}

/// Returns the lists that are not empty, with their device.
pub fn some(lists: &[Vec<i32>]) -> impl Iterator<Item = (usize, &[i32])> {
    (lists.iter().enumerate())
        .filter(|(_, numbers)| !numbers.is_empty())
        .map(|(other, numbers)| (other, &numbers[..]))
}

/// Returns the order in which a device meets the others. Each round consists of disjoint pairs, so that devices never wait for each other in a cycle.
fn rounds(rank: usize, devices: usize) -> impl Iterator<Item = usize> {
    let rounds = 1..devices.next_power_of_two();
    rounds
        .map(move |round| rank ^ round)
        .filter(move |&peer| peer < devices)
}

fn chosen<B: Backend>(x: &FloatTensor<B>, numbers: &[i32]) -> FloatTensor<B> {
    let data = TensorData::new(numbers.to_vec(), [numbers.len()]);
    let index = B::int_from_data(data, &x.device());
    B::float_select(x.clone(), 1, index)
}

/// Packs some blocks of keys, then of values, and pads with zeros to `length`.
fn packed<B: Backend>(x: &Blocks<B>, numbers: &[i32], length: usize) -> FloatTensor<B> {
    let mut parts = Vec::new();
    if !numbers.is_empty() {
        let chosen = |x: &FloatTensor<B>| Array::<B>(chosen::<B>(x, numbers)).flat();
        parts.extend(x.each_ref().map(chosen));
    }
    let filled: usize = parts.iter().map(|part| part.shape()[0]).sum();
    if filled < length {
        let (device, dtype) = (x[0].device(), x[0].dtype().into());
        parts.push(Array::zeros([length - filled], &device, dtype));
    }
    Array::cat(parts, 0).0
}

/// Inverts [`packed`] for `count` blocks.
fn unpacked<B: Backend>(x: FloatTensor<B>, ready: Ready, count: usize) -> Blocks<B> {
    let mut first = 0;
    ready.widths.map(|width| {
        let length = ready.batch * count * width;
        let part = Array::<B>(x.clone()).narrow(0, first..first + length);
        first += length;
        part.reshape([ready.batch, count, width]).0
    })
}

fn read<B: Backend>(x: FloatTensor<B>) -> Result<TensorData, OpError> {
    let read = try_read_sync(B::float_into_data(x));
    let read = read.map(|data| data.map_err(|error| OpError::Read(format!("{error:?}"))));
    read.unwrap_or_else(|| Err(OpError::Read("a device that is read later".into())))
}

/// Uploads `count` blocks of another device to the device of `x`.
fn of_host<B: Backend>(
    data: TensorData,
    x: &FloatTensor<B>,
    count: usize,
) -> Result<FloatTensor<B>, OpError> {
    let [batch, _, width] = x.shape().dims();
    let whose = "of this device's batch and width";
    let got: [usize; 3] = data.shape().dims();
    OpError::expect_same("another device's blocks", [batch, count, width], whose, got)?;
    let (expected, got) = (x.dtype(), data.dtype());
    OpError::expect_same("another device's dtype", expected, "this device's", got)?;
    Ok(B::float_from_data(data, &x.device()))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::backend::Flex;

    use super::*;

    #[test]
    fn all_pairs_meet_in_rounds() {
        for devices in 2..10 {
            let orders: Vec<Vec<usize>> = (0..devices)
                .map(|rank| rounds(rank, devices).collect())
                .collect();
            let mut met = vec![0; devices];
            let mut pairs = 0;
            // Each is next in the other's order.
            while let Some((a, b)) = (0..devices).find_map(|a| {
                let b = *orders[a].get(met[a])?;
                (orders[b].get(met[b]) == Some(&a)).then_some((a, b))
            }) {
                met[a] += 1;
                met[b] += 1;
                pairs += 1;
            }
            assert_eq!(pairs, devices * (devices - 1) / 2);
        }
    }

    #[test]
    fn blocks_come_out_of_a_list_as_they_went_in() {
        let device = Default::default();
        let numbers = |first: usize, shape: [usize; 3]| {
            let count = shape.iter().product::<usize>();
            let values: Vec<f32> = (first..first + count).map(|x| x as f32).collect();
            <Flex as burn::backend::ops::FloatTensorOps<Flex>>::float_from_data(
                TensorData::new(values, shape),
                &device,
            )
        };
        let x: Blocks<Flex> = [numbers(0, [2, 5, 16]), numbers(1000, [2, 5, 24])];
        let ready = Ready {
            batch: 2,
            widths: [16, 24],
            dtype: DType::F32,
        };
        let list = [3, 0, 4];
        let length = ready.elements(&list) + 8;
        let vector = packed::<Flex>(&x, &list, length);
        assert_eq!(vector.shape().dims(), [length]);
        let back = unpacked::<Flex>(vector, ready, list.len());
        for (back, x) in back.into_iter().zip(&x) {
            let expected = read::<Flex>(chosen::<Flex>(x, &list)).unwrap();
            assert_eq!(read::<Flex>(back).unwrap(), expected);
        }
        // A device that sends nothing.
        let zeros = read::<Flex>(packed::<Flex>(&x, &[], 8)).unwrap();
        assert_eq!(zeros, TensorData::new(vec![0f32; 8], [8]));
    }
}
