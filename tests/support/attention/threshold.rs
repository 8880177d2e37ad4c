//! Tiles that are skipped below a softmax threshold, against f64.

use burn_blocksparse::internal::runs_kernels;
use burn_blocksparse::layout::DeviceLayoutOptions;

use crate::attention::cases::table;
use crate::attention::options::everything;
use crate::prelude::*;

/// A value so large that any weight of it is visible.
const HUGE: f64 = 1e30;
/// Keys of the longest step of any tile; also the height of the tallest tile.
const TILE: usize = 128;

/// Gives every query the same component, and all keys except `near` ones a component that lowers their scores by `gap`.
fn push_away(problem: &mut Problem, gap: f64, near: impl Fn(usize) -> bool) {
    let s = problem.sizes;
    (problem.q.chunks_mut(s.head_dim)).for_each(|query| query[0] = 2.0);
    for (row, key) in problem.k.chunks_mut(s.head_dim).enumerate() {
        key[0] = match near(row % s.seq_kv) {
            true => 0.0,
            false => -gap * (s.head_dim as f64).sqrt() / 2.0,
        };
    }
}

/// Sets the values of all keys outside tile `near`.
fn set_far_values(problem: &mut Problem, near: usize, value: f64) {
    let s = problem.sizes;
    let rows = problem.v.chunks_mut(s.value_dim).enumerate();
    let far = rows.filter(|(row, _)| row % s.seq_kv / TILE != near);
    far.for_each(|(_, values)| values.fill(value));
}

/// Makes a problem of dense attention over three tiles of keys, of which one is near.
fn three_tiles(
    [heads, kv_heads, head_dim]: [usize; 3],
    near: usize,
    gap: f64,
    seed: u64,
) -> Problem {
    let sizes = Sizes::new([1, heads, kv_heads], [3 * TILE; 2], [head_dim; 2]);
    let mut problem = Problem::random(sizes, seed, |_, _, _, _| true);
    push_away(&mut problem, gap, |key| key / TILE == near);
    problem
}

fn dense(heads: usize) -> BlockLayout {
    Pattern::dense().layout(heads, 3 * TILE, 64).unwrap()
}

/// Values of far tiles are so large that a weight of `exp(−40)` would be visible everywhere, yet results equal those for values of 0. Two runs give
/// equal bits.
fn check_skipped<L>(
    what: &str,
    mut problem: Problem,
    near: usize,
    layout: impl Fn(&Device) -> L,
    devices: &[Device],
) where
    for<'l> &'l L: Into<Layout<'l>>,
{
    problem.threshold = Some(12.0);
    for (device, dtype) in with_each(devices, &[DType::F32, DType::BF16]) {
        problem.round_to(dtype);
        set_far_values(&mut problem, near, 0.0);
        let answer = problem.solve();
        set_far_values(&mut problem, near, HUGE);
        let call = Call::new(what, &problem, layout(device));
        let (got, again) = (call.run(device, dtype), call.run(device, dtype));
        let what = format!("{what}, {device:?}, {dtype:?}");
        // Burn sums the gradient of sinks.
        let own = |(name, _): &(&str, TensorData)| *name != "dsinks";
        let [one, two] =
            [&got, &again].map(|it| it.iter().filter(|x| own(x)).cloned().collect::<Results>());
        assert_same_bits(&what, one, two);
        let tolerance = [1e-5, half_tolerance(dtype)][usize::from(dtype == DType::BF16)];
        answer.assert(&what, got, &[Near::Terms(tolerance)]);
    }
}

/// Returns the devices with kernels, which skip tiles.
fn kernels(devices: &[Device]) -> Vec<Device> {
    let skipping = devices.iter().filter(|device| runs_kernels(device));
    skipping.cloned().collect()
}

pub fn far_tiles_are_skipped(devices: &[Device]) {
    // Tensor cores with wide tiles do not support heads of width 32.
    for head_dim in [64, 32] {
        let problem = three_tiles([2, 1, head_dim], 0, 40.0, 1).with_grad_lse(1);
        check_skipped("far tiles", problem, 0, |_| dense(2), &kernels(devices));
    }
}

/// In wider heads, with options whose gradients are computed in the same kernels.
pub fn far_tiles_are_skipped_with_options(devices: &[Device]) {
    let problem = three_tiles([2, 2, 128], 0, 40.0, 2)
        .with_sinks(2)
        .with_slopes(vec![0.01, -0.02])
        .with_dropout(Dropout::new(0.3, 2));
    let what = "far tiles with options";
    check_skipped(what, problem, 0, |_| dense(2), &kernels(devices));
}

/// Layouts made on the device have their own loops on tensor cores. Their full blocks come in reverse order.
pub fn far_tiles_are_skipped_on_device(devices: &[Device]) {
    let problem = three_tiles([2, 2, 64], 2, 40.0, 3);
    let layout = |device: &Device| {
        let blocks = 3 * TILE / 64;
        let mask = Tensor::<4>::ones([1, 1, blocks, blocks], device).greater_elem(0.0);
        let shape = LayoutShape::new(2, [3 * TILE; 2], 64);
        DeviceLayout::from_block_mask(mask, DeviceLayoutOptions::new(shape)).unwrap()
    };
    let what = "far tiles on the device";
    check_skipped(what, problem, 2, layout, &kernels(devices));
}

/// The forward pass of heads wider than 128, whose accumulators fill the registers.
pub fn far_tiles_are_skipped_in_wide_heads(devices: &[Device]) {
    let mut problem = three_tiles([1, 1, 256], 0, 40.0, 4);
    problem.threshold = Some(12.0);
    for (device, dtype) in with_each(&kernels(devices), &[DType::BF16]) {
        problem.round_to(dtype);
        set_far_values(&mut problem, 0, 0.0);
        let answer = problem.solve();
        set_far_values(&mut problem, 0, HUGE);
        let [q, k, v, _] = inputs(&problem, device, dtype);
        let got = outputs(attend_with_lse([&q, &k, &v], &dense(1), &problem.asked()));
        let bounds = [Near::Tensor(half_tolerance(dtype))];
        answer.assert("far tiles of wide heads", got, &bounds);
    }
}

/// Every pattern with mostly far keys and all options: the skipped weight is below the rounding errors.
pub fn thresholds_equal_f64(devices: &[Device]) {
    let mut ran = 0;
    for (index, case) in table().iter().filter(|(index, _)| index % 3 == 1) {
        let seed = 9000 + *index as u64;
        let mut problem = everything(*index, case.problem(seed).with_grad_lse(seed));
        push_away(&mut problem, 30.0, |key| key / 16 % 3 == 0);
        problem.threshold = Some(15.0);
        let answer = problem.solve();
        for (device, mode) in devices
            .iter()
            .flat_map(|d| [WeightsMode::Recompute, WeightsMode::Store].map(|mode| (d, mode)))
        {
            let what = format!("{}, a threshold, {mode:?}", case.name);
            let call = Call::new(what, &problem, case.layout()).weights(mode);
            let what = format!("{}, {device:?}", call.what);
            answer.assert(&what, call.run(device, DType::F32), &[Near::Terms(1e-5)]);
            ran += 1;
        }
    }
    assert_ran("thresholds", ran);
}

/// Skipped weights are missing, and are no more than the option says.
pub fn skipped_weights_are_bounded(devices: &[Device]) {
    let mut problem = three_tiles([2, 1, 64], 0, 11.0, 5);
    // Scores of about 0 and −11, and values that do not cancel out.
    set_far_values(&mut problem, 0, 1.0);
    (problem.q.chunks_mut(64)).for_each(|query| query[1..].iter_mut().for_each(|x| *x *= 0.1));
    let threshold = 9.0;
    let exact = problem.solve();
    problem.threshold = Some(threshold);
    let bound = (3 * TILE) as f64 * (-threshold).exp() * 2.0 * largest(&problem.v);
    for device in kernels(devices) {
        let [q, k, v, _] = inputs(&problem, &device, DType::F32);
        let out = attend([&q, &k, &v], &dense(2), &problem.asked());
        let errors = to_f64(out.into_data()).into_iter().zip(&exact.out);
        let error = errors
            .map(|(got, exact)| (got - exact).abs())
            .fold(0.0, f64::max);
        assert!(error > 1e-5, "{device:?} has skipped nothing: {error:.1e}");
        assert!(error < bound, "{device:?}: {error:.1e} > {bound:.1e}");
    }
}

/// Other keys and values after a tile of queries change no bit of its results.
pub fn thresholds_see_no_later_tile(devices: &[Device]) {
    let layout = Pattern::causal().layout(2, 3 * TILE, 64).unwrap();
    for device in kernels(devices) {
        let [one, other] = [1.0, 9.0].map(|factor| {
            let mut problem = three_tiles([2, 2, 64], 0, 20.0, 6);
            problem.threshold = Some(5.0);
            for rows in [&mut problem.k, &mut problem.v] {
                let of_head = rows.chunks_mut(3 * TILE * 64);
                of_head
                    .for_each(|rows| rows[2 * TILE * 64..].iter_mut().for_each(|x| *x *= factor));
            }
            let [q, k, v, _] = inputs(&problem, &device, DType::F32);
            let out = attend([&q, &k, &v], &layout, &problem.asked());
            out.narrow(2, 0, 2 * TILE).into_data()
        });
        assert_eq!(one.as_bytes(), other.as_bytes(), "{device:?}");
    }
}

pub fn plans_say_what_skips(devices: &[Device]) {
    for device in devices {
        let x = Tensor::<4>::zeros([1, 2, 3 * TILE, 64], device);
        let plan = |options| plan_of([&x, &x, &x], &dense(2), &options);
        let options = AttentionOptions::default().softmax_threshold(12.0);
        let (with, without) = (plan(options), plan(AttentionOptions::default()));
        let expected = match runs_kernels(device) {
            true => ", tiles below the softmax threshold skipped",
            false => ", no tile skipped",
        };
        assert!(with.contains(expected), "{with}");
        assert!(!without.contains("skipped"), "{without}");
    }
}
