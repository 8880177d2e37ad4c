//! Times the reference op against Burn's own dense attention on one backend, forward and backward.
//!
//! `cargo run -p burn-blocksparse-tests --bin bench-reference -- [sparse|dense] N`
//! runs one of the two, f32, B1 H8 D64, fixed(128, 32) against causal, on Flex; it prints medians and the
//! process's peak memory, so run each in a process of its own.

use std::time::Instant;

use burn::tensor::module::attention as burn_attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Distribution, Tensor};
use burn_blocksparse::{AttentionOptions, Pattern, attention};

fn main() {
    let mut args = std::env::args().skip(1);
    let which = args.next().unwrap_or_else(|| "sparse".into());
    let n: usize = (args.next().map(|n| n.parse().expect("N is a number"))).unwrap_or(4096);
    let repeats: usize = (args.next().map(|n| n.parse().expect("repeats"))).unwrap_or(5);
    let plain = Device::flex();
    let device = plain.clone().autodiff();
    let layout = Pattern::fixed(128, 32)
        .layout(8, n, 32)
        .expect("valid sizes");
    let random = |device: &Device| {
        Tensor::<4>::random([1, 8, n, 64], Distribution::Normal(0.0, 1.0), device)
    };
    let run = |q: Tensor<4>, k: Tensor<4>, v: Tensor<4>| match which.as_str() {
        "sparse" => attention(q, k, v, &layout, AttentionOptions::default()).expect("shapes fit"),
        "dense" => {
            let options = AttentionModuleOptions {
                scale: None,
                softcap: None,
                is_causal: true,
            };
            burn_attention(q, k, v, None, None, options)
        }
        other => panic!("sparse or dense, got {other}"),
    };
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let (mut forward, mut both) = (Vec::new(), Vec::new());
    for _ in 0..repeats {
        let start = Instant::now();
        let _ = run(random(&plain), random(&plain), random(&plain))
            .sum()
            .into_scalar::<f32>();
        forward.push(start.elapsed().as_secs_f64());
        let [q, k, v] = [(); 3].map(|_| random(&device).require_grad());
        let start = Instant::now();
        let grads = run(q.clone(), k, v).sum().backward();
        let _ = q.grad(&grads).expect("tracked").sum().into_scalar::<f32>();
        both.push(start.elapsed().as_secs_f64());
    }
    println!(
        "{which} n = {n}: forward {:.3} s, forward + backward {:.3} s, peak memory {}",
        median(forward),
        median(both),
        peak_memory().unwrap_or_else(|| "n/a".into())
    );
}

/// The process's high-water mark, on Linux.
fn peak_memory() -> Option<String> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(format!("{:.2} GiB", kib / (1024.0 * 1024.0)))
}
