//! Rows by an index on each backend.

#[cfg(feature = "cube")]
mod kernels {
    use blocksparse_cubecl::rows;
    use blocksparse_cubecl::rows::{
        IndexedRows, MergedGradients, gather_rows, gather_scaled_rows, mean_rows,
    };
    use burn::backend::ops::IntTensorOps;
    use burn::tensor::{DType, IntDType, Shape};
    use burn_cubecl::CubeBackend;
    use burn_cubecl::kernel::{cast, into_contiguous};
    use burn_cubecl::tensor::CubeTensor;

    use crate::base::cube::{contiguous, empty, matrix, typed, uses_reference};
    use crate::base::dtype::accumulate_in;
    use crate::base::values::OutputGrads;
    use crate::rows::ops::RowOps;
    use crate::rows::reference;
    use crate::rows::values::{
        KeyedGrads, KeyedRows, MeanRows, MergedGrads, MergedOutput, MergedParts,
    };

    fn numbers(index: CubeTensor) -> CubeTensor {
        into_contiguous(cast(index, IntDType::I32.into()))
    }

    /// Numbers of places `[batch, heads, places, most]`, and whether those lie the other way round.
    fn named(index: CubeTensor) -> (CubeTensor, bool) {
        let [_, heads, places, most] = index.meta.shape().dims();
        let of_list = places * most;
        let turned = index.dtype == DType::I32
            && index
                .meta
                .strides()
                .iter()
                .copied()
                .eq([heads * of_list, of_list, 1, places]);
        match turned {
            true => (index, most > 1),
            false => (numbers(index), false),
        }
    }

    fn sums_of(x: &CubeTensor) -> DType {
        accumulate_in(x.dtype.into()).into()
    }

    /// Lists of the rows of a tensor, and places that name some of them.
    fn indexed(rows: &CubeTensor, index: &CubeTensor) -> IndexedRows {
        let [batch, heads, count, dim] = rows.meta.shape().dims();
        let [_, _, places, most] = index.meta.shape().dims();
        IndexedRows::new(batch * heads, count, [places, most], dim)
    }

    /// The sums of rows that `index` `[batch, heads, places, most]` names. `None` if kernels do not take them.
    fn gathered(rows: &CubeTensor, (index, turned): (&CubeTensor, bool)) -> Option<CubeTensor> {
        let of = indexed(rows, index).turned(turned);
        if uses_reference() || of.rows == 0 {
            return None;
        }
        let [batch, heads, places, _] = index.meta.shape().dims();
        let out = empty(rows, [batch, heads, places, of.width], rows.dtype);
        let client = &rows.client;
        gather_rows(client, &of, typed(rows), &index.handle, &out.handle).ok()?;
        Some(out)
    }

    fn reshaped<const D: usize>(x: CubeTensor, shape: [usize; D]) -> CubeTensor {
        CubeBackend::int_reshape(x, Shape::new(shape))
    }

    impl RowOps for CubeBackend {
        fn gather_rows(x: CubeTensor, index: CubeTensor, _users: CubeTensor) -> CubeTensor {
            let [batch, heads, places] = index.meta.shape().dims();
            let (x, index) = (into_contiguous(x), numbers(index));
            let by_one = reshaped(index.clone(), [batch, heads, places, 1]);
            gathered(&x, (&by_one, false))
                .unwrap_or_else(|| reference::gather_rows::<Self>(x, index))
        }

        fn rows_at_backward(grad: CubeTensor, users: CubeTensor) -> CubeTensor {
            let (grad, (users, turned)) = (into_contiguous(grad), named(users));
            gathered(&grad, (&users, turned))
                .unwrap_or_else(|| reference::rows_at_backward::<Self>(grad, users))
        }

        fn l2_normalize(x: CubeTensor) -> CubeTensor {
            let x = into_contiguous(x);
            unit(&x, None).unwrap_or_else(|| reference::l2_normalize::<Self>(x))
        }

        fn unit_rows_backward(grad: CubeTensor, x: CubeTensor) -> CubeTensor {
            let (grad, x) = (into_contiguous(grad), into_contiguous(x));
            unit(&x, Some(&grad)).unwrap_or_else(|| reference::unit_rows_backward::<Self>(grad, x))
        }

        fn segment_mean(x: CubeTensor, _index: CubeTensor, users: CubeTensor) -> MeanRows<Self> {
            let (x, (users, turned)) = (into_contiguous(x), named(users));
            means(&x, (&users, turned)).unwrap_or_else(|| reference::segment_mean::<Self>(x, users))
        }

        fn means_at_backward(
            grad: CubeTensor,
            shares: CubeTensor,
            index: CubeTensor,
        ) -> CubeTensor {
            let (grad, shares) = (into_contiguous(grad), into_contiguous(shares));
            let index = numbers(index);
            scaled(&grad, &shares, &index)
                .unwrap_or_else(|| reference::means_at_backward::<Self>(grad, shares, index))
        }

        fn keyed_rows(
            x: CubeTensor,
            value: CubeTensor,
            index: CubeTensor,
            _users: CubeTensor,
        ) -> KeyedRows<Self> {
            let (x, value) = (into_contiguous(x), into_contiguous(value));
            let index = numbers(index);
            keyed(&x, &value, &index)
                .unwrap_or_else(|| reference::keyed_rows::<Self>(x, value, index))
        }

        fn keyed_rows_backward(
            grads: KeyedRows<Self>,
            x: CubeTensor,
            users: CubeTensor,
        ) -> KeyedGrads<Self> {
            let grads = KeyedRows {
                query: into_contiguous(grads.query),
                key: into_contiguous(grads.key),
                value: into_contiguous(grads.value),
            };
            let (x, (users, turned)) = (into_contiguous(x), named(users));
            keyed_backward(&grads, &x, (&users, turned))
                .unwrap_or_else(|| reference::keyed_rows_backward::<Self>(grads, x, users))
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

    /// Rows made as long as 1, or the gradient by them.
    fn unit(x: &CubeTensor, grad: Option<&CubeTensor>) -> Option<CubeTensor> {
        if uses_reference() {
            return None;
        }
        let dtype = if grad.is_some() { x.dtype } else { sums_of(x) };
        let shape = x.meta.shape();
        let made = empty(x, shape.dims::<4>(), dtype);
        let grad = grad.map(|grad| &grad.handle);
        rows::l2_normalize(&x.client, matrix(shape), typed(x), grad, &made.handle).ok()?;
        Some(made)
    }

    fn means(
        x: &CubeTensor,
        (users, turned): (&CubeTensor, bool),
    ) -> Option<MeanRows<CubeBackend>> {
        let of = indexed(x, users).turned(turned);
        if uses_reference() || of.rows == 0 {
            return None;
        }
        let [batch, heads, rows, _] = users.meta.shape().dims();
        let means = empty(x, [batch, heads, rows, of.width], x.dtype);
        let shares = empty(x, [batch, heads, rows], sums_of(x));
        let made = [&means.handle, &shares.handle];
        mean_rows(&x.client, &of, typed(x), &users.handle, made).ok()?;
        Some(MeanRows { means, shares })
    }

    /// The rows of `grad` at `[batch, heads, places]`, times their shares.
    fn scaled(grad: &CubeTensor, shares: &CubeTensor, index: &CubeTensor) -> Option<CubeTensor> {
        let [batch, heads, places] = index.meta.shape().dims();
        let by_one = reshaped(index.clone(), [batch, heads, places, 1]);
        let of = indexed(grad, &by_one);
        if uses_reference() || of.rows == 0 {
            return None;
        }
        let out = empty(grad, [batch, heads, places, of.width], grad.dtype);
        let (shares, made) = (&shares.handle, &out.handle);
        gather_scaled_rows(&grad.client, &of, typed(grad), &by_one.handle, shares, made).ok()?;
        Some(out)
    }

    fn keyed(
        x: &CubeTensor,
        value: &CubeTensor,
        index: &CubeTensor,
    ) -> Option<KeyedRows<CubeBackend>> {
        let [batch, heads, places] = index.meta.shape().dims();
        let by_one = reshaped(index.clone(), [batch, heads, places, 1]);
        let of = indexed(x, &by_one);
        if uses_reference() || of.rows == 0 {
            return None;
        }
        let value_dim = value.meta.shape()[3];
        let made = |dim: usize| empty(x, [batch, heads, places, dim], x.dtype);
        let (query, key, taken) = (made(of.width), made(of.width), made(value_dim));
        rows::keyed_rows(
            &x.client,
            &of,
            value_dim,
            typed(x),
            [&value.handle, &index.handle],
            [&query.handle, &key.handle, &taken.handle],
        )
        .ok()?;
        Some(KeyedRows {
            query,
            key,
            value: taken,
        })
    }

    fn keyed_backward(
        grads: &KeyedRows<CubeBackend>,
        x: &CubeTensor,
        (users, turned): (&CubeTensor, bool),
    ) -> Option<KeyedGrads<CubeBackend>> {
        let of = indexed(&grads.query, users).turned(turned);
        if uses_reference() || of.rows == 0 {
            return None;
        }
        let [batch, heads, rows, _] = users.meta.shape().dims();
        let value_dim = grads.value.meta.shape()[3];
        let made = |dim: usize| empty(x, [batch, heads, rows, dim], x.dtype);
        let (by_x, by_value) = (made(of.width), made(value_dim));
        rows::keyed_rows_backward(
            &x.client,
            &of,
            value_dim,
            typed(x),
            &users.handle,
            [&grads.query.handle, &grads.key.handle, &grads.value.handle],
            [&by_x.handle, &by_value.handle],
        )
        .ok()?;
        Some(KeyedGrads {
            x: by_x,
            value: by_value,
        })
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
        let out = empty(own, own.meta.shape().dims::<4>(), own.dtype);
        let lse = empty(own, inputs.own_lse.meta.shape().dims::<3>(), sums_of(own));
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
        let like = |x: &CubeTensor| empty(x, x.meta.shape().dims::<4>(), x.dtype);
        let like_lse = |x: &CubeTensor| empty(x, x.meta.shape().dims::<3>(), x.dtype);
        let made: MergedGrads<CubeBackend> = MergedGrads {
            own: like(&inputs.own),
            own_lse: like_lse(&inputs.own_lse),
            rows: like(&inputs.rows),
            lses: like_lse(&inputs.lses),
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
}
