//! The cross entropy of a product with targets and its gradients, against f64.

use burn_fused_ops::{CrossEntropyOptions, Reduction, linear_cross_entropy};

use crate::prelude::*;
use crate::training::case::*;

/// A call; `grads` are the gradients with respect to the positions' losses if these are not reduced.
struct Problem {
    sizes: [usize; 3],
    x: Vec<f64>,
    weight: Vec<f64>,
    targets: Vec<i64>,
    grads: Vec<f64>,
    options: CrossEntropyOptions,
}

impl Problem {
    fn new(sizes: [usize; 3], options: CrossEntropyOptions) -> Self {
        let [positions, width, vocab] = sizes;
        let mut targets = drawn(&mut seeded(vocab as u64), positions, 0..vocab as i64);
        if let Some(ignored) = options.ignore_index {
            let some = targets.iter_mut().step_by(3);
            some.for_each(|target| *target = ignored);
        }
        Self {
            sizes,
            x: uniform(&mut seeded(1), positions * width, 2.0),
            weight: numbers(2, width * vocab),
            targets,
            grads: numbers(3, positions),
            options,
        }
    }

    /// Returns the factor of each position's loss in the total loss.
    fn factors(&self, by_loss: &[f64]) -> Vec<f64> {
        let counts = |target: &i64| self.options.ignore_index != Some(*target);
        let counted = self.targets.iter().filter(|target| counts(target)).count();
        let factors = self.targets.iter().enumerate().map(|(position, target)| {
            match self.options.reduction {
                _ if !counts(target) => 0.0,
                Reduction::Sum => by_loss[0],
                Reduction::Mean => by_loss[0] / counted as f64,
                Reduction::None => by_loss[position],
            }
        });
        factors.collect()
    }

    /// Returns the loss, dx and dW.
    fn solve(&self, x: &[f64], weight: &[f64], by_loss: &[f64]) -> Vec<Vec<f64>> {
        let [positions, width, vocab] = self.sizes;
        let smoothing = self.options.label_smoothing;
        let (of_x, of_weight) = (|r, k| x[r * width + k], |k, c| weight[k * vocab + c]);
        let mut dz = product(self.sizes, of_x, of_weight);
        let (factors, mut losses) = (self.factors(by_loss), vec![0.0; positions]);
        let rows = dz.chunks_mut(vocab).zip(&self.targets).enumerate();
        for (position, (row, &target)) in rows {
            if self.options.ignore_index == Some(target) {
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
                *z = ((*z - lse).exp() - label(column)) * factors[position];
            }
        }
        let by_logit = |r: usize, c: usize| dz[r * vocab + c];
        let back = |k: usize, c: usize| weight[c * vocab + k];
        let dx = product([positions, vocab, width], by_logit, back);
        let dw = product([width, positions, vocab], |i, r| x[r * width + i], by_logit);
        let loss = match self.options.reduction {
            Reduction::None => losses,
            _ => vec![dot(&losses, &self.factors(&[1.0]))],
        };
        vec![loss, dx, dw]
    }

    /// Makes a case, with dtypes of x, the weight and the loss.
    fn case(&self) -> Case<'_> {
        let [positions, width, vocab] = self.sizes;
        let call = |x: &mut Tensors| {
            let (x, weight) = (x.take::<2>(), x.take());
            let targets = self.targets(&x.device());
            let loss = linear_cross_entropy(x, weight, targets, &self.options);
            vec![loss.unwrap().into()]
        };
        let judge = |x: &[Vec<f64>], grads: &[Vec<f64>]| self.solve(&x[0], &x[1], &grads[0]);
        // Scales gradients of a mean to the size of those of a sum; undone later.
        let by_loss = match self.options.reduction {
            Reduction::Sum => vec![4.0],
            Reduction::Mean => vec![4.0 * positions.max(1) as f64],
            Reduction::None => self.grads.clone(),
        };
        let options = &self.options;
        let what = format!("{positions} positions of {width} to {vocab}, {options:?}");
        Case::new(what, call, judge)
            .input("x", 0, &[positions, width], self.x.clone())
            .input("W", 1, &[width, vocab], self.weight.clone())
            .result("loss", 2, &[by_loss.len()], by_loss)
    }

    fn targets(&self, device: &Device) -> Tensor<1, Int> {
        let targets = TensorData::new(self.targets.clone(), [self.sizes[0]]);
        Tensor::from_data(targets, device)
    }

    fn check(&self, device: &Device, dtypes: [DType; 3], tolerances: [f64; 3]) {
        let case = self.case();
        // Relative to the gradients with respect to the losses.
        let scale = match self.options.reduction {
            Reduction::None => 1.0 / largest(&self.grads).max(f64::MIN_POSITIVE),
            _ => 0.25,
        };
        let compared = case.compared(device, &dtypes).into_iter().enumerate();
        for (index, (what, got, expected)) in compared {
            let scale = if index == 0 { 1.0 } else { scale };
            let scaled = |x: Vec<f64>| x.iter().map(|x| x * scale).collect::<Vec<f64>>();
            let (got, expected) = (scaled(to_f64(got)), scaled(expected));
            let count = got.len();
            let got = TensorData::new(got, [count]);
            assert_close(&what, got, &expected, tolerances[index]);
        }
    }
}

/// Positions, width and vocabulary; reduction; options. In chunks: of rows that do not divide the positions, of one row, of rows in groups. In some
/// cases all targets are ignored.
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

/// Vocabularies from 1 on, in registers and not, in many kinds of chunks, with ignored targets; two runs give equal bits.
pub fn cross_entropy_equals_f64(devices: &[Device]) {
    for problem in some_of(problems(), 2) {
        for (device, dtype, tolerance) in exact(devices) {
            let tolerance = product_tolerance(device, dtype, tolerance);
            problem.check(device, [dtype; 3], [tolerance; 3]);
        }
        let case = problem.case();
        case.gives_the_same_bits(devices, 10.0 * products_within(devices));
    }
}

/// Logits of ±10,000, whose exponentials overflow in every dtype.
pub fn cross_entropy_of_large_logits(devices: &[Device]) {
    for vocab in [3, 300, 128_000] {
        let mut problem = Problem::new([6, 1, vocab], CrossEntropyOptions::default());
        problem.x = vec![1.0, -1.0, 1.0, 0.5, 0.0, 1.0];
        // Exact in tf32, too.
        let logit = |column| [10_000.0, -10_000.0, 9_992.0][column % 3];
        problem.weight = (0..vocab).map(logit).collect();
        for (device, dtype, tolerance) in exact(devices) {
            let tolerance = product_tolerance(device, dtype, tolerance);
            // Sums over the vocabulary of elements as large as the logits.
            let sums = 100.0 * tolerance;
            problem.check(device, [dtype; 3], [tolerance, sums, sums]);
        }
    }
}

/// Makes a problem of unreduced losses, with an ignored target, in chunks.
fn of_positions() -> Problem {
    let options = CrossEntropyOptions::default().reduction(Reduction::None);
    let options = options.ignore_index(3).chunk_elements(1 << 14);
    Problem::new([300, 16, 256], options)
}

/// Gradients with respect to the losses that are out of the range of f16 reach the weight, in f32.
pub fn cross_entropy_of_positions_by_any_gradients(devices: &[Device]) {
    for scale in [1e-9, 1e6] {
        let mut problem = of_positions();
        problem.grads.iter_mut().for_each(|grad| *grad *= scale);
        for (device, half) in halves(devices) {
            let rounding = if half == DType::BF16 { 1e-2 } else { 2e-3 };
            let case = problem.case();
            let dtypes = [half, DType::F32, DType::F32];
            let (what, got, expected) = case.compared(device, &dtypes).remove(2);
            let by_scale = |x: &f64| x / scale;
            let got: Vec<f64> = to_f64(got).iter().map(by_scale).collect();
            let got = TensorData::new(got, [16, 256]);
            let expected: Vec<f64> = expected.iter().map(by_scale).collect();
            let what = format!("{what}, gradients of {scale:e}");
            assert_close(&what, got, &expected, rounding);
        }
    }
}

/// Logits are f32, and gradients with respect to them are rounded once. The weight is f32 or has the dtype of x.
pub fn cross_entropy_in_half_precision(devices: &[Device]) {
    let plain = CrossEntropyOptions::default;
    let in_chunks = plain().ignore_index(3).chunk_elements(1 << 14);
    let some = [
        Problem::new([300, 16, 256], in_chunks),
        Problem::new([9, 8, 40_000], plain().label_smoothing(0.1)),
        of_positions(),
    ];
    for mut problem in some {
        for (device, half) in halves(devices) {
            let rounding = if half == DType::BF16 { 1e-2 } else { 2e-3 };
            round_to(&mut problem.weight, half);
            for weight in [DType::F32, half] {
                let tolerances = [1e-5, rounding, rounding];
                problem.check(device, [half, weight, DType::F32], tolerances);
            }
        }
    }
}

/// Only tracked inputs get a gradient; a loss without gradients is the same, also by batch and sequence.
pub fn cross_entropy_differentiates_what_is_tracked(devices: &[Device]) {
    let problem = Problem::new([40, 6, 30], CrossEntropyOptions::default());
    let case = problem.case();
    case.has_constants(devices, products_within(devices));
    for device in devices {
        let x = tensor::<3>(&problem.x, [2, 20, 6], device, DType::F32);
        let weight = tensor(&problem.weight, [6, 30], device, DType::F32);
        let targets = problem.targets(device).reshape([2, 20]);
        let loss = linear_cross_entropy(x, weight, targets, &problem.options).unwrap();
        let expected = case.numbers(&[DType::F32; 3], case.judge()).remove(0);
        let (what, loss) = ("by batch and sequence", loss.into_data());
        let tolerance = product_tolerance(device, DType::F32, 1e-5);
        assert_close(what, loss, &expected, tolerance);
    }
}

/// Without a check the loss is NaN, and so are the gradients of that row alone.
pub fn cross_entropy_of_targets_out_of_range(devices: &[Device]) {
    let targets = [-1, 30, i64::from(i32::MAX)].into_iter();
    let both = |target| [(target, Reduction::Mean), (target, Reduction::None)];
    for (target, reduction) in targets.flat_map(both) {
        for chunk in [1 << 24, 100] {
            let options = CrossEntropyOptions::default()
                .reduction(reduction)
                .check_targets(false)
                .chunk_elements(chunk);
            let mut problem = Problem::new([40, 6, 30], options);
            problem.targets[5] = target;
            for device in devices {
                let found = problem.case().run_all(device, &[DType::F32; 3]);
                let [loss, dx, _] = <[_; 3]>::try_from(found).unwrap().map(Option::unwrap);
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
