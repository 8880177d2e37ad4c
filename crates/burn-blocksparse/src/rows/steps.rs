//! Steps of rows by an index in Burn's autodiff graph.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{AutodiffBackend, Backend};

use crate::base::outputs::{OutputGradients, or_zeros};
use crate::base::values::OutputGrads;
use crate::rows::ops::{
    KeyedGrads, KeyedRows, MeanRows, MergedGrads, MergedOutput, MergedParts, RowOps,
};

/// The step of merged parts, whose outputs are out and lse.
#[derive(Debug)]
struct Merged;

#[derive(Clone, Debug)]
struct MergedState<B: Backend> {
    inputs: MergedParts<B>,
    grads: OutputGradients<B, 2>,
}

impl<B: RowOps> Backward<B, 4> for Merged {
    type State = MergedState<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 4>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        grads.consume::<B>(&ops.node);
        let MergedState {
            inputs,
            grads: cell,
        } = ops.state;
        let [out, lse] = cell.take();
        let by = OutputGrads {
            out: or_zeros::<B>(out, &inputs.own),
            lse: lse.into(),
        };
        let MergedGrads {
            own,
            own_lse,
            rows,
            lses,
        } = B::merged_parts_backward(inputs, by);
        for (parent, grad) in ops.parents.into_iter().zip([own, own_lse, rows, lses]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

/// The step of keyed rows, whose outputs are queries, keys and values.
#[derive(Debug)]
struct Keyed;

#[derive(Clone, Debug)]
struct KeyedState<B: Backend> {
    x: FloatTensor<B>,
    users: IntTensor<B>,
    output: KeyedRows<B>,
    grads: OutputGradients<B, 3>,
}

impl<B: RowOps> Backward<B, 2> for Keyed {
    type State = KeyedState<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        grads.consume::<B>(&ops.node);
        let KeyedState {
            x,
            users,
            output,
            grads: cell,
        } = ops.state;
        let [query, key, value] = cell.take();
        let by = KeyedRows {
            query: or_zeros::<B>(query, &output.query),
            key: or_zeros::<B>(key, &output.key),
            value: or_zeros::<B>(value, &output.value),
        };
        let KeyedGrads { x, value } = B::keyed_rows_backward(by, x, users);
        for (parent, grad) in ops.parents.into_iter().zip([x, value]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

/// The step behind rows as long as 1.
#[derive(Debug)]
struct Unit;

impl<B: RowOps> Backward<B, 1> for Unit {
    /// The rows.
    type State = FloatTensor<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        if let [Some(parent)] = ops.parents {
            grads.register::<B>(parent.id, B::unit_rows_backward(grad, ops.state));
        }
    }
}

/// The step behind means.
#[derive(Debug)]
struct MeansAt;

impl<B: RowOps> Backward<B, 1> for MeansAt {
    /// The shares, and the row of each place.
    type State = (FloatTensor<B>, IntTensor<B>);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let (shares, index) = ops.state;
        if let [Some(parent)] = ops.parents {
            grads.register::<B>(parent.id, B::means_at_backward(grad, shares, index));
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
            grads.register::<B>(parent.id, B::gather_rows(grad, index, users));
        }
    }
}

impl<B: RowOps, C: CheckpointStrategy> RowOps for Autodiff<B, C> {
    fn segment_sum(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        users: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let prepared = SumsAt.prepare::<C>([x.node()]).compute_bound();
        let x = x.into_primitive();
        match prepared.stateful() {
            OpsKind::Tracked(prep) => {
                let sums = B::segment_sum(x, index.clone(), users.clone());
                prep.finish([index, users], sums)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::segment_sum(x, index, users)),
        }
    }

    fn gather_rows(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        users: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let prepared = RowsAt.prepare::<C>([x.node()]).compute_bound();
        let x = x.into_primitive();
        match prepared.stateful() {
            OpsKind::Tracked(prep) => {
                let rows = B::gather_rows(x, index, users.clone());
                prep.finish(users, rows)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::gather_rows(x, index, users)),
        }
    }

    fn l2_normalize(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let prepared = Unit.prepare::<C>([x.node()]).compute_bound();
        let x = x.into_primitive();
        let unit = B::l2_normalize(x.clone());
        match prepared.stateful() {
            OpsKind::Tracked(prep) => prep.finish(x, unit),
            OpsKind::UnTracked(prep) => prep.finish(unit),
        }
    }

    /// Overridden so that the reference does not itself run through autodiff.
    fn unit_rows_backward(_grad: FloatTensor<Self>, _x: FloatTensor<Self>) -> FloatTensor<Self> {
        unimplemented!("l2_normalize is differentiable once")
    }

    fn segment_mean(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        users: IntTensor<Self>,
    ) -> MeanRows<Self> {
        let prepared = MeansAt.prepare::<C>([x.node()]).compute_bound();
        let MeanRows { means, shares } = B::segment_mean(x.into_primitive(), index.clone(), users);
        let constant = <Self as AutodiffBackend>::from_inner(shares.clone());
        let means = match prepared.stateful() {
            OpsKind::Tracked(prep) => prep.finish((shares, index), means),
            OpsKind::UnTracked(prep) => prep.finish(means),
        };
        MeanRows {
            means,
            shares: constant,
        }
    }

    fn keyed_rows(
        x: FloatTensor<Self>,
        value: FloatTensor<Self>,
        index: IntTensor<Self>,
        users: IntTensor<Self>,
    ) -> KeyedRows<Self> {
        let nodes = [x.node(), value.node()];
        let prepared = Keyed.prepare::<C>(nodes).compute_bound();
        let (x, value) = (x.into_primitive(), value.into_primitive());
        let output = B::keyed_rows(x.clone(), value, index, users.clone());
        let KeyedRows { query, key, value } = output.clone();
        match prepared.stateful() {
            OpsKind::Tracked(prep) => {
                let grads = OutputGradients::<B, 3>::default();
                let state = KeyedState {
                    x,
                    users,
                    output,
                    grads: grads.clone(),
                };
                let step = prep.finish(state, query.clone());
                KeyedRows {
                    query: grads.node::<C>(&step, 0, query),
                    key: grads.node::<C>(&step, 1, key),
                    value: grads.node::<C>(&step, 2, value),
                }
            }
            OpsKind::UnTracked(prep) => KeyedRows {
                query: prep.finish(query),
                key: <Self as AutodiffBackend>::from_inner(key),
                value: <Self as AutodiffBackend>::from_inner(value),
            },
        }
    }

    fn merged_parts(inputs: MergedParts<Self>) -> MergedOutput<Self> {
        let nodes = [
            inputs.own.node(),
            inputs.own_lse.node(),
            inputs.rows.node(),
            inputs.lses.node(),
        ];
        let prepared = Merged.prepare::<C>(nodes).compute_bound();
        let inputs = MergedParts {
            own: inputs.own.into_primitive(),
            own_lse: inputs.own_lse.into_primitive(),
            rows: inputs.rows.into_primitive(),
            lses: inputs.lses.into_primitive(),
            places: inputs.places,
            choices: inputs.choices,
        };
        let MergedOutput { out, lse } = B::merged_parts(inputs.clone());
        match prepared.stateful() {
            OpsKind::Tracked(prep) => {
                let grads = OutputGradients::<B, 2>::default();
                let state = MergedState {
                    inputs,
                    grads: grads.clone(),
                };
                let step = prep.finish(state, lse.clone());
                MergedOutput {
                    out: grads.node::<C>(&step, 0, out),
                    lse: grads.node::<C>(&step, 1, lse),
                }
            }
            OpsKind::UnTracked(prep) => MergedOutput {
                out: prep.finish(out),
                lse: <Self as AutodiffBackend>::from_inner(lse),
            },
        }
    }

    /// Overridden so that the reference does not itself run through autodiff.
    fn merged_parts_backward(
        _inputs: MergedParts<Self>,
        _grads: OutputGrads<Self>,
    ) -> MergedGrads<Self> {
        unimplemented!("merged_parts is differentiable once")
    }

    /// Overridden so that the reference does not itself run through autodiff.
    fn keyed_rows_backward(
        _grads: KeyedRows<Self>,
        _x: FloatTensor<Self>,
        _users: IntTensor<Self>,
    ) -> KeyedGrads<Self> {
        unimplemented!("keyed_rows is differentiable once")
    }

    /// Overridden so that the reference does not itself run through autodiff.
    fn means_at_backward(
        _grad: FloatTensor<Self>,
        _shares: FloatTensor<Self>,
        _index: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        unimplemented!("segment_mean is differentiable once")
    }

    /// Overridden so that the reference does not itself run through autodiff.
    fn rows_at_backward(_grad: FloatTensor<Self>, _users: IntTensor<Self>) -> FloatTensor<Self> {
        unimplemented!("gather_rows is differentiable once")
    }
}
