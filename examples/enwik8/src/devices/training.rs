//! Steps on one device or on several.

use anyhow::Result;

use super::group::Group;
use super::replicas::Replicas;
use crate::checkpoint::Checkpoint;
use crate::step::{Batch, Change, Measured, Steps};

/// Model and optimizer, and how they take steps.
pub enum Training {
    /// On one device.
    One(Box<Steps>),
    /// On several devices, or on one with the sum over several.
    Several(Box<Replicas>),
}

impl From<Steps> for Training {
    fn from(steps: Steps) -> Self {
        Self::One(Box::new(steps))
    }
}

impl Training {
    /// Spreads training over the devices of a group; `checkpoint` is its present state.
    pub fn spread(self, group: &Group, checkpoint: Checkpoint) -> Result<Self> {
        match (self, group.posts()) {
            (Self::One(steps), Some(posts)) => {
                let replicas = Replicas::start(group, posts, *steps, checkpoint)?;
                Ok(Self::Several(Box::new(replicas)))
            }
            (training, _) => Ok(training),
        }
    }

    /// Returns the model and the optimizer, on several devices the first one's.
    pub fn steps(&self) -> &Steps {
        match self {
            Self::One(steps) => steps,
            Self::Several(replicas) => replicas.steps(),
        }
    }

    pub fn take(&mut self, batch: Batch) -> Result<Measured> {
        let steps = match self {
            Self::One(steps) => steps,
            Self::Several(replicas) => return replicas.take(batch),
        };
        Measured::read(steps.take(batch)?)
    }

    pub fn change(&mut self, change: Change) -> Result<()> {
        match self {
            Self::One(steps) => steps.change(change),
            Self::Several(replicas) => replicas.change(change),
        }
    }

    pub fn describe(&self) -> Option<String> {
        match self {
            Self::One(steps) => steps.describe(),
            Self::Several(replicas) => replicas.describe(),
        }
    }
}
