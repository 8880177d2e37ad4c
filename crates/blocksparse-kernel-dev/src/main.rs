//! Checks and timings of the `hopper` kernels, without Burn, so that it builds in minutes.
//!
//! ```text
//! kernel-dev flush [BLOCK|parts [VARIANT]]    launches every variant and reads nothing back: for a look at its registers without a GPU
//! kernel-dev check            compares with f64 on the CPU
//! kernel-dev time [NAME]      times the workloads whose name contains NAME, in every variant
//! ```

mod cases;
mod inputs;
mod reference;

use blocksparse::kernels::hopper::{Half, Tile, forward};
use blocksparse::kernels::{Sizes, TensorView};
use blocksparse::{BlockLayout, Pattern, Residue};
use cubecl::__private::Runtime;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl_cuda::{CudaDevice, CudaRuntime};
use inputs::{Inputs, Order};

fn dtype(half: Half) -> ElemType {
    ElemType::Float(match half {
        Half::Bf16 => FloatKind::BF16,
        Half::F16 => FloatKind::F16,
    })
}

/// A problem on the device.
struct Problem<'a> {
    client: &'a Client,
    sizes: Sizes,
    half: Half,
    /// Launches one after the other.
    parts: Vec<(&'a BlockLayout, Option<Residue>, Tile)>,
    q: TensorView,
    k: TensorView,
    v: TensorView,
    out: Handle,
    lse: Handle,
    scale: f64,
    softcap: Option<f64>,
}

impl<'a> Problem<'a> {
    fn new(
        client: &'a Client,
        layout: &'a BlockLayout,
        [q, k, v]: [TensorView; 3],
        tile: Tile,
        softcap: Option<f64>,
    ) -> Self {
        let batch = q.shape[0];
        let rows = batch * layout.heads() * layout.seq_q();
        let sizes = Sizes {
            batch,
            kv_heads: k.shape[1],
            head_dim: tile.dim,
            value_dim: tile.dim,
            dtype: dtype(tile.half),
            store: false,
            softcap: softcap.is_some(),
            positive_scale: true,
        };
        let parts = match layout.parts() {
            Some(parts) => (parts.iter().enumerate())
                .map(|(index, part)| {
                    let group = tile.cols.min(part.layout.block_size());
                    let (residue, carry) = (part.residue.is_some(), index > 0);
                    (
                        &part.layout,
                        part.residue,
                        Tile {
                            group,
                            residue,
                            carry,
                            ..tile
                        },
                    )
                })
                .collect(),
            None => vec![(layout, None, tile)],
        };
        Self {
            client,
            sizes,
            half: tile.half,
            parts,
            q,
            k,
            v,
            // NaN in both types.
            out: client.create_from_slice(&vec![0xff; rows * tile.dim * 2]),
            lse: client.create_from_slice(&vec![0xff; rows * 4]),
            scale: 1.0 / (tile.dim as f64).sqrt(),
            softcap,
        }
    }

    fn launch(&self) {
        for &(layout, residue, tile) in &self.parts {
            forward(
                self.client,
                tile,
                layout,
                &self.sizes,
                residue,
                [&self.q, &self.k, &self.v],
                &self.out,
                &self.lse,
                self.scale,
                self.softcap,
            )
            .unwrap();
        }
    }

    fn read(&self) -> (Vec<f64>, Vec<f64>) {
        let out = self.client.read_one_unchecked(self.out.clone());
        let lse = self.client.read_one_unchecked(self.lse.clone());
        let lse: &[f32] = bytemuck::cast_slice(&lse);
        (
            inputs::widen(&out, self.half),
            lse.iter().map(|&x| f64::from(x)).collect(),
        )
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let client = CudaRuntime::client(&CudaDevice::default());
    match arguments.first().map(String::as_str) {
        Some("flush") => {
            let filter = arguments.get(2).map_or("", |name| name);
            let layout = match arguments.get(1).map_or("64", |name| name) {
                "parts" => Pattern::merged_strided(8).layout(1, 512, 64),
                block => Pattern::causal().layout(1, 512, block.parse().unwrap()),
            };
            flush(&client, &layout.unwrap(), filter)
        }
        Some("check") => check(&client, arguments.get(1).map_or("", |name| name)),
        Some("time") => time(
            &client,
            arguments.get(1).map_or("", |name| name),
            arguments.get(2).map_or("", |name| name),
        ),
        _ => eprintln!("flush, check or time [NAME [VARIANT]]"),
    }
}

/// One launch of each kernel.
fn flush(client: &Client, layout: &BlockLayout, filter: &str) {
    for (name, tile) in cases::variants(layout.block_size()) {
        if !tile.fits(layout.block_size()) || !name.contains(filter) {
            continue;
        }
        println!("variant {name} {tile:?} shared {}", tile.shared_bytes());
        let inputs = Inputs::new(1, 1, 1, 512, 512, tile.dim);
        let views = inputs.views(client, tile.half, Order::Heads);
        Problem::new(client, layout, views, tile, None).launch();
        let _ = client.flush();
    }
    std::thread::sleep(std::time::Duration::from_secs(1));
}

fn check(client: &Client, filter: &str) {
    let mut failures = 0;
    for case in cases::checks() {
        if !case.name.contains(filter) {
            continue;
        }
        let layout = &case.layout;
        for (variant, tile) in cases::variants(layout.block_size()) {
            if tile.dim != case.dim || tile.softcap != case.softcap.is_some() {
                continue;
            }
            if !tile.fits(layout.block_size()) || !(case.thorough || cases::is_main(&variant)) {
                continue;
            }
            for half in [Half::Bf16, Half::F16] {
                if half == Half::F16 && !(case.thorough && cases::is_main(&variant)) {
                    continue;
                }
                let tile = Tile { half, ..tile };
                let inputs = Inputs::new(
                    case.batch,
                    layout.heads(),
                    case.kv_heads,
                    layout.seq_q(),
                    layout.seq_kv(),
                    tile.dim,
                );
                let views = inputs.views(client, tile.half, case.order);
                let problem = Problem::new(client, layout, views, tile, case.softcap);
                problem.launch();
                let first = problem.read();
                problem.launch();
                let second = problem.read();
                let same = first
                    .0
                    .iter()
                    .zip(&second.0)
                    .all(|(a, b)| a.to_bits() == b.to_bits())
                    && first
                        .1
                        .iter()
                        .zip(&second.1)
                        .all(|(a, b)| a.to_bits() == b.to_bits());
                let (out, lse) =
                    reference::forward(&inputs, layout, problem.scale, case.softcap, half);
                let worst = reference::compare(&first, &(out, lse), half);
                let ok = worst.is_ok() && same;
                failures += usize::from(!ok);
                let what = match worst {
                    Ok(text) | Err(text) => text,
                };
                let verdict = if ok { "ok  " } else { "FAIL" };
                println!(
                    "{verdict} {:<28} {variant:<14} {half:?} {what}{}",
                    case.name,
                    if same { "" } else { ", NOT THE SAME TWICE" }
                );
            }
        }
    }
    println!("{failures} failures");
}

fn time(client: &Client, filter: &str, variant_filter: &str) {
    for work in cases::workloads() {
        if !work.name.contains(filter) {
            continue;
        }
        let layout = (work.layout)();
        let shape = [work.batch, layout.heads(), layout.seq_q(), work.dim];
        let views = inputs::tiled(client, shape);
        let pairs = layout.allowed_pairs() as f64 * work.batch as f64;
        let flops = 4.0 * work.dim as f64 * pairs;
        for (variant, tile) in cases::variants(layout.block_size()) {
            if tile.dim != work.dim
                || tile.softcap
                || !tile.fits(layout.block_size())
                || !variant.contains(variant_filter)
            {
                continue;
            }
            let problem = Problem::new(client, &layout, views.clone(), tile, None);
            for _ in 0..3 {
                problem.launch();
            }
            cubecl::future::block_on(client.sync()).unwrap();
            let mut times: Vec<f64> = (0..15)
                .map(|_| {
                    let (_, profile) = client.profile(|| problem.launch(), "forward").unwrap();
                    cubecl::future::block_on(profile.resolve())
                        .unwrap()
                        .duration()
                        .as_secs_f64()
                        * 1e3
                })
                .collect();
            times.sort_by(f64::total_cmp);
            println!(
                "{:<22} {variant:<14} median {:7.4} ms  min {:7.4}  {:6.1} TFLOP/s",
                work.name,
                times[7],
                times[0],
                flops / times[7] / 1e9,
            );
        }
    }
}
