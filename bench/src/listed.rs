//! `bench-listed`: attention of queries that walk lists of their own, with lists alone: times, and equality to loops in f64.

mod device_time;

use anyhow::{Result, anyhow, ensure};
use blocksparse::kernels::listed::{
    KeyListPlan, ListedGradients, ListedLists, ListedPlan, ListedRequest, ListedTiles, Way,
    backward, forward,
};
use blocksparse::kernels::{Gradients, OutputGrads, Outputs, ScoreOptions, TensorView};
use clap::Parser;
use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::server::Handle;
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use device_time::median;

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
    /// Of lists of single keys, compute all pairs in tiles. When timing, both ways are timed.
    #[arg(long)]
    tiles: bool,
    /// Launch every kernel once and wait for nothing: for looking at what is compiled.
    #[arg(long)]
    enqueue_only: bool,
}

/// A call: its numbers here and on the device.
struct Call {
    client: Client,
    plan: Option<ListedPlan>,
    tiles: Option<ListedTiles>,
    request: ListedRequest,
    /// q, k, v and the output's gradient.
    numbers: [Vec<f32>; 4],
    views: [TensorView; 4],
    lists: Vec<i32>,
    blocks: Handle,
    queries: Handle,
    tile_blocks: Handle,
    /// Out, lse, and the gradients by q, k and v.
    results: [Handle; 5],
    /// The same gradients, as kernels of layouts write them.
    gradients: Gradients,
    pairs: usize,
}

/// Blocks before a query's own, each at most once, in order.
fn list_of(rng: &mut ChaCha8Rng, own: usize, most: usize, hot: bool) -> Vec<i32> {
    let mut list: Vec<i32> = Vec::new();
    if hot && own > 0 {
        list.push(0);
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
        let ListedRequest { tile, tiles, .. } = request;
        let scale = 1.0 / (head_dim as f64).sqrt();
        let plan = ListedPlan::new(client.properties(), request);
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
                    list = list_of(&mut rng, query / block, most, args.hot);
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
            (rows * head_dim * 2, if args.tiles { 0xff } else { 0 }),
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
            tiles: tiles_plan.ok(),
            request,
            gradients: Gradients::new(dq.clone(), dkv, v_start / 2),
            blocks: uploaded(&lists),
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
            return Ok(blocksparse::kernels::forward(
                &self.client,
                tiles.plan(),
                &layout,
                x,
                saved,
                &options,
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
            return Ok(blocksparse::kernels::backward(
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
            ListedGradients {
                q: dq,
                k: dk,
                v: dv,
            },
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

    /// Out, lse and the gradients by q, k and v, in f64.
    fn expected(&self) -> [Vec<f64>; 5] {
        let ListedRequest {
            heads,
            kv_heads,
            seq_q: n,
            head_dim,
            value_dim,
            block,
            most,
            ..
        } = self.request;
        let [q, k, v, grad] = &self.numbers;
        let mut made = [&q[..], &[], &q[..], &k[..], &v[..]].map(|x| vec![0.0; x.len()]);
        let rows = q.len() / head_dim;
        made[0] = vec![0.0; rows * value_dim];
        made[1] = vec![f64::NEG_INFINITY; rows];
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            a.iter()
                .zip(b)
                .map(|(&a, &b)| f64::from(a) * f64::from(b))
                .sum()
        };
        for row in 0..rows {
            let (query, head) = (row % n, row / n);
            let kv_head = head / heads * kv_heads + head % heads / (heads / kv_heads);
            let list = &self.lists[(kv_head * n + query) * most..][..most];
            let keys: Vec<usize> = (list.iter().filter(|&&named| named >= 0))
                .flat_map(|&named| (0..block).map(move |at| named as usize * block + at))
                .filter(|&key| key < n)
                .map(|key| kv_head * n + key)
                .collect();
            let q_row = &q[row * head_dim..][..head_dim];
            let g_row = &grad[row * value_dim..][..value_dim];
            let score = |key: &usize| dot(q_row, &k[key * head_dim..][..head_dim]) * self.scale();
            let scores: Vec<f64> = keys.iter().map(score).collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
            if keys.is_empty() {
                continue;
            }
            made[1][row] = top + total.ln();
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp() / total).collect();
            for (key, p) in keys.iter().zip(&weights) {
                for c in 0..value_dim {
                    made[0][row * value_dim + c] += p * f64::from(v[key * value_dim + c]);
                }
            }
            let out = &made[0][row * value_dim..][..value_dim];
            let delta: f64 = out.iter().zip(g_row).map(|(o, &g)| o * f64::from(g)).sum();
            for (key, p) in keys.iter().zip(&weights) {
                let by_weight = dot(g_row, &v[key * value_dim..][..value_dim]);
                let ds = p * (by_weight - delta) * self.scale();
                for c in 0..head_dim {
                    made[2][row * head_dim + c] += ds * f64::from(k[key * head_dim + c]);
                    made[3][key * head_dim + c] += ds * f64::from(q_row[c]);
                }
                for c in 0..value_dim {
                    made[4][key * value_dim + c] += p * f64::from(g_row[c]);
                }
            }
        }
        made
    }
}

/// Small calls of every width and number of heads, with lists of blocks or of single keys, against loops in f64, and the same bits twice.
fn verify(
    client: &Client,
    [keys, tiles]: [bool; 2],
    skip: usize,
    [shard, of]: [usize; 2],
) -> Result<()> {
    let way = if tiles { Way::Tiles } else { Way::Walk };
    ensure!(
        shard < of,
        "--shard is {shard}, of {of} parts numbered from 0"
    );
    let (mut number, mut checked, mut failed) = (0, 0, 0);
    let usual = [(64, 64), (128, 128), (192, 128), (64, 128), (192, 64)];
    let groups = [(16, 1), (32, 2), (32, 1), (48, 1), (64, 1), (128, 1)];
    // Heads that do not fill a matrix, and widths between.
    let partly = [(1, 1), (8, 2), (12, 1), (20, 1), (72, 1), (100, 1)];
    let between = [(48, 48), (96, 80), (16, 112), (176, 16)];
    let mut kinds: Vec<_> = (groups.into_iter())
        .flat_map(|heads| usual.map(|widths| (heads, widths)))
        .collect();
    kinds.extend(partly.map(|heads| (heads, (64, 64))));
    kinds.extend(between.map(|widths| ((16, 1), widths)));
    kinds.extend([
        ((4, 1), (48, 48)),
        ((8, 1), (128, 128)),
        ((24, 2), (192, 128)),
    ]);
    for ((heads, kv_heads), (head_dim, value_dim)) in kinds.into_iter().skip(skip) {
        // The last of each have a block whose list has parts.
        let blocks = [
            (64, 3, 300),
            (16, 5, 210),
            (32, 1, 77),
            (128, 2, 390),
            (64, 2, 9000),
        ];
        // And the second of single keys is more steps than there is room for, where a step has many.
        let single = [(1, 40, 300), (1, 420, 700), (1, 1, 77), (1, 9, 9000)];
        let calls: &[_] = if keys { &single } else { &blocks };
        for &(block, most, n) in calls {
            let hot = n > 1000;
            if (hot && heads != 16) || (n == 700 && heads < 48) {
                continue;
            }
            number += 1;
            if number % of != shard {
                continue;
            }
            let args = Args {
                n,
                heads,
                kv_heads,
                head_dim,
                value_dim,
                block,
                most,
                alike: 1,
                hot,
                repeats: 1,
                verify: true,
                shard,
                of,
                skip,
                tiles,
                enqueue_only: false,
            };
            let name = format!(
                "{heads} heads on {kv_heads}, {head_dim} and {value_dim} wide, {n} keys, {most} blocks of {block}"
            );
            let batch = if hot { 1 } else { 2 };
            let new = || Call::new(client, batch, &args, number as u64);
            if tiles && new()?.tiles.is_none() {
                println!("{name}: not in tiles");
                continue;
            }
            checked += 1;
            let run = || -> Result<(Call, [Vec<f64>; 5])> {
                let call = new()?;
                call.forward(way)?;
                call.backward(way)?;
                let found = call.read()?;
                Ok((call, found))
            };
            let (call, found) = run()?;
            let (_, again) = run()?;
            let expected = call.expected();
            let names = ["out", "lse", "dq", "dk", "dv"];
            let mut is_wrong = found != again;
            if is_wrong {
                println!("{name}: other bits");
            }
            for (of, (found, expected)) in names.iter().zip(found.iter().zip(&expected)) {
                let finite = expected.iter().filter(|x| x.is_finite());
                let scale = finite.fold(0.1, |most: f64, x| most.max(x.abs()));
                let pairs = found.iter().zip(expected);
                let worst = pairs.enumerate().map(|(at, (x, y))| match x == y {
                    true => (0.0, at),
                    false if x.is_finite() && y.is_finite() => ((x - y).abs() / scale, at),
                    false => (f64::INFINITY, at),
                });
                let worst = worst.fold((0.0, 0), |a, b| if b.0 > a.0 { b } else { a });
                if worst.0 > 1e-2 {
                    let (got, exact) = (found[worst.1], expected[worst.1]);
                    println!(
                        "{name}: {of} errs by {:.2e} at {}: got {got}, expected {exact}",
                        worst.0, worst.1
                    );
                    is_wrong = true;
                }
            }
            failed += u64::from(is_wrong);
            println!("{name}: {}", if is_wrong { "wrong" } else { "right" });
        }
    }
    println!("{checked} calls, {failed} failed");
    ensure!(failed == 0, "{failed} calls are wrong");
    Ok(())
}

fn main() -> Result<()> {
    let args = Args::parse();
    let client = cubecl::Device::Cuda(Default::default()).client();
    if args.verify {
        let of = [args.block == 1, args.tiles];
        return verify(&client, of, args.skip, [args.shard, args.of]);
    }
    let call = Call::new(&client, 1, &args, 1)?;
    let ways: &[Way] = match (&call.plan, &call.tiles) {
        (Some(_), Some(_)) => &[Way::Walk, Way::Tiles],
        (None, _) => &[Way::Tiles],
        (_, None) => &[Way::Walk],
    };
    if args.block == 1 {
        let chosen = KeyListPlan::new(&client, call.request, call.scale());
        println!("{}", chosen.map_err(|why| anyhow!(why))?);
    } else {
        println!("{}", call.walk()?);
    }
    if args.enqueue_only {
        for &way in ways {
            call.forward(way)?;
            call.backward(way)?;
        }
        return client.flush().map_err(|error| anyhow!("{error}"));
    }
    let flops = 2.0 * (args.head_dim + args.value_dim) as f64 * call.pairs as f64;
    // A row of heads reads its keys and values once.
    let bytes = flops / (args.heads / args.kv_heads) as f64;
    for &way in ways {
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
