//! How much of the attention queries that choose for themselves keep, where it has a structure that was planted in it, against numbers that were computed
//! elsewhere.

use burn::tensor::{DType, Device};
use burn_blocksparse::{AttentionOptions, Pattern, SparseAttentionCall};
use burn_sparse_select::Selection;
use burn_sparse_select::attention_selected_with_lse;

use crate::compare::to_f64;
use crate::linear::tensor;
use crate::planted::{BLOCK, DIM, HEADS, ROWS, mix, rows, uniform};

/// Queries and keys of a name.
type Planted = (&'static str, Vec<f64>, Vec<f64>);

/// Blocks of four topics, to which both queries and keys lean.
fn topics() -> Planted {
    let lean = |i: usize, c: usize| uniform(2, 0, mix((i / BLOCK) as u32) as usize % 4, c);
    let q = rows(HEADS, |h, i, c| uniform(0, h, i, c) + 1.5 * lean(i, c));
    let k = rows(1, |_, i, c| uniform(1, 0, i, c) + lean(i, c));
    ("topics", q, k)
}

/// One key that all queries of a block look for.
fn needles() -> Planted {
    let needle = |head: usize, block: usize| match block {
        0 => None,
        _ => Some(mix((100 + 16 * head + block) as u32) as usize % (BLOCK * block)),
    };
    let q = rows(HEADS, |head, i, c| {
        let wanted = needle(head, i / BLOCK).map_or(0.0, |j| uniform(3, 0, j, c));
        uniform(0, head, i, c) + 1.5 * wanted
    });
    let is_needle = |i: usize| {
        let mut all = (0..HEADS).flat_map(|head| (1..16).map(move |block| (head, block)));
        all.any(|(head, block)| needle(head, block) == Some(i))
    };
    let found: Vec<f64> = (0..ROWS).map(|i| f64::from(is_needle(i)) * 2.0).collect();
    let k = rows(1, |_, i, c| {
        uniform(1, 0, i, c) + found[i] * uniform(3, 0, i, c)
    });
    ("needles", q, k)
}

/// A few keys that all look for, and a few distances.
fn streams() -> Planted {
    let q = rows(HEADS, |head, i, c| {
        let behind = [1, 2, 130, 131].into_iter().filter(|x| *x <= i);
        let behind: f64 = behind.map(|x| uniform(4, 0, i - x, c)).sum();
        uniform(0, head, i, c) + uniform(5, 0, 0, c) + 1.8 * behind
    });
    let k = rows(1, |_, i, c| {
        let is_sink = [0, 1, 2, 300, 301, 500].contains(&i);
        let sink = f64::from(is_sink) * 2.0 * uniform(5, 0, 0, c);
        uniform(1, 0, i, c) + uniform(4, 0, i, c) + sink
    });
    ("streams", q, k)
}

/// MoBA with 4 blocks of 64.
pub fn moba_on_planted_structure(devices: &[Device]) {
    let expected = [[0.9045, 0.9036], [0.7583, 0.7010], [0.5180, 0.5094]];
    on_planted_structure("moba:64,4", expected, [5e-4; 2], devices);
}

/// Quest with 16 pages of 16, every head for itself. On tensor cores products that choose are tf32 ones: between bounds that are nearly equal rounding
/// chooses.
pub fn quest_on_planted_structure(devices: &[Device]) {
    let expected = [[0.9283, 0.9278], [0.8765, 0.7791], [0.7543, 0.7522]];
    on_planted_structure("quest:16,256,share=no", expected, [5e-4, 3e-3], devices);
}

/// What a selection keeps of both heads' attention, over the latter half of the queries, up to a tolerance and one on tensor cores.
fn on_planted_structure(
    text: &str,
    expected: [[f64; 2]; 3],
    tolerances: [f64; 2],
    devices: &[Device],
) {
    let selection: Selection = text.parse().unwrap();
    let full = Pattern::causal().layout(HEADS, ROWS, BLOCK).unwrap();
    for ((name, q, k), expected) in [topics(), needles(), streams()].into_iter().zip(expected) {
        for device in devices {
            let on_tensor_cores = format!("{device:?}").contains("Cuda");
            let tolerance = tolerances[usize::from(on_tensor_cores)];
            let q = tensor(&q, [1, HEADS, ROWS, DIM], device, DType::F32);
            let k = tensor(&k, [1, 1, ROWS, DIM], device, DType::F32);
            let options = AttentionOptions::default();
            let all = SparseAttentionCall::new(q.clone(), k.clone(), k.clone(), &full)
                .options(options.clone())
                .run_with_lse();
            let (_, all) = all.unwrap();
            let chosen = attention_selected_with_lse(q, k.clone(), k, &selection, options);
            let (_, chosen) = chosen.unwrap();
            let shares = to_f64((chosen - all).exp().into_data());
            for (head, expected) in expected.into_iter().enumerate() {
                let late = &shares[head * ROWS + ROWS / 2..(head + 1) * ROWS];
                let recall = late.iter().sum::<f64>() / late.len() as f64;
                assert!(
                    (recall - expected).abs() < tolerance,
                    "{name}, head {head}, {device:?}: {recall}, expected {expected}"
                );
            }
        }
    }
}
