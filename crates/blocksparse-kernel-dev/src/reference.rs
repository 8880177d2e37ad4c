//! Attention in f64 on the CPU.

use blocksparse::BlockLayout;
use blocksparse::kernels::hopper::Half;

use crate::inputs::Inputs;

/// Out and lse.
pub fn forward(
    inputs: &Inputs,
    layout: &BlockLayout,
    scale: f64,
    softcap: Option<f64>,
    half: Half,
) -> (Vec<f64>, Vec<f64>) {
    let (heads, seq_q, seq_kv) = (layout.heads(), layout.seq_q(), layout.seq_kv());
    let dim = inputs.q.shape[3];
    let parts: Vec<(usize, usize)> = (0..inputs.batch)
        .flat_map(|b| (0..heads).map(move |h| (b, h)))
        .collect();
    let results: Vec<(Vec<f64>, Vec<f64>)> = std::thread::scope(|scope| {
        let workers: Vec<_> = parts
            .iter()
            .map(|&(b, h)| {
                scope.spawn(move || {
                    let kv = h / (heads / inputs.kv_heads);
                    let read =
                        |tensor: &crate::inputs::Tensor, head: usize, rows: usize| -> Vec<f64> {
                            (0..rows * dim)
                                .map(|i| tensor.at(half, b, head, i / dim, i % dim))
                                .collect()
                        };
                    let (q, k, v) = (
                        read(&inputs.q, h, seq_q),
                        read(&inputs.k, kv, seq_kv),
                        read(&inputs.v, kv, seq_kv),
                    );
                    let dense =
                        layout.to_dense_batch(if layout.batch().is_some() { b } else { 0 }, h);
                    let (mut out, mut lse) =
                        (vec![0.0; seq_q * dim], vec![f64::NEG_INFINITY; seq_q]);
                    for i in 0..seq_q {
                        let keys: Vec<usize> = (0..seq_kv).filter(|&j| dense[i][j]).collect();
                        let scores: Vec<f64> = keys
                            .iter()
                            .map(|&j| {
                                let dot: f64 =
                                    (0..dim).map(|c| q[i * dim + c] * k[j * dim + c]).sum();
                                match softcap {
                                    Some(cap) => cap * (dot * scale / cap).tanh(),
                                    None => dot * scale,
                                }
                            })
                            .collect();
                        if keys.is_empty() {
                            continue;
                        }
                        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                        let sum: f64 = scores.iter().map(|s| (s - most).exp()).sum();
                        lse[i] = most + sum.ln();
                        for (&j, s) in keys.iter().zip(&scores) {
                            let p = (s - lse[i]).exp();
                            for c in 0..dim {
                                out[i * dim + c] += p * v[j * dim + c];
                            }
                        }
                    }
                    (out, lse)
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap())
            .collect()
    });
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for (o, l) in results {
        out.extend(o);
        lse.extend(l);
    }
    (out, lse)
}

/// The errors, or what is wrong.
pub fn compare(
    got: &(Vec<f64>, Vec<f64>),
    want: &(Vec<f64>, Vec<f64>),
    half: Half,
) -> Result<String, String> {
    let mut worst = (0.0, 0);
    let (mut difference, mut norm) = (0.0, 0.0);
    for (i, (g, w)) in got.0.iter().zip(&want.0).enumerate() {
        let error = (g - w).abs();
        if error > worst.0 || error.is_nan() {
            worst = (error, i);
        }
        difference += error * error;
        norm += w * w;
    }
    let relative = (difference / norm.max(1e-30)).sqrt();
    let mut worst_lse = (0.0, 0);
    for (i, (g, w)) in got.1.iter().zip(&want.1).enumerate() {
        let error = if g == w { 0.0 } else { (g - w).abs() };
        if error > worst_lse.0 || error.is_nan() {
            worst_lse = (error, i);
        }
    }
    let (i, l) = (worst.1, worst_lse.1);
    let text = format!(
        "out rel {relative:.2e}, worst {:.2e} at {i} ({:.4} for {:.4}); lse worst {:.1e} at {l} ({:.4} for {:.4})",
        worst.0, got.0[i], want.0[i], worst_lse.0, got.1[l], want.1[l],
    );
    let bound = match half {
        Half::Bf16 => 4e-3,
        Half::F16 => 1e-3,
    };
    match relative <= bound && worst_lse.0 <= 1e-4 {
        true => Ok(text),
        false => Err(text),
    }
}
