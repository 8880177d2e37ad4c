//! Messages between devices of different processes.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::TensorData;

use crate::error::OpError;
use crate::processes::{Message, Processes};
use crate::sharded::links::{Carrier, Stage};

/// The message lane of one device.
pub struct Lane {
    processes: Arc<Processes>,
    /// Rank of the group's first process.
    first: usize,
    lane: u32,
}

impl Lane {
    pub fn new(processes: &Arc<Processes>, ranks: &Range<usize>) -> Self {
        Self {
            first: ranks.start,
            lane: processes.own_lane(),
            processes: processes.clone(),
        }
    }
}

impl Carrier<[TensorData; 2]> for Lane {
    fn send(&self, to: usize, stage: Stage, blocks: [TensorData; 2]) -> Result<(), OpError> {
        let message = Message {
            words: vec![stage.call, stage.gradients.into()],
            tensors: blocks.into(),
        };
        self.processes.put(self.first + to, self.lane, &message)
    }

    fn receive(&self, from: usize, stage: Stage) -> Result<[TensorData; 2], OpError> {
        let Message { words, tensors } = self.processes.take(self.first + from, self.lane)?;
        let (&[call, gradients], Ok(blocks)) = (&words[..], tensors.try_into()) else {
            return Err(OpError::Read("another process's message".into()));
        };
        stage.expect(Stage {
            call,
            gradients: gradients != 0,
        })?;
        Ok(blocks)
    }

    fn leave(&self) {
        self.processes.end(self.lane);
    }
}
