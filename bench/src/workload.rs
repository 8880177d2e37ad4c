//! The workloads of the benchmark page, and patterns from the command line.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use blocksparse::{BlockLayout, BlockMask, LayoutShape, Pattern};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A row of the table.
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
    /// True if every batch entry has its own layout.
    pub per_batch: bool,
}

/// A pattern from the command line.
#[derive(Clone, Debug)]
pub enum PatternArg {
    Pattern(Pattern),
    /// Each block below the diagonal with this probability, per head, and the diagonal; causal.
    Random(f64),
    /// Each block with this probability, per head. Some rows and columns are empty.
    Gaps(f64),
    /// A layout serialized with serde_json.
    File(PathBuf),
}

impl FromStr for PatternArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let probability = |percent: &str| match percent.parse::<f64>() {
            Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(percent / 100.0),
            _ => Err(format!("'{percent}' is no percentage")),
        };
        match text.split_once(':') {
            Some(("random", percent)) => probability(percent).map(Self::Random),
            Some(("gaps", percent)) => probability(percent).map(Self::Gaps),
            _ => (text.parse().map(Self::Pattern))
                .map_err(|error| format!("{error}; or random:PERCENT or gaps:PERCENT")),
        }
    }
}

/// Reads a layout from a file. Deserialization checks its consistency.
pub fn read_layout(path: &Path) -> Result<BlockLayout> {
    let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let layout: BlockLayout = serde_json::from_slice(&text)
        .with_context(|| format!("{} is no layout", path.display()))?;
    ensure!(
        layout.seq_q() == layout.seq_kv(),
        "{} must have as many queries as keys, got {} and {}",
        path.display(),
        layout.seq_q(),
        layout.seq_kv()
    );
    Ok(layout)
}

impl Workload {
    /// Builds a new layout with each call, because launch plans stay attached to their layout.
    pub fn layout(&self) -> Result<BlockLayout> {
        if !self.per_batch {
            return self.entry_layout(1);
        }
        let entries = (0..self.batch).map(|entry| self.entry_layout(1 + entry as u64));
        let entries = entries.collect::<Result<Vec<_>, _>>()?;
        Ok(BlockLayout::stack_batch(&entries)?)
    }

    fn entry_layout(&self, seed: u64) -> Result<BlockLayout> {
        let b = self.block;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let shape = LayoutShape::new(self.heads, [self.n, self.n], b);
        Ok(match &self.pattern {
            PatternArg::Pattern(pattern) => pattern.layout(self.heads, self.n, self.block)?,
            PatternArg::Gaps(density) => BlockLayout::from_block_fn("gaps", shape, |_, _, _| {
                (rng.random::<f64>() < *density).then(|| BlockMask::corner(b, b, b))
            })?,
            PatternArg::Random(density) => {
                BlockLayout::from_block_fn("random blocks", shape, |_, q, k| match q.cmp(&k) {
                    std::cmp::Ordering::Less => None,
                    std::cmp::Ordering::Equal => Some(BlockMask::from_fn(b, |r, c| r >= c)),
                    std::cmp::Ordering::Greater => {
                        (rng.random::<f64>() < *density).then(|| BlockMask::corner(b, b, b))
                    }
                })?
            }
            PatternArg::File(path) => read_layout(path)?,
        })
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

impl Workload {
    fn new(
        name: String,
        pattern: PatternArg,
        [batch, heads, n, head_dim, block]: [usize; 5],
    ) -> Self {
        Self {
            name,
            pattern,
            batch,
            heads,
            kv_heads: heads,
            n,
            head_dim,
            value_dim: head_dim,
            block,
            per_batch: false,
        }
    }
}

/// Workloads of the benchmark page: name, pattern, batch, heads, length, width and block size. The names are those of the script that measures PyTorch on the
/// same workloads.
const ANCHORS: &str = "\
dense_causal_d64              causal              4  16   8192   64  128
dense_causal_d128             causal              4  16   8192  128  128
fixed_enwik8_d64              fixed:128,32        4   8  12288   64   32
strided_n16k_s128_d64         merged-strided:128  4   8  16384   64   32
local_n16k_w256_d64           local:256           4   8  16384   64   32
stream_n64k_w4096_d128        streaming:4096,64   1   8  65536  128   64
random_n32k_bs64_10pct_d128   random:10           1   8  32768  128   64
random_n32k_bs128_10pct_d128  random:10           1   8  32768  128  128
";

pub fn anchors() -> Vec<Workload> {
    let row = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let size = |at: usize| words[2 + at].parse().expect("a size");
        let pattern = words[1].parse().expect("a pattern");
        Workload::new(words[0].into(), pattern, std::array::from_fn(size))
    };
    ANCHORS.lines().map(row).collect()
}

/// Returns random blocks of four sizes with decreasing density, to show how time depends on density.
pub fn densities() -> Vec<Workload> {
    // Share of the blocks below the diagonal; the total density is half of it.
    let kept = [1.0, 0.6, 0.4, 0.2, 0.1, 0.04, 0.02];
    let of_size = |block| {
        kept.map(|kept| {
            let name = format!("random_b{block}_{kept}");
            Workload::new(name, PatternArg::Random(kept), [1, 8, 16384, 128, block])
        })
    };
    [16, 32, 64, 128].map(of_size).concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_are_read() {
        let anchors = anchors();
        assert_eq!(anchors.len(), 8);
        let last = &anchors[7];
        assert!(matches!(last.pattern, PatternArg::Random(0.1)));
        assert_eq!((last.n, last.block), (32_768, 128));
    }

    #[test]
    fn patterns_are_those_of_the_notation_or_random() {
        let pattern = |text: &str| text.parse::<PatternArg>();
        assert!(matches!(
            pattern("streaming:4096,64"),
            Ok(PatternArg::Pattern(Pattern::Streaming {
                window: 4096,
                sink: 64
            }))
        ));
        assert!(matches!(
            pattern("random:2.5"),
            Ok(PatternArg::Random(0.025))
        ));
        assert!(matches!(pattern("gaps:50"), Ok(PatternArg::Gaps(0.5))));
        for text in ["random", "gaps:x", "gaps:101", "fixed:8"] {
            assert!(pattern(text).is_err(), "{text}");
        }
        let error = pattern("gap:5").unwrap_err();
        assert!(
            error.contains("local:WINDOW") && error.contains("random:PERCENT"),
            "{error}"
        );
    }

    #[test]
    fn layouts_are_read_from_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("layout.json");
        let layout = Pattern::fixed(16, 4).layout(2, 100, 8).unwrap();
        fs::write(&path, serde_json::to_vec(&layout).unwrap()).unwrap();
        assert_eq!(read_layout(&path).unwrap(), layout);

        let shape = LayoutShape::new(2, [8, 100], 8);
        let tail = BlockLayout::new(&Pattern::fixed(16, 4), shape).unwrap();
        fs::write(&path, serde_json::to_vec(&tail).unwrap()).unwrap();
        let error = format!("{:#}", read_layout(&path).unwrap_err());
        assert!(
            error.contains("as many queries as keys, got 8 and 100"),
            "{error}"
        );
        fs::write(&path, "{}").unwrap();
        let error = format!("{:#}", read_layout(&path).unwrap_err());
        assert!(error.contains("is no layout"), "{error}");
    }
}
