//! The table of `docs/dev/benchmark-details.md`: what each pattern sends, and how long that takes, over 8 to 512 devices and 8M to 1B positions.
//!
//! Plans of up to 32M positions are made. What is longer follows from three of them: shards, and so pairs and keys of the busiest device, grow by whole periods
//! of these patterns, pairs as a polynomial of degree 2 and keys of degree 1. A fourth plan checks that.

use blocksparse::{LayoutError, Pattern, ShardPlan};

const M: usize = 1 << 20;
/// A layer of the paper's model: heads of 64 in bf16.
const HEADS: usize = 8;
const HEAD_DIM: usize = 64;
/// In 8M positions.
const LENGTHS: [(f64, &str); 3] = [(1.0, "8M"), (8.0, "64M"), (128.0, "1B")];
/// Operations and bytes a second of one device: kernels of this library on an H200, NVLink within a host, a NIC of 400 Gbit/s for each device beyond.
const OPERATIONS: f64 = 300e12;
const NVLINK: f64 = 450e9;
const NETWORK: f64 = 50e9;

/// Of the busiest devices: allowed pairs, keys received, and keys received or sent.
#[derive(Clone, Copy)]
struct Busiest([f64; 3]);

impl Busiest {
    fn of(plan: &ShardPlan) -> Self {
        let most = |of: &dyn Fn(usize) -> f64| (0..plan.devices()).map(of).fold(0.0, f64::max);
        let received = |device| plan.keys_received(device) as f64;
        Self([
            most(&|device| plan.pairs(device) as f64),
            most(&received),
            most(&|device| received(device).max(plan.keys_sent(device) as f64)),
        ])
    }

    /// The polynomials through those of 1, 2 and 3 times 8M positions, at `times` so many.
    fn continued(known: &[Self], times: f64) -> Self {
        Self([0, 1, 2].map(|at| {
            let [a, b, c] = [0, 1, 2].map(|point: usize| known[point].0[at]);
            let (first, second) = (b - a, c - 2.0 * b + a);
            a + (times - 1.0) * first + (times - 1.0) * (times - 2.0) / 2.0 * second
        }))
    }
}

/// A pattern of so many positions.
type OfLength = fn(usize) -> Pattern;

fn main() -> Result<(), LayoutError> {
    print!("| pattern | devices | pieces | to mean |");
    for length in LENGTHS.map(|(_, name)| name) {
        print!(" {length}: received | crossing | attention |");
    }
    println!(
        "\n|---|---|---|---|{}",
        "---|---|---|".repeat(LENGTHS.len())
    );
    let patterns: [(&str, OfLength); 6] = [
        ("local(4096)", |_| Pattern::local(4096)),
        ("streaming(4096, 64)", |_| Pattern::streaming(4096, 64)),
        ("documents of 16,384, causal", |n| {
            Pattern::documents((0..n).step_by(16_384)).and_causal()
        }),
        ("fixed(1024, 32)", |_| Pattern::fixed(1024, 32)),
        ("merged_strided(1024)", |_| Pattern::merged_strided(1024)),
        ("longformer(512, 1, 0..64)", |_| {
            Pattern::longformer(512, 1, 0..64)
        }),
    ];
    for (name, pattern) in patterns {
        // Heads are alike.
        let layouts = (1..5).map(|times| pattern(8 * M * times).layout(1, 8 * M * times, 32));
        let layouts: Vec<_> = layouts.collect::<Result<_, _>>()?;
        for devices in [8, 64, 512] {
            let pieces = ShardPlan::new(&layouts[3], 1, devices)?.pieces();
            let plans = layouts
                .iter()
                .map(|layout| ShardPlan::with_pieces(layout, 1, devices, pieces));
            let known: Vec<_> = plans
                .map(|plan| Ok(Busiest::of(&plan?)))
                .collect::<Result<_, _>>()?;
            let got = Busiest::continued(&known, 4.0);
            for (got, expected) in got.0.into_iter().zip(known[3].0) {
                let near = (got - expected).abs() <= 1e-6 * expected;
                assert!(near, "{name} over {devices}: {got} is not {expected}");
            }
            let mean = layouts[3].allowed_pairs() as f64 / devices as f64;
            print!(
                "| `{name}` | {devices} | {pieces} | {:.2} |",
                known[3].0[0] / mean
            );
            for (times, _) in LENGTHS {
                let [pairs, received, crossing] = Busiest::continued(&known, times).0;
                let link = if devices > 8 { NETWORK } else { NVLINK };
                let width = (HEADS * HEAD_DIM) as f64;
                // Keys and values of 2 bytes, once with their gradients; 14 operations of a pair.
                print!(
                    " {} | {} | {} |",
                    bytes(received * width * 4.0),
                    seconds(crossing * width * 8.0 / link),
                    seconds(pairs * width * 14.0 / OPERATIONS),
                );
            }
            println!();
        }
    }
    Ok(())
}

fn bytes(bytes: f64) -> String {
    match bytes / M as f64 {
        mib if mib >= 1024.0 => format!("{:.1} GiB", mib / 1024.0),
        mib => format!("{mib:.1} MiB"),
    }
}

fn seconds(seconds: f64) -> String {
    match seconds * 1e3 {
        ms if ms >= 1e3 => format!("{seconds:.1} s"),
        ms => format!("{ms:.2} ms"),
    }
}
