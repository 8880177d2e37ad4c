//! The `hopper` tier: wgmma and TMA, bf16 and f16, on GPUs of compute capability 9.0.
//!
//! Keys and values of a step are gathered by TMA, one box of `group` rows per entry, side by side in shared memory.
//! The 128-byte swizzle repeats after 8 rows, so boxes of 8, 16, … rows make up the layout wgmma reads.
//! A head_dim between multiples of 64 is filled up with zeros by TMA, in shared memory only.

mod asm;
mod forward;

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::device::plan;
use super::simt::tile::PlanPartsLaunch;
use super::{Sizes, TensorView};
use crate::BlockLayout;
use crate::plan::{Tiling, Walk};
use asm::{ROW, ROW_ELEMENTS};
pub use asm::Half;

/// Rows of a warpgroup.
const GROUP_ROWS: usize = 64;

/// The comptime shape of the kernel: its key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Type of the tensors.
    pub half: Half,
    /// Width of queries, keys and values, a multiple of 32.
    pub dim: usize,
    /// Warpgroups, each with 64 rows: 1 or 2.
    pub warpgroups: usize,
    /// Columns of a step: 64 or 128.
    pub cols: usize,
    /// Consecutive positions an entry names.
    pub group: usize,
    /// Steps whose keys and values are in shared memory at a time.
    pub stages: usize,
    /// How many steps late a buffer is filled again: with 1 a warp may have to wait for the other warpgroup.
    pub lag: usize,
    /// Whether a step's second product overlaps the next step's softmax.
    pub overlap: bool,
    /// Whether scores are softcapped.
    pub softcap: bool,
}

impl Tile {
    /// Rows of a tile.
    pub fn rows(&self) -> usize {
        GROUP_ROWS * self.warpgroups
    }

    /// How the layout is cut.
    pub fn tiling(&self) -> Tiling {
        Tiling {
            walk: Walk::Rows,
            rows: self.rows(),
            cols: self.cols,
            places: false,
        }
    }

    /// Whether layouts of this block size can be cut so.
    pub fn fits(&self, block: usize) -> bool {
        let rows = self.rows();
        (rows % block == 0 || block % rows == 0)
            && (self.cols % block == 0 || block % self.cols == 0)
            && self.group == self.cols.min(block)
    }

    fn warps(&self) -> u32 {
        4 * self.warpgroups as u32
    }

    /// Whether the warpgroups take turns at the tensor cores.
    fn turns(&self) -> bool {
        self.warpgroups == 2 && self.overlap
    }

    /// Spans of 64 columns in shared memory.
    fn spans(&self) -> usize {
        self.dim.div_ceil(ROW_ELEMENTS)
    }

    fn entries(&self) -> usize {
        self.cols / self.group
    }

    /// TMA boxes of the keys, or the values, of a step.
    fn boxes(&self) -> usize {
        self.entries() * self.spans()
    }

    /// Boxes of a step that one warp loads.
    fn lane_boxes(&self) -> usize {
        self.boxes().div_ceil(self.warps() as usize)
    }

    fn loading_warps(&self) -> u32 {
        self.warps().min(self.boxes() as u32)
    }

    fn mask_words(&self) -> usize {
        self.group.div_ceil(32)
    }

    fn q_bytes(&self) -> usize {
        self.rows() * self.spans() * ROW
    }

    /// Bytes of the keys, or the values, of a step.
    fn stage_bytes(&self) -> usize {
        self.cols * self.spans() * ROW
    }

    // Byte offsets in shared memory. The barrier of q comes first.

    fn k_full(&self) -> u32 {
        8
    }

    fn v_full(&self) -> u32 {
        self.k_full() + 8 * self.stages as u32
    }

    fn k_empty(&self) -> u32 {
        self.v_full() + 8 * self.stages as u32
    }

    fn v_empty(&self) -> u32 {
        self.k_empty() + 8 * self.stages as u32
    }

    fn kv_head_offset(&self) -> u32 {
        self.v_empty() + 8 * self.stages as u32
    }

    fn q_offset(&self) -> usize {
        1024
    }

    fn k_offset(&self) -> usize {
        self.q_offset() + self.q_bytes()
    }

    fn v_offset(&self) -> usize {
        self.k_offset() + self.stages * self.stage_bytes()
    }

    /// Bytes of shared memory of a cube.
    pub fn shared_bytes(&self) -> usize {
        self.v_offset() + self.stages * self.stage_bytes()
    }
}

/// Runs the forward pass into `out` `[batch, heads, seq_q, dim]` and `lse` `[batch, heads, seq_q]`, both contiguous.
pub fn forward(
    client: &Client,
    tile: Tile,
    layout: &BlockLayout,
    sizes: &Sizes,
    [q, k, v]: [&TensorView; 3],
    out: &Handle,
    lse: &Handle,
    scale: f64,
    softcap: Option<f64>,
) {
    let device_plan = plan(client, layout, tile.tiling());
    let parts = &device_plan.sections;
    let rows = sizes.batch * layout.heads() * layout.seq_q();
    let log2_e = std::f64::consts::LOG2_E;
    let (log2_scale, cap_scale) = match softcap {
        Some(softcap) => (log2_e, 2.0 * log2_e * scale / softcap),
        None => (scale * log2_e, 0.0),
    };
    unsafe {
        forward::forward::launch_unchecked(
            client,
            CubeCount::Static(device_plan.tiles as u32, layout.heads() as u32, sizes.batch as u32),
            CubeDim::new_1d(32 * tile.warps()),
            tile.cols / 2,
            tile.cols / 4,
            (tile.dim / 2).next_power_of_two(),
            tensor_map(q, tile.rows(), sizes.dtype),
            tensor_map(k, tile.group, sizes.dtype),
            tensor_map(v, tile.group, sizes.dtype),
            BufferArg::from_raw_parts(out.clone(), rows * tile.dim / 8),
            BufferArg::from_raw_parts(lse.clone(), rows),
            BufferArg::from_raw_parts(device_plan.words.clone(), device_plan.len),
            PlanPartsLaunch::new(
                parts.heads,
                parts.places,
                parts.order,
                parts.tiles,
                parts.entries,
                parts.masks,
                if layout.batch().is_some() { layout.heads() } else { 0 },
            ),
            layout.seq_q() as u32,
            (layout.heads() / sizes.kv_heads) as u32,
            log2_scale as f32,
            softcap.unwrap_or(1.0) as f32,
            cap_scale as f32,
            f32::NEG_INFINITY,
            tile,
        );
    }
}

/// A map whose boxes have `rows` rows of 64 columns.
fn tensor_map(tensor: &TensorView, rows: usize, dtype: ElemType) -> TensorMapArg<Tiled> {
    // Strides of dimensions of length 1 are arbitrary, but a map's have to be multiples of 16 bytes.
    let mut strides = tensor.strides;
    for (stride, length) in strides.iter_mut().zip(tensor.shape) {
        if length == 1 {
            *stride = tensor.shape[3];
        }
    }
    strides[3] = 1;
    let tensor = unsafe { TensorArg::from_raw_parts(tensor.handle.clone(), strides.into(), tensor.shape.into()) };
    let boxes = TiledArgs {
        tile_size: [1, 1, rows, ROW_ELEMENTS].into(),
    };
    TensorMapArg::new(boxes, tensor, dtype).with_swizzle(TensorMapSwizzle::B128)
}
