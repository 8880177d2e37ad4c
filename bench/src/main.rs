//! Times the attention kernels on a device, by the device's own clock.
//!
//! Without arguments it runs the workloads of the benchmark page; `--pattern` and the sizes run any other.
//! Flops count allowed pairs: 4 · head_dim per pair forward, 2.5 times that backward, so computing what is masked
//! earns nothing.

mod workload;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use blocksparse::BlockLayout;
use blocksparse::kernels::{self, AttentionPlan, Gradients, Sizes, TensorView};
use clap::{Parser, ValueEnum};
use cubecl::bytes::Bytes;
use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::server::Handle;
use half::{bf16, f16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};
use workload::{PatternArg, Workload};

#[derive(Parser)]
#[command(
    about = "Times the block-sparse attention kernels on a device",
    version
)]
struct Args {
    /// Run only the workloads whose names contain one of these (comma-separated).
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Run this pattern: dense, causal, local:W, strided:S, merged-strided:S, fixed:L,C, streaming:W,SINKS,
    /// random:PERCENT (blocks of the block size, per head, causal).
    #[arg(long)]
    pattern: Option<PatternArg>,
    #[arg(long, default_value_t = 1, requires = "pattern")]
    batch: usize,
    #[arg(long, default_value_t = 8, requires = "pattern")]
    heads: usize,
    /// Heads of keys and values; as many as query heads by default.
    #[arg(long, requires = "pattern")]
    kv_heads: Option<usize>,
    /// Sequence length.
    #[arg(long, short, default_value_t = 8192, requires = "pattern")]
    n: usize,
    #[arg(long, default_value_t = 64, requires = "pattern")]
    head_dim: usize,
    /// Block size.
    #[arg(long, default_value_t = 32, requires = "pattern")]
    block: usize,
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Timed runs; the median is reported.
    #[arg(long, default_value_t = 15)]
    repeats: usize,
    /// Also write the numbers to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Print what every launch runs.
    #[arg(long)]
    plan: bool,
    /// Compare all results with those of the simt tier instead of timing.
    #[arg(long)]
    verify: bool,
    /// Launch every kernel once and wait for nothing: for looking at what is compiled.
    #[arg(long)]
    enqueue_only: bool,
    /// Softcap the scores.
    #[arg(long)]
    softcap: Option<f64>,
    /// Leave the backward pass out.
    #[arg(long)]
    forward_only: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    fn elem(self) -> ElemType {
        ElemType::Float(match self {
            Dtype::F32 => FloatKind::F32,
            Dtype::F16 => FloatKind::F16,
            Dtype::Bf16 => FloatKind::BF16,
        })
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let client = device()?.client();
    println!(
        "{} on {}, {} repeats",
        client.properties().identity.name,
        client.name(),
        args.repeats
    );
    let workloads: Vec<Workload> = match &args.pattern {
        Some(pattern) => vec![Workload {
            name: "custom",
            pattern: pattern.clone(),
            batch: args.batch,
            heads: args.heads,
            kv_heads: args.kv_heads.unwrap_or(args.heads),
            n: args.n,
            head_dim: args.head_dim,
            block: args.block,
        }],
        None => (workload::anchors().into_iter())
            .filter(|w| {
                args.only.is_empty() || args.only.iter().any(|o| w.name.contains(o.as_str()))
            })
            .collect(),
    };
    if workloads.is_empty() {
        bail!("no workload is named like {:?}", args.only);
    }
    let mut results = Map::new();
    println!(
        "{:<30} {:>8} {:>10} {:>8} {:>10} {:>8} {:>9}",
        "workload", "density", "fwd ms", "TFLOP/s", "bwd ms", "TFLOP/s", "host us"
    );
    for workload in workloads {
        let result = run(&client, &workload, &args).with_context(|| workload.name.to_string())?;
        results.insert(workload.name.to_string(), result);
    }
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&results)?;
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

fn device() -> Result<cubecl::Device> {
    #[cfg(feature = "cuda")]
    return Ok(cubecl::Device::Cuda(Default::default()));
    #[cfg(all(feature = "wgpu", not(feature = "cuda")))]
    return Ok(cubecl::Device::Wgpu(Default::default()));
    #[cfg(not(any(feature = "cuda", feature = "wgpu")))]
    bail!("built without a device: use --features cuda or --features wgpu");
}

fn run(client: &Client, workload: &Workload, args: &Args) -> Result<Value> {
    let &Workload {
        batch,
        heads,
        kv_heads,
        n,
        head_dim,
        ..
    } = workload;
    let layout = workload.layout()?;
    let sizes = Sizes {
        batch,
        kv_heads,
        head_dim,
        value_dim: head_dim,
        dtype: args.dtype.elem(),
        store: false,
        softcap: args.softcap.is_some(),
        positive_scale: true,
    };
    let plan = AttentionPlan::new(client, &layout, sizes)?;
    if args.plan {
        print!("{plan}");
    }
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut input = |heads: usize| {
        let shape = [batch, heads, n, head_dim];
        TensorView {
            handle: client.create_from_slice(&random(shape.iter().product(), args.dtype, &mut rng)),
            shape,
            strides: [heads * n * head_dim, n * head_dim, head_dim, 1],
        }
    };
    let (q, k, v, grad_out) = (input(heads), input(kv_heads), input(kv_heads), input(heads));
    let element = args.dtype.elem().size();
    let out = client.empty(batch * heads * n * head_dim * element);
    let lse = client.empty(batch * heads * n * 4);
    let gradients = Gradients {
        q: client.empty(batch * heads * n * head_dim * element),
        kv: client.empty(2 * batch * kv_heads * n * head_dim * element),
        v_offset: batch * kv_heads * n * head_dim,
    };
    let scale = 1.0 / (head_dim as f64).sqrt();
    let forward = |layout: &BlockLayout, plan: &AttentionPlan| {
        kernels::forward(
            client,
            plan,
            layout,
            [&q, &k, &v],
            &out,
            &lse,
            None,
            scale,
            args.softcap,
        )
        .expect("the plan was checked");
    };
    let backward = |layout: &BlockLayout, plan: &AttentionPlan| {
        kernels::backward(
            client,
            plan,
            layout,
            [&q, &k, &v],
            &out,
            &lse,
            None,
            &grad_out,
            &gradients,
            scale,
            args.softcap,
        )
        .expect("the plan was checked");
    };
    if args.verify {
        let results = |layout: &BlockLayout, plan: &AttentionPlan| {
            // All ones is a NaN.
            for handle in [&out, &gradients.q, &gradients.kv] {
                let bytes = vec![0xff; handle.size() as usize];
                client.write(handle, Bytes::from_bytes_vec(bytes));
            }
            forward(layout, plan);
            backward(layout, plan);
            let read =
                |handle: &Handle| numbers(&client.read_one_unchecked(handle.clone()), args.dtype);
            let [out, q, mut kv] = [&out, &gradients.q, &gradients.kv].map(read);
            let v = kv.split_off(gradients.v_offset);
            [out, q, kv, v]
        };
        let ours = results(&layout, &plan);
        let again = results(&layout, &plan);
        // Safe: no other thread of this program reads the environment now.
        unsafe { std::env::set_var("BLOCKSPARSE_TIER", "simt") };
        let simt_layout = workload.layout()?;
        let simt_plan = AttentionPlan::new(client, &simt_layout, sizes)?;
        let simt = results(&simt_layout, &simt_plan);
        unsafe { std::env::remove_var("BLOCKSPARSE_TIER") };
        print!("{:<30}", workload.label());
        for (name, (ours, simt)) in ["out", "dq", "dk", "dv"].iter().zip(ours.iter().zip(&simt)) {
            print!(
                "  {name} differs by {:.1e}",
                relative_difference(ours, simt)
            );
        }
        let same = ours
            .iter()
            .zip(&again)
            .all(|(a, b)| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()));
        println!(
            "  {}",
            if same {
                "same bits twice"
            } else {
                "OTHER BITS THE SECOND TIME"
            }
        );
        return Ok(Value::Null);
    }
    let forward = || forward(&layout, &plan);
    let backward = || backward(&layout, &plan);
    if args.enqueue_only {
        forward();
        backward();
        client.flush().map_err(|error| anyhow::anyhow!("{error}"))?;
        return Ok(Value::Null);
    }
    let pairs = layout.allowed_pairs() as f64 * batch as f64 / layout.batch().unwrap_or(1) as f64;
    let flops = 4.0 * head_dim as f64 * pairs;
    let (forward_ms, host_us) = median(client, args.repeats, forward)?;
    let teraflops = |ms: f64, factor: f64| factor * flops / ms / 1e9;
    let mut result = json!({
        "fwd_ms": forward_ms, "fwd_tf": teraflops(forward_ms, 1.0), "host_us": host_us,
        "density": layout.density(), "flops_fwd": flops,
    });
    print!(
        "{:<30} {:>8.4} {forward_ms:>10.3} {:>8.1}",
        workload.label(),
        layout.density(),
        teraflops(forward_ms, 1.0)
    );
    if args.forward_only {
        println!(" {:>10} {:>8} {host_us:>9.1}", "", "");
        return Ok(result);
    }
    let (backward_ms, _) = median(client, args.repeats, backward)?;
    println!(
        " {backward_ms:>10.3} {:>8.1} {host_us:>9.1}",
        teraflops(backward_ms, 2.5)
    );
    result["bwd_ms"] = json!(backward_ms);
    result["bwd_tf"] = json!(teraflops(backward_ms, 2.5));
    Ok(result)
}

/// Median milliseconds on the device, and microseconds on the host to enqueue a call.
fn median(client: &Client, repeats: usize, call: impl Fn() + Send + Sync) -> Result<(f64, f64)> {
    // Compilation, plans and their upload.
    call();
    call();
    block_on(client.sync()).map_err(|error| anyhow::anyhow!("{error}"))?;
    let mut host = Vec::new();
    for _ in 0..repeats {
        let start = std::time::Instant::now();
        call();
        host.push(start.elapsed().as_secs_f64() * 1e6);
    }
    block_on(client.sync()).map_err(|error| anyhow::anyhow!("{error}"))?;
    let mut times = Vec::new();
    for _ in 0..repeats {
        let (_, profile) = client
            .profile(&call, "attention")
            .map_err(|error| anyhow::anyhow!("{error:?}"))?;
        let span = block_on(profile.resolve()).context("the device measured no time")?;
        times.push(span.duration().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    host.sort_by(f64::total_cmp);
    Ok((times[repeats / 2], host[repeats / 2]))
}

fn numbers(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    let pairs = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match dtype {
        Dtype::F32 => (bytes.chunks_exact(4))
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect(),
        Dtype::F16 => pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        Dtype::Bf16 => pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
    }
}

/// `‖a − b‖ / ‖b‖`; NaN if there is one.
fn relative_difference(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    (difference / b.iter().map(|&b| square(b)).sum::<f64>()).sqrt()
}

/// Near enough to normal numbers, as bytes of the dtype.
fn random(count: usize, dtype: Dtype, rng: &mut ChaCha8Rng) -> Vec<u8> {
    // A million distinct ones, repeated from changing places: making all of them takes longer than the kernels.
    let distinct: Vec<f32> = (0..count.min(1 << 20))
        .map(|_| {
            let bits = rng.next_u64();
            let sum: u64 = (0..4).map(|part| (bits >> (16 * part)) & 0xffff).sum();
            (sum as f32 / 65536.0 - 2.0) * 1.732
        })
        .collect();
    let numbers = (0..count).map(|i| distinct[(i + i / distinct.len() * 7919) % distinct.len()]);
    match dtype {
        Dtype::F32 => numbers.flat_map(f32::to_le_bytes).collect(),
        Dtype::F16 => numbers
            .flat_map(|x| f16::from_f32(x).to_le_bytes())
            .collect(),
        Dtype::Bf16 => numbers
            .flat_map(|x| bf16::from_f32(x).to_le_bytes())
            .collect(),
    }
}
