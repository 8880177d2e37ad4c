//! Rotary position embedding on CubeCL devices.

use crate::by_kernels::by_kernels;
use crate::kernels::rows;
use crate::kernels::rows::RopeTable;
use crate::rope::ops::RopeOps;
use crate::rope::reference;
use crate::rope::values::{RopeCall, RopeInputs, TurnedRows};
use burn_blocksparse::internal::cube::*;

impl RopeOps for CubeBackend {
    fn rope(inputs: RopeInputs<Self>, call: RopeCall) -> TurnedRows<Self> {
        by_kernels(|| turned(&inputs, call))
            .unwrap_or_else(|| reference::rope::<Self>(inputs, call))
    }
}

fn turned(
    inputs: &RopeInputs<CubeBackend>,
    call: RopeCall,
) -> Result<TurnedRows<CubeBackend>, KernelError> {
    let (x, key) = (
        into_contiguous(inputs.x.clone()),
        contiguous(inputs.key.clone()),
    );
    let places = inputs.places.clone().into_option().map(into_contiguous);
    let table = RopeTable {
        numbers: typed(&inputs.table),
        context: inputs.table.meta.shape()[0],
        strides: std::array::from_fn(|dim| inputs.table.meta.strides()[dim]),
    };
    let positions = (places.as_ref().map(typed), call.first);
    let made = |x: &CubeTensor| empty_like(x, call.dtype.into());
    let (out, key_out) = (made(&x), key.as_ref().map(made));
    let pair = key.as_ref().zip(key_out.as_ref());
    let together = pair.is_some_and(|(key, key_out)| {
        let [batch, heads, seq, width] = x.meta.shape().dims();
        let [_, key_heads, ..] = key.meta.shape().dims::<4>();
        let both = rows::rope_both(
            &x.client,
            [&x, key].map(typed),
            [&out, key_out].map(typed),
            ([batch, seq, width], [heads, key_heads]),
            &table,
            positions,
            call.back,
        );
        both.is_ok()
    });
    for (x, to) in [(&x, &out)].into_iter().chain(pair).filter(|_| !together) {
        rows::rope(
            &x.client,
            (typed(x), typed(to)),
            x.meta.shape().dims(),
            &table,
            positions,
            call.back,
        )?;
    }
    Ok(TurnedRows {
        x: out,
        key: key_out.into(),
    })
}
