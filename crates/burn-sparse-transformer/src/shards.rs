//! Sequences that several devices share: each device computes its positions in all layers, and receives the keys that they attend to.

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_blocksparse::{BlockLayout, Exchange, SequenceShard, ShardPlan};

use crate::block::Pass;
use crate::block_shard::ShardOfBlock;
use crate::error::{Result, ensure};
use crate::heads::Positions;
use crate::{SparseTransformer, SparseTransformerBlock};

/// One device's shard of sequences that several devices share, for all layers of a [`SparseTransformer`].
///
/// Each device has its own model, a [`fork`](burn::module::Module::fork) of the same one, and its own thread. All threads make the same calls in the same
/// order, forward and backward. The means of all devices' losses and gradients are those of the whole sequences.
#[derive(Debug)]
pub struct TransformerShard {
    /// One shard for each distinct layout.
    shards: Vec<Arc<SequenceShard>>,
    /// Index of each block's shard.
    of_blocks: Vec<usize>,
}

/// Leaves explicitly: graphs may still hold its shards.
impl Drop for TransformerShard {
    fn drop(&mut self) {
        self.shards.iter().for_each(|shard| shard.leave());
    }
}

/// Shard of a batch.
pub(crate) struct ShardRows<'a> {
    shard: &'a TransformerShard,
    pub(crate) positions: Positions,
    /// Weight of this device's mean loss in the mean over the devices, if the devices have different numbers of rows.
    share: Option<f64>,
}

impl ShardRows<'_> {
    pub(crate) fn of_block(&self, layer: usize) -> ShardOfBlock {
        ShardOfBlock {
            shard: self.shard.shards[self.shard.of_blocks[layer]].clone(),
            positions: self.positions.clone(),
        }
    }

    /// Weights a device's mean loss for the mean over the devices.
    pub(crate) fn share_of(&self, loss: Tensor<1>) -> Tensor<1> {
        match self.share {
            Some(share) => loss * share,
            None => loss,
        }
    }
}

impl TransformerShard {
    /// Returns the shards of `devices` devices that share sequences of `seq` positions, in order. Each device has the same positions in every layer: those
    /// that the plan of the layer with the most pairs assigns.
    ///
    /// # Errors
    /// [`TransformerError`](crate::TransformerError) if `seq` exceeds the context; if a layer chooses keys by content, has dropout, or has position biases;
    /// if a layer's layout cannot be shared ([`ShardPlan::new`]).
    pub fn group(model: &SparseTransformer, seq: usize, devices: usize) -> Result<Vec<Self>> {
        Self::group_by(model, seq, devices, &Exchange::default())
    }

    /// [`Self::group`] with another exchange of keys. Between processes it returns this process's shard only, like [`SequenceShard::group_by`].
    ///
    /// # Errors
    /// Those of [`Self::group`]; also if the exchange has another number of devices.
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

    /// Returns the shard of the first layer, whose positions are those of all layers.
    pub fn first(&self) -> &SequenceShard {
        &self.shards[0]
    }

    /// Selects this device's columns of `[batch, seq]` tokens.
    ///
    /// # Panics
    /// If the number of columns is not the sequence's length.
    pub fn tokens(&self, whole: Tensor<2, Int>) -> Tensor<2, Int> {
        self.first().rows(whole, 1)
    }

    /// Returns the positions of this device's rows, `[batch · seq]`.
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
    /// Returns this device's part of [`Self::try_loss`] for sequences that several devices share: the mean of all parts is that loss, and gradients likewise.
    /// All devices must call it, each with its own model. `losses_and_gradients_of_shard` also recomputes blocks.
    ///
    /// # Shapes
    /// - `tokens`, `targets`: `[batch, seq]`, this device's columns: [`TransformerShard::tokens`]
    /// - output: `[1]`
    ///
    /// # Errors
    /// Those of [`Self::try_loss`]; also if the number of tokens is not the shard's number of positions, or another device has left
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

    /// Returns the rows of a device's tokens, which must match the shard.
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
    /// Checks that a row's result depends on its position and its keys only.
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
