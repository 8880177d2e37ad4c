//! The workloads: those of the benchmark page, and patterns from the command line.

use std::str::FromStr;

use blocksparse::{BlockLayout, BlockMask, LayoutError, LayoutShape, Pattern};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// One row of the table.
#[derive(Clone, Debug)]
pub struct Workload {
    pub name: String,
    pub pattern: PatternArg,
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub n: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub block: usize,
    /// Whether every batch entry has a layout of its own.
    pub per_batch: bool,
}

/// A pattern as the command line gives it.
#[derive(Clone, Debug)]
pub enum PatternArg {
    Pattern(Pattern),
    /// Each block below the diagonal with this probability, per head, and the diagonal; causal.
    Random(f64),
    /// Each block with this probability, per head: some rows and columns have none.
    Gaps(f64),
}

impl FromStr for PatternArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        if name == "random" {
            let percent: f64 = rest.parse().map_err(|_| format!("{rest} is no number"))?;
            return Ok(Self::Random(percent / 100.0));
        }
        let numbers: Vec<usize> = (rest.split(',').filter(|part| !part.is_empty()))
            .map(|part| part.parse().map_err(|_| format!("{part} is no number")))
            .collect::<Result<_, _>>()?;
        let pattern = match (name, &numbers[..]) {
            ("dense", []) => Pattern::dense(),
            ("causal", []) => Pattern::causal(),
            ("local", &[window]) => Pattern::local(window),
            ("strided", &[stride]) => Pattern::strided(stride),
            ("merged-strided", &[stride]) => Pattern::merged_strided(stride),
            ("fixed", &[l, c]) => Pattern::fixed(l, c),
            ("streaming", &[window, sinks]) => Pattern::streaming(window, sinks),
            ("gaps", &[percent]) => return Ok(Self::Gaps(percent as f64 / 100.0)),
            _ => return Err(format!("{text} is no pattern with its parameters")),
        };
        Ok(Self::Pattern(pattern))
    }
}

impl Workload {
    pub fn layout(&self) -> Result<BlockLayout, LayoutError> {
        if !self.per_batch {
            return self.entry_layout(1);
        }
        let entries = (0..self.batch).map(|entry| self.entry_layout(1 + entry as u64));
        BlockLayout::stack_batch(&entries.collect::<Result<Vec<_>, _>>()?)
    }

    fn entry_layout(&self, seed: u64) -> Result<BlockLayout, LayoutError> {
        let b = self.block;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let shape = LayoutShape {
            heads: self.heads,
            seq_q: self.n,
            seq_kv: self.n,
            block_size: b,
        };
        match &self.pattern {
            PatternArg::Pattern(pattern) => pattern.layout(self.heads, self.n, self.block),
            PatternArg::Gaps(density) => BlockLayout::from_block_fn("gaps", shape, |_, _, _| {
                (rng.random::<f64>() < *density).then(|| BlockMask::corner(b, b, b))
            }),
            PatternArg::Random(density) => {
                BlockLayout::from_block_fn("random blocks", shape, |_, q, k| match q.cmp(&k) {
                    std::cmp::Ordering::Less => None,
                    std::cmp::Ordering::Equal => Some(BlockMask::from_fn(b, |r, c| r >= c)),
                    std::cmp::Ordering::Greater => {
                        (rng.random::<f64>() < *density).then(|| BlockMask::corner(b, b, b))
                    }
                })
            }
        }
    }

    pub fn label(&self) -> String {
        match self.name.as_str() {
            "custom" => format!(
                "B{} H{} N{} D{} b{}",
                self.batch, self.heads, self.n, self.head_dim, self.block
            ),
            name => name.to_string(),
        }
    }
}

/// The names are those of the script that measures PyTorch on the same workloads.
pub fn anchors() -> Vec<Workload> {
    let row = |name: &str, pattern, [batch, heads, n, head_dim, block]: [usize; 5]| Workload {
        name: name.to_string(),
        pattern,
        batch,
        heads,
        kv_heads: heads,
        n,
        head_dim,
        value_dim: head_dim,
        block,
        per_batch: false,
    };
    let pattern = PatternArg::Pattern;
    vec![
        row(
            "dense_causal_d64",
            pattern(Pattern::causal()),
            [4, 16, 8192, 64, 128],
        ),
        row(
            "dense_causal_d128",
            pattern(Pattern::causal()),
            [4, 16, 8192, 128, 128],
        ),
        row(
            "fixed_enwik8_d64",
            pattern(Pattern::fixed(128, 32)),
            [4, 8, 12288, 64, 32],
        ),
        row(
            "strided_n16k_s128_d64",
            pattern(Pattern::merged_strided(128)),
            [4, 8, 16384, 64, 32],
        ),
        row(
            "local_n16k_w256_d64",
            pattern(Pattern::local(256)),
            [4, 8, 16384, 64, 32],
        ),
        row(
            "stream_n64k_w4096_d128",
            pattern(Pattern::streaming(4096, 64)),
            [1, 8, 65536, 128, 64],
        ),
        row(
            "random_n32k_bs64_10pct_d128",
            PatternArg::Random(0.1),
            [1, 8, 32768, 128, 64],
        ),
        row(
            "random_n32k_bs128_10pct_d128",
            PatternArg::Random(0.1),
            [1, 8, 32768, 128, 128],
        ),
    ]
}

/// Random blocks of four sizes, kept with falling probability: how the time follows the density.
pub fn densities() -> Vec<Workload> {
    let sizes = [16, 32, 64, 128];
    // Of the blocks below the diagonal: the density of the whole is half of it.
    let kept = [1.0, 0.6, 0.4, 0.2, 0.1, 0.04, 0.02];
    let rows = sizes.into_iter().flat_map(|block| {
        kept.into_iter().map(move |kept| Workload {
            name: format!("random_b{block}_{kept}"),
            pattern: PatternArg::Random(kept),
            batch: 1,
            heads: 8,
            kv_heads: 8,
            n: 16384,
            head_dim: 128,
            value_dim: 128,
            block,
            per_batch: false,
        })
    });
    rows.collect()
}
