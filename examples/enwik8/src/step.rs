//! Steps of training, run one by one or replayed.

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

/// A model in training.
struct State {
    /// None after a step that failed: the optimizer takes it and updates it in place. Then only the last checkpoint is left, which is what a run continues
    /// from.
    model: Option<SparseTransformer>,
    optimizer: FusedAdamW,
}

impl State {
    /// The optimizer's part of a step; the norm of the gradients, `[1]`.
    fn update(&mut self, gradients: GradientsParams, rate: Rate) -> Result<Tensor<1>> {
        // Not a clone, which would make the step write another model beside this one.
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

/// The learning rate of a step.
enum Rate<'a> {
    Of(f64),
    /// On the device, where replays read it.
    Prepared(&'a AdamWStepState),
}

/// What a step is of.
pub struct Batch {
    /// `[batch, context]`, each.
    pub tokens: TensorData,
    pub targets: TensorData,
    pub dropout_seed: u64,
    pub learning_rate: f64,
}

/// What becomes of a model between two steps.
#[derive(Clone, Copy)]
pub enum Change {
    /// The feed-forward networks' weights are pruned to a share of their blocks; their moments go on.
    Prune(f64),
    /// No layer chooses keys by content any more.
    SeeEverything,
    /// Another stage of the indexers' training.
    Stage(DsaStage),
}

/// A model, its optimizer and how they take steps.
pub struct Steps {
    state: Rc<RefCell<State>>,
    device: Device,
    recompute: Recompute,
    /// Made with the first step.
    replays: Option<Replays>,
    graph: bool,
}

/// What a step measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    pub loss: f64,
    /// Of the gradients, before clipping.
    pub grad_norm: f64,
    /// What all layers add to the loss, if they do.
    pub aux_loss: Option<f64>,
}

impl Measured {
    /// A step's numbers on the host: the only wait for the device in a step.
    pub fn read(step: Tensor<1>) -> Result<Self> {
        let numbers = model::numbers(step)?;
        Ok(Self {
            loss: numbers[0].into(),
            grad_norm: numbers[1].into(),
            aux_loss: numbers.get(2).copied().map(f64::from),
        })
    }
}

/// A step's numbers, which [`Measured::read`] reads.
pub fn numbers(losses: StepLosses, grad_norm: Tensor<1>) -> Tensor<1> {
    let numbers = [losses.loss, grad_norm].into_iter().chain(losses.aux_loss);
    Tensor::cat(numbers.collect(), 0)
}

impl Steps {
    /// With `graph` the fourth step is recorded, and from then on replayed, where the device can.
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

    /// Takes a step. Its [`numbers`] stay on the device; the next step may write there.
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

    /// A step that is not replayed; `between` is called between its gradients and the optimizer.
    pub fn one(&self, batch: Batch, between: impl FnOnce() -> Result<()>) -> Result<Tensor<1>> {
        let data = [batch.tokens, batch.targets];
        let (losses, gradients) = self.gradients(data, 0, batch.dropout_seed)?;
        between()?;
        let norm = self.update(batch.learning_rate, gradients)?;
        Ok(numbers(losses, norm))
    }

    /// The first half of a step, of tokens and targets: the losses and the gradients of a batch, or of a larger one's entries from `first_entry` on.
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

    /// The first half of a step of one device of several that share windows: of its positions.
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

    /// The second half, the optimizer's; the norm of the gradients, `[1]`.
    pub fn update(&self, learning_rate: f64, gradients: GradientsParams) -> Result<Tensor<1>> {
        let mut state = self.state.borrow_mut();
        state.update(gradients, Rate::Of(learning_rate))
    }

    /// Changes the model. What was recorded is of the one before.
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

    /// Moves the means of clusters to where the bytes of a batch are.
    pub fn kmeans_init(&self, tokens: TensorData, seed: u64) -> Result<()> {
        let mut state = self.state.borrow_mut();
        let model = state.model.as_mut().context(NO_MODEL)?;
        model.kmeans_init(Tensor::from_data(tokens, &self.device), seed)?;
        Ok(())
    }

    /// How steps run, where they were to be replayed and it is known: from the fourth on.
    pub fn describe(&self) -> Option<String> {
        let replays = &self.replays.as_ref()?.replayed;
        self::replays(replays.is_recorded(), replays.fallback_reason())
    }
}

/// Whether steps are replayed, or why not, once it is known.
pub fn replays(is_recorded: bool, fallback_reason: Option<&str>) -> Option<String> {
    match (is_recorded, fallback_reason) {
        (true, _) => Some("replays steps: one dispatch for each".to_owned()),
        (false, Some(reason)) => Some(format!("runs steps one by one: {reason}")),
        (false, None) => None,
    }
}

type Step = Box<dyn FnMut() -> Result<Tensor<1>>>;

/// What replays read, and the recording.
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
