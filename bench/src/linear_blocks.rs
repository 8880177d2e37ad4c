//! Products of block-sparse weights: comparison with sums in f64, and times relative to dense products.

use std::sync::Arc;

use anyhow::{Result, anyhow};
use blocksparse::WeightLayout;
use blocksparse_bench::compare::{ensure_sum, ensure_written, same_twice};
use blocksparse_bench::device::{poisoned, read, upload};
use blocksparse_bench::numbers::{F32, decoded, half, rounded, rounding_of, uniform};
use blocksparse_bench::operand::Operand;
use blocksparse_bench::runner::Tally;
use burn_fused_ops::kernels::linear::blocks::{
    BlockGradientPlan, BlockProductPlan, BlockTables, Direction, block_gradient, multiply_blocks,
    pack_blocks,
};
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::server::Handle;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;

use super::{Bench, sum_parts, view};

/// A weight, its input and output gradient, and all results.
struct Layer {
    client: Client,
    element: ElemType,
    block: usize,
    inputs: usize,
    outputs: usize,
    rows: usize,
    places: Vec<(u32, u32)>,
    weight: Vec<f32>,
    weight_handle: Handle,
    x: Operand,
    dy: Operand,
    tables: Arc<BlockTables>,
    packed: [Handle; 2],
    products: [BlockProductPlan; 2],
    gradient: Option<BlockGradientPlan>,
    y: Handle,
    dx: Handle,
    parts: Handle,
    dw: Handle,
}

/// Draws blocks independently.
fn random_blocks(
    [inputs, outputs]: [usize; 2],
    block: usize,
    density: f64,
    rng: &mut ChaCha8Rng,
) -> Result<WeightLayout> {
    let mut mask = vec![false; inputs * outputs];
    for output in 0..outputs {
        for input in 0..inputs {
            mask[input * outputs + output] = rng.random_bool(density);
        }
    }
    let shape = [inputs * block, outputs * block];
    Ok(WeightLayout::from_mask(shape, block, &mask)?)
}

impl Layer {
    fn new(
        client: &Client,
        is_bf16: bool,
        layout: &WeightLayout,
        rows: usize,
        seed: u64,
    ) -> Result<Self> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let [block, inputs, outputs] = [layout.block(), layout.inputs(), layout.outputs()];
        let numbers = layout.len() * block * block;
        // At least one element, since a buffer cannot be empty.
        let weight = uniform(numbers.max(1), 1.0, F32, &mut rng);
        let tables = BlockTables::of(client, layout).map_err(|why| anyhow!(why))?;
        let product = |direction| {
            BlockProductPlan::new(client, &tables, direction, is_bf16, rows)
                .map_err(|why| anyhow!(why))
        };
        let products = [product(Direction::Forward)?, product(Direction::Backward)?];
        let gradient =
            (!layout.is_empty()).then(|| BlockGradientPlan::new(client, &tables, is_bf16, rows));
        let gradient = gradient.transpose().map_err(|why| anyhow!(why))?;
        let parts = gradient.as_ref().map_or(1, BlockGradientPlan::parts);
        let element = half(is_bf16);
        let matrix = |width| poisoned(client, rows * width, element);
        let operand = |width, seed| Operand::random(client, is_bf16, [1, rows, width], false, seed);
        Ok(Self {
            element,
            block,
            inputs,
            outputs,
            rows,
            weight_handle: upload(client, &weight, F32),
            weight,
            x: operand(inputs, seed ^ 1),
            dy: operand(outputs, seed ^ 2),
            packed: [Direction::Forward, Direction::Backward]
                .map(|direction| poisoned(client, tables.packed_elements(direction), element)),
            products,
            gradient,
            y: matrix(outputs),
            dx: matrix(inputs),
            parts: poisoned(client, parts * numbers, F32),
            dw: poisoned(client, numbers, F32),
            places: layout.kept_blocks().collect(),
            tables,
            client: client.clone(),
        })
    }

    fn multiply(&self, direction: Direction) -> Result<()> {
        let (x, out) = match direction {
            Direction::Forward => (&self.x, &self.y),
            Direction::Backward => (&self.dy, &self.dx),
        };
        let (client, tables) = (&self.client, &self.tables);
        let packed = &self.packed[direction as usize];
        let (from, to) = ((&self.weight_handle, F32), (packed, self.element));
        pack_blocks(client, tables, direction, from, to)?;
        let plan = &self.products[direction as usize];
        multiply_blocks(client, plan, tables, direction, &view(x), packed, out)?;
        Ok(())
    }

    fn weight_gradient(&self) -> Result<()> {
        let Some(plan) = &self.gradient else {
            return Ok(());
        };
        let (x, dy) = (view(&self.x), view(&self.dy));
        block_gradient(&self.client, plan, &self.tables, [&x, &dy], &self.parts)?;
        let sizes = [plan.parts(), self.tables.elements()];
        sum_parts(&self.client, &self.parts, sizes, &self.dw)
    }

    fn run(&self) -> Result<()> {
        self.multiply(Direction::Forward)?;
        self.multiply(Direction::Backward)?;
        self.weight_gradient()
    }

    fn results(&self) -> Result<[Vec<u8>; 3]> {
        self.run()?;
        let read = |handle| read(&self.client, handle);
        Ok([read(&self.y)?, read(&self.dx)?, read(&self.dw)?])
    }

    fn check(&self, seed: u64) -> Result<()> {
        let [y, dx, dw] = same_twice(|| self.results())?;
        let [y, dx]: [Vec<f64>; 2] = [y, dx].map(|bytes| decoded(&bytes, self.element));
        let numbers = self.tables.elements();
        let mut dw: Vec<f64> = decoded(&dw, F32);
        dw.truncate(numbers);
        for (name, numbers) in [("y", &y), ("dx", &dx), ("dW", &dw)] {
            ensure_written(name, numbers)?;
        }
        let (block, rounding) = (self.block, rounding_of(self.element));
        let weight = &|index: usize, row: usize, column: usize| {
            let at = index * block * block + row * block + column;
            f64::from(rounded(self.weight[at], self.element))
        };
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..300 {
            let row = rng.random_range(0..self.rows);
            for (name, made, factor, width, is_forward) in [
                ("y", &y, &self.x, self.outputs, true),
                ("dx", &dx, &self.dy, self.inputs, false),
            ] {
                let at = rng.random_range(0..width);
                let met = self.places.iter().enumerate().filter_map(|(index, place)| {
                    let (from, to) = if is_forward {
                        *place
                    } else {
                        (place.1, place.0)
                    };
                    (to as usize == at / block).then_some((index, from as usize))
                });
                let terms = met.flat_map(|(index, from)| {
                    (0..block).map(move |k| {
                        let within = at % block;
                        let (input, output) = if is_forward { (k, within) } else { (within, k) };
                        factor.at([0, row, from * block + k]) * weight(index, input, output)
                    })
                });
                let what = format_args!("{name}[{row}, {at}]");
                ensure_sum(what, made[row * width + at], terms, rounding)?;
            }
            if numbers > 0 {
                let at = rng.random_range(0..numbers);
                let (index, within) = (at / (block * block), at % (block * block));
                let (input, output) = self.places[index];
                let input = input as usize * block + within / block;
                let output = output as usize * block + within % block;
                let terms = (0..self.rows)
                    .map(|row| self.x.at([0, row, input]) * self.dy.at([0, row, output]));
                ensure_sum(format_args!("dW[{index}, {within}]"), dw[at], terms, 0.0)?;
            }
        }
        Ok(())
    }
}

/// Compares results on small weights with every block width.
pub(super) fn verify(bench: &Bench) -> Result<()> {
    let mut tally = Tally::new(bench.args.shard)?;
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
                let most: usize = rows * block * block * grid[0] * grid[1];
                if !tally.has_next() || most > bench.args.most {
                    continue;
                }
                let seed = tally.number as u64;
                let mut rng = ChaCha8Rng::seed_from_u64(!seed);
                let layout = random_blocks(grid, block, density, &mut rng)?;
                let layer = Layer::new(&bench.client, is_bf16, &layout, rows, seed)?;
                let name = format!(
                    "blocks of {block}, {grid:?}, {rows} rows, bf16 {is_bf16}, {}, {:?}",
                    layer.products[0],
                    layer.gradient.as_ref().map(ToString::to_string)
                );
                let by = (&bench.client, &bench.args.timing);
                tally.compare(by, name, || layer.run(), || layer.check(seed));
            }
        }
    }
    tally.finish("block-sparse layers")
}

/// Times a layer 2,048 × 2,048, dense and with a share of its blocks: forward and both gradients.
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

/// Times the three products of a layout, including gathering, packing of the weight and the sum over parts.
fn time_layer(bench: &mut Bench, layout: &WeightLayout, dense: f64) -> Result<()> {
    let client = bench.client.clone();
    let rows = bench.args.rows;
    let layer = Layer::new(&client, true, layout, rows, 7)?;
    let times = [
        bench.milliseconds(|| layer.multiply(Direction::Forward))?,
        bench.milliseconds(|| layer.multiply(Direction::Backward))?,
        bench.milliseconds(|| layer.weight_gradient())?,
    ];
    let [Some(forward), Some(backward), Some(gradient)] = times else {
        return Ok(());
    };
    let times = [forward, backward, gradient];
    let sum: f64 = times.iter().sum();
    let tables = &layer.tables;
    let [forward, backward] =
        [Direction::Forward, Direction::Backward].map(|d| tables.is_gathered(d));
    let chosen =
        [forward, backward, tables.is_gradient_gathered()].map(|gathered| match gathered {
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
    let gradient = layer.gradient.as_ref().map(ToString::to_string);
    println!(
        "    {}; {}",
        layer.products[0],
        gradient.unwrap_or_default()
    );
    bench.results.push(json!({
        "layout": layout.to_string(), "block": layout.block(), "density": layout.density(), "ms": times,
        "dense_ms": dense, "rows": rows,
    }));
    Ok(())
}
