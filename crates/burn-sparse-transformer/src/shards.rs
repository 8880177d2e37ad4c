//! Sequences that several devices share: each has its positions of all layers, and of attention the keys that those need.

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_blocksparse::{BlockLayout, Exchange, SequenceShard, ShardPlan};

use crate::block::Pass;
use crate::block_shard::ShardOfBlock;
use crate::error::{Result, ensure};
use crate::heads::Positions;
use crate::{SparseTransformer, SparseTransformerBlock};

/// One device's part of sequences that several devices share, for all layers of a [`SparseTransformer`].
///
/// Each device has a model of its own, a [`fork`](burn::module::Module::fork) of the same one, and a thread of its own, in which all make the same calls in the
/// same order, forward and backward. The means of all devices' losses and gradients are those of the whole sequences.
#[derive(Debug)]
pub struct TransformerShard {
    /// One for each different layout.
    shards: Vec<Arc<SequenceShard>>,
    /// Which of them each block has.
    of_blocks: Vec<usize>,
}

/// Graphs may still hold its shards.
impl Drop for TransformerShard {
    fn drop(&mut self) {
        self.shards.iter().for_each(|shard| shard.leave());
    }
}

/// A shard of a batch.
pub(crate) struct ShardRows<'a> {
    shard: &'a TransformerShard,
    pub(crate) positions: Positions,
    /// Of the loss over this device's rows in the mean over the devices, if rows are not as many on all of them.
    share: Option<f64>,
}

impl ShardRows<'_> {
    pub(crate) fn of_block(&self, layer: usize) -> ShardOfBlock {
        ShardOfBlock {
            shard: self.shard.shards[self.shard.of_blocks[layer]].clone(),
            positions: self.positions.clone(),
        }
    }

    /// What a device's mean loss is in the mean over the devices.
    pub(crate) fn share_of(&self, loss: Tensor<1>) -> Tensor<1> {
        match self.share {
            Some(share) => loss * share,
            None => loss,
        }
    }
}

impl TransformerShard {
    /// The shards of `devices` devices that share sequences of `seq` positions, in order. Each device has the same positions in every layer: the
    /// pieces of the plan of the layer with the most pairs.
    ///
    /// # Errors
    /// [`TransformerError`](crate::TransformerError) if `seq` exceeds the context; if a layer chooses keys by content, drops anything, or has biases of positions; if a layer's layout cannot
    /// be shared ([`ShardPlan::new`]).
    pub fn group(model: &SparseTransformer, seq: usize, devices: usize) -> Result<Vec<Self>> {
        Self::group_by(model, seq, devices, &Exchange::default())
    }

    /// As [`Self::group`], with another way for keys to cross. Between processes it is this one's part alone, as of [`SequenceShard::group_by`].
    ///
    /// # Errors
    /// As [`Self::group`], and if the exchange is of another number of devices.
    pub fn group_by(
        model: &SparseTransformer,
        seq: usize,
        devices: usize,
        exchange: &Exchange,
    ) -> Result<Vec<Self>> {
        let context = model.context();
        ensure! { seq <= context => "seq", format!("at most {context}, the context"), seq; }
        let mut layouts: Vec<BlockLayout> = Vec::new();
        let mut of_blocks = Vec::new();
        for block in &model.blocks {
            block.check_shareable()?;
            let layout = block.mha.layout(seq, seq)?;
            let known = layouts.iter().position(|known| *known == layout);
            of_blocks.push(known.unwrap_or(layouts.len()));
            if known.is_none() {
                layouts.push(layout);
            }
        }
        let kv_heads = model.blocks[0].mha.n_kv_heads();
        let largest = layouts.iter().max_by_key(|layout| layout.allowed_pairs());
        let largest = largest.expect("a model has blocks");
        let pieces = ShardPlan::new(largest, kv_heads, devices)?.pieces();
        let mut group = Vec::new();
        for layout in &layouts {
            let plan = ShardPlan::with_pieces(layout, kv_heads, devices, pieces)?;
            let shards = SequenceShard::group_by(&plan, exchange)?;
            group.resize_with(shards.len(), || Self {
                shards: Vec::new(),
                of_blocks: of_blocks.clone(),
            });
            for (device, shard) in group.iter_mut().zip(shards) {
                device.shards.push(Arc::new(shard));
            }
        }
        Ok(group)
    }

    /// The shard of the first layer, whose positions are those of all.
    pub fn first(&self) -> &SequenceShard {
        &self.shards[0]
    }

    /// This device's columns of `[batch, seq]` tokens.
    ///
    /// # Panics
    /// If there are not as many as the sequence has positions.
    pub fn tokens(&self, whole: Tensor<2, Int>) -> Tensor<2, Int> {
        self.first().rows(whole, 1)
    }

    /// The positions of this device's rows, `[batch · seq]`.
    fn positions(&self, batch: usize, device: &Device) -> Positions {
        let shard = self.first();
        let own = shard.plan().positions(shard.rank()).into_iter();
        let own: Vec<i32> = own.flatten().map(|position| position as i32).collect();
        let all = own.repeat(batch);
        let data = TensorData::new(all, [batch * own.len()]);
        let device = device.clone().without_autodiff();
        Positions::Listed(Box::new(Tensor::from_data(data, (&device, DType::I32))))
    }
}

impl SparseTransformer {
    /// This device's part of [`Self::try_loss`] of sequences that several devices share: the mean of all parts is that loss, and gradients likewise. All
    /// devices must call it, each with a model of its own. `losses_and_gradients_of_shard` also recomputes blocks.
    ///
    /// # Shapes
    /// - `tokens`, `targets`: `[batch, seq]`, this device's columns: [`TransformerShard::tokens`]
    /// - output: `[1]`
    ///
    /// # Errors
    /// As [`Self::try_loss`]; also if the tokens are not as many as the shard's positions, or another device has ended
    /// ([`OpError::Left`](burn_blocksparse::OpError::Left)).
    pub fn try_loss_of_shard(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        shard: &TransformerShard,
    ) -> Result<Tensor<1>> {
        self.check_targets(&tokens, &targets)?;
        let rows = self.rows_of_shard(&tokens, shard)?;
        let x = self.embed_at(tokens, &rows.positions)?;
        let stream = self.through_blocks(x, |layer, _| Pass {
            shard: Some(rows.of_block(layer)),
            ..Pass::default()
        })?;
        Ok(rows.share_of(self.head_loss(stream, targets)?))
    }

    /// The rows of a device's tokens, which must be the shard's.
    pub(crate) fn rows_of_shard<'a>(
        &self,
        tokens: &Tensor<2, Int>,
        shard: &'a TransformerShard,
    ) -> Result<ShardRows<'a>> {
        let [batch, seq] = tokens.dims();
        let (first, blocks) = (shard.first(), self.blocks.len());
        let own = first.layout().seq_q();
        ensure! { seq == own => "tokens", format!("{own} positions, the shard's"), seq; }
        let known = shard.of_blocks.len();
        ensure! { blocks == known => "shard", format!("of {blocks} blocks, the model's"), known; }
        let plan = first.plan();
        let (of_all, whole) = (own * plan.devices(), plan.layout().seq_q());
        Ok(ShardRows {
            positions: shard.positions(batch, &tokens.device()),
            share: (of_all != whole).then(|| of_all as f64 / whole as f64),
            shard,
        })
    }
}

impl SparseTransformerBlock {
    /// That a row's result follows from its position, its keys and nothing else.
    fn check_shareable(&self) -> Result<()> {
        let mha = &self.mha;
        mha.kind().ensure_pattern()?;
        for (argument, is_there) in [
            ("dropout", self.dropout.prob > 0.0 || mha.dropout.prob > 0.0),
            ("alibi", mha.options.alibi.is_some()),
            ("relative_reach", mha.relative_bias.is_some()),
        ] {
            ensure! { !is_there => argument, "none, where devices share a sequence", "some"; }
        }
        Ok(())
    }
}
