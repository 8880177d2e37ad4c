//! The cross entropy of a product with targets and its gradients, against f64.

use burn_fused_ops::{CrossEntropyOptions, Reduction, linear_cross_entropy};

use crate::prelude::*;

struct Problem {
    positions: usize,
    width: usize,
    vocab: usize,
    x: Vec<f64>,
    weight: Vec<f64>,
    targets: Vec<i64>,
    /// The gradients by the losses of positions, where they are not reduced.
    grads: Vec<f64>,
    options: CrossEntropyOptions,
}

impl Problem {
    fn new([positions, width, vocab]: [usize; 3], options: CrossEntropyOptions) -> Self {
        let mut rng = seeded(vocab as u64);
        let mut targets: Vec<i64> = (0..positions)
            .map(|_| rng.random_range(0..vocab as i64))
            .collect();
        if let Some(ignored) = options.ignore_index {
            for target in targets.iter_mut().step_by(3) {
                *target = ignored;
            }
        }
        Self {
            positions,
            width,
            vocab,
            x: numbers(1, positions * width)
                .iter()
                .map(|x| x * 2.0)
                .collect(),
            weight: numbers(2, width * vocab),
            targets,
            grads: numbers(3, positions),
            options,
        }
    }

    /// The loss, dx and dW, for a gradient of 1 by the loss, or those of positions.
    fn expected(&self) -> [Vec<f64>; 3] {
        let (positions, width, vocab) = (self.positions, self.width, self.vocab);
        let (x, weight) = (&self.x, &self.weight);
        let smoothing = self.options.label_smoothing;
        let mut dz = product(
            [positions, width, vocab],
            |r, k| x[r * width + k],
            |k, c| weight[k * vocab + c],
        );
        let counts = |target: i64| self.options.ignore_index != Some(target);
        let counted = self
            .targets
            .iter()
            .filter(|&&target| counts(target))
            .count();
        let is_reduced = self.options.reduction != Reduction::None;
        let factor_of = |position: usize| match self.options.reduction {
            Reduction::Sum => 1.0,
            Reduction::Mean if counted == 0 => 0.0,
            Reduction::Mean => 1.0 / counted as f64,
            Reduction::None => self.grads[position],
        };
        let mut losses = vec![0.0; positions];
        let rows = dz.chunks_mut(vocab).zip(&self.targets).enumerate();
        for (position, (row, &target)) in rows {
            let factor = factor_of(position);
            if !counts(target) {
                row.fill(0.0);
                continue;
            }
            let most = row.iter().cloned().fold(f64::MIN, f64::max);
            let sum: f64 = row.iter().map(|z| (z - most).exp()).sum();
            let lse = most + sum.ln();
            let label = |column: usize| {
                let one = if column as i64 == target { 1.0 } else { 0.0 };
                (1.0 - smoothing) * one + smoothing / vocab as f64
            };
            for (column, z) in row.iter_mut().enumerate() {
                losses[position] += label(column) * (lse - *z);
                *z = ((*z - lse).exp() - label(column)) * factor;
            }
        }
        let dx = product(
            [positions, vocab, width],
            |r, k| dz[r * vocab + k],
            |k, c| weight[c * vocab + k],
        );
        let dw = product(
            [width, positions, vocab],
            |i, r| x[r * width + i],
            |r, c| dz[r * vocab + c],
        );
        let loss = match is_reduced {
            true => {
                let of_position = |(position, loss)| loss * factor_of(position);
                vec![losses.into_iter().enumerate().map(of_position).sum()]
            }
            false => losses,
        };
        [loss, dx, dw]
    }

    fn targets(&self, device: &Device) -> Tensor<1, Int> {
        Tensor::from_data(
            TensorData::new(self.targets.clone(), [self.positions]),
            device,
        )
    }

    fn run(&self, device: &Device, dtypes: [DType; 2]) -> [TensorData; 3] {
        let x = tensor(&self.x, [self.positions, self.width], device, dtypes[0]).require_grad();
        let shape = [self.width, self.vocab];
        let weight = tensor(&self.weight, shape, device, dtypes[1]).require_grad();
        let targets = self.targets(device);
        let loss = linear_cross_entropy(x.clone(), weight.clone(), targets, &self.options).unwrap();
        let by_loss = match self.options.reduction {
            Reduction::None => {
                assert_eq!(loss.dims(), [self.positions]);
                let grads = tensor(&self.grads, [self.positions], device, loss.dtype());
                (loss.clone() * grads).sum()
            }
            _ => {
                assert_eq!(loss.dims(), [1]);
                loss.clone()
            }
        };
        // A gradient by the loss that is not 1, which has to come out again.
        let grads = (by_loss * 4.0).backward();
        let [dx, dw] = [x.grad(&grads), weight.grad(&grads)].map(|grad| grad.unwrap() / 4.0);
        assert_eq!([dx.dtype(), dw.dtype()], dtypes);
        [loss.into_data(), dx.into_data(), dw.into_data()]
    }

    fn check(&self, what: &str, got: [TensorData; 3], tolerances: [f64; 3]) {
        let names = ["loss", "dx", "dW"].into_iter().zip(tolerances);
        // Relative to what the gradients of a sum are: those of a mean are smaller.
        let scale = match self.options.reduction {
            Reduction::Sum => 1.0,
            Reduction::Mean => self.positions.max(1) as f64,
            Reduction::None => 1.0 / largest(&self.grads).max(f64::MIN_POSITIVE),
        };
        let all = got.into_iter().zip(self.expected()).zip(names);
        for (index, ((got, expected), (name, tolerance))) in all.enumerate() {
            let what = format!(
                "{what}, {} positions of {} to {}, {:?}: {name}",
                self.positions, self.width, self.vocab, self.options
            );
            let scale = if index == 0 { 1.0 } else { scale };
            let scaled = |values: Vec<f64>| values.iter().map(|x| x * scale).collect::<Vec<f64>>();
            let shape = got.shape().clone();
            let got = TensorData::new(scaled(to_f64(got)), shape);
            assert_close(&what, got, &scaled(expected), tolerance);
        }
    }
}

/// Positions, width and vocabulary; what becomes of the losses; and options. In chunks: of rows that do not divide the positions, of one row, of rows in
/// groups. In some nothing counts.
const TABLE: &str = "
    5 3 1       | none |
    130 12 1000 | none | label_smoothing 0.2
    9 8 40000   | none | ignore_index -1
    301 16 100  | none | ignore_index -1, chunk_elements 4000
    7 5 1000    | none | chunk_elements 10
    0 4 12      | none |
    1 4 12      | none | ignore_index -1
    6 4 12      | none | no gradients
    5 3 1       | mean |
    7 1 2       | sum  | ignore_index -100
    300 33 7    | mean | ignore_index 3
    300 16 256  | mean | label_smoothing 0.1
    130 12 1000 | sum  | label_smoothing 0.2, ignore_index -1
    9 8 40000   | mean | ignore_index -1
    3 4 50257   | sum  |
    301 16 100  | mean | ignore_index -1, chunk_elements 4000
    7 5 1000    | mean | chunk_elements 10
    5120 4 12   | sum  | chunk_elements 65536
    0 4 12      | mean |
    0 4 12      | sum  |
    1 4 12      | mean | ignore_index -1
";

fn problems() -> Vec<Problem> {
    let problem = |[sizes, reduction, rest]: [&'static str; 3]| {
        let mut options = CrossEntropyOptions::default().reduction(match reduction {
            "mean" => Reduction::Mean,
            "sum" => Reduction::Sum,
            _ => Reduction::None,
        });
        let mut has_gradients = true;
        for (word, number) in settings(rest) {
            options = match word {
                "label_smoothing" => options.label_smoothing(one(number)),
                "ignore_index" => options.ignore_index(one(number)),
                "chunk_elements" => options.chunk_elements(one(number)),
                _ => {
                    has_gradients = false;
                    options
                }
            };
        }
        let mut problem = Problem::new(all(sizes), options);
        if !has_gradients {
            problem.grads.fill(0.0);
        }
        problem
    };
    rows(TABLE).into_iter().map(problem).collect()
}

/// Vocabularies from 1 on, in registers and not, in chunks of all kinds, with ignored targets; the same bits twice.
pub fn cross_entropy_equals_f64(devices: &[Device]) {
    for problem in problems() {
        for (device, dtype, tolerance) in exact(devices) {
            let tolerance = product_tolerance(device, dtype, tolerance);
            let tracked = device.clone().autodiff();
            let got = problem.run(&tracked, [dtype; 2]);
            assert_eq!(
                got,
                problem.run(&tracked, [dtype; 2]),
                "the same bits twice"
            );
            let checkpointing = tracked.gradient_checkpointing();
            assert_eq!(got, problem.run(&checkpointing, [dtype; 2]));
            problem.check(&format!("{device:?}, {dtype:?}"), got, [tolerance; 3]);
        }
    }
}

/// Logits of ±10,000, whose exponentials no dtype has.
pub fn cross_entropy_of_large_logits(devices: &[Device]) {
    for vocab in [3, 300, 128_000] {
        let mut problem = Problem::new([6, 1, vocab], CrossEntropyOptions::default());
        problem.x = vec![1.0, -1.0, 1.0, 0.5, 0.0, 1.0];
        // Exact in tf32, too.
        problem.weight = (0..vocab)
            .map(|column| [10_000.0, -10_000.0, 9_992.0][column % 3])
            .collect();
        for device in devices {
            let tracked = device.clone().autodiff();
            for (dtype, tolerance) in exact_dtypes(device) {
                let tolerance = product_tolerance(device, dtype, tolerance);
                // Sums over the vocabulary of numbers as large as the logits.
                let sums = 100.0 * tolerance;
                let got = problem.run(&tracked, [dtype; 2]);
                problem.check("large logits", got, [tolerance, sums, sums]);
            }
        }
    }
}

/// Losses of positions, with a target that is ignored, in chunks.
fn of_positions() -> Problem {
    let options = CrossEntropyOptions::default().reduction(Reduction::None);
    let options = options.ignore_index(3).chunk_elements(1 << 14);
    Problem::new([300, 16, 256], options)
}

/// Gradients by losses of positions that no f16 is reach the weight, in f32.
pub fn cross_entropy_of_positions_by_any_gradients(devices: &[Device]) {
    for scale in [1e-9, 1e6] {
        let mut problem = of_positions();
        problem.grads.iter_mut().for_each(|grad| *grad *= scale);
        for (device, half) in halves(devices) {
            let rounding = if half == DType::BF16 { 1e-2 } else { 2e-3 };
            round_to(&mut problem.x, half);
            round_to(&mut problem.weight, half);
            let device = device.clone().autodiff();
            let [_, _, dw] = problem.run(&device, [half, DType::F32]);
            let [_, _, expected] = problem.expected();
            let by_scale = |x: &f64| x / scale;
            let got: Vec<f64> = to_f64(dw).iter().map(by_scale).collect();
            let got = TensorData::new(got, [problem.width, problem.vocab]);
            let expected: Vec<f64> = expected.iter().map(by_scale).collect();
            let what = format!("{device:?}, {half:?}, gradients of {scale:e}");
            assert_close(&what, got, &expected, rounding);
        }
    }
}

/// Logits are f32 and gradients by them are rounded once. The weight is f32 or as x.
pub fn cross_entropy_in_half_precision(devices: &[Device]) {
    let plain = CrossEntropyOptions::default;
    let some = [
        Problem::new(
            [300, 16, 256],
            plain().ignore_index(3).chunk_elements(1 << 14),
        ),
        Problem::new([9, 8, 40_000], plain().label_smoothing(0.1)),
        of_positions(),
    ];
    for mut problem in some {
        for (device, half) in halves(devices) {
            let rounding = if half == DType::BF16 { 1e-2 } else { 2e-3 };
            round_to(&mut problem.x, half);
            round_to(&mut problem.weight, half);
            let device = device.clone().autodiff();
            let what = format!("{device:?}, {half:?}");
            let got = problem.run(&device, [half, DType::F32]);
            problem.check(&what, got, [1e-5, rounding, rounding]);
            let got = problem.run(&device, [half; 2]);
            problem.check(&what, got, [1e-5, rounding, rounding]);
        }
    }
}

/// Only what is tracked gets a gradient, and a loss without gradients is the same.
pub fn cross_entropy_differentiates_what_is_tracked(devices: &[Device]) {
    let options = CrossEntropyOptions::default();
    let problem = Problem::new([40, 6, 30], options.clone());
    let expected = problem.expected();
    for plain in devices {
        let tolerance = product_tolerance(plain, DType::F32, 1e-5);
        let device = &plain.clone().autodiff();
        let run = |device: &Device, tracked: [bool; 2]| {
            let x = tensor(&problem.x, [40, 6], device, DType::F32);
            let weight = tensor(&problem.weight, [6, 30], device, DType::F32);
            let x = x.set_require_grad(tracked[0]);
            let weight = weight.set_require_grad(tracked[1]);
            // By batch and sequence, too.
            let loss = linear_cross_entropy(
                x.clone().reshape([2, 20, 6]),
                weight.clone(),
                problem.targets(device).reshape([2, 20]),
                &options,
            )
            .unwrap();
            assert_close("loss", loss.clone().into_data(), &expected[0], tolerance);
            (loss, x, weight)
        };
        for tracked in [[true, false], [false, true]] {
            let (loss, x, weight) = run(device, tracked);
            let grads = loss.backward();
            for (index, leaf) in [x, weight].iter().enumerate() {
                let grad = leaf.grad(&grads);
                assert_eq!(grad.is_some(), tracked[index]);
                if let Some(grad) = grad {
                    let expected = &expected[index + 1];
                    assert_close("tracked", grad.into_data(), expected, tolerance);
                }
            }
        }
        let (loss, ..) = run(plain, [false, false]);
        assert!(!loss.device().is_autodiff());
    }
}

/// Without a check the loss is NaN, and so are the gradients of that row alone.
pub fn cross_entropy_of_targets_out_of_range(devices: &[Device]) {
    for (target, reduction) in [-1, 30, i64::from(i32::MAX)]
        .into_iter()
        .flat_map(|target| [(target, Reduction::Mean), (target, Reduction::None)])
    {
        for chunk in [1 << 24, 100] {
            let options = CrossEntropyOptions::default()
                .reduction(reduction)
                .check_targets(false)
                .chunk_elements(chunk);
            let mut problem = Problem::new([40, 6, 30], options);
            problem.targets[5] = target;
            for device in devices {
                let tracked = device.clone().autodiff();
                let [loss, dx, _] = problem.run(&tracked, [DType::F32; 2]);
                for (position, loss) in to_f64(loss).into_iter().enumerate() {
                    let is_nan = reduction == Reduction::Mean || position == 5;
                    assert_eq!(loss.is_nan(), is_nan, "{device:?}, {target}, {position}");
                }
                for (row, dx) in to_f64(dx).chunks(6).enumerate() {
                    let is_nan = dx.iter().all(|x| x.is_nan());
                    assert_eq!(is_nan, row == 5, "{device:?}, {target}, row {row}");
                }
            }
        }
    }
}
