//! `bench-strategies`: how fast CubeK's product kernels, which Burn calls, are at the shapes of a model's layers when one is named instead
//! of the default being taken. Every result is compared with sums in f64 at some places.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use blocksparse_bench::device::{self, poisoned, read_numbers};
use blocksparse_bench::device_time::median;
use blocksparse_bench::numbers::{BF16, F32};
use blocksparse_bench::operand::Operand;
use clap::Parser;
use cubecl::client::Client;
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
        client: device::client()?,
        end: Instant::now() + Duration::from_secs(args.seconds),
        args,
    };
    let rows = bench.args.rows;
    let one = |shape, seed| Operand::random(&bench.client, true, shape, false, seed);
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

impl Bench {
    fn product(&self, name: &str, lhs: &Operand, rhs: &Operand) -> Result<()> {
        let [batch, rows, inner] = lhs.shape;
        let columns = rhs.shape[2];
        let element = if self.args.f32 { F32 } else { BF16 };
        let shape = [batch, rows, columns];
        let count: usize = shape.iter().product();
        for strategy in strategies() {
            let label = strategy.to_string();
            let only = &self.args.only;
            let wanted = only.is_empty() || only.iter().any(|part| label.contains(part.as_str()));
            if !wanted || Instant::now() > self.end {
                continue;
            }
            let out = poisoned(&self.client, count, element);
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
                    InputBinding::new(binding(&lhs.handle, lhs.shape, lhs.strides), BF16),
                    InputBinding::new(binding(&rhs.handle, rhs.shape, rhs.strides), BF16),
                    binding(&out, shape, strides),
                    &mut elems,
                )
                .map_err(|error| anyhow!("{error:?}"))
            };
            let measured = median(&self.client, 7, run);
            match measured.and_then(|seconds| Ok((seconds, self.error(lhs, rhs, &out, shape)?))) {
                Ok((seconds, error)) => {
                    let ms = seconds * 1e3;
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

    /// The largest error at 64 places, relative to the size of a sum.
    fn error(&self, lhs: &Operand, rhs: &Operand, out: &Handle, shape: [usize; 3]) -> Result<f64> {
        let element = if self.args.f32 { F32 } else { BF16 };
        let made: Vec<f64> = read_numbers(&self.client, out, element)?;
        let ([_, rows, columns], inner) = (shape, lhs.shape[2]);
        let mut rng = ChaCha8Rng::seed_from_u64(4);
        let errors = (0..64).map(|_| {
            let [b, i, j] = shape.map(|length| rng.random_range(0..length));
            let terms = (0..inner).map(|k| lhs.at([b, i, k]) * rhs.at([b, k, j]));
            let got = made[(b * rows + i) * columns + j];
            (got - terms.sum::<f64>()).abs() / (inner as f64).sqrt()
        });
        // A number that was not written is NaN, and so is the largest error.
        Ok(
            errors.fold(0.0, |largest: f64, error| match error.is_nan() {
                true => error,
                false if largest.is_nan() => largest,
                false => largest.max(error),
            }),
        )
    }
}
