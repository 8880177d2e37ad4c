//! `bench-strategies`: how fast CubeK's product kernels, which Burn calls, are at the shapes of a model's layers when one is named instead
//! of the default being taken. Every result is compared with sums in f64 at some places.

mod device_time;

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use clap::Parser;
use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::TensorBinding;
use cubecl::server::Handle;
use cubecl::zspace::{Shape, Strides};
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level::Strategy;
use cubek::matmul::multi_level::components::tile::TileMatmulKind::{Cmma, Mma};
use cubek::matmul::multi_level::routines::batch::double_buffering::DoubleBufferingArgs;
use cubek::matmul::multi_level::routines::batch::ordered_double_buffering::OrderedSelectionArgs;
use cubek::matmul::multi_level::routines::batch::simple::SimpleArgs;
use cubek::matmul::routine::BlueprintStrategy::Inferred;
use cubek::std::InputBinding;
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

#[derive(Parser)]
#[command(
    about = "Times CubeK's product kernels at the shapes of layers, in bf16",
    version
)]
struct Args {
    /// Rows of activations.
    #[arg(long, default_value_t = 49_152)]
    rows: usize,
    /// Seconds after which nothing new is measured.
    #[arg(long, default_value_t = 200)]
    seconds: u64,
    /// Only the strategies whose names contain one of these (comma-separated).
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Write f32 results.
    #[arg(long)]
    f32: bool,
}

const BF16: ElemType = ElemType::Float(FloatKind::BF16);
const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Those that Burn's tuning tries on tensor cores.
fn strategies() -> Vec<Strategy> {
    use Strategy::*;
    let simple = |multi_rows, tile_matmul| SimpleArgs {
        multi_rows,
        tile_matmul,
    };
    let double = |specialized, tile_matmul| DoubleBufferingArgs {
        specialized,
        tile_matmul,
    };
    let ordered = |rows, tile_matmul| OrderedSelectionArgs {
        partition_k: Some(2),
        row_count: Some(rows),
        rows_per_plane: Some(2),
        tile_matmul,
    };
    vec![
        OrderedDoubleMma(Inferred(ordered(8, Mma))),
        OrderedDoubleMma(Inferred(ordered(4, Mma))),
        OrderedDoubleCmma(Inferred(ordered(8, Cmma))),
        DoubleCyclicMma(Inferred(double(false, Mma))),
        DoubleCyclicMma(Inferred(double(true, Mma))),
        DoubleCyclicCmma(Inferred(double(true, Cmma))),
        SimpleCyclicMma(Inferred(simple(true, Mma))),
        SpecializedCyclicMma(Inferred(().into())),
        SpecializedTmaMma(Inferred(().into())),
        SimpleTmaMma(Inferred(simple(true, Mma))),
        DoubleTmaMma(Inferred(double(false, Mma))),
        SimpleCyclicCmma(Inferred(simple(true, Cmma))),
    ]
}

/// A matrix, or a batch of them, as it is read.
struct Operand {
    handle: Handle,
    shape: [usize; 3],
    strides: [usize; 3],
    numbers: Vec<bf16>,
}

impl Operand {
    fn random(client: &Client, shape: [usize; 3], seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let count = shape.iter().product();
        let numbers: Vec<bf16> = (0..count)
            .map(|_| bf16::from_f32(rng.random_range(-1.0..1.0)))
            .collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self {
            handle: client.create_from_slice(&bytes),
            shape,
            strides: [shape[1] * shape[2], shape[2], 1],
            numbers,
        }
    }

    /// With its two last dimensions the other way round.
    fn transposed(&self) -> Self {
        let ([b, m, n], [sb, sm, sn]) = (self.shape, self.strides);
        Self {
            handle: self.handle.clone(),
            shape: [b, n, m],
            strides: [sb, sn, sm],
            numbers: self.numbers.clone(),
        }
    }

    fn at(&self, place: [usize; 3]) -> f64 {
        let place = (0..3).map(|dim| (place[dim] % self.shape[dim]) * self.strides[dim]);
        self.numbers[place.sum::<usize>()].to_f64()
    }

    fn binding(&self) -> TensorBinding {
        binding(&self.handle, self.shape, self.strides)
    }
}

fn binding(handle: &Handle, shape: [usize; 3], strides: [usize; 3]) -> TensorBinding {
    TensorBinding {
        handle: handle.clone().binding(),
        strides: Strides::new(&strides),
        shape: Shape::new(shape),
        tiling: Default::default(),
    }
}

struct Bench {
    client: Client,
    args: Args,
    end: Instant,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let bench = Bench {
        client: device().client(),
        end: Instant::now() + Duration::from_secs(args.seconds),
        args,
    };
    let rows = bench.args.rows;
    let one = |shape, seed| Operand::random(&bench.client, shape, seed);
    for [from, to] in [[512, 2048], [2048, 512], [512, 512], [512, 1536]] {
        let (x, dy) = (one([1, rows, from], 1), one([1, rows, to], 2));
        let weight = one([1, from, to], 3);
        let layer = format!("{from} -> {to}");
        bench.product(&format!("forward {layer}"), &x, &weight)?;
        bench.product(&format!("dgrad   {layer}"), &dy, &weight.transposed())?;
        for groups in [48, 12] {
            let group = |operand: Operand, width| Operand {
                shape: [groups, rows / groups, width],
                strides: [rows / groups * width, width, 1],
                ..operand
            };
            let x = group(one([1, rows, from], 1), from).transposed();
            let dy = group(one([1, rows, to], 2), to);
            bench.product(&format!("wgrad   {layer}, {groups} groups"), &x, &dy)?;
        }
    }
    Ok(())
}

fn device() -> cubecl::Device {
    #[cfg(feature = "cuda")]
    return cubecl::Device::Cuda(Default::default());
    #[cfg(not(feature = "cuda"))]
    return cubecl::Device::Wgpu(Default::default());
}

impl Bench {
    fn product(&self, name: &str, lhs: &Operand, rhs: &Operand) -> Result<()> {
        let [batch, rows, inner] = lhs.shape;
        let columns = rhs.shape[2];
        let (element, bytes) = if self.args.f32 { (F32, 4) } else { (BF16, 2) };
        let shape = [batch, rows, columns];
        let count: usize = shape.iter().product();
        for strategy in strategies() {
            let label = strategy.to_string();
            let wanted = self.args.only.is_empty()
                || self
                    .args
                    .only
                    .iter()
                    .any(|only| label.contains(only.as_str()));
            if !wanted || Instant::now() > self.end {
                continue;
            }
            // 0xffff is NaN.
            let out = self.client.create_from_slice(&vec![0xff; count * bytes]);
            let run = || {
                let mut elems = MatmulElems::from_globals(&MatmulGlobalElems {
                    lhs: BF16,
                    rhs: BF16,
                    out: element,
                });
                let strides = [rows * columns, columns, 1];
                launch_ref(
                    &strategy.clone().into(),
                    &self.client,
                    InputBinding::new(lhs.binding(), BF16),
                    InputBinding::new(rhs.binding(), BF16),
                    binding(&out, shape, strides),
                    &mut elems,
                )
                .map_err(|error| anyhow!("{error:?}"))
            };
            match self.measure(run).and_then(|ms| {
                let error = self.error(lhs, rhs, &out, shape)?;
                Ok((ms, error))
            }) {
                Ok((ms, error)) => {
                    let rate = 2.0 * (count * inner) as f64 / ms / 1e9;
                    println!(
                        "{name:<32} {label:<44} {ms:>8.4} ms {rate:>7.1} TFLOP/s, error {error:.1e}"
                    );
                }
                Err(error) => {
                    let text: String = format!("{error:#}").chars().take(150).collect();
                    println!("{name:<32} {label:<44} failed: {}", text.replace('\n', " "));
                }
            }
        }
        Ok(())
    }

    /// The median on the device's clock.
    fn measure(&self, run: impl Fn() -> Result<()> + Send + Sync) -> Result<f64> {
        Ok(device_time::median(&self.client, 7, run)? * 1e3)
    }

    /// The largest error at 64 places, relative to the size of a sum.
    fn error(&self, lhs: &Operand, rhs: &Operand, out: &Handle, shape: [usize; 3]) -> Result<f64> {
        let bytes = self
            .client
            .read_one(out.clone())
            .map_err(|error| anyhow!("{error:?}"))?;
        let [batch, rows, columns] = shape;
        let inner = lhs.shape[2];
        let mut rng = ChaCha8Rng::seed_from_u64(4);
        let mut largest = 0f64;
        for _ in 0..64 {
            let place = shape.map(|length| rng.random_range(0..length));
            let [b, i, j] = place;
            let expected: f64 = (0..inner)
                .map(|k| lhs.at([b, i, k]) * rhs.at([b, k, j]))
                .sum();
            let at = (b * rows + i) * columns + j;
            let got = match self.args.f32 {
                true => f64::from(f32::from_le_bytes(bytes[4 * at..4 * at + 4].try_into()?)),
                false => bf16::from_le_bytes(bytes[2 * at..2 * at + 2].try_into()?).to_f64(),
            };
            // A number that was not written is NaN.
            let error = (got - expected).abs() / (inner as f64).sqrt();
            largest = if error.is_nan() {
                f64::NAN
            } else {
                largest.max(error)
            };
        }
        let _ = batch;
        Ok(largest)
    }
}
