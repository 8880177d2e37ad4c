//! The gradient with respect to a bias in half precision, on tensor cores: with any sharing, and any layouts of the heads.

use crate::attention::cases::{Case, per_batch};
use crate::prelude::*;

/// Every kind of layout: tiles of adjacent and of similar rows, blocks from 8 to 128, one pattern and several, residue classes, and ragged ends. A
/// pattern, queries and keys, block, heads and KV heads, width, and the sharing of the bias.
const ROWS: &str = "
    causal            | 300 300 | 128 | 4 4 | 64  | entries heads
    causal            | 301 301 | 64  | 4 2 | 64  | entries heads
    causal            | 260 260 | 16  | 4 1 | 96  | entries
    causal            | 270 270 | 128 | 2 2 | 128 | heads
    dense             | 130 350 | 32  | 2 1 | 72  | entries heads
    local:70          | 400 400 | 16  | 4 4 | 64  | entries heads
    local:30          | 200 200 | 8   | 4 4 | 64  |
    fixed:64,16       | 400 400 | 32  | 4 4 | 64  | entries heads
    fixed:64,16,2     | 400 400 | 16  | 4 4 | 64  | entries heads
    merged-strided:32 | 384 384 | 16  | 4 4 | 64  | entries heads
    merged-strided:64 | 320 320 | 32  | 4 2 | 128 | entries
    scattered         | 333 333 | 32  | 4 4 | 64  | entries heads
    scattered         | 320 320 | 32  | 4 2 | 64  | entries
    scattered         | 320 320 | 32  | 4 2 | 104 | heads
    streaming:90,20   | 500 500 | 64  | 4 4 | 64  | entries heads
    causal            | 300 300 | 64  | 4 2 | 64  | heads queries
    merged-strided:32 | 384 384 | 32  | 4 4 | 64  | entries heads queries
    local:70          | 500 500 | 16  | 4 4 | 128 | entries queries
";

/// Returns cases, and whether batch entries, heads and queries share the bias.
fn cases() -> Vec<(Case, [bool; 3])> {
    let scattered = |head: usize, i: i64, j: i64| {
        let word = (head as i64 * 7919 + i / 32 * 104_729 + j / 32 * 1_299_709) % 1009;
        word % 3 == 0 || i / 32 == j / 32
    };
    let case = |[name, seq, block, heads, width, shared]: [&'static str; 6]| {
        let pattern = match name {
            "scattered" => Pattern::from_fn(name, scattered),
            text => text.parse().unwrap(),
        };
        let [heads, kv_heads] = all(heads);
        let case = Case {
            heads,
            kv_heads,
            head_dim: one(width),
            value_dim: one(width),
            ..Case::new(name, pattern, all(seq), one(block))
        };
        let shared = ["entries", "heads", "queries"].map(|who| shared.contains(who));
        (case, shared)
    };
    rows(ROWS).into_iter().map(case).collect()
}

/// Checks calls in both half-precision dtypes; two runs give equal bits.
fn check(devices: &[Device], calls: impl IntoIterator<Item = (String, BlockLayout, Problem)>) {
    for (what, layout, mut problem) in calls {
        for (device, dtype) in halves(devices) {
            problem.round_to(dtype);
            let call = Call::new(&what, &problem, layout.clone());
            call.check_dtype(device, dtype, half_tolerance(dtype));
            if dtype == DType::BF16 {
                let run = || call.run(device, dtype);
                assert_same_bits(&format!("{what}, twice"), run(), run());
            }
        }
    }
}

/// Every gradient, including that with respect to the bias, equals f64, with equal bits in two runs.
pub fn bias_gradients_in_half_precision(devices: &[Device]) {
    let calls = some_of(cases(), 3).map(|(case, shared)| {
        let what = format!("{}, shared {shared:?}", case.name);
        (what, case.layout(), case.problem(71).with_bias(72, shared))
    });
    check(devices, calls);
}

/// Like [`bias_gradients_in_half_precision`], with softcap, ALiBi, dropout and relative biases.
pub fn bias_gradients_with_options(devices: &[Device]) {
    let calls = cases().into_iter().step_by(3).map(|(mut case, shared)| {
        case.softcap = Some(2.0);
        let slopes = (1..=case.heads).map(|head| 0.05 * head as f64);
        let problem = (case.problem(73).with_bias(74, shared))
            .with_slopes(slopes.collect())
            .with_dropout(Dropout::new(0.3, 11))
            .with_relative(8, 40, true);
        (
            format!("{}, all options", case.name),
            case.layout(),
            problem,
        )
    });
    check(devices, calls);
}

/// Batch entries with different layouts that share a bias.
pub fn bias_gradients_per_batch(devices: &[Device]) {
    let sizes = Sizes::new([2, 4, 2], [300, 300], [64, 64]);
    let patterns = [Pattern::local(90), Pattern::causal()];
    let sharing = [
        [true, true, false],
        [true, false, false],
        [false; 3],
        [false, true, true],
    ];
    let calls = sharing.map(|shared| {
        let (layout, problem) = per_batch(&patterns, sizes, 32, 75);
        let what = format!("layouts of batch entries, shared {shared:?}");
        (what, layout, problem.with_bias(76, shared))
    });
    check(devices, calls);
}
