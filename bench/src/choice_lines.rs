//! Scores of blocks by sums of the last queries' attention, and lines of which a part is kept: `bench-choice`.

use anyhow::Result;
use blocksparse_bench::device::{empty, upload};
use blocksparse_bench::numbers::{BF16, F32};
use burn_sparse_select::kernels::selection::{
    FlexLimits, FlexTensors, Kept, KeptLines, LineSizes, Touched, flex_blocks, least_kept,
    line_sums, touched_blocks,
};
use cubecl::client::Client;
use cubecl::server::Handle;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

/// The scores of a method whose last queries choose.
pub struct Chosen {
    sizes: LineSizes,
    of: Touched,
    /// The others keep so many lines.
    flex: Option<FlexLimits>,
    sums: Handle,
    out: Handle,
}

impl Chosen {
    /// Of queries and keys `seq`.
    pub fn new(
        client: &Client,
        sizes: LineSizes,
        [block, seq_q]: [usize; 2],
        kept: Kept,
        flex: Option<FlexLimits>,
    ) -> Self {
        let (lists, seq) = (sizes.lists[0], [seq_q, sizes.seq[1]]);
        let [rows, blocks] = seq.map(|seq| seq.div_ceil(block));
        Self {
            of: Touched {
                lists,
                seq,
                block,
                rows: 0..rows,
                kept,
            },
            flex,
            sums: empty(client, lists * 2 * seq[1], F32),
            out: empty(client, lists * rows * blocks, F32),
            sizes,
        }
    }

    /// Any queries do for the last ones.
    pub fn run(&self, client: &Client, [q, k]: [&Handle; 2]) -> Result<()> {
        let (sizes, of) = (&self.sizes, &self.of);
        match &self.flex {
            Some(limits) => {
                let tensors = FlexTensors { q, last: q, k };
                flex_blocks(client, BF16, tensors, sizes, of, limits, &self.out)?;
            }
            None => {
                line_sums(client, BF16, [q, k], sizes, &self.sums)?;
                touched_blocks(client, &self.sums, of, &self.out)?;
            }
        }
        Ok(())
    }
}

/// Lines of random numbers, of which half is kept.
pub struct HalfKept {
    numbers: Handle,
    of: KeptLines,
    least: Handle,
}

impl HalfKept {
    pub fn new(client: &Client, [lines, len]: [usize; 2], rng: &mut ChaCha8Rng) -> Self {
        let numbers: Vec<f32> = (0..lines * len).map(|_| rng.random()).collect();
        Self {
            numbers: upload(client, &numbers, F32),
            of: KeptLines {
                lines,
                len,
                step: len,
                kept: Kept::Share(0.5),
            },
            least: empty(client, lines, F32),
        }
    }

    pub fn run(&self, client: &Client) -> Result<()> {
        least_kept(client, &self.numbers, &self.of, None, &self.least)?;
        Ok(())
    }
}
