//! What is checked and what is timed.

use blocksparse::kernels::hopper::{Half, Tile};
use blocksparse::{BlockLayout, BlockMask, LayoutShape, Pattern};

use crate::inputs::{Order, Random};

/// Shapes of the kernel to compare, for layouts of this block size.
pub fn variants(block: usize) -> Vec<(String, Tile)> {
    let mut all = Vec::new();
    let mut add = |dim, warpgroups, cols: usize, stages, lag, overlap, softcap| {
        let tile = Tile {
            half: Half::Bf16,
            dim,
            warpgroups,
            cols,
            group: cols.min(block),
            stages,
            lag,
            overlap,
            softcap,
            residue: false,
            carry: false,
        };
        let name = format!(
            "d{dim}w{warpgroups}c{cols}s{stages}l{lag}{}{}",
            if overlap { "o" } else { "" },
            if softcap { "t" } else { "" }
        );
        all.push((name, tile));
    };
    for softcap in [false, true] {
        add(64, 2, 128, 3, 2, false, softcap);
        add(64, 1, 128, 2, 1, false, softcap);
        add(64, 1, 128, 2, 1, true, softcap);
        add(128, 2, 128, 3, 2, false, softcap);
        add(128, 2, 128, 3, 2, true, softcap);
        add(128, 1, 64, 3, 1, true, softcap);
        add(96, 2, 128, 3, 2, false, softcap);
        add(96, 1, 64, 3, 1, true, softcap);
        add(256, 2, 64, 2, 1, true, softcap);
        add(256, 1, 64, 2, 1, true, softcap);
    }
    all
}

/// Those that `choose` may take, one or two per head_dim.
pub fn is_main(name: &str) -> bool {
    !["d64w1c128s2l1o", "d128w2c128s3l2o"].contains(&name.trim_end_matches('t'))
}

pub struct Check {
    /// Whether all variants and both dtypes are checked.
    pub thorough: bool,
    pub name: String,
    pub layout: BlockLayout,
    pub batch: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub order: Order,
    pub softcap: Option<f64>,
}

/// Blocks kept at random below the diagonal, and the diagonal.
pub fn random_blocks(heads: usize, seq: usize, block: usize, density: f32) -> BlockLayout {
    let mut random = Random(1);
    let shape = LayoutShape {
        heads,
        seq_q: seq,
        seq_kv: seq,
        block_size: block,
    };
    let full = BlockMask::corner(block, block, block);
    let diagonal = BlockMask::from_fn(block, |r, c| c <= r);
    BlockLayout::from_block_fn("random", shape, |_, q, k| {
        let kept = random.uniform() < density;
        match q.cmp(&k) {
            std::cmp::Ordering::Less => None,
            std::cmp::Ordering::Equal => Some(diagonal.clone()),
            std::cmp::Ordering::Greater => kept.then(|| full.clone()),
        }
    })
    .unwrap()
}

/// Random blocks with holes in them: empty rows of blocks, rows without keys, ragged ends, seq_q ≠ seq_kv.
fn holes(heads: usize, seq_q: usize, seq_kv: usize, block: usize) -> BlockLayout {
    let mut random = Random(7);
    let shape = LayoutShape {
        heads,
        seq_q,
        seq_kv,
        block_size: block,
    };
    BlockLayout::from_block_fn("holes", shape, |head, q, _| {
        let x = random.uniform();
        let mut inner = Random(random.bits());
        match () {
            _ if q % 5 == head % 5 || x < 0.5 => None,
            _ if x < 0.7 => Some(BlockMask::corner(block, block, block)),
            _ => Some(BlockMask::from_fn(block, |r, _| {
                r % 7 != 3 && inner.uniform() < 0.3
            })),
        }
    })
    .unwrap()
}

pub fn checks() -> Vec<Check> {
    let mut all = Vec::new();
    let mut add = |name: &str, layout: BlockLayout, batch, kv_heads, order, softcap| {
        for dim in [64, 96, 128, 256] {
            if (dim == 96 || dim == 256) && ![16, 64].contains(&layout.block_size()) {
                continue;
            }
            all.push(Check {
                thorough: name.starts_with("causal ragged"),
                name: format!("{name} b{} d{dim}", layout.block_size()),
                layout: layout.clone(),
                batch,
                kv_heads,
                dim,
                order,
                softcap,
            });
        }
    };
    let layout = |pattern: Pattern, heads, seq, block| pattern.layout(heads, seq, block).unwrap();
    add(
        "causal",
        layout(Pattern::causal(), 2, 512, 128),
        2,
        2,
        Order::Heads,
        None,
    );
    add(
        "causal ragged strided",
        layout(Pattern::causal(), 4, 699, 64),
        2,
        2,
        Order::Sequence,
        None,
    );
    for block in [8, 16, 32, 64, 128] {
        add(
            "fixed",
            layout(Pattern::fixed(24, 6), 2, 411, block),
            1,
            1,
            Order::Sequence,
            None,
        );
        add(
            "random",
            random_blocks(2, 512, block, 0.2),
            1,
            2,
            Order::Heads,
            None,
        );
        add("holes", holes(2, 333, 470, block), 2, 1, Order::Heads, None);
    }
    add(
        "local",
        layout(Pattern::local(100), 2, 700, 32),
        1,
        2,
        Order::Heads,
        None,
    );
    add(
        "streaming",
        layout(Pattern::streaming(200, 17), 2, 1000, 64),
        1,
        2,
        Order::Heads,
        None,
    );
    add(
        "merged strided",
        layout(Pattern::merged_strided(7), 2, 7 * 64, 32),
        2,
        1,
        Order::Sequence,
        None,
    );
    add(
        "merged strided long",
        layout(Pattern::merged_strided(4), 2, 1000, 64),
        1,
        2,
        Order::Heads,
        None,
    );
    add(
        "strided",
        layout(Pattern::strided(24), 2, 24 * 19, 16),
        1,
        2,
        Order::Heads,
        Some(5.0),
    );
    add(
        "one short",
        layout(Pattern::causal(), 1, 5, 8),
        1,
        1,
        Order::Heads,
        None,
    );
    add(
        "softcap",
        layout(Pattern::causal(), 2, 300, 32),
        1,
        2,
        Order::Heads,
        Some(3.0),
    );
    all
}

pub struct Workload {
    pub name: &'static str,
    pub batch: usize,
    pub dim: usize,
    pub layout: fn() -> BlockLayout,
}

pub fn workloads() -> Vec<Workload> {
    let work = |name, batch, dim, layout| Workload {
        name,
        batch,
        dim,
        layout,
    };
    vec![
        work("causal-d64", 4, 64, || {
            Pattern::causal().layout(16, 8192, 128).unwrap()
        }),
        work("causal-d128", 4, 128, || {
            Pattern::causal().layout(16, 8192, 128).unwrap()
        }),
        work("fixed-d64", 4, 64, || {
            Pattern::fixed(128, 32).layout(8, 12288, 32).unwrap()
        }),
        work("local-d64", 4, 64, || {
            Pattern::local(256).layout(8, 16384, 128).unwrap()
        }),
        work("local64-d64", 4, 64, || {
            Pattern::local(256).layout(8, 16384, 64).unwrap()
        }),
        work("streaming-d128", 1, 128, || {
            Pattern::streaming(4096, 64).layout(8, 65536, 128).unwrap()
        }),
        work("random64-d128", 1, 128, || random_blocks(8, 32768, 64, 0.1)),
        work("random128-d128", 1, 128, || {
            random_blocks(8, 32768, 128, 0.1)
        }),
        work("sweep-random16-d64", 1, 64, || {
            random_blocks(4, 8192, 16, 0.1)
        }),
        work("sweep-random32-d64", 1, 64, || {
            random_blocks(4, 16384, 32, 0.1)
        }),
        work("sweep-local-b16-d64", 4, 64, || {
            Pattern::local(256).layout(8, 16384, 16).unwrap()
        }),
        work("sweep-fixed-b16-d64", 4, 64, || {
            Pattern::fixed(128, 32).layout(8, 12288, 16).unwrap()
        }),
        work("merged-strided-d64", 4, 64, || {
            Pattern::merged_strided(128).layout(8, 16384, 128).unwrap()
        }),
        work("causal-d256", 4, 256, || {
            Pattern::causal().layout(8, 8192, 128).unwrap()
        }),
        work("causal-d96", 4, 96, || {
            Pattern::causal().layout(16, 8192, 128).unwrap()
        }),
    ]
}
