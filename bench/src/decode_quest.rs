//! Attention over the pages that queries choose (Quest: Tang et al., 2024), beside attention over all of them.

use anyhow::Result;
use blocksparse_bench::device::{empty, read_ints, upload_ints};
use blocksparse_bench::numbers::{BF16, F32};
use blocksparse_cubecl::KernelError;
use burn_paged_attention::internal::kernels::{
    AppendShape, PageScoreBuffers, PageScoreShape, PagedPlan, StoredKeys, page_scores,
    summarize_pages,
};
use burn_sparse_select::PageSummary;
use burn_sparse_select::kernels::rows::{TopKPagesShape, topk_pages};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Bench, Call, HEADS, Part, Shape};

const PAGE: usize = 16;

/// Sequences, their tokens, and the budget of these that each query reads; and times as fast as all pages: at least, and hoped for.
type Budget = (&'static str, [usize; 3], Option<[f64; 2]>);

const BUDGETS: [Budget; 4] = [
    (
        "quest 2,048 of 32K, B 8",
        [8, 32_768, 2048],
        Some([3.5, 5.0]),
    ),
    ("quest 2,048 of 32K, B 1", [1, 32_768, 2048], None),
    ("quest 1,024 of 8K, B 8", [8, 8192, 1024], None),
    ("quest 4,096 of 128K, B 4", [4, 131_072, 4096], None),
];

/// A choice with its tensors on the device, and attention over what it chooses.
struct Chosen {
    client: Client,
    scored: PageScoreShape,
    highest: TopKPagesShape,
    rows: AppendShape,
    dense: Call,
    sparse: Call,
    summaries: Handle,
    scores: Handle,
    slots: Handle,
}

impl Chosen {
    fn summarize(&self) -> Result<()> {
        let (rows, slots) = (&self.rows, &self.slots);
        bounds(&self.client, &self.dense, rows, slots, &self.summaries)?;
        Ok(())
    }

    fn score(&self) -> Result<()> {
        let buffers = PageScoreBuffers {
            q: &self.dense.q,
            summaries: &self.summaries,
            table: &self.dense.table,
            spans: &self.dense.spans,
            scores: &self.scores,
        };
        let group = self.scored.heads / self.scored.kv_heads;
        page_scores(&self.client, &self.scored, &buffers, 1.0 / group as f64)?;
        Ok(())
    }

    fn pick(&self) -> Result<()> {
        let (spans, to) = (&self.dense.spans, self.selected());
        topk_pages(&self.client, &self.highest, &self.scores, spans, to)?;
        Ok(())
    }

    fn all(&self) -> Result<()> {
        self.score()?;
        self.pick()?;
        self.sparse.run()
    }

    fn selected(&self) -> &Handle {
        let selected = self.sparse.selected.as_ref();
        selected.expect("the call is of what is selected")
    }
}

/// Bounds of the pages that rows were written to, in bf16 as keys are, or in f32 of keys in eight bits.
fn bounds(
    client: &Client,
    call: &Call,
    rows: &AppendShape,
    slots: &Handle,
    summaries: &Handle,
) -> Result<(), KernelError> {
    let (summary, keys) = (PageSummary::Bounds, &call.keys);
    let scales = call.scales.as_ref().map(|[scales, _]| scales);
    let packed = call.shape.quantization.zip(scales);
    let dtype = if packed.is_some() { F32 } else { BF16 };
    let keys = StoredKeys { keys, packed };
    summarize_pages(client, rows, summary, keys, slots, (summaries, dtype))
}

impl Bench {
    /// The call of attention over all pages, and of a choice of so many of them. Every sequence's last key is as if it was new.
    fn chosen(&self, shape: &Shape, page: usize, keep: usize) -> Result<Chosen> {
        let dense = self.call(shape, page)?;
        let mut sparse = self.call(shape, page)?;
        let of = dense.shape;
        let (batch, kv_heads, width) = (of.batch, of.kv_heads, of.widths[0]);
        let mut over_some = of;
        over_some.selected = Some(keep);
        sparse.plan = PagedPlan::new(&self.client, over_some)?;
        // The same keys, not as many again.
        (sparse.keys, sparse.values) = (dense.keys.clone(), dense.values.clone());
        sparse.scales = dense.scales.clone();
        sparse.selected = Some(empty(&self.client, batch * kv_heads * keep, F32));
        let table = read_ints(&self.client, &dense.table)?;
        let longest = shape.lengths.iter().map(|length| length[0]).max();
        let longest = longest.unwrap_or(0);
        let slot = |entry: usize, key: usize| {
            table[entry * of.entries + key / page] * page as i32 + (key % page) as i32
        };
        // All keys at once, so that all pages have summaries.
        let mut slots = Vec::with_capacity(batch * longest);
        for (entry, length) in shape.lengths.iter().enumerate() {
            slots.extend((0..longest).map(|key| match key < length[0] {
                true => slot(entry, key),
                false => -1,
            }));
        }
        let rows = |rows| AppendShape {
            batch,
            kv_heads,
            tables: 1,
            rows,
            page,
            pages: of.pages,
            widths: of.widths,
            dtype: BF16,
        };
        let of_bounds = match of.quantization {
            Some(_) => F32,
            None => BF16,
        };
        let summaries = empty(&self.client, of.pages * 2 * width, of_bounds);
        let slots = upload_ints(&self.client, &slots);
        bounds(&self.client, &dense, &rows(longest), &slots, &summaries)?;
        let last = shape.lengths.iter().enumerate();
        let last: Vec<i32> = last.map(|(entry, of)| slot(entry, of[0] - 1)).collect();
        Ok(Chosen {
            client: self.client.clone(),
            scored: PageScoreShape {
                batch,
                heads: of.heads,
                kv_heads,
                tables: 1,
                entries: of.entries,
                pages: of.pages,
                page,
                width,
                dtype: BF16,
                summary: PageSummary::Bounds,
                summary_dtype: of_bounds,
            },
            highest: TopKPagesShape::new([batch, kv_heads], [1, of.entries], page, [1, keep]),
            rows: rows(1),
            summaries,
            scores: empty(&self.client, batch * kv_heads * of.entries, F32),
            slots: upload_ints(&self.client, &last),
            dense,
            sparse,
        })
    }

    /// Times of the parts of a choice, and how many times as fast it is with the attention over it. `check-device` compares what they give.
    pub(super) fn quest(&mut self) -> Result<()> {
        for (name, [batch, length, budget], bars) in BUDGETS {
            if !name.contains(&self.args.only) {
                continue;
            }
            let shape = Shape::equal(name, [batch, length, 1], HEADS, None);
            let chosen = self.chosen(&shape, PAGE, budget / PAGE)?;
            println!("{name}, pages of {PAGE}");
            let parts: [Part<'_>; 6] = [
                ("attention to all pages", &|| chosen.dense.run()),
                ("bounds of new keys", &|| chosen.summarize()),
                ("scores", &|| chosen.score()),
                ("picks", &|| chosen.pick()),
                ("attention to the picks", &|| chosen.sparse.run()),
                ("scores, picks, attention", &|| chosen.all()),
            ];
            let bars = bars.map_or(String::new(), |[bar, goal]| {
                format!("  bar {bar:.1}, goal {goal:.1}")
            });
            self.parts(name, PAGE, &parts, &bars)?;
        }
        Ok(())
    }
}
