//! Products of block-sparse weights: equality to sums in f64, and times beside dense ones.

use anyhow::{Result, anyhow, ensure};
use blocksparse::WeightLayout;
use blocksparse_cubecl::rows::{Window, window_sums};
use burn_fused_ops::kernels::linear::blocks::BlockGradientPlan;
use burn_fused_ops::kernels::linear::blocks::BlockProduct;
use burn_fused_ops::kernels::linear::blocks::BlockProductPlan;
use burn_fused_ops::kernels::linear::blocks::BlockTables;
use burn_fused_ops::kernels::linear::blocks::Direction;
use burn_fused_ops::kernels::linear::blocks::KeptBlocks;
use burn_fused_ops::kernels::linear::blocks::block_gradient;
use burn_fused_ops::kernels::linear::blocks::multiply_blocks;
use burn_fused_ops::kernels::linear::blocks::pack_blocks;
use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::server::Handle;
use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;

use super::{Bench, F32, Operand};

/// A weight, x and the gradient by the result, with all that is made of them.
struct Layer {
    client: Client,
    bf16: bool,
    block: usize,
    inputs: usize,
    outputs: usize,
    rows: usize,
    places: Vec<(u32, u32)>,
    weight: Vec<f32>,
    weight_handle: Handle,
    x: Operand,
    dy: Operand,
    tables: BlockTables,
    packed: [Handle; 2],
    products: [BlockProductPlan; 2],
    gradient: Option<BlockGradientPlan>,
    y: Handle,
    dx: Handle,
    parts: Handle,
    dw: Handle,
}

/// Blocks drawn one by one.
fn random_places(grid: [usize; 2], density: f64, rng: &mut ChaCha8Rng) -> Vec<(u32, u32)> {
    let [inputs, outputs] = grid;
    let all = (0..outputs).flat_map(|output| (0..inputs).map(move |input| (input, output)));
    all.filter(|_| rng.random_bool(density))
        .map(|(input, output)| (input as u32, output as u32))
        .collect()
}

impl Layer {
    fn new(
        client: &Client,
        bf16: bool,
        block: usize,
        grid: [usize; 2],
        rows: usize,
        places: Vec<(u32, u32)>,
        seed: u64,
    ) -> Result<Self> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let [inputs, outputs] = grid.map(|blocks| blocks * block);
        let numbers = places.len() * block * block;
        let weight: Vec<f32> = (0..numbers).map(|_| rng.random_range(-1.0..1.0)).collect();
        let mut bytes: Vec<u8> = weight.iter().flat_map(|x| x.to_le_bytes()).collect();
        bytes.resize(bytes.len().max(4), 0);
        let kept = KeptBlocks {
            block,
            inputs,
            outputs,
            places: &places,
        };
        let tables = BlockTables::new(client, &kept).map_err(|why| anyhow!(why))?;
        let product = |direction| {
            BlockProductPlan::new(client, &tables, direction, bf16, rows)
                .map_err(|why| anyhow!(why))
        };
        let products = [product(Direction::Forward)?, product(Direction::Backward)?];
        let gradient = match places.is_empty() {
            true => None,
            false => Some(
                BlockGradientPlan::new(client, &tables, bf16, rows).map_err(|why| anyhow!(why))?,
            ),
        };
        // All bits set are NaN.
        let poisoned = |count: usize| client.create_from_slice(&vec![0xff; count.max(4)]);
        let packed = [Direction::Forward, Direction::Backward]
            .map(|direction| poisoned(2 * tables.packed_numbers(direction)));
        let parts = gradient.as_ref().map_or(1, BlockGradientPlan::parts);
        Ok(Self {
            bf16,
            block,
            inputs,
            outputs,
            rows,
            weight_handle: client.create_from_slice(&bytes),
            weight,
            x: Operand::random(client, bf16, [1, rows, inputs], false, seed ^ 1),
            dy: Operand::random(client, bf16, [1, rows, outputs], false, seed ^ 2),
            packed,
            products,
            gradient,
            y: poisoned(2 * rows * outputs),
            dx: poisoned(2 * rows * inputs),
            parts: poisoned(4 * parts * numbers),
            dw: poisoned(4 * numbers),
            places,
            tables,
            client: client.clone(),
        })
    }

    fn multiply(&self, direction: Direction) -> Result<()> {
        let half = if self.bf16 {
            FloatKind::BF16
        } else {
            FloatKind::F16
        };
        let (x, out) = match direction {
            Direction::Forward => (&self.x, &self.y),
            Direction::Backward => (&self.dy, &self.dx),
        };
        let packed = &self.packed[direction as usize];
        let weight = (&self.weight_handle, F32);
        pack_blocks(
            &self.client,
            &self.tables,
            direction,
            weight,
            (packed, ElemType::Float(half)),
        )?;
        let plan = &self.products[direction as usize];
        multiply_blocks(
            &self.client,
            plan,
            &self.tables,
            direction,
            &x.view,
            packed,
            out,
        )?;
        Ok(())
    }

    fn weight_gradient(&self) -> Result<()> {
        let Some(plan) = &self.gradient else {
            return Ok(());
        };
        let factors = [&self.x.view, &self.dy.view];
        block_gradient(&self.client, plan, &self.tables, factors, &self.parts)?;
        let width = self.tables.numbers();
        let window = Window {
            start: 0,
            width,
            pitch: width,
        };
        let sizes = [plan.parts(), 1];
        window_sums(
            &self.client,
            (&self.parts, F32),
            sizes,
            window,
            (&self.dw, F32),
        )?;
        Ok(())
    }

    fn read(&self, handle: &Handle) -> Result<Vec<u8>> {
        let bytes = self
            .client
            .read_one(handle.clone())
            .map_err(|error| anyhow!("{error:?}"))?;
        Ok(bytes.to_vec())
    }

    fn half_of(&self, bytes: &[u8], at: usize) -> f64 {
        let two = [bytes[2 * at], bytes[2 * at + 1]];
        match self.bf16 {
            true => bf16::from_le_bytes(two).to_f64(),
            false => f16::from_le_bytes(two).to_f64(),
        }
    }

    fn rounded(&self, x: f32) -> f64 {
        match self.bf16 {
            true => bf16::from_f32(x).to_f64(),
            false => f16::from_f32(x).to_f64(),
        }
    }

    fn run(&self) -> Result<()> {
        self.multiply(Direction::Forward)?;
        self.multiply(Direction::Backward)?;
        self.weight_gradient()
    }

    fn results(&self) -> Result<[Vec<u8>; 3]> {
        self.run()?;
        Ok([
            self.read(&self.y)?,
            self.read(&self.dx)?,
            self.read(&self.dw)?,
        ])
    }

    fn check(&self, seed: u64) -> Result<()> {
        let [y, dx, dw] = self.results()?;
        ensure!(
            self.results()? == [y.clone(), dx.clone(), dw.clone()],
            "other bits the second time"
        );
        let rounding = if self.bf16 {
            2f64.powi(-8)
        } else {
            2f64.powi(-11)
        };
        for (name, bytes, width) in [("y", &y, self.outputs), ("dx", &dx, self.inputs)] {
            let missing = (0..self.rows * width).filter(|at| self.half_of(bytes, *at).is_nan());
            let missing = missing.count();
            ensure!(missing == 0, "{missing} numbers of {name} were not written");
        }
        let number =
            |at: usize| f64::from(f32::from_le_bytes([0, 1, 2, 3].map(|i| dw[4 * at + i])));
        let numbers = self.tables.numbers();
        let missing = (0..numbers).filter(|at| number(*at).is_nan()).count();
        ensure!(missing == 0, "{missing} numbers of dW were not written");
        let block = self.block;
        let weight = |index: usize, row: usize, column: usize| {
            self.rounded(self.weight[index * block * block + row * block + column])
        };
        let close = |name: &str,
                     at: [usize; 2],
                     got: f64,
                     terms: &mut dyn Iterator<Item = f64>,
                     rounding: f64| {
            let (sum, size) =
                terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + f64::abs(x)));
            let bound = 1.01 * rounding * f64::abs(sum) + size * 2f64.powi(-21) + 1e-7;
            ensure!(
                (got - sum).abs() <= bound,
                "{name}{at:?} is {got}, and {sum} in f64: {:.1} of the bound",
                (got - sum).abs() / bound
            );
            Ok(())
        };
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..300 {
            let row = rng.random_range(0..self.rows);
            let output = rng.random_range(0..self.outputs);
            let mut terms = (self.places.iter().enumerate())
                .filter(|(_, (_, of))| *of as usize == output / block)
                .flat_map(|(index, (input, _))| {
                    (0..block).map(move |k| {
                        let at = *input as usize * block + k;
                        self.x.at([0, row, at]) * weight(index, k, output % block)
                    })
                });
            let got = self.half_of(&y, row * self.outputs + output);
            close("y", [row, output], got, &mut terms, rounding)?;
            let input = rng.random_range(0..self.inputs);
            let mut terms = (self.places.iter().enumerate())
                .filter(|(_, (of, _))| *of as usize == input / block)
                .flat_map(|(index, (_, output))| {
                    (0..block).map(move |k| {
                        let at = *output as usize * block + k;
                        self.dy.at([0, row, at]) * weight(index, input % block, k)
                    })
                });
            let got = self.half_of(&dx, row * self.inputs + input);
            close("dx", [row, input], got, &mut terms, rounding)?;
            if numbers > 0 {
                let at = rng.random_range(0..numbers);
                let (index, within) = (at / (block * block), at % (block * block));
                let (input, output) = self.places[index];
                let input = input as usize * block + within / block;
                let output = output as usize * block + within % block;
                let mut terms = (0..self.rows)
                    .map(|row| self.x.at([0, row, input]) * self.dy.at([0, row, output]));
                close("dW", [index, within], number(at), &mut terms, 0.0)?;
            }
        }
        Ok(())
    }
}

/// Equality on small weights of every width of blocks.
pub(super) fn verify(bench: &Bench) -> Result<()> {
    let (mut checked, mut failed) = (0, 0);
    let mut number = 0;
    for block in [16, 32, 64, 128] {
        for is_bf16 in [true, false] {
            for (grid, rows, density) in [
                ([1, 1], 1, 1.0),
                ([3, 5], 70, 0.4),
                ([7, 4], 300, 0.3),
                ([9, 11], 1100, 0.25),
                ([6, 6], 40_000, 0.5),
                ([4, 3], 100, 0.0),
            ] {
                number += 1;
                let most: usize = rows * block * block * grid[0] * grid[1];
                if number % bench.args.of != bench.args.shard || most > bench.args.most {
                    continue;
                }
                let mut rng = ChaCha8Rng::seed_from_u64(!number);
                let places = random_places(grid, density, &mut rng);
                let layer = Layer::new(&bench.client, is_bf16, block, grid, rows, places, number)?;
                checked += 1;
                if bench.args.enqueue_only {
                    layer.run()?;
                    bench.client.flush().map_err(|error| anyhow!("{error}"))?;
                    continue;
                }
                if let Err(error) = layer.check(number) {
                    failed += 1;
                    println!(
                        "blocks of {block}, {grid:?}, {rows} rows, bf16 {is_bf16}, {}, {:?}: {error}",
                        layer.products[0],
                        layer.gradient.as_ref().map(ToString::to_string)
                    );
                }
            }
        }
    }
    println!("{checked} block-sparse layers, {failed} failed");
    ensure!(failed == 0, "{failed} layers are wrong");
    Ok(())
}

/// A layer 2,048 × 2,048, dense and with a part of its blocks: forward and both gradients.
pub(super) fn times(bench: &mut Bench) -> Result<()> {
    let rows = bench.args.rows;
    let client = bench.client.clone();
    const WIDTH: usize = 2048;
    let mut dense = 0.0;
    {
        let x = Operand::random(&client, true, [1, rows, WIDTH], false, 1);
        let w = Operand::random(&client, true, [1, WIDTH, WIDTH], false, 2);
        dense += bench.time("forward 2048 -> 2048", &x, &w, false)?;
        dense += bench.time("dx      2048 -> 2048", &x, &w.transposed(), false)?;
        dense += bench.time("dW      2048 -> 2048", &x.transposed(), &x, true)?;
    }
    for small_world in [false, true] {
        for density in [0.25, 0.1] {
            for block in [128, 64, 32, 16] {
                let shape = [WIDTH; 2];
                let layout = match small_world {
                    false => WeightLayout::random(shape, block, density, 7)?,
                    true => WeightLayout::small_world(shape, block, density, 0.1, 7)?,
                };
                time_layer(bench, &layout, dense)?;
            }
        }
    }
    Ok(())
}

/// One layout's three products, gathered, the packing of the weight and the sum over parts included.
fn time_layer(bench: &mut Bench, layout: &WeightLayout, dense: f64) -> Result<()> {
    let client = bench.client.clone();
    let rows = bench.args.rows;
    let grid = [layout.in_blocks(), layout.out_blocks()];
    let places = layout.kept_blocks().collect();
    let layer = Layer::new(&client, true, layout.block(), grid, rows, places, 7)?;
    if bench.args.enqueue_only {
        layer.run()?;
        return client.flush().map_err(|error| anyhow!("{error}"));
    }
    let times = [
        bench.median(|| layer.multiply(Direction::Forward))?,
        bench.median(|| layer.multiply(Direction::Backward))?,
        bench.median(|| layer.weight_gradient())?,
    ];
    let sum: f64 = times.iter().sum();
    let chosen = [
        BlockProduct::Forward,
        BlockProduct::Backward,
        BlockProduct::Weight,
    ];
    let chosen = chosen.map(|product| match layer.tables.is_gathered(product) {
        true => "gathered",
        false => "dense",
    });
    println!(
        "{layout}: {:.4} + {:.4} + {:.4} = {sum:.4} ms, {:.2} of density · dense ({dense:.4} ms), to be run {}",
        times[0],
        times[1],
        times[2],
        sum / (layout.density() * dense),
        chosen.join(", "),
    );
    println!(
        "    {}; {}",
        layer.products[0],
        layer
            .gradient
            .as_ref()
            .map_or(String::new(), ToString::to_string)
    );
    bench.results.push(json!({
        "layout": layout.to_string(), "block": layout.block(), "density": layout.density(), "ms": times,
        "dense_ms": dense, "rows": rows,
    }));
    Ok(())
}
