//! AdamW over all parameters of a module at once, and the norm of all gradients together.

mod collect;
mod config;
mod record;
pub(crate) mod reference;

use std::collections::BTreeMap;

use burn::backend::{Dispatch, DispatchTensor};
use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Bytes, DType, Device, Tensor, TensorData};

use crate::error::OpError;
use crate::op_plan::{OpDevice, OpPlan};
use crate::ops::{
    AdamWInputs, AdamWNumbers, CONTROL, ClipFactor, LIMIT, MOST_TENSORS, OptimOps, TensorList,
};
use crate::values::MaybeFloat;
use collect::{GiveBack, Held, Replace, Survey, Take};
pub use config::FusedAdamWConfig;
use record::ParameterState;

/// AdamW (Loshchilov & Hutter, 2019, algorithm 2) with the gradient clipped by its norm over all parameters, in a few launches for a whole module.
///
/// `g ← min(1, limit / ‖g‖) g`, `m ← β₁ m + (1 − β₁) g`, `v ← β₂ v + (1 − β₂) g²`,
/// `p ← p (1 − η λ) − η (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)`
///
/// On CubeCL devices 32 parameters are a launch (one, on devices that bind few buffers), and parameters and moments are updated in their own
/// buffers where nobody else holds them: hand over the model itself, not a clone. A clone elsewhere keeps its values, and costs a copy.
///
/// A parameter counts its own steps, like Burn's `AdamW`, and its moments are f32 (f64 for f64). [`to_bytes`](Self::to_bytes) writes the record of Burn's
/// `AdamW`, and [`from_bytes`](Self::from_bytes) reads it. Deterministic.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::GradientsParams;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::FusedAdamWConfig;
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
#[derive(Clone, Debug)]
pub struct FusedAdamW {
    config: FusedAdamWConfig,
    /// By parameter id.
    states: BTreeMap<u64, ParameterState>,
}

impl FusedAdamW {
    pub(crate) fn new(config: FusedAdamWConfig) -> Self {
        Self {
            config,
            states: BTreeMap::new(),
        }
    }

    /// The configuration.
    pub fn config(&self) -> &FusedAdamWConfig {
        &self.config
    }

    /// Takes a step. Parameters without a gradient stay as they are.
    ///
    /// Returns the model, and the norm of all gradients before clipping: `[1]`, f32 (f64 if a gradient is), still on the device, so that nothing waits for it
    /// here. Gradients that are not finite show in it.
    ///
    /// # Errors
    /// [`OpError`] if the configuration or the learning rate is out of range, if a gradient or a moment of a record does not fit its parameter, or if the
    /// parameters with gradients are on several devices or on one that this crate does not serve. The optimizer is then as it was.
    pub fn step<M: Module>(
        &mut self,
        learning_rate: f64,
        model: M,
        gradients: GradientsParams,
    ) -> Result<(M, Tensor<1>), OpError> {
        self.config.validate()?;
        if !(learning_rate.is_finite() && learning_rate >= 0.0) {
            let range = "a finite number, at least 0";
            return Err(OpError::argument("learning_rate", range, learning_rate));
        }
        let device = Survey::of(&model, Some(&gradients), &self.states)?.device();
        let mut take = Take::new(gradients, &mut self.states);
        let model = model.map(&mut take);
        let held = take.into_held();
        let gradients: Vec<_> = (held.iter().flatten())
            .filter_map(|held| held.gradient.clone())
            .collect();
        let limit = self.config.max_grad_norm;
        let clip = norm_of(&gradients, limit.unwrap_or(1.0), &device);
        drop(gradients);
        let norm = Tensor::from_dispatch(clip.norm);
        let factor = limit.map(|_| Tensor::<1>::from_dispatch(clip.factor));
        let updated = self.update(learning_rate, held, factor, &device);
        let model = model.map(&mut GiveBack::new(updated));
        Ok((model, norm))
    }

    /// The step of the parameters that are held, by groups of one step count and one dtype of sums.
    fn update(
        &mut self,
        learning_rate: f64,
        held: Vec<Option<Held>>,
        factor: Option<Tensor<1>>,
        device: &Device,
    ) -> Vec<Option<Held>> {
        let FusedAdamWConfig {
            beta_1,
            beta_2,
            epsilon,
            weight_decay,
            ..
        } = self.config;
        let numbers = AdamWNumbers::new([beta_1, beta_2], epsilon, weight_decay);
        let mut groups: Vec<((usize, DType), Vec<usize>)> = Vec::new();
        for (index, held) in held.iter().enumerate() {
            let Some(held) = held else { continue };
            let key = (held.time, held.moments_dtype);
            match groups.iter_mut().find(|(other, _)| *other == key) {
                Some((_, group)) => group.push(index),
                None => groups.push((key, vec![index])),
            }
        }
        let mut held = held;
        for ((time, dtype), group) in groups {
            let mut control = [0.0; CONTROL];
            control[0] = learning_rate;
            control[1] = 1.0 - beta_1.powf(time as f64);
            control[2] = 1.0 - beta_2.powf(time as f64);
            let control = numbers_on(device, control.to_vec(), dtype);
            let factor =
                (factor.as_ref()).map(|factor| factor.clone().cast(float(dtype)).into_dispatch());
            for part in group.chunks(MOST_TENSORS) {
                let mut lists = [(); 4].map(|()| Vec::with_capacity(part.len()));
                for &index in part {
                    let tensors = held[index].as_mut().expect("of a group").take();
                    lists.iter_mut().zip(tensors).for_each(|(to, x)| to.push(x));
                }
                let [parameters, gradients, first, second] = lists.map(TensorList::new);
                let inputs = AdamWInputs {
                    parameters,
                    gradients,
                    first,
                    second,
                    factor: MaybeFloat::from(factor.clone()),
                };
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

    /// What a step of `model` will run.
    ///
    /// # Errors
    /// As [`step`](Self::step), but for what gradients bring.
    pub fn plan<M: Module>(&self, model: &M) -> Result<OpPlan, OpError> {
        self.config.validate()?;
        let survey = Survey::of(model, None, &self.states)?;
        let largest = survey.largest();
        Ok(OpPlan::new(&survey.device(), |device| {
            describe(device, largest)
        }))
    }

    /// Keeps of a parameter's moments the rows (entries of the first dimension) with these indices, in their order, as a parameter does whose rows
    /// are pruned: the blocks of a block-sparse weight. Does nothing if the parameter has taken no step.
    ///
    /// # Errors
    /// [`OpError::Argument`] if an index is not below the number of rows.
    pub fn keep_rows(&mut self, parameter: ParamId, rows: &[usize]) -> Result<(), OpError> {
        match self.states.get_mut(&parameter.val()) {
            Some(state) => state.keep_rows(rows),
            None => Ok(()),
        }
    }

    /// The state as the record of Burn's `AdamW`, which `ModuleOptimizer::from_bytes` reads as well.
    ///
    /// # Errors
    /// [`OpError::Read`] if the moments cannot be read from the device or not be written.
    pub fn to_bytes(&self) -> Result<Bytes, OpError> {
        record::write(&self.states)
    }

    /// This optimizer with the state of a record, its own or one of Burn's `AdamW`. The moments move to the parameters' device with the next step.
    ///
    /// # Errors
    /// [`OpError::Argument`] if the bytes are no such record: not readable, a field missing, moments of different shapes, or one of AMSGrad.
    pub fn from_bytes(mut self, bytes: Bytes) -> Result<Self, OpError> {
        self.states = record::read(bytes)?;
        Ok(self)
    }
}

#[cfg(feature = "cube")]
fn describe(device: &OpDevice, largest: usize) -> Result<String, OpError> {
    let text = blocksparse::kernels::optim::describe(&device.client(), largest)?;
    Ok(text)
}

#[cfg(not(feature = "cube"))]
fn describe(device: &OpDevice, _largest: usize) -> Result<String, OpError> {
    match *device {}
}

/// The norm of the gradients of `model`'s parameters together: `[1]`, f32 (f64 if a gradient is), on the device.
///
/// # Errors
/// [`OpError`] if a gradient does not fit its parameter, or the gradients are on several devices or on one that this crate does not serve.
pub fn gradient_norm<M: Module>(
    model: &M,
    gradients: &GradientsParams,
) -> Result<Tensor<1>, OpError> {
    let no_states = BTreeMap::new();
    let survey = Survey::of(model, Some(gradients), &no_states)?;
    let device = survey.device();
    let clip = norm_of(&survey.into_gradients(), 1.0, &device);
    Ok(Tensor::from_dispatch(clip.norm))
}

/// Scales the gradients of `model`'s parameters by `min(1, max_norm / norm)`, of their norm together, for an optimizer that does not clip. Burn's
/// `GradientClippingConfig::Norm` bounds the norm of each parameter's gradient by itself, which changes the gradient's direction.
///
/// Returns the gradients, and their norm before: `[1]`, still on the device.
///
/// # Errors
/// [`OpError`] if `max_norm` is not above 0, and as [`gradient_norm`].
pub fn clip_gradients<M: Module>(
    model: &M,
    gradients: GradientsParams,
    max_norm: f64,
) -> Result<(GradientsParams, Tensor<1>), OpError> {
    config::check_norm("max_norm", max_norm)?;
    let device = Survey::of(model, Some(&gradients), &BTreeMap::new())?.device();
    let mut replace = Replace::take(gradients);
    model.visit(&mut replace);
    let clip = norm_of(&replace.tensors, max_norm, &device);
    let factor = Tensor::<1>::from_dispatch(clip.factor);
    let mut scaled: Vec<Option<DispatchTensor>> = vec![None; replace.tensors.len()];
    let mut tensors: Vec<Option<DispatchTensor>> = replace.tensors.drain(..).map(Some).collect();
    for dtype in [DType::F32, DType::F64] {
        let of_dtype: Vec<usize> = (0..tensors.len())
            .filter(|&index| {
                let tensor = tensors[index].as_ref();
                tensor.is_some_and(|tensor| sums_of(collect::dtype_of(tensor)) == dtype)
            })
            .collect();
        for part in of_dtype.chunks(MOST_TENSORS) {
            let list = part.iter().filter_map(|&index| tensors[index].take());
            let list = TensorList::new(list.collect::<Vec<_>>());
            let factor = factor.clone().cast(float(dtype)).into_dispatch();
            let made = <Dispatch as OptimOps>::scale(list, factor).into_vec();
            for (&index, tensor) in part.iter().zip(made) {
                scaled[index] = Some(tensor);
            }
        }
    }
    replace.give_back(scaled.into_iter().flatten().collect());
    model.visit(&mut replace);
    Ok((replace.gradients, Tensor::from_dispatch(clip.norm)))
}

/// The norm of tensors together, and the factor that clips it to `limit`.
fn norm_of(tensors: &[DispatchTensor], limit: f64, device: &Device) -> ClipFactor<Dispatch> {
    let dtypes = tensors.iter().map(collect::dtype_of);
    let dtype = match dtypes.into_iter().any(|dtype| dtype == DType::F64) {
        true => DType::F64,
        false => DType::F32,
    };
    let sums_in = |part: &[DispatchTensor]| -> usize {
        part.iter()
            .map(|x| partial_sums(collect::elements(x)))
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
    let mut control = [0.0; CONTROL];
    control[LIMIT] = limit;
    let control = numbers_on(device, control.to_vec(), dtype);
    <Dispatch as OptimOps>::clip_factor(partials, control.into_dispatch())
}

/// Elements of a partial sum, on every device.
pub(crate) const PART: usize = 8192;

/// How many partial sums are made of a tensor.
pub(crate) fn partial_sums(elements: usize) -> usize {
    elements.div_ceil(PART)
}

fn numbers_on(device: &Device, numbers: Vec<f64>, dtype: DType) -> Tensor<1> {
    let length = numbers.len();
    Tensor::from_data(TensorData::new(numbers, [length]), (device, dtype))
}

fn float(dtype: DType) -> burn::tensor::FloatDType {
    dtype.into()
}

/// The dtype of sums and moments.
fn sums_of(dtype: DType) -> DType {
    crate::dtype::accumulate_in(dtype.into()).into()
}
