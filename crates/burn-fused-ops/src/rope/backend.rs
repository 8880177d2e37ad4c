//! Rotary position embedding on CubeCL devices, and its step in Burn's autodiff graph.

#[cfg(feature = "cube")]
mod kernels {
    use burn_cubecl::CubeBackend;
    use burn_cubecl::kernel::into_contiguous;
    use burn_cubecl::tensor::CubeTensor;

    use crate::kernels::rows;
    use crate::kernels::rows::RopeTable;
    use crate::rope::ops::{RopeOps, one_by_one};
    use crate::rope::reference;
    use crate::rope::values::{RopeCall, RopeInputs, RopePair, TurnedPair};
    use burn_blocksparse::internal::cube::{shaped, typed, uses_reference};

    fn table_of(table: &CubeTensor) -> RopeTable<'_> {
        RopeTable {
            numbers: typed(table),
            context: table.meta.shape()[0],
            strides: std::array::from_fn(|dim| table.meta.strides()[dim]),
        }
    }

    impl RopeOps for CubeBackend {
        fn rope(inputs: RopeInputs<Self>, call: RopeCall) -> CubeTensor {
            if uses_reference() {
                return reference::rope::<Self>(inputs, call);
            }
            let RopeInputs { x, table, places } = inputs;
            let x = into_contiguous(x);
            let places = places.into_option().map(into_contiguous);
            let out = shaped(&x, x.meta.shape().clone(), call.dtype.into());
            let result = rows::rope(
                &x.client,
                (typed(&x), typed(&out)),
                x.meta.shape().dims(),
                &table_of(&table),
                (places.as_ref().map(typed), call.first),
                call.back,
            );
            match result {
                Ok(()) => out,
                Err(_) => {
                    let places = places.into();
                    reference::rope::<Self>(RopeInputs { x, table, places }, call)
                }
            }
        }

        fn rope_pair(pair: RopePair<Self>, call: RopeCall) -> TurnedPair<Self> {
            if uses_reference() {
                return one_by_one::<Self>(pair, call);
            }
            let RopePair {
                query,
                key,
                table,
                places,
            } = pair;
            let [query, key] = [query, key].map(into_contiguous);
            let places = places.into_option().map(into_contiguous);
            let [batch, heads, seq, width] = query.meta.shape().dims();
            let [_, key_heads, ..] = key.meta.shape().dims::<4>();
            let made = |x: &CubeTensor| shaped(x, x.meta.shape().clone(), call.dtype.into());
            let turned = TurnedPair {
                query: made(&query),
                key: made(&key),
            };
            let result = rows::rope_both(
                &query.client,
                [&query, &key].map(typed),
                [&turned.query, &turned.key].map(typed),
                ([batch, seq, width], [heads, key_heads]),
                &table_of(&table),
                (places.as_ref().map(typed), call.first),
                call.back,
            );
            match result {
                Ok(()) => turned,
                Err(_) => {
                    let places = places.into();
                    let pair = RopePair {
                        query,
                        key,
                        table,
                        places,
                    };
                    one_by_one::<Self>(pair, call)
                }
            }
        }
    }
}

#[cfg(feature = "autodiff")]
mod steps {
    use burn::backend::autodiff::Autodiff;
    use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
    use burn::backend::tensor::FloatTensor;

    use crate::rope::ops::RopeOps;
    use crate::rope::values::{RopeCall, RopeInputs};
    use burn_blocksparse::internal::custom_gradient::{custom_gradient, nothing, own_dtype, there};

    impl<B: RopeOps, C: CheckpointStrategy> RopeOps for Autodiff<B, C> {
        fn rope(inputs: RopeInputs<Self>, call: RopeCall) -> FloatTensor<Self> {
            let RopeInputs { x, table, places } = inputs;
            let (table, places) = (table.into_primitive(), places.into_option());
            custom_gradient::<B, C, _, _>([Some(x)], nothing, |[x], _| {
                let x = there(x);
                let of_gradient = RopeCall {
                    back: !call.back,
                    dtype: own_dtype(&x),
                    ..call
                };
                let of = |x, table, places: Option<_>| RopeInputs::<B> {
                    x,
                    table,
                    places: places.into(),
                };
                let turned = B::rope(of(x, table.clone(), places.clone()), call);
                (turned, move |_, grad| {
                    [Some(B::rope(of(grad, table, places), of_gradient))]
                })
            })
        }
    }
}
