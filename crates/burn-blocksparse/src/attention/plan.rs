//! The plan of a call, computed and checked before anything is launched.

use std::fmt;
#[cfg(feature = "cube")]
use std::sync::Arc;

use blocksparse::BlockLayout;

#[cfg(feature = "cube")]
use crate::attention::backend;
#[cfg(feature = "cube")]
use crate::base::device;
use crate::base::prelude::*;
use crate::base::values::{KernelPlan, ScoreTensors};
use crate::call_layout::Layout;
use crate::options::AttentionOptions;
#[cfg(feature = "cube")]
use crate::options::WeightsMode;

/// Plan of a [`sparse_attention`](crate::sparse_attention) call on its device, from [`SparseAttentionCall::explain`](crate::SparseAttentionCall::explain).
/// Its display text:
///
/// ```text
/// fixed(128, 32), bf16 with sums in f32
///   forward  hopper  128 × 128 tiles gathered from 32-wide blocks, 256 units, 3 stages in 113 KiB shared
///   backward hopper  128 × 128 tiles gathered from 32-wide blocks, like rows together, 256 units, 2 stages in 195 KiB shared
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum AttentionPlan {
    /// The reference implementation in Burn primitives, on CPU backends.
    Reference {
        /// The device.
        device: String,
    },
    /// Fused kernels, on CubeCL devices.
    #[cfg(feature = "cube")]
    Kernels(Arc<blocksparse_cubecl::AttentionPlan>),
}

impl AttentionPlan {
    /// Returns whether fused kernels run rather than the reference.
    pub fn is_kernels(&self) -> bool {
        !matches!(self, Self::Reference { .. })
    }

    /// Returns the kernels' plan, empty if the reference runs.
    #[doc(hidden)]
    pub fn kernels(self) -> KernelPlan {
        match self {
            Self::Reference { .. } => KernelPlan::default(),
            #[cfg(feature = "cube")]
            Self::Kernels(plan) => KernelPlan { plan: Some(plan) },
        }
    }

    /// Chooses the plan of a call whose arguments are already checked.
    #[cfg_attr(not(feature = "cube"), allow(unused_variables))]
    #[doc(hidden)]
    pub fn choose(
        q: &Tensor<4>,
        k: &Tensor<4>,
        v: &Tensor<4>,
        biases: &ScoreTensors<Dispatch>,
        layout: Layout,
        options: &AttentionOptions,
    ) -> Result<Chosen, OpError> {
        let device = q.device();
        #[cfg(feature = "cube")]
        if let Some(inner) = &device::cube::of(&device) {
            device::cube::toolkit(inner)?;
            let [batch, kv_heads, _, head_dim] = k.dims();
            let dims = [batch, kv_heads, head_dim, v.dims()[3]];
            let request = backend::request(dims, q.dtype(), options, biases.kinds())?;
            let own = layout.sizes();
            let packed = packed(own, kv_heads, biases, options);
            let host = packed.as_ref().unwrap_or(own);
            let plan = blocksparse_cubecl::AttentionPlan::new(&inner.client(), host, request)?;
            if crate::base::cube::uses_reference() {
                return Ok(Chosen::reference(&device, layout, options));
            }
            let autodiff = [q, k, v].into_iter().any(|x| x.device().is_autodiff());
            if autodiff || is_autodiff(biases) {
                plan.check_backward()?;
            }
            return Ok(Chosen {
                plan: Self::Kernels(plan),
                packed,
            });
        }
        Ok(Chosen::reference(&device, layout, options))
    }
}

/// Number of queries that fill the smallest tile of the tensor-core tiers.
#[cfg(feature = "cube")]
const TILE: usize = 64;

/// Packs the query heads of each key head into one sequence ([`BlockLayout::pack_heads`]) if there are too few queries to fill a tile. Returns `None` if
/// something depends on a query's own head or position, or is returned by block.
#[cfg(feature = "cube")]
fn packed(
    layout: &BlockLayout,
    kv_heads: usize,
    biases: &ScoreTensors<Dispatch>,
    options: &AttentionOptions,
) -> Option<BlockLayout> {
    let is_biased = biases.kinds().contains(&true) || options.alibi.is_some();
    let by_query = is_biased || options.active_dropout().is_some();
    let by_block = options.weights == WeightsMode::Store;
    if by_query || by_block || layout.heads() == kv_heads || layout.seq_q() >= TILE {
        return None;
    }
    layout.pack_heads(kv_heads)
}

/// Plan of a call with its layout.
#[doc(hidden)]
pub struct Chosen {
    pub plan: AttentionPlan,
    /// The packed layout, if the call runs over it: the query heads of each key head in one sequence.
    pub packed: Option<BlockLayout>,
}

impl Chosen {
    fn reference(device: &Device, layout: Layout, options: &AttentionOptions) -> Self {
        let skips = match options.softmax_threshold {
            Some(_) => ", no tile skipped",
            None => "",
        };
        let device = place(device, layout) + skips;
        Self {
            plan: AttentionPlan::Reference { device },
            packed: None,
        }
    }
}

/// Returns whether autodiff tracks a tensor that is added to the scores.
#[cfg(feature = "cube")]
fn is_autodiff(scores: &ScoreTensors<Dispatch>) -> bool {
    let mut tensors = scores.list().into_iter().flatten();
    tensors.any(|tensor| Device::new(tensor.device()).is_autodiff())
}

/// Returns whether kernels, rather than the reference, sum the weights of a call.
#[cfg_attr(not(feature = "cube"), allow(unused_variables))]
pub fn sums_in_kernels(
    q: &Tensor<4>,
    k: &Tensor<4>,
    biases: &ScoreTensors<Dispatch>,
    layout: &BlockLayout,
    options: &AttentionOptions,
) -> Result<bool, OpError> {
    #[cfg(feature = "cube")]
    if let Some(inner) = &device::cube::of(&q.device()) {
        device::cube::toolkit(inner)?;
        let [batch, kv_heads, _, head_dim] = k.dims();
        let dims = [batch, kv_heads, head_dim, head_dim];
        let request = backend::request(dims, q.dtype(), options, biases.kinds())?;
        blocksparse_cubecl::check_attention_sums(&inner.client(), layout, &request)?;
        return Ok(!crate::base::cube::uses_reference());
    }
    Ok(false)
}

/// Describes the device of the reference and, for a device layout, that it is read back.
fn place(device: &Device, layout: Layout) -> String {
    let device = format!("{:?}", device.clone().without_autodiff().as_dispatch());
    match layout {
        Layout::Host(_) => device,
        Layout::Device(layout) => {
            let name = layout.frame().name();
            format!("{device}, which reads the layout back: {name}")
        }
    }
}

impl fmt::Display for AttentionPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reference { device } => write!(f, "reference implementation on {device}"),
            #[cfg(feature = "cube")]
            Self::Kernels(plan) => plan.fmt(f),
        }
    }
}
