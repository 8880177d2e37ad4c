//! MiniMax sparse attention with the paper's numbers, beside dense attention.

use burn::tensor::{DType, Distribution, Tensor};
use burn_blocksparse::AttentionOptions;
use burn_sparse_select::msa::{Msa, MsaIndex, MsaTarget};

use super::{Bench, drift, drifting, memory};
use crate::attention::run;
use crate::queued::causal;

/// Heads of queries and keys, their width and that of the index; keys of a block, and blocks that are kept.
const HEADS: [usize; 2] = [64, 4];
const DIM: usize = 128;
const CHOICE: [usize; 2] = [128, 16];

impl Bench<'_> {
    /// The choice, attention to it, both, and both with what the index branch learns by.
    pub fn msa(&mut self, n: usize) {
        let ([heads, kv_heads], [block, keep]) = (HEADS, CHOICE);
        self.heading([heads, kv_heads, DIM], n);
        let options = (&self.device, DType::BF16);
        let random = |heads: usize| -> Tensor<4> {
            Tensor::random([1, heads, n, DIM], Distribution::Normal(0.0, 1.0), options)
        };
        let inputs = [random(heads), random(kv_heads), random(kv_heads)];
        let index = MsaIndex::new(drifting(random(kv_heads), drift()), random(1));
        let index = index.expect("shapes fit");
        let msa = Msa::new(block, keep).expect("the paper's numbers");
        let causal = causal(heads, n);
        let attend = |lists, [q, k, v]: [Tensor<4>; 3]| {
            let options = AttentionOptions::default();
            msa.attention(q, k, v, lists, options).expect("shapes fit")
        };
        let choose = || msa.choose(&index).expect("shapes fit");
        self.dense = f64::NAN;
        let [q, k, v] = &inputs;
        self.dense = self.time("msa, forward: dense", || run(q, k, v, &causal));
        let dense_forward = self.dense;
        self.time("msa, forward: choice", choose);
        let lists = choose();
        // Longer sequences are attended to in parts, and lists are counted on the host.
        if let Some(lists) = lists.as_ref().filter(|_| n <= 1 << 16) {
            let near = msa.near_layout(q.dims(), n).expect("valid sizes");
            let plan = lists.explain(q, k, v, &near, &AttentionOptions::default());
            println!("{}", plan.expect("shapes fit"));
            println!("overlap of lists {:.3}", lists.measure_group_reuse());
        }
        self.time("msa, forward: attention to a choice", || {
            attend(lists.clone(), inputs.clone())
        });
        let forward = self.time("msa, forward: choice and attention", || {
            attend(choose(), inputs.clone())
        });
        println!("forward: {:.2} × dense", dense_forward / forward);
        // Queries, outputs, the gradients of both, and some more tensors as large.
        let (needed, there) = ((heads * n * DIM * 2 * 10) as f64 / 1e9, memory());
        if needed > there {
            println!("msa, backward: skipped, needs about {needed:.0} GB of {there:.0}");
            return;
        }
        let tracked = Self::tracked(&inputs);
        self.dense = f64::NAN;
        self.dense = self.time("msa, backward: dense", || {
            let [q, k, v] = &tracked;
            run(q, k, v, &causal).sum().backward()
        });
        self.time("msa, backward: attention to a choice", || {
            attend(lists.clone(), tracked.clone()).0.sum().backward()
        });
        let both = self.time("msa, backward: choice and attention", || {
            attend(choose(), tracked.clone()).0.sum().backward()
        });
        println!("forward and backward: {:.2} × dense", self.dense / both);
        let [q, k] = [&index.q, &index.k].map(|x| x.clone().autodiff().require_grad());
        let learning = MsaIndex::new(q, k).expect("shapes fit");
        let (_, lse) = attend(lists.clone(), inputs.clone());
        let [q, k, _] = &inputs;
        self.time("msa, backward: loss of the index", || {
            let lists = lists.as_ref();
            let over = MsaTarget::Chosen { lists, lse: &lse };
            let loss = msa.loss(&learning, [q, k], None, over);
            loss.expect("shapes fit").backward()
        });
    }
}
