//! The gradient of a bias in half precision, which tensor cores make: whatever shares it, and whatever layouts its heads have.

use burn::tensor::{DType, Device};
use burn_blocksparse::{BlockLayout, Dropout, Pattern, WeightsMode};

use crate::cases::{Case, per_batch, some_of};
use crate::devices::{assert_ran, half_dtypes};
use crate::options::{Call, half_tolerance};
use crate::reference::{Problem, Sizes};

/// All batch entries and heads share the bias,
const ALL: [bool; 3] = [true, true, false];
/// batch entries do, so that each head has its own,
const HEADS: [bool; 3] = [true, false, false];
/// heads do,
const ENTRIES: [bool; 3] = [false, true, false];
/// nothing does,
const NONE: [bool; 3] = [false, false, false];
/// or queries do, too.
const KEYS: [bool; 3] = [false, true, true];

/// A pattern, its lengths and blocks, heads and heads of keys, the width, and what shares the bias.
type Row = (
    &'static str,
    Pattern,
    [usize; 2],
    usize,
    [usize; 2],
    usize,
    [bool; 3],
);

/// Every kind of layout: tiles of neighbours and of like rows, blocks from 8 to 128, one pattern and several, residue classes, and ragged ends.
fn rows() -> Vec<Row> {
    let scattered = |head: usize, i: i64, j: i64| {
        let word = (head as i64 * 7919 + i / 32 * 104_729 + j / 32 * 1_299_709) % 1009;
        word % 3 == 0 || i / 32 == j / 32
    };
    let random = |name: &str| Pattern::from_fn(name, scattered);
    vec![
        ("causal", Pattern::causal(), [300; 2], 128, [4, 4], 64, ALL),
        (
            "causal, odd keys",
            Pattern::causal(),
            [301; 2],
            64,
            [4, 2],
            64,
            ALL,
        ),
        (
            "causal, blocks of 16",
            Pattern::causal(),
            [260; 2],
            16,
            [4, 1],
            96,
            HEADS,
        ),
        (
            "causal, width 128",
            Pattern::causal(),
            [270; 2],
            128,
            [2, 2],
            128,
            ENTRIES,
        ),
        (
            "dense, more keys",
            Pattern::dense(),
            [130, 350],
            32,
            [2, 1],
            72,
            ALL,
        ),
        ("local", Pattern::local(70), [400; 2], 16, [4, 4], 64, ALL),
        (
            "local, blocks of 8",
            Pattern::local(30),
            [200; 2],
            8,
            [4, 4],
            64,
            NONE,
        ),
        (
            "fixed",
            Pattern::fixed(64, 16),
            [400; 2],
            32,
            [4, 4],
            64,
            ALL,
        ),
        (
            "fixed, each head its own columns",
            Pattern::fixed_heads(64, 16, 2),
            [400; 2],
            16,
            [4, 4],
            64,
            ALL,
        ),
        (
            "merged strided",
            Pattern::merged_strided(32),
            [384; 2],
            16,
            [4, 4],
            64,
            ALL,
        ),
        (
            "merged strided by heads",
            Pattern::merged_strided(64),
            [320; 2],
            32,
            [4, 2],
            128,
            HEADS,
        ),
        (
            "scattered blocks of each head",
            random("scattered"),
            [333; 2],
            32,
            [4, 4],
            64,
            ALL,
        ),
        (
            "scattered blocks, a bias a head",
            random("scattered"),
            [320; 2],
            32,
            [4, 2],
            64,
            HEADS,
        ),
        (
            "scattered blocks, shared by heads",
            random("scattered"),
            [320; 2],
            32,
            [4, 2],
            104,
            ENTRIES,
        ),
        (
            "streaming",
            Pattern::streaming(90, 20),
            [500; 2],
            64,
            [4, 4],
            64,
            ALL,
        ),
        (
            "queries share",
            Pattern::causal(),
            [300; 2],
            64,
            [4, 2],
            64,
            KEYS,
        ),
        (
            "queries share, strided",
            Pattern::merged_strided(32),
            [384; 2],
            32,
            [4, 4],
            64,
            [true; 3],
        ),
        (
            "queries share, local",
            Pattern::local(70),
            [500; 2],
            16,
            [4, 4],
            128,
            [true, false, true],
        ),
    ]
}

fn case_of((name, pattern, [seq_q, seq_kv], block_size, [heads, kv_heads], dim, _): &Row) -> Case {
    Case {
        name,
        pattern: pattern.clone(),
        batch: 2,
        heads: *heads,
        kv_heads: *kv_heads,
        seq_q: *seq_q,
        seq_kv: *seq_kv,
        block_size: *block_size,
        head_dim: *dim,
        value_dim: *dim,
        scale: None,
        softcap: None,
    }
}

/// Checks a call in both dtypes, and that it gives the same bits twice.
fn check(
    device: &Device,
    what: &str,
    layout: &BlockLayout,
    problem: impl Fn() -> Problem,
    case: &Case,
    options: bool,
) -> usize {
    let mut ran = 0;
    for dtype in half_dtypes(device) {
        let mut problem = problem();
        let mut with = case.options();
        if options {
            let slopes: Vec<f64> = (1..=case.heads).map(|head| 0.05 * head as f64).collect();
            let dropout = Dropout::new(0.3, 11);
            problem = problem
                .with_slopes(slopes.clone())
                .with_dropout(dropout)
                .with_relative(8, 40, true);
            with = with.alibi(slopes).dropout(dropout);
        }
        problem.round_to(dtype);
        let call = Call {
            what: what.to_string(),
            problem: &problem,
            layout: layout.clone(),
            options: with.weights(WeightsMode::Recompute),
            use_out: true,
        };
        call.check_dtype(device, dtype, half_tolerance(dtype));
        if dtype == DType::BF16 {
            let (first, again) = (call.run(device, dtype), call.run(device, dtype));
            for ((name, a), (_, b)) in first.iter().zip(&again) {
                assert_eq!(a.as_bytes(), b.as_bytes(), "{what}: {name} twice");
            }
        }
        ran += 1;
    }
    ran
}

/// Every gradient, that of the bias among them, equals f64 arithmetic and has the same bits twice.
pub fn bias_gradients_in_half_precision(devices: &[Device]) {
    for device in devices {
        let mut ran = 0;
        for row in some_of(rows(), 3) {
            let case = case_of(&row);
            let problem = || case.problem(71).with_bias(72, row.6);
            ran += check(device, case.name, &case.layout(), problem, &case, false);
        }
        assert_or_lacks(device, ran);
    }
}

/// The same with softcap, ALiBi, dropout and biases of distances.
pub fn bias_gradients_with_options(devices: &[Device]) {
    for device in devices {
        let mut ran = 0;
        for row in rows().into_iter().step_by(3) {
            let case = Case {
                softcap: Some(2.0),
                ..case_of(&row)
            };
            let problem = || case.problem(73).with_bias(74, row.6);
            let what = format!("{}, all options", case.name);
            ran += check(device, &what, &case.layout(), problem, &case, true);
        }
        assert_or_lacks(device, ran);
    }
}

/// Batch entries with layouts of their own that share a bias.
pub fn bias_gradients_per_batch(devices: &[Device]) {
    let sizes = Sizes {
        batch: 2,
        heads: 4,
        kv_heads: 2,
        seq_q: 300,
        seq_kv: 300,
        head_dim: 64,
        value_dim: 64,
    };
    let patterns = [Pattern::local(90), Pattern::causal()];
    for device in devices {
        let mut ran = 0;
        for shared in [ALL, HEADS, NONE, KEYS] {
            let made = || per_batch(&patterns, sizes, 32, 75);
            let problem = || made().1.with_bias(76, shared);
            let case = case_of(&("", Pattern::causal(), [300; 2], 32, [4, 2], 64, shared));
            let what = format!("layouts of batch entries, shared {shared:?}");
            ran += check(device, &what, &made().0, problem, &case, false);
        }
        assert_or_lacks(device, ran);
    }
}

/// Panics if nothing was compared on a device that has a dtype of half precision.
fn assert_or_lacks(device: &Device, ran: usize) {
    if !half_dtypes(device).is_empty() {
        assert_ran("gradients of biases", ran);
    }
}
