//! Burn's attention on tensors of a CubeCL device, for code that runs beneath Burn's function.

use blocksparse::{BlockLayout, LayoutShape, Pattern};
use blocksparse_cubecl::AttentionPlan;
use burn::backend::get_or_init_device_settings;
use burn::backend::ops::BoolTensorOps;
use burn::tensor::ops::AttentionModuleOptions;

use crate::attention::backend;
use crate::attention::ops::BlockSparseOps;
use crate::base::cube::*;
use crate::base::prelude::*;
use crate::base::values::{
    AttentionInputs, DynamicBlocks, KernelPlan, LayoutTensors, ScoreTensors,
};
use crate::burn_attention::{BLOCK, masked_bias, pattern_layout, without_masked_rows};
use crate::options::AttentionOptions;

/// Arguments of Burn's `attention`.
pub struct CubeAttention {
    /// `[batch, heads, seq_q, head_dim]`
    pub query: CubeTensor,
    /// `[batch, heads, seq_kv, head_dim]`
    pub key: CubeTensor,
    /// `[batch, heads, seq_kv, value_dim]`
    pub value: CubeTensor,
    /// `[batch or 1, heads or 1, seq_q or 1, seq_kv or 1]`, true where masked out.
    pub mask: Option<CubeTensor>,
    /// `[batch or 1, heads or 1, seq_q or 1, seq_kv or 1]`, added to the scores.
    pub bias: Option<CubeTensor>,
    /// Scale, softcap and causality.
    pub options: AttentionModuleOptions,
}

impl CubeAttention {
    /// Returns batch, heads, `seq_q` and `seq_kv`, if the tensors fit each other.
    pub fn pairs(&self) -> Option<[usize; 4]> {
        let [q, k, v] = [&self.query, &self.key, &self.value].map(dims);
        let [batch, heads, seq_q, width] = q;
        let seq_kv = k[2];
        let pairs = [batch, heads, seq_q, seq_kv];
        let same_dtype = |of: &CubeTensor| of.dtype == self.query.dtype;
        let fits = [batch, heads, seq_kv, width] == k
            && [batch, heads, seq_kv] == v[..3]
            && same_dtype(&self.key)
            && same_dtype(&self.value)
            && self.bias.iter().all(same_dtype)
            && (self.bias.iter().chain(&self.mask)).all(|of| {
                dims(of)
                    .iter()
                    .zip(pairs)
                    .all(|(&n, all)| n == 1 || n == all)
            });
        (fits && batch * width * v[3] > 0).then_some(pairs)
    }

    /// Computes Burn's result, restricted to the pairs of `pattern` if there is one. Returns `None` if no kernel supports the call.
    ///
    /// The mask becomes a bias of its own size, so nothing is read back from the device.
    pub fn run(self, pattern: Option<Pattern>) -> Option<CubeTensor> {
        let [_, heads, seq_q, seq_kv] = self.pairs()?;
        if uses_reference() {
            return None;
        }
        let causal = self.options.is_causal;
        let pattern = match (pattern, causal) {
            (Some(pattern), true) => pattern.and_causal(),
            (Some(pattern), false) => pattern,
            (None, true) => Pattern::causal(),
            (None, false) => Pattern::dense(),
        };
        let layout =
            pattern_layout(pattern, LayoutShape::new(heads, [seq_q, seq_kv], BLOCK)).ok()?;
        let Self {
            query,
            key,
            value,
            bias,
            mask,
            ..
        } = self;
        let bias = masked_bias::<CubeBackend>(bias, mask, seq_kv, (&query.device, query.dtype));
        let mut options = AttentionOptions::default();
        options.scale = self.options.scale;
        options.softcap = self.options.softcap;
        options.validate(heads, query.dtype).ok()?;
        let layout = planned(layout, [&query, &key, &value], bias.is_some(), &options)?;
        let is_biased = bias.is_some();
        let inputs = AttentionInputs {
            q: query,
            k: key,
            v: value,
            scores: ScoreTensors {
                bias: bias.into(),
                relative_bias: OptFloat::None,
            },
        };
        let output = CubeBackend::block_sparse_attention(inputs, layout, options);
        Some(match is_biased {
            true => without_masked_rows::<CubeBackend>(output.out, output.lse),
            false => output.out,
        })
    }
}

fn dims(tensor: &CubeTensor) -> [usize; 4] {
    tensor.meta.shape().dims()
}

/// Returns the layout with the kernels' plan, if kernels support the call.
fn planned(
    layout: BlockLayout,
    [query, key, value]: [&CubeTensor; 3],
    is_biased: bool,
    options: &AttentionOptions,
) -> Option<LayoutTensors<CubeBackend>> {
    let ([batch, heads, _, width], [.., value_dim]) = (dims(key), dims(value));
    let sizes = [batch, heads, width, value_dim];
    let request = backend::request(sizes, query.dtype, options, [is_biased, false]).ok()?;
    let plan = AttentionPlan::new(&query.client, &layout, request).ok()?;
    let dtype = get_or_init_device_settings::<CubeBackend>(&query.device).bool_dtype;
    Some(LayoutTensors {
        // Kernels read no mask table.
        blocked: CubeBackend::bool_empty(Shape::new([1, 1]), &query.device, dtype),
        choice: DynamicBlocks::Host,
        host: layout,
        plan: KernelPlan { plan: Some(plan) },
    })
}
