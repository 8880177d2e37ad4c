//! Times the reference op against Burn's own dense attention on Flex: f32, batch 1, 8 heads of width 64,
//! `fixed(128, 32)` in blocks of 32 against dense causal.
//!
//! It prints medians and the process's peak memory, so each configuration takes a process of its own.

mod program;

use std::process::ExitCode;
use std::time::Instant;

use burn::tensor::module::attention as burn_attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Distribution, Tensor};
use burn_blocksparse::{AttentionOptions, BlockLayout, Pattern, SparseAttentionCall, WeightsMode};
use program::{median, number};

const USAGE: &str = "usage: bench-reference [KIND] [N] [REPEATS]

KIND     sparse: this operation, weights computed again in the backward pass (default)
         store:  this operation, weights kept for the backward pass
         dense:  Burn's own attention, causal
N        positions (default 4096)
REPEATS  how often each time is taken; the median is printed (default 5)";

const HEADS: usize = 8;
const HEAD_DIM: usize = 64;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let kind = args.first().map_or("sparse", String::as_str);
    let weights = match kind {
        "sparse" => Some(Some(WeightsMode::Recompute)),
        "store" => Some(Some(WeightsMode::Store)),
        "dense" => Some(None),
        _ => None,
    };
    let (n, repeats) = (number(&args, 1, 4096), number(&args, 2, 5));
    let (Some(weights), Some(n), Some(repeats), 0..=3) = (weights, n, repeats, args.len()) else {
        eprintln!("{USAGE}");
        return ExitCode::FAILURE;
    };
    // The layout is built outside the times: it serves a whole training run.
    let op = weights.map(|weights| {
        let layout = Pattern::fixed(128, 32).layout(HEADS, n, 32);
        (layout.expect("valid sizes"), weights)
    });

    let plain = Device::flex();
    let tracked = plain.clone().autodiff();
    let (mut forward, mut both) = (Vec::new(), Vec::new());
    for _ in 0..repeats {
        let [q, k, v] = inputs(n, &plain);
        let start = Instant::now();
        let out = run(op.as_ref(), q, k, v);
        plain.sync().expect("the device works");
        forward.push(start.elapsed().as_secs_f64());
        drop(out);

        let [q, k, v] = inputs(n, &tracked).map(Tensor::require_grad);
        let start = Instant::now();
        let gradients = run(op.as_ref(), q.clone(), k, v).sum().backward();
        plain.sync().expect("the device works");
        both.push(start.elapsed().as_secs_f64());
        assert!(q.grad(&gradients).is_some());
    }
    println!(
        "{kind} n = {n}, median of {repeats}: forward {:.3} s, forward + backward {:.3} s, peak memory {}",
        median(forward),
        median(both),
        peak_memory().unwrap_or_else(|| "n/a".into())
    );
    ExitCode::SUCCESS
}

fn inputs(n: usize, device: &Device) -> [Tensor<4>; 3] {
    let normal = Distribution::Normal(0.0, 1.0);
    [(); 3].map(|_| Tensor::random([1, HEADS, n, HEAD_DIM], normal, device))
}

/// The operation, or Burn's dense attention.
fn run(
    op: Option<&(BlockLayout, WeightsMode)>,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
) -> Tensor<4> {
    match op {
        Some((layout, weights)) => {
            let options = AttentionOptions::default().weights(*weights);
            SparseAttentionCall::new(q, k, v, layout)
                .options(options)
                .run()
                .expect("shapes fit")
                .out
        }
        None => {
            let options = AttentionModuleOptions {
                scale: None,
                softcap: None,
                is_causal: true,
            };
            burn_attention(q, k, v, None, None, options)
        }
    }
}

/// The process's high-water mark, on Linux.
fn peak_memory() -> Option<String> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(format!("{:.2} GiB", kib / (1024.0 * 1024.0)))
}
