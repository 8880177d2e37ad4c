//! What chooses single keys: indexers, clusters and hashes.

use burn::tensor::{DType, Distribution, Tensor};
use burn_blocksparse::Pattern;
use burn_sparse_select::dsa::{Dsa, DsaIndex, DsaTarget};
use burn_sparse_transformer::content::{LshHeadsConfig, RoutingHeadsConfig};

use super::Bench;
use crate::attention::run;

/// An indexer's call: batch, positions and keys that are kept; heads of the attention on one head of keys, and their width; those of the indexer, and its
/// dtype; whether losses are timed.
pub type DsaSizes = ([usize; 3], [usize; 2], [usize; 2], DType, bool);

/// A small model's, whose indexer is in f32 or in bf16 as its layers are, one of a long context, and the paper's indexer (DeepSeek-V3.2-Exp, 2025) beside 16
/// heads.
pub const DSA: [DsaSizes; 5] = [
    ([8, 1024, 128], [8, 48], [4, 64], DType::BF16, true),
    ([8, 1024, 128], [8, 48], [4, 64], DType::F32, true),
    ([1, 16_384, 2048], [16, 128], [16, 128], DType::F32, true),
    ([1, 8192, 2048], [16, 128], [64, 128], DType::BF16, true),
    ([1, 65_536, 2048], [16, 128], [64, 128], DType::BF16, false),
];

/// Blocks that are chosen first, and keys of each (HISA: Xu et al., 2026).
const BLOCKS: [usize; 2] = [64, 128];

/// Queries at the end whose choices in blocks are compared with those without.
const COMPARED: usize = 1024;

/// The share of the keys of the last queries that they also choose in blocks.
fn recall([all, in_blocks]: [&Dsa; 2], index: &DsaIndex) -> f64 {
    let [all, found] = [all, in_blocks].map(|dsa| {
        let lists = dsa.choose(index).expect("shapes fit");
        let keys = lists.keys();
        let [_, _, n, most] = keys.dims();
        let last = keys.clone().slice_dim(2, n.saturating_sub(COMPARED)..n);
        let keys: Vec<i32> = last.into_data().iter().collect();
        (keys, most)
    });
    let rows = all.0.chunks(all.1).zip(found.0.chunks(found.1));
    let both = |(all, found): (&[i32], &[i32])| {
        let is_found = |key: &&i32| found.binary_search(key).is_ok();
        all.iter().filter(is_found).count()
    };
    rows.map(both).sum::<usize>() as f64 / all.0.len() as f64
}

impl Bench<'_> {
    /// The same choice in fp8 and in blocks, and which of its keys are also chosen in blocks: of keys that have shares of their numbers in common with the 63
    /// others of a stretch.
    fn dsa_in_blocks(&mut self, dsa: &Dsa, index: &DsaIndex, name: impl Fn(&str) -> String) {
        const STRETCH: usize = 64;
        let [blocks, block] = BLOCKS;
        let in_blocks = dsa.with_blocks(blocks, block).expect("enough blocks");
        let rounded = index.clone().in_fp8().expect("a width of fp8");
        self.time(&name("choice in fp8"), || dsa.choose(&rounded));
        self.time(&name("choice in blocks"), || in_blocks.choose(index));
        self.time(&name("choice in blocks, in fp8"), || {
            in_blocks.choose(&rounded)
        });
        let [_, _, n, width] = index.k.dims();
        let what = name("recall in blocks");
        if !self.only.split('|').any(|part| what.contains(part)) || n % STRETCH > 0 {
            return;
        }
        for alike in [0.0, 0.5, 0.8, 0.95f64] {
            let normal = |rows: usize| {
                let distribution = Distribution::Normal(0.0, 1.0);
                Tensor::<4>::random([1, rows, n / rows, width], distribution, &self.device)
            };
            let own = normal(1).mul_scalar((1.0 - alike).sqrt());
            let own = own.reshape([1, n / STRETCH, STRETCH, width]);
            let shared = normal(STRETCH).slice_dim(1, 0..1).swap_dims(1, 2);
            let keys = own + shared.mul_scalar(alike.sqrt());
            let keys = keys.reshape([1, 1, n, width]).cast(index.q.dtype());
            let [q, weights] = [index.q.clone(), index.weights.clone().unsqueeze_dim(3)]
                .map(|x| x.without_autodiff());
            let index = DsaIndex::new(q, keys, weights.squeeze_dim(3)).expect("shapes fit");
            let recall = recall([dsa, &in_blocks], &index);
            println!("{what:<64} {recall:.4} where neighbours have {alike} in common");
        }
    }

    /// An indexer's choices, and its losses with their gradients; and TFLOP/s of the operations that they need: products of the pairs that are seen or chosen, and
    /// dense attention's.
    pub fn dsa(&mut self, sizes: DsaSizes) {
        let ([batch, n, keep], of_dense, of_index, dtype, losses) = sizes;
        let ([heads, width], [index_heads, index_width]) = (of_dense, of_index);
        self.heading([heads, 1, width], n);
        self.dense = f64::NAN;
        let normal = Distribution::Normal(0.0, 1.0);
        let random = |heads: usize, width: usize, dtype: DType| {
            let options = (&self.device, dtype);
            Tensor::<4>::random([batch, heads, n, width], normal, options)
        };
        let (q, k) = (
            random(heads, width, DType::BF16),
            random(1, width, DType::BF16),
        );
        let index = |heads, width| random(heads, width, dtype).autodiff().require_grad();
        // Leaves, which more than one graph may have.
        let weights = random(index_heads, 1, dtype).squeeze_dim::<3>(3);
        let weights = weights.autodiff().require_grad();
        let keys = index(1, index_width);
        let index = DsaIndex::new(index(index_heads, index_width), keys, weights);
        let index = index.expect("shapes fit");
        let dsa = Dsa::new(keep).expect("a number of keys");
        let seen = |most: usize| -> usize { (1..=n).map(|keys| keys.min(most)).sum() };
        let products = |[heads, width]: [usize; 2], most: usize| {
            (2 * batch * heads * width * seen(most)) as f64
        };
        let [all, chosen] = [n, keep].map(|most| 3.0 * products(of_index, most));
        let dense = products(of_dense, n);
        let name = |what: &str| {
            format!("dsa, {batch} x {index_heads} x {index_width} {dtype:?}, {keep}: {what}")
        };
        let rate =
            |flops: f64, seconds: f64| println!("{:>64} {:.1} TFLOP/s", "", flops / seconds / 1e12);
        let seconds = self.time(&name("choice"), || dsa.choose(&index));
        rate(all / 3.0, seconds);
        if batch == 1 && n > BLOCKS[0] * BLOCKS[1] {
            self.dsa_in_blocks(&dsa, &index, name);
        }
        if !losses {
            return;
        }
        let lists = dsa.choose(&index).expect("shapes fit");
        for (what, over, flops) in [
            ("loss over all", DsaTarget::All, all + 2.0 * dense),
            (
                "loss over chosen",
                DsaTarget::Chosen(&lists),
                chosen + dense + products(of_dense, keep),
            ),
        ] {
            let seconds = self.time(&name(what), || {
                let loss = dsa.loss(&index, [&q, &k], None, over);
                loss.expect("shapes fit").backward()
            });
            rate(flops, seconds);
        }
    }

    /// Clusters of 128 and hashes in chunks of 64, beside local attention that computes as many pairs: once what clusters or a round do.
    pub fn single_keys(&mut self, n: usize) {
        let (sizes, window, bucket) = ([8, 8, 64], 128, 64);
        let [heads, _, dim] = sizes;
        self.heading(sizes, n);
        let inputs = self.inputs(sizes, n);
        let tracked = Self::tracked(&inputs);
        let local = Pattern::local(window).layout(heads, n, 64).expect("valid");
        let [q, k, v] = &inputs;
        self.dense = f64::NAN;
        let forward = self.time("single keys: local(128)", || run(q, k, v, &local));
        let both = self.time("single keys: local(128), forward and backward", || {
            let [q, k, v] = &tracked;
            run(q, k, v, &local).backward()
        });
        let routing = RoutingHeadsConfig::new(window);
        let plain = routing
            .try_init(heads, dim, n, &self.device)
            .expect("valid");
        let training = self.device.clone().autodiff();
        let training = routing.try_init(heads, dim, n, &training).expect("valid");
        self.dense = forward;
        self.time("single keys: routing:128, choice", || {
            plain.clusters(q.clone()).expect("shapes fit")
        });
        self.time("single keys: routing:128", || {
            plain
                .try_forward(q.clone(), v.clone())
                .expect("shapes fit")
                .context
        });
        self.dense = both;
        self.time("single keys: routing:128, forward and backward", || {
            let out = training.try_forward(tracked[0].clone(), tracked[2].clone());
            out.expect("shapes fit").context.backward()
        });
        for rounds in [1, 4] {
            let lsh = LshHeadsConfig::new()
                .with_bucket(bucket)
                .with_rounds(rounds);
            let lsh = lsh.try_init().expect("valid");
            let name = format!("single keys: lsh:{bucket},{rounds}");
            let scale = rounds as f64;
            self.dense = forward * scale;
            self.time(&name, || lsh.try_forward(q.clone(), v.clone(), None));
            self.dense = both * scale;
            self.time(&format!("{name}, forward and backward"), || {
                let out = lsh.try_forward(tracked[0].clone(), tracked[2].clone(), None);
                out.expect("shapes fit").backward()
            });
        }
    }
}
