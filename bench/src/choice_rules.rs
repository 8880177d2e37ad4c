//! Rules over scores of blocks: `bench-choice`.

use anyhow::{Result, ensure};
use blocksparse::{
    Always, BlockLayout, BlockSource, Budget, DeviceChoice, EstimateKind, LayoutShape, Rule,
    ScoreGrid,
};
use blocksparse_bench::compare::ensure_within;
use blocksparse_bench::device::{contiguous, poisoned, read_floats, read_ints, upload};
use blocksparse_bench::numbers::{BF16, F32, sixteenths};
use blocksparse_bench::runner::Tally;
use blocksparse_cubecl::{
    AttentionPlan, ChoiceTensor, Outputs, Request, ScoreOptions, TensorView, choose_blocks,
    count_blocks, forward,
};
use cubecl::client::Client;
use cubecl::server::Handle;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

/// A rule over scores, its plan, and attention over it of queries of zeros: means of the values of chosen keys.
pub struct Ruled {
    shape: LayoutShape,
    rule: Rule,
    scores: Vec<f32>,
    tensor: ChoiceTensor,
    views: [TensorView; 3],
    values: Vec<f32>,
    out: Handle,
    lse: Handle,
    counts: Handle,
    width: usize,
}

impl Ruled {
    /// Of causal attention, with the first block and a query's own.
    pub fn new(
        client: &Client,
        shape: LayoutShape,
        keep: Budget,
        width: usize,
        rng: &mut ChaCha8Rng,
    ) -> Self {
        let (heads, seq_q, seq_kv) = (shape.heads, shape.seq_q, shape.seq_kv);
        let rows = heads * seq_q.div_ceil(shape.block_size);
        // Some are equal.
        let scores: Vec<f32> = (0..rows * seq_kv.div_ceil(shape.block_size))
            .map(|_| match rng.random_range(0..4) {
                0 => rng.random_range(0..8) as f32 / 8.0,
                _ => rng.random::<f32>(),
            })
            .collect();
        let values = sixteenths(heads * seq_kv * width, rng);
        let view = |numbers: &[f32]| {
            let shape = [1, heads, numbers.len() / heads / width, width];
            contiguous(upload(client, numbers, BF16), shape)
        };
        let zeros = |seq: usize| vec![0.0; heads * seq * width];
        Self {
            tensor: ChoiceTensor {
                handle: upload(client, &scores, F32),
                dtype: F32,
            },
            out: poisoned(client, heads * seq_q * width, BF16),
            lse: poisoned(client, heads * seq_q, F32),
            counts: poisoned(client, rows, F32),
            views: [view(&zeros(seq_q)), view(&zeros(seq_kv)), view(&values)],
            rule: Rule {
                kind: EstimateKind::Probability,
                keep,
                forced: Always { first: 1, local: 1 },
            },
            shape,
            scores,
            values,
            width,
        }
    }

    pub fn layout(&self) -> Result<BlockLayout> {
        let choice = DeviceChoice {
            patterns: [1, self.shape.heads],
            causal: true,
            by: BlockSource::Scores(self.rule),
        };
        Ok(BlockLayout::on_device("a rule", self.shape, choice)?)
    }

    pub fn choose(&self, client: &Client, layout: &BlockLayout) -> Result<()> {
        choose_blocks(client, layout, &self.tensor)?;
        Ok(())
    }

    pub fn attend(&self, client: &Client, layout: &BlockLayout) -> Result<()> {
        let request = Request::new([1, self.shape.heads], [self.width; 2], BF16);
        let plan = AttentionPlan::new(client, layout, request)?;
        let (views, outputs) = (self.views.each_ref(), Outputs::new(&self.out, &self.lse));
        let options = ScoreOptions::new(1.0);
        forward(client, &plan, layout, views, outputs, &options)?;
        Ok(())
    }

    fn verify(&self, client: &Client) -> Result<()> {
        let layout = self.layout()?;
        self.choose(client, &layout)?;
        self.attend(client, &layout)?;
        count_blocks(client, &layout, &self.counts);
        let counts = read_ints(client, &self.counts)?;
        let out: Vec<f64> = read_floats(client, &self.out, BF16)?;
        let (seq_q, seq_kv, block) = (self.shape.seq_q, self.shape.seq_kv, self.shape.block_size);
        let grid = ScoreGrid {
            query_rows: block,
            block,
            seq_q,
            seq_kv,
            causal: true,
        };
        let width = self.width;
        for (row, (&got, scores)) in (counts.iter())
            .zip(self.scores.chunks(grid.blocks()))
            .enumerate()
        {
            let what = format!("{:?}, {:?}: {row}", self.shape, self.rule);
            let scores: Vec<f64> = scores.iter().map(|&score| score.into()).collect();
            let (head, q_block) = (row / grid.rows(), row % grid.rows());
            let kept = self.rule.selects(&grid, q_block, &scores);
            let count = kept.iter().filter(|&&kept| kept).count();
            ensure!(got == count as i32, "{what}: {got}, {count}");
            // The last query of the block.
            let query = ((q_block + 1) * block).min(seq_q) - 1;
            let seen = (query + 1 + seq_kv - seq_q).min(seq_kv);
            for channel in [0, width - 1] {
                let keys = (0..seen).filter(|key| kept[key / block]);
                let values: Vec<f64> = keys
                    .map(|key| self.values[(head * seq_kv + key) * width + channel].into())
                    .collect();
                let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
                let got = out[(head * seq_q + query) * width + channel];
                ensure_within(format_args!("{what}, {channel}"), got, mean, 1e-2)?;
            }
        }
        Ok(())
    }
}

pub fn verify(client: &Client, rng: &mut ChaCha8Rng, tally: &mut Tally) -> Result<()> {
    let part = Budget::TopP {
        p: 0.3,
        min: 2,
        max: 40,
    };
    let budgets = [
        Budget::TopK(5),
        Budget::TopK(60),
        Budget::Ratio(0.1),
        part,
        Budget::MinP(0.9),
    ];
    for (seq_q, seq_kv, block_size, width) in [
        (2048, 2048, 16, 64),
        (5000, 5000, 8, 64),
        (3000, 8200, 64, 128),
        (16_384, 16_384, 128, 64),
    ] {
        for keep in budgets {
            let shape = LayoutShape::new(3, [seq_q, seq_kv], block_size);
            if tally.takes_next() {
                Ruled::new(client, shape, keep, width, rng).verify(client)?;
            }
        }
    }
    Ok(())
}
