//! Indexed rows on CubeCL devices.

use blocksparse_cubecl::rows;
use blocksparse_cubecl::rows::{IndexedRows, MergedGradients, gather_rows};
use burn::tensor::{IntDType, Shape};

use crate::base::cube::*;
use crate::base::dtype::sums_of;
use crate::base::values::OutputGrads;
use crate::rows::ops::RowOps;
use crate::rows::reference;
use crate::rows::values::{MergedGrads, MergedOutput, MergedParts};

fn numbers(index: CubeTensor) -> CubeTensor {
    into_contiguous(cast(index, IntDType::I32.into()))
}

/// Describes the rows of a tensor and an index into them.
fn indexed(rows: &CubeTensor, index: &CubeTensor) -> IndexedRows {
    let [batch, heads, count, dim] = rows.meta.shape().dims();
    let [_, _, places, most] = index.meta.shape().dims();
    IndexedRows::new(batch * heads, count, [places, most], dim)
}

/// Returns the sums of the rows that `index` `[batch, heads, places, most]` lists, or `None` if kernels do not support them.
fn gathered(rows: &CubeTensor, index: &CubeTensor) -> Option<CubeTensor> {
    let of = indexed(rows, index);
    if uses_reference() || of.rows == 0 {
        return None;
    }
    let [batch, heads, places, _] = index.meta.shape().dims();
    let out = empty(rows, [batch, heads, places, of.width], rows.dtype);
    let client = &rows.client;
    gather_rows(client, &of, typed(rows), &index.handle, &out.handle).ok()?;
    Some(out)
}

impl RowOps for CubeBackend {
    fn gather_rows(x: CubeTensor, index: CubeTensor, _users: CubeTensor) -> CubeTensor {
        let [batch, heads, places] = index.meta.shape().dims();
        let (x, index) = (into_contiguous(x), numbers(index));
        let by_one = reshaped(index.clone(), Shape::new([batch, heads, places, 1]));
        gathered(&x, &by_one).unwrap_or_else(|| reference::gather_rows::<Self>(x, index))
    }

    fn rows_at_backward(grad: CubeTensor, users: CubeTensor) -> CubeTensor {
        let (grad, users) = (into_contiguous(grad), numbers(users));
        gathered(&grad, &users).unwrap_or_else(|| reference::rows_at_backward::<Self>(grad, users))
    }

    fn merged_parts(inputs: MergedParts<Self>) -> MergedOutput<Self> {
        let inputs = contiguous_parts(inputs);
        merged(&inputs).unwrap_or_else(|| reference::merged_parts::<Self>(inputs))
    }

    fn merged_parts_backward(
        inputs: MergedParts<Self>,
        grads: OutputGrads<Self>,
    ) -> MergedGrads<Self> {
        let inputs = contiguous_parts(inputs);
        let grads = OutputGrads {
            out: into_contiguous(grads.out),
            lse: contiguous(grads.lse).into(),
        };
        merged_backward(&inputs, &grads)
            .unwrap_or_else(|| reference::merged_parts_backward::<Self>(inputs, grads))
    }
}

fn contiguous_parts(inputs: MergedParts<CubeBackend>) -> MergedParts<CubeBackend> {
    MergedParts {
        own: into_contiguous(inputs.own),
        own_lse: into_contiguous(inputs.own_lse),
        rows: into_contiguous(inputs.rows),
        lses: into_contiguous(inputs.lses),
        places: numbers(inputs.places),
        choices: numbers(inputs.choices),
    }
}

fn parts(inputs: &MergedParts<CubeBackend>) -> rows::MergedParts<'_> {
    rows::MergedParts {
        own: typed(&inputs.own),
        own_lse: &inputs.own_lse.handle,
        rows: &inputs.rows.handle,
        lses: &inputs.lses.handle,
        index: &inputs.places.handle,
    }
}

fn merged(inputs: &MergedParts<CubeBackend>) -> Option<MergedOutput<CubeBackend>> {
    let of = indexed(&inputs.rows, &inputs.places);
    if uses_reference() || of.rows == 0 {
        return None;
    }
    let own = &inputs.own;
    let out = empty_like(own, own.dtype);
    let lse = empty_like(&inputs.own_lse, sums_of(own.dtype));
    let made = [&out.handle, &lse.handle];
    rows::merge_rows(&own.client, &of, &parts(inputs), made).ok()?;
    Some(MergedOutput { out, lse })
}

fn merged_backward(
    inputs: &MergedParts<CubeBackend>,
    grads: &OutputGrads<CubeBackend>,
) -> Option<MergedGrads<CubeBackend>> {
    let of = indexed(&inputs.rows, &inputs.places);
    if uses_reference() || of.rows == 0 {
        return None;
    }
    let like = |x: &CubeTensor| empty_like(x, x.dtype);
    let made: MergedGrads<CubeBackend> = MergedGrads {
        own: like(&inputs.own),
        own_lse: like(&inputs.own_lse),
        rows: like(&inputs.rows),
        lses: like(&inputs.lses),
    };
    let gradients = MergedGradients {
        grad: &grads.out.handle,
        grad_lse: grads.lse.as_ref().map(|grad| &grad.handle),
        choices: &inputs.choices.handle,
        by_own: &made.own.handle,
        by_own_lse: &made.own_lse.handle,
        by_rows: &made.rows.handle,
        by_lses: &made.lses.handle,
    };
    let client = &inputs.own.client;
    rows::merge_rows_backward(client, &of, &parts(inputs), &gradients).ok()?;
    Some(made)
}
