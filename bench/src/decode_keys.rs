//! Times attention to single keys that an indexer selects (DeepSeek sparse attention, 2025), compared with attention to all keys.

use anyhow::Result;
use blocksparse_bench::device::{empty, upload, upload_ints};
use blocksparse_bench::numbers::{BF16, F32};
use burn_paged_attention::internal::kernels::{
    PagedPlan, PagedShape, SlotShape, page_list_slots, picked_slots,
};
use burn_sparse_select::kernels::indexer::{
    PairInputs, PairSizes, PairSum, TopKKeys, pair_sums, top_k_keys,
};

use super::{Bench, Call, Part, Shape};

const PAGE: usize = 16;

/// Sequences, tokens of each, keys selected per query; query heads and KV heads; indexer heads and their width.
const KEPT: [(&str, [usize; 7]); 5] = [
    ("32K, B 8", [8, 32_768, 2048, 32, 8, 64, 128]),
    ("32K, B 8, 4 x 64", [8, 32_768, 2048, 32, 8, 4, 64]),
    ("32K, B 8, 16 on 1", [8, 32_768, 2048, 16, 1, 4, 64]),
    ("32K, B 1", [1, 32_768, 2048, 32, 8, 64, 128]),
    ("128K, B 4", [4, 131_072, 2048, 32, 8, 64, 128]),
];

impl Bench {
    pub(super) fn keys(&mut self) -> Result<()> {
        for (of, sizes) in KEPT {
            let name = format!("keys 2,048 of {of}");
            if name.contains(&self.args.only) {
                self.kept(&name, sizes)?;
            }
        }
        Ok(())
    }

    /// Times the parts of a selection of keys and its speedup including the attention. `check-device` compares the results.
    fn kept(&mut self, name: &str, sizes: [usize; 7]) -> Result<()> {
        let [batch, length, keep, heads, kv_heads, index_heads, index_dim] = sizes;
        let client = self.client.clone();
        let shape = Shape::equal("keys", [batch, length, 1], [heads, kv_heads], None);
        let dense = self.call(&shape, PAGE)?;
        let of = dense.shape;
        let slots = of.pages * PAGE;
        let (rows, kept) = ([batch, heads, kv_heads, 1], [kv_heads, keep]);
        let mut over_some = PagedShape::new(rows, kept, [slots, 1], of.widths, BF16);
        over_some.quantization = of.quantization;
        over_some.counters = of.counters;
        let spans = [keep as i32, 0, 0, 0].repeat(batch * kv_heads);
        let sparse = Call {
            plan: PagedPlan::new(&client, over_some)?,
            table: empty(&client, batch * kv_heads * keep, F32),
            spans: upload_ints(&client, &spans),
            ..dense.clone()
        };

        let page_lists = SlotShape {
            page_lists: batch,
            entries: of.entries,
            page: PAGE,
        };
        let all = slots / kv_heads;
        let sizes = PairSizes::new(
            [1, index_heads, batch, index_dim],
            [1, 1, all, index_dim],
            [0, batch],
            Some(page_lists.slots()),
        );
        let numbers = batch * page_lists.slots();
        // Slots of page lists and their scores.
        let [slots, scores] = [(); 2].map(|()| empty(&client, numbers, F32));
        let list = || {
            let from = [&dense.table, &dense.spans];
            page_list_slots(&client, &page_lists, from, &slots)
        };
        let q = self.filled(index_heads * batch * index_dim, BF16, 5);
        let k = self.filled(all * index_dim, BF16, 6);
        let weights = upload(&client, &vec![0.5; index_heads * batch], F32);
        let score = || {
            let inputs = PairInputs {
                element: BF16,
                q: &q,
                k: &k,
                of_rows: &weights,
                keys: Some(&slots),
                bytes: None,
            };
            let sum = PairSum::Scores {
                factor: 1.0,
                near: 0,
                all: true,
            };
            pair_sums(&client, &sizes, &inputs, &sum, &scores)
        };
        let top_k = TopKKeys {
            most: keep,
            near: 0,
            seen: Some(1),
        };
        let places = empty(&client, batch * keep, F32);
        let seen = upload_ints(&client, &vec![length as i32; batch]);
        let pick = || top_k_keys(&client, &sizes, &top_k, [&scores, &places], Some(&seen));
        let find = || {
            let from = [&places, &dense.table];
            picked_slots(&client, &page_lists, [kv_heads, keep], from, &sparse.table)
        };

        println!("{name}, pages of {PAGE}");
        println!("  {}", sparse.plan);
        let parts: [Part<'_>; 7] = [
            ("attention to all keys", &|| dense.run()),
            ("slots of page lists", &list),
            ("scores", &score),
            ("picks", &pick),
            ("slots of picks", &find),
            ("attention to the picks", &|| sparse.run()),
            ("all five", &|| {
                list()?;
                score()?;
                pick()?;
                find()?;
                sparse.run()
            }),
        ];
        self.parts(name, PAGE, &parts, "")
    }
}
