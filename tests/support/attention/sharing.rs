//! Layouts shared among threads: cached data of a layout (lists, launch plans, tables on a device) is made at first use, by whichever thread comes
//! first.

use std::sync::Barrier;
use std::thread;

use crate::attention::cases::{Case, cases};
use crate::device_layout::case::read;
use crate::device_layout::chosen::layout_of;
use crate::prelude::*;

const THREADS: usize = 2;

/// Returns cases that use the cached data: masks, columns, residue classes, tiles of similar rows.
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

/// Returns output and gradients, of tensors that belong to the calling thread.
fn call<'a>(
    options: AttentionOptions,
    data: &[TensorData; 4],
    layout: impl Into<Layout<'a>>,
    (device, dtype): (&Device, DType),
) -> Results {
    let device = device.clone().autodiff();
    let tensor = |at: usize| Tensor::<4>::from_data(data[at].clone(), (&device, dtype));
    let [q, k, v] = [0, 1, 2].map(|at| tensor(at).require_grad());
    let out = attend([&q, &k, &v], layout, &options);
    with_gradients(out, tensor(3), [q, k, v])
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

/// Returns each thread's result of a call that all start at once.
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

fn assert_equal(what: &str, results: &[Results]) {
    for result in &results[1..] {
        assert_same_bits(what, &results[0], result);
    }
}

/// Threads that use a new layout on one device at once get equal bits, equal to those of a later call, and correct results.
fn check_shared<L: Sync>(
    what: &str,
    (problem, rounds): (&Problem, usize),
    devices: &[Device],
    layout: impl Fn(&Device) -> L,
) where
    for<'l> &'l L: Into<Layout<'l>>,
{
    let (answer, data, options) = (problem.solve(), data_of(problem), problem.asked());
    for device in devices {
        // Each layout is new, so that another thread may come first.
        for round in 0..rounds {
            let layout = layout(device);
            let run = || call(options.clone(), &data, &layout, (device, DType::F32));
            let mut results = at_once(run);
            results.push(run());
            let what = format!("{what}, {device:?}, round {round}");
            assert_equal(&what, &results);
            answer.assert(&what, results.remove(0), &[Near::Rows(DType::F32)]);
        }
    }
}

pub fn threads_share_a_new_layout(devices: &[Device]) {
    for (case, problem) in chosen() {
        check_shared(case.name, (&problem, 4), devices, |_| case.layout());
    }
}

/// Like `check_shared`, for a layout made on the device by a thread that then only waits.
pub fn threads_share_a_new_device_layout(devices: &[Device]) {
    let case = read(["made on the device", "500 500 32", "dim 64, patterns 1 1"]);
    let [.., rows, columns] = case.dims();
    let mask = (0..rows * columns).map(|place| (place / columns + place % columns) % 3 != 1);
    let mask: Vec<bool> = mask.collect();
    let mut problem = case.problem(18, mask.clone());
    problem.grad_lse.fill(0.0);
    check_shared(case.name, (&problem, 2), devices, |device| {
        layout_of(&case, &mask, device)
    });
}

/// A layout can be used again on a device after the last tensor there and the thread that first used both are gone.
pub fn a_layout_outlives_tensors_and_threads(devices: &[Device]) {
    for (case, problem) in chosen() {
        let data = data_of(&problem);
        for device in devices {
            let layout: BlockLayout = case.layout();
            let (options, of_thread, device_of_thread) =
                (case.options(), layout.clone(), device.clone());
            let data_of_thread = data.clone();
            let thread = thread::spawn(move || {
                let on = (&device_of_thread, DType::F32);
                call(options, &data_of_thread, &of_thread, on)
            });
            let first = thread.join().unwrap();
            device.sync().unwrap();
            // Other tensors reuse the freed memory.
            let others: Vec<_> = (0..8)
                .map(|_| Tensor::<1>::full([5000], f32::MAX, device))
                .collect();
            let again = call(case.options(), &data, &layout, (device, DType::F32));
            drop(others);
            device.sync().unwrap();
            let last = call(case.options(), &data, &layout, (device, DType::F32));
            assert_equal(&format!("{}, {device:?}", case.name), &[first, again, last]);
        }
    }
}

/// A call of [`calls_at_once_give_the_same_bits`]: pattern, block size, head width, dtype.
type Sizes = (&'static str, usize, usize, DType);

/// Returns calls for the different kernels of a device: one mainloop for all gradients, one that goes from tile to tile, two mainloops, wide heads,
/// f32.
fn calls_of(device: &Device) -> Vec<Sizes> {
    let half = half_dtypes(device).into_iter().next_back();
    let mut calls = vec![("local:100", 32, 64, DType::F32)];
    if let Some(half) = half.filter(|_| is_cuda(device)) {
        calls.extend([
            ("causal", 128, 64, half),
            ("local:256", 32, 64, half),
            ("bigbird:64,3,8&causal", 64, 128, half),
            ("causal", 128, 256, half),
        ]);
    }
    calls
}

/// Calls of concurrent threads on one device, each on its own stream and repeated, give the bits of a single call.
pub fn calls_at_once_give_the_same_bits(devices: &[Device]) {
    for device in devices {
        // On a GPU calls have to take long enough to overlap.
        let is_large = is_cuda(device);
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
            let run = || call(AttentionOptions::default(), &data, &layout, (device, dtype));
            let alone = run();
            let again = || (0..4).map(|_| run()).collect::<Vec<_>>();
            for (thread, calls) in at_once(again).into_iter().enumerate() {
                for (number, results) in calls.into_iter().enumerate() {
                    let what = format!("{pattern}, {width} wide, {device:?}, {dtype:?}");
                    let what = format!("{what}: call {number} of thread {thread}");
                    assert_same_bits(&what, &alone, &results);
                }
            }
        }
    }
}

/// Types that threads share.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<BlockLayout>();
    shared::<DeviceLayout>();
    shared::<Pattern>();
    shared::<AttentionOptions>();
};
