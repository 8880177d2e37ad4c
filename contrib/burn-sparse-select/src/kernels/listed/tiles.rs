//! Attention over lists of single keys in masked tiles: adjacent queries attend to all keys that one of them sees, and a bit per pair says whether it is
//! listed.
//!
//! If a list has a good part of the keys, a tile of 128 queries needs nearly all of them anyway. Keys are then read once for all of its queries, by the kernels
//! of a layout on the host, whose masks are built from the lists.

use std::sync::Arc;

use crate::kernels::listed::request::ListedRequest;
use blocksparse::internal::Recent;
use blocksparse::{BlockLayout, BlockSource, DeviceChoice, LayoutShape, Pattern};
use blocksparse_cubecl::call::Request;
use blocksparse_cubecl::choice::AttentionPlan;
use blocksparse_cubecl::on_device::{ChoiceTensor, choose_blocks};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::tensor::TOO_LARGE;

/// Block size of the layout of visible pairs: that of the widest tile.
const BLOCK: usize = 128;

/// Plan of a call in tiles.
#[derive(Clone, Debug)]
pub struct ListedTiles {
    request: ListedRequest,
    /// Layout of visible pairs, listed or not.
    seen: BlockLayout,
    plan: Arc<AttentionPlan>,
}

impl ListedTiles {
    /// Plans a call whose logits are scaled by `scale`.
    ///
    /// # Errors
    /// The reason why the device's kernels do not serve it.
    pub fn new(client: &Client, request: &ListedRequest, scale: f64) -> Result<Self, String> {
        if !request.is_of_keys() {
            return Err("lists are of blocks".to_string());
        }
        if i32::try_from(request.list_sizes().largest()).is_err() {
            return Err(TOO_LARGE.to_string());
        }
        let shape = LayoutShape::new(request.heads, [request.seq_q, request.seq_kv], BLOCK);
        let seen = seen(shape, request.causal)?;
        let layout = layout(request, &seen)?;
        let call = Request::new(
            [request.batch, request.kv_heads],
            [request.head_dim, request.value_dim],
            request.dtype,
        );
        let plan = AttentionPlan::new(client, &layout, call.with_scale(scale));
        let plan = plan.map_err(|error| error.to_string())?;
        plan.check_backward().map_err(|error| error.to_string())?;
        let tile = &plan.parts()[0].forward;
        match tile.tile.is_tensor() {
            true => Ok(Self {
                request: *request,
                seen,
                plan,
            }),
            false => Err(match tile.refused.first() {
                Some((_, reason)) => reason.to_string(),
                None => "there is no tile on tensor cores".to_string(),
            }),
        }
    }

    /// Returns the plan of the layout kernels.
    pub fn plan(&self) -> &Arc<AttentionPlan> {
        &self.plan
    }

    /// Returns the layout of lists that [`unique_keys`](blocksparse_cubecl::unique_keys) wrote. It caches launch plans.
    ///
    /// # Errors
    /// [`KernelError`] if the index of a pair exceeds 32 bits.
    pub fn layout(&self, client: &Client, unique: &Handle) -> Result<BlockLayout, KernelError> {
        let lists = ChoiceTensor {
            handle: unique.clone(),
            dtype: ElemType::Int(IntKind::I32),
        };
        let layout = layout(&self.request, &self.seen);
        let layout = layout.expect("made before");
        choose_blocks(client, &layout, &lists)?;
        Ok(layout)
    }
}

/// Returns the layout of a call, without its pairs.
fn layout(request: &ListedRequest, seen: &BlockLayout) -> Result<BlockLayout, String> {
    let choice = DeviceChoice {
        patterns: [request.batch, request.kv_heads],
        causal: false,
        by: BlockSource::Keys { most: request.most },
    };
    let name = "single keys that each query lists, in tiles";
    BlockLayout::on_device_within(name, choice, seen).map_err(|error| error.to_string())
}

/// Layouts of recent shapes, with their cached plans.
static RECENT: Recent<(LayoutShape, bool), BlockLayout> = Recent::new(8);

/// Returns the layout of all pairs, or of causal ones.
fn seen(shape: LayoutShape, causal: bool) -> Result<BlockLayout, String> {
    RECENT.get_or_try_make((shape, causal), || {
        let pattern = match causal {
            true => Pattern::causal(),
            false => Pattern::dense(),
        };
        BlockLayout::new(&pattern, shape).map_err(|error| error.to_string())
    })
}
