//! Replicas of a model on several devices, which take every step together.

use std::iter::repeat_n;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::tensor::{Tensor, TensorData};
use burn_blocksparse::{Message, Processes};
use burn_sparse_transformer::TransformerShard;

use super::group::Group;
use super::processes::{beginning, relay};
use super::reduce::{Strategy, check_lengths, copied, sum_on_first};
use super::worker::{Answer, Order, Part, Post, Replica, Report, guarded, work};
use crate::checkpoint::Checkpoint;
use crate::data::thousands;
use crate::step::{Batch, Change, Measured, Steps};

/// The first device's replica, and threads with the others'.
pub struct Replicas {
    first: Replica,
    posts: Vec<Post>,
    /// Number of devices with the same windows.
    share: usize,
    /// Processes of the other devices.
    processes: Option<Arc<Processes>>,
    /// Bytes sent to and received from them in the last step.
    traffic: Option<[u64; 2]>,
    workers: Vec<Worker>,
    answers: Receiver<Answer>,
    /// After a failure no thread is joined: it may be waiting in the driver for a lost device.
    failed: bool,
}

struct Worker {
    orders: Sender<Order>,
    thread: JoinHandle<()>,
}

/// Initial state of other devices, in this process and in others.
#[derive(Clone)]
enum Begin {
    Here(Arc<Checkpoint>),
    Elsewhere(Arc<Processes>, Arc<Message>),
}

impl Replicas {
    /// Starts replicas from the first device's model and optimizer, whose state is `checkpoint`.
    pub(super) fn start(
        group: &Group,
        posts: Vec<Post>,
        first: Steps,
        checkpoint: Checkpoint,
    ) -> Result<Self> {
        let shards = group.shards(&*first.model()?)?.into_iter();
        let mut shards: Vec<Option<TransformerShard>> = shards.map(Some).collect();
        shards.resize_with(posts.len(), || None);
        let (reports, answers) = mpsc::channel();
        let begin = match group.processes() {
            None => Begin::Here(Arc::new(checkpoint)),
            Some(processes) => {
                let beginning = Arc::new(beginning(group, checkpoint)?);
                Begin::Elsewhere(processes.clone(), beginning)
            }
        };
        let mut workers = Vec::new();
        for post in posts.iter().skip(1) {
            let (orders, received) = mpsc::channel();
            let (own, begin, reports) = (post.clone(), begin.clone(), reports.clone());
            let shard = shards[post.rank].take();
            let life = move || match begin {
                Begin::Here(checkpoint) => work(own, shard, checkpoint, received, reports),
                Begin::Elsewhere(processes, beginning) => {
                    relay(&own, &processes, &beginning, received, reports);
                }
            };
            let thread = thread::Builder::new().name(post.device.name.clone());
            let thread = thread.spawn(life).context("cannot start a thread")?;
            workers.push(Worker { orders, thread });
        }
        let mut replicas = Self {
            first: Replica::new(posts[0].clone(), shards[0].take(), first),
            share: group.share(),
            posts,
            processes: group.processes().cloned(),
            traffic: None,
            workers,
            answers,
            failed: false,
        };
        replicas.collect()?;
        Ok(replicas)
    }

    /// Returns the first device's model and optimizer.
    pub fn steps(&self) -> &Steps {
        &self.first.steps
    }

    /// Describes what a step sends between processes.
    pub fn describe(&self) -> Option<String> {
        let [sent, received] = self.traffic?.map(|bytes| thousands(bytes as usize));
        Some(format!(
            "a step sends {sent} bytes to other processes, and receives {received}"
        ))
    }

    /// Takes a step, and returns the losses over the batch and the norm of its gradients.
    pub fn take(&mut self, batch: Batch) -> Result<Measured> {
        let before = self.processes.as_ref().map(|of| of.traffic());
        let measured = self.step(batch)?;
        let after = self.processes.as_ref().map(|of| of.traffic());
        let during =
            |(before, after): ([u64; 2], [u64; 2])| [0, 1].map(|way| after[way] - before[way]);
        self.traffic = before.zip(after).map(during);
        Ok(measured)
    }

    fn step(&mut self, batch: Batch) -> Result<Measured> {
        let learning_rate = batch.learning_rate;
        let parts = parts(&batch, self.posts.len() / self.share)?.into_iter();
        let parts = parts.flat_map(|part| repeat_n(part, self.share));
        let orders = parts.map(Order::Gradients).collect();
        let gradients = self.order(orders)?;
        // Runs on the first device; running out of memory counts as its failure.
        let sums = guarded(&self.first.post.title(), || self.sums(gradients));
        self.failed |= sums.is_err();
        let sums = sums?;
        let orders = sums.into_iter().map(|sums| Order::Update {
            learning_rate,
            sums,
        });
        let measured = self.order(orders.collect())?;
        self.mean(measured)
    }

    /// Changes all models. Replicas are equal, so they prune the same blocks.
    pub fn change(&mut self, change: Change) -> Result<()> {
        let orders = self.posts.iter().map(|_| Order::Change(change));
        self.order(orders.collect()).map(drop)
    }

    /// Gives each device its order, waits for all, and returns the reports in the order of the devices.
    fn order(&mut self, orders: Vec<Order>) -> Result<Vec<Report>> {
        let mut orders = orders.into_iter();
        let own = orders.next().context("no device")?;
        for (worker, order) in self.workers.iter().zip(orders) {
            // A worker that is gone has left its reason among the answers.
            let _ = worker.orders.send(order);
        }
        let done = self.first.obey(own);
        self.failed |= done.is_err();
        let mut reports = vec![done?];
        reports.extend(self.collect()?);
        Ok(reports)
    }

    /// Returns one report per worker, in order; the first error ends the wait.
    fn collect(&mut self) -> Result<Vec<Report>> {
        let mut reports: Vec<Option<Report>> = self.workers.iter().map(|_| None).collect();
        for _ in 0..reports.len() {
            let answer = self
                .answers
                .recv()
                .map_err(|_| anyhow!("all devices are gone"));
            let reported = answer.and_then(|(rank, report)| Ok((rank, report?)));
            self.failed |= reported.is_err();
            let (rank, report) = reported?;
            reports[rank - 1] = Some(report);
        }
        Ok(reports.into_iter().flatten().collect())
    }

    /// Returns the sums for each device's update.
    fn sums(&self, gradients: Vec<Report>) -> Result<Vec<Option<Vec<Tensor<1>>>>> {
        if let Strategy::Nccl { .. } = self.first.post.strategy {
            let mut expected = None;
            for report in gradients {
                let Report::Lengths(got) = report else {
                    bail!("a device gave its gradients away");
                };
                check_lengths(expected.get_or_insert(got.clone()), &got)?;
            }
            return Ok(self.posts.iter().map(|_| None).collect());
        }
        let parts = (gradients.into_iter())
            .map(|report| match report {
                Report::Gradients(buckets) => Ok(buckets),
                _ => bail!("a device kept its gradients"),
            })
            .collect::<Result<Vec<_>>>()?;
        let sums = sum_on_first(parts, &self.posts[0].device.device)?;
        let copies = self.posts.iter().map(|post| {
            let copies = sums.iter().map(|sum| copied(sum, &post.device.device));
            copies.collect::<Result<_>>().map(Some)
        });
        copies.collect()
    }

    /// Returns the means of the losses, and the norm, which must be bitwise equal on all devices.
    fn mean(&self, measured: Vec<Report>) -> Result<Measured> {
        let mut all = Vec::with_capacity(measured.len());
        for report in measured {
            let Report::Measured(measured) = report else {
                bail!("a device measured nothing");
            };
            all.push(measured);
        }
        let expected = all[0].grad_norm;
        let mean = |losses: Vec<f64>| losses.iter().sum::<f64>() / losses.len() as f64;
        let loss = mean(all.iter().map(|of| of.loss).collect());
        let aux_loss: Option<Vec<f64>> = all.iter().map(|of| of.aux_loss).collect();
        for (post, Measured { grad_norm, .. }) in self.posts.iter().zip(&all) {
            // A norm that is not finite ends the run elsewhere.
            let is_other = grad_norm.to_bits() != expected.to_bits();
            ensure!(
                !(is_other && grad_norm.is_finite() && expected.is_finite()),
                "device {} has the gradients' norm {grad_norm}, and {} has {expected}: they no longer train the same model. Continue from the last \
                 checkpoint with --resume, with --reduce copies or on one device",
                post.title(),
                self.posts[0].title(),
            );
        }
        Ok(Measured {
            loss,
            grad_norm: expected,
            aux_loss: aux_loss.map(mean),
        })
    }
}

impl Drop for Replicas {
    fn drop(&mut self) {
        for Worker { orders, thread } in self.workers.drain(..) {
            drop(orders);
            if !self.failed {
                let _ = thread.join();
            }
        }
    }
}

/// Returns equal parts of a batch, in order.
fn parts(batch: &Batch, count: usize) -> Result<Vec<Part>> {
    let entries = batch.tokens.shape()[0] / count;
    let part = |index: usize| {
        let [tokens, targets] =
            [&batch.tokens, &batch.targets].map(|data| part_of(data, index, count));
        Ok(Part {
            data: [tokens?, targets?],
            first_entry: index * entries,
            dropout_seed: batch.dropout_seed,
        })
    };
    (0..count).map(part).collect()
}

/// Returns part `index` of the `count` equal parts of `[entries, context]`.
fn part_of(data: &TensorData, index: usize, count: usize) -> Result<TensorData> {
    let shape = data.shape().to_vec();
    let [entries, context] = shape[..] else {
        bail!("a batch of shape {shape:?}");
    };
    let bytes = data.as_bytes();
    let length = bytes.len() / count;
    let part = bytes[index * length..][..length].to_vec();
    Ok(TensorData::from_bytes_vec(
        part,
        [entries / count, context],
        data.dtype(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_a_batch_in_order() {
        let data = |first: i32| TensorData::new((first..first + 12).collect::<Vec<i32>>(), [6, 2]);
        let batch = Batch {
            tokens: data(0),
            targets: data(1),
            dropout_seed: 9,
            learning_rate: 0.1,
        };
        let parts = parts(&batch, 3).unwrap();
        let firsts: Vec<usize> = parts.iter().map(|part| part.first_entry).collect();
        assert_eq!(firsts, [0, 2, 4]);
        for (index, part) in parts.iter().enumerate() {
            for (offset, data) in part.data.iter().enumerate() {
                let first = (4 * index + offset) as i32;
                let expected: Vec<i32> = (first..first + 4).collect();
                assert_eq!(data.shape().to_vec(), [2, 2]);
                assert_eq!(data.try_to_vec::<i32>().unwrap(), expected);
            }
        }
    }
}
