//! Queries and keys for selections: in f64 for loops, and as tensors for devices.

use burn_sparse_select::{EstimateInputs, ReferenceInputs};

use crate::prelude::*;

/// Returns a batch entry of queries and keys `[batch][heads][seq][width]`.
pub fn entry_of<'a>(
    sizes: Sizes,
    entry: usize,
    [q, k]: [&'a [f64]; 2],
    scale: f64,
    causal: bool,
) -> ReferenceInputs<'a> {
    let of = |x: &'a [f64], [_, heads, seq, width]: [usize; 4]| {
        let numbers = heads * seq * width;
        &x[entry * numbers..][..numbers]
    };
    ReferenceInputs {
        q: of(q, sizes.q()),
        k: of(k, sizes.k()),
        heads: sizes.heads,
        kv_heads: sizes.kv_heads,
        seq_q: sizes.seq_q,
        seq_kv: sizes.seq_kv,
        head_dim: sizes.head_dim,
        scale,
        causal,
    }
}

pub struct Estimate {
    pub sizes: Sizes,
    pub scale: f64,
    pub causal: bool,
    pub q: Vec<f64>,
    pub k: Vec<f64>,
}

impl Estimate {
    /// Makes a causal call of one sequence from heads, KV heads, positions and width.
    pub fn of(
        [heads, kv_heads, seq, width]: [usize; 4],
        scale: f64,
        q: Vec<f64>,
        k: Vec<f64>,
    ) -> Self {
        Self {
            sizes: Sizes::new([1, heads, kv_heads], [seq; 2], [width; 2]),
            scale,
            causal: true,
            q,
            k,
        }
    }

    /// Draws multiples of 1/16, which all dtypes represent, so small that no head attends to a single key.
    pub fn drawn(sizes: Sizes, causal: bool, seed: u64) -> Self {
        let mut rng = seeded(seed);
        let mut sixteenths = |shape: [usize; 4]| -> Vec<f64> {
            let numbers = drawn(&mut rng, shape.iter().product(), -24i32..25);
            numbers.into_iter().map(|x| f64::from(x) / 16.0).collect()
        };
        Self {
            q: sixteenths(sizes.q()),
            k: sixteenths(sizes.k()),
            scale: 1.0 / (sizes.head_dim as f64).sqrt(),
            sizes,
            causal,
        }
    }

    pub fn entry(&self, entry: usize) -> ReferenceInputs<'_> {
        let rows = [&self.q[..], &self.k];
        entry_of(self.sizes, entry, rows, self.scale, self.causal)
    }

    /// Returns one head of a batch entry.
    pub fn head(&self, entry: usize, head: usize) -> ReferenceInputs<'_> {
        let whole = self.entry(entry);
        let of = |head: usize, seq: usize| {
            let numbers = seq * whole.head_dim;
            head * numbers..(head + 1) * numbers
        };
        let kv_head = head / (whole.heads / whole.kv_heads);
        ReferenceInputs {
            q: &whole.q[of(head, whole.seq_q)],
            k: &whole.k[of(kv_head, whole.seq_kv)],
            heads: 1,
            kv_heads: 1,
            ..whole
        }
    }

    pub fn inputs(&self, device: &Device, dtype: DType) -> EstimateInputs {
        let q = tensor(&self.q, self.sizes.q(), device, dtype);
        let k = tensor(&self.k, self.sizes.k(), device, dtype);
        let call = EstimateInputs::new(q, k).causal(self.causal);
        call.scale(self.scale)
    }
}
