//! Rules over scores of blocks: `bench-choice`.

use anyhow::Result;
use blocksparse::{
    Always, BlockLayout, BlockSource, Budget, DeviceChoice, EstimateKind, LayoutShape, Rule,
};
use blocksparse_bench::device::{contiguous, empty, upload};
use blocksparse_bench::numbers::{BF16, F32, sixteenths};
use blocksparse_cubecl::{
    AttentionPlan, ChoiceTensor, Outputs, Request, ScoreOptions, TensorView, choose_blocks, forward,
};
use cubecl::client::Client;
use cubecl::server::Handle;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

/// A rule over scores, its plan, and attention over it.
pub struct Ruled {
    shape: LayoutShape,
    rule: Rule,
    tensor: ChoiceTensor,
    views: [TensorView; 3],
    out: Handle,
    lse: Handle,
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
            out: empty(client, heads * seq_q * width, BF16),
            lse: empty(client, heads * seq_q, F32),
            views: [view(&zeros(seq_q)), view(&zeros(seq_kv)), view(&values)],
            rule: Rule {
                kind: EstimateKind::Probability,
                keep,
                forced: Always { first: 1, local: 1 },
            },
            shape,
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
}
