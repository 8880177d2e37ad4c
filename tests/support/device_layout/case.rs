//! Cases of layouts made on the device.

use burn_blocksparse::layout::DeviceLayoutOptions;

use crate::prelude::*;

/// Sizes of a layout and of the tensors of a call.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub name: &'static str,
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub seq_q: usize,
    pub seq_kv: usize,
    pub head_dim: usize,
    pub block_size: usize,
    /// Numbers of batch entries and heads with different blocks.
    pub patterns: [usize; 2],
    pub causal: bool,
}

impl Case {
    pub fn new(name: &'static str, seq_q: usize, seq_kv: usize, block_size: usize) -> Self {
        Self {
            name,
            batch: 2,
            heads: 2,
            kv_heads: 2,
            seq_q,
            seq_kv,
            head_dim: 16,
            block_size,
            patterns: [2, 2],
            causal: true,
        }
    }

    pub fn shape(&self) -> LayoutShape {
        LayoutShape::new(self.heads, [self.seq_q, self.seq_kv], self.block_size)
    }

    pub fn options(&self) -> DeviceLayoutOptions {
        DeviceLayoutOptions::new(self.shape()).causal(self.causal)
    }

    pub fn blocks(&self) -> [usize; 2] {
        [self.seq_q, self.seq_kv].map(|seq| seq.div_ceil(self.block_size))
    }

    pub fn dims(&self) -> [usize; 4] {
        let [batch, heads] = self.patterns;
        let [q_blocks, kv_blocks] = self.blocks();
        [batch, heads, q_blocks, kv_blocks]
    }

    pub fn sizes(&self) -> Sizes {
        let heads = [self.batch, self.heads, self.kv_heads];
        Sizes::new(heads, [self.seq_q, self.seq_kv], [self.head_dim; 2])
    }

    /// Makes the problem with the blocks of `mask`, `dims`.
    pub fn problem(&self, seed: u64, mask: Vec<bool>) -> Problem {
        let case = *self;
        let offset = self.seq_kv as i64 - self.seq_q as i64;
        Problem::random(self.sizes(), seed, move |batch, head, i, j| {
            let [batches, heads, q_blocks, kv_blocks] = case.dims();
            let pattern = batch.min(batches - 1) * heads + head.min(heads - 1);
            let row = pattern * q_blocks + i / case.block_size;
            mask[row * kv_blocks + j / case.block_size]
                && (!case.causal || j as i64 <= i as i64 + offset)
        })
        .with_grad_lse(seed)
    }

    /// Draws random blocks, and makes their problem.
    pub fn drawn(&self, seed: u64) -> (Vec<bool>, Problem) {
        let mask = self.mask(&mut seeded(seed));
        (mask.clone(), self.problem(seed, mask))
    }

    /// Draws random blocks: rows of all densities, including empty and full ones, and an empty column.
    pub fn mask(&self, rng: &mut ChaCha8Rng) -> Vec<bool> {
        let [batch, heads, q_blocks, kv_blocks] = self.dims();
        let mut mask = Vec::new();
        for _ in 0..batch * heads * q_blocks {
            let density = [0.0, 0.15, 0.3, 0.3, 0.6, 1.0][rng.random_range(0..6)];
            mask.extend((0..kv_blocks).map(|c| {
                let kept = rng.random::<f64>() < density;
                kept && (c != 1 || kv_blocks < 3)
            }));
        }
        mask
    }
}

/// Makes a case of a table: name; queries, keys and block; settings that differ from [`Case::new`].
pub fn read([name, sizes, rest]: [&'static str; 3]) -> Case {
    let [seq_q, seq_kv, block_size] = all(sizes);
    let mut case = Case::new(name, seq_q, seq_kv, block_size);
    for (word, numbers) in settings(rest) {
        match word {
            "heads" => {
                [case.heads, case.kv_heads] = all(numbers);
                case.patterns = [2, case.heads];
            }
            "dim" => case.head_dim = one(numbers),
            "every_key" => case.causal = false,
            // Sets the numbers of batch entries and heads with different blocks.
            "patterns" => case.patterns = all(numbers),
            _ => panic!("{name}: {word} is nothing to set"),
        }
    }
    case
}

const TABLE: &str = "
    blocks of 16, grouped heads           | 70 70 16    | heads 4 2
    one mask for all                      | 100 100 32  | patterns 1 1, every_key
    masks per batch entry, fewer queries  | 50 133 16   | patterns 2 1
    masks per head, more queries          | 150 41 8    | heads 3 1, patterns 1 3
    blocks of 64                          | 300 300 64  | dim 64
    blocks of 128, fewer queries          | 290 400 128 | dim 64
    blocks of 128, every key              | 130 257 128 | every_key, heads 2 1
    many blocks                           | 600 555 8   | patterns 1 1
    a query of grouped heads              | 1 77 16     | heads 6 2
    few queries                           | 9 40 32     | dim 5
    one block                             | 16 16 16    |
";

pub fn cases() -> Vec<Case> {
    rows(TABLE).into_iter().map(read).collect()
}
