//! What a tensor on a device chose, read by the host.

use blocksparse::{BlockLayout, LayoutError};
use burn::tensor::{DType, Int, Tensor};

use super::{Chooser, DeviceLayout};
use crate::choice::{choose_rows, mask};
use crate::error::OpError;

impl DeviceLayout {
    pub(super) fn read(&self) -> Result<BlockLayout, OpError> {
        let shape = *self.shape();
        let causal = self.is_causal();
        let [batch, heads] = self.choice().patterns;
        let q_blocks = self.frame.q_blocks();
        if let (Chooser::Positions(positions, rule), Some(places)) =
            (&self.chooser, self.frame.within())
        {
            let numbers = integers(positions)?;
            let own = self.choice().positions(&shape);
            let [of, keys] = own.expect("a choice by positions");
            let seen = |entry: usize, head: usize, query: usize, key: usize| {
                let own = &numbers[(entry.min(batch - 1) * heads + head) * of..][..of];
                rule.sees(own[query], own[keys + key])
            };
            return Ok(places.keep_pairs(self.frame.name(), self.batch(), seen)?);
        }
        if let (Chooser::Keys(keys), Some(places)) = (&self.chooser, self.frame.within()) {
            let [_, _, queries, most] = keys.dims();
            let numbers = integers(keys)?;
            let seen = |entry: usize, head: usize, query: usize, key: usize| {
                let pattern = entry.min(batch - 1) * heads + head / (shape.heads / heads);
                let own = &numbers[(pattern * queries + query) * most..][..most];
                own.contains(&(key as i32))
            };
            return Ok(places.keep_pairs(self.frame.name(), self.batch(), seen)?);
        }
        let rows = self.read_rows()?;
        if let Some(within) = self.frame.within() {
            let kept = |entry: usize, head: usize, q_block: usize, kv_block: usize| {
                let pattern = entry.min(batch - 1) * heads + head / (shape.heads / heads);
                rows[pattern * q_blocks + q_block][kv_block]
            };
            return Ok(within.keep_blocks(self.frame.name(), self.batch(), kept)?);
        }
        let layouts = (0..batch).map(|entry| {
            BlockLayout::from_block_fn(self.frame.name(), shape, |head, q_block, kv_block| {
                let pattern = entry * heads + head / (shape.heads / heads);
                let kept = rows[pattern * q_blocks + q_block][kv_block];
                kept.then(|| mask(q_block, kv_block, shape, causal))
            })
        });
        let layouts = layouts.collect::<Result<Vec<_>, LayoutError>>()?;
        Ok(match &layouts[..] {
            [one] => one.clone(),
            several => BlockLayout::stack_batch(several)?,
        })
    }

    /// `[patterns · q_blocks][kv_blocks]`: whether a block is chosen.
    fn read_rows(&self) -> Result<Vec<Vec<bool>>, OpError> {
        let kv_blocks = self.frame.kv_blocks();
        match &self.chooser {
            Chooser::Mask(mask) => {
                let rows = integers(&mask.clone().int())?;
                let kept = |row: &[i32]| row.iter().map(|&kept| kept != 0).collect();
                Ok(rows.chunks(kv_blocks).map(kept).collect())
            }
            Chooser::Indices(indices) => {
                let most = indices.dims()[3];
                let kept = |row: &[i32]| {
                    let mut kept = vec![false; kv_blocks];
                    let indices = row.iter().filter_map(|&index| usize::try_from(index).ok());
                    indices.for_each(|index| kept[index] = true);
                    kept
                };
                Ok(integers(indices)?.chunks(most).map(kept).collect())
            }
            Chooser::Scores(scores, rule) => {
                let causal = self.choice().causal;
                let within = self.frame.within();
                choose_rows(scores.clone(), *self.shape(), rule, causal, within)
            }
            Chooser::Positions(..) | Chooser::Keys(..) => {
                unreachable!("positions and lists of keys choose pairs, not rows of blocks")
            }
        }
    }
}

fn integers<const D: usize>(tensor: &Tensor<D, Int>) -> Result<Vec<i32>, OpError> {
    let data = tensor.clone().cast(DType::I32).try_into_data();
    let data = data.map_err(OpError::read)?;
    data.to_vec().map_err(OpError::read)
}
