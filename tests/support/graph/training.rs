//! Graph capture of training: seeds, optimizers and whole steps.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn_blocksparse::graph::{CapturedGraph, DeviceSeed, StaticInput};
use burn_blocksparse::{Seed, alibi_slopes};
use burn_fused_ops::optim::{FusedAdamW, FusedAdamWConfig};
use burn_fused_ops::{AddNormOptions, ElementDropout, add_norm, dropout};
use burn_sparse_transformer::{
    BlockAttentionConfig, Factorization, Precision, Recompute, SparseTransformer,
    SparseTransformerConfig, TransformerError,
};

use crate::prelude::*;
use crate::training::optim::read;

type Op<'a> = dyn Fn(&Tensor<4>) -> Result<Tensor<4>, OpError> + 'a;

/// Runs attention, a residual stream and plain dropout, each with its gradient.
fn dropped(x: Tensor<4>, seed: Seed) -> Result<Vec<TensorData>, OpError> {
    dropped_with(x, seed, || ())
}

/// Like [`dropped`], with a call between forward and backward passes.
fn dropped_with(
    x: Tensor<4>,
    seed: Seed,
    between: impl FnOnce(),
) -> Result<Vec<TensorData>, OpError> {
    let layout = Pattern::fixed(8, 2).layout(2, 24, 8).expect("fits");
    let options = AttentionOptions::default().dropout(Dropout::new(0.3, seed));
    let attended = |x: &Tensor<4>| {
        let call = call_of([x; 3], &layout, &options);
        call.run().map(|output| output.out)
    };
    let stream = ElementDropout::new(0.4, seed.derive(1), 2);
    let normed = |x: &Tensor<4>| {
        let gain = Tensor::ones([16], &x.device());
        let (sum, normed) = add_norm(
            x.clone(),
            Some(burn_fused_ops::Residual::new(x.clone() * 2.0)),
            burn_fused_ops::NormParams::new(gain),
            &AddNormOptions::default().dropout(stream),
        )?;
        Ok(sum.square() + normed)
    };
    let plain = |x: &Tensor<4>| dropout(x.clone(), &ElementDropout::new(0.5, seed.derive(2), 0));
    let ops: [&Op; 3] = [&attended, &normed, &plain];
    let forward = ops.map(|op| {
        let x = Tensor::from_inner(x.clone()).require_grad();
        op(&x).map(|result| (x, result))
    });
    between();
    let mut results = Vec::new();
    for passed in forward {
        let (x, result) = passed?;
        let gradients = result.clone().square().sum().backward();
        let gradient = x.grad(&gradients).expect("of an input");
        results.extend([result.into_data(), gradient.into_data()]);
    }
    Ok(results)
}

/// A device seed drops the same elements as its value, bit for bit, and follows its changes.
pub fn device_seeds_give_the_masks_of_their_numbers(devices: &[Device]) {
    for device in devices {
        let x = Tensor::<4>::random([2, 2, 24, 16], Distribution::Default, device);
        // Fusion may round the operations between the ops differently the first time.
        for _ in 0..3 {
            dropped(x.clone(), 1.into()).unwrap();
        }
        let seed = DeviceSeed::new(3, device).unwrap();
        let mut before = None;
        for number in [3, 3 + (5 << 40), 0] {
            seed.write(number).unwrap();
            let of_place = dropped(x.clone(), seed.seed()).unwrap();
            let of_number = dropped(x.clone(), number.into()).unwrap();
            let what = ["attention", "add_norm", "dropout"];
            for (index, (got, expected)) in of_place.iter().zip(&of_number).enumerate() {
                let name = [what[index / 2], ["out", "gradient"][index % 2]];
                assert_eq!(got, expected, "{name:?}, {number} on {device:?}");
            }
            assert_ne!(before.replace(of_place.clone()), Some(of_place));
        }
        let place = seed.seed();
        // A backward pass may come after its seed is dropped, and after those of many epochs.
        seed.write(11).unwrap();
        let of_place = dropped_with(x.clone(), place, || {
            drop(seed);
            for epoch in 0..100 {
                DeviceSeed::new(epoch, device).unwrap();
            }
        });
        assert_eq!(of_place.unwrap(), dropped(x.clone(), 11.into()).unwrap());
        refused! { dropped(x, place) => "dropout's seed must be of a DeviceSeed that this thread has, got another"; }
    }
}

/// Returns the error of the fourth run of `closure`, after three that succeed.
fn refused<T: std::fmt::Debug>(
    device: &Device,
    mut closure: impl FnMut(usize) -> Result<T, OpError>,
) -> OpError {
    let mut runs = 0;
    let mut replayed = CapturedGraph::new(device, move || {
        runs += 1;
        closure(runs)
    })
    .unwrap();
    for _ in 0..3 {
        replayed.run().unwrap();
    }
    replayed.run().expect_err("a refusal")
}

fn assert_is_recordings(error: &OpError) {
    assert!(matches!(error, OpError::Recording { .. }), "{error}");
}

/// Host data and numbers that replays would not update are errors of the captured run, and the device stays usable.
pub fn recordings_refuse_what_would_be_frozen(devices: &[Device]) {
    for device in devices {
        // On other devices the closure runs again, and nothing is refused.
        let records = is_cube(device);
        let q = Tensor::<4>::random([1, 2, 32, 16], Distribution::Default, device);
        let layout = |window| Pattern::local(window).layout(2, 32, 8).expect("fits");
        let call = |layout: &BlockLayout, options| {
            let call = call_of([&q; 3], layout, &options);
            call.run().map(|output| output.out)
        };
        let plain = AttentionOptions::default();
        let warm = layout(9);
        let expected = call(&warm, plain.clone()).unwrap().into_data();

        let error = refused(device, |run| match run {
            4 => call(&layout(13), plain.clone()),
            _ => call(&warm, plain.clone()),
        });
        assert_is_recordings(&error);
        if records {
            let error = refused(device, |run| {
                let alibi = plain.clone().alibi(match run {
                    4 => vec![0.5, 0.125],
                    _ => alibi_slopes(2),
                });
                call(&warm, alibi)
            });
            assert_is_recordings(&error);
        }
        let frozen = "dropout's seed would be the same in every replay of a recording: take it from a DeviceSeed";
        let error = refused(device, |run| {
            call(&warm, plain.clone().dropout(Dropout::new(0.1, run as u64)))
        });
        assert_eq!(error.to_string(), frozen);
        let ones = Tensor::<2>::ones([4, 4], device);
        let error = refused(device, |run| {
            dropout(ones.clone(), &ElementDropout::new(0.1, run as u64, 0))
        });
        assert_eq!(error.to_string(), frozen);
        let seed = DeviceSeed::new(1, device).unwrap();
        let error = refused(device, |run| {
            let seed = seed.seed().derive(run as u64 / 4);
            dropout(ones.clone(), &ElementDropout::new(0.1, seed, 0))
        });
        assert_is_recordings(&error);

        let fixed = StaticInput::<1>::new(TensorData::from([1f32]), device).unwrap();
        assert_is_recordings(&refused(device, |_| fixed.write(TensorData::from([2f32]))));

        let model = Linear::new(device);
        let error = optimizer_refused(device, model.clone(), false, false);
        let message = "the learning rate would be the same in every replay of a recording: call step_prepared with FusedAdamW's control";
        assert_eq!(error.to_string(), message);
        if records {
            let error = optimizer_refused(device, model.clone(), true, true);
            assert!(matches!(error, OpError::NotInPlace { .. }), "{error}");
        }

        // The failed capture leaves no trace.
        assert_eq!(call(&warm, plain.clone()).unwrap().into_data(), expected);
        call(&layout(17), plain.clone()).unwrap().into_data();
    }
}

#[derive(Module, Debug)]
struct Linear {
    weight: Param<Tensor<2>>,
}

impl Linear {
    fn new(device: &Device) -> Self {
        let device = device.clone().autodiff();
        let weight = Tensor::<2>::random([8, 4], Distribution::Default, &device);
        Self {
            weight: Param::from_tensor(weight),
        }
    }
}

/// Returns the error of a captured step of the optimizer; with `held` a clone shares the parameters.
fn optimizer_refused(device: &Device, model: Linear, prepared: bool, held: bool) -> OpError {
    let mut optimizer = FusedAdamWConfig::new().init();
    let control = Rc::new(optimizer.control(&model).unwrap());
    let x = Tensor::<2>::ones([3, 8], device).autodiff();
    let mut model = Some(model);
    let mut clones = Vec::new();
    let inside = control.clone();
    let mut replayed = CapturedGraph::new(device, move || {
        let taken = model.take().expect("a step did not fail before");
        if held {
            clones.push(taken.clone());
        }
        let loss = x.clone().matmul(taken.weight.val()).square().sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &taken);
        let (stepped, norm) = match prepared {
            true => optimizer.step_prepared(&inside, taken, gradients)?,
            false => optimizer.step(1e-3, taken, gradients)?,
        };
        model = Some(stepped);
        Ok::<_, OpError>(norm)
    })
    .unwrap();
    for _ in 0..3 {
        control.prepare(1e-3).unwrap();
        replayed.run().unwrap();
    }
    control.prepare(1e-3).unwrap();
    replayed.run().expect_err("a refusal")
}

/// Two matrices, of which one starts learning later.
#[derive(Module, Debug)]
struct Two {
    first: Linear,
    second: Linear,
}

/// Bias corrections use each parameter's own steps, even if some start learning before the capture.
pub fn replayed_steps_count_for_each_parameter(devices: &[Device]) {
    const ALONE: usize = 3;
    const STEPS: usize = 7;
    for device in devices {
        let x = Tensor::<2>::ones([3, 8], device).autodiff();
        let gradients = move |model: &Two, both: bool| {
            let of = |part: &Linear| x.clone().matmul(part.weight.val()).square().sum();
            let loss = match both {
                true => of(&model.first) + of(&model.second),
                false => of(&model.first),
            };
            GradientsParams::from_grads(loss.backward(), model)
        };
        let model = Two {
            first: Linear::new(device),
            second: Linear::new(device),
        };
        let config = FusedAdamWConfig::new().with_max_grad_norm(Some(0.5));
        let alone = |mut model: Two, optimizer: &mut FusedAdamW| {
            for _ in 0..ALONE {
                let gradients = gradients(&model, false);
                (model, _) = optimizer.step(1e-2, model, gradients).unwrap();
            }
            model
        };
        let mut optimizer = config.init();
        let mut plain = alone(model.clone(), &mut optimizer);
        for _ in 0..STEPS {
            let gradients = gradients(&plain, true);
            (plain, _) = optimizer.step(1e-2, plain, gradients).unwrap();
        }
        let mut of_replays = config.init();
        let model = alone(model, &mut of_replays);
        let control = Rc::new(of_replays.control(&model).unwrap());
        let state = Rc::new(RefCell::new(Some((model, of_replays))));
        let (inside, of_step) = (control.clone(), state.clone());
        let gradients = gradients.clone();
        let mut replayed = CapturedGraph::new(device, move || {
            let (model, mut optimizer) = of_step.take().expect("no step failed");
            let gradients = gradients(&model, true);
            let (model, norm) = optimizer.step_prepared(&inside, model, gradients)?;
            of_step.replace(Some((model, optimizer)));
            Ok::<_, OpError>(norm)
        })
        .unwrap();
        for _ in 0..STEPS {
            control.prepare(1e-2).unwrap();
            replayed.run().unwrap();
        }
        let (model, of_replays) = state.take().unwrap();
        for (got, expected) in [(model.first, plain.first), (model.second, plain.second)] {
            let [got, expected] = [got, expected].map(|part| part.weight.val().into_data());
            assert_eq!(got, expected, "{device:?}");
        }
        let [got, expected] = [of_replays, optimizer].map(|of| of.to_bytes().unwrap().to_vec());
        assert!(got == expected, "{device:?}: records differ");
    }
}

/// Results of training: losses and norms of all steps, an evaluation between them, the parameters and the optimizer's record.
struct Trained {
    steps: Vec<Vec<f32>>,
    evaluated: Vec<f32>,
    parameters: Vec<TensorData>,
    moments: Vec<u8>,
}

struct Setup {
    config: SparseTransformerConfig,
    recompute: Recompute,
    batch: usize,
    steps: usize,
}

impl Setup {
    fn model(&self, device: &Device) -> SparseTransformer {
        let device = device.clone().autodiff();
        device.seed(7);
        self.config.try_init(&device).unwrap().materialize()
    }

    fn optimizer() -> FusedAdamW {
        FusedAdamWConfig::new()
            .with_weight_decay(0.01)
            .with_max_grad_norm(Some(0.5))
            .init()
    }

    /// Returns tokens and targets of a step.
    fn data(&self, step: usize) -> [TensorData; 2] {
        let (rows, context) = (self.batch, self.config.context);
        [0, 1].map(|offset| {
            let number = |i: usize| ((i + offset) * (step + 3) / 2 % self.config.vocab_size) as i32;
            let numbers: Vec<i32> = (0..rows * context).map(number).collect();
            TensorData::new(numbers, [rows, context])
        })
    }

    fn rate(step: usize) -> f64 {
        1e-2 / (1 + step) as f64
    }

    fn seed(step: usize) -> u64 {
        (step as u64 + 1) << 20
    }

    fn evaluate(&self, model: &SparseTransformer, device: &Device) -> f32 {
        let [tokens, targets] = self.data(1_000).map(|data| Tensor::from_data(data, device));
        let loss = model.valid().try_loss(tokens, targets);
        loss.unwrap().into_scalar()
    }

    fn trained(
        &self,
        device: &Device,
        mut take: impl FnMut(usize) -> Tensor<1>,
        state: &RefCell<Option<(SparseTransformer, FusedAdamW)>>,
    ) -> Trained {
        let mut evaluated = Vec::new();
        let mut moments = Vec::new();
        let steps = (0..self.steps)
            .map(|step| {
                // Read at once: a read may be lazy, and the next replay overwrites the buffer.
                let measured = take(step).try_into_vec_as::<f32>().unwrap();
                if step % 7 == 3 || step + 1 == self.steps {
                    let state = state.borrow();
                    let (model, optimizer) = state.as_ref().unwrap();
                    evaluated.push(self.evaluate(model, device));
                    moments = optimizer.to_bytes().unwrap().to_vec();
                }
                measured
            })
            .collect();
        let (model, _) = state.borrow_mut().take().unwrap();
        Trained {
            steps,
            evaluated,
            parameters: read(&model),
            moments,
        }
    }

    fn plain(&self, device: &Device, model: SparseTransformer) -> Trained {
        let state = RefCell::new(Some((model, Self::optimizer())));
        let take = |step| {
            let (model, mut optimizer) = state.take().unwrap();
            let [tokens, targets] = self.data(step).map(|data| Tensor::from_data(data, device));
            let (loss, gradients) = model
                .loss_and_gradients(tokens, targets, Self::seed(step), self.recompute)
                .unwrap();
            let (model, norm) = optimizer.step(Self::rate(step), model, gradients).unwrap();
            state.replace(Some((model, optimizer)));
            Tensor::cat(vec![loss, norm], 0)
        };
        self.trained(device, take, &state)
    }

    /// Trains with capture. Also returns whether steps were replayed.
    fn replayed(&self, device: &Device, model: SparseTransformer) -> (Trained, bool) {
        let mut optimizer = Self::optimizer();
        let control = Rc::new(optimizer.control(&model).unwrap());
        let state = Rc::new(RefCell::new(Some((model, optimizer))));
        let input = |data| StaticInput::<2, Int>::new(data, device).unwrap();
        let [tokens, targets] = self.data(0).map(input);
        let seed = Rc::new(DeviceSeed::new(0, device).unwrap());
        let calls = Rc::new(Cell::new(0));
        let mut replayed = CapturedGraph::new(device, {
            let (state, tokens, targets) = (state.clone(), tokens.clone(), targets.clone());
            let (seed, control, calls) = (seed.clone(), control.clone(), calls.clone());
            let recompute = self.recompute;
            move || {
                calls.set(calls.get() + 1);
                let (model, mut optimizer) = state.take().expect("no step failed");
                let [x, y] = [tokens.tensor(), targets.tensor()];
                let (loss, gradients) = model.loss_and_gradients(x, y, seed.seed(), recompute)?;
                let (model, norm) = optimizer.step_prepared(&control, model, gradients)?;
                state.replace(Some((model, optimizer)));
                Ok::<_, TransformerError>(Tensor::cat(vec![loss, norm], 0))
            }
        })
        .unwrap();
        let take = |step| {
            let [of_tokens, of_targets] = self.data(step);
            tokens.write(of_tokens).unwrap();
            targets.write(of_targets).unwrap();
            seed.write(Self::seed(step)).unwrap();
            control.prepare(Self::rate(step)).unwrap();
            replayed.run().expect("a step").clone()
        };
        let trained = self.trained(device, take, &state);
        let recorded = replayed.is_recorded();
        assert_eq!(calls.get(), if recorded { 4 } else { self.steps });
        assert_eq!(control.steps(), self.steps);
        (trained, recorded)
    }

    /// Checks that replayed and plain steps give equal bits.
    fn check(&self, device: &Device, what: &str) {
        // Fusion may round the operations between the ops differently the first times.
        let few = Setup {
            config: self.config.clone(),
            steps: 3,
            ..*self
        };
        few.plain(device, few.model(device));
        // The first step writes to new buffers, because a clone shares the model's.
        let model = self.model(device);
        let plain = self.plain(device, model.clone());
        let (replayed, recorded) = self.replayed(device, model);
        eprintln!("{device:?}, {what}: recorded {recorded}");
        let context = || format!("{what} on {device:?}, recorded: {recorded}");
        for (step, (got, expected)) in replayed.steps.iter().zip(&plain.steps).enumerate() {
            assert_eq!(got, expected, "step {step}, {}", context());
        }
        assert_eq!(replayed.evaluated, plain.evaluated, "{}", context());
        assert!(replayed.parameters == plain.parameters, "{}", context());
        assert!(replayed.moments == plain.moments, "{}", context());
    }
}

/// Makes a setup of a width and a context, with dropout everywhere.
fn setup(
    [d_model, context]: [usize; 2],
    pattern: Pattern,
    precision: Precision,
    steps: usize,
) -> Setup {
    let config = SparseTransformerConfig::new(d_model, 2, Factorization::from(pattern))
        .with_vocab_size(13)
        .with_context(context)
        .with_n_layers(2)
        .with_block_size(if context < 128 { 8 } else { 32 })
        .with_dropout(0.2)
        .with_attention(Some(BlockAttentionConfig::new().with_dropout(0.1)))
        .with_precision(precision);
    Setup {
        config,
        recompute: Recompute::None,
        batch: 2,
        steps,
    }
}

/// Losses, norms, evaluations, parameters and moments have equal bits with replayed steps: with dropout everywhere, a schedule and clipping, and
/// with recomputation.
pub fn replayed_training_equals_plain_training(devices: &[Device]) {
    let fixed = |context: usize| Pattern::fixed(context / 4, context / 16);
    let mut ran = 0;
    for device in devices {
        let mut setups = vec![setup([16, 32], fixed(32), Precision::F32, 24)];
        let kernels = is_cube(device);
        if kernels && device.supports_dtype(DType::BF16) {
            // The kernels on tensor cores, if there are any.
            let mixed = setup([128, 256], fixed(256), Precision::Bf16, 24);
            let segments = Recompute::Segments(1.try_into().expect("one"));
            let keeping = Recompute::SegmentsSavingAttention(1.try_into().expect("one"));
            for recompute in [Recompute::None, Recompute::Mlp, segments, keeping] {
                let config = mixed.config.clone();
                setups.push(Setup {
                    config,
                    recompute,
                    ..mixed
                });
            }
        }
        for setup in &setups {
            setup.check(device, &format!("recompute {}", setup.recompute));
            ran += 1;
        }
    }
    assert_ran("replayed training", ran);
}

/// With blocks and keys that each step selects anew.
pub fn replayed_training_chooses_as_plain_training(devices: &[Device]) {
    let texts = ["nsa:8,4,16,3,20", "dsa:12,2,2,16", "msa:8,3,16"];
    let mut ran = 0;
    for device in devices {
        for text in some_of(texts, 3) {
            // Without kernels for lists of blocks, their layouts are the host's, which cannot be captured.
            if text.starts_with("msa") && !is_cube(device) {
                continue;
            }
            let mut setup = setup([32, 64], Pattern::causal(), Precision::F32, 12);
            setup.config =
                (setup.config.with_n_layers(1)).with_content(Some(text.parse().unwrap()));
            setup.config.attention = None;
            setup.batch = 1;
            setup.check(device, text);
            ran += 1;
        }
    }
    assert_ran("replayed training of what chooses", ran);
}
