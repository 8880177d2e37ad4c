//! AdamW over all parameters of a module in a few launches, and clipping by the norm of all gradients.
#[cfg(feature = "cube")]
mod backend;
#[doc(hidden)]
pub mod ops;

mod collect;
mod config;
mod control;
mod record;
pub(crate) mod reference;
pub(crate) mod values;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::backend::DispatchTensor;
use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Bytes;

use crate::optim::ops::OptimOps;
use crate::optim::values::{AdamWHyper, AdamWInputs, CONTROL, GradNorm, MOST_TENSORS, TensorList};
use burn_blocksparse::graph::recording;
use burn_blocksparse::internal::prelude::*;
use collect::{GiveBack, Held, Replace, Survey, Take};
pub use config::FusedAdamWConfig;
pub use control::AdamWStepState;
use record::ParameterState;

/// AdamW (Loshchilov & Hutter, 2019, algorithm 2) with the gradient clipped by its norm over all parameters, in a few launches for a whole module.
///
/// `g ← min(1, limit / ‖g‖) g`, `m ← β₁ m + (1 − β₁) g`, `v ← β₂ v + (1 − β₂) g²`,
/// `p ← p (1 − η λ) − η (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)`
///
/// On CubeCL devices one launch updates 32 parameters (one, on devices that bind few buffers). Parameters and moments are updated in place where no one else
/// holds them: pass the model itself, not a clone. A clone elsewhere keeps its values, at the cost of a copy.
///
/// Each parameter counts its own steps, as in Burn's `AdamW`, and its moments are f32 (f64 for f64). [`to_bytes`](Self::to_bytes) writes the record of Burn's
/// `AdamW`, and [`from_bytes`](Self::from_bytes) reads it. Deterministic.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::GradientsParams;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fused_ops::optim::FusedAdamWConfig;
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(8, 4).init(&device);
/// let mut optimizer = FusedAdamWConfig::new().with_max_grad_norm(Some(1.0)).init();
/// let x = Tensor::<2>::random([16, 8], Distribution::Default, &device);
/// let gradients = model.forward(x).square().mean().backward();
/// let gradients = GradientsParams::from_grads(gradients, &model);
/// let (model, norm) = optimizer.step(1e-3, model, gradients)?;
/// assert!(norm.into_scalar::<f32>() > 0.0);
/// # drop(model);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
#[derive(Debug)]
pub struct FusedAdamW {
    config: FusedAdamWConfig,
    /// States by parameter id.
    states: BTreeMap<u64, ParameterState>,
    /// Step counter of a control. Replays advance it without this optimizer.
    counted: Option<Arc<AtomicUsize>>,
}

impl Clone for FusedAdamW {
    /// Clones the state with the steps taken so far. Further steps of a control count in the original only.
    fn clone(&self) -> Self {
        Self {
            config: self.config,
            states: self.settled(),
            counted: None,
        }
    }
}

impl FusedAdamW {
    pub(crate) fn new(config: FusedAdamWConfig) -> Self {
        Self {
            config,
            states: BTreeMap::new(),
            counted: None,
        }
    }

    /// Returns the configuration.
    pub fn config(&self) -> &FusedAdamWConfig {
        &self.config
    }

    /// Takes a step. Parameters without a gradient are unchanged.
    ///
    /// Returns the model and the norm of all gradients before clipping: `[1]`, f32 (f64 if a gradient is), on the device, so this does not wait for it. The
    /// norm is NaN if a gradient is, and infinite if a gradient is or if it exceeds the largest number of its dtype; squares that overflow do not make it
    /// infinite. A step is not clipped by a NaN norm. GPUs flush a factor below 1.2·10⁻³⁸, of a norm that far above the limit, to 0.
    ///
    /// # Errors
    /// [`OpError`] if the configuration or the learning rate is out of range, if a gradient or a recorded moment does not match its parameter, or if the
    /// parameters with gradients are on several devices or on one that this crate does not serve. The optimizer is unchanged then.
    pub fn step<M: Module>(
        &mut self,
        learning_rate: f64,
        model: M,
        gradients: GradientsParams,
    ) -> Result<(M, Tensor<1>), OpError> {
        self.config.validate()?;
        check_rate(learning_rate)?;
        if recording::is_recording() {
            return Err(OpError::Frozen {
                what: "the learning rate",
                instead: "call step_prepared with FusedAdamW's control",
            });
        }
        self.settle();
        let device = Survey::of(&model, Some(&gradients), &self.states)?.device();
        let config = self.config;
        let numbers = |time: Option<usize>, dtype: DType| {
            let control = control::control(&config, learning_rate, time.unwrap_or(1));
            numbers_on(&device, control.to_vec(), dtype)
        };
        Ok(self.stepped(model, gradients, &device, numbers))
    }

    /// Returns the state that captured steps of `model` read from the device.
    ///
    /// # Errors
    /// [`OpError`] if the configuration is out of range, if this thread is recording, or for the parameters' errors of [`step`](Self::step).
    pub fn control<M: Module>(&mut self, model: &M) -> Result<AdamWStepState, OpError> {
        self.config.validate()?;
        self.settle();
        let survey = Survey::of(model, None, &self.states)?;
        let control = AdamWStepState::new(&survey.device(), &self.config, &survey.steps)?;
        self.counted = Some(control.taken.clone());
        Ok(control)
    }

    /// Like [`step`](Self::step), but reads the state that the last [`prepare`](AdamWStepState::prepare) of this optimizer's control left on the device: for
    /// steps in a [`CapturedGraph`](burn_blocksparse::graph::CapturedGraph). A capture updates parameters and moments in place or fails with
    /// [`OpError::NotInPlace`], so nothing else may hold the model's parameters then, such as a clone or an autodiff graph.
    ///
    /// Steps that a CUDA graph replays count: [`to_bytes`](Self::to_bytes), called between runs, writes them.
    ///
    /// # Errors
    /// Those of [`step`](Self::step); also if the control belongs to another optimizer or is not prepared, or if a parameter with a gradient had none in one
    /// of the control's steps.
    pub fn step_prepared<M: Module>(
        &mut self,
        control: &AdamWStepState,
        model: M,
        gradients: GradientsParams,
    ) -> Result<(M, Tensor<1>), OpError> {
        let own = |counted: &Arc<AtomicUsize>| Arc::ptr_eq(counted, &control.taken);
        blocksparse::ensure! { OpError; self.counted.as_ref().is_some_and(own) => "control", "this optimizer's last", "another"; }
        let taken = control.use_step()?;
        set_steps(&mut self.states, taken - 1);
        let survey = Survey::of(&model, Some(&gradients), &self.states)?;
        let device = survey.device();
        let limit = self.config.max_grad_norm.unwrap_or(1.0);
        for &(steps, dtype) in &survey.steps {
            let before = steps.checked_sub(taken - 1);
            blocksparse::ensure! {
                OpError;
                before.is_some_and(|before| control.of(before, dtype).is_some())
                    => "the parameters with gradients",
                    "those of the control's model, all of which have a gradient in each of its steps, or none",
                    format!("one of {dtype:?} with {steps} steps behind it in the control's step {taken}" );
            }
        }
        let numbers = |time: Option<usize>, dtype: DType| {
            let of_group = time.and_then(|time| control.of(time - taken, dtype));
            // The norm reads any control of its dtype. If gradients have another dtype than the sums of all parameters, or there are none, no such control
            // exists.
            of_group
                .or_else(|| control.of_dtype(dtype))
                .unwrap_or_else(|| limit_on(&device, limit, dtype))
        };
        let with_gradients = survey.seen;
        let stepped = self.stepped(model, gradients, &device, numbers);
        for (id, state) in &mut self.states {
            let has_gradient = with_gradients.contains(&ParamId::from(*id));
            state.counted = has_gradient.then(|| state.time - taken);
        }
        Ok(stepped)
    }

    /// Takes the step. `numbers` returns the control tensor for a parameter's step count (`None` for the norm) and a dtype of sums.
    fn stepped<M: Module>(
        &mut self,
        model: M,
        gradients: GradientsParams,
        device: &Device,
        numbers: impl Fn(Option<usize>, DType) -> Tensor<1>,
    ) -> (M, Tensor<1>) {
        let mut take = Take::new(gradients, &mut self.states);
        let model = model.map(&mut take);
        let held = take.held;
        let gradients: Vec<_> = (held.iter().flatten())
            .filter_map(|held| held.gradient.clone())
            .collect();
        let clip = norm_of(&gradients, |dtype| numbers(None, dtype), device);
        drop(gradients);
        let norm = Tensor::from_dispatch(clip.norm);
        let limit = self.config.max_grad_norm;
        let factor = limit.map(|_| Tensor::<1>::from_dispatch(clip.factor));
        let updated = self.update(held, factor, numbers);
        let model = model.map(&mut GiveBack {
            updated: updated.into(),
        });
        (model, norm)
    }

    /// Returns the states, with the steps that CUDA graphs replayed.
    fn settled(&self) -> BTreeMap<u64, ParameterState> {
        let mut states = self.states.clone();
        if let Some(counted) = &self.counted {
            set_steps(&mut states, counted.load(Ordering::Relaxed));
        }
        states
    }

    /// Adds the control's steps to the states and stops counting.
    fn settle(&mut self) {
        if let Some(counted) = self.counted.take() {
            set_steps(&mut self.states, counted.load(Ordering::Relaxed));
            for state in self.states.values_mut() {
                state.counted = None;
            }
        }
    }

    /// Updates the held parameters, in groups of one step count and one dtype of sums.
    fn update(
        &mut self,
        held: Vec<Option<Held>>,
        factor: Option<Tensor<1>>,
        numbers_of: impl Fn(Option<usize>, DType) -> Tensor<1>,
    ) -> Vec<Option<Held>> {
        let FusedAdamWConfig { beta_1, beta_2, .. } = self.config;
        let (epsilon, decay) = (self.config.epsilon, self.config.weight_decay);
        let numbers = AdamWHyper::new([beta_1, beta_2], epsilon, decay);
        let keys = held.iter().map(|held| {
            let held = held.as_ref()?;
            Some((held.time, held.moments_dtype))
        });
        let groups = grouped(keys);
        let mut held = held;
        for ((time, dtype), group) in groups {
            let control = numbers_of(Some(time), dtype);
            let factor = (factor.as_ref())
                .map(|factor| factor.clone().cast(FloatDType::from(dtype)).into_dispatch());
            for part in group.chunks(MOST_TENSORS) {
                let mut lists = [(); 4].map(|()| Vec::with_capacity(part.len()));
                for &index in part {
                    let tensors = held[index].as_mut().expect("of a group").take();
                    lists.iter_mut().zip(tensors).for_each(|(to, x)| to.push(x));
                }
                let inputs = AdamWInputs::<Dispatch>::of_lists(lists, factor.clone().into());
                let control = control.clone().into_dispatch();
                let made = <Dispatch as OptimOps>::adamw(inputs, control, numbers);
                let [parameters, first, second] =
                    [made.parameters, made.first, made.second].map(TensorList::into_vec);
                let moments = first.into_iter().zip(second);
                for ((&index, parameter), (first, second)) in
                    part.iter().zip(parameters).zip(moments)
                {
                    let held = held[index].as_mut().expect("of a group");
                    held.parameter = Some(parameter);
                    let state = held.state([first, second]);
                    self.states.insert(held.id.val(), state);
                }
            }
        }
        held
    }

    /// Returns the plan of a step of `model`.
    ///
    /// # Errors
    /// Those of [`step`](Self::step), except those of gradients.
    pub fn explain<M: Module>(&self, model: &M) -> Result<OpPlan, OpError> {
        self.config.validate()?;
        let survey = Survey::of(model, None, &self.states)?;
        let largest = survey.largest;
        Ok(burn_blocksparse::op_plan!(&survey.device(), |device| {
            crate::kernels::optim::describe(&device.client(), largest)
        }))
    }

    /// Keeps the rows (entries of the first dimension) `rows` of a parameter's moments, in the given order, for a parameter whose rows are pruned, such as
    /// the blocks of a block-sparse weight. Does nothing if the parameter has taken no step.
    ///
    /// # Errors
    /// [`OpError::Argument`] if an index is not below the number of rows.
    pub fn keep_rows(&mut self, parameter: ParamId, rows: &[usize]) -> Result<(), OpError> {
        match self.states.get_mut(&parameter.val()) {
            Some(state) => state.keep_rows(rows),
            None => Ok(()),
        }
    }

    /// Returns the state as the record of Burn's `AdamW`, which `ModuleOptimizer::from_bytes` also reads.
    ///
    /// # Errors
    /// [`OpError::Read`] if the moments cannot be read from the device or cannot be written.
    pub fn to_bytes(&self) -> Result<Bytes, OpError> {
        record::write(&self.settled())
    }

    /// Returns this optimizer with the state of a record, its own or one of Burn's `AdamW`. The next step moves the moments to the parameters' device.
    ///
    /// # Errors
    /// [`OpError::Argument`] if the bytes are not such a record: unreadable, a missing field, moments of different shapes, or a record of AMSGrad.
    pub fn from_bytes(mut self, bytes: Bytes) -> Result<Self, OpError> {
        self.states = record::read(bytes)?;
        self.counted = None;
        Ok(self)
    }
}

/// Returns the norm of the gradients over all of `model`'s parameters: `[1]`, f32 (f64 if a gradient is), on the device. It is infinite only if a gradient
/// is, or if it exceeds the largest number of its dtype.
///
/// # Errors
/// [`OpError`] if a gradient does not match its parameter, or the gradients are on several devices or on one that this crate does not serve.
pub fn gradient_norm<M: Module>(
    model: &M,
    gradients: &GradientsParams,
) -> Result<Tensor<1>, OpError> {
    let no_states = BTreeMap::new();
    let survey = Survey::of(model, Some(gradients), &no_states)?;
    let device = survey.device();
    let numbers = |dtype| limit_on(&device, 1.0, dtype);
    let clip = norm_of(&survey.found, numbers, &device);
    Ok(Tensor::from_dispatch(clip.norm))
}

/// Scales the gradients of `model`'s parameters by `min(1, max_norm / norm)`, with `norm` over all of them, for an optimizer that does not clip. Burn's
/// `GradientClippingConfig::Norm` bounds the norm of each parameter's gradient separately, which changes the direction of the whole gradient.
///
/// Returns the gradients and their norm before scaling: `[1]`, on the device.
///
/// # Errors
/// [`OpError`] if `max_norm` is not finite and above 0; also those of [`gradient_norm`].
pub fn clip_gradients<M: Module>(
    model: &M,
    gradients: GradientsParams,
    max_norm: f64,
) -> Result<(GradientsParams, Tensor<1>), OpError> {
    config::check_norm("max_norm", max_norm)?;
    let device = Survey::of(model, Some(&gradients), &BTreeMap::new())?.device();
    let mut replace = Replace::take(gradients);
    model.visit(&mut replace);
    let numbers = |dtype| limit_on(&device, max_norm, dtype);
    let clip = norm_of(&replace.tensors, numbers, &device);
    let factor = Tensor::<1>::from_dispatch(clip.factor);
    let mut scaled: Vec<Option<DispatchTensor>> = vec![None; replace.tensors.len()];
    let mut tensors: Vec<Option<DispatchTensor>> = replace.tensors.drain(..).map(Some).collect();
    let dtypes = tensors
        .iter()
        .map(|tensor| Some(sums_of(tensor.as_ref()?.dtype())));
    for (dtype, of_dtype) in grouped(dtypes) {
        for part in of_dtype.chunks(MOST_TENSORS) {
            let list = part.iter().filter_map(|&index| tensors[index].take());
            let list = TensorList::new(list.collect::<Vec<_>>());
            let factor = factor.clone().cast(FloatDType::from(dtype)).into_dispatch();
            let made = <Dispatch as OptimOps>::scale(list, factor).into_vec();
            for (&index, tensor) in part.iter().zip(made) {
                scaled[index] = Some(tensor);
            }
        }
    }
    replace.back = Some(scaled.into_iter().flatten().collect());
    model.visit(&mut replace);
    Ok((replace.gradients, Tensor::from_dispatch(clip.norm)))
}

/// Concatenates `tensors` to `[elements]`. On CubeCL devices one launch copies 32 tensors, where `Tensor::cat` takes one for each. Not differentiable.
///
/// # Errors
/// [`OpError`] if there are no tensors, if they have several dtypes or devices, or if this crate does not serve their device.
pub fn concat(tensors: Vec<Tensor<1>>) -> Result<Tensor<1>, OpError> {
    let Some(first) = tensors.first() else {
        return Err(OpError::argument("tensors", "one at least", "none"));
    };
    let (dtype, device) = (first.dtype(), first.device().without_autodiff());
    for tensor in &tensors {
        let own = tensor.device().without_autodiff();
        same_device("a tensor's device", &device, "the first one's", &own)?;
        OpError::expect_same("a tensor's dtype", dtype, "the first one's", tensor.dtype())?;
    }
    let elements: usize = tensors.iter().map(|tensor| tensor.dims()[0]).sum();
    let mut output = Tensor::<1>::empty([elements], (&device, dtype)).into_dispatch();
    let mut first = 0;
    for part in tensors.chunks(MOST_TENSORS) {
        let length: usize = part.iter().map(|tensor| tensor.dims()[0]).sum();
        let list = part
            .iter()
            .map(|tensor| tensor.clone().inner().into_dispatch());
        output = <Dispatch as OptimOps>::concat(TensorList::new(list), output, first);
        first += length;
    }
    Ok(Tensor::from_dispatch(output))
}

/// Groups the indices of equal keys, in the order in which keys first appear.
fn grouped<K: PartialEq>(keys: impl Iterator<Item = Option<K>>) -> Vec<(K, Vec<usize>)> {
    let mut groups: Vec<(K, Vec<usize>)> = Vec::new();
    for (index, key) in keys.enumerate() {
        let Some(key) = key else { continue };
        match groups.iter_mut().find(|(other, _)| *other == key) {
            Some((_, group)) => group.push(index),
            None => groups.push((key, vec![index])),
        }
    }
    groups
}

/// Returns the norm over all tensors, and the factor that clips it to `limit`.
fn norm_of(
    tensors: &[DispatchTensor],
    numbers: impl FnOnce(DType) -> Tensor<1>,
    device: &Device,
) -> GradNorm<Dispatch> {
    let dtypes = tensors.iter().map(TensorMetadata::dtype);
    let dtype = match dtypes.into_iter().any(|dtype| dtype == DType::F64) {
        true => DType::F64,
        false => DType::F32,
    };
    let sums_in = |part: &[DispatchTensor]| -> usize {
        part.iter()
            .map(|x| partial_sums(x.shape().num_elements()))
            .sum()
    };
    let mut partials = match sums_in(tensors) {
        0 => Tensor::<1>::zeros([1], (device, dtype)),
        length => Tensor::<1>::empty([length], (device, dtype)),
    }
    .into_dispatch();
    let mut first = 0;
    for part in tensors.chunks(MOST_TENSORS) {
        let list = TensorList::new(part.iter().cloned());
        if sums_in(part) > 0 {
            partials = <Dispatch as OptimOps>::sum_of_squares(list, partials, first);
        }
        first += sums_in(part);
    }
    <Dispatch as OptimOps>::clip_factor(partials, numbers(dtype).into_dispatch())
}

/// Returns a control tensor of which only the limit is read. The device fills it, so that it works while recording.
fn limit_on(device: &Device, limit: f64, dtype: DType) -> Tensor<1> {
    Tensor::full([CONTROL], limit, (device, dtype))
}

/// Updates the steps of the parameters that a control counts.
fn set_steps(states: &mut BTreeMap<u64, ParameterState>, taken: usize) {
    for state in states.values_mut() {
        if let Some(before) = state.counted {
            state.time = before + taken;
        }
    }
}

fn check_rate(learning_rate: f64) -> Result<(), OpError> {
    blocksparse::ensure! {
        OpError;
        learning_rate.is_finite() && learning_rate >= 0.0 => "learning_rate", "a finite number, at least 0", learning_rate;
    }
    Ok(())
}

/// Elements per partial sum, on every device.
pub(crate) const PART: usize = 8192;

/// Returns the number of partial sums of a tensor.
pub(crate) fn partial_sums(elements: usize) -> usize {
    elements.div_ceil(PART)
}

fn numbers_on(device: &Device, numbers: Vec<f64>, dtype: DType) -> Tensor<1> {
    recording::expect_no_upload("the numbers of a step of the optimizer");
    let length = numbers.len();
    Tensor::from_data(TensorData::new(numbers, [length]), (device, dtype))
}
