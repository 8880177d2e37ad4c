//! Attention over the single keys that an indexer chooses (DeepSeek sparse attention, 2025), beside attention over all of them.

use anyhow::Result;
use blocksparse_bench::device::{empty, upload, upload_ints};
use blocksparse_bench::numbers::{BF16, F32};
use burn_paged_attention::internal::kernels::{
    PagedPlan, PagedShape, SlotShape, page_list_slots, picked_slots,
};
use burn_sparse_select::kernels::indexer::{
    PairInputs, PairSizes, PairSum, TopKKeys, pair_sums, top_k_keys,
};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Bench, Call, Part, Shape};

const PAGE: usize = 16;

/// Sequences, their tokens, and how many of them a query keeps; heads of queries and of keys; indexer heads and their width.
const KEPT: [(&str, [usize; 7]); 5] = [
    ("32K, B 8", [8, 32_768, 2048, 32, 8, 64, 128]),
    ("32K, B 8, 4 x 64", [8, 32_768, 2048, 32, 8, 4, 64]),
    ("32K, B 8, 16 on 1", [8, 32_768, 2048, 16, 1, 4, 64]),
    ("32K, B 1", [1, 32_768, 2048, 32, 8, 64, 128]),
    ("128K, B 4", [4, 131_072, 2048, 32, 8, 64, 128]),
];

/// A choice with its tensors on the device, and attention over what it chooses.
struct Chosen {
    client: Client,
    sizes: PairSizes,
    top_k: TopKKeys,
    page_lists: SlotShape,
    heads: usize,
    dense: Call,
    sparse: Call,
    /// Queries, keys and weights of the indexer.
    index: [Handle; 3],
    /// Slots of page lists, and how many keys queries see.
    slots: Handle,
    seen: Handle,
    scores: Handle,
    places: Handle,
}

impl Chosen {
    fn list(&self) -> Result<()> {
        let page_lists = [&self.dense.table, &self.dense.spans];
        Ok(page_list_slots(
            &self.client,
            &self.page_lists,
            page_lists,
            &self.slots,
        )?)
    }

    fn score(&self) -> Result<()> {
        let [q, k, weights] = self.index.each_ref();
        let inputs = PairInputs {
            element: BF16,
            q,
            k,
            of_rows: weights,
            keys: Some(&self.slots),
            bytes: None,
        };
        let sum = PairSum::Scores {
            factor: 1.0,
            near: 0,
            all: true,
        };
        pair_sums(&self.client, &self.sizes, &inputs, &sum, &self.scores)?;
        Ok(())
    }

    fn pick(&self) -> Result<()> {
        let numbers = [&self.scores, &self.places];
        let seen = Some(&self.seen);
        top_k_keys(&self.client, &self.sizes, &self.top_k, numbers, seen)?;
        Ok(())
    }

    fn find(&self) -> Result<()> {
        let to = [self.heads, self.top_k.most];
        let from = [&self.places, &self.dense.table];
        picked_slots(&self.client, &self.page_lists, to, from, &self.sparse.table)?;
        Ok(())
    }

    fn all(&self) -> Result<()> {
        self.list()?;
        self.score()?;
        self.pick()?;
        self.find()?;
        self.sparse.run()
    }
}

impl Bench {
    fn chosen_keys(&self, sizes: [usize; 7]) -> Result<Chosen> {
        let [batch, length, keep, heads, kv_heads, index_heads, index_dim] = sizes;
        let shape = Shape::equal("keys", [batch, length, 1], [heads, kv_heads], None);
        let dense = self.call(&shape, PAGE)?;
        let mut sparse = self.call(&shape, PAGE)?;
        let of = dense.shape;
        let slots = of.pages * PAGE;
        let (rows, kept) = ([batch, heads, kv_heads, 1], [kv_heads, keep]);
        let mut over_some = PagedShape::new(rows, kept, [slots, 1], of.widths, BF16);
        over_some.quantization = of.quantization;
        over_some.counters = of.counters;
        sparse.plan = PagedPlan::new(&self.client, over_some)?;
        // The same keys, not as many again.
        (sparse.keys, sparse.values) = (dense.keys.clone(), dense.values.clone());
        sparse.scales = dense.scales.clone();
        sparse.table = empty(&self.client, batch * kv_heads * keep, F32);
        let spans: Vec<i32> = (0..batch * kv_heads)
            .flat_map(|_| [keep as i32, 0, 0, 0])
            .collect();
        sparse.spans = upload_ints(&self.client, &spans);
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
        Ok(Chosen {
            client: self.client.clone(),
            sizes,
            top_k: TopKKeys {
                most: keep,
                near: 0,
                seen: Some(1),
            },
            page_lists,
            heads: kv_heads,
            dense,
            sparse,
            index: [
                self.filled(index_heads * batch * index_dim, BF16, 5),
                self.filled(all * index_dim, BF16, 6),
                upload(&self.client, &vec![0.5; index_heads * batch], F32),
            ],
            slots: empty(&self.client, numbers, F32),
            seen: upload_ints(&self.client, &vec![length as i32; batch]),
            scores: empty(&self.client, numbers, F32),
            places: empty(&self.client, batch * keep, F32),
        })
    }

    /// Times of the parts of a choice of keys, and how many times as fast it is with the attention over it. `check-device` compares what they give.
    pub(super) fn keys(&mut self) -> Result<()> {
        for (of, sizes) in KEPT {
            let name = &format!("keys 2,048 of {of}");
            if !name.contains(&self.args.only) {
                continue;
            }
            let chosen = self.chosen_keys(sizes)?;
            println!("{name}, pages of {PAGE}");
            println!("  {}", chosen.sparse.plan);
            let parts: [Part<'_>; 7] = [
                ("attention to all keys", &|| chosen.dense.run()),
                ("slots of page lists", &|| chosen.list()),
                ("scores", &|| chosen.score()),
                ("picks", &|| chosen.pick()),
                ("slots of picks", &|| chosen.find()),
                ("attention to the picks", &|| chosen.sparse.run()),
                ("all five", &|| chosen.all()),
            ];
            self.parts(name, PAGE, &parts, "")?;
        }
        Ok(())
    }
}
