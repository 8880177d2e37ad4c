//! Training steps, run one by one or replayed.

use std::cell::{Ref, RefCell};
use std::rc::Rc;

use anyhow::{Context, Result, anyhow};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_blocksparse::graph::{CapturedGraph, DeviceSeed, StaticInput};
use burn_fused_ops::optim::{AdamWStepState, FusedAdamW};
use burn_sparse_transformer::dsa::DsaStage;
use burn_sparse_transformer::{Recompute, SparseTransformer, StepLosses, TransformerShard};

use crate::model;
use crate::prune::prune;

struct State {
    /// None after a failed step: the optimizer takes the model and updates it in place. Only the last checkpoint is left then, from which a run continues.
    model: Option<SparseTransformer>,
    optimizer: FusedAdamW,
}

impl State {
    /// Takes the optimizer's part of a step and returns the norm of the gradients, `[1]`.
    fn update(&mut self, gradients: GradientsParams, rate: Rate) -> Result<Tensor<1>> {
        // Moved, not cloned: a clone would make the step write a second model.
        let model = self.model.take().context(NO_MODEL)?;
        let (mut model, norm) = match rate {
            Rate::Of(rate) => self.optimizer.step(rate, model, gradients)?,
            Rate::Prepared(control) => self.optimizer.step_prepared(control, model, gradients)?,
        };
        model.ema_update();
        self.model = Some(model);
        Ok(norm)
    }
}

/// Learning rate of a step.
enum Rate<'a> {
    Of(f64),
    /// Read from the device, also by replays.
    Prepared(&'a AdamWStepState),
}

/// Inputs of a step.
pub struct Batch {
    /// Tokens and targets, `[batch, context]` each.
    pub tokens: TensorData,
    pub targets: TensorData,
    pub dropout_seed: u64,
    pub learning_rate: f64,
}

/// Change of a model between two steps.
#[derive(Clone, Copy)]
pub enum Change {
    /// Prunes the feed-forward networks' weights to a density; their moments are pruned too.
    Prune(f64),
    /// Removes selections from all layers.
    SeeEverything,
    /// Sets the training stage of the indexers.
    Stage(DsaStage),
}

/// Model and optimizer, and how they take steps.
pub struct Steps {
    state: Rc<RefCell<State>>,
    device: Device,
    recompute: Recompute,
    /// Created with the first step.
    replays: Option<Replays>,
    graph: bool,
}

/// Measurements of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    pub loss: f64,
    /// Norm of the gradients before clipping.
    pub grad_norm: f64,
    /// Auxiliary loss of all layers, if any.
    pub aux_loss: Option<f64>,
}

impl Measured {
    /// Reads a step's measurements: the only wait for the device in a step.
    pub fn read(step: Tensor<1>) -> Result<Self> {
        let numbers = model::numbers(step)?;
        Ok(Self {
            loss: numbers[0].into(),
            grad_norm: numbers[1].into(),
            aux_loss: numbers.get(2).copied().map(f64::from),
        })
    }
}

/// Concatenates a step's measurements for [`Measured::read`].
pub fn numbers(losses: StepLosses, grad_norm: Tensor<1>) -> Tensor<1> {
    let numbers = [losses.loss, grad_norm].into_iter().chain(losses.aux_loss);
    Tensor::cat(numbers.collect(), 0)
}

impl Steps {
    /// Creates the steps. With `graph` the fourth step is recorded and replayed from then on, if the device supports it.
    pub fn new(
        model: SparseTransformer,
        optimizer: FusedAdamW,
        device: &Device,
        recompute: Recompute,
        graph: bool,
    ) -> Self {
        let model = Some(model);
        Self {
            state: Rc::new(RefCell::new(State { model, optimizer })),
            device: device.clone(),
            recompute,
            replays: None,
            graph,
        }
    }

    pub fn model(&self) -> Result<Ref<'_, SparseTransformer>> {
        Ref::filter_map(self.state.borrow(), |state| state.model.as_ref())
            .map_err(|_| anyhow!(NO_MODEL))
    }

    pub fn optimizer(&self) -> Ref<'_, FusedAdamW> {
        Ref::map(self.state.borrow(), |state| &state.optimizer)
    }

    /// Takes a step. Its [`numbers`] stay on the device, where the next step may overwrite them.
    pub fn take(&mut self, batch: Batch) -> Result<Tensor<1>> {
        if !self.graph {
            return self.one(batch, || Ok(()));
        }
        let integers = self.device.settings().int_dtype.into();
        let replays = match &mut self.replays {
            Some(replays) => replays,
            none => none.insert(Replays::new(
                &self.state,
                &batch,
                integers,
                &self.device,
                self.recompute,
            )?),
        };
        replays.take(batch, integers)
    }

    /// Takes a step that is not replayed; calls `between` after the gradients and before the optimizer.
    pub fn one(&self, batch: Batch, between: impl FnOnce() -> Result<()>) -> Result<Tensor<1>> {
        let data = [batch.tokens, batch.targets];
        let (losses, gradients) = self.gradients(data, 0, batch.dropout_seed)?;
        between()?;
        let norm = self.update(batch.learning_rate, gradients)?;
        Ok(numbers(losses, norm))
    }

    /// Computes the first half of a step, losses and gradients, for a batch or for the entries of a larger one from `first_entry` on.
    pub fn gradients(
        &self,
        data: [TensorData; 2],
        first_entry: usize,
        dropout_seed: u64,
    ) -> Result<(StepLosses, GradientsParams)> {
        let [tokens, targets] = data.map(|data| Tensor::from_data(data, &self.device));
        let (model, recompute) = (self.model()?, self.recompute);
        Ok(model.losses_and_gradients(tokens, targets, first_entry, dropout_seed, recompute)?)
    }

    /// Computes the first half of a step for one of several devices that share windows: for its positions.
    pub fn gradients_of_shard(
        &self,
        data: [TensorData; 2],
        shard: &TransformerShard,
    ) -> Result<(StepLosses, GradientsParams)> {
        let [tokens, targets] =
            data.map(|data| shard.tokens(Tensor::from_data(data, &self.device)));
        let model = self.model()?;
        Ok(model.losses_and_gradients_of_shard(tokens, targets, shard, self.recompute)?)
    }

    /// Computes the second half, the optimizer's, and returns the norm of the gradients, `[1]`.
    pub fn update(&self, learning_rate: f64, gradients: GradientsParams) -> Result<Tensor<1>> {
        let mut state = self.state.borrow_mut();
        state.update(gradients, Rate::Of(learning_rate))
    }

    /// Changes the model, which invalidates the recording.
    pub fn change(&mut self, change: Change) -> Result<()> {
        self.replays = None;
        let mut state = self.state.borrow_mut();
        let model = state.model.take().context(NO_MODEL)?;
        state.model = Some(match change {
            Change::Prune(density) => {
                let (model, pruned) = prune(model, density)?;
                for (weight, kept) in pruned {
                    state.optimizer.keep_rows(weight, &kept)?;
                }
                model
            }
            Change::SeeEverything => model.with_selections(&[], 0)?,
            Change::Stage(stage) => model.with_dsa_stage(stage)?,
        });
        Ok(())
    }

    /// Moves the means of clusters to the bytes of a batch.
    pub fn kmeans_init(&self, tokens: TensorData, seed: u64) -> Result<()> {
        let mut state = self.state.borrow_mut();
        let model = state.model.as_mut().context(NO_MODEL)?;
        model.kmeans_init(Tensor::from_data(tokens, &self.device), seed)?;
        Ok(())
    }

    /// Describes how steps run, if they were to be replayed and it is known: from the fourth on.
    pub fn describe(&self) -> Option<String> {
        let replays = &self.replays.as_ref()?.replayed;
        self::replays(replays.is_recorded(), replays.fallback_reason())
    }
}

/// Returns whether steps are replayed, or why not, once it is known.
pub fn replays(is_recorded: bool, fallback_reason: Option<&str>) -> Option<String> {
    match (is_recorded, fallback_reason) {
        (true, _) => Some("replays steps: one dispatch for each".to_owned()),
        (false, Some(reason)) => Some(format!("runs steps one by one: {reason}")),
        (false, None) => None,
    }
}

type Step = Box<dyn FnMut() -> Result<Tensor<1>>>;

/// Inputs of replays, and the recording.
struct Replays {
    tokens: StaticInput<2, Int>,
    targets: StaticInput<2, Int>,
    seed: Rc<DeviceSeed>,
    control: Rc<AdamWStepState>,
    replayed: CapturedGraph<Tensor<1>, Step>,
}

impl Replays {
    fn new(
        state: &Rc<RefCell<State>>,
        batch: &Batch,
        integers: DType,
        device: &Device,
        recompute: Recompute,
    ) -> Result<Self> {
        let fixed =
            |data: &TensorData| StaticInput::new(data.clone().convert_dtype(integers), device);
        let (tokens, targets) = (fixed(&batch.tokens)?, fixed(&batch.targets)?);
        let seed = Rc::new(DeviceSeed::new(batch.dropout_seed, device)?);
        let control = {
            let State { model, optimizer } = &mut *state.borrow_mut();
            Rc::new(optimizer.control(model.as_ref().context(NO_MODEL)?)?)
        };
        let step: Step = Box::new({
            let (state, tokens, targets) = (state.clone(), tokens.clone(), targets.clone());
            let (seed, control) = (seed.clone(), control.clone());
            move || {
                let (tokens, targets, seed) = (tokens.tensor(), targets.tensor(), seed.seed());
                let mut state = state.borrow_mut();
                let model = state.model.as_ref().context(NO_MODEL)?;
                let (losses, gradients) =
                    model.losses_and_gradients(tokens, targets, 0, seed, recompute)?;
                let norm = state.update(gradients, Rate::Prepared(&control))?;
                Ok(numbers(losses, norm))
            }
        });
        Ok(Self {
            tokens,
            targets,
            seed,
            control,
            replayed: CapturedGraph::new(device, step)?,
        })
    }

    fn take(&mut self, batch: Batch, integers: DType) -> Result<Tensor<1>> {
        self.tokens.write(batch.tokens.convert_dtype(integers))?;
        self.targets.write(batch.targets.convert_dtype(integers))?;
        self.seed.write(batch.dropout_seed)?;
        self.control.prepare(batch.learning_rate)?;
        let taken = self.replayed.run().context("a step with --graph failed")?;
        Ok(taken.clone())
    }
}

const NO_MODEL: &str = "a step failed, and its model is gone: continue from the last checkpoint";
