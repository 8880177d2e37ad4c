//! Operation counts of attention layers.

use crate::SparseMultiHeadAttention;
use crate::error::Result;
use crate::linear::linear_flops;

impl SparseMultiHeadAttention {
    /// Returns the operations of the four projections for one position, forward: two per weight.
    pub fn matmul_flops_per_token(&self) -> u64 {
        let layers = [&self.query, &self.key, &self.value, &self.output];
        let layers: u64 = layers.map(linear_flops).iter().sum();
        layers + self.kind().matmul_flops_per_token()
    }

    /// Returns the operations of the attention itself for one sequence, forward: four per allowed pair and channel when keys and values are equally wide (q·k
    /// and p·v). With a selection, all pairs that it chooses from are counted. With `dsa` and `msa`, the scores of the indexer are included.
    ///
    /// # Errors
    /// If there is no layout for this length.
    pub fn attention_flops(&self, seq: usize) -> Result<u64> {
        let pairs = self.kind().pairs(self, seq)?;
        Ok(2 * pairs * (self.d_k() + self.d_v) as u64 + self.kind().score_flops(seq))
    }
}
