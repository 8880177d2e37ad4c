//! Layouts among threads: what a layout keeps (lists, launch plans, tables on a device) is made at its first use, whoever comes first.

use std::sync::Barrier;
use std::thread;

use burn::tensor::{Bool, DType, Device, Tensor, TensorData};
use burn_blocksparse::layout::DeviceLayoutOptions;
use burn_blocksparse::{
    AttentionOptions, BlockLayout, DeviceLayout, Layout, Pattern, SparseAttentionCall,
    sparse_attention,
};

use crate::cases::{Case, cases};
use crate::compare::assert_rows;
use crate::devices::half_dtypes;
use crate::linear::numbers;
use crate::reference::Problem;

const THREADS: usize = 2;
const NAMES: [&str; 4] = ["out", "dq", "dk", "dv"];

/// Cases that use what a layout keeps: masks, columns, residue classes, tiles of like rows.
fn chosen() -> Vec<(Case, Problem)> {
    let names = [
        "merged strided, head dim 64",
        "rows without keys, large blocks",
        "unlike neighbours, grouped heads",
    ];
    let cases = cases()
        .into_iter()
        .filter(|case| names.contains(&case.name));
    let chosen: Vec<_> = cases.map(|case| (case.clone(), case.problem(17))).collect();
    assert_eq!(chosen.len(), names.len());
    chosen
}

/// Output and gradients, of tensors that belong to the thread that calls.
fn call<'a>(
    case: &Case,
    data: &[TensorData; 4],
    layout: impl Into<Layout<'a>>,
    device: &Device,
) -> [TensorData; 4] {
    let device = device.clone().autodiff();
    let tensor = |at: usize| Tensor::<4>::from_data(data[at].clone(), (&device, DType::F32));
    let [q, k, v] = [0, 1, 2].map(|at| tensor(at).require_grad());
    let out = SparseAttentionCall::new(q.clone(), k.clone(), v.clone(), layout)
        .options(case.options())
        .run()
        .unwrap()
        .out;
    let grads = (out.clone() * tensor(3)).sum().backward();
    let grad = |x: Tensor<4>| x.grad(&grads).unwrap().into_data();
    [out.into_data(), grad(q), grad(k), grad(v)]
}

fn data_of(problem: &Problem) -> [TensorData; 4] {
    let s = problem.sizes;
    [
        (&problem.q, s.q()),
        (&problem.k, s.k()),
        (&problem.v, s.v()),
        (&problem.grad_out, s.out()),
    ]
    .map(|(values, shape)| TensorData::new(values.clone(), shape))
}

/// What each thread gets from a call that all begin at once.
fn at_once<T: Send>(run: impl Fn() -> T + Sync) -> Vec<T> {
    let barrier = Barrier::new(THREADS);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    barrier.wait();
                    run()
                })
            })
            .collect();
        let results = threads.into_iter().map(|thread| thread.join().unwrap());
        results.collect()
    })
}

fn assert_equal(what: &str, results: &[[TensorData; 4]]) {
    for result in &results[1..] {
        for ((a, b), name) in results[0].iter().zip(result).zip(NAMES) {
            assert_eq!(a.as_bytes(), b.as_bytes(), "{what}: {name}");
        }
    }
}

/// Threads that use a new layout on one device at once get the same bits as each other and as one that comes later, and the right ones.
pub fn threads_share_a_new_layout(devices: &[Device]) {
    for (case, problem) in chosen() {
        let (answer, data) = (problem.solve(), data_of(&problem));
        for device in devices {
            // Each layout is new; who is first changes.
            for round in 0..4 {
                let layout = case.layout();
                let mut results = at_once(|| call(&case, &data, &layout, device));
                results.push(call(&case, &data, &layout, device));
                let what = format!("{}, {device:?}, round {round}", case.name);
                assert_equal(&what, &results);
                for (got, name) in results.remove(0).into_iter().zip(NAMES) {
                    let what = format!("{what}: {name}");
                    assert_rows(&what, got, &answer.result(name), DType::F32);
                }
            }
        }
    }
}

/// Likewise of a layout that is made on the device, by a thread that then only waits.
pub fn threads_share_a_new_device_layout(devices: &[Device]) {
    let case = cases()
        .into_iter()
        .find(|case| case.name == "several tiles")
        .unwrap();
    let host = case.layout();
    let shape = *host.shape();
    let dims = [1, 1, host.q_blocks(), host.kv_blocks()];
    let mask: Vec<bool> = (0..dims[2] * dims[3])
        .map(|place| (place / dims[3] + place % dims[3]) % 3 != 1)
        .collect();
    let (blocks, columns, block) = (mask.clone(), dims[3], case.block_size);
    let problem = Problem::random(case.sizes(), 18, move |_, _, i, j| {
        j <= i && blocks[i / block * columns + j / block]
    });
    let (answer, data) = (problem.solve(), data_of(&problem));
    for device in devices {
        for round in 0..2 {
            let mask = TensorData::new(mask.clone(), dims);
            let mask = Tensor::<4, Bool>::from_data(mask, device);
            let options = DeviceLayoutOptions::new(shape).causal(true);
            let layout = DeviceLayout::from_block_mask(mask, options).unwrap();
            let mut results = at_once(|| call(&case, &data, &layout, device));
            results.push(call(&case, &data, &layout, device));
            let what = format!("{device:?}, made on the device, round {round}");
            assert_equal(&what, &results);
            for (got, name) in results.remove(0).into_iter().zip(NAMES) {
                let what = format!("{what}: {name}");
                assert_rows(&what, got, &answer.result(name), DType::F32);
            }
        }
    }
}

/// A layout serves a device again whose last tensor is gone, as is the thread that used both first.
pub fn a_layout_outlives_tensors_and_threads(devices: &[Device]) {
    for (case, problem) in chosen() {
        let data = data_of(&problem);
        for device in devices {
            let layout: BlockLayout = case.layout();
            let (of_thread, data_of_thread) = (layout.clone(), data.clone());
            let (case_of_thread, device_of_thread) = (case.clone(), device.clone());
            let thread = thread::spawn(move || {
                call(
                    &case_of_thread,
                    &data_of_thread,
                    &of_thread,
                    &device_of_thread,
                )
            });
            let first = thread.join().unwrap();
            device.sync().unwrap();
            // Memory that was freed is taken by others.
            let others: Vec<_> = (0..8)
                .map(|_| Tensor::<1>::full([5000], f32::MAX, device))
                .collect();
            let again = call(&case, &data, &layout, device);
            drop(others);
            device.sync().unwrap();
            let last = call(&case, &data, &layout, &device.clone());
            assert_equal(&format!("{}, {device:?}", case.name), &[first, again, last]);
        }
    }
}

/// A call of [`calls_at_once_give_the_same_bits`]: pattern, width of blocks and of heads, dtype.
type Sizes = (&'static str, usize, usize, DType);

/// What a device has kernels of their own for: one walk that makes all gradients, one that goes from tile to tile, two walks, wide heads, f32.
fn calls_of(device: &Device) -> Vec<Sizes> {
    let half = half_dtypes(device).into_iter().next_back();
    let mut calls = vec![("local:100", 32, 64, DType::F32)];
    if let Some(half) = half {
        calls.extend([
            ("causal", 128, 64, half),
            ("local:256", 32, 64, half),
            ("bigbird:64,3,8&causal", 64, 128, half),
            ("causal", 128, 256, half),
        ]);
    }
    calls
}

/// Threads whose calls are on a device at the same time, each on a stream of its own and over and over, get the bits of a call that is alone.
pub fn calls_at_once_give_the_same_bits(devices: &[Device]) {
    for device in devices {
        // On a GPU calls have to take long enough to meet.
        let is_large = format!("{device:?}").contains("Cuda");
        let seq = if is_large { 4096 } else { 200 };
        for (number, (pattern, block, width, dtype)) in calls_of(device).into_iter().enumerate() {
            let pattern: Pattern = pattern.parse().unwrap();
            let layout = pattern.layout(4, seq, block).unwrap();
            let dims = [2, 4, seq, width];
            let count = dims.iter().product();
            let data = [0, 1, 2, 3].map(|of| {
                let numbers = numbers(7100 + 10 * number as u64 + of, count);
                TensorData::new(numbers, dims).convert_dtype(dtype)
            });
            let run = || run(&layout, &data, device, dtype);
            let alone = run();
            let again = || (0..4).map(|_| run()).collect::<Vec<_>>();
            for (thread, calls) in at_once(again).into_iter().enumerate() {
                for (number, results) in calls.into_iter().enumerate() {
                    for ((a, b), name) in alone.iter().zip(&results).zip(NAMES) {
                        let what = format!("{pattern}, {width} wide, {device:?}, {dtype:?}");
                        let what = format!("{what}: {name} of call {number} of thread {thread}");
                        assert!(a.as_bytes() == b.as_bytes(), "{what}: other bits");
                    }
                }
            }
        }
    }
}

/// Output and gradients.
fn run(
    layout: &BlockLayout,
    data: &[TensorData; 4],
    device: &Device,
    dtype: DType,
) -> [TensorData; 4] {
    let device = device.clone().autodiff();
    let tensor = |at: usize| Tensor::<4>::from_data(data[at].clone(), (&device, dtype));
    let [q, k, v] = [0, 1, 2].map(|at| tensor(at).require_grad());
    let x = (q.clone(), k.clone(), v.clone());
    let out = sparse_attention(x.0, x.1, x.2, layout).unwrap();
    let grads = (out.clone() * tensor(3)).sum().backward();
    let grad = |x: Tensor<4>| x.grad(&grads).unwrap().into_data();
    [out.into_data(), grad(q), grad(k), grad(v)]
}

/// What threads share.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<BlockLayout>();
    shared::<DeviceLayout>();
    shared::<Pattern>();
    shared::<AttentionOptions>();
};
