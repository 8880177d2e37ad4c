//! Times attention to pages that queries select (Quest: Tang et al., 2024), compared with attention to all pages.

use anyhow::Result;
use blocksparse_bench::device::{empty, read_ints, upload_ints};
use blocksparse_bench::numbers::{BF16, F32};
use burn_paged_attention::internal::kernels::{
    AppendShape, PageScoreBuffers, PageScoreShape, PagedPlan, StoredKeys, page_scores,
    summarize_pages,
};
use burn_sparse_select::kernels::rows::{TopKPagesShape, topk_pages};
use burn_sparse_select::{Always, PageSummary};
use cubecl::server::Handle;

use super::{Bench, Call, HEADS, Part, Shape};

const PAGE: usize = 16;

/// Sequences, tokens of each, and the token budget of each query; and the speedup over all pages: the lower bound and the goal.
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

impl Bench {
    pub(super) fn quest(&mut self) -> Result<()> {
        for budget in BUDGETS {
            if budget.0.contains(&self.args.only) {
                self.budget(budget)?;
            }
        }
        Ok(())
    }

    /// Times the parts of a selection and its speedup including the attention. The last key of every sequence is treated as new. `check-device`
    /// compares the results.
    fn budget(&mut self, (name, [batch, length, budget], bars): Budget) -> Result<()> {
        let (client, keep) = (self.client.clone(), budget / PAGE);
        let shape = Shape::equal(name, [batch, length, 1], HEADS, None);
        let dense = self.call(&shape, PAGE)?;
        let of = dense.shape;
        let (heads, kv_heads, width) = (of.heads, of.kv_heads, of.widths[0]);
        let mut over_some = of;
        over_some.selected = Some(keep);
        let selected = empty(&client, batch * kv_heads * keep, F32);
        let sparse = Call {
            plan: PagedPlan::new(&client, over_some)?,
            selected: Some(selected.clone()),
            ..dense.clone()
        };

        let table = read_ints(&client, &dense.table)?;
        let slot = |entry: usize, key: usize| {
            table[entry * of.entries + key / PAGE] * PAGE as i32 + (key % PAGE) as i32
        };
        let slots = |first: usize| {
            let keys = (0..batch).flat_map(|entry| (first..length).map(move |key| (entry, key)));
            let slots: Vec<i32> = keys.map(|(entry, key)| slot(entry, key)).collect();
            upload_ints(&client, &slots)
        };
        // In bf16 like the keys, or in f32 for 8-bit keys.
        let summary_dtype = if of.quantization.is_some() { F32 } else { BF16 };
        let summaries = empty(&client, of.pages * 2 * width, summary_dtype);
        let bounds = |rows: usize, slots: &Handle| {
            let rows = AppendShape {
                batch,
                kv_heads,
                tables: 1,
                rows,
                page: PAGE,
                pages: of.pages,
                widths: of.widths,
                dtype: BF16,
            };
            let scales = dense.scales.as_ref().map(|[scales, _]| scales);
            let keys = StoredKeys {
                keys: &dense.keys,
                packed: of.quantization.zip(scales),
            };
            let (summary, to) = (PageSummary::Bounds, (&summaries, summary_dtype));
            summarize_pages(&client, &rows, summary, keys, slots, to)
        };
        // Appends all keys at once, so that all pages have summaries.
        bounds(length, &slots(0))?;
        let last = slots(length - 1);

        let scored = PageScoreShape {
            batch,
            heads,
            kv_heads,
            tables: 1,
            entries: of.entries,
            pages: of.pages,
            page: PAGE,
            width,
            dtype: BF16,
            summary: PageSummary::Bounds,
            summary_dtype,
        };
        let scores = empty(&client, batch * kv_heads * of.entries, F32);
        let score = || {
            let buffers = PageScoreBuffers {
                q: &dense.q,
                summaries: &summaries,
                table: &dense.table,
                spans: &dense.spans,
                scores: &scores,
            };
            let factor = kv_heads as f64 / heads as f64;
            page_scores(&client, &scored, &buffers, factor)
        };
        let highest = TopKPagesShape {
            batch,
            kv_heads,
            tables: 1,
            entries: of.entries,
            page: PAGE,
            block: 1,
            chosen: keep - 1,
            kept: keep,
            forced: Always { first: 0, local: 1 },
        };
        let pick = || topk_pages(&client, &highest, &scores, &dense.spans, &selected);

        println!("{name}, pages of {PAGE}");
        let parts: [Part<'_>; 6] = [
            ("attention to all pages", &|| dense.run()),
            ("bounds of new keys", &|| bounds(1, &last)),
            ("scores", &score),
            ("picks", &pick),
            ("attention to the picks", &|| sparse.run()),
            ("scores, picks, attention", &|| {
                score()?;
                pick()?;
                sparse.run()
            }),
        ];
        let bars = bars.map_or(String::new(), |[bar, goal]| {
            format!("  bar {bar:.1}, goal {goal:.1}")
        });
        self.parts(name, PAGE, &parts, &bars)
    }
}
