//! Rows by an index on each backend, and their step in Burn's autodiff graph.

#[cfg(any(
    feature = "flex",
    feature = "ndarray",
    feature = "cube",
    feature = "autodiff"
))]
use crate::ops::RowOps;

#[cfg(feature = "flex")]
impl RowOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl RowOps for burn::backend::NdArray {}

#[cfg(feature = "cube")]
mod kernels {
    use blocksparse::kernels::rows::{
        GatedBackward, IndexedRows, Typed, gated_sum_backward, gather_rows, row_dots,
    };
    use burn::backend::cubecl::dtype_to_elem_type;
    use burn::backend::ops::{FloatTensorOps, IntTensorOps};
    use burn::tensor::{DType, IntDType, Shape};
    use burn_cubecl::CubeBackend;
    use burn_cubecl::kernel::{cast, into_contiguous};
    use burn_cubecl::tensor::CubeTensor;

    use super::RowOps;
    use crate::backends::cube::{empty, uses_reference};
    use crate::dtype::accumulate_in;
    use crate::ops::{MergedRows, MergedRowsGrads};
    use crate::rows::reference;

    fn numbers(index: CubeTensor) -> CubeTensor {
        into_contiguous(cast(index, IntDType::I32.into()))
    }

    fn typed(x: &CubeTensor) -> Typed<'_> {
        (&x.handle, dtype_to_elem_type(x.dtype))
    }

    /// The sums of rows that `index` `[batch, heads, places, most]` names. `None` if kernels do not take them.
    fn gathered(
        rows: &CubeTensor,
        index: &CubeTensor,
        own: Option<&CubeTensor>,
        weights: Option<&CubeTensor>,
    ) -> Option<CubeTensor> {
        let [batch, heads, places, most] = index.meta.shape().dims();
        let [_, _, count, dim] = rows.meta.shape().dims();
        if uses_reference() || count == 0 {
            return None;
        }
        let out = empty(rows, [batch, heads, places, dim], rows.dtype);
        let of = IndexedRows::new(batch * heads, count, [places, most], dim);
        let others = [own, weights].map(|tensor| tensor.map(|tensor| &tensor.handle));
        let (rows, client) = (typed(rows), &rows.client);
        gather_rows(client, &of, rows, &index.handle, others, &out.handle).ok()?;
        Some(out)
    }

    fn reshaped<const D: usize>(x: CubeTensor, shape: [usize; D]) -> CubeTensor {
        CubeBackend::int_reshape(x, Shape::new(shape))
    }

    impl RowOps for CubeBackend {
        fn rows_at(x: CubeTensor, index: CubeTensor, _users: CubeTensor) -> CubeTensor {
            let [batch, heads, places] = index.meta.shape().dims();
            let (x, index) = (into_contiguous(x), numbers(index));
            let by_one = reshaped(index.clone(), [batch, heads, places, 1]);
            gathered(&x, &by_one, None, None)
                .unwrap_or_else(|| reference::rows_at::<Self>(x, index))
        }

        fn rows_at_backward(grad: CubeTensor, users: CubeTensor) -> CubeTensor {
            let (grad, users) = (into_contiguous(grad), numbers(users));
            gathered(&grad, &users, None, None)
                .unwrap_or_else(|| reference::rows_at_backward::<Self>(grad, users))
        }

        fn merged_rows(inputs: MergedRows<Self>) -> CubeTensor {
            let inputs = contiguous(inputs);
            let MergedRows {
                own,
                rows,
                weights,
                places,
                ..
            } = &inputs;
            gathered(rows, places, Some(own), Some(weights))
                .unwrap_or_else(|| reference::merged_rows::<Self>(inputs))
        }

        fn merged_rows_backward(
            inputs: MergedRows<Self>,
            grad: CubeTensor,
        ) -> MergedRowsGrads<Self> {
            let inputs = contiguous(inputs);
            let grad = into_contiguous(grad);
            backward(&inputs, &grad)
                .unwrap_or_else(|| reference::merged_rows_backward::<Self>(inputs, grad))
        }
    }

    fn contiguous(inputs: MergedRows<CubeBackend>) -> MergedRows<CubeBackend> {
        MergedRows {
            own: into_contiguous(inputs.own),
            rows: into_contiguous(inputs.rows),
            weights: into_contiguous(inputs.weights),
            places: numbers(inputs.places),
            choices: numbers(inputs.choices),
        }
    }

    /// The gradients by rows at places are the gradients of their queries, times their weights; those by weights are products.
    fn backward(
        inputs: &MergedRows<CubeBackend>,
        grad: &CubeTensor,
    ) -> Option<MergedRowsGrads<CubeBackend>> {
        let [batch, heads, queries, dim] = inputs.own.meta.shape().dims();
        let [_, _, places, _] = inputs.rows.meta.shape().dims();
        let most = inputs.places.meta.shape()[3];
        let sums: DType = accumulate_in(inputs.own.dtype.into()).into();
        let weights = |from: usize, to: usize| {
            let ranges = reference::ranges([batch, heads, queries], from..to);
            into_contiguous(CubeBackend::float_slice(inputs.weights.clone(), &ranges))
        };
        let others = reshaped(weights(1, most + 1), [batch, heads, queries * most, 1]);
        let one = |index: CubeTensor, count: usize| reshaped(index, [batch, heads, count, 1]);
        let factors = gathered(&others, &one(inputs.choices.clone(), places), None, None)?;
        let at = reference::queries_of::<CubeBackend>(inputs.choices.clone(), most);
        let at = numbers(one(at, places));
        let rows = gathered(grad, &at, None, Some(&factors))?;

        // A query's own row is a branch, whose gate is its weight.
        let first = weights(0, 1);
        let own = empty(grad, [batch, heads, queries, dim], grad.dtype);
        let own_dots = empty(grad, [batch, heads, queries, 1], sums);
        let pass = GatedBackward {
            grad: typed(grad),
            branches: &[Some(&inputs.own.handle)],
            gates: typed(&first),
            by_branches: &[Some(&own.handle)],
            by_gates: Some(&own_dots.handle),
        };
        gated_sum_backward(&grad.client, [batch * heads * queries, dim], &pass).ok()?;

        let of = IndexedRows::new(batch * heads, places, [queries, most], dim);
        let dots = empty(grad, [batch, heads, queries, most], sums);
        let (client, index) = (&grad.client, &inputs.places.handle);
        let (rows_of, out) = (typed(&inputs.rows), &dots.handle);
        row_dots(client, &of, rows_of, index, &grad.handle, out).ok()?;
        Some(MergedRowsGrads {
            own,
            rows,
            weights: CubeBackend::float_cat(vec![own_dots, dots], 3),
        })
    }
}

#[cfg(feature = "autodiff")]
mod steps {
    use burn::backend::autodiff::Autodiff;
    use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
    use burn::backend::tensor::{FloatTensor, IntTensor};

    use super::RowOps;
    use crate::ops::{MergedRows, MergedRowsGrads};

    /// The step behind merged rows.
    #[derive(Debug)]
    struct Merged;

    impl<B: RowOps> Backward<B, 3> for Merged {
        type State = MergedRows<B>;

        fn backward(
            self,
            ops: Ops<Self::State, 3>,
            grads: &mut Gradients,
            _checkpointer: &mut Checkpointer,
        ) {
            let grad = grads.consume::<B>(&ops.node);
            let MergedRowsGrads { own, rows, weights } = B::merged_rows_backward(ops.state, grad);
            for (parent, grad) in ops.parents.into_iter().zip([own, rows, weights]) {
                if let Some(parent) = parent {
                    grads.register::<B>(parent.id, grad);
                }
            }
        }
    }

    /// The step behind the rows.
    #[derive(Debug)]
    struct RowsAt;

    impl<B: RowOps> Backward<B, 1> for RowsAt {
        /// Which places use each row.
        type State = IntTensor<B>;

        fn backward(
            self,
            ops: Ops<Self::State, 1>,
            grads: &mut Gradients,
            _checkpointer: &mut Checkpointer,
        ) {
            let grad = grads.consume::<B>(&ops.node);
            if let [Some(parent)] = ops.parents {
                grads.register::<B>(parent.id, B::rows_at_backward(grad, ops.state));
            }
        }
    }

    /// The step behind sums.
    #[derive(Debug)]
    struct SumsAt;

    impl<B: RowOps> Backward<B, 1> for SumsAt {
        /// The row of each place, and the places of each row.
        type State = [IntTensor<B>; 2];

        fn backward(
            self,
            ops: Ops<Self::State, 1>,
            grads: &mut Gradients,
            _checkpointer: &mut Checkpointer,
        ) {
            let grad = grads.consume::<B>(&ops.node);
            let [index, users] = ops.state;
            if let [Some(parent)] = ops.parents {
                grads.register::<B>(parent.id, B::rows_at(grad, index, users));
            }
        }
    }

    impl<B: RowOps, C: CheckpointStrategy> RowOps for Autodiff<B, C> {
        fn sums_at(
            x: FloatTensor<Self>,
            index: IntTensor<Self>,
            users: IntTensor<Self>,
        ) -> FloatTensor<Self> {
            let prepared = SumsAt.prepare::<C>([x.node()]).compute_bound();
            let x = x.into_primitive();
            match prepared.stateful() {
                OpsKind::Tracked(prep) => {
                    let sums = B::sums_at(x, index.clone(), users.clone());
                    prep.finish([index, users], sums)
                }
                OpsKind::UnTracked(prep) => prep.finish(B::sums_at(x, index, users)),
            }
        }

        fn rows_at(
            x: FloatTensor<Self>,
            index: IntTensor<Self>,
            users: IntTensor<Self>,
        ) -> FloatTensor<Self> {
            let prepared = RowsAt.prepare::<C>([x.node()]).compute_bound();
            let x = x.into_primitive();
            match prepared.stateful() {
                OpsKind::Tracked(prep) => {
                    let rows = B::rows_at(x, index, users.clone());
                    prep.finish(users, rows)
                }
                OpsKind::UnTracked(prep) => prep.finish(B::rows_at(x, index, users)),
            }
        }

        fn merged_rows(inputs: MergedRows<Self>) -> FloatTensor<Self> {
            let nodes = [inputs.own.node(), inputs.rows.node(), inputs.weights.node()];
            let prepared = Merged.prepare::<C>(nodes).compute_bound();
            let inputs = MergedRows {
                own: inputs.own.into_primitive(),
                rows: inputs.rows.into_primitive(),
                weights: inputs.weights.into_primitive(),
                places: inputs.places,
                choices: inputs.choices,
            };
            match prepared.stateful() {
                OpsKind::Tracked(prep) => {
                    let out = B::merged_rows(inputs.clone());
                    prep.finish(inputs, out)
                }
                OpsKind::UnTracked(prep) => prep.finish(B::merged_rows(inputs)),
            }
        }

        /// Overridden so that the reference does not itself run through autodiff.
        fn merged_rows_backward(
            _inputs: MergedRows<Self>,
            _grad: FloatTensor<Self>,
        ) -> MergedRowsGrads<Self> {
            unimplemented!("merged_rows is differentiable once")
        }

        /// Overridden so that the reference does not itself run through autodiff.
        fn rows_at_backward(
            _grad: FloatTensor<Self>,
            _users: IntTensor<Self>,
        ) -> FloatTensor<Self> {
            unimplemented!("rows_at is differentiable once")
        }
    }
}
