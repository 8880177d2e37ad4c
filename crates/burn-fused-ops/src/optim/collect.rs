//! Conversion between a module's parameters and lists of tensors.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
#[cfg(feature = "autodiff")]
use burn::tensor::GradientCheckpointingStrategy;

use crate::optim::record::{Moments, ParameterState};
use burn_blocksparse::internal::prelude::*;

/// Visitor that checks a module before any of it changes. With gradients it visits the parameters that have one, without gradients all.
pub(crate) struct Survey<'a> {
    gradients: Option<&'a GradientsParams>,
    states: &'a BTreeMap<u64, ParameterState>,
    path: Vec<String>,
    device: Option<Device>,
    /// Gradients, in the order of the parameters.
    pub found: Vec<DispatchTensor>,
    /// Visited parameters.
    pub seen: HashSet<ParamId>,
    /// Number of elements of the largest parameter.
    pub largest: usize,
    /// Distinct pairs of a parameter's step count and the dtype of its sums.
    pub steps: Vec<(usize, DType)>,
    failed: Option<OpError>,
}

impl<'a> Survey<'a> {
    pub fn of<M: Module>(
        model: &M,
        gradients: Option<&'a GradientsParams>,
        states: &'a BTreeMap<u64, ParameterState>,
    ) -> Result<Self, OpError> {
        let mut survey = Self {
            gradients,
            states,
            path: Vec::new(),
            device: None,
            found: Vec::new(),
            seen: HashSet::new(),
            largest: 0,
            steps: Vec::new(),
            failed: None,
        };
        model.visit(&mut survey);
        // Without a gradient, take the model's device: Burn's default device may not exist on this machine.
        survey.device = survey.device.or_else(|| model.devices().into_iter().next());
        match survey.failed.take() {
            Some(error) => Err(error),
            None => Ok(survey),
        }
    }

    /// Returns the device of the visited parameters, or else of the model's first one, without autodiff. Without parameters, the default device.
    pub fn device(&self) -> Device {
        self.device.clone().unwrap_or_default().without_autodiff()
    }

    fn look<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Result<(), OpError> {
        let gradient = match self.gradients {
            // A parameter shared by two places takes one step.
            Some(_) if self.seen.contains(&param.id) => return Ok(()),
            Some(gradients) => match gradients.get::<D>(param.id) {
                Some(gradient) => Some(gradient.inner()),
                None => return Ok(()),
            },
            None => None,
        };
        let parameter = param.base();
        let device = parameter.device();
        match &self.device {
            None => served(&device)?,
            Some(first) => same_device("a parameter's device", first, "the others'", &device)?,
        }
        self.device.get_or_insert(device.clone());
        let shape = parameter.shape().to_vec();
        self.largest = self.largest.max(shape.iter().product());
        let path = &self.path;
        let of_parameter = || format!("{shape:?}, that of parameter {}", path.join("."));
        if let Some(gradient) = gradient {
            let own = gradient.device();
            same_device("a gradient's device", &device, "its parameter's", &own)?;
            let got = gradient.shape().to_vec();
            blocksparse::ensure! { OpError; got == shape => "a gradient's shape", of_parameter(), format!("{got:?}"); }
            self.found.push(gradient.into_dispatch());
        }
        let state = self.states.get(&param.id.val());
        if let Some(state) = state {
            blocksparse::ensure! { OpError; state.shape == shape => "the record's shape", of_parameter(), format!("{:?}", state.shape); }
        }
        let steps = state.map_or(0, |state| state.time);
        let group = (steps, sums_of(parameter.dtype()));
        if !self.steps.contains(&group) {
            self.steps.push(group);
        }
        self.seen.insert(param.id);
        Ok(())
    }
}

impl ModuleVisitor for Survey<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.failed.is_none() {
            self.failed = self.look(param).err();
        }
    }
}

/// Parameter taken out of its module, with the tensors of its step.
pub(crate) struct Held {
    pub id: ParamId,
    pub path: String,
    pub shape: Vec<usize>,
    /// Number of steps, this one included.
    pub time: usize,
    pub moments_dtype: DType,
    pub parameter: Option<DispatchTensor>,
    pub gradient: Option<DispatchTensor>,
    moments: Option<[DispatchTensor; 2]>,
    context: Context,
}

impl Held {
    /// Moves out parameter, gradient and moments, so that the call holds them alone.
    pub fn take(&mut self) -> [DispatchTensor; 4] {
        let parameter = self.parameter.take().expect("before the step");
        let [first, second] = self.moments.take().expect("before the step");
        let gradient = self.gradient.take().expect("before the step");
        [parameter, gradient, first, second]
    }

    /// Returns the parameter's state after its step.
    pub fn state(&self, moments: [DispatchTensor; 2]) -> ParameterState {
        ParameterState {
            time: self.time,
            counted: None,
            path: Some(self.path.clone()),
            shape: self.shape.clone(),
            moments: Moments::Device(Box::new(moments)),
        }
    }
}

/// Autodiff settings of a parameter, which a new value does not carry over.
struct Context {
    autodiff: bool,
    require_grad: bool,
    distributed: bool,
    #[cfg(feature = "autodiff")]
    checkpointing: Option<GradientCheckpointingStrategy>,
}

impl Context {
    fn of<const D: usize>(parameter: &Tensor<D>) -> Self {
        Self {
            autodiff: parameter.is_autodiff(),
            require_grad: parameter.is_require_grad(),
            // Burn panics for a tensor without autodiff.
            distributed: parameter.is_autodiff() && parameter.is_distributed(),
            #[cfg(feature = "autodiff")]
            checkpointing: parameter.gradient_checkpointing_strategy(),
        }
    }

    fn restore<const D: usize>(self, updated: Tensor<D>, id: ParamId) -> Tensor<D> {
        if !self.autodiff {
            return updated;
        }
        let mut parameter = Tensor::from_inner(updated);
        #[cfg(feature = "autodiff")]
        if let Some(strategy) = self.checkpointing {
            parameter = parameter.with_gradient_checkpointing_strategy(strategy);
        }
        if self.require_grad {
            parameter = parameter.require_grad();
        }
        if self.distributed {
            parameter = parameter.set_distributed(id);
        }
        parameter
    }
}

/// Mapper that takes parameters with a gradient out of a module, so that no one else holds them, and leaves a tensor of one element in their place.
pub(crate) struct Take<'a> {
    gradients: GradientsParams,
    states: &'a mut BTreeMap<u64, ParameterState>,
    path: Vec<String>,
    /// One placeholder per rank.
    placeholders: HashMap<usize, DispatchTensor>,
    /// Parameters taken, in order; `None` for a parameter that was not taken.
    pub held: Vec<Option<Held>>,
}

impl<'a> Take<'a> {
    pub fn new(gradients: GradientsParams, states: &'a mut BTreeMap<u64, ParameterState>) -> Self {
        Self {
            gradients,
            states,
            path: Vec::new(),
            placeholders: HashMap::new(),
            held: Vec::new(),
        }
    }

    /// Returns a parameter's moments before its step, and the number of steps including this one.
    fn moments<const D: usize>(
        &mut self,
        id: ParamId,
        parameter: &Tensor<D>,
    ) -> ([DispatchTensor; 2], usize) {
        let (device, dtype) = (parameter.device(), sums_of(parameter.dtype()));
        let Some(state) = self.states.remove(&id.val()) else {
            let zeros = || Tensor::<D>::zeros(parameter.shape(), (&device, dtype)).into_dispatch();
            return ([zeros(), zeros()], 1);
        };
        let moments = match state.moments {
            Moments::Host(data) => {
                burn_blocksparse::graph::recording::expect_no_upload("the moments of a record");
                (*data).map(|data| Tensor::<D>::from_data(data, (&device, dtype)).into_dispatch())
            }
            Moments::Device(moments) => (*moments).map(|moment| {
                let mut moment = Tensor::<D>::from_dispatch(moment);
                if moment.device() != device {
                    moment = moment.to_device(&device);
                }
                if moment.dtype() != dtype {
                    moment = moment.cast(FloatDType::from(dtype));
                }
                moment.into_dispatch()
            }),
        };
        (moments, state.time + 1)
    }
}

impl ModuleMapper for Take<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let Some(gradient) = self.gradients.remove::<D>(id) else {
            self.held.push(None);
            return Param::from_mapped_value(id, tensor, mapper);
        };
        let context = Context::of(&tensor);
        let parameter = tensor.inner();
        let (moments, time) = self.moments(id, &parameter);
        let device = parameter.device();
        let placeholder = (self.placeholders.entry(D))
            .or_insert_with(|| Tensor::<D>::empty([1; D], &device).into_dispatch());
        let placeholder = Tensor::from_dispatch(placeholder.clone());
        self.held.push(Some(Held {
            id,
            path: self.path.join("."),
            shape: parameter.shape().to_vec(),
            time,
            moments_dtype: sums_of(parameter.dtype()),
            parameter: Some(parameter.into_dispatch()),
            gradient: Some(gradient.inner().into_dispatch()),
            moments: Some(moments),
            context,
        }));
        Param::from_mapped_value(id, placeholder, mapper)
    }
}

/// Mapper that puts parameters back where [`Take`] took them.
pub(crate) struct GiveBack {
    pub updated: VecDeque<Option<Held>>,
}

impl ModuleMapper for GiveBack {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let tensor = match self.updated.pop_front().expect("as many as were visited") {
            None => tensor,
            Some(held) => {
                let updated = held.parameter.expect("after the step");
                held.context.restore(Tensor::from_dispatch(updated), id)
            }
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// Visitor that takes the gradients of a module's parameters out of their container in its first pass, and stores other tensors there in the second.
pub(crate) struct Replace {
    pub gradients: GradientsParams,
    pub tensors: Vec<DispatchTensor>,
    /// Parameters in the order of the visits.
    ids: VecDeque<ParamId>,
    /// Tensors that the second pass stores.
    pub back: Option<VecDeque<DispatchTensor>>,
}

impl Replace {
    pub fn take(gradients: GradientsParams) -> Self {
        Self {
            gradients,
            tensors: Vec::new(),
            ids: VecDeque::new(),
            back: None,
        }
    }
}

impl ModuleVisitor for Replace {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        match &mut self.back {
            None => {
                if let Some(gradient) = self.gradients.remove::<D>(param.id) {
                    self.ids.push_back(param.id);
                    self.tensors.push(gradient.inner().into_dispatch());
                }
            }
            Some(back) => {
                if self.ids.front() == Some(&param.id) {
                    self.ids.pop_front();
                    let tensor = back.pop_front().expect("as many as were taken");
                    let tensor = Tensor::<D>::from_dispatch(tensor);
                    self.gradients.register(param.id, tensor);
                }
            }
        }
    }
}
