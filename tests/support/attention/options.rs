//! Options of a call, against f64: every output and every gradient.

use burn_blocksparse::internal::runs_kernels;

use crate::attention::cases::{Case, cases, per_batch, table};
use crate::prelude::*;

const MODES: [WeightsMode; 2] = [WeightsMode::Recompute, WeightsMode::Store];

/// Cases of a check.
#[derive(Clone, Copy)]
enum Cases {
    All,
    /// All on devices with kernels, and a third where Burn's operations run, which take long.
    AllOfKernels,
    /// A third, for combinations of options that are checked on all cases.
    Third,
}

impl Cases {
    fn has(self, index: usize) -> bool {
        match self {
            Cases::All | Cases::AllOfKernels => true,
            // Rows without keys, grouped heads and a pattern tiled by residue class are among these.
            Cases::Third => index % 3 == 1,
        }
    }

    /// Returns whether a further device also runs a case. CPU backends run the same operations of Burn, so of all cases these are two sevenths, each
    /// of which meets every variant.
    fn has_beside(self, index: usize) -> bool {
        match self {
            Cases::All | Cases::AllOfKernels => index % 7 < 2,
            Cases::Third => self.has(index),
        }
    }

    fn has_on(self, index: usize, device: &Device) -> bool {
        match self {
            Cases::AllOfKernels => Cases::Third.has(index) || runs_kernels(device),
            Cases::All | Cases::Third => true,
        }
    }
}

/// Checks cases in both modes, with problems modified by `change`.
fn check_cases(
    devices: &[Device],
    name: &str,
    cases: Cases,
    change: impl Fn(usize, Problem) -> Problem,
) {
    let mut ran = 0;
    for (index, case) in table().iter().filter(|(index, _)| cases.has(*index)) {
        let seed = 4000 + *index as u64;
        let problem = change(*index, case.problem(seed).with_grad_lse(seed));
        let count = match cases.has_beside(*index) {
            true => devices.len(),
            false => 1,
        };
        let devices = devices.iter().take(count);
        let devices = devices.filter(|device| cases.has_on(*index, device));
        for (device, mode) in devices.flat_map(|d| MODES.map(|mode| (d, mode))) {
            let what = format!("{}, {name}, {mode:?}", case.name);
            let call = Call::new(what, &problem, case.layout());
            call.weights(mode).check(device);
            ran += 1;
        }
    }
    assert_ran(name, ran);
}

/// The gradient through lse, together with the output's.
pub fn lse_gradients_equal_f64(devices: &[Device]) {
    check_cases(devices, "loss of lse", Cases::All, |_, problem| problem);
}

/// A loss of lse alone.
pub fn lse_alone_equals_f64(devices: &[Device]) {
    for (index, case) in table().iter().filter(|(index, _)| Cases::Third.has(*index)) {
        let seed = 5000 + *index as u64;
        let mut problem = case.problem(seed).with_grad_lse(seed);
        problem.grad_out.fill(0.0);
        let what = format!("{}, loss of lse alone", case.name);
        let mut call = Call::new(what, &problem, case.layout());
        call.use_out = false;
        devices.iter().for_each(|device| call.check(device));
    }
}

pub fn sinks_equal_f64(devices: &[Device]) {
    check_cases(devices, "sinks", Cases::Third, |_, problem| {
        problem.with_sinks(7)
    });
}

/// Returns out, lse and weights of a call.
pub fn with_weights(
    problem: &Problem,
    layout: &BlockLayout,
    device: &Device,
    dtype: DType,
) -> Results {
    let [q, k, v, _] = inputs(problem, device, dtype);
    let call = call_of([&q, &k, &v], layout, &problem.asked());
    let call = call.tensors(tensors(problem, device, dtype));
    let output = call.lse().weights().run().unwrap();
    let weights = output.weights.unwrap().to_dense();
    let mut results = outputs((output.out, output.lse.unwrap()));
    results.push(("weights", weights.into_data()));
    results
}

/// Weights of calls with all options: after biases, before dropout; with sinks they sum to less than 1.
pub fn weights_with_options_equal_f64(devices: &[Device]) {
    for (index, case) in table().iter().filter(|(index, _)| Cases::Third.has(*index)) {
        let problem = everything(*index, case.problem(5200 + *index as u64));
        let answer = problem.solve();
        for (device, dtype, tolerance) in exact(devices) {
            let got = with_weights(&problem, &case.layout(), device, dtype);
            let what = format!("{}, {device:?}, {dtype:?}", case.name);
            answer.assert(&what, got, &[Near::Tensor(tolerance)]);
        }
    }
}

/// Batch entries that keep different numbers of blocks, the last of them ragged.
pub fn weights_with_sinks_per_batch(devices: &[Device]) {
    let sizes = Sizes::new([2, 4, 2], [37, 37], [8, 8]);
    let (layout, problem) = per_batch(&[Pattern::local(9), Pattern::causal()], sizes, 8, 31);
    let problem = problem.with_sinks(32);
    let answer = problem.solve();
    for (device, dtype, tolerance) in exact(devices) {
        let got = with_weights(&problem, &layout, device, dtype);
        let what = format!("layouts per batch entry, {device:?}, {dtype:?}");
        answer.assert(&what, got, &[Near::Tensor(tolerance)]);
    }
}

pub fn alibi_equals_f64(devices: &[Device]) {
    check_cases(devices, "alibi", Cases::AllOfKernels, |_, problem| {
        with_alibi(problem)
    });
}

/// Adds ALiBi slopes that are steep, flat, and one that rewards distance.
pub fn with_alibi(problem: Problem) -> Problem {
    let slopes = (0..problem.sizes.heads).map(|head| 0.3 - 0.17 * head as f64);
    let slopes = slopes.collect();
    problem.with_slopes(slopes)
}

pub fn dropout_equals_f64(devices: &[Device]) {
    // With the last one hardly any of 65,536 pairs is dropped, and the factor is not 1.
    let probabilities = [0.3, 0.75, 1e-7];
    check_cases(devices, "dropout", Cases::All, |index, problem| {
        let probability = probabilities[index % probabilities.len()];
        problem.with_dropout(Dropout::new(probability, 0x1234_5678_9abc))
    });
}

/// Sharing of a bias among batch entries, heads and queries.
pub const SHARED: [[bool; 3]; 6] = [
    [false, false, false],
    [false, true, true],
    [true, false, false],
    [true, true, true],
    [true, true, false],
    [false, false, true],
];

/// All cases, in each mode and dtype. On devices that compile kernels at run time, which takes most of the time, a case has one of the four
/// combinations; every kind of sharing meets all of them.
pub fn bias_equals_f64(devices: &[Device]) {
    let mut ran = 0;
    for (index, case) in table() {
        let seed = 4000 + index as u64;
        let shared = SHARED[index % SHARED.len()];
        let problem = case.problem(seed).with_grad_lse(seed).with_bias(6, shared);
        for device in devices {
            let of_mode = |mode| exact_dtypes(device).into_iter().map(move |of| (mode, of));
            let runs: Vec<_> = MODES.into_iter().flat_map(of_mode).collect();
            let kept = index / SHARED.len() % runs.len();
            for (run, (mode, (dtype, tolerance))) in runs.into_iter().enumerate() {
                if is_cuda(device) && run != kept {
                    continue;
                }
                let what = format!("{}, bias, {mode:?}", case.name);
                let call = Call::new(what, &problem, case.layout()).weights(mode);
                call.check_dtype(device, dtype, tolerance);
                ran += 1;
            }
        }
    }
    assert_ran("bias", ran);
}

/// Reaches of 0, of some distances, and beyond the sequence.
pub const REACHES: [usize; 5] = [5, 0, 40, 1, 700];

pub fn relative_bias_equals_f64(devices: &[Device]) {
    let name = "biases of distances";
    check_cases(devices, name, Cases::AllOfKernels, with_distances);
}

/// Adds a relative bias, of another kind in each case.
pub fn with_distances(index: usize, problem: Problem) -> Problem {
    let reach = REACHES[index % REACHES.len()];
    problem.with_relative(9, reach, index.is_multiple_of(2))
}

/// Adds all options.
pub fn everything(index: usize, problem: Problem) -> Problem {
    let slopes = (1..=problem.sizes.heads).map(|head| 0.1 * head as f64);
    let slopes = slopes.collect();
    let reach = REACHES[index / 3 % REACHES.len()];
    problem
        .with_sinks(8)
        .with_slopes(slopes)
        .with_dropout(Dropout::new(0.5, 3))
        .with_bias(8, SHARED[index / 3 % SHARED.len()])
        .with_relative(8, reach, index.is_multiple_of(2))
}

/// Each option acts on the result of the others.
pub fn options_work_together(devices: &[Device]) {
    check_cases(devices, "all options", Cases::Third, everything);
}

/// Checks the cases that `has` selects in half precision, with problems modified by `change`. The gradient of a sink is a sum over all rows of
/// differences of rounded elements.
fn check_half(
    devices: &[Device],
    name: &str,
    has: impl Fn(usize, &Case) -> bool,
    change: impl Fn(usize, Problem) -> Problem,
) {
    let mut ran = 0;
    for (index, case) in table().iter().filter(|(index, case)| has(*index, case)) {
        ran += 1;
        let seed = 6000 + *index as u64;
        for (device, dtype) in halves(devices) {
            let mut problem = change(*index, case.problem(seed).with_grad_lse(seed));
            problem.round_to(dtype);
            let what = format!("{}, {name}", case.name);
            let call = Call::new(what, &problem, case.layout());
            call.check_dtype(device, dtype, half_tolerance(dtype));
        }
    }
    assert_ran(name, ran);
}

/// Returns whether tensor cores with wide tiles support the width; all such widths are among the cases.
fn is_wide(case: &Case) -> bool {
    case.head_dim >= 64
}

pub fn options_in_half_precision(devices: &[Device]) {
    let has = |index, case: &Case| Cases::Third.has(index) || is_wide(case);
    check_half(devices, "all options", has, everything);
}

/// A relative bias alone runs other kernels than with all options.
pub fn relative_bias_in_half_precision(devices: &[Device]) {
    let has = |index, case: &Case| index % 3 == 2 || is_wide(case);
    check_half(devices, "biases of distances", has, with_distances);
}

/// Two runs give equal bits, also if batch entries, heads or queries share a bias. Sinks are excluded: Burn sums them.
pub fn options_give_the_same_bits(devices: &[Device]) {
    for (index, shared) in [(14, SHARED[3]), (29, SHARED[5]), (37, SHARED[4])] {
        let case = &cases()[index];
        let problem = (case.problem(3).with_grad_lse(3))
            .with_bias(3, shared)
            .with_relative(3, 20, shared[1])
            .with_slopes(vec![0.1; case.heads])
            .with_dropout(Dropout::new(0.2, 5));
        let call = Call::new(case.name, &problem, case.layout());
        for device in devices {
            let run = || call.run(device, DType::F32);
            assert_same_bits(case.name, run(), run());
        }
    }
}

/// A seed determines the mask, in every bit of the output; probability 0 is no dropout.
pub fn dropout_follows_its_seed(devices: &[Device]) {
    let layout = Pattern::causal().layout(2, 64, 16).unwrap();
    for device in devices {
        let x = Tensor::<4>::random([2, 2, 64, 16], Distribution::Default, device);
        let call = |options: AttentionOptions| {
            let out = attend([&x, &x, &x], &layout, &options).into_data();
            out.as_bytes().to_vec()
        };
        let plain = AttentionOptions::default();
        let dropped =
            |probability, seed: u64| call(plain.clone().dropout(Dropout::new(probability, seed)));
        assert_eq!(dropped(0.2, 1), dropped(0.2, 1));
        assert_ne!(dropped(0.2, 1), dropped(0.2, 2));
        assert_ne!(dropped(0.2, 1), dropped(0.2, 1 + (1 << 32)));
        assert_eq!(dropped(0.0, 1), call(plain.clone()));
    }
}
