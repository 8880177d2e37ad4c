use std::sync::{Arc, OnceLock};

use burn::module::{
    Content, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param,
    ParamId,
};
use burn::tensor::{Bool, Device, Tensor, TensorData};
use burn_blocksparse::OpError;
use burn_fused_ops::sparse_linear::WeightLayout;

use crate::error::Result;

/// Layout of a weight, which records store as a mask of blocks.
///
/// The mask's id is a hash of the layout. A loaded record brings its own id, so a changed layout is detected and read from the device once, at its next use.
/// Optimizer steps, which also map all parameters, trigger no read.
#[derive(Clone, Debug)]
pub(crate) struct KeptBlocks {
    block: usize,
    /// Mask, `[in_blocks, out_blocks]`.
    mask: Param<Tensor<2, Bool>>,
    layout: Arc<OnceLock<WeightLayout>>,
}

impl KeptBlocks {
    pub(crate) fn new(layout: WeightLayout, device: &Device) -> Self {
        let (ins, outs) = (layout.in_blocks(), layout.out_blocks());
        let mut mask = vec![false; ins * outs];
        for (input, output) in layout.kept_blocks() {
            mask[input as usize * outs + output as usize] = true;
        }
        let mask = Tensor::from_data(TensorData::new(mask, [ins, outs]), device);
        Self {
            block: layout.block(),
            mask: Param::initialized(id_of(&layout), mask),
            layout: Arc::new(OnceLock::from(layout)),
        }
    }

    /// Returns the layout; reads it from the device if a record was loaded.
    pub(crate) fn layout(&self) -> Result<WeightLayout> {
        if let Some(layout) = self.layout.get() {
            return Ok(layout.clone());
        }
        let mask = self.mask.val();
        let shape = mask.dims().map(|blocks| blocks * self.block);
        let data = mask.try_into_data();
        let data = data.map_err(|error| OpError::Read(format!("{error:?}")))?;
        let mask: Vec<bool> = data.iter::<bool>().collect();
        let layout = WeightLayout::from_mask(shape, self.block, &mask)?;
        Ok(self.layout.get_or_init(|| layout).clone())
    }

    fn with_mask(self, mask: Param<Tensor<2, Bool>>) -> Self {
        Self { mask, ..self }
    }
}

/// Returns a hash that is equal for equal layouts, on every machine.
fn id_of(layout: &WeightLayout) -> ParamId {
    let sizes = [layout.block(), layout.in_blocks(), layout.out_blocks()].map(|size| size as u64);
    let blocks = layout.kept_blocks();
    let blocks = blocks.map(|(input, output)| u64::from(input) << 32 | u64::from(output));
    let numbers = sizes.into_iter().chain(blocks);
    ParamId::from(fnv(numbers.flat_map(u64::to_le_bytes)))
}

/// FNV-1a.
pub(crate) fn fnv(bytes: impl IntoIterator<Item = u8>) -> u64 {
    (bytes.into_iter()).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl Module for KeptBlocks {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.mask.visit(visitor);
    }

    fn map<M: ModuleMapper>(mut self, mapper: &mut M) -> Self {
        let id = self.mask.id;
        let mask = mapper.map_bool(self.mask.clone());
        if mask.id != id {
            self.layout = Arc::default();
        }
        self.with_mask(mask)
    }

    fn to_device(self, device: &Device) -> Self {
        let mask = self.mask.clone().to_device(device);
        self.with_mask(mask)
    }

    fn fork(self, device: &Device) -> Self {
        let mask = self.mask.clone().fork(device);
        self.with_mask(mask)
    }

    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        self.mask.collect_devices(devices)
    }

    fn valid(&self) -> Self {
        self.clone().with_mask(self.mask.valid())
    }

    fn train(self) -> Self {
        let mask = self.mask.clone().train();
        self.with_mask(mask)
    }

    fn materialize(self) -> Self {
        self
    }
}

impl ModuleDisplayDefault for KeptBlocks {
    fn content(&self, content: Content) -> Option<Content> {
        let text = match self.layout.get() {
            Some(layout) => layout.to_string(),
            None => "read at its next use".to_owned(),
        };
        content.add_formatted(&text).optional()
    }
}

impl ModuleDisplay for KeptBlocks {}
