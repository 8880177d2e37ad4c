//! Residual norms against f64 loops.

use burn_fused_ops::{AddNormOptions, ElementDropout, NormParams, Residual};

use crate::judge::norm::{Inputs, NAMES, Problem, Types};
use crate::prelude::*;
use crate::training::results::*;

/// Shapes with rows and widths of all kinds: single, ragged, wider than a plane's registers, more rows than one step of all cubes,
/// and wider than a cube's registers, where the reference runs.
const SHAPES: [[usize; 3]; 13] = [
    [1, 1, 1],
    [7, 1, 3],
    [3, 100, 33],
    [1, 7, 130],
    [2, 150, 64],
    [1, 7, 1000],
    [2, 3, 512],
    [1, 5, 2500],
    [5, 1000, 20],
    [1, 3, 1031],
    [2, 1, 16_384],
    [1, 9000, 12],
    [1, 2, 40_000],
];

/// Outputs and all gradients: both norms, with and without branch, bias, beta and dropout, with one output used and both.
pub fn residual_norm_equals_f64(devices: &[Device]) {
    for (index, shape) in SHAPES.into_iter().enumerate() {
        for half in 0..2 {
            let index = 2 * index + half;
            let problem = Problem::new(shape, 900 + index as u64).varied(index);
            for (device, dtype, tolerance) in exact(devices) {
                let what = format!("{index}, {shape:?}");
                problem.check(&what, device, Types::all(dtype), tolerance);
            }
        }
    }
}

/// Rows that there are not: outputs are empty, and sums over rows 0.
pub fn residual_norm_without_rows(devices: &[Device]) {
    for index in 0..7 {
        let problem = Problem::new([2, 0, 6], 1).varied(index);
        for device in devices {
            problem.check("no rows", device, Types::all(DType::F32), 0.0);
        }
    }
}

/// Half precision, and tensors of different dtypes, within the rounding of what is rounded.
pub fn residual_norm_in_half_precision(devices: &[Device]) {
    for device in devices {
        for half in half_dtypes(device) {
            let f32 = DType::F32;
            let mixed = |stream, branch, params, normed| Types {
                stream,
                branch,
                params,
                normed,
            };
            let calls = [
                Types::all(half),
                mixed(f32, half, f32, half),
                mixed(f32, half, half, f32),
                mixed(half, f32, f32, f32),
            ];
            for (index, types) in calls.into_iter().enumerate() {
                for shape in [[2, 20, 136], [1, 30, 33]] {
                    let problem = Problem::new(shape, 70 + index as u64).varied(index + 7);
                    let problem = problem.rounded(types);
                    problem.check("half", device, types, 3.0 * unit(half));
                }
            }
        }
        // A stream in f64 beside parameters and a norm in f32.
        if supports(device, DType::F64) {
            let types = Types {
                stream: DType::F64,
                ..Types::all(DType::F32)
            };
            let problem = Problem::new([1, 30, 36], 5).varied(1).rounded(types);
            problem.check("f64 stream", device, types, 1e-6);
        }
    }
}

/// The same bits twice, whatever the strides of the inputs, and with gradient checkpointing through steps that it computes again.
pub fn residual_norm_gives_the_same_bits(devices: &[Device]) {
    let types = Types::all(DType::F32);
    for index in [0, 2, 8, 12] {
        let problem = Problem::new([6, 50, 24], 3).varied(index);
        for plain in devices {
            let device = plain.clone().autodiff();
            let first = bits(&problem.run(&device, types));
            assert_eq!(first, bits(&problem.run(&device, types)), "{plain:?}");
            for device in tracked(plain) {
                let leaves = problem.inputs(&device, types).require_grad();
                let inputs = leaves.clone().map(
                    |x| {
                        let stored = (x * 2.0).swap_dims(0, 2).reshape([24, 50, 6]);
                        stored.swap_dims(0, 2) * 0.5
                    },
                    |row| row * 2.0 * 0.5,
                );
                let again = problem.results(inputs, leaves, &device, types);
                assert_eq!(first, bits(&again), "{device:?}, {index}");
            }
        }
    }
}

/// Inputs that are not tracked get no gradient, and change no other; the stream is used on behind the norm, so that it meets both gradients.
pub fn residual_norm_constants(devices: &[Device]) {
    let types = Types::all(DType::F32);
    for plain in devices {
        let device = plain.clone().autodiff();
        for problem in [
            Problem::new([2, 9, 10], 4),
            Problem::new([2, 9, 10], 4).varied(5),
        ] {
            let all = problem.run(&device, types);
            for combination in 1u32..31 {
                let track = |bit: u32| combination >> bit & 1 == 1;
                let (tracked, constants) = (
                    problem.inputs(&device, types).require_grad(),
                    problem.inputs(plain, types),
                );
                let inputs = Inputs {
                    stream: [constants.stream, tracked.stream][usize::from(track(0))].clone(),
                    branch: [constants.branch, tracked.branch][usize::from(track(1))].clone(),
                    bias: [constants.bias, tracked.bias][usize::from(track(2))].clone(),
                    gamma: [constants.gamma, tracked.gamma][usize::from(track(3))].clone(),
                    beta: [constants.beta, tracked.beta][usize::from(track(4))].clone(),
                };
                // A sum without a bias: stream and branch.
                if problem.norm.is_none() && combination & 3 == 0 {
                    continue;
                }
                let some = problem.results(inputs.clone(), inputs, &device, types);
                for (index, (some, all)) in some.into_iter().zip(&all).enumerate() {
                    let wanted = index < 2 || track(index as u32 - 2);
                    let expected = all.as_ref().filter(|_| wanted);
                    let what = format!("{combination:b}: {}", NAMES[index]);
                    assert_eq!(some.is_some(), expected.is_some(), "{what}");
                    // Another kernel, whose compiler may contract other products.
                    if let Some((some, expected)) = some.zip(expected) {
                        assert_close(&what, some, &to_f64(expected.clone()), 1e-6);
                    }
                }
            }
        }
        // Nothing tracked: nothing to be differentiated.
        let problem = Problem::new([2, 9, 10], 4);
        let (sum, normed) = problem.call(problem.inputs(&device, types), types);
        assert!(!sum.is_require_grad() && !normed.unwrap().is_require_grad());
        let (sum, normed) = problem.call(problem.inputs(plain, types), types);
        assert!(!sum.device().is_autodiff() && !normed.unwrap().device().is_autodiff());
    }
}

/// A chain of three, as a model has it: each takes the stream of the one before, with and without gradient checkpointing, and f64 differences.
pub fn residual_norms_in_a_chain(devices: &[Device]) {
    let mut ran = 0;
    for plain in devices {
        for (dtype, tolerance) in [(DType::F64, 1e-6), (DType::F32, 1e-5)] {
            if !supports(plain, dtype) {
                continue;
            }
            ran += 1;
            let types = Types::all(dtype);
            let problem = Problem::new([2, 3, 5], 8);
            let loss = |device: &Device, inputs: Inputs| {
                let mut inputs = inputs;
                let mut total = Tensor::<1>::zeros([1], (device, dtype));
                for index in 0..3 {
                    let mut call = problem.clone();
                    call.dropout = Some(ElementDropout::new(0.2, 3, index));
                    let (sum, normed) = call.call(inputs.clone(), types);
                    let normed = normed.unwrap();
                    total = total + normed.clone().powi_scalar(3).sum();
                    inputs.stream = sum;
                    inputs.branch = Some(normed.tanh());
                }
                total + inputs.stream.powi_scalar(2).sum()
            };
            let grads = |device: Device| {
                let leaves = problem.inputs(&device, types).require_grad();
                let grads = loss(&device, leaves.clone()).backward();
                to_f64(leaves.stream.grad(&grads).unwrap().into_data())
            };
            let found = grads(plain.clone().autodiff());
            let checkpointed = grads(plain.clone().autodiff().gradient_checkpointing());
            assert_eq!(found, checkpointed);
            if dtype != DType::F64 {
                continue;
            }
            let mut differences = Vec::new();
            for index in 0..problem.stream.len() {
                let at = |step: f64| {
                    let mut moved = problem.clone();
                    moved.stream[index] += step;
                    let inputs = moved.inputs(plain, types);
                    to_f64(loss(plain, inputs).into_data())[0]
                };
                differences.push((at(1e-5) - at(-1e-5)) / 2e-5);
            }
            let data = TensorData::new(found, [problem.stream.len()]);
            assert_close("a chain", data, &differences, tolerance);
        }
    }
    assert_ran("residual_norms_in_a_chain", ran);
}

/// What will run is said before, in words.
pub fn residual_norm_plans(devices: &[Device]) {
    for device in devices {
        let stream = Tensor::<2>::zeros([300, 512], device);
        let params = NormParams::new(Tensor::ones([512], device));
        let branch = Residual::new(stream.clone());
        let options = AddNormOptions::default();
        let plan = options.explain(&stream, Some(&branch), &params).unwrap();
        let wide = Tensor::<2>::zeros([2, 40_000], device);
        let of_wide = NormParams::new(Tensor::ones([40_000], device));
        let of_wide = options.explain(&wide, None, &of_wide).unwrap();
        assert!(!of_wide.is_kernels(), "{of_wide}");
        let name = format!("{device:?}");
        let kernels = ["Wgpu", "Cuda"].iter().any(|kind| name.contains(kind));
        assert!(plan.is_kernels() == kernels || uses_reference());
        let text = plan.to_string();
        assert!(
            !plan.is_kernels() || of_wide.to_string().contains("a row's numbers"),
            "{of_wide}"
        );
        assert!(
            text.contains(if plan.is_kernels() {
                "cubes"
            } else {
                "primitives"
            }),
            "{text}"
        );
    }
}
