//! Messages between the devices of a group within a process: a queue for each pair, so that the messages of one device arrive in order.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::OpError;

/// Call and direction of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Index of the call, from 0.
    pub call: u64,
    /// True if it belongs to the backward pass.
    pub gradients: bool,
}

/// Transport of messages between the devices of a group.
pub trait Carrier<T>: Send + Sync {
    /// Sends to another device, without waiting.
    fn send(&self, to: usize, stage: Stage, content: T) -> Result<(), OpError>;
    /// Waits for the next message of another device, which must belong to this stage.
    fn receive(&self, from: usize, stage: Stage) -> Result<T, OpError>;
    /// Leaves the group, which ends the waiting of others for this device.
    fn leave(&self);
}

impl Stage {
    /// Checks that another device's message belongs to this stage.
    pub fn expect(self, theirs: Self) -> Result<(), OpError> {
        let whose = "this device's: all must make the same calls in the same order";
        OpError::expect_same("another device's call", self, whose, theirs)
    }
}

struct Message<T> {
    stage: Stage,
    content: T,
}

/// One device's queue ends, indexed by the other device.
pub struct Links<T> {
    rank: usize,
    queues: Mutex<Queues<T>>,
}

struct Queues<T> {
    to: Vec<Option<Sender<Message<T>>>>,
    from: Vec<Option<Receiver<Message<T>>>>,
}

impl<T> Links<T> {
    /// Creates the ends of each of `devices` devices.
    pub fn group(devices: usize) -> Vec<Self> {
        let mut ends: Vec<Queues<T>> = (0..devices)
            .map(|_| Queues {
                to: (0..devices).map(|_| None).collect(),
                from: (0..devices).map(|_| None).collect(),
            })
            .collect();
        for from in 0..devices {
            for to in (0..devices).filter(|&to| to != from) {
                let (sender, receiver) = channel();
                ends[from].to[to] = Some(sender);
                ends[to].from[from] = Some(receiver);
            }
        }
        (ends.into_iter().enumerate())
            .map(|(rank, queues)| Self {
                rank,
                queues: Mutex::new(queues),
            })
            .collect()
    }

    fn queues(&self) -> MutexGuard<'_, Queues<T>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send> Carrier<T> for Links<T> {
    fn send(&self, to: usize, stage: Stage, content: T) -> Result<(), OpError> {
        let queues = self.queues();
        let sender = queues.to[to].as_ref().ok_or_else(|| left(self.rank))?;
        let sent = sender.send(Message { stage, content });
        sent.map_err(|_| left(to))
    }

    fn receive(&self, from: usize, stage: Stage) -> Result<T, OpError> {
        let queues = self.queues();
        let receiver = queues.from[from].as_ref().ok_or_else(|| left(self.rank))?;
        let message = receiver.recv().map_err(|_| left(from))?;
        stage.expect(message.stage)?;
        Ok(message.content)
    }

    fn leave(&self) {
        let mut queues = self.queues();
        queues.to.fill_with(|| None);
        queues.from.fill_with(|| None);
    }
}

fn left(rank: usize) -> OpError {
    OpError::Left { rank }
}
