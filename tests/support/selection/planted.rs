//! How much of the attention queries that choose for themselves keep, where it has a structure that was planted in it, against numbers that were computed
//! elsewhere.

use burn_sparse_select::{Selection, attention_selected_with_lse};

use crate::judge::planted::{BLOCK, DIM, HEADS, ROWS, structures};
use crate::prelude::*;

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
    for ((name, q, k), expected) in structures().into_iter().zip(expected) {
        for device in devices {
            let on_tensor_cores = is_cuda(device);
            let tolerance = tolerances[usize::from(on_tensor_cores)];
            let q = tensor(&q, [1, HEADS, ROWS, DIM], device, DType::F32);
            let k = tensor(&k, [1, 1, ROWS, DIM], device, DType::F32);
            let options = AttentionOptions::default();
            let (_, all) = attend_with_lse([&q, &k, &k], &full, &options);
            let chosen = attention_selected_with_lse(q, k.clone(), k, &selection, options);
            let (_, chosen) = chosen.unwrap();
            let shares = to_f64((chosen - all).exp().into_data());
            for (head, expected) in expected.into_iter().enumerate() {
                let late = &shares[head * ROWS + ROWS / 2..(head + 1) * ROWS];
                let recall = late.iter().sum::<f64>() / late.len() as f64;
                let what = format!("{name}, head {head}, {device:?}");
                assert_near(&what, &[recall], &[expected], tolerance);
            }
        }
    }
}
