//! Tokens sampled from logits, against a sort in f64.

use burn_paged_attention::sampling::{SampleOptions, sample_tokens};

use crate::prelude::*;
use crate::training::case::assert_plan;

/// Distance from a boundary between two tokens within which a draw may give either: sums are f32.
const NEAR: f64 = 1e-5;

/// Returns logits with ties, and rows with special values.
fn logits(rng: &mut ChaCha8Rng, rows: usize, vocab: usize) -> Vec<f32> {
    let mut logits: Vec<f32> = (0..rows * vocab)
        .map(|_| {
            let z: f32 = rng.random_range(-6.0..6.0);
            // A third are integers, so that many are equal.
            if rng.random_range(0..3) == 0 {
                z.round()
            } else {
                z
            }
        })
        .collect();
    for (row, logits) in logits.chunks_mut(vocab).enumerate() {
        match row % 12 {
            3 => logits.fill(0.25),
            4 => logits.fill(f32::NAN),
            5 => logits[vocab / 2] = f32::NEG_INFINITY,
            6 => logits[vocab / 3] = f32::INFINITY,
            7 => logits[0] = f32::NAN,
            // Logits that the penalty makes infinite, and differences that overflow f32.
            8 => logits.fill(f32::MIN),
            9 => logits[vocab / 2] = f32::MAX,
            10 => {
                logits.fill(f32::MIN);
                logits[vocab / 3] = f32::MAX;
                logits[vocab / 2] = f32::MAX / 2.0;
            }
            11 => logits.iter_mut().for_each(|z| *z *= f32::MAX / 6.0),
            _ => {}
        }
    }
    logits
}

fn options() -> Vec<SampleOptions> {
    let plain = SampleOptions::default();
    vec![
        plain,
        plain.temperature(0.0),
        plain.temperature(0.0).repetition(3.0),
        plain.temperature(0.7).repetition(1.2),
        plain.top_k(Some(1)),
        plain.top_k(Some(5)).temperature(1.5),
        plain.top_p(0.83),
        plain.top_p(0.4).top_k(Some(7)),
        plain.min_p(0.11),
        plain.min_p(1.0),
        // Temperatures and penalties that f32 cannot represent, or whose reciprocals it cannot.
        plain.temperature(1e-42),
        plain.temperature(1e-60).top_p(0.5),
        plain.temperature(1e-320).min_p(0.3).top_k(Some(9)),
        plain.temperature(2e38).min_p(0.3),
        plain.temperature(1e300).min_p(0.2).top_p(0.7),
        plain.repetition(1e20),
        plain.repetition(1e60).temperature(0.0),
        plain.repetition(1e-60).temperature(1e-45),
        plain.repetition(0.3).temperature(0.0),
        plain.repetition(0.3).top_p(0.87),
        plain
            .temperature(0.8)
            .top_k(Some(40))
            .top_p(0.91)
            .min_p(0.013)
            .repetition(1.1),
    ]
}

/// The token of each row contains the draw in its cumulative interval, for all options.
pub fn sampled_tokens_are_those_of_a_sort(devices: &[Device]) {
    for device in devices {
        let mut rng = seeded(11);
        for (rows, vocab) in [(9, 1), (16, 11), (24, 256), (3, 20_011)] {
            let values = logits(&mut rng, rows, vocab);
            let seen: Vec<i32> = (0..rows * vocab).map(|_| rng.random_range(0..2)).collect();
            // A kernel is compiled for each vocabulary and each of these.
            let all = options();
            let tried = match vocab {
                256 => &all[..],
                _ => &all[all.len() - 1..],
            };
            for &options in tried {
                let draws: Vec<f32> = (0..rows)
                    .map(|row| match row {
                        0 => 0.0,
                        1 => 1.0 - f32::EPSILON / 2.0,
                        _ => rng.random_range(0.0..1.0),
                    })
                    .collect();
                let tensor = Tensor::<2>::from_data(
                    TensorData::new(values.clone(), [rows, vocab]),
                    (device, DType::F32),
                );
                let marks = ints(&seen, [rows, vocab], device);
                let numbers = floats(&draws, [rows], device);
                let sampled = || {
                    let (tensor, marks) = (tensor.clone(), Some(marks.clone()));
                    let tokens = sample_tokens(tensor, numbers.clone(), marks, &options);
                    read(tokens.unwrap()).iter::<i64>().collect::<Vec<i64>>()
                };
                let tokens = sampled();
                assert_eq!(tokens, sampled());
                for (row, (&token, &draw)) in tokens.iter().zip(&draws).enumerate() {
                    let what = format!("{options:?}, row {row} of {vocab} on {device:?}");
                    let of_row = row * vocab..(row + 1) * vocab;
                    let seen = &seen[of_row.clone()];
                    let kept =
                        options.candidates(&values[of_row], |token| seen[token as usize] != 0);
                    let Some(place) = kept.iter().position(|kept| i64::from(kept.0) == token)
                    else {
                        assert!(token == -1 && kept.is_empty(), "{token}: {what}");
                        continue;
                    };
                    let before: f64 = kept[..place].iter().map(|kept| kept.1).sum();
                    let draw = f64::from(draw);
                    let (low, high) = (before - NEAR, before + kept[place].1 + NEAR);
                    assert!((low..=high).contains(&draw), "{token} by {draw}: {what}");
                }
            }
        }
        let none = Tensor::<2>::zeros([0, 5], device);
        let draws = Tensor::<1>::zeros([0], device);
        let tokens = sample_tokens(none, draws, None, &SampleOptions::default()).unwrap();
        assert_eq!(tokens.dims(), [0]);
    }
}

/// Ten thousand draws are within four standard deviations.
pub fn sampled_tokens_follow_the_probabilities(devices: &[Device]) {
    let rows = 10_000;
    for device in devices {
        let row = [2.0f32, 1.5, 1.0, 0.2, -0.5, -1.0];
        let options = SampleOptions::default().temperature(0.8);
        let data = TensorData::new(row.repeat(rows), [rows, 6]);
        let logits = Tensor::<2>::from_data(data, (device, DType::F32));
        let mut rng = seeded(5);
        let draws: Vec<f32> = (0..rows).map(|_| rng.random_range(0.0..1.0)).collect();
        let draws = Tensor::<1>::from_data(TensorData::new(draws, [rows]), (device, DType::F32));
        let tokens = sample_tokens(logits.clone(), draws, None, &options).unwrap();
        let mut counts = [0; 6];
        for token in read(tokens).iter::<i64>() {
            counts[token as usize] += 1;
        }
        for (token, probability) in options.candidates(&row, |_| false) {
            let expected = probability * rows as f64;
            let deviation = (expected * (1.0 - probability)).sqrt();
            let got = f64::from(counts[token as usize]);
            assert!((got - expected).abs() < 4.0 * deviation, "{counts:?}");
        }
        let plan = options.explain(&logits).unwrap();
        assert_plan(&plan, device);
    }
}
