//! 8-bit pages: stored elements, and attention to them.

use burn_paged_attention::{
    PagedKeysValues, PagedStore, Quantization, QuantizedPages, append_quantized, paged_attention,
};

use crate::judge::golden::val;
use crate::judge::paged::{Problem, cases};
use crate::paged::plain::{Appended, plan};
use crate::prelude::*;

const KINDS: [Quantization; 2] = [Quantization::Int8, Quantization::Fp8E4m3];

/// Makes pages with the rows of both written into page 0 and 1, without gaps.
fn stored(kind: Quantization, rows: [&Tensor<4>; 2], device: &Device) -> QuantizedPages {
    let [_, _, count, width] = rows[0].dims();
    let value_width = rows[1].dims()[3];
    let pages = QuantizedPages::zeros(kind, [2, 64], [width, value_width], device).unwrap();
    let slots: Vec<i32> = (0..count as i32).collect();
    let slots = ints(&slots, [1, 1, count], device);
    append_quantized(pages, rows[0].clone(), rows[1].clone(), slots).unwrap()
}

/// Words and scales equal the definition's, for random rows in random slots, some of them not stored; a clone is unchanged.
pub fn quantised_rows(devices: &[Device]) {
    for device in devices {
        for kind in KINDS {
            append_once(device, DType::F32, kind, false, [16, 4]);
            append_once(device, DType::F32, kind, true, [8, 200]);
        }
        let mut others = half_dtypes(device);
        others.extend(exact_dtypes(device).into_iter().map(|(dtype, _)| dtype));
        for (index, dtype) in others.into_iter().enumerate() {
            if dtype != DType::F32 {
                append_once(device, dtype, KINDS[index % 2], false, [16, 4]);
            }
        }
    }
}

fn append_once(
    device: &Device,
    dtype: DType,
    kind: Quantization,
    own_tables: bool,
    widths: [usize; 2],
) {
    let appended = Appended::new(5600, own_tables);
    let ([batch, kv_heads, rows], page) = (appended.rows, appended.page);
    let (pages, of_slots) = (appended.pages, appended.slots(device));
    let store = QuantizedPages::zeros(kind, [pages, page], widths, device).unwrap();
    let clone = store.clone();
    let (mut words, mut scales, mut news) = (Vec::new(), Vec::new(), Vec::new());
    for (index, width) in widths.into_iter().enumerate() {
        let mut new = numbers(5620 + index as u64, batch * kv_heads * rows * width);
        // Rows of many magnitudes, and one of zeros.
        for (row, numbers) in new.chunks_mut(width).enumerate() {
            let factor = match row {
                2 => 0.0,
                _ => 2f64.powi(row as i32 % 20 - 10),
            };
            numbers.iter_mut().for_each(|x| *x *= factor);
        }
        round_to(&mut new, dtype);
        let mut all = vec![0; pages * page * width / 4];
        let mut of_rows = vec![1.0; pages * page];
        for (from, to) in appended.places() {
            let row = new[from * width..][..width].iter().map(|x| *x as f32);
            let row: Vec<f32> = row.collect();
            let (packed, scale) = kind.quantize(&row);
            all[to * width / 4..][..width / 4].copy_from_slice(&packed);
            of_rows[to] = f64::from(scale);
        }
        words.push(all);
        scales.push(of_rows);
        news.push(tensor(&new, [batch, kv_heads, rows, width], device, dtype));
    }
    let [k, v] = [&news[0], &news[1]];
    let store = append_quantized(store, k.clone(), v.clone(), of_slots.clone()).unwrap();
    // Once more, in place.
    for store in [
        store.clone(),
        append_quantized(store, k.clone(), v.clone(), of_slots).unwrap(),
    ] {
        let what = format!("{device:?}, {dtype:?}, {kind}");
        assert_eq!(read_ints(store.keys.clone()), words[0], "{what}: keys");
        assert_eq!(read_ints(store.values.clone()), words[1], "{what}: values");
        for (got, expected) in [
            (&store.key_scales, &scales[0]),
            (&store.value_scales, &scales[1]),
        ] {
            assert_eq!(to_f64(got.clone().into_data()), *expected, "{what}: scales");
        }
        let [keys, _] = store.dequantize().unwrap();
        let rows = words[0].chunks(widths[0] / 4).zip(&scales[0]);
        let expected: Vec<f64> = rows
            .flat_map(|(words, scale)| kind.dequantize(words, *scale as f32))
            .map(f64::from)
            .collect();
        assert_eq!(to_f64(keys.into_data()), expected, "{what}: numbers");
    }
    assert!(read_ints(clone.keys).iter().all(|word| *word == 0));
}

/// Keys 0 to 3 of the golden input, and the scores of its query 11, with externally computed values.
pub fn quantised_rows_golden(devices: &[Device]) {
    let of = |of: usize, from: usize, to: usize| -> Vec<f64> {
        let numbers = (from..to).flat_map(|i| (0..4).map(move |c| (i, c)));
        numbers.map(|(i, c)| val(of, 0, i, c)).collect()
    };
    let int8: [[i8; 4]; 4] = [
        [64, -13, -89, 127],
        [-64, -85, -106, -127],
        [35, 81, 127, -92],
        [0, 127, -71, 56],
    ];
    let fp8 = [
        [224.0, -44.0, -320.0, 448.0],
        [-224.0, -288.0, -384.0, -448.0],
        [120.0, 288.0, 448.0, -320.0],
        [0.0, 448.0, -256.0, 192.0],
    ];
    let exact = [-1.2265625, -0.234375, 1.9609375, -0.2109375];
    let errors = [
        [-0.000677, -0.002215, -0.000615, 0.0],
        [-0.010184, -0.003348, -0.008929, 0.0],
    ];
    let amax = [1.25, 0.75, 1.375, 1.125];
    for device in devices {
        for (index, kind) in KINDS.into_iter().enumerate() {
            let rows = tensor(&of(1, 0, 4), [1, 1, 4, 4], device, DType::F32);
            let store = stored(kind, [&rows, &rows], device);
            let words = &read_ints(store.keys.clone())[..4];
            for (row, word) in words.iter().enumerate() {
                let bytes = word.to_le_bytes();
                match kind {
                    Quantization::Int8 => assert_eq!(bytes.map(|byte| byte as i8), int8[row]),
                    _ => assert_eq!(bytes.map(|byte| kind.decode(byte)), fp8[row]),
                }
            }
            let scales = to_f64(store.key_scales.clone().into_data());
            for (scale, amax) in scales.iter().zip(amax) {
                assert_eq!(*scale as f32, amax as f32 / kind.largest());
            }
            // A call over one slot has its score as lse.
            let q = tensor(&of(0, 11, 12), [1, 1, 1, 4], device, DType::F32);
            for slot in 0..4 {
                let spans = ints(&[0, 0, slot, 1], [1, 1, 4], device);
                let table = ints(&[0], [1, 1, 1], device);
                let store = PagedStore::Quantized(store.clone());
                let pages = PagedKeysValues::of_store(store, 1, table, spans);
                let output = paged_attention(q.clone(), &pages, &Default::default()).unwrap();
                let error = to_f64(output.lse.into_data())[0] - exact[slot as usize];
                let expected = errors[index][slot as usize];
                assert_near(&format!("{kind}"), &[error], &[expected], 2e-6);
            }
        }
    }
}

pub fn quantised_rows_that_are_not_finite(devices: &[Device]) {
    let rows: [[f32; 4]; 8] = [
        [0.0; 4],
        [f32::INFINITY, 1.0, f32::NEG_INFINITY, -0.5],
        [1.0, f32::NAN, 0.5, -1.0],
        [f32::INFINITY; 4],
        [1e38, -3e38, 1.0, 0.0],
        [1e-33, -1e-35, 0.0, 1e-44],
        [f32::MAX, -f32::MAX, 1e38, 0.0],
        [f32::NEG_INFINITY, f32::MAX, -1.0, f32::MIN],
    ];
    for device in devices {
        let flat: Vec<f32> = rows.iter().flatten().copied().collect();
        let x = floats(&flat, [1, 1, 8, 4], device);
        for kind in KINDS {
            let store = stored(kind, [&x, &x], device);
            let words = read_ints(store.keys.clone());
            let scales = store.key_scales.clone().into_data();
            let scales: Vec<f32> = scales.iter::<f32>().collect();
            for (index, row) in rows.iter().enumerate() {
                let (expected, scale) = kind.quantize(row);
                let what = format!("{device:?}, {kind}, row {index}");
                assert_eq!(words[index], expected[0], "{what}");
                let is_right = scales[index] == scale || scale.is_nan() && scales[index].is_nan();
                assert!(is_right, "{what}");
            }
            let [keys, _] = store.dequantize().unwrap();
            let got = to_f64(keys.into_data());
            assert_eq!(got[4..8].iter().map(|x| x.signum()).sum::<f64>(), 0.0);
            assert!(got[4..8].iter().all(|x| x.abs() <= 1.0));
            assert!(got[8..12].iter().all(|x| x.is_nan()));
            let most = f64::from(f32::MAX);
            let what = format!("{device:?}, {kind}");
            assert_near(&what, &got[24..26], &[most, -most], 1e-6 * most);
            assert!(got[28..32].iter().all(|x| x.is_finite()));
        }
    }
}

/// Attention to the stored elements, on the whole table of cases.
pub fn quantised_attention_equals_f64(devices: &[Device]) {
    for (index, case) in some_of(cases().into_iter().enumerate(), 3) {
        for kind in KINDS {
            let Some(problem) = Problem::quantised(5700 + 10 * index as u64, case, kind) else {
                continue;
            };
            for (device, dtype, tolerance) in exact(devices) {
                let mut problem = problem.clone();
                problem.round_queries(dtype);
                round_to(&mut problem.sinks, DType::F32);
                // Scales and dequantized elements are f32, whatever the dtype of queries.
                let tolerance = tolerance.max(1e-6);
                let what = format!("case {index}, {kind}");
                problem.check(&what, device, dtype, [tolerance; 2]);
            }
        }
    }
}

pub fn quantised_attention_in_half_precision(devices: &[Device]) {
    for (device, dtype) in halves(devices) {
        for index in [0, 2, 3, 7, 16, 17, 19, 20] {
            let kind = KINDS[index % 2];
            let problem = Problem::quantised(5900 + index as u64, cases()[index], kind);
            let Some(mut problem) = problem else {
                continue;
            };
            problem.round_queries(dtype);
            round_to(&mut problem.sinks, DType::F32);
            let what = format!("case {index}, {kind}");
            problem.check(&what, device, dtype, [unit(dtype), 1e-5]);
        }
    }
}

pub fn quantised_plans_name_the_store(devices: &[Device]) {
    for device in devices {
        for kind in KINDS {
            let problem = Problem::quantised(5710, cases()[0], kind).unwrap();
            let plan = plan(&problem, device);
            let text = plan.to_string();
            let is_right = !plan.is_kernels() || text.starts_with(&kind.to_string());
            assert!(is_right, "{text}");
        }
    }
}
