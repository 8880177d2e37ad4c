//! Attention over the pages that queries choose (Quest: Tang et al., 2024), beside attention over all of them.

use anyhow::{Result, anyhow, ensure};
use blocksparse_cubecl::KernelError;
use burn_paged_attention::internal::kernels::AppendShape;
use burn_paged_attention::internal::kernels::HighestShape;
use burn_paged_attention::internal::kernels::PageScoreBuffers;
use burn_paged_attention::internal::kernels::PageScoreShape;
use burn_paged_attention::internal::kernels::PagedPlan;
use burn_paged_attention::internal::kernels::Summary;
use burn_paged_attention::internal::kernels::page_scores;
use burn_paged_attention::internal::kernels::summarize_pages;
use burn_paged_attention::internal::kernels::summarize_quantized;
use burn_paged_attention::internal::kernels::topk_pages;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::bf16;
use serde_json::json;

use super::{BF16, Bench, Call, Shape, bytes_of};

/// A shape to be timed: sequences of so many tokens, of which each query reads a budget.
struct Budget {
    name: &'static str,
    batch: usize,
    length: usize,
    budget: usize,
    /// Times as fast as all pages: at least, and hoped for.
    bars: Option<[f64; 2]>,
}

const PAGE: usize = 16;

const BUDGETS: [Budget; 4] = [
    Budget {
        name: "quest 2,048 of 32K, B 8",
        batch: 8,
        length: 32_768,
        budget: 2048,
        bars: Some([3.5, 5.0]),
    },
    Budget {
        name: "quest 2,048 of 32K, B 1",
        batch: 1,
        length: 32_768,
        budget: 2048,
        bars: None,
    },
    Budget {
        name: "quest 1,024 of 8K, B 8",
        batch: 8,
        length: 8192,
        budget: 1024,
        bars: None,
    },
    Budget {
        name: "quest 4,096 of 128K, B 4",
        batch: 4,
        length: 131_072,
        budget: 4096,
        bars: None,
    },
];

/// A choice with its tensors on the device, and attention over what it chooses.
struct Chosen {
    client: Client,
    scored: PageScoreShape,
    highest: HighestShape,
    rows: AppendShape,
    dense: Call,
    sparse: Call,
    summaries: Handle,
    scores: Handle,
    slots: Handle,
}

impl Chosen {
    fn summarize(&self) -> bool {
        let (rows, slots) = (&self.rows, &self.slots);
        bounds(&self.client, &self.dense, rows, slots, &self.summaries).is_ok()
    }

    fn score(&self) -> bool {
        let buffers = PageScoreBuffers {
            q: &self.dense.q,
            summaries: &self.summaries,
            table: &self.dense.table,
            spans: &self.dense.spans,
            scores: &self.scores,
        };
        let group = self.scored.heads / self.scored.kv_heads;
        page_scores(&self.client, &self.scored, &buffers, 1.0 / group as f64).is_ok()
    }

    fn pick(&self) -> bool {
        let Some(selected) = &self.sparse.selected else {
            return false;
        };
        let spans = &self.dense.spans;
        topk_pages(&self.client, &self.highest, &self.scores, spans, selected).is_ok()
    }

    fn all(&self) -> bool {
        self.score() && self.pick() && self.sparse.run().is_ok()
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
    let (summary, keys) = (Summary::Bounds, &call.keys);
    match (call.shape.quantization, &call.scales) {
        (Some(quantization), Some([scales, _])) => {
            let keys = (keys, scales, quantization);
            summarize_quantized(client, rows, summary, keys, slots, summaries)
        }
        _ => summarize_pages(client, rows, summary, keys, slots, (summaries, BF16)),
    }
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
        sparse.selected = Some(self.client.empty(batch * kv_heads * keep * 4));
        let table = self.read_ints(&dense.table)?;
        let longest = shape.lengths.iter().map(|length| length[0]).max();
        let longest = longest.unwrap_or(0);
        // All keys at once, so that all pages have summaries.
        let mut slots = Vec::with_capacity(batch * longest);
        for (entry, length) in shape.lengths.iter().enumerate() {
            slots.extend((0..longest).map(|key| match key < length[0] {
                true => table[entry * of.entries + key / page] * page as i32 + (key % page) as i32,
                false => -1,
            }));
        }
        let rows = AppendShape::new(
            [batch, kv_heads, 1, longest],
            [of.pages, page],
            of.widths,
            BF16,
        );
        let of_bounds = match of.quantization {
            Some(_) => ElemType::Float(FloatKind::F32),
            None => BF16,
        };
        let summaries = self.client.empty(of.pages * 2 * width * of_bounds.size());
        let slots = self.client.create_from_slice(&bytes_of(&slots));
        bounds(&self.client, &dense, &rows, &slots, &summaries)?;
        let last = shape.lengths.iter().enumerate().map(|(entry, length)| {
            let key = length[0] - 1;
            table[entry * of.entries + key / page] * page as i32 + (key % page) as i32
        });
        let last: Vec<i32> = last.collect();
        Ok(Chosen {
            client: self.client.clone(),
            scored: PageScoreShape::new(
                [batch, of.heads, kv_heads],
                [1, of.entries],
                [of.pages, page, width],
                BF16,
                (Summary::Bounds, of_bounds),
            ),
            highest: HighestShape::new([batch, kv_heads], [1, of.entries], page, [1, keep]),
            rows: AppendShape::new([batch, kv_heads, 1, 1], [of.pages, page], of.widths, BF16),
            summaries,
            scores: self.client.empty(batch * kv_heads * of.entries * 4),
            slots: self.client.create_from_slice(&bytes_of(&last)),
            dense,
            sparse,
        })
    }

    fn read_ints(&self, handle: &Handle) -> Result<Vec<i32>> {
        let bytes = self.client.read_one(handle.clone());
        let bytes = bytes.map_err(|error| anyhow!("{error:?}"))?.to_vec();
        let number = |bytes: &[u8]| bytes.try_into().map(i32::from_le_bytes);
        Ok(bytes.chunks(4).map(number).collect::<Result<_, _>>()?)
    }

    /// Times of the parts of a choice, and how many times as fast it is with the attention over it.
    pub(super) fn quest(&mut self) -> Result<()> {
        for budget in BUDGETS {
            let Budget {
                name,
                batch,
                length,
                budget,
                bars,
            } = budget;
            if !name.contains(&self.args.only) {
                continue;
            }
            let shape = Shape::equal(name, batch, length, 1, None);
            let chosen = self.chosen(&shape, PAGE, budget / PAGE)?;
            println!("{name}, pages of {PAGE}");
            let parts: [(&str, &(dyn Fn() -> bool + Send + Sync)); 6] = [
                ("attention to all pages", &|| chosen.dense.run().is_ok()),
                ("bounds of new keys", &|| chosen.summarize()),
                ("scores", &|| chosen.score()),
                ("picks", &|| chosen.pick()),
                ("attention to the picks", &|| chosen.sparse.run().is_ok()),
                ("scores, picks, attention", &|| chosen.all()),
            ];
            let mut times = Vec::new();
            for (part, run) in parts {
                let Some(medians @ [one, many, replayed]) = self.medians(run)? else {
                    continue;
                };
                println!("  {part:<26} {PAGE:>4} {one:>9.2} {many:>9.2} {replayed:>9.2}");
                times.push(medians);
                self.results.push(json!({
                    "name": name, "part": part, "page": PAGE, "us": one, "us_in_a_row": many, "us_replayed": replayed,
                }));
            }
            let (Some(all), Some(some)) = (times.first(), times.last()) else {
                continue;
            };
            // Without recordings, what calls take among others.
            let of = if all[2].is_finite() { 2 } else { 1 };
            let ratio = all[of] / some[of];
            let bars = bars.map_or(String::new(), |[bar, goal]| {
                format!("  bar {bar:.1}, goal {goal:.1}")
            });
            println!("  {:<26} {ratio:>34.2} x{bars}", "as fast as all pages");
            self.results
                .push(json!({ "name": name, "page": PAGE, "ratio": ratio }));
        }
        Ok(())
    }

    /// Bounds and scores against loops in f64, picks against a sort of the scores that there are, and attention over the picks the same bits twice.
    pub(super) fn verify_quest(&mut self) -> Result<()> {
        let name = "quest";
        // Of keys in eight bits `check-device` has the comparison.
        let is_other = self.args.quantization().is_some() || !name.contains(&self.args.only);
        if is_other || !self.client.properties().supports_type(BF16) {
            return Ok(());
        }
        for (seed, (heads, kv_heads, width, page, keep)) in [
            (8, 2, 128, 16, 5),
            (4, 4, 64, 32, 3),
            (8, 1, 256, 16, 9),
            (6, 2, 40, 64, 2),
        ]
        .into_iter()
        .enumerate()
        {
            let lengths = vec![[1000, 0, 0], [page - 1, 0, 0], [1, 0, 0], [2600, 0, 0]];
            let shape = Shape {
                heads,
                kv_heads,
                width,
                lengths: lengths.clone(),
                ..Shape::equal("quest", 1, 0, 1, None)
            };
            let chosen = self.chosen(&shape, page, keep)?;
            ensure!(chosen.all(), "the choice cannot be launched");
            let first = chosen.sparse.read()?;
            ensure!(chosen.all() && first == chosen.sparse.read()?, "other bits");
            let numbers = |handle: &Handle| -> Result<Vec<f64>> {
                let bytes = self.client.read_one(handle.clone());
                let bytes = bytes.map_err(|error| anyhow!("{error:?}"))?.to_vec();
                let number = |x: &[u8]| f64::from(bf16::from_le_bytes([x[0], x[1]]));
                Ok(bytes.chunks(2).map(number).collect())
            };
            let (q, keys) = (numbers(&chosen.dense.q)?, numbers(&chosen.dense.keys)?);
            let summaries = numbers(&chosen.summaries)?;
            let table = self.read_ints(&chosen.dense.table)?;
            let scores = self.read_ints(&chosen.scores)?;
            let scores: Vec<f32> = scores.iter().map(|x| f32::from_bits(*x as u32)).collect();
            let Some(selected) = &chosen.sparse.selected else {
                continue;
            };
            let picks = self.read_ints(selected)?;
            let entries = chosen.scored.entries;
            for (entry, length) in lengths.iter().enumerate() {
                for head in 0..kv_heads {
                    let row = entry * kv_heads + head;
                    let pages = length[0].div_ceil(page);
                    let own = &scores[row * entries..][..pages];
                    for (at, score) in own.iter().enumerate() {
                        let id = table[entry * entries + at] as usize * kv_heads + head;
                        let slots = page.min(length[0] - at * page);
                        let mut expected = 0.0;
                        for c in 0..width {
                            let column = |slot: usize| keys[(id * page + slot) * width + c];
                            let most = (0..slots).map(column).fold(f64::MIN, f64::max);
                            let least = (0..slots).map(column).fold(f64::MAX, f64::min);
                            let made = [0, width].map(|of| summaries[id * 2 * width + of + c]);
                            ensure!(made == [most, least], "bounds {made:?}, not {most} {least}");
                            let group = heads / kv_heads;
                            for member in 0..group {
                                let q = q[(row * group + member) * width + c];
                                expected += (q * most).max(q * least) / group as f64;
                            }
                        }
                        let error = (f64::from(*score) - expected).abs();
                        let tolerance = 1e-5 * width as f64;
                        ensure!(error < tolerance, "{seed}: score {score}, not {expected}");
                    }
                    let mut order: Vec<usize> = (0..pages - 1).collect();
                    order.sort_by(|a, b| own[*b].total_cmp(&own[*a]));
                    order.truncate(keep - 1);
                    order.push(pages - 1);
                    order.sort_unstable();
                    let mut expected: Vec<i32> = order.iter().map(|page| *page as i32).collect();
                    expected.resize(keep, -1);
                    let got = &picks[row * keep..][..keep];
                    ensure!(got == expected, "{seed}: picks {got:?}, not {expected:?}");
                }
            }
        }
        println!("choices of pages are right");
        Ok(())
    }
}
