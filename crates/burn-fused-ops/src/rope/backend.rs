//! Rotary position embedding on CubeCL devices, and its step in Burn's autodiff graph.

#[cfg(feature = "cube")]
mod kernels {
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
        let made = |x: &CubeTensor| shaped(x, x.meta.shape().clone(), call.dtype.into());
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
            let (shape, back) = (x.meta.shape().dims(), call.back);
            rows::rope(
                &x.client,
                (typed(x), typed(to)),
                shape,
                &table,
                positions,
                back,
            )?;
        }
        Ok(TurnedRows {
            x: out,
            key: key_out.into(),
        })
    }
}

#[cfg(feature = "autodiff")]
mod steps {
    use crate::rope::ops::RopeOps;
    use crate::rope::values::{RopeCall, RopeInputs, TurnedRows};
    use burn_blocksparse::internal::custom_gradient::*;
    use burn_blocksparse::internal::prelude::*;

    impl<B: RopeOps, C: CheckpointStrategy> RopeOps for Autodiff<B, C> {
        /// A step for each of both.
        fn rope(inputs: RopeInputs<Self>, call: RopeCall) -> TurnedRows<Self> {
            let (table, places) = (inputs.table.into_primitive(), inputs.places.into_option());
            let turn = |x: FloatTensor<Self>| {
                custom_gradient::<B, C, _, _>([Some(x)], nothing, |[x], _| {
                    let x = there(x);
                    let of_gradient = RopeCall {
                        back: !call.back,
                        dtype: own_dtype(&x),
                        ..call
                    };
                    let (table, places) = (table.clone(), places.clone());
                    let of = |x, table, places: Option<_>| RopeInputs::<B> {
                        x,
                        key: OptFloat::None,
                        table,
                        places: places.into(),
                    };
                    let turned = B::rope(of(x, table.clone(), places.clone()), call).x;
                    (turned, move |_, grad| {
                        [Some(B::rope(of(grad, table, places), of_gradient).x)]
                    })
                })
            };
            let key = inputs.key.into_option();
            TurnedRows {
                x: turn(inputs.x),
                key: key.map(turn).into(),
            }
        }
    }
}
