//! The serialized form of a weight layout. Input is not trusted: every index is checked.

use serde::{Deserialize, Serialize};

use super::WeightLayout;
use super::build::Grid;
use crate::LayoutError;
use crate::error::ensure_sound;

const VERSION: u32 = 1;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WeightLayoutData {
    version: u32,
    name: String,
    seed: Option<u64>,
    inputs: usize,
    outputs: usize,
    block: usize,
    /// Number of kept blocks before each output block.
    output_offsets: Vec<u32>,
    /// Input block of each kept block.
    input_blocks: Vec<u32>,
}

impl From<WeightLayout> for WeightLayoutData {
    fn from(layout: WeightLayout) -> Self {
        Self {
            version: VERSION,
            name: layout.name().to_owned(),
            seed: layout.seed(),
            inputs: layout.inputs(),
            outputs: layout.outputs(),
            block: layout.block(),
            output_offsets: layout.output_offsets().to_vec(),
            input_blocks: layout.input_blocks().to_vec(),
        }
    }
}

impl TryFrom<WeightLayoutData> for WeightLayout {
    type Error = LayoutError;

    fn try_from(data: WeightLayoutData) -> Result<Self, LayoutError> {
        let version = data.version;
        ensure_sound!(
            version == VERSION,
            "version must be {VERSION}, got {version}"
        );
        let grid = Grid::new([data.inputs, data.outputs], data.block)?;
        let (offsets, inputs) = (&data.output_offsets, &data.input_blocks);
        let rises = offsets.windows(2).all(|pair| pair[0] <= pair[1]);
        let ends = offsets.first() == Some(&0)
            && offsets.last().map(|&last| last as usize) == Some(inputs.len());
        ensure_sound!(
            offsets.len() == grid.outs + 1 && ends && rises,
            "output_offsets must rise from 0 to {} in {} entries",
            inputs.len(),
            grid.outs + 1
        );
        let by_output: Vec<Vec<u32>> = (offsets.windows(2))
            .map(|pair| inputs[pair[0] as usize..pair[1] as usize].to_vec())
            .collect();
        for (output, inputs) in by_output.iter().enumerate() {
            let rises = inputs.windows(2).all(|pair| pair[0] < pair[1]);
            let is_inside = inputs.last().is_none_or(|&last| (last as usize) < grid.ins);
            ensure_sound!(
                rises && is_inside,
                "the input blocks of output block {output} must rise and be below {}",
                grid.ins
            );
        }
        Ok(grid.layout(&data.name, data.seed, by_output))
    }
}
