//! Products and softmax of block-sparse tensors in Burn primitives.
//!
//! ```text
//! nt  w[n] = a[row n] · b[column n]ᵀ        one batched product of block pairs; masked pairs are set to 0
//! nn  out  [R, b, d] = w [R, b, L·b] · b [R, L·b, d]       the L blocks of R rows, side by side
//! tn  out  [R, b, d] = w [R, L·b, b]ᵀ · a [R, L·b, d]      the L blocks of R columns, one below the other
//! softmax  the largest value and the sum of each row of a block, then of each row over its blocks
//! ```
//!
//! Everything is gathered and nothing is scattered. Block rows and columns are listed on the host, so each output has one writer, and the backward passes (each
//! consists of two of these products) are also gathers. Gathered operands are in memory one chunk at a time. Sums have a fixed order.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::tensor::Device;

use super::places::{Chunk, Places, Side};
use crate::attention::reference::{Scattered, tile, untile};
use crate::base::prelude::*;
use crate::base::values::LayoutTensors;
use crate::graph::recording;
use crate::upload;
use crate::weights;

/// Maximum number of elements of the gathered operands and their product in memory at a time (one block row may have more).
const CHUNK_ELEMENTS: usize = 1 << 22;

/// Maximum number of matrices of a batched product: WebGPU allows 65,535 cubes per dimension.
const CHUNK_MATRICES: usize = 1 << 15;

/// A product of two operands. The three products are each other's gradients:
///
/// ```text
/// w = a · bᵀ   da = dw · b      db = dwᵀ · a      masked pairs of dw do not count
/// y = w · b    dw = dy · bᵀ     db = wᵀ · dy
/// y = wᵀ · a   dw = a · dyᵀ     da = w · dy
/// ```
#[derive(Clone, Copy, Debug)]
pub enum BlockProduct {
    /// Blocks of `a · bᵀ`, in f32 (f64 for f64): `a` `[batch, heads, seq_q, dim]`, `b` `[batch, kv_heads, seq_kv, dim]`.
    Nt,
    /// `w · b`: `[batch, heads, seq_q, dim]` in the dtype of `b`, `[batch, kv_heads, seq_kv, dim]`.
    Nn,
    /// `wᵀ · a`, summed over the heads that share one of `kv_heads` heads: `[batch, kv_heads, seq_kv, dim]` in the dtype of `a`, `[batch, heads, seq_q, dim]`.
    Tn {
        /// Number of heads of the result.
        kv_heads: usize,
    },
}

/// Sets masked pairs of `values` `[batch, blocks, b, b]` to 0.
pub(super) fn mask<B: Backend>(
    values: FloatTensor<B>,
    layout: &LayoutTensors<B>,
) -> FloatTensor<B> {
    let call = Call::of_values(&values, layout, layout.host.heads());
    let blocks = 0..call.places.len();
    let values = call.kept_blocks(values);
    let values = call.fill_masked(values, blocks, 0.0);
    call.stored_blocks(vec![values])
}

/// Computes `a · bᵀ` of `a` `[batch, heads, seq_q, dim]` and `b` `[batch, kv_heads, seq_kv, dim]`.
fn nt<B: Backend>(
    a: FloatTensor<B>,
    b: FloatTensor<B>,
    layout: &LayoutTensors<B>,
) -> FloatTensor<B> {
    let [batch, _, _, dim] = a.shape().dims::<4>();
    let dtype = accumulate_in(a.dtype().into());
    let call = Call::new(layout, batch, b.shape()[1], a.device(), dtype);
    let size = call.block_size;
    let (a, b) = (call.tile(a), call.tile(b));
    let length = (CHUNK_ELEMENTS / (size * (2 * dim + size))).clamp(1, CHUNK_MATRICES);
    let count = call.places.len();
    let parts = (0..count).step_by(length).map(|first| {
        let blocks = first..count.min(first + length);
        let shape = [blocks.len(), size, dim];
        let a = call.gather(&a, &call.places.q_tiles[blocks.clone()], shape);
        let b = call.gather(&b, &call.places.kv_tiles[blocks.clone()], shape);
        call.fill_masked(a.matmul(b.transpose()), blocks, 0.0)
    });
    call.stored_blocks(parts.collect())
}

pub(super) fn product<B: Backend>(
    lhs: FloatTensor<B>,
    rhs: FloatTensor<B>,
    layout: &LayoutTensors<B>,
    product: BlockProduct,
) -> FloatTensor<B> {
    let host = &layout.host;
    let (side, kv_heads, rows) = match product {
        BlockProduct::Nt => return nt(lhs, rhs, layout),
        BlockProduct::Nn => (Side::Query, rhs.shape()[1], [host.heads(), host.seq_q()]),
        BlockProduct::Tn { kv_heads } => (Side::Key, kv_heads, [kv_heads, host.seq_kv()]),
    };
    let call = Call::of_values(&lhs, layout, kv_heads);
    let dtype: FloatDType = rhs.dtype().into();
    let out = call.product(lhs, rhs, side);
    call.untile(out, rows).cast(dtype).0
}

/// Computes the softmax of `w` `[batch, blocks, b, b]`.
pub(super) fn softmax<B: Backend>(
    w: FloatTensor<B>,
    layout: &LayoutTensors<B>,
    scale: f64,
) -> FloatTensor<B> {
    let call = Call::of_values(&w, layout, layout.host.heads());
    let blocks = 0..call.places.len();
    if blocks.is_empty() {
        return w;
    }
    let w = call.kept_blocks(w);
    // scale · w = |scale| · (±w), so the maximum is taken before scaling.
    let w = if scale < 0.0 { -w } else { w };
    let allowed = call.fill_masked(w.clone(), blocks.clone(), f64::NEG_INFINITY);
    let max = call.reduce_rows(allowed, Reduce::Max);
    // Rows without pairs may use any finite value.
    let max_is_infinite = B::float_is_inf(max.0.clone(), layout.blocked.dtype().into());
    let max = max.fill(max_is_infinite, 0.0);
    // A difference of finite values may be −∞, and −∞ · 0 is NaN.
    let below = (w - call.of_blocks(&max)).at_least(call.lowest());
    let e = call.fill_masked((below * scale.abs()).exp(), blocks, 0.0);
    // The maximum of a row contributes 1 to its sum, so only rows without pairs have a smaller sum.
    let sum = call.reduce_rows(e.clone(), Reduce::Sum).at_least(1.0);
    call.stored_blocks(vec![e / call.of_blocks(&sum)])
}

/// Computes `dS = scale · p ∘ (dP − rowsum(p ∘ dP))`, all `[batch, blocks, b, b]`.
pub(super) fn softmax_backward<B: Backend>(
    p: FloatTensor<B>,
    grad: FloatTensor<B>,
    layout: &LayoutTensors<B>,
    scale: f64,
) -> FloatTensor<B> {
    let call = Call::of_values(&p, layout, layout.host.heads());
    let blocks = 0..call.places.len();
    if blocks.is_empty() {
        return grad;
    }
    let p = call.kept_blocks(p);
    // Gradients of masked pairs are ignored, even if they are not finite.
    let grad = call.fill_masked(call.kept_blocks(grad), blocks, 0.0);
    let delta = call.reduce_rows(p.clone() * &grad, Reduce::Sum);
    let ds = p * (grad - call.of_blocks(&delta));
    call.stored_blocks(vec![ds * scale])
}

#[derive(Clone, Copy)]
enum Reduce {
    Max,
    Sum,
}

impl Reduce {
    fn along<B: Backend>(self, x: Array<B>, dim: usize) -> Array<B> {
        match self {
            Self::Max => x.max_dim(dim),
            Self::Sum => x.sum_dim(dim),
        }
    }

    fn neutral(self) -> f64 {
        match self {
            Self::Max => f64::NEG_INFINITY,
            Self::Sum => 0.0,
        }
    }
}

/// The blocks of a layout and the common properties of a call's tensors.
struct Call<'a, B: Backend> {
    layout: &'a LayoutTensors<B>,
    places: Arc<Places>,
    batch: usize,
    block_size: usize,
    device: Device<B>,
    /// Dtype of all computations.
    dtype: FloatDType,
}

impl<'a, B: Backend> Call<'a, B> {
    fn new(
        layout: &'a LayoutTensors<B>,
        batch: usize,
        kv_heads: usize,
        device: Device<B>,
        dtype: FloatDType,
    ) -> Self {
        Self {
            layout,
            places: Places::of(&layout.host, batch, kv_heads),
            batch,
            block_size: layout.host.block_size(),
            device,
            dtype,
        }
    }

    fn of_values(values: &FloatTensor<B>, layout: &'a LayoutTensors<B>, kv_heads: usize) -> Self {
        let (batch, dtype) = (values.shape()[0], values.dtype().into());
        Self::new(layout, batch, kv_heads, values.device(), dtype)
    }

    fn indices(&self, indices: &[i32]) -> IntTensor<B> {
        upload::indices::<B>(&self.device, indices.to_vec())
    }

    /// Uploads bools in the backend's storage type, which is that of the layout's tensor.
    fn bools<const D: usize>(&self, bools: Vec<bool>, shape: [usize; D]) -> BoolTensor<B> {
        recording::doom_by_upload(&self.device, "indices of blocks");
        let data = TensorData::new(bools, shape);
        B::bool_from_data(
            data.convert_dtype(self.layout.blocked.dtype()),
            &self.device,
        )
    }

    fn zeros<const D: usize>(&self, shape: [usize; D]) -> Array<B> {
        Array::zeros(shape, &self.device, self.dtype)
    }

    /// Returns the lowest finite value of the dtype.
    fn lowest(&self) -> f64 {
        match self.dtype {
            FloatDType::F64 => f64::MIN,
            _ => f64::from(f32::MIN),
        }
    }

    /// Gathers the rows `places` of `x` and reshapes them.
    fn gather<const D: usize>(&self, x: &Array<B>, places: &[i32], shape: [usize; D]) -> Array<B> {
        let rows = x.clone().select(0, self.indices(places));
        rows.reshape(shape)
    }

    /// Converts `[batch, heads, seq, dim]` to `[tiles, b · dim]`, in the dtype of all computations.
    fn tile(&self, x: FloatTensor<B>) -> Array<B> {
        tile(Array::<B>(x).cast(self.dtype), self.block_size)
    }

    /// Converts tiles to `[batch, heads, seq, dim]`.
    fn untile(&self, x: Array<B>, [heads, seq]: [usize; 2]) -> Array<B> {
        untile(x, [self.batch, heads, seq], self.block_size)
    }

    /// Selects the kept blocks among the stored ones: `[kept, b, b]`.
    fn kept_blocks(&self, values: FloatTensor<B>) -> Array<B> {
        let b = self.block_size;
        let stored = values.shape()[0] * values.shape()[1];
        let values = Array::<B>(values).reshape([stored, b, b]);
        match self.places.stored_places() {
            None => values,
            Some(places) => values.select(0, self.indices(&places)),
        }
    }

    /// Inverts [`Self::kept_blocks`] for parts `[n, b, b]` of the blocks: `[batch, blocks, b, b]`.
    fn stored_blocks(&self, mut parts: Vec<Array<B>>) -> FloatTensor<B> {
        let b = self.block_size;
        let shape = weights::shape(&self.layout.host, self.batch);
        if self.places.len() == 0 {
            return self.zeros(shape).0;
        }
        let places = self.places.kept_places();
        if places.is_some() {
            parts.push(self.zeros([1, b, b]));
        }
        let mut values = Array::cat(parts, 0);
        if let Some(places) = places {
            values = values.select(0, self.indices(&places));
        }
        values.reshape(shape).0
    }

    /// Fills the masked pairs of `values`, which are those of the kept blocks `blocks`, `[n, b, b]`.
    fn fill_masked(&self, values: Array<B>, blocks: Range<usize>, value: f64) -> Array<B> {
        if !self.places.is_partial(blocks.clone()) {
            return values;
        }
        let masks = self.indices(&self.places.masks[blocks]);
        let blocked = B::bool_select(self.layout.blocked.clone(), 0, masks);
        let blocked = B::bool_reshape(blocked, values.shape());
        values.fill(blocked, value)
    }

    /// Sums block times tile of the other side over the blocks of each tile of a side: `[tiles, b · dim]`.
    fn product(&self, w: FloatTensor<B>, x: FloatTensor<B>, side: Side) -> Array<B> {
        let (b, dim) = (self.block_size, x.shape()[3]);
        let x = self.tile(x);
        let w = self.kept_blocks(w);
        let length = (CHUNK_ELEMENTS / (b * (b + dim))).min(CHUNK_MATRICES);
        let chunks = self.places.chunks(side, length);
        let other = match side {
            Side::Query => &self.places.kv_tiles,
            Side::Key => &self.places.q_tiles,
        };
        self.each_tile(side, chunks, b * dim, |chunk| {
            let (tiles, length) = (chunk.tiles.len(), chunk.length);
            let w = self.gather(&w, &chunk.blocks, [tiles, length, b * b]);
            let w = self.fill_repeated(w, chunk, 0.0);
            let w = match side {
                Side::Query => {
                    let w = w.reshape([tiles, length, b, b]).swap(1, 2);
                    w.reshape([tiles, b, length * b])
                }
                Side::Key => w.reshape([tiles, length * b, b]).transpose(),
            };
            let places: Vec<i32> = (chunk.blocks.iter())
                .map(|&block| other[block as usize])
                .collect();
            w.matmul(self.gather(&x, &places, [tiles, length * b, dim]))
        })
    }

    /// Reduces the rows of all blocks, `[kept, b, b]`, over the blocks of each row: `[tiles, b]`.
    fn reduce_rows(&self, values: Array<B>, reduce: Reduce) -> Array<B> {
        let b = self.block_size;
        let rows = reduce.along(values, 2).reshape([self.places.len(), b]);
        let chunks = self.places.chunks(Side::Query, CHUNK_ELEMENTS / b);
        self.each_tile(Side::Query, chunks, b, |chunk| {
            let shape = [chunk.tiles.len(), chunk.length, b];
            let rows = self.gather(&rows, &chunk.blocks, shape);
            reduce.along(self.fill_repeated(rows, chunk, reduce.neutral()), 1)
        })
    }

    /// Expands rows of query tiles, `[tiles, b]`, to each kept block: `[kept, b, 1]`.
    fn of_blocks(&self, rows: &Array<B>) -> Array<B> {
        let shape = [self.places.len(), self.block_size, 1];
        self.gather(rows, &self.places.q_tiles, shape)
    }

    /// Fills the padding blocks of `x` `[T, L, width]`, which repeat another block.
    fn fill_repeated(&self, x: Array<B>, chunk: &Chunk, value: f64) -> Array<B> {
        if chunk.repeated.is_empty() {
            return x;
        }
        let shape = [chunk.tiles.len(), chunk.length, 1];
        let repeated = self.bools(chunk.repeated.clone(), shape);
        let repeated = B::bool_expand(repeated, x.shape());
        x.fill(repeated, value)
    }

    /// Applies `compute` to each chunk and returns the results in the order of the tiles: `[tiles, width]`. Tiles without blocks are 0.
    fn each_tile(
        &self,
        side: Side,
        chunks: Arc<[Chunk]>,
        width: usize,
        compute: impl Fn(&Chunk) -> Array<B>,
    ) -> Array<B> {
        let tiles = match side {
            Side::Query => self.places.tiles[0],
            Side::Key => self.places.tiles[1],
        };
        let mut rows = Scattered::new(self.zeros([1, width]), tiles);
        for chunk in chunks.iter() {
            let made = compute(chunk).reshape([chunk.tiles.len(), width]);
            rows.push(&chunk.tiles, made);
        }
        rows.finish()
    }
}
