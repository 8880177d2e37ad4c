//! Tensor maps for TMA.

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::arch::sm90::ROW_ELEMENTS;
use crate::args::boxes_of;
use crate::call::TensorView;
use blocksparse::Residue;

/// Returns a map of `[rows, pitch, 2]` elements with boxes of `group` places.
pub fn stats_map(stats: &Handle, group: usize, rows: usize, pitch: usize) -> TensorMapArg<Tiled> {
    let boxes = TiledArgs {
        tile_size: [1, group * 2].into(),
    };
    let (strides, shape) = ([pitch * 2, 1].into(), [rows, pitch * 2].into());
    // SAFETY: the stats have two elements for each of `rows · pitch` places.
    let stats = unsafe { TensorArg::from_raw_parts(stats.clone(), strides, shape) };
    TensorMapArg::new(boxes, stats, ElemType::Float(FloatKind::F32))
}

/// Returns a map with boxes of `rows` rows and 64 columns.
pub fn tensor_map(
    tensor: &TensorView,
    rows: usize,
    residue: Option<Residue>,
    dtype: ElemType,
) -> TensorMapArg<Tiled> {
    map_of(tensor, [rows, ROW_ELEMENTS], residue, dtype)
}

/// Returns a map with boxes of these rows and columns.
pub(super) fn map_of(
    tensor: &TensorView,
    [rows, columns]: [usize; 2],
    residue: Option<Residue>,
    dtype: ElemType,
) -> TensorMapArg<Tiled> {
    let [batch, heads, seq, dim] = tensor.shape;
    let [batch_stride, head_stride, row_stride, _] = tensor.strides;
    let (shape, mut strides, boxes) = match residue {
        None => (
            vec![batch, heads, seq, dim],
            vec![batch_stride, head_stride, row_stride, 1],
            vec![1, 1, rows, columns],
        ),
        Some(Residue { stride, .. }) => (
            vec![batch, heads, stride, seq / stride, dim],
            vec![
                batch_stride,
                head_stride,
                row_stride,
                row_stride * stride,
                1,
            ],
            vec![1, 1, 1, rows, columns],
        ),
    };
    // Strides of dimensions of length 1 are arbitrary, but those of a map must be multiples of 16 bytes.
    for (stride, length) in strides.iter_mut().zip(&shape) {
        if *length == 1 {
            *stride = dim;
        }
    }
    let last = strides.len() - 1;
    strides[last] = 1;
    // SAFETY: shape and strides are the view's, whose elements its handle holds. If there are classes, the stride divides the sequence.
    unsafe { boxes_of(&tensor.handle, &shape, &strides, &boxes, dtype) }
}
