//! Rows of 8-bit elements as pages store them.

use burn_paged_attention::Quantization;

use crate::prelude::*;

/// Returns words and scales of rows that are exactly representable: a row's maximum is the largest 8-bit element. NaN rows are words of e4m3's NaN.
pub fn packed(quantization: Quantization, rows: &[f64], width: usize) -> (Vec<i32>, Vec<f32>) {
    let mut all = (Vec::new(), Vec::new());
    for row in rows.chunks(width) {
        let amax = largest(row);
        let scale = match row[0].is_nan() {
            true => f64::NAN,
            false => amax / f64::from(quantization.largest()),
        };
        let bytes = row.iter().map(|x| match x.is_nan() {
            true => 0x7f,
            false => quantization.encode((x / scale) as f32),
        });
        let bytes: Vec<u8> = bytes.collect();
        let words = bytes
            .chunks(4)
            .map(|four| i32::from_le_bytes([four[0], four[1], four[2], four[3]]));
        all.0.extend(words);
        all.1.push(scale as f32);
    }
    all
}
