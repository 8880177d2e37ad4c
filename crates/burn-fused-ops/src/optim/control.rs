//! Optimizer step state on the device.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{DType, Device, Tensor, TensorData};

use crate::optim::values::LIMIT;
use crate::optim::{CONTROL, FusedAdamWConfig};
use burn_blocksparse::OpError;
use burn_blocksparse::graph::{StaticInput, recording};

/// State of a [`FusedAdamW`](crate::optim::FusedAdamW) step on the device, so that a CUDA graph can capture it: learning rate, bias corrections and the limit
/// of the norm. Created by [`FusedAdamW::control`](crate::optim::FusedAdamW::control).
///
/// It is bound to its thread, like [`StaticInput`].
#[derive(Debug)]
pub struct AdamWStepState {
    /// A control tensor for each group of parameters: the steps they had taken when the control was created, and the dtype of their sums.
    numbers: Vec<((usize, DType), StaticInput<1>)>,
    config: FusedAdamWConfig,
    /// Steps prepared by this control.
    pub(crate) taken: Arc<AtomicUsize>,
    prepared: Cell<bool>,
}

impl AdamWStepState {
    /// Creates control tensors for groups of parameters: steps taken so far, and dtype of sums.
    pub(crate) fn new(
        device: &Device,
        config: &FusedAdamWConfig,
        groups: &[(usize, DType)],
    ) -> Result<Self, OpError> {
        let numbers = (groups.iter())
            .map(|&group| {
                Ok((
                    group,
                    StaticInput::new(numbers([0.0; CONTROL], group.1), device)?,
                ))
            })
            .collect::<Result<_, OpError>>()?;
        Ok(Self {
            numbers,
            config: *config,
            taken: Arc::default(),
            prepared: Cell::new(false),
        })
    }

    /// Prepares the next step. Call it once before each step, outside of the recorded region.
    ///
    /// # Errors
    /// [`OpError`] if the learning rate is negative or not finite, or if this thread is recording.
    pub fn prepare(&self, learning_rate: f64) -> Result<(), OpError> {
        crate::optim::check_rate(learning_rate)?;
        recording::ensure_not_capturing("the numbers of a step of the optimizer")?;
        let time = self.taken.load(Ordering::Relaxed) + 1;
        for ((before, dtype), fixed) in &self.numbers {
            let control = control(&self.config, learning_rate, before + time);
            fixed.write(numbers(control, *dtype))?;
        }
        self.taken.store(time, Ordering::Relaxed);
        self.prepared.set(true);
        Ok(())
    }

    /// Returns the number of prepared steps.
    pub fn steps(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }

    /// Marks the prepared step as used and returns its number.
    pub(crate) fn use_step(&self) -> Result<usize, OpError> {
        match self.prepared.replace(false) {
            true => Ok(self.steps()),
            false => Err(OpError::argument(
                "control",
                "prepared before each step",
                "one without prepare",
            )),
        }
    }

    /// Returns the control tensor of parameters that had taken `before` steps when the control was created.
    pub(crate) fn of(&self, before: usize, dtype: DType) -> Option<Tensor<1>> {
        let of_group = self
            .numbers
            .iter()
            .find(|(group, _)| *group == (before, dtype));
        of_group.map(|(_, fixed)| fixed.tensor())
    }

    /// Returns any control tensor of a dtype; the limit of the norm is the same in all.
    pub(crate) fn of_dtype(&self, dtype: DType) -> Option<Tensor<1>> {
        let of_dtype = self.numbers.iter().find(|((_, other), _)| *other == dtype);
        of_dtype.map(|(_, fixed)| fixed.tensor())
    }
}

/// Returns η, the bias corrections of step `time`, and the limit.
pub(crate) fn control(
    config: &FusedAdamWConfig,
    learning_rate: f64,
    time: usize,
) -> [f64; CONTROL] {
    let mut control = [0.0; CONTROL];
    control[0] = learning_rate;
    control[1] = 1.0 - config.beta_1.powf(time as f64);
    control[2] = 1.0 - config.beta_2.powf(time as f64);
    control[LIMIT] = config.max_grad_norm.unwrap_or(1.0);
    control
}

fn numbers(control: [f64; CONTROL], dtype: DType) -> TensorData {
    TensorData::new(control.to_vec(), [CONTROL]).convert_dtype(dtype)
}
