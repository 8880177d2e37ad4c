//! Layouts made on the device, against f64: every output and every gradient.

use burn_blocksparse::layout::{DeviceLayoutOptions, TopKOptions};
use burn_sparse_select::{top_k_blocks, top_k_blocks_on_device};

use crate::attention::options::with_distances;
use crate::device_layout::case::{Case, cases, read};
use crate::prelude::*;

/// Returns the device or its autodiff variant: masks may come from either.
fn placed(device: &Device, index: usize) -> Device {
    match index % 2 {
        0 => device.clone(),
        _ => device.clone().autodiff(),
    }
}

pub fn layout_of(case: &Case, mask: &[bool], device: &Device) -> DeviceLayout {
    DeviceLayout::from_block_mask(bools(mask, case.dims(), device), case.options()).unwrap()
}

fn check(case: &Case, name: &str, problem: &Problem, layout: DeviceLayout, device: &Device) {
    Call::new(format!("{}, {name}", case.name), problem, layout).check(device);
}

pub fn device_masks_equal_f64(devices: &[Device]) {
    for (index, case) in cases().iter().enumerate() {
        let (mask, problem) = case.drawn(9000 + index as u64);
        for device in devices {
            let layout = layout_of(case, &mask, &placed(device, index));
            let [q, k, v, _] = inputs(&problem, device, DType::F32);
            let plan = plan_of([&q, &k, &v], &layout, &AttentionOptions::default());
            assert!(plan.contains("chosen on the device by a mask"), "{plan}");
            check(case, "a mask", &problem, layout, device);
        }
    }
}

/// Padding indices, repeated ones, and many counts.
pub fn device_indices_equal_f64(devices: &[Device]) {
    for (index, case) in cases().iter().enumerate() {
        check_indices(case, index, 9100 + index as u64, devices);
    }
}

fn check_indices(case: &Case, index: usize, seed: u64, devices: &[Device]) {
    let mut rng = seeded(seed);
    let [batch, heads, q_blocks, kv_blocks] = case.dims();
    let most = 1 + rng.random_range(0..2 * kv_blocks);
    let rows = batch * heads * q_blocks;
    let end = kv_blocks as i32;
    let junk = [-1, i32::MIN, i32::MAX, end, end + 31];
    let mut place = |_| match rng.random_range(0..4) {
        0 => junk[rng.random_range(0..junk.len())],
        _ => rng.random_range(0..end),
    };
    let indices: Vec<i32> = (0..rows * most).map(&mut place).collect();
    let counts = drawn(&mut rng, rows, -1..most as i32 + 3);
    let mut mask = vec![false; rows * kv_blocks];
    for (row, count) in counts.iter().enumerate() {
        let list = indices[row * most..][..most].iter();
        for &block in list.take((*count).max(0) as usize) {
            if (0..end).contains(&block) {
                mask[row * kv_blocks + block as usize] = true;
            }
        }
    }
    let problem = case.problem(seed, mask);
    for device in devices {
        let at = placed(device, index);
        let indices = ints_of(&indices, [batch, heads, q_blocks, most], &at);
        let counts = ints_of(&counts, [batch, heads, q_blocks], &at);
        let layout = DeviceLayout::from_block_indices(indices, counts, case.options());
        check(case, "indices", &problem, layout.unwrap(), device);
    }
}

/// Returns a layout's allowed blocks.
fn chosen(layout: &DeviceLayout, case: &Case) -> Vec<bool> {
    let host = layout.to_host().unwrap();
    let [batch, heads, q_blocks, kv_blocks] = case.dims();
    let mut mask = vec![false; batch * heads * q_blocks * kv_blocks];
    for row in 0..batch * heads * q_blocks {
        let (entry, head) = (row / q_blocks / heads, row / q_blocks % heads);
        let entry = entry.min(host.batch().unwrap_or(1) - 1);
        for kept in host.row(host.pattern_of(entry, head), row % q_blocks) {
            mask[row * kv_blocks + kept.block as usize] = true;
        }
    }
    mask
}

/// The same blocks as the host's builder, and attention over them.
pub fn device_top_k_equals_host_top_k(devices: &[Device]) {
    let top = |case: &Case, k: usize| TopKOptions::new(case.block_size, k).causal(case.causal);
    for (index, case) in cases().iter().enumerate() {
        let case = &Case {
            patterns: [2, case.heads],
            ..*case
        };
        let options = match index % 4 {
            0 => top(case, 4),
            1 => top(case, 3).first(2).local(1),
            2 => top(case, 1).first(0).local(0),
            _ => top(case, 1000).local(3),
        };
        let seed = 9200 + index as u64;
        let everything = case.problem(seed, vec![true; case.dims().iter().product()]);
        for device in devices {
            let [q, k, ..] = inputs(&everything, &placed(device, index), DType::F32);
            let layout = top_k_blocks_on_device(q.clone(), k.clone(), options.clone()).unwrap();
            let host = top_k_blocks(q, k, options.clone()).unwrap();
            let is_same = layout.to_host().unwrap() == host;
            assert!(is_same, "{}, {device:?}", case.name);
            let problem = case.problem(seed, chosen(&layout, case));
            check(case, "the highest scores", &problem, layout, device);
        }
    }
}

/// Ties, zeros of both signs, infinities and NaN: the same selection as on the host.
pub fn device_scores_of_all_kinds(devices: &[Device]) {
    for (index, case) in cases().iter().enumerate() {
        if index % 3 == 1 {
            check_scores(case, index, 9300 + index as u64, devices);
        }
    }
}

fn check_scores(case: &Case, index: usize, seed: u64, devices: &[Device]) {
    let mut rng = seeded(seed);
    let dims = case.dims();
    let scores = (0..dims.iter().product()).map(|_| ODD[rng.random_range(0..ODD.len())]);
    let scores: Vec<f32> = scores.collect();
    let options = TopKOptions::new(case.block_size, 1 + dims[3] / 2)
        .causal(case.causal)
        .local(index % 3)
        .first(0);
    for device in devices {
        let scores = floats(&scores, dims, &placed(device, index));
        let layout = DeviceLayout::from_block_scores(scores, case.shape(), options.clone());
        let layout = layout.unwrap();
        let problem = case.problem(seed, chosen(&layout, case));
        check(case, "scores of all kinds", &problem, layout, device);
    }
}

/// Checks a random layout made on the device, from indices or scores.
pub fn check_random(rng: &mut ChaCha8Rng, device: &Device) {
    let kv_heads = rng.random_range(1..3);
    let heads = kv_heads * rng.random_range(1..3);
    let (seq_q, seq_kv) = (rng.random_range(1..150), rng.random_range(1..150));
    let mut case = Case {
        head_dim: [8, 16, 64][rng.random_range(0..3)],
        batch: rng.random_range(1..3),
        causal: rng.random(),
        ..Case::new("random", seq_q, seq_kv, [8, 16, 32][rng.random_range(0..3)])
    };
    let patterns = [case.batch, heads].map(|own| [1, own][rng.random_range(0..2)]);
    (case.heads, case.kv_heads, case.patterns) = (heads, kv_heads, patterns);
    let (index, seed) = (rng.random_range(0..6), rng.random());
    match rng.random() {
        true => check_indices(&case, index, seed, std::slice::from_ref(device)),
        false => check_scores(&case, index, seed, std::slice::from_ref(device)),
    }
}

/// Options of the kernels work with device layouts.
pub fn device_layouts_with_all_options(devices: &[Device]) {
    for index in [0, 4, 5] {
        let case = &cases()[index];
        let (mask, problem) = case.drawn(9400 + index as u64);
        let slopes = (1..=case.heads).map(|head| 0.1 * head as f64);
        let problem = (problem.with_sinks(8))
            .options(Some(0.3), Some(2.0))
            .with_slopes(slopes.collect())
            .with_dropout(Dropout::new(0.4, 3))
            .with_bias(8, [false, true, index == 0]);
        for device in devices {
            let layout = layout_of(case, &mask, device);
            check(case, "all options", &problem, layout, device);
        }
    }
}

/// A layout serves several calls: equal bits twice, also with a clone, and calls of other widths and KV heads.
pub fn device_layouts_are_used_again(devices: &[Device]) {
    let case = &cases()[0];
    let (mask, problem) = case.drawn(5);
    for device in devices {
        let layout = layout_of(case, &mask, device);
        let run = |layout: &DeviceLayout| {
            Call::new(case.name, &problem, layout.clone()).run(device, DType::F32)
        };
        let first = run(&layout);
        let what = format!("{device:?}");
        assert_same_bits(&what, &first, &run(&layout));
        let fresh = run(&layout_of(case, &mask, device));
        assert_same_bits(&format!("{what}, a new layout"), &first, &fresh);
        for (kv_heads, head_dim) in [(1, 40), (4, 64)] {
            let mut other = *case;
            (other.kv_heads, other.head_dim) = (kv_heads, head_dim);
            let problem = other.problem(6, mask.clone());
            check(&other, "the same layout", &problem, layout.clone(), device);
        }
    }
}

/// Widths and blocks of the tensor-core tiers.
const HALVES: &str = "
    blocks of 16                | 300 300 16    | dim 64
    blocks of 32                | 260 400 32    | dim 128
    blocks of 64, grouped heads | 700 700 64    | heads 4 2, dim 64
    blocks of 64                | 400 333 64    | dim 128, every_key
    blocks of 128               | 1000 1000 128 | dim 64, patterns 1 2
    blocks of 128, width 96     | 500 600 128   | dim 96
";

fn half_cases() -> impl Iterator<Item = Case> {
    rows(HALVES).into_iter().map(read)
}

/// Widths and blocks that tensor cores support, on devices that have them.
pub fn device_layouts_in_half_precision(devices: &[Device]) {
    for (index, case) in some_of(half_cases().enumerate(), 2) {
        let (mask, mut problem) = case.drawn(9500 + index as u64);
        for (device, dtype) in halves(devices) {
            problem.round_to(dtype);
            let layout = layout_of(&case, &mask, device);
            let call = Call::new(format!("{}, a mask", case.name), &problem, layout);
            call.check_dtype(device, dtype, half_tolerance(dtype));
        }
    }
}

/// Relative biases, which have no gradient here: the output and lse.
pub fn device_layouts_with_relative_bias(devices: &[Device]) {
    let exact = [0, 3, 4, 5, 8].map(|index| (cases()[index], false));
    let half = half_cases().map(|case| (case, true));
    for (index, (case, half)) in exact.into_iter().chain(half).enumerate() {
        let (mask, problem) = case.drawn(9600 + index as u64);
        let mut problem = with_distances(index, problem);
        for device in devices {
            let bounds = if half { half_bounds } else { exact_dtypes };
            for (dtype, tolerance) in bounds(device) {
                problem.round_to(dtype);
                let [q, k, v, _] = inputs(&problem, device, dtype);
                let layout = layout_of(&case, &mask, device);
                let call = SparseAttentionCall::new(q, k, v, &layout);
                let call = call.tensors(tensors(&problem, device, dtype));
                let results = outputs(call.run_with_lse().unwrap());
                let what = format!("{}, {device:?}, {dtype:?}", case.name);
                let bounds = [Near::Tensor(tolerance)];
                problem.solve().assert(&what, results, &bounds);
            }
        }
    }
}

/// Bad input is an error that names the argument.
pub fn device_layout_errors(devices: &[Device]) {
    let case = read(["errors", "64 64 16", "heads 4 2"]);
    for device in devices {
        let mask = |dims: [usize; 4]| Tensor::<4>::zeros(dims, device).greater_elem(0.5);
        let of_mask = |dims: [usize; 4], options: DeviceLayoutOptions| {
            DeviceLayout::from_block_mask(mask(dims), options)
        };
        let indices = |dims: [usize; 4], counts: [usize; 3]| {
            let indices = Tensor::<4, Int>::zeros(dims, device);
            let counts = Tensor::<3, Int>::zeros(counts, device);
            DeviceLayout::from_block_indices(indices, counts, case.options())
        };
        let mut odd = case.options();
        odd.shape.block_size = 7;
        let scores = |dims: [usize; 4], options: TopKOptions| {
            DeviceLayout::from_block_scores(Tensor::zeros(dims, device), case.shape(), options)
        };
        refused! {
            of_mask([0, 4, 4, 4], case.options()) => "mask's batch must be at least 1, got 0";
            of_mask([2, 3, 4, 4], case.options()) => "mask's heads must be a divisor of the 4 heads of the shape, got 3";
            of_mask([2, 4, 5, 4], case.options()) => "mask's q_blocks must be 4, the shape's, got 5";
            of_mask([2, 1, 4, 3], case.options()) => "mask's kv_blocks must be 4, the shape's, got 3";
            of_mask([2, 4, 4, 4], odd) => "block_size must be 8, 16, 32, 64 or 128, got 7";
            indices([1, 4, 4, 0], [1, 4, 4]) => "indices' width must be at least 1, got 0";
            indices([1, 3, 4, 2], [1, 3, 4]) => "indices' heads must be a divisor of the 4 heads of the shape, got 3";
            indices([1, 4, 4, 2], [2, 4, 4]) => "counts' shape must be [1, 4, 4], the indices', got [2, 4, 4]";
            scores([1, 1, 4, 4], TopKOptions::new(16, 0)) => "options.k must be at least 1, got 0";
            scores([1, 1, 4, 4], TopKOptions::new(32, 2)) => "options.block_size must be 16, the shape's, got 32";
            scores([1, 1, 4, 5], TopKOptions::new(16, 2)) => "scores' kv_blocks must be 4, the shape's, got 5";
        }
        let layout = of_mask([3, 1, 4, 4], case.options()).unwrap();
        let one = Pattern::causal().layout(4, 64, 16).unwrap();
        let one = BlockLayout::stack_batch(&[one]).unwrap();
        refused! { layout.masked_by(&one) => "patterns' batch must be 1, the layout's, got 3"; }
        let x = Tensor::<4>::zeros([2, 4, 64, 8], device);
        let plain = AttentionOptions::default();
        let own = of_mask([1, 1, 4, 4], case.options()).unwrap();
        let call = |layout, options| call_of([&x, &x, &x], layout, options);
        let table = Tensor::<2>::zeros([1, 9], &device.clone().autodiff());
        let tensors = AttentionTensors::default().relative_bias(table);
        let stored = plain.clone().weights(WeightsMode::Store);
        let biased = || call(&own, &plain).tensors(tensors.clone());
        let batch = "q's batch must be 3, the layout's, got 2";
        let tracked = "relative_bias must be without autodiff for a layout that is made on the device, got with";
        let store =
            "options.weights must be Recompute for a layout that is made on the device, got Store";
        refused! {
            call(&layout, &plain).explain() => batch;
            call(&layout, &plain).run() => batch;
            biased().explain() => tracked;
            biased().run() => tracked;
            call(&own, &stored).explain() => store;
            call(&own, &stored).run() => store;
        }
    }
}
