//! `bench-listed`: attention of queries to individual block lists: times, and comparison with loops in f64.

mod listed_verify;

use anyhow::{Result, anyhow};
use blocksparse_bench::device::{self, contiguous, poisoned, read_floats, upload, upload_ints};
use blocksparse_bench::numbers::{BF16, F32, uniform};
use blocksparse_bench::runner::{Shard, Timing};
use blocksparse_cubecl::{Gradients, OutputGrads, Outputs, ScoreOptions, TensorView};
use burn_sparse_select::kernels::listed::{
    ByBlock, ListedGradients, ListedLists, ListedPlan, ListedRequest, ListedTiles, Mainloops,
    PlacedLists, backward, backward_by_block, forward, forward_by_block,
};
use clap::{Parser, ValueEnum};
use cubecl::client::Client;
use cubecl::server::Handle;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use listed_verify::verify;

#[derive(Clone, Parser)]
#[command(
    about = "Times attention of queries to lists of their own, or compares it with loops in f64",
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
    #[command(flatten)]
    timing: Timing<15>,
    /// Compare results with loops in f64, of small calls, and run twice, instead of timing. With `--block 1` those of single keys.
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    shard: Shard,
    /// Of what is to be compared, leave out the first kinds of heads and widths: 30 are full matrices of the widths that models have.
    #[arg(long, default_value_t = 0)]
    skip: usize,
    /// How lists are attended to. Unless it is said, `queries` are compared, and all ways are timed.
    #[arg(long, value_enum)]
    way: Option<Way>,
}

/// Value of `--way`.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Way {
    Queries,
    Neighbours,
    Blocks,
    Tiles,
}

/// Implementation of a call.
enum Plan {
    Queries(Mainloops),
    Neighbours(Mainloops),
    /// The mainloops of the forward and the backward pass.
    Blocks([ByBlock; 2]),
    Tiles(ListedTiles),
}

impl Plan {
    fn way(&self) -> Way {
        match self {
            Plan::Queries(_) => Way::Queries,
            Plan::Neighbours(_) => Way::Neighbours,
            Plan::Blocks(_) => Way::Blocks,
            Plan::Tiles(_) => Way::Tiles,
        }
    }
}

/// A call with its data on the host and on the device.
struct Call {
    client: Client,
    plans: Vec<Plan>,
    request: ListedRequest,
    /// q, k, v and the gradient of the output.
    numbers: [Vec<f32>; 4],
    views: [TensorView; 4],
    lists: Vec<i32>,
    blocks: Handle,
    /// `blocks` in two parts, each with every second entry of a list.
    parts: [Handle; 2],
    queries: Handle,
    tile_blocks: Handle,
    places: Handle,
    /// Out, lse, and the gradients with respect to q, k and v.
    results: [Handle; 5],
    /// The same gradients in the form that layout kernels write.
    gradients: Gradients,
    pairs: usize,
}

/// Returns distinct blocks before a query's own, in order: those that it keeps, and new ones.
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
        let request = match block {
            1 => ListedRequest::of_keys(sizes, lengths, widths, BF16, most, true),
            _ => {
                let tile = block.min(64);
                let tiles = (n * most + (tile - 1) * n.div_ceil(block)) / tile;
                let blocks = [block, most];
                ListedRequest::new(sizes, lengths, widths, BF16, blocks, [tile, tiles])
            }
        };
        let request = request.with_overlap(args.overlap);
        let ListedRequest { tile, tiles, .. } = request;
        let scale = 1.0 / (head_dim as f64).sqrt();
        let mainloop = Mainloops::alone(client.properties(), request);
        let neighbours = Mainloops::together(client.properties(), request);
        let by_block = |backward| ByBlock::new(client.properties(), request, backward).ok();
        let tiles_of_lists = ListedTiles::new(client, &request, scale);
        if let (Err(mainloop), Err(in_tiles)) = (&mainloop, &tiles_of_lists) {
            anyhow::bail!("no kernels: {mainloop}; {in_tiles}");
        }
        let plans = [
            mainloop.ok().map(Plan::Queries),
            neighbours.ok().map(Plan::Neighbours),
            (by_block(false).zip(by_block(true))).map(|(there, back)| Plan::Blocks([there, back])),
            tiles_of_lists.ok().map(Plan::Tiles),
        ];
        let shapes = [
            [batch, heads, n, head_dim],
            [batch, kv_heads, n, head_dim],
            [batch, kv_heads, n, value_dim],
            [batch, heads, n, value_dim],
        ];
        let numbers = shapes.map(|shape| uniform(shape.iter().product(), 1.5, BF16, &mut rng));
        let views =
            [0, 1, 2, 3].map(|of| contiguous(upload(client, &numbers[of], BF16), shapes[of]));
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
        let mut places = vec![-1; lists.len()];
        // Single keys are listed only per query.
        let turned: &[i32] = if block == 1 { &[] } else { &lists };
        let placed = places.chunks_mut(n * most);
        for (list, places) in turned.chunks(n * most).zip(placed) {
            let mut of_block = vec![Vec::new(); n.div_ceil(block)];
            for (at, &named) in list.iter().enumerate() {
                if named >= 0 {
                    of_block[named as usize].push(at);
                }
            }
            let (first, first_tile) = (queries.len(), tile_blocks.len());
            for (named, of) in of_block.iter().enumerate() {
                for &at in of {
                    places[at] = (queries.len() - first) as i32;
                    queries.push((at / most) as i32);
                }
                let filled = (queries.len() - first).next_multiple_of(tile);
                queries.resize(first + filled, -1);
                tile_blocks.resize(first_tile + filled / tile, named as i32);
            }
            queries.resize(first + tiles * tile, -1);
            tile_blocks.resize(first_tile + tiles, -1);
        }
        let chosen = lists.iter().filter(|&&named| named >= 0).count();
        let (rows, keys) = (batch * heads * n, batch * kv_heads * n);
        let out = poisoned(client, rows * value_dim, BF16);
        let lse = poisoned(client, rows, F32);
        // Gradients are added to the existing contents, except with tiles.
        let before = match args.way {
            Some(Way::Tiles) => 0xff,
            _ => 0,
        };
        let gradient = |bytes: usize| client.create_from_slice(&vec![before; bytes]);
        let dq = gradient(rows * head_dim * 2);
        // Gradients of keys and of values, one after the other.
        let align = client.properties().memory.alignment as usize;
        let k_bytes = keys * head_dim * 2;
        let v_start = k_bytes.next_multiple_of(align);
        let bytes = v_start + keys * value_dim * 2;
        let dkv = gradient(bytes);
        let dk = dkv.clone().offset_end((bytes - k_bytes) as u64);
        let dv = dkv.clone().offset_start(v_start as u64);
        Ok(Self {
            client: client.clone(),
            plans: plans.into_iter().flatten().collect(),
            request,
            gradients: Gradients::new(dq.clone(), dkv, v_start / 2),
            blocks: upload_ints(client, &lists),
            parts: [0, 1].map(|part| {
                let own = lists.chunks(most).flat_map(|list| {
                    let mut own: Vec<i32> = list.iter().copied().skip(part).step_by(2).collect();
                    own.resize(most, -1);
                    own
                });
                upload_ints(client, &own.collect::<Vec<i32>>())
            }),
            queries: upload_ints(client, &queries),
            tile_blocks: upload_ints(client, &tile_blocks),
            places: upload_ints(client, &places),
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

    /// Returns queries, keys and values, and the outputs of the forward pass.
    fn tensors(&self) -> ([&TensorView; 3], Outputs<'_>) {
        let ([q, k, v, _], [out, lse, ..]) = (&self.views, &self.results);
        ([q, k, v], Outputs::new(out, lse))
    }

    fn plan(&self, way: Way) -> Option<&Plan> {
        self.plans.iter().find(|plan| plan.way() == way)
    }

    fn forward(&self, plan: &Plan) -> Result<()> {
        let (x, saved) = self.tensors();
        let (client, blocks, scale) = (&self.client, &self.blocks, self.scale());
        match plan {
            Plan::Queries(mainloops) | Plan::Neighbours(mainloops) => {
                forward(client, mainloops, x, blocks, saved, scale, false)?;
            }
            Plan::Blocks([by_block, _]) => self.forward_by_block(by_block, false)?,
            Plan::Tiles(tiles) => {
                let layout = tiles.layout(client, blocks)?;
                let options = ScoreOptions::new(scale);
                blocksparse_cubecl::forward(client, tiles.plan(), &layout, x, saved, &options)?
            }
        }
        Ok(())
    }

    fn placed(&self) -> PlacedLists<'_> {
        PlacedLists {
            blocks: &self.blocks,
            queries: &self.queries,
            tile_blocks: &self.tile_blocks,
            places: &self.places,
        }
    }

    /// Runs the forward pass by blocks. With `carry` it continues from the results so far.
    fn forward_by_block(&self, plan: &ByBlock, carry: bool) -> Result<()> {
        let ((x, saved), lists) = (self.tensors(), self.placed());
        forward_by_block(&self.client, plan, x, lists, saved, self.scale(), carry)?;
        Ok(())
    }

    /// Runs the forward pass over the first part of the lists, then continues with the second.
    fn forward_in_parts(&self, mainloops: &Mainloops) -> Result<()> {
        for (part, carry) in self.parts.iter().zip([false, true]) {
            let ((x, saved), client) = (self.tensors(), &self.client);
            forward(client, mainloops, x, part, saved, self.scale(), carry)?;
        }
        Ok(())
    }

    fn backward(&self, plan: &Plan) -> Result<()> {
        let ([.., grad_out], [.., dq, dk, dv]) = (&self.views, &self.results);
        let (x, saved) = self.tensors();
        let (client, blocks, scale) = (&self.client, &self.blocks, self.scale());
        let by = OutputGrads {
            out: grad_out,
            lse: None,
        };
        let made = ListedGradients {
            q: dq,
            k: dk,
            v: dv,
        };
        match plan {
            Plan::Queries(mainloops) | Plan::Neighbours(mainloops) => {
                let lists = match self.request.block {
                    1 => ListedLists::Keys(blocks),
                    _ => ListedLists::Blocks(self.placed()),
                };
                backward(client, mainloops, x, lists, saved, by, made, scale)?;
            }
            Plan::Blocks([_, plan]) => {
                let lists = self.placed();
                backward_by_block(client, plan, x, lists, saved, by, made, scale)?;
            }
            Plan::Tiles(tiles) => {
                let (plan, layout) = (tiles.plan(), tiles.layout(client, blocks)?);
                let (made, options) = (&self.gradients, ScoreOptions::new(scale));
                blocksparse_cubecl::backward(client, plan, &layout, x, saved, by, made, &options)?;
            }
        }
        Ok(())
    }

    fn read(&self) -> Result<[Vec<f64>; 5]> {
        let [out, lse, dq, dk, dv] = &self.results;
        let read = |handle| read_floats(&self.client, handle, BF16);
        let lse = read_floats(&self.client, lse, F32)?;
        Ok([read(out)?, lse, read(dq)?, read(dk)?, read(dv)?])
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let client = device::client()?;
    if args.verify {
        return verify(&client, &args);
    }
    let call = Call::new(&client, 1, &args, 1)?;
    let chosen = ListedPlan::new(&client, call.request, call.scale());
    println!("{}", chosen.map_err(|why| anyhow!(why))?);
    let flops = 2.0 * (args.head_dim + args.value_dim) as f64 * call.pairs as f64;
    // Query heads that share a KV head read its keys and values once.
    let bytes = flops / (args.heads / args.kv_heads) as f64;
    for plan in &call.plans {
        let way = plan.way();
        if args.way.is_some_and(|said| said != way) {
            continue;
        }
        type Pass = fn(&Call, &Plan) -> Result<()>;
        let passes: [(&str, f64, Pass); 2] = [
            ("forward", flops, Call::forward),
            ("backward", 2.5 * flops, Call::backward),
        ];
        for (name, flops, pass) in passes {
            let Some(seconds) = args.timing.seconds(&client, || pass(&call, plan))? else {
                continue;
            };
            let (ms, speed) = (seconds * 1e3, flops / seconds / 1e12);
            println!("{way:?} {name:9} {ms:8.3} ms {speed:7.1} TFLOP/s of listed pairs");
            if way == Way::Queries {
                let rate = bytes / seconds / 1e12;
                println!("  one pass over the lists at {rate:.2} TB/s");
            }
        }
    }
    Ok(())
}
