//! The table of cases. A pattern or a shape that can go wrong is one row here.

use burn_blocksparse::{AttentionOptions, BlockLayout, LayoutShape, Pattern};

use crate::reference::{Problem, Sizes};

#[derive(Clone, Debug)]
pub struct Case {
    pub name: &'static str,
    pub pattern: Pattern,
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub seq_q: usize,
    pub seq_kv: usize,
    pub block_size: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub scale: Option<f64>,
    pub softcap: Option<f64>,
}

impl Case {
    fn new(name: &'static str, pattern: Pattern, seq: usize, block_size: usize) -> Self {
        Self {
            name,
            pattern,
            batch: 2,
            heads: 2,
            kv_heads: 2,
            seq_q: seq,
            seq_kv: seq,
            block_size,
            head_dim: 8,
            value_dim: 8,
            scale: None,
            softcap: None,
        }
    }

    fn heads(mut self, heads: usize, kv_heads: usize) -> Self {
        (self.heads, self.kv_heads) = (heads, kv_heads);
        self
    }

    fn rectangular(mut self, seq_q: usize, seq_kv: usize) -> Self {
        (self.seq_q, self.seq_kv) = (seq_q, seq_kv);
        self
    }

    fn dims(mut self, head_dim: usize, value_dim: usize) -> Self {
        (self.head_dim, self.value_dim) = (head_dim, value_dim);
        self
    }

    fn softcap(mut self, softcap: f64) -> Self {
        self.softcap = Some(softcap);
        self
    }

    fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    pub fn layout(&self) -> BlockLayout {
        let shape = LayoutShape {
            heads: self.heads,
            seq_q: self.seq_q,
            seq_kv: self.seq_kv,
            block_size: self.block_size,
        };
        BlockLayout::new(&self.pattern, shape)
            .unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    pub fn options(&self) -> AttentionOptions {
        let mut options = AttentionOptions::default();
        options.scale = self.scale;
        options.softcap = self.softcap;
        options
    }

    pub fn sizes(&self) -> Sizes {
        Sizes {
            batch: self.batch,
            heads: self.heads,
            kv_heads: self.kv_heads,
            seq_q: self.seq_q,
            seq_kv: self.seq_kv,
            head_dim: self.head_dim,
            value_dim: self.value_dim,
        }
    }

    /// Random inputs and what f64 arithmetic over `Pattern::attends` makes of them.
    pub fn problem(&self, seed: u64) -> Problem {
        let offset = self.seq_kv as i64 - self.seq_q as i64;
        let pattern = self.pattern.clone();
        Problem::random(self.sizes(), seed, move |_, head, i, j| {
            pattern.attends(head, i as i64 + offset, j as i64)
        })
        .options(self.scale, self.softcap)
    }
}

/// A problem whose batch entries have a pattern each, and their layouts as one.
pub fn per_batch(
    patterns: &[Pattern],
    sizes: Sizes,
    block_size: usize,
    seed: u64,
) -> (BlockLayout, Problem) {
    let layouts: Vec<BlockLayout> = (patterns.iter())
        .map(|pattern| pattern.layout(sizes.heads, sizes.seq_q, block_size))
        .collect::<Result<_, _>>()
        .unwrap();
    let layout = BlockLayout::stack_batch(&layouts).unwrap();
    let patterns = patterns.to_vec();
    let problem = Problem::random(sizes, seed, move |batch, head, i, j| {
        patterns[batch].attends(head, i as i64, j as i64)
    });
    (layout, problem)
}

/// The cases with their numbers, which seed their problems. `BURN_SPARSE_SHARD=K/N` leaves every N-th, from the K-th on (N/N is
/// 0/N): to run a device that compiles slowly on a part of the table, another one for each part of `tests/vulkan.txt`. Checks pick variants by a case's number
/// modulo 2, 3, 4, 5 and 6, so N has to be coprime with these: each of 0/7 to 6/7 meets every variant (a test).
pub fn table() -> Vec<(usize, Case)> {
    let (part, parts) = shard();
    shard_of(part, parts)
}

/// K and N of `BURN_SPARSE_SHARD`, or 0 and 1.
pub fn shard() -> (usize, usize) {
    let shard = std::env::var("BURN_SPARSE_SHARD").ok();
    shard.map_or((0, 1), |text| {
        parse_shard(&text).unwrap_or_else(|error| panic!("{error}"))
    })
}

/// Of rows that each compile kernels of their own: all, or with `BURN_SPARSE_SHARD` one in so many, other ones with each K. There must be as many rows.
pub fn some_of<T>(rows: impl IntoIterator<Item = T>, one_in: usize) -> impl Iterator<Item = T> {
    let (part, parts) = shard();
    let one_in = if parts == 1 { 1 } else { one_in };
    rows.into_iter().skip(part % one_in).step_by(one_in)
}

/// K and N of `K/N`, K less than N.
pub fn parse_shard(text: &str) -> Result<(usize, usize), String> {
    let numbers = text.split_once('/').map(|(k, n)| (k.parse(), n.parse()));
    match numbers {
        Some((Ok::<usize, _>(k), Ok(n))) if k <= n && n > 0 => Ok((k % n, n)),
        _ => Err(format!(
            "BURN_SPARSE_SHARD must be K/N with K at most N, got {text}"
        )),
    }
}

/// The cases whose numbers are `part` modulo `parts`.
pub fn shard_of(part: usize, parts: usize) -> Vec<(usize, Case)> {
    let numbered = cases().into_iter().enumerate();
    numbered.skip(part).step_by(parts).collect()
}

/// Every pattern, every block size, ragged ends, rectangles, rows without keys, grouped heads. Softcaps, rows without keys and patterns
/// walked by residue class stand where every seventh case meets each of them.
pub fn cases() -> Vec<Case> {
    let checkerboard = || {
        Pattern::from_fn("checkerboard", |head, i, j| {
            (i / 3 + j / 5 + head as i64) % 2 == 0 && i % 11 != 4
        })
    };
    // Queries 16..48 see nothing: whole block rows without keys, and rows of partial blocks.
    let gaps = || Pattern::from_fn("gaps", |_, i, j| !(11..53).contains(&i) && j <= i);
    // Every head another choice of about `percent` of the blocks.
    let random_blocks = |block: i64, percent: i64| {
        Pattern::from_fn("random blocks", move |head, i, j| {
            let (q, k) = (i.div_euclid(block), j.div_euclid(block));
            (q * 7919 + k * 104_729 + head as i64 * 31 + q * k * 17) % 101 < percent
        })
    };
    // Every third block of 16 sees every third: neighbours share nothing.
    let thirds = || {
        Pattern::from_fn("thirds", |_, i, j| {
            j <= i && i.div_euclid(16) % 3 == j.div_euclid(16) % 3
        })
    };
    vec![
        Case::new("dense", Pattern::dense(), 32, 8),
        Case::new("dense, ragged, softcap", Pattern::dense(), 37, 16).softcap(2.5),
        Case::new("one position", Pattern::causal(), 1, 8),
        Case::new("one block", Pattern::causal(), 16, 16),
        Case::new("causal", Pattern::causal(), 64, 16),
        Case::new("causal, ragged, block 32", Pattern::causal(), 75, 32),
        Case::new("causal, block 64", Pattern::causal(), 130, 64),
        Case::new("strided, divides the block", Pattern::strided(4), 50, 8),
        Case::new("merged strided", Pattern::merged_strided(16), 72, 8),
        Case::new("local of one", Pattern::local(1), 20, 8),
        Case::new("causal, block 128", Pattern::causal(), 160, 128),
        Case::new("strided, coprime", Pattern::strided(7), 64, 16),
        Case::new("strided, wider than the block", Pattern::strided(24), 96, 8),
        Case::new("local", Pattern::local(12), 64, 8),
        Case::new("fixed", Pattern::fixed(16, 4), 80, 8),
        Case::new(
            "fixed, column groups per head",
            Pattern::fixed_heads(16, 4, 4),
            70,
            8,
        )
        .heads(8, 8),
        Case::new(
            "fixed, window no multiple of the block",
            Pattern::fixed(12, 3),
            61,
            8,
        ),
        Case::new("prefix lm, softcap", Pattern::prefix_lm(19), 48, 16).softcap(0.8),
        Case::new("streaming", Pattern::streaming(10, 3), 64, 8),
        Case::new(
            "intersection, rows without keys, softcap",
            Pattern::intersection([
                Pattern::merged_strided(8),
                Pattern::local(30),
                Pattern::from_fn("not 20..29", |_, i, _| !(20..29).contains(&i)),
            ]),
            64,
            8,
        )
        .softcap(3.0),
        Case::new(
            "per head, one with rows without keys",
            Pattern::per_head([Pattern::local(9), Pattern::strided(9), gaps()]),
            61,
            8,
        )
        .heads(6, 6),
        Case::new(
            "callback, heads differ, rows without keys, softcap",
            checkerboard(),
            40,
            8,
        )
        .softcap(1.2),
        Case::new("rows without keys", gaps(), 70, 8),
        Case::new("rows without keys, large blocks", gaps(), 70, 32).softcap(2.0),
        Case::new("fewer queries than keys", Pattern::fixed(16, 4), 0, 8).rectangular(21, 64),
        Case::new("more queries than keys", Pattern::causal(), 0, 8).rectangular(50, 23),
        Case::new("one query", Pattern::merged_strided(8), 0, 16).rectangular(1, 53),
        Case::new(
            "cross attention, grouped heads, softcap",
            Pattern::dense(),
            0,
            16,
        )
        .rectangular(50, 23)
        .heads(4, 2)
        .softcap(1.0),
        Case::new("grouped queries, more keys", Pattern::fixed(16, 4), 0, 8)
            .rectangular(48, 61)
            .heads(4, 2),
        Case::new("multi-query, strided", Pattern::strided(6), 48, 16).heads(4, 1),
        Case::new("value dim differs, more keys", Pattern::causal(), 0, 8)
            .rectangular(40, 57)
            .dims(16, 24),
        Case::new("odd dims, grouped heads, rows without keys", gaps(), 60, 8)
            .heads(4, 2)
            .dims(5, 3),
        Case::new("head dim 80, value dim 40", Pattern::causal(), 150, 16).dims(80, 40),
        Case::new("head dim 96", Pattern::fixed(64, 16), 200, 32).dims(96, 96),
        Case::new("head dim 128", Pattern::local(70), 300, 64).dims(128, 128),
        Case::new("head dim 256", Pattern::causal(), 140, 16).dims(256, 256),
        Case::new(
            "grouped heads, head dim 64",
            Pattern::fixed(64, 16),
            200,
            32,
        )
        .heads(4, 2)
        .dims(64, 64),
        Case::new(
            "merged strided, head dim 64",
            Pattern::merged_strided(16),
            256,
            16,
        )
        .dims(64, 64),
        Case::new(
            "strided for one head, local for another",
            Pattern::per_head([Pattern::strided(10), Pattern::local(33)]),
            170,
            8,
        )
        .dims(64, 64),
        Case::new("softcap, head dim 128", Pattern::causal(), 200, 64)
            .dims(128, 128)
            .softcap(1.5),
        Case::new("several tiles", Pattern::fixed(128, 32), 500, 32).dims(64, 64),
        Case::new(
            "several tiles of blocks of 128",
            Pattern::causal(),
            400,
            128,
        )
        .dims(64, 32),
        Case::new("random blocks of 16", random_blocks(16, 30), 257, 16).dims(64, 64),
        Case::new("random blocks of 128", random_blocks(128, 50), 700, 128).dims(16, 16),
        Case::new(
            "grouped heads of several patterns",
            Pattern::fixed_heads(32, 8, 4),
            150,
            8,
        )
        .heads(8, 2)
        .dims(32, 16),
        Case::new("bigbird", Pattern::bigbird(16, 9, 2, 3), 140, 16).dims(64, 64),
        Case::new(
            "longformer, a dilation per head",
            Pattern::per_head([
                Pattern::longformer(5, 1, [0, 40, 41]),
                Pattern::longformer(4, 3, [0]),
            ]),
            75,
            8,
        ),
        Case::new(
            "vertical-slash, documents",
            Pattern::intersection([
                Pattern::documents([0, 30, 41]),
                Pattern::vertical_slash([0, 33, 60], [0, 1, 2, 9, 17]),
            ]),
            90,
            16,
        )
        .heads(4, 2),
        Case::new("unlike neighbours", thirds(), 500, 16).dims(64, 64),
        Case::new("unlike neighbours, grouped heads", thirds(), 299, 16)
            .heads(4, 2)
            .dims(32, 40),
        Case::new("unlike neighbours, fewer queries", thirds(), 0, 8).rectangular(203, 380),
        Case::new("softcap", Pattern::merged_strided(8), 48, 8).softcap(1.5),
        Case::new("scale", Pattern::causal(), 48, 8)
            .scale(0.9)
            .dims(64, 64),
        Case::new("few queries of grouped heads", Pattern::causal(), 0, 16)
            .rectangular(3, 90)
            .heads(6, 2)
            .dims(64, 64),
        Case::new("a query of one key head", Pattern::streaming(20, 3), 0, 8)
            .rectangular(1, 61)
            .heads(12, 1),
    ]
}
