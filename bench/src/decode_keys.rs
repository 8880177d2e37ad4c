//! Attention over the single keys that an indexer chooses (DeepSeek sparse attention, 2025), beside attention over all of them.

use anyhow::Result;
use burn_paged_attention::internal::kernels::PagedPlan;
use burn_paged_attention::internal::kernels::PagedShape;
use burn_paged_attention::internal::kernels::SlotShape;
use burn_paged_attention::internal::kernels::picked_slots;
use burn_paged_attention::internal::kernels::walk_slots;
use burn_sparse_select::kernels::indexer::KeyPicks;
use burn_sparse_select::kernels::indexer::PairInputs;
use burn_sparse_select::kernels::indexer::PairSizes;
use burn_sparse_select::kernels::indexer::PairSum;
use burn_sparse_select::kernels::indexer::pair_sums;
use burn_sparse_select::kernels::indexer::pick_keys;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde_json::json;

use super::{BF16, Bench, Call, Shape, bytes_of};

/// A shape to be timed: sequences of so many tokens, of which each query keeps some.
struct Kept {
    name: &'static str,
    batch: usize,
    length: usize,
    keep: usize,
    /// Heads of queries and of keys.
    heads: [usize; 2],
    /// Of the indexer heads, and their width.
    index: [usize; 2],
}

const PAGE: usize = 16;

const KEPT: [Kept; 5] = [
    Kept {
        name: "keys 2,048 of 32K, B 8",
        batch: 8,
        length: 32_768,
        keep: 2048,
        heads: [32, 8],
        index: [64, 128],
    },
    Kept {
        name: "keys 2,048 of 32K, B 8, 4 x 64",
        batch: 8,
        length: 32_768,
        keep: 2048,
        heads: [32, 8],
        index: [4, 64],
    },
    Kept {
        name: "keys 2,048 of 32K, B 8, 16 on 1",
        batch: 8,
        length: 32_768,
        keep: 2048,
        heads: [16, 1],
        index: [4, 64],
    },
    Kept {
        name: "keys 2,048 of 32K, B 1",
        batch: 1,
        length: 32_768,
        keep: 2048,
        heads: [32, 8],
        index: [64, 128],
    },
    Kept {
        name: "keys 2,048 of 128K, B 4",
        batch: 4,
        length: 131_072,
        keep: 2048,
        heads: [32, 8],
        index: [64, 128],
    },
];

/// A choice with its tensors on the device, and attention over what it chooses.
struct Chosen {
    client: Client,
    sizes: PairSizes,
    picks: KeyPicks,
    walks: SlotShape,
    heads: usize,
    dense: Call,
    sparse: Call,
    /// Queries, keys and weights of the indexer.
    index: [Handle; 3],
    /// Slots of walks, and how many keys queries see.
    slots: Handle,
    seen: Handle,
    scores: Handle,
    places: Handle,
}

impl Chosen {
    fn list(&self) -> bool {
        let walks = [&self.dense.table, &self.dense.spans];
        walk_slots(&self.client, &self.walks, walks, &self.slots).is_ok()
    }

    fn score(&self) -> bool {
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
        pair_sums(&self.client, &self.sizes, &inputs, &sum, &self.scores).is_ok()
    }

    fn pick(&self) -> bool {
        let numbers = [&self.scores, &self.places];
        let seen = Some(&self.seen);
        pick_keys(&self.client, &self.sizes, &self.picks, numbers, seen).is_ok()
    }

    fn find(&self) -> bool {
        let to = [self.heads, self.picks.most];
        let from = [&self.places, &self.dense.table];
        picked_slots(&self.client, &self.walks, to, from, &self.sparse.table).is_ok()
    }

    fn all(&self) -> bool {
        self.list() && self.score() && self.pick() && self.find() && self.sparse.run().is_ok()
    }
}

impl Bench {
    fn chosen_keys(&self, kept: &Kept) -> Result<Chosen> {
        let Kept {
            batch,
            length,
            keep,
            heads: [heads, kv_heads],
            index: [index_heads, index_dim],
            ..
        } = *kept;
        let shape = Shape {
            heads,
            kv_heads,
            ..Shape::equal(kept.name, batch, length, 1, None)
        };
        let dense = self.call(&shape, PAGE)?;
        let mut sparse = self.call(&shape, PAGE)?;
        let of = dense.shape;
        let slots = of.pages * PAGE;
        let mut over_some = PagedShape::new(
            [batch, heads, kv_heads, 1],
            [kv_heads, keep],
            [slots, 1],
            of.widths,
            BF16,
        );
        over_some.quantization = of.quantization;
        over_some.counters = of.counters;
        sparse.plan = PagedPlan::new(&self.client, over_some)?;
        // The same keys, not as many again.
        (sparse.keys, sparse.values) = (dense.keys.clone(), dense.values.clone());
        sparse.scales = dense.scales.clone();
        sparse.table = self.client.empty(batch * kv_heads * keep * 4);
        let spans: Vec<i32> = (0..batch * kv_heads)
            .flat_map(|_| [keep as i32, 0, 0, 0])
            .collect();
        sparse.spans = self.client.create_from_slice(&bytes_of(&spans));
        let walks = SlotShape::new(batch, of.entries, PAGE);
        let all = slots / kv_heads;
        let sizes = PairSizes::new(
            [1, index_heads, batch, index_dim],
            [1, 1, all, index_dim],
            [0, batch],
            Some(walks.slots()),
        );
        let numbers = batch * walks.slots();
        let weights = vec![0.5f32.to_le_bytes(); index_heads * batch].concat();
        Ok(Chosen {
            client: self.client.clone(),
            sizes,
            picks: KeyPicks {
                most: keep,
                near: 0,
                seen: Some(1),
            },
            walks,
            heads: kv_heads,
            dense,
            sparse,
            index: [
                self.filled(index_heads * batch * index_dim, BF16, 5),
                self.filled(all * index_dim, BF16, 6),
                self.client.create_from_slice(&weights),
            ],
            slots: self.client.empty(numbers * 4),
            seen: self
                .client
                .create_from_slice(&bytes_of(&vec![length as i32; batch])),
            scores: self.client.empty(numbers * 4),
            places: self.client.empty(batch * keep * 4),
        })
    }

    /// Times of the parts of a choice of keys, and how many times as fast it is with the attention over it. `check-device` compares what they give.
    pub(super) fn keys(&mut self) -> Result<()> {
        for kept in KEPT {
            let name = kept.name;
            if !name.contains(&self.args.only) {
                continue;
            }
            let chosen = self.chosen_keys(&kept)?;
            println!("{name}, pages of {PAGE}");
            println!("  {}", chosen.sparse.plan);
            let parts: [(&str, &(dyn Fn() -> bool + Send + Sync)); 7] = [
                ("attention to all keys", &|| chosen.dense.run().is_ok()),
                ("slots of walks", &|| chosen.list()),
                ("scores", &|| chosen.score()),
                ("picks", &|| chosen.pick()),
                ("slots of picks", &|| chosen.find()),
                ("attention to the picks", &|| chosen.sparse.run().is_ok()),
                ("all five", &|| chosen.all()),
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
            println!("  {:<26} {ratio:>34.2} x", "as fast as all keys");
            self.results
                .push(json!({ "name": name, "page": PAGE, "ratio": ratio }));
        }
        Ok(())
    }
}
