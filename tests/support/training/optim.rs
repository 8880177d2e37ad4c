//! AdamW over all parameters of a module, against loops in f64.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn_blocksparse::OpPlan;
use burn_fused_ops::optim::{FusedAdamW, FusedAdamWConfig, clip_gradients, concat, gradient_norm};

use crate::prelude::*;

/// Parameters of all ranks.
#[derive(Module, Debug)]
pub struct Many {
    one: Vec<Param<Tensor<1>>>,
    two: Vec<Param<Tensor<2>>>,
    three: Vec<Param<Tensor<3>>>,
    four: Vec<Param<Tensor<4>>>,
}

/// More vectors than a call takes, of ragged sizes, two of them empty.
fn vectors() -> Vec<usize> {
    let mut sizes = vec![1, 7, 4096, 100_003, 0];
    sizes.extend((1..=35).map(|i| 11 * i));
    sizes
}

const MATRICES: [[usize; 2]; 4] = [[3, 5], [64, 128], [0, 4], [129, 66]];

impl Many {
    fn new(values: &[Vec<f64>], device: &Device, dtype: DType) -> Self {
        let mut values = values.iter().enumerate();
        let mut param = || {
            let (index, values) = values.next().unwrap();
            (ParamId::from(index as u64 + 100), values.clone())
        };
        macro_rules! of {
            ($shape:expr) => {{
                let (id, values) = param();
                let data = TensorData::new(values, $shape);
                Param::initialized(id, Tensor::from_data(data, (device, dtype)))
            }};
        }
        Self {
            one: vectors().into_iter().map(|length| of!([length])).collect(),
            two: MATRICES.map(|shape| of!(shape)).into(),
            three: vec![of!([2, 3, 4])],
            four: vec![of!([2, 2, 3, 5])],
        }
    }

    fn sizes() -> Vec<usize> {
        let mut sizes = vectors();
        sizes.extend(MATRICES.map(|shape| shape.iter().product::<usize>()));
        sizes.extend([24, 60]);
        sizes
    }
}

/// Returns numbers that are exact in f32.
fn random(rng: &mut ChaCha8Rng, sizes: &[usize], scale: f64) -> Vec<Vec<f64>> {
    let mut number = || f64::from(((rng.random::<f64>() * 2.0 - 1.0) * scale) as f32);
    (sizes.iter())
        .map(|&length| (0..length).map(|_| number()).collect())
        .collect()
}

/// Fills the gradients of the parameters in order, if present.
struct Fill<'a> {
    values: std::slice::Iter<'a, Option<Vec<f64>>>,
    gradients: GradientsParams,
    dtype: Option<DType>,
}

impl ModuleVisitor for Fill<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(values) = self.values.next().unwrap() {
            let value = param.val();
            let data = TensorData::new(values.clone(), value.shape());
            let dtype = self.dtype.unwrap_or(value.dtype());
            let device = value.device().without_autodiff();
            let gradient = Tensor::<D>::from_data(data, (&device, dtype));
            self.gradients.register(param.id, gradient);
        }
    }
}

fn gradients<M: Module>(
    model: &M,
    values: &[Option<Vec<f64>>],
    dtype: Option<DType>,
) -> GradientsParams {
    let mut fill = Fill {
        values: values.iter(),
        gradients: GradientsParams::new(),
        dtype,
    };
    model.visit(&mut fill);
    fill.gradients
}

struct Read(Vec<TensorData>);

impl ModuleVisitor for Read {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.val().into_data());
    }
}

/// Reads the parameters of a model, in order.
pub fn read<M: Module>(model: &M) -> Vec<TensorData> {
    let mut read = Read(Vec::new());
    model.visit(&mut read);
    read.0
}

fn assert_same(what: &str, a: &[TensorData], b: &[TensorData]) {
    let named = |all: &[TensorData]| -> Results {
        all.iter().map(|x| ("a parameter", x.clone())).collect()
    };
    assert_same_bits(what, named(a), named(b));
}

/// The definition for one parameter, in f64.
struct Exact {
    p: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
    time: i32,
}

impl Exact {
    fn new(p: Vec<f64>) -> Self {
        let zeros = vec![0.0; p.len()];
        Self {
            m: zeros.clone(),
            v: zeros,
            p,
            time: 0,
        }
    }
}

fn exact_step(
    config: &FusedAdamWConfig,
    rate: f64,
    parameters: &mut [Exact],
    gradients: &[Option<Vec<f64>>],
) -> f64 {
    let all = gradients.iter().flatten().flatten();
    let norm = all.map(|g| g * g).sum::<f64>().sqrt();
    let factor = match config.max_grad_norm {
        Some(limit) if norm > limit => limit / norm,
        _ => 1.0,
    };
    let [beta_1, beta_2] = [config.beta_1, config.beta_2];
    for (x, gradient) in parameters.iter_mut().zip(gradients) {
        let Some(gradient) = gradient else { continue };
        x.time += 1;
        for (i, g) in gradient.iter().enumerate() {
            let g = g * factor;
            x.m[i] = beta_1 * x.m[i] + (1.0 - beta_1) * g;
            x.v[i] = beta_2 * x.v[i] + (1.0 - beta_2) * g * g;
            let m = x.m[i] / (1.0 - beta_1.powi(x.time));
            let v = x.v[i] / (1.0 - beta_2.powi(x.time));
            x.p[i] *= 1.0 - rate * config.weight_decay;
            x.p[i] -= rate * m / (v.sqrt() + config.epsilon);
        }
    }
    norm
}

fn config() -> FusedAdamWConfig {
    FusedAdamWConfig::new()
        .with_beta_2(0.95)
        .with_weight_decay(0.1)
}

/// Gradient of each parameter, if any.
type StepGradients = Vec<Option<Vec<f64>>>;

/// Returns parameters, and gradients of some steps, which grow; every fifth parameter has none in every other step.
fn problem(steps: usize, seed: u64) -> (Vec<Vec<f64>>, Vec<StepGradients>) {
    let mut rng = seeded(seed);
    let sizes = Many::sizes();
    let values = random(&mut rng, &sizes, 1.0);
    let gradients = (0..steps).map(|step| {
        let scale = 0.001 * 10f64.powi(step as i32);
        let all = random(&mut rng, &sizes, scale).into_iter().enumerate();
        all.map(|(i, values)| (i % 5 != 3 || step % 2 == 0).then_some(values))
            .collect()
    });
    (values, gradients.collect())
}

fn rate(step: usize) -> f64 {
    0.01 * (step + 1) as f64
}

/// Returns the parameters after some steps of the definition, and the norms.
fn judged(
    config: &FusedAdamWConfig,
    values: impl Iterator<Item = Vec<f64>>,
    steps: &[StepGradients],
) -> (Vec<Exact>, Vec<f64>) {
    let mut judged: Vec<Exact> = values.map(Exact::new).collect();
    let steps = steps.iter().enumerate();
    let norm = |(step, values): (usize, &StepGradients)| {
        exact_step(config, rate(step), &mut judged, values)
    };
    let norms = steps.map(norm).collect();
    (judged, norms)
}

/// Returns the parameters after some steps of the optimizer, the norms, and its record.
fn stepped(
    config: &FusedAdamWConfig,
    mut model: Many,
    steps: &[StepGradients],
    of_gradients: Option<DType>,
) -> (Vec<TensorData>, Vec<f64>, Vec<u8>) {
    let mut optimizer = config.init();
    let mut norms = Vec::new();
    for (step, values) in steps.iter().enumerate() {
        let gradients = gradients(&model, values, of_gradients);
        let (next, norm) = optimizer.step(rate(step), model, gradients).unwrap();
        norms.push(norm.into_scalar::<f64>());
        model = next;
    }
    (read(&model), norms, optimizer.to_bytes().unwrap().to_vec())
}

/// Five steps with decay, with and without clipping.
pub fn adamw_equals_f64(devices: &[Device]) {
    let (values, steps) = problem(5, 1);
    for limit in [None, Some(1.0)] {
        let config = config().with_max_grad_norm(limit);
        let (judged, norms) = judged(&config, values.iter().cloned(), &steps);
        for (device, dtype, tolerance) in exact(devices) {
            let what = format!("{device:?}, {dtype:?}, {limit:?}");
            let model = Many::new(&values, device, dtype);
            let (got, got_norms, _) = stepped(&config, model, &steps, None);
            for (got, norm) in got_norms.iter().zip(&norms) {
                assert_near(&format!("{what}: norm"), &[got / norm], &[1.0], tolerance);
            }
            for (i, (got, judged)) in got.into_iter().zip(&judged).enumerate() {
                let what = format!("{what}: parameter {i}");
                assert_close(&what, got, &judged.p, tolerance);
            }
        }
    }
}

/// Half-precision parameters have f32 moments; gradients may have another dtype.
pub fn adamw_in_half_precision(devices: &[Device]) {
    let (values, steps) = problem(2, 2);
    let config = config().with_max_grad_norm(Some(0.5));
    for (device, half) in halves(devices) {
        let f32 = DType::F32;
        for (dtype, of_gradients) in [(half, Some(f32)), (half, None), (f32, Some(half))] {
            let model = Many::new(&values, device, dtype);
            let rounded = read(&model).into_iter().map(to_f64);
            let (judged, _) = judged(&config, rounded, &steps);
            let (got, ..) = stepped(&config, model, &steps, of_gradients);
            for (i, (got, judged)) in got.into_iter().zip(&judged).enumerate() {
                let what = format!("{device:?}, {dtype:?}, {of_gradients:?}: parameter {i}");
                assert_eq!(got.dtype(), dtype);
                assert_close(&what, got, &judged.p, 8e-3);
            }
        }
    }
}

/// Two runs give equal bits in parameters, norms and moments.
pub fn adamw_gives_the_same_bits(devices: &[Device]) {
    let (values, steps) = problem(3, 3);
    for device in devices {
        let run = || {
            let config = config().with_max_grad_norm(Some(0.1));
            let model = Many::new(&values, device, DType::F32);
            stepped(&config, model, &steps, None)
        };
        let (first, second) = (run(), run());
        assert_eq!((&first.1, &first.2), (&second.1, &second.2), "{device:?}");
        assert_same(&format!("{device:?}"), &first.0, &second.0);
    }
}

/// A clone keeps its values, and so do pending computations from them; the step itself is unaffected.
pub fn clones_keep_their_values(devices: &[Device]) {
    let (values, steps) = problem(2, 4);
    for device in devices {
        let run = |hold: bool| {
            let mut model = Many::new(&values, device, DType::F32);
            let mut optimizer = config().init();
            let mut held = Vec::new();
            for values in &steps {
                let before = hold.then(|| read(&model));
                let clone = hold.then(|| (model.clone(), optimizer.clone()));
                let pending = hold.then(|| model.two[1].val() * 2.0 + 1.0);
                let gradients = gradients(&model, values, None);
                model = optimizer.step(0.05, model, gradients).unwrap().0;
                held.extend(before.zip(clone).zip(pending));
            }
            for ((before, (clone, _)), pending) in held {
                assert_same(&format!("{device:?}"), &before, &read(&clone));
                // The matrix of 64 × 128.
                let matrix = to_f64(before[vectors().len() + 1].clone());
                let expected: Vec<f64> = matrix.iter().map(|x| x * 2.0 + 1.0).collect();
                assert_close("a pending reader", pending.into_data(), &expected, 1e-6);
            }
            read(&model)
        };
        assert_same(&format!("{device:?}"), &run(false), &run(true));
    }
}

fn burns(config: &FusedAdamWConfig) -> ModuleOptimizer {
    AdamWConfig::new()
        .with_beta_1(config.beta_1 as f32)
        .with_beta_2(config.beta_2 as f32)
        .with_epsilon(config.epsilon as f32)
        .with_weight_decay(config.weight_decay as f32)
        .init()
}

/// Burn's AdamW continues from our record, and ours from Burn's.
pub fn records_are_burns(devices: &[Device]) {
    let (values, steps) = problem(6, 5);
    let config = config();
    for device in devices {
        let ours = |model: Many, optimizer: &mut FusedAdamW, values: &[Option<Vec<f64>>]| {
            let gradients = gradients(&model, values, None);
            optimizer.step(0.01, model, gradients).unwrap().0
        };
        let theirs = |model: Many, optimizer: &mut ModuleOptimizer, values: &[Option<Vec<f64>>]| {
            let gradients = gradients(&model, values, None);
            optimizer.step(0.01, model, gradients)
        };
        let (early, late) = steps.split_at(3);
        // Burn's supports only autodiff devices.
        let autodiff = device.clone().autodiff();
        let new = || Many::new(&values, &autodiff, DType::F32);
        let (mut burn, mut expected) = (burns(&config), new());
        let (mut fused, mut continued) = (config.init(), new());
        for values in early {
            expected = theirs(expected, &mut burn, values);
            continued = ours(continued, &mut fused, values);
        }
        let mut taken_over = expected.clone();
        let bytes = burn.into_bytes().unwrap();
        let mut from_burn = config.init().from_bytes(bytes).unwrap();
        // A record that was loaded is saved unchanged if no step was taken.
        let bytes = from_burn.to_bytes().unwrap();
        let again = config.init().from_bytes(bytes).unwrap().to_bytes().unwrap();
        assert_eq!(again.to_vec(), from_burn.to_bytes().unwrap().to_vec());
        let mut to_burn = burns(&config)
            .from_bytes(fused.to_bytes().unwrap())
            .unwrap();
        for values in late {
            expected = theirs(expected, &mut burn, values);
            taken_over = ours(taken_over, &mut from_burn, values);
            continued = theirs(continued, &mut to_burn, values);
        }
        let expected = read(&expected);
        for (name, model) in [("from Burn's", taken_over), ("to Burn's", continued)] {
            for (got, expected) in read(&model).into_iter().zip(&expected) {
                let what = format!("{device:?}, {name}");
                assert_close(&what, got, &to_f64(expected.clone()), 1e-6);
            }
        }
    }
}

fn trained(device: &Device) -> (Linear, Vec<TensorData>) {
    let mut rng = seeded(6);
    let mut model = LinearConfig::new(6, 4).init(device);
    let mut number = || rng.random::<f32>();
    let weight: Vec<f32> = (0..24).map(|_| number()).collect();
    let x: Vec<f32> = (0..30).map(|_| number()).collect();
    model.weight = Param::initialized(
        ParamId::from(7),
        Tensor::from_data(TensorData::new(weight, [6, 4]), device).require_grad(),
    );
    let x = Tensor::<2>::from_data(TensorData::new(x, [5, 6]), device);
    model.bias = Some(Param::initialized(
        ParamId::from(8),
        Tensor::zeros([4], device),
    ));
    let mut optimizer = config().with_max_grad_norm(Some(0.1)).init();
    for _ in 0..3 {
        let loss = model.forward(x.clone()).square().mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.1, model, gradients).unwrap().0;
    }
    let data = read(&model);
    (model, data)
}

/// Training by autodiff: parameters keep their ids, `require_grad`, and the checkpointing of their device; constants stay unchanged.
pub fn parameters_keep_their_autodiff_state(devices: &[Device]) {
    for device in devices {
        let plain = device.clone().autodiff();
        let checkpointing = plain.clone().gradient_checkpointing();
        let runs = [&plain, &checkpointing].map(|device| {
            let (model, data) = trained(device);
            assert_eq!(model.weight.id, ParamId::from(7));
            assert!(model.weight.is_require_grad());
            let bias = model.bias.as_ref().unwrap();
            assert!(!bias.is_require_grad(), "a constant stays one");
            assert_eq!(to_f64(data[1].clone()), [0.0; 4]);
            let strategy = model.weight.val().gradient_checkpointing_strategy();
            assert_eq!(strategy, device.gradient_checkpointing_strategy());
            data
        });
        assert_same(&format!("{device:?}"), &runs[0], &runs[1]);
    }
}

/// Gradients are scaled by one factor; their norm. Small and zero gradients are unchanged.
pub fn clipping_equals_f64(devices: &[Device]) {
    let (values, steps) = problem(1, 8);
    for (device, dtype, tolerance) in exact(devices) {
        let model = Many::new(&values, device, dtype);
        let all = steps[0].iter().flatten().flatten();
        let exact = all.map(|g| g * g).sum::<f64>().sqrt();
        for limit in [exact / 3.0, exact * 3.0] {
            let gradients = gradients(&model, &steps[0], None);
            let norm = gradient_norm(&model, &gradients).unwrap();
            assert!((norm.into_scalar::<f64>() / exact - 1.0).abs() < tolerance);
            let (clipped, norm) = clip_gradients(&model, gradients, limit).unwrap();
            assert!((norm.into_scalar::<f64>() / exact - 1.0).abs() < tolerance);
            let factor = (limit / exact).min(1.0);
            let matrix = clipped.get::<2>(model.two[1].id).unwrap();
            let given = steps[0][vectors().len() + 1].as_ref().unwrap();
            let expected: Vec<f64> = given.iter().map(|g| g * factor * 1e3).collect();
            assert_close("clipped", (matrix * 1e3).into_data(), &expected, tolerance);
            assert_eq!(clipped.len(), steps[0].iter().flatten().count());
            // The clipped gradients have the limit as norm.
            let norm = gradient_norm(&model, &clipped)
                .unwrap()
                .into_scalar::<f64>();
            assert!((norm / (exact * factor) - 1.0).abs() < 2.0 * tolerance);
        }
        let zeros: Vec<_> = (values.iter()).map(|p| Some(vec![0.0; p.len()])).collect();
        let gradients = gradients(&model, &zeros, None);
        let (clipped, norm) = clip_gradients(&model, gradients, 1.0).unwrap();
        assert_eq!(norm.into_scalar::<f64>(), 0.0);
        let matrix = clipped.get::<2>(model.two[1].id).unwrap().into_data();
        assert!(to_f64(matrix).iter().all(|g| *g == 0.0));
    }
}

/// Gradients whose squares overflow have a finite norm, alone, next to small ones and together; gradients that are not finite do not.
pub fn clipping_of_large_gradients(devices: &[Device]) {
    let (values, steps) = problem(1, 9);
    let given: Vec<Vec<f64>> = (steps[0].iter())
        .map(|step| step.iter().flatten().map(|g| g * 1e3).collect())
        .collect();
    let matrix = vectors().len() + 1;
    for (device, dtype, tolerance) in exact(devices) {
        let model = Many::new(&values, device, dtype);
        // 2e17: no partial sum of 8,192 squares overflows.
        let scales: &[f64] = match dtype {
            DType::F64 => &[1e19, 1e153, 1e160, 1e300, 3e305],
            _ => &[1e16, 2e17, 1e18, 1e19, 1e25, 1e32, 3e35],
        };
        let both = |scale| [(scale, false), (scale, true)];
        for (scale, alone) in scales.iter().copied().flat_map(both) {
            let scaled = |(at, row): (usize, &Vec<f64>)| {
                let by = if alone && at != matrix { 1.0 } else { scale };
                Some(row.iter().map(|g| g * by).collect())
            };
            let gradients_of: StepGradients = given.iter().enumerate().map(scaled).collect();
            let all = gradients_of.iter().flatten().flatten();
            let exact = all.map(|g| (g / scale).powi(2)).sum::<f64>().sqrt() * scale;
            let what = format!("{device:?}, {dtype:?}, {scale:e}, alone: {alone}");
            let limit = 100.0;
            let gradients = gradients(&model, &gradients_of, None);
            let (clipped, norm) = clip_gradients(&model, gradients, limit).unwrap();
            let norm = norm.into_scalar::<f64>();
            assert_near(&what, &[norm / exact], &[1.0], 2.0 * tolerance);
            let got = clipped.get::<2>(model.two[1].id).unwrap().into_data();
            let row = gradients_of[matrix].as_ref().unwrap();
            let expected: Vec<f64> = row.iter().map(|g| g * (limit / exact)).collect();
            assert_close(&what, got, &expected, 10.0 * tolerance);
            let norm = gradient_norm(&model, &clipped).unwrap();
            let norm = norm.into_scalar::<f64>() / limit;
            assert_near(&what, &[norm], &[1.0], 10.0 * tolerance);
        }
        for (number, large) in [
            (f64::INFINITY, 1.0),
            (f64::NEG_INFINITY, 1e30),
            (f64::NAN, 1.0),
            (f64::NAN, 1e30),
        ] {
            let row = |row: &Vec<f64>| Some(row.iter().map(|g| g * large).collect());
            let mut gradients_of: StepGradients = given.iter().map(row).collect();
            gradients_of[matrix].as_mut().unwrap()[5] = number;
            let gradients = gradients(&model, &gradients_of, None);
            let norm = gradient_norm(&model, &gradients).unwrap();
            let norm = norm.into_scalar::<f64>();
            let is_right = match number.is_nan() {
                true => norm.is_nan(),
                false => norm == f64::INFINITY,
            };
            assert!(is_right, "{device:?}, {dtype:?}, {number}: {norm}");
        }
    }
}

/// Tensors that cannot be overwritten are not, and a model without gradients is unchanged.
pub fn steps_without_gradients(devices: &[Device]) {
    for device in devices {
        let model = LinearConfig::new(3, 2).init(&device.clone().autodiff());
        let before = read(&model);
        let mut optimizer = config().with_max_grad_norm(Some(1.0)).init();
        let step = optimizer.step(0.1, model, GradientsParams::new());
        let (model, norm) = step.unwrap();
        assert_eq!(norm.into_scalar::<f32>(), 0.0);
        assert_same("without gradients", &before, &read(&model));
        // A transposed gradient.
        let gradient = Tensor::<2>::random([2, 3], Distribution::Default, device);
        let data = gradient.clone().transpose().into_data();
        let run = |gradient: Tensor<2>| {
            let mut gradients = GradientsParams::new();
            gradients.register(model.weight.id, gradient);
            let mut optimizer = config().init();
            let (model, _) = optimizer.step(0.1, model.clone(), gradients).unwrap();
            read(&model)
        };
        let strided = run(gradient.transpose());
        let plain = run(Tensor::from_data(data, device));
        assert_eq!(strided[0].as_bytes(), plain[0].as_bytes());
    }
}

/// Vectors of any lengths and offsets are concatenated bit for bit.
pub fn concat_is_exact(devices: &[Device]) {
    let cases = exact(devices).map(|(device, dtype, _)| (device, dtype));
    for (device, dtype) in cases.chain(halves(devices)) {
        let mut rng = ChaCha8Rng::seed_from_u64(31);
        let values = random(&mut rng, &vectors(), 4.0);
        let tensors = values.iter().enumerate().map(|(index, values)| {
            // Every third begins at an offset in its buffer.
            let skipped = if index % 3 == 1 { values.len() / 3 } else { 0 };
            let data = TensorData::new(values.clone(), [values.len()]);
            let tensor = Tensor::<1>::from_data(data, (device, dtype));
            match skipped {
                0 => tensor,
                skipped => tensor.narrow(0, skipped, values.len() - skipped),
            }
        });
        let tensors: Vec<_> = tensors.collect();
        let expected: Vec<f64> = (tensors.iter())
            .flat_map(|tensor| to_f64(tensor.to_data()))
            .collect();
        let all = concat(tensors).unwrap();
        assert_eq!((all.dims(), all.dtype()), ([expected.len()], dtype));
        assert!(to_f64(all.into_data()) == expected, "{device:?} {dtype:?}");
    }
}

/// The plan tells whether kernels run.
pub fn optimizer_plans_print(devices: &[Device]) {
    let mut ran = 0;
    for device in devices {
        let model = LinearConfig::new(3, 2).init(device);
        let plan = config().init().explain(&model).unwrap();
        let kernels = is_cube(device);
        assert_eq!(plan.is_kernels(), kernels, "{plan}");
        let has_reason = matches!(
            &plan,
            OpPlan::Primitives {
                reason: Some(_),
                ..
            }
        );
        assert!(!has_reason, "{plan}");
        ran += 1;
    }
    assert_ran("optimizer_plans_print", ran);
}
