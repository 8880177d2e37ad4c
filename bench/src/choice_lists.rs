//! Lists of queries and of keys: `bench-choice`.

use blocksparse_bench::device::upload;
use blocksparse_bench::numbers::{BF16, sixteenths};
use cubecl::client::Client;
use cubecl::server::Handle;
use rand_chacha::ChaCha8Rng;

/// Queries and keys, here and on the device.
pub struct Lists {
    numbers: [Vec<f32>; 2],
    handles: [Handle; 2],
    counts: [usize; 2],
}

impl Lists {
    pub fn new(
        client: &Client,
        counts: [usize; 2],
        seq: [usize; 2],
        width: usize,
        rng: &mut ChaCha8Rng,
    ) -> Self {
        let numbers = [0, 1].map(|which| sixteenths(counts[which] * seq[which] * width, rng));
        let handles = numbers.each_ref();
        Self {
            handles: handles.map(|numbers| upload(client, numbers, BF16)),
            numbers,
            counts,
        }
    }

    pub fn handles(&self) -> [&Handle; 2] {
        self.handles.each_ref()
    }

    /// A list's queries, and the keys that it goes with.
    pub fn list(&self, list: usize) -> [&[f32]; 2] {
        let [lists, kv_lists] = self.counts;
        let [q, k] = &self.numbers;
        let [q_len, k_len] = [q.len() / lists, k.len() / kv_lists];
        let kv_list = list / (lists / kv_lists);
        [&q[list * q_len..][..q_len], &k[kv_list * k_len..][..k_len]]
    }
}
