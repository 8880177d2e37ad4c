//! Products with few rows: comparison with sums in f64, and times relative to tiled plans.

use anyhow::{Result, anyhow, ensure};
use blocksparse_bench::compare::{ensure_within, ensure_written, same_twice};
use blocksparse_bench::device::{poisoned, read, upload};
use blocksparse_bench::numbers::{BF16, F32, decoded, rounding_of, uniform};
use blocksparse_bench::operand::Operand;
use blocksparse_bench::runner::Tally;
use blocksparse_cubecl::rows::ActivationKind;
use burn_fused_ops::kernels::few_rows::{
    FewRows, FewRowsPlan, FewRowsRequest, FewRowsWeight, MOST_WEIGHTS,
};
use cubecl::client::Client;
use cubecl::server::Handle;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::json;

use super::{Bench, Product};

/// Columns after those of each weight, in the same memory.
const GAP: usize = 24;

/// Depth and columns of layers of SmolLM2-135M, Llama-3.2-1B and an 8B Llama, and whether they are a gate with its multiplicand.
const LAYERS: [(usize, usize, bool); 9] = [
    (576, 960, false),
    (576, 3072, true),
    (1536, 576, false),
    (2048, 3072, false),
    (2048, 16_384, true),
    (8192, 2048, false),
    (4096, 6144, false),
    (4096, 28_672, true),
    (14_336, 4096, false),
];

/// Rows, depth, the columns of each weight, and whether the first is a gate.
type Lengths = (usize, usize, &'static [usize], bool);

const VERIFIED: [Lengths; 12] = [
    (1, 8, &[8], false),
    (1, 576, &[576, 192, 192], false),
    (2, 136, &[72, 8], false),
    (5, 64, &[1032], false),
    (8, 1000, &[264, 128, 8], false),
    (8, 96, &[136, 136], true),
    (9, 64, &[64], false),
    (16, 4104, &[40], false),
    (21, 576, &[200, 200], true),
    (32, 576, &[64, 24, 24], false),
    (25, 1000, &[264, 64], false),
    (32, 264, &[72, 72], true),
];

/// A product with its tensors.
struct Few {
    client: Client,
    request: FewRowsRequest,
    x: Operand,
    weights: Vec<Operand>,
    bias: Option<(Vec<f32>, Handle)>,
    by_weight: bool,
    out: Handle,
}

/// Creates weights with gaps between their rows.
fn weights(
    client: &Client,
    is_bf16: bool,
    depth: usize,
    widths: &[usize],
    seed: u64,
) -> Vec<Operand> {
    let of = |(width, seed): (&usize, u64)| Operand {
        shape: [1, depth, *width],
        ..Operand::random(client, is_bf16, [1, depth, width + GAP], false, !seed)
    };
    widths.iter().zip(seed..).map(of).collect()
}

impl Few {
    /// Creates a product with a bias and a separate result for each weight, if there are several and no gate.
    fn new(
        client: &Client,
        rows: usize,
        weights: Vec<Operand>,
        gated: bool,
        seed: u64,
    ) -> Result<Self> {
        let widths: Vec<usize> = weights.iter().map(|weight| weight.shape[2]).collect();
        let (element, [_, depth, _]) = (weights[0].element, weights[0].shape);
        let request = FewRowsRequest::new(element, [rows, depth], &widths, [false, gated])?;
        let columns = Self::columns(&widths, gated);
        let several = widths.len() > 1 && !gated;
        let bias = uniform(columns, 1.0, F32, &mut ChaCha8Rng::seed_from_u64(seed));
        Ok(Self {
            client: client.clone(),
            request,
            x: Operand::random(client, element == BF16, [1, rows, depth], false, seed),
            weights,
            bias: several.then(|| (bias.clone(), upload(client, &bias, F32))),
            by_weight: several && rows.is_multiple_of(2),
            out: poisoned(client, rows * columns, element),
        })
    }

    /// Returns the number of columns of the result.
    fn columns(widths: &[usize], gated: bool) -> usize {
        match gated {
            true => widths[0],
            false => widths.iter().sum(),
        }
    }

    /// Returns the bytes of the weights.
    fn bytes(&self) -> usize {
        let [_, depth] = self.request.lengths;
        2 * depth * self.request.widths.iter().sum::<usize>()
    }

    fn starts(&self) -> [usize; MOST_WEIGHTS] {
        let [rows, _] = self.request.lengths;
        let [first, second, _] = self.request.widths;
        [0, rows * first, rows * (first + second)]
    }

    fn run(&self, plan: &FewRowsPlan) -> Result<()> {
        let FewRowsRequest {
            element,
            lengths,
            gated,
            ..
        } = self.request;
        let weights = self.weights.iter().map(|weight| FewRowsWeight {
            handle: &weight.handle,
            width: weight.shape[2],
            pitch: weight.strides[1],
        });
        let weights: Vec<_> = weights.collect();
        let widths: Vec<_> = weights.iter().map(|weight| weight.width).collect();
        let call = FewRows {
            x: (&self.x.handle, element),
            lengths,
            weights: &weights,
            transposed: false,
            bias: self.bias.as_ref().map(|(_, handle)| (handle, F32)),
            output: &self.out,
            numbers: lengths[0] * Self::columns(&widths, gated),
            starts: self.by_weight.then(|| self.starts()),
            gate: gated.then_some(ActivationKind::Silu),
        };
        Ok(plan.launch(&self.client, &call)?)
    }

    /// Checks that all elements equal the sums in f64 and have the same bits twice.
    fn check(&self, plan: &FewRowsPlan) -> Result<()> {
        let FewRowsRequest {
            element,
            lengths: [rows, depth],
            gated,
            ..
        } = self.request;
        let made = same_twice(|| {
            self.run(plan)?;
            read(&self.client, &self.out)
        })?;
        let made: Vec<f64> = decoded(&made, element);
        ensure_written("the product", &made)?;
        let (mut before, starts) = (0, self.starts());
        let count = self.request.count();
        let all: usize = self.request.widths[..count].iter().sum();
        ensure!(made.len() == rows * all, "{} numbers", made.len());
        for (index, weight) in self.weights[..count].iter().enumerate() {
            let width = weight.shape[2];
            for (row, column) in (0..rows).flat_map(|row| (0..width).map(move |col| (row, col))) {
                // A sum, and the bound of its rounding error.
                let sum = |weight: &Operand| {
                    let terms =
                        (0..depth).map(|k| self.x.at([0, row, k]) * weight.at([0, k, column]));
                    terms.fold((0.0, 1e-7), |(sum, lost), x| {
                        (sum + x, lost + x.abs() * 2f64.powi(-21))
                    })
                };
                let (mut expected, mut lost) = sum(weight);
                if let Some((bias, _)) = &self.bias {
                    expected += f64::from(bias[before + column]);
                }
                if gated {
                    let (other, other_lost) = sum(&self.weights[1]);
                    let active = expected / (1.0 + (-expected).exp());
                    // The slope of this activation is at most 1.1, and exponentials are approximate.
                    lost = 1.1 * lost * other.abs()
                        + active.abs() * other_lost
                        + 1e-6 * (active * other).abs();
                    expected = active * other;
                }
                let at = match self.by_weight {
                    true => starts[index] + row * width + column,
                    false => row * all + before + column,
                };
                let bound = 1.01 * rounding_of(element) * expected.abs() + lost;
                let what = format_args!("[{index}, {row}, {column}]");
                ensure_within(what, made[at], expected, bound)?;
            }
            before += width;
        }
        Ok(())
    }
}

/// Compares the selected plan and some others, with gaps between the rows of weights.
pub(super) fn verify(bench: &Bench) -> Result<()> {
    let mut tally = Tally::new(bench.args.shard)?;
    for lengths in VERIFIED {
        for is_bf16 in [true, false] {
            let (rows, depth, widths, gated) = lengths;
            let most = rows * depth * widths.iter().sum::<usize>();
            if !tally.has_next() || most > bench.args.most {
                continue;
            }
            let seed = tally.number as u64;
            let weights = weights(&bench.client, is_bf16, depth, widths, seed);
            let few = Few::new(&bench.client, rows, weights, gated, seed)?;
            let plans = FewRowsPlan::all(&bench.client, &few.request);
            ensure!(!plans.is_empty(), "no kernel here takes {lengths:?}");
            for plan in plans.iter().step_by(3) {
                let by = (&bench.client, &bench.args.timing);
                let name = format!("{lengths:?}, bf16 {is_bf16}, {plan}");
                tally.compare(by, name, || few.run(plan), || few.check(plan));
            }
        }
    }
    tally.finish("products")
}

/// Times layers of one weight with the plans for few rows and with tiles.
pub(super) fn times(bench: &mut Bench) -> Result<()> {
    let client = bench.client.clone();
    for (depth, width, gated) in LAYERS {
        let widths = if gated {
            vec![width / 2; 2]
        } else {
            vec![width]
        };
        let weights = weights(&client, true, depth, &widths, 1);
        let joined = Operand::random(&client, true, [1, depth, width], false, 2);
        for rows in [1, 8, 16, 32, 64] {
            let few = Few::new(&client, rows, weights.clone(), gated, 1)?;
            let tiles = Product::new(&client, [&few.x, &joined], false, false, 0)?;
            let tiles = tiles.ok_or_else(|| anyhow!("there are no tiles"))?;
            let plans = FewRowsPlan::all(&client, &few.request);
            // The first plan of the other kernel is always included.
            let other = plans.iter().position(|plan| plan.is_other(&plans[0]));
            let timed = |index: &usize| *index < bench.args.plans || Some(*index) == other;
            let plans = plans.iter().enumerate().filter(|(index, _)| timed(index));
            let plans: Vec<_> = plans.map(|(_, plan)| Some(*plan)).chain([None]).collect();
            for plan in plans {
                let time = match &plan {
                    Some(plan) => bench.milliseconds(|| few.run(plan))?,
                    None => bench.milliseconds(|| tiles.run())?,
                };
                let Some(ms) = time else { continue };
                let rate = few.bytes() as f64 / ms / 1e6;
                let text = plan.map_or(tiles.plan.to_string(), |plan| plan.to_string());
                println!(
                    "{rows:>3} × {depth:>6} × {width:>6} {:>8.2} µs {rate:>7.0} GB/s  {text}",
                    1e3 * ms
                );
                bench.results.push(json!({
                    "rows": rows, "depth": depth, "columns": width, "ms": ms, "gb_per_s": rate, "plan": text,
                }));
            }
        }
    }
    Ok(())
}
