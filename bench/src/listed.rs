//! `bench-listed`: attention of queries that walk lists of their own, with lists alone: times, and equality to loops in f64.

mod device_time;
mod listed_verify;

use anyhow::{Result, anyhow};
use blocksparse_cubecl::{Gradients, OutputGrads, Outputs, ScoreOptions, TensorView};
use burn_sparse_select::kernels::listed::KeyListPlan;
use burn_sparse_select::kernels::listed::ListedGradients;
use burn_sparse_select::kernels::listed::ListedLists;
use burn_sparse_select::kernels::listed::ListedPlan;
use burn_sparse_select::kernels::listed::ListedRequest;
use burn_sparse_select::kernels::listed::ListedTiles;
use burn_sparse_select::kernels::listed::NeighbourPlan;
use burn_sparse_select::kernels::listed::Way;
use burn_sparse_select::kernels::listed::backward;
use burn_sparse_select::kernels::listed::forward;
use burn_sparse_select::kernels::listed::neighbours;
use clap::{Parser, ValueEnum};
use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::server::Handle;
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use device_time::median;
use listed_verify::verify;

#[derive(Parser)]
#[command(
    about = "Times attention of queries that walk lists of their own, or compares it with loops in f64",
    version
)]
struct Args {
    /// Queries and keys.
    #[arg(long, short, default_value_t = 65_536)]
    n: usize,
    #[arg(long, default_value_t = 64)]
    heads: usize,
    #[arg(long, default_value_t = 4)]
    kv_heads: usize,
    #[arg(long, default_value_t = 128)]
    head_dim: usize,
    #[arg(long, default_value_t = 128)]
    value_dim: usize,
    /// Keys of a block; 1 for lists of single keys.
    #[arg(long, default_value_t = 64)]
    block: usize,
    /// Blocks of a list.
    #[arg(long, default_value_t = 13)]
    most: usize,
    /// Queries that follow each other and have the same list.
    #[arg(long, default_value_t = 1)]
    alike: usize,
    /// Share of a list that the next query's keeps, of lists of single keys, which plans expect.
    #[arg(long, default_value_t = 0.0)]
    overlap: f64,
    /// Every query's list has the first block.
    #[arg(long)]
    hot: bool,
    /// Timed runs; the median is reported.
    #[arg(long, default_value_t = 15)]
    repeats: usize,
    /// Compare results with loops in f64, of small calls, and run twice, instead of timing. With `--block 1` those of single keys.
    #[arg(long)]
    verify: bool,
    /// Of so many parts of what is to be compared, only this one.
    #[arg(long, default_value_t = 0)]
    shard: usize,
    /// Parts of what is to be compared: kernels of a call take a minute or more to compile, and processes share it.
    #[arg(long, default_value_t = 1)]
    of: usize,
    /// Of what is to be compared, leave out the first kinds of heads and widths: 30 are full matrices of the widths that models have.
    #[arg(long, default_value_t = 0)]
    skip: usize,
    /// How lists of single keys are attended to. Unless it is said, walks are compared, and all ways are timed.
    #[arg(long, value_enum)]
    way: Option<CalledWay>,
    /// Launch every kernel once and wait for nothing: for looking at what is compiled.
    #[arg(long)]
    enqueue_only: bool,
}

/// What `--way` says.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CalledWay {
    Walk,
    Neighbours,
    Tiles,
}

impl From<CalledWay> for Way {
    fn from(way: CalledWay) -> Self {
        match way {
            CalledWay::Walk => Self::Walk,
            CalledWay::Neighbours => Self::Neighbours,
            CalledWay::Tiles => Self::Tiles,
        }
    }
}

/// A call: its numbers here and on the device.
struct Call {
    client: Client,
    plan: Option<ListedPlan>,
    neighbours: Option<NeighbourPlan>,
    tiles: Option<ListedTiles>,
    request: ListedRequest,
    /// q, k, v and the output's gradient.
    numbers: [Vec<f32>; 4],
    views: [TensorView; 4],
    lists: Vec<i32>,
    blocks: Handle,
    /// The same in two parts, each with every other number of a list.
    parts: [Handle; 2],
    queries: Handle,
    tile_blocks: Handle,
    /// Out, lse, and the gradients by q, k and v.
    results: [Handle; 5],
    /// The same gradients, as kernels of layouts write them.
    gradients: Gradients,
    pairs: usize,
}

/// Blocks before a query's own, each at most once, in order: what it keeps, and others.
fn list_of(
    rng: &mut ChaCha8Rng,
    mut list: Vec<i32>,
    own: usize,
    most: usize,
    hot: bool,
) -> Vec<i32> {
    list.retain(|&named| named >= 0);
    if hot && own > 0 && !list.contains(&0) {
        list.insert(0, 0);
        list.truncate(most);
    }
    if own <= most {
        list = (0..own as i32).collect();
    } else {
        let mut seen = vec![false; own];
        for &named in &list {
            seen[named as usize] = true;
        }
        for _ in 0..4 * most {
            let named = rng.random_range(0..own);
            if list.len() < most && !seen[named] {
                seen[named] = true;
                list.push(named as i32);
            }
        }
    }
    list.sort_unstable();
    list.resize(most, -1);
    list
}

impl Call {
    fn new(client: &Client, batch: usize, args: &Args, seed: u64) -> Result<Self> {
        let &Args {
            n,
            heads,
            kv_heads,
            head_dim,
            value_dim,
            block,
            most,
            ..
        } = args;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (sizes, lengths, widths) = ([batch, heads, kv_heads], [n, n], [head_dim, value_dim]);
        let dtype = ElemType::Float(FloatKind::BF16);
        let request = match block {
            1 => ListedRequest::of_keys(sizes, lengths, widths, dtype, most, true),
            _ => {
                let tile = block.min(64);
                let tiles = (n * most + (tile - 1) * n.div_ceil(block)) / tile;
                let blocks = [block, most];
                ListedRequest::new(sizes, lengths, widths, dtype, blocks, [tile, tiles])
            }
        };
        let request = request.with_overlap(args.overlap);
        let ListedRequest { tile, tiles, .. } = request;
        let scale = 1.0 / (head_dim as f64).sqrt();
        let plan = ListedPlan::new(client.properties(), request);
        // Plans of blocks have them where they are expected to be faster.
        let neighbours = NeighbourPlan::new(client.properties(), request);
        let neighbours = neighbours.filter(|_| block == 1);
        let tiles_plan = ListedTiles::new(client, &request, scale);
        if let (Err(walk), Err(in_tiles)) = (&plan, &tiles_plan) {
            anyhow::bail!("no kernels: {walk}; {in_tiles}");
        }
        let shapes = [
            [batch, heads, n, head_dim],
            [batch, kv_heads, n, head_dim],
            [batch, kv_heads, n, value_dim],
            [batch, heads, n, value_dim],
        ];
        // Long calls repeat a part of their numbers: nothing depends on them but power.
        let numbers = shapes.map(|shape| {
            let count: usize = shape.iter().product();
            let drawn = count.min(1 << 20);
            let some: Vec<f32> = (0..drawn)
                .map(|_| bf16::from_f32(rng.random_range(-1.5..1.5)).to_f32())
                .collect();
            (0..count).map(|at| some[at % drawn]).collect::<Vec<f32>>()
        });
        let views = [0, 1, 2, 3].map(|of| {
            let bytes: Vec<u8> = (numbers[of].iter())
                .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
                .collect();
            let [_, heads, rows, width] = shapes[of];
            TensorView {
                handle: client.create_from_slice(&bytes),
                shape: shapes[of],
                strides: [heads * rows * width, rows * width, width, 1],
            }
        });
        let mut lists = Vec::new();
        for _ in 0..batch * kv_heads {
            let mut list = Vec::new();
            for query in 0..n {
                if query % args.alike == 0 {
                    list.retain(|_| args.overlap > 0.0 && rng.random_bool(args.overlap));
                    list = list_of(&mut rng, list, query / block, most, args.hot);
                }
                lists.extend(&list);
            }
        }
        let (mut queries, mut tile_blocks) = (Vec::new(), Vec::new());
        // Single keys are listed by queries alone.
        let turned: &[i32] = if block == 1 { &[] } else { &lists };
        for list in turned.chunks(n * most) {
            let mut of_block = vec![Vec::new(); n.div_ceil(block)];
            for (at, &named) in list.iter().enumerate() {
                if named >= 0 {
                    of_block[named as usize].push((at / most) as i32);
                }
            }
            let (first, first_tile) = (queries.len(), tile_blocks.len());
            for (named, of) in of_block.iter().enumerate() {
                queries.extend(of);
                let filled = (queries.len() - first).next_multiple_of(tile);
                queries.resize(first + filled, -1);
                tile_blocks.resize(first_tile + filled / tile, named as i32);
            }
            queries.resize(first + tiles * tile, -1);
            tile_blocks.resize(first_tile + tiles, -1);
        }
        let chosen = lists.iter().filter(|&&named| named >= 0).count();
        let uploaded = |numbers: &[i32]| {
            let mut bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
            bytes.resize(bytes.len().max(4), 0);
            client.create_from_slice(&bytes)
        };
        let (rows, keys) = (batch * heads * n, batch * kv_heads * n);
        let sizes = [
            (rows * value_dim * 2, 0xff),
            (rows * 4, 0xff),
            // Gradients are added to what is there, but for those in tiles.
            (
                rows * head_dim * 2,
                if args.way == Some(CalledWay::Tiles) {
                    0xff
                } else {
                    0
                },
            ),
        ];
        let [out, lse, dq] =
            sizes.map(|(bytes, byte)| client.create_from_slice(&vec![byte; bytes]));
        // Of keys and values, one behind the other.
        let align = client.properties().memory.alignment as usize;
        let k_bytes = keys * head_dim * 2;
        let v_start = k_bytes.next_multiple_of(align);
        let bytes = v_start + keys * value_dim * 2;
        let dkv = client.create_from_slice(&vec![sizes[2].1; bytes]);
        let dk = dkv.clone().offset_end((bytes - k_bytes) as u64);
        let dv = dkv.clone().offset_start(v_start as u64);
        Ok(Self {
            client: client.clone(),
            plan: plan.ok(),
            neighbours,
            tiles: tiles_plan.ok(),
            request,
            gradients: Gradients::new(dq.clone(), dkv, v_start / 2),
            blocks: uploaded(&lists),
            parts: [0, 1].map(|part| {
                let own = lists.chunks(most).flat_map(|list| {
                    let mut own: Vec<i32> = list.iter().copied().skip(part).step_by(2).collect();
                    own.resize(most, -1);
                    own
                });
                uploaded(&own.collect::<Vec<i32>>())
            }),
            queries: uploaded(&queries),
            tile_blocks: uploaded(&tile_blocks),
            results: [out, lse, dq, dk, dv],
            numbers,
            views,
            lists,
            pairs: chosen * block * (heads / kv_heads),
        })
    }

    fn scale(&self) -> f64 {
        1.0 / (self.request.head_dim as f64).sqrt()
    }

    fn walk(&self) -> Result<&ListedPlan> {
        let plan = self.plan.as_ref();
        plan.ok_or_else(|| anyhow!("there is no walk of these lists"))
    }

    fn of_neighbours(&self) -> Result<&NeighbourPlan> {
        let plan = self.neighbours.as_ref();
        plan.ok_or_else(|| anyhow!("neighbours do not walk these lists together"))
    }

    fn in_tiles(&self) -> Result<&ListedTiles> {
        let tiles = self.tiles.as_ref();
        tiles.ok_or_else(|| anyhow!("there are no tiles for this call"))
    }

    fn forward(&self, way: Way) -> Result<()> {
        let [q, k, v, _] = &self.views;
        let [out, lse, ..] = &self.results;
        let saved = Outputs::new(out, lse);
        let (x, scale) = ([q, k, v], self.scale());
        if way == Way::Tiles {
            let tiles = self.in_tiles()?;
            let layout = tiles.layout(&self.client, &self.blocks)?;
            let options = ScoreOptions::new(scale);
            return Ok(blocksparse_cubecl::forward(
                &self.client,
                tiles.plan(),
                &layout,
                x,
                saved,
                &options,
            )?);
        }
        if way == Way::Neighbours {
            let (plan, keys) = (self.of_neighbours()?, &self.blocks);
            let client = &self.client;
            return Ok(neighbours::forward(
                client, plan, x, keys, saved, scale, false,
            )?);
        }
        Ok(forward(
            &self.client,
            self.walk()?,
            x,
            &self.blocks,
            saved,
            scale,
            false,
        )?)
    }

    /// Over one part of the lists, which the other one carries on.
    fn forward_in_parts(&self) -> Result<()> {
        let [q, k, v, _] = &self.views;
        let [out, lse, ..] = &self.results;
        for (part, carry) in self.parts.iter().zip([false, true]) {
            let (plan, saved) = (self.walk()?, Outputs::new(out, lse));
            let (client, scale) = (&self.client, self.scale());
            forward(client, plan, [q, k, v], part, saved, scale, carry)?;
        }
        Ok(())
    }

    fn backward(&self, way: Way) -> Result<()> {
        let [q, k, v, grad_out] = &self.views;
        let [out, lse, dq, dk, dv] = &self.results;
        let by = OutputGrads {
            out: grad_out,
            lse: None,
        };
        if way == Way::Tiles {
            let tiles = self.in_tiles()?;
            let layout = tiles.layout(&self.client, &self.blocks)?;
            let options = ScoreOptions::new(self.scale());
            return Ok(blocksparse_cubecl::backward(
                &self.client,
                tiles.plan(),
                &layout,
                [q, k, v],
                Outputs::new(out, lse),
                by,
                &self.gradients,
                &options,
            )?);
        }
        let made = ListedGradients {
            q: dq,
            k: dk,
            v: dv,
        };
        if way == Way::Neighbours {
            return Ok(neighbours::backward(
                &self.client,
                self.of_neighbours()?,
                [q, k, v],
                &self.blocks,
                Outputs::new(out, lse),
                by,
                made,
                self.scale(),
            )?);
        }
        Ok(backward(
            &self.client,
            self.walk()?,
            [q, k, v],
            match self.request.block {
                1 => ListedLists::Keys(&self.blocks),
                _ => ListedLists::Blocks {
                    blocks: &self.blocks,
                    queries: &self.queries,
                    tile_blocks: &self.tile_blocks,
                },
            },
            Outputs::new(out, lse),
            by,
            made,
            self.scale(),
        )?)
    }

    fn read(&self) -> Result<[Vec<f64>; 5]> {
        let mut found = [const { Vec::new() }; 5];
        for (at, handle) in self.results.iter().enumerate() {
            let bytes = self.client.read_one(handle.clone());
            let bytes = bytes.map_err(|error| anyhow!("{error:?}"))?;
            found[at] = match at {
                1 => (bytes.chunks_exact(4))
                    .map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
                    .collect(),
                _ => (bytes.chunks_exact(2))
                    .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64())
                    .collect(),
            };
        }
        Ok(found)
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let client = cubecl::Device::Cuda(Default::default()).client();
    if args.verify {
        let shard = [args.shard, args.of];
        let way = args.way.unwrap_or(CalledWay::Walk);
        return verify(&client, args.block == 1, way, args.skip, shard);
    }
    let call = Call::new(&client, 1, &args, 1)?;
    let ways = [
        call.plan.as_ref().map(|_| Way::Walk),
        call.neighbours.as_ref().map(|_| Way::Neighbours),
        call.tiles.as_ref().map(|_| Way::Tiles),
    ];
    let mut ways: Vec<Way> = ways.into_iter().flatten().collect();
    ways.retain(|&way| args.way.is_none_or(|said| way == said.into()));
    if args.block == 1 {
        let chosen = KeyListPlan::new(&client, call.request, call.scale());
        println!("{}", chosen.map_err(|why| anyhow!(why))?);
    } else {
        println!("{}", call.walk()?);
    }
    if args.enqueue_only {
        for &way in &ways {
            call.forward(way)?;
            call.backward(way)?;
        }
        return client.flush().map_err(|error| anyhow!("{error}"));
    }
    let flops = 2.0 * (args.head_dim + args.value_dim) as f64 * call.pairs as f64;
    // A row of heads reads its keys and values once.
    let bytes = flops / (args.heads / args.kv_heads) as f64;
    for &way in &ways {
        for (name, seconds, flops) in [
            (
                "forward",
                median(&client, args.repeats, || call.forward(way))?,
                flops,
            ),
            (
                "backward",
                median(&client, args.repeats, || call.backward(way))?,
                2.5 * flops,
            ),
        ] {
            let (ms, speed) = (seconds * 1e3, flops / seconds / 1e12);
            println!("{way:?} {name:9} {ms:8.3} ms {speed:7.1} TFLOP/s of listed pairs");
            if way == Way::Walk {
                println!(
                    "  one walk of the lists at {:.2} TB/s",
                    bytes / seconds / 1e12
                );
            }
        }
    }
    Ok(())
}
