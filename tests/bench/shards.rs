//! One sequence on one device, and shared by several: the same numbers, and how long each takes.

mod attention;
mod program;

use std::process::ExitCode;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use attention::{inputs, run};
#[cfg(feature = "wgpu")]
use burn::tensor::DeviceKind;
use burn::tensor::{DType, Device, Tensor};
use burn_blocksparse::{
    AttentionOptions, BlockLayout, Exchange, OpError, Pattern, SequenceShard, ShardPlan,
    SparseAttentionCall,
};
use program::{median, number};

const USAGE: &str = "usage: bench-shards DEVICES [PATTERN] [N] [REPEATS] [DTYPE] [EXCHANGE]

DEVICES  cuda:0,cuda:1 or flex,flex or wgpu,wgpu
PATTERN  as `enwik8 patterns` lists them (default fixed:1024,32)
N        positions, a multiple of 32 (default 65536)
REPEATS  how often each is timed; medians are printed (default 10)
DTYPE    bf16 (default) or f32
EXCHANGE nccl or host (default: nccl where it can be used)

Times are of a forward and a backward pass of one layer's attention (8 heads of 64), by the host's clock. Numbers are compared up to 262144 positions.";

const HEADS: usize = 8;
const HEAD_DIM: usize = 64;
const BLOCK: usize = 32;
/// Positions of which all numbers are compared, on the host.
const COMPARED: usize = 1 << 18;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let names = args.first();
    let devices: Option<Vec<Device>> =
        names.and_then(|names| names.split(',').map(device).collect());
    let pattern: Option<Pattern> = match args.get(1) {
        None => Some(Pattern::fixed(1024, 32)),
        Some(text) => text.parse().ok(),
    };
    let dtype = match args.get(4).map(String::as_str) {
        None | Some("bf16") => Some(DType::BF16),
        Some("f32") => Some(DType::F32),
        _ => None,
    };
    let exchange = (devices.as_deref()).and_then(|devices| exchange(&args, devices));
    let sizes = (number(&args, 2, 65_536), number(&args, 3, 10));
    let (Some(devices), Some(pattern), (Some(n), Some(repeats)), Some(dtype), Some(exchange)) =
        (devices, pattern, sizes, dtype, exchange)
    else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let made = exchange.map_err(Into::into);
    match made.and_then(|exchange| compare(&devices, &pattern, (n, repeats, dtype), &exchange)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn device(name: &str) -> Option<Device> {
    match name.split_once(':').unwrap_or((name, "0")) {
        #[cfg(feature = "flex")]
        ("flex", _) => Some(Device::flex()),
        #[cfg(feature = "wgpu")]
        ("wgpu", _) => Some(Device::wgpu(DeviceKind::DefaultDevice)),
        #[cfg(feature = "cuda")]
        ("cuda", index) => Some(Device::cuda(index.parse::<usize>().ok()?)),
        _ => None,
    }
}

fn exchange(args: &[String], devices: &[Device]) -> Option<Result<Exchange, OpError>> {
    match args.get(5).map(String::as_str) {
        None => Some(Ok(Exchange::best(devices))),
        Some("nccl") => Some(Exchange::nccl(devices)),
        Some("host") => Some(Ok(Exchange::default())),
        _ => None,
    }
}

/// Gradients' and output's rows on the host, unless they are too many, and milliseconds of each forward and backward pass.
struct Timed {
    rows: Option<[Vec<f32>; 4]>,
    times: Vec<[f64; 2]>,
}

fn timed(
    [q, k, v, grad]: [Tensor<4>; 4],
    (repeats, compares): (usize, bool),
    before: impl Fn(),
    attend: impl Fn(Tensor<4>, Tensor<4>, Tensor<4>) -> Tensor<4>,
) -> Timed {
    let leaves = [q, k, v].map(|x| x.detach().require_grad());
    let mut times = Vec::new();
    let mut rows = None;
    // The first two compile.
    for run in 0..repeats + 2 {
        let [q, k, v] = leaves.clone();
        q.device().sync().expect("the device works");
        before();
        let start = Instant::now();
        let out = attend(q, k, v);
        out.device().sync().expect("the device works");
        let forward = start.elapsed();
        let grads = (out.clone() * grad.clone()).sum().backward();
        let made = leaves
            .each_ref()
            .map(|x| x.grad(&grads).expect("a gradient"));
        out.device().sync().expect("the device works");
        let backward = start.elapsed() - forward;
        if run >= 2 {
            times.push([forward, backward].map(|time| time.as_secs_f64() * 1e3));
        }
        if compares && run + 1 == repeats + 2 {
            let [q, k, v] = made;
            rows = Some([out.detach(), q, k, v].map(|x| {
                let data = x.into_data().convert::<f32>();
                data.try_to_vec().expect("f32")
            }));
        }
    }
    Timed { rows, times }
}

fn compare(
    devices: &[Device],
    pattern: &Pattern,
    (n, repeats, dtype): (usize, usize, DType),
    exchange: &Exchange,
) -> Result<(), Box<dyn std::error::Error>> {
    let layout = pattern.layout(HEADS, n, BLOCK)?;
    let start = Instant::now();
    let plan = ShardPlan::new(&layout, HEADS, devices.len())?;
    let shards = SequenceShard::group_by(&plan, exchange)?;
    let took = start.elapsed().as_secs_f64() * 1e3;
    println!("{plan}\nplanned in {took:.0} ms");
    let bytes = |device| plan.bytes(device, HEAD_DIM, dtype.size());
    let most = (0..devices.len()).map(bytes).max().unwrap_or_default();
    println!("{most} bytes received by one device at most, and as many gradients back");
    println!("keys cross by {exchange}");
    let how = (repeats, n <= COMPARED);

    let first = devices[0].clone().autodiff();
    let [q, k, v] = inputs([HEADS, HEADS, HEAD_DIM], n, (&first, dtype));
    let [grad, _, _] = inputs([HEADS, HEADS, HEAD_DIM], n, (&first, dtype));
    let x = [q, k, v, grad];
    // To each device by way of the host.
    let own: Vec<[Tensor<4>; 4]> = (shards.iter().zip(devices))
        .map(|(shard, device)| {
            let device = device.clone().autodiff();
            (x.each_ref()).map(|x| {
                let data = shard.rows(x.clone(), 2).into_data();
                Tensor::from_data(data, (&device, dtype))
            })
        })
        .collect();
    println!("one device: {}", explained(&first, n, &layout, dtype)?);
    let (device, local) = (own[0][0].device(), shards[0].layout());
    let several = explained(&device, local.seq_q(), local, dtype)?;
    println!("several: {several}");
    let alone = timed(x, how, || (), |q, k, v| run(&q, &k, &v, &layout));
    let barrier = Barrier::new(devices.len());
    let parts: Vec<Timed> = thread::scope(|scope| {
        let running: Vec<_> = (shards.iter().zip(own))
            .map(|(shard, own)| {
                let barrier = &barrier;
                let attend = move |q, k, v| {
                    let output = shard.attention(q, k, v, AttentionOptions::default());
                    output.expect("shapes fit").out
                };
                scope.spawn(move || timed(own, how, || _ = barrier.wait(), attend))
            })
            .collect();
        let running = running.into_iter();
        running
            .map(|part| part.join().expect("a device failed"))
            .collect()
    });
    if let Some(whole) = &alone.rows {
        differences(whole, &parts, &plan)?;
    }
    let passes = (repeats + 2) as u64;
    for (device, shard) in shards.iter().enumerate() {
        let sent = shard.bytes_sent() / passes;
        let crossing = plan.keys_sent(device) + plan.keys_received(device);
        let planned = 2 * (crossing * HEAD_DIM * dtype.size()) as u64;
        println!(
            "device {device}: {sent} bytes sent forward and backward, {planned} of the plan's: {:.3} ×",
            sent as f64 / planned.max(1) as f64
        );
    }
    for (name, of) in [
        ("forward", [1.0, 0.0]),
        ("backward", [0.0, 1.0]),
        ("both", [1.0, 1.0]),
    ] {
        let time = |[forward, backward]: [f64; 2]| of[0] * forward + of[1] * backward;
        let one = median(alone.times.iter().map(|&times| time(times)).collect());
        // All devices begin at once, and the slowest ends it.
        let slowest = |run: usize| {
            let times = parts.iter().map(|part| time(part.times[run]));
            times.fold(0.0, f64::max)
        };
        let shared = median((0..repeats).map(slowest).collect());
        println!(
            "{name}: one device {one:.2} ms, {} devices {shared:.2} ms: {:.2} ×",
            devices.len(),
            one / shared
        );
    }
    Ok(())
}

/// Which kernels run.
fn explained(
    device: &Device,
    seq_q: usize,
    layout: &BlockLayout,
    dtype: DType,
) -> Result<String, OpError> {
    let rows = |rows| Tensor::<4>::zeros([1, HEADS, rows, HEAD_DIM], (device, dtype));
    let (q, k) = (rows(seq_q), rows(layout.seq_kv()));
    let call = SparseAttentionCall::new(q, k.clone(), k, layout);
    Ok(call.explain()?.to_string())
}

/// The largest differences between one device's rows and those of several.
fn differences(
    whole: &[Vec<f32>; 4],
    parts: &[Timed],
    plan: &ShardPlan,
) -> Result<(), Box<dyn std::error::Error>> {
    let n = plan.layout().seq_q();
    for (at, name) in ["out", "dq", "dk", "dv"].into_iter().enumerate() {
        let largest = whole[at].iter().fold(0f32, |most, x| most.max(x.abs()));
        let mut worst = 0f32;
        for (device, part) in parts.iter().enumerate() {
            let rows = part.rows.as_ref().ok_or("no rows")?;
            let mut got = rows[at].chunks(HEAD_DIM);
            for head in 0..HEADS {
                for position in plan.positions(device).into_iter().flatten() {
                    let place = (head * n + position) * HEAD_DIM;
                    let expected = &whole[at][place..place + HEAD_DIM];
                    for (x, y) in got.next().ok_or("too few rows")?.iter().zip(expected) {
                        // A number that is none is the worst.
                        let apart = (x - y).abs();
                        worst = if apart <= worst { worst } else { apart };
                    }
                }
            }
        }
        println!("{name}: largest difference {worst:.2e}, of {largest:.2e}");
    }
    Ok(())
}
