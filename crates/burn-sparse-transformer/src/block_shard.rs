//! Attention of one block when devices share a sequence.

use std::sync::Arc;

use burn_blocksparse::SequenceShard;

use crate::call::Call;
use crate::error::Result;
use crate::heads::Positions;
use crate::stream::Projected;
use crate::{SparseMhaInput, SparseMultiHeadAttention};

/// Shard and positions of one block.
#[derive(Clone, Debug)]
pub(crate) struct ShardOfBlock {
    pub(crate) shard: Arc<SequenceShard>,
    pub(crate) positions: Positions,
}

impl SparseMultiHeadAttention {
    /// Computes attention of the rows of a shard to the whole sequence, without the output's bias.
    pub(crate) fn forward_shard(
        &self,
        input: SparseMhaInput,
        ShardOfBlock { shard, positions }: &ShardOfBlock,
    ) -> Result<Projected> {
        let call = Call::at(&input, positions.clone())?;
        let [query, key, value] = self.project(input, &call)?;
        let [key, value] = shard.gather(key, value)?;
        self.output_product(self.attend([query, key, value], shard.layout(), &call)?)
    }
}
