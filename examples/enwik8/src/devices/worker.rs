//! One device's part of a step, and the thread that runs it on all devices but the first.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use burn::tensor::{Bytes, Tensor, TensorData};
use burn_sparse_transformer::{StepLosses, TransformerShard};

use super::bundle::Bundle;
use super::error::Lost;
use super::reduce::{Strategy, lengths, nccl_means};
use crate::checkpoint::Checkpoint;
use crate::device::NamedDevice;
use crate::step::{Change, Measured, Steps, numbers};
use crate::{exit, model};

/// How long a failed device waits for the run to end. Another device may be waiting in the driver for its part of a sum, and never return.
const GRACE: Duration = Duration::from_secs(30);

/// Order to a device.
pub(super) enum Order {
    Gradients(Part),
    /// The second half of a step.
    Update {
        learning_rate: f64,
        /// Sums of the buckets on this device, unless it adds them itself.
        sums: Option<Vec<Tensor<1>>>,
    },
    Change(Change),
}

/// A device's entries of a batch. It has all of their positions or shares them with other devices.
#[derive(Clone)]
pub(super) struct Part {
    /// Tokens and targets, `[entries, context]` each.
    pub data: [TensorData; 2],
    /// Number of earlier entries of the batch.
    pub first_entry: usize,
    pub dropout_seed: u64,
}

/// Report of a device.
pub(super) enum Report {
    /// The order was carried out; there is no result.
    Done,
    /// Gradients, in buckets that another device adds.
    Gradients(Vec<Tensor<1>>),
    /// Elements of the buckets that the device will add itself.
    Lengths(Vec<usize>),
    /// Losses of its part, and the norm of the mean of all gradients.
    Measured(Measured),
}

/// Rank, and its report.
pub(super) type Answer = (usize, Result<Report>);

/// Rank of a device among `count`, and how they add gradients.
#[derive(Clone)]
pub(super) struct Post {
    pub rank: usize,
    pub count: usize,
    pub device: NamedDevice,
    pub strategy: Strategy,
}

impl Post {
    /// Returns its name in errors, with the rank, since a device may occur twice.
    pub fn title(&self) -> String {
        let name = &self.device.name;
        match self.count {
            1 => name.to_owned(),
            count => format!("{name} ({} of {count})", self.rank + 1),
        }
    }
}

/// Device with its own model.
pub(super) struct Replica {
    pub post: Post,
    pub steps: Steps,
    /// Its positions, if devices share every window.
    pub shard: Option<TransformerShard>,
    half: Option<Half>,
    taken: usize,
}

/// State between the halves of a step.
struct Half {
    losses: StepLosses,
    bundle: Bundle,
    /// Buckets that this device adds itself.
    buckets: Option<Vec<Tensor<1>>>,
}

impl Replica {
    pub fn new(post: Post, shard: Option<TransformerShard>, steps: Steps) -> Self {
        Self {
            post,
            steps,
            shard,
            half: None,
            taken: 0,
        }
    }

    /// Restores a replica from a checkpoint, like a resumed run.
    pub fn restore(
        post: Post,
        shard: Option<TransformerShard>,
        checkpoint: &Checkpoint,
    ) -> Result<Self> {
        let (recipe, device) = (&checkpoint.header.config.recipe, &post.device.device);
        let model = model::restore(checkpoint, &device.clone().autodiff())?;
        let optimizer = Bytes::from_bytes_vec(checkpoint.optimizer.clone());
        let optimizer = model::optimizer(recipe).from_bytes(optimizer)?;
        let steps = Steps::new(model, optimizer, device, recipe.recompute, false);
        Ok(Self::new(post, shard, steps))
    }

    /// Carries out an order. A panic becomes an error.
    pub fn obey(&mut self, order: Order) -> Result<Report> {
        guarded(&self.post.title(), || match order {
            Order::Gradients(part) => self.gradients(part),
            Order::Update {
                learning_rate,
                sums,
            } => self.update(learning_rate, sums),
            Order::Change(change) => self.steps.change(change).map(|()| Report::Done),
        })
    }

    fn gradients(&mut self, part: Part) -> Result<Report> {
        self.taken += 1;
        self.fail_where_a_test_says("gradients")?;
        let (losses, gradients) = match &self.shard {
            None => (self.steps).gradients(part.data, part.first_entry, part.dropout_seed)?,
            Some(shard) => self.steps.gradients_of_shard(part.data, shard)?,
        };
        let (bundle, buckets) = Bundle::pack(&*self.steps.model()?, gradients)?;
        let (report, buckets) = match self.post.strategy {
            Strategy::Nccl { .. } => (Report::Lengths(lengths(&buckets)), Some(buckets)),
            Strategy::Copies { .. } => (Report::Gradients(buckets), None),
        };
        self.half = Some(Half {
            losses,
            bundle,
            buckets,
        });
        Ok(report)
    }

    fn update(&mut self, learning_rate: f64, sums: Option<Vec<Tensor<1>>>) -> Result<Report> {
        self.fail_where_a_test_says("update")?;
        let half = self.half.take().context("an update without gradients")?;
        let means = match (&self.post.strategy, half.buckets, sums) {
            (Strategy::Nccl { devices }, Some(buckets), None) => nccl_means(buckets, devices),
            // The mean over equal parts is that of the batch.
            (Strategy::Copies { .. }, None, Some(sums)) => match self.post.count {
                1 => sums,
                count => (sums.into_iter()).map(|sum| sum / count as f64).collect(),
            },
            _ => bail!("an update of another strategy"),
        };
        let gradients = half.bundle.unpack(&*self.steps.model()?, means);
        let norm = self.steps.update(learning_rate, gradients)?;
        Measured::read(numbers(half.losses, norm)).map(Report::Measured)
    }

    /// Fails by `ENWIK8_FAIL=RANK,STEP,gradients|update,error|panic`, in development builds only: nothing else makes a CPU fail.
    fn fail_where_a_test_says(&self, half: &str) -> Result<()> {
        if !cfg!(debug_assertions) {
            return Ok(());
        }
        let wanted = std::env::var("ENWIK8_FAIL").unwrap_or_default();
        let here = format!("{},{},{half},", self.post.rank, self.taken);
        match wanted.strip_prefix(&here) {
            Some("panic") => panic!("asked to panic"),
            Some(_) => bail!("asked to fail"),
            None => Ok(()),
        }
    }
}

/// Runs a device's part of a step; its errors and panics name the device.
pub(super) fn guarded<T>(device: &str, part: impl FnOnce() -> Result<T>) -> Result<T> {
    // After a panic the replica is not used again.
    let reason = match catch_unwind(AssertUnwindSafe(part)) {
        Ok(Ok(done)) => return Ok(done),
        Ok(Err(error)) => format!("{error:#}"),
        Err(payload) => {
            let text = (payload
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned()))
            .or_else(|| payload.downcast_ref::<String>().cloned());
            text.unwrap_or_else(|| "a panic without a message".to_owned())
        }
    };
    let what = format!("device {device} failed");
    Err(Lost { what, reason }.into())
}

/// Runs a thread: restores the replica, then carries out orders until there are none.
pub(super) fn work(
    post: Post,
    shard: Option<TransformerShard>,
    checkpoint: Arc<Checkpoint>,
    orders: Receiver<Order>,
    answers: Sender<Answer>,
) {
    let rank = post.rank;
    let done = || -> Result<()> {
        let restored = guarded(&post.title(), || Replica::restore(post, shard, &checkpoint));
        drop(checkpoint);
        let mut replica = restored?;
        let mut report = Report::Done;
        while answers.send((rank, Ok(report))).is_ok()
            && let Ok(order) = orders.recv()
        {
            report = replica.obey(order)?;
        }
        Ok(())
    };
    if let Err(error) = done() {
        fail(rank, error, &orders, &answers);
    }
}

/// Reports a failure, and ends the process if no one else does.
fn fail(rank: usize, error: anyhow::Error, orders: &Receiver<Order>, answers: &Sender<Answer>) {
    let text = format!("{error:#}");
    if answers.send((rank, Err(error))).is_err() {
        return;
    }
    loop {
        match orders.recv_timeout(GRACE) {
            // An order of a step that will not be completed.
            Ok(_) => {}
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                eprintln!("error: {text}");
                exit::at_once(1);
            }
        }
    }
}
