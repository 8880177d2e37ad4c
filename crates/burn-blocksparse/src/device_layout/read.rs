//! Reads the choice of a device layout on the host.

use blocksparse::{BlockLayout, BlockSource, LayoutError};
use burn::tensor::{Bool, DType, Int, Tensor};

use super::DeviceLayout;
use crate::base::values::DynamicBlocks;
use crate::choice::{choose_rows, mask};
use crate::error::OpError;

impl DeviceLayout {
    pub(super) fn read(&self) -> Result<BlockLayout, OpError> {
        let (shape, name, choice) = (*self.shape(), self.frame.name(), self.choice());
        let [batch, heads] = choice.patterns;
        let pattern =
            |entry: usize, head: usize| entry.min(batch - 1) * heads + head / (shape.heads / heads);
        let within = self.frame.within();
        if let (Some([of, keys]), Some(places)) = (choice.positions(&shape), within)
            && let BlockSource::Positions(rule) | BlockSource::OwnPositions(rule) = choice.by
        {
            let numbers = self.integers()?;
            let seen = |entry: usize, head: usize, query: usize, key: usize| {
                let own = &numbers[pattern(entry, head) * of..][..of];
                rule.sees(own[query], own[keys + key])
            };
            return Ok(places.keep_pairs(name, self.batch(), seen)?);
        }
        if let (BlockSource::Keys { most }, Some(places)) = (choice.by, within) {
            let numbers = self.integers()?;
            let seen = |entry: usize, head: usize, query: usize, key: usize| {
                let first = (pattern(entry, head) * shape.seq_q + query) * most;
                numbers[first..][..most].contains(&(key as i32))
            };
            return Ok(places.keep_pairs(name, self.batch(), seen)?);
        }
        let (rows, q_blocks) = (self.read_rows()?, self.frame.q_blocks());
        let kept = |entry: usize, head: usize, q_block: usize, kv_block: usize| {
            rows[pattern(entry, head) * q_blocks + q_block][kv_block]
        };
        if let Some(within) = within {
            return Ok(within.keep_blocks(name, self.batch(), kept)?);
        }
        let layouts = (0..batch).map(|entry| {
            BlockLayout::from_block_fn(name, shape, |head, q_block, kv_block| {
                let kept = kept(entry, head, q_block, kv_block);
                kept.then(|| mask(q_block, kv_block, shape, self.causal))
            })
        });
        let layouts = layouts.collect::<Result<Vec<_>, LayoutError>>()?;
        Ok(match &layouts[..] {
            [one] => one.clone(),
            several => BlockLayout::stack_batch(several)?,
        })
    }

    /// Reads whether each block is chosen: `[patterns · q_blocks][kv_blocks]`.
    fn read_rows(&self) -> Result<Vec<Vec<bool>>, OpError> {
        let kv_blocks = self.frame.kv_blocks();
        if let (BlockSource::Scores(rule), DynamicBlocks::Floats(scores)) =
            (&self.choice().by, &self.chooser)
        {
            let scores = Tensor::from_dispatch(scores.clone());
            let (causal, within) = (self.choice().causal, self.frame.within());
            return choose_rows(scores, *self.shape(), rule, causal, within);
        }
        let numbers = self.integers()?;
        Ok(match self.choice().by {
            BlockSource::Indices { most } => {
                let kept = |row: &[i32]| {
                    let mut kept = vec![false; kv_blocks];
                    let indices = row.iter().filter_map(|&index| usize::try_from(index).ok());
                    indices.for_each(|index| kept[index] = true);
                    kept
                };
                numbers.chunks(most).map(kept).collect()
            }
            _ => {
                let kept = |row: &[i32]| row.iter().map(|&kept| kept != 0).collect();
                numbers.chunks(kv_blocks).map(kept).collect()
            }
        })
    }

    /// Reads the elements of a tensor of integers or bools, whatever its rank.
    fn integers(&self) -> Result<Vec<i32>, OpError> {
        let numbers = match self.chooser() {
            DynamicBlocks::Bools(mask) => Tensor::<4, Bool>::from_dispatch(mask).int(),
            DynamicBlocks::Ints(numbers) => Tensor::<4, Int>::from_dispatch(numbers),
            DynamicBlocks::Host | DynamicBlocks::Floats(_) => {
                unreachable!("scores choose by a rule")
            }
        };
        let data = numbers.cast(DType::I32).try_into_data();
        data.map_err(OpError::read)?.to_vec().map_err(OpError::read)
    }
}
