//! The numbers of a step that lie on the device.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor, TensorData};

use super::{CONTROL, FusedAdamWConfig, sums_of};
use crate::error::OpError;
use crate::graph::Fixed;
use crate::graph::recording;
use crate::ops::LIMIT;

/// What steps of [`FusedAdamW`](super::FusedAdamW) read from the device, so that they can be recorded: learning rate, bias corrections and the limit of the norm.
/// From [`FusedAdamW::control`](super::FusedAdamW::control).
///
/// It stays on its thread, like [`Fixed`].
#[derive(Debug)]
pub struct AdamWControl {
    /// By dtype of sums.
    numbers: Vec<(DType, Fixed<1>)>,
    config: FusedAdamWConfig,
    /// Steps with the one that is prepared.
    pub(super) taken: Arc<AtomicUsize>,
    prepared: Cell<bool>,
}

impl AdamWControl {
    pub(super) fn new<M: Module>(
        model: &M,
        config: &FusedAdamWConfig,
        taken: usize,
    ) -> Result<Self, OpError> {
        let mut dtypes = Dtypes::default();
        model.visit(&mut dtypes);
        let device = dtypes.device.unwrap_or_default().without_autodiff();
        let numbers = (dtypes.sums.into_iter())
            .map(|dtype| Ok((dtype, Fixed::new(numbers([0.0; CONTROL], dtype), &device)?)))
            .collect::<Result<_, OpError>>()?;
        Ok(Self {
            numbers,
            config: *config,
            taken: Arc::new(AtomicUsize::new(taken)),
            prepared: Cell::new(false),
        })
    }

    /// Prepares the next step: to be called once before each, outside of what is recorded.
    ///
    /// # Errors
    /// [`OpError`] if the learning rate is not a finite number, at least 0, or if this thread records.
    pub fn prepare(&self, learning_rate: f64) -> Result<(), OpError> {
        super::check_rate(learning_rate)?;
        recording::refuse_upload("the numbers of a step of the optimizer")?;
        let time = self.taken.load(Ordering::Relaxed) + 1;
        let control = control(&self.config, learning_rate, time);
        for (dtype, fixed) in &self.numbers {
            fixed.write(numbers(control, *dtype))?;
        }
        self.taken.store(time, Ordering::Relaxed);
        self.prepared.set(true);
        Ok(())
    }

    /// Steps that were prepared, with those before this control.
    pub fn steps(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }

    /// The prepared step's number.
    pub(super) fn use_step(&self) -> Result<usize, OpError> {
        match self.prepared.replace(false) {
            true => Ok(self.steps()),
            false => Err(OpError::argument(
                "control",
                "prepared before each step",
                "one without prepare",
            )),
        }
    }

    pub(super) fn of(&self, dtype: DType) -> Result<Tensor<1>, OpError> {
        let of_dtype = self.numbers.iter().find(|(other, _)| *other == dtype);
        let of_dtype = of_dtype.map(|(_, fixed)| fixed.tensor());
        of_dtype.ok_or_else(|| {
            let expected = "that of a model with parameters of the same dtypes";
            OpError::argument("control", expected, format!("none for {dtype:?}"))
        })
    }
}

/// η, the bias corrections of step `time`, and the limit.
pub(super) fn control(
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

/// The dtypes of sums of a module's parameters.
#[derive(Default)]
struct Dtypes {
    sums: Vec<DType>,
    device: Option<burn::tensor::Device>,
}

impl ModuleVisitor for Dtypes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let parameter = param.base();
        let dtype = sums_of(parameter.dtype());
        if !self.sums.contains(&dtype) {
            self.sums.push(dtype);
        }
        self.device.get_or_insert(parameter.device());
    }
}
