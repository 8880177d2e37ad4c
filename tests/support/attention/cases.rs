//! The table of cases. Each row is a pattern or a shape that is prone to errors.

use crate::prelude::*;

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
    pub fn new(
        name: &'static str,
        pattern: Pattern,
        [seq_q, seq_kv]: [usize; 2],
        block_size: usize,
    ) -> Self {
        Self {
            name,
            pattern,
            batch: 2,
            heads: 2,
            kv_heads: 2,
            seq_q,
            seq_kv,
            block_size,
            head_dim: 8,
            value_dim: 8,
            scale: None,
            softcap: None,
        }
    }

    pub fn layout(&self) -> BlockLayout {
        let shape = LayoutShape::new(self.heads, [self.seq_q, self.seq_kv], self.block_size);
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
        let heads = [self.batch, self.heads, self.kv_heads];
        let dims = [self.head_dim, self.value_dim];
        Sizes::new(heads, [self.seq_q, self.seq_kv], dims)
    }

    /// Returns random inputs with the f64 reference over `Pattern::attends`.
    pub fn problem(&self, seed: u64) -> Problem {
        let offset = self.seq_kv as i64 - self.seq_q as i64;
        let pattern = self.pattern.clone();
        Problem::random(self.sizes(), seed, move |_, head, i, j| {
            pattern.attends(head, i as i64 + offset, j as i64)
        })
        .options(self.scale, self.softcap)
    }
}

/// Returns a problem with a pattern per batch entry, and the stacked layout.
pub fn per_batch(
    patterns: &[Pattern],
    sizes: Sizes,
    block_size: usize,
    seed: u64,
) -> (BlockLayout, Problem) {
    let layout = |of: &Pattern| of.layout(sizes.heads, sizes.seq_q, block_size).unwrap();
    let layouts: Vec<BlockLayout> = patterns.iter().map(layout).collect();
    let layout = BlockLayout::stack_batch(&layouts).unwrap();
    let patterns = patterns.to_vec();
    let problem = Problem::random(sizes, seed, move |batch, head, i, j| {
        patterns[batch].attends(head, i as i64, j as i64)
    });
    (layout, problem)
}

/// Returns layouts per batch entry, one with rows without keys, and grouped heads.
pub fn gaps_per_batch(seed: u64) -> (BlockLayout, Problem) {
    let sizes = Sizes::new([2, 4, 2], [61, 61], [8, 16]);
    let gaps = Pattern::from_fn("gaps", |_, i, j| !(11..53).contains(&i) && j <= i);
    per_batch(&[Pattern::local(9), gaps], sizes, 8, seed)
}

/// Returns the cases with their indices, which seed their problems. `BURN_SPARSE_SHARD=K/N` selects every N-th, from the K-th on (N/N is 0/N), for
/// devices that compile slowly: another shard for each part of `tests/vulkan.txt`. Checks choose variants by a case's index modulo 2, 3, 4, 5 and 6,
/// so N has to be coprime with these: each of 0/7 to 6/7 meets every variant (a test checks it).
pub fn table() -> Vec<(usize, Case)> {
    let (part, parts) = shard();
    shard_of(part, parts)
}

/// Returns the cases whose indices are `part` modulo `parts`.
pub fn shard_of(part: usize, parts: usize) -> Vec<(usize, Case)> {
    let numbered = cases().into_iter().enumerate();
    numbered.skip(part).step_by(parts).collect()
}

/// Every pattern, every block size, ragged ends, rectangles, rows without keys, grouped heads. Softcaps, rows without keys and patterns tiled by
/// residue class are placed so that every shard of sevenths has some.
pub fn cases() -> Vec<Case> {
    let checkerboard = || {
        Pattern::from_fn("checkerboard", |head, i, j| {
            (i / 3 + j / 5 + head as i64) % 2 == 0 && i % 11 != 4
        })
    };
    // Queries 16..48 see nothing: whole block rows without keys, and rows of partial blocks.
    let gaps = || Pattern::from_fn("gaps", |_, i, j| !(11..53).contains(&i) && j <= i);
    // Each head has other blocks, about `percent` of all.
    let random_blocks = |block: i64, percent: i64| {
        Pattern::from_fn("random blocks", move |head, i, j| {
            let (q, k) = (i.div_euclid(block), j.div_euclid(block));
            (q * 7919 + k * 104_729 + head as i64 * 31 + q * k * 17) % 101 < percent
        })
    };
    // Every third block of 16 sees every third: adjacent ones share nothing.
    let thirds = || {
        Pattern::from_fn("thirds", |_, i, j| {
            j <= i && i.div_euclid(16) % 3 == j.div_euclid(16) % 3
        })
    };
    let rows = rows::<5>(TABLE);
    let case = |[name, text, seq, block, rest]: [&'static str; 5]| {
        let numbers = text.split_whitespace().filter_map(|word| word.parse().ok());
        let numbers: Vec<i64> = numbers.collect();
        let pattern = match text {
            "checkerboard" => checkerboard(),
            "gaps" => gaps(),
            "thirds" => thirds(),
            "merged-strided:8 & local:30 & not 20..29" => Pattern::intersection([
                Pattern::merged_strided(8),
                Pattern::local(30),
                Pattern::from_fn("not 20..29", |_, i, _| !(20..29).contains(&i)),
            ]),
            "local:9 / strided:9 / gaps" => {
                Pattern::per_head([Pattern::local(9), Pattern::strided(9), gaps()])
            }
            "documents & vertical-slash" => Pattern::intersection([
                Pattern::documents([0, 30, 41]),
                Pattern::vertical_slash([0, 33, 60], [0, 1, 2, 9, 17]),
            ]),
            _ if text.starts_with("random ") => random_blocks(numbers[0], numbers[1]),
            _ => text.parse().unwrap(),
        };
        let mut case = Case::new(name, pattern, all(seq), one(block));
        for (word, numbers) in settings(rest) {
            match word {
                "heads" => [case.heads, case.kv_heads] = all(numbers),
                "dims" => [case.head_dim, case.value_dim] = all(numbers),
                "scale" => case.scale = Some(one(numbers)),
                "softcap" => case.softcap = Some(one(numbers)),
                _ => panic!("{name}: {word} is nothing to set"),
            }
        }
        case
    };
    rows.into_iter().map(case).collect()
}

/// Name, pattern, queries and keys, block, and settings that differ from most cases: heads and KV heads, widths of keys and of values, options.
const TABLE: &str = "
    dense                                              | dense                                     | 32 32   | 8   |
    dense, ragged, softcap                             | dense                                     | 37 37   | 16  | softcap 2.5
    one position                                       | causal                                    | 1 1     | 8   |
    one block                                          | causal                                    | 16 16   | 16  |
    causal                                             | causal                                    | 64 64   | 16  |
    causal, ragged, block 32                           | causal                                    | 75 75   | 32  |
    causal, block 64                                   | causal                                    | 130 130 | 64  |
    strided, divides the block                         | strided:4                                 | 50 50   | 8   |
    merged strided                                     | merged-strided:16                         | 72 72   | 8   |
    local of one                                       | local:1                                   | 20 20   | 8   |
    causal, block 128                                  | causal                                    | 160 160 | 128 |
    strided, coprime                                   | strided:7                                 | 64 64   | 16  |
    strided, wider than the block                      | strided:24                                | 96 96   | 8   |
    local                                              | local:12                                  | 64 64   | 8   |
    fixed                                              | fixed:16,4                                | 80 80   | 8   |
    fixed, column groups per head                      | fixed:16,4,4                              | 70 70   | 8   | heads 8 8
    fixed, window no multiple of the block             | fixed:12,3                                | 61 61   | 8   |
    prefix lm, softcap                                 | prefix:19                                 | 48 48   | 16  | softcap 0.8
    streaming                                          | streaming:10,3                            | 64 64   | 8   |
    intersection, rows without keys, softcap           | merged-strided:8 & local:30 & not 20..29  | 64 64   | 8   | softcap 3.0
    per head, one with rows without keys               | local:9 / strided:9 / gaps                | 61 61   | 8   | heads 6 6
    callback, heads differ, rows without keys, softcap | checkerboard                              | 40 40   | 8   | softcap 1.2
    rows without keys                                  | gaps                                      | 70 70   | 8   |
    rows without keys, large blocks                    | gaps                                      | 70 70   | 32  | softcap 2.0
    fewer queries than keys                            | fixed:16,4                                | 21 64   | 8   |
    more queries than keys                             | causal                                    | 50 23   | 8   |
    one query                                          | merged-strided:8                          | 1 53    | 16  |
    cross attention, grouped heads, softcap            | dense                                     | 50 23   | 16  | heads 4 2, softcap 1.0
    grouped queries, more keys                         | fixed:16,4                                | 48 61   | 8   | heads 4 2
    multi-query, strided                               | strided:6                                 | 48 48   | 16  | heads 4 1
    value dim differs, more keys                       | causal                                    | 40 57   | 8   | dims 16 24
    odd dims, grouped heads, rows without keys         | gaps                                      | 60 60   | 8   | heads 4 2, dims 5 3
    head dim 80, value dim 40                          | causal                                    | 150 150 | 16  | dims 80 40
    head dim 96                                        | fixed:64,16                               | 200 200 | 32  | dims 96 96
    head dim 256                                       | causal                                    | 140 140 | 16  | dims 256 256
    head dim 128                                       | local:70                                  | 300 300 | 64  | dims 128 128
    grouped heads, head dim 64                         | fixed:64,16                               | 200 200 | 32  | heads 4 2, dims 64 64
    merged strided, head dim 64                        | merged-strided:16                         | 256 256 | 16  | dims 64 64
    strided for one head, local for another            | strided:10 / local:33                     | 170 170 | 8   | dims 64 64
    softcap, head dim 128                              | causal                                    | 200 200 | 64  | dims 128 128, softcap 1.5
    several tiles                                      | fixed:128,32                              | 500 500 | 32  | dims 64 64
    several tiles of blocks of 128                     | causal                                    | 400 400 | 128 | dims 64 32
    random blocks of 16                                | random 16 30                              | 257 257 | 16  | dims 64 64
    random blocks of 128                               | random 128 50                             | 700 700 | 128 | dims 16 16
    grouped heads of several patterns                  | fixed:32,8,4                              | 150 150 | 8   | heads 8 2, dims 32 16
    bigbird                                            | bigbird:16,9,2,3                          | 140 140 | 16  | dims 64 64
    longformer, a dilation per head                    | longformer:5,1,0,40,41 / longformer:4,3,0 | 75 75   | 8   |
    vertical-slash, documents                          | documents & vertical-slash                | 90 90   | 16  | heads 4 2
    unlike neighbours                                  | thirds                                    | 500 500 | 16  | dims 64 64
    unlike neighbours, grouped heads                   | thirds                                    | 299 299 | 16  | heads 4 2, dims 32 40
    unlike neighbours, fewer queries                   | thirds                                    | 203 380 | 8   |
    softcap                                            | merged-strided:8                          | 48 48   | 8   | softcap 1.5
    scale                                              | causal                                    | 48 48   | 8   | scale 0.9, dims 64 64
    few queries of grouped heads                       | causal                                    | 3 90    | 16  | heads 6 2, dims 64 64
    a query of one key head                            | streaming:20,3                            | 1 61    | 8   | heads 12 1
";
