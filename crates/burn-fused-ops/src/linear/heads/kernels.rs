//! Heads on CubeCL devices.

use crate::kernels::rows;
use crate::kernels::rows::heads::HeadsPart;
use burn::backend::ops::FloatTensorOps;

use crate::linear::values::{BiasedRows, HeadParts, JoinCall, Joined};
use burn_blocksparse::internal::cube::*;
use burn_blocksparse::internal::prelude::*;

fn part((heads, dim): (usize, usize)) -> HeadsPart {
    HeadsPart { heads, dim }
}

/// Describes the launches of a call.
pub(crate) fn text(
    device: &CubeDevice,
    rows: [usize; 2],
    parts: &[(usize, usize)],
    dtype: DType,
) -> Result<String, KernelError> {
    let parts: Vec<HeadsPart> = parts.iter().copied().map(part).collect();
    rows::heads_text(&device.client(), rows, &parts, dtype_to_elem_type(dtype))
}

pub(crate) fn split(
    inputs: &BiasedRows<CubeBackend>,
    parts: HeadParts,
) -> Result<ThreeFloats<CubeBackend>, KernelError> {
    let x = &into_contiguous(inputs.x.clone());
    let bias = contiguous(inputs.bias.clone());
    let [batch, seq, _] = x.meta.shape().dims();
    let tensors =
        parts.map(|part| part.map(|(heads, dim)| empty(x, [batch, heads, seq, dim], x.dtype)));
    let written: Vec<_> = (parts.iter().flatten().copied().map(part))
        .zip(tensors.iter().flatten().map(|tensor| &tensor.handle))
        .collect();
    rows::split_heads(
        &x.client,
        typed(x),
        bias.as_ref().map(typed),
        [batch * seq, seq],
        &written,
    )?;
    Ok(ThreeFloats::of_list(tensors))
}

pub(crate) fn join(
    tensors: ThreeFloats<CubeBackend>,
    call: &JoinCall,
) -> Result<Joined<CubeBackend>, KernelError> {
    let tensors = tensors.into_list();
    let tensors = tensors.map(|tensor| tensor.map(into_contiguous));
    let like = (tensors.iter().flatten().next()).expect("at least one tensor");
    let [batch, seq] = call.rows;
    // With one position, heads are already contiguous rows.
    if let ([Some(only), None, None], 1, None) = (&tensors, seq, call.bias)
        && only.dtype == call.dtype.into()
    {
        let shape = Shape::new([batch, seq, call.width()]);
        let x = CubeBackend::float_reshape(only.clone(), shape);
        return Ok(Joined::new(x, None));
    }
    let x = empty(like, [batch, seq, call.width()], call.dtype.into());
    let sums = (call.bias).map(|dtype| empty(like, [call.width()], dtype.into()));
    let read: Vec<_> = (call.parts.iter().zip(&tensors))
        .filter_map(|(of, tensor)| {
            Some((part((*of)?), tensor.as_ref().map(|tensor| &tensor.handle)))
        })
        .collect();
    rows::join_heads(
        &like.client,
        &read,
        [batch * seq, seq],
        typed(&x),
        sums.as_ref().map(typed),
    )?;
    Ok(Joined::new(x, sums))
}
