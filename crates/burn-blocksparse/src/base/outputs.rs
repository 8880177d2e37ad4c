//! Autodiff steps with several outputs.
//!
//! A step of Burn's autodiff has one output. A step with several is therefore a hidden node, followed by a step for each output
//! ([`OutputStep`]). In the backward pass these run first and store their gradients in a cell. The gradient of the hidden node only signals that at least one
//! of them ran: the hidden step discards it and takes the gradients from the cell.

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::Backend;
use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;

/// The gradients with respect to `N` outputs whose steps have run.
#[derive(Clone, Debug)]
pub struct OutputGradients<B: Backend, const N: usize>(Arc<Mutex<[Option<FloatTensor<B>>; N]>>);

impl<B: Backend, const N: usize> Default for OutputGradients<B, N> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new([const { None }; N])))
    }
}

impl<B: Backend, const N: usize> OutputGradients<B, N> {
    /// Takes the stored gradients and empties the cell.
    pub fn take(&self) -> [Option<FloatTensor<B>>; N] {
        let mut cell = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *cell, [const { None }; N])
    }

    /// Stores the gradient with respect to one output. Returns whether it is the first.
    fn put(&self, index: usize, grad: FloatTensor<B>) -> bool {
        let mut cell = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let first = cell.iter().all(Option::is_none);
        cell[index] = Some(grad);
        first
    }

    /// Creates a node for `value`, output `index` of the hidden step whose node is that of `step`.
    pub fn node<C: CheckpointStrategy>(
        &self,
        step: &FloatTensor<Autodiff<B, C>>,
        index: usize,
        value: FloatTensor<B>,
    ) -> FloatTensor<Autodiff<B, C>> {
        let prepared = OutputStep::<N>.prepare::<C>([step.node()]).compute_bound();
        match prepared.stateful() {
            OpsKind::Tracked(prep) => {
                let state = OutputState {
                    index,
                    grads: self.clone(),
                };
                prep.finish(state, value)
            }
            OpsKind::UnTracked(prep) => prep.finish(value),
        }
    }
}

/// One output of a step with `N` outputs.
#[derive(Debug)]
struct OutputStep<const N: usize>;

#[derive(Clone, Debug)]
struct OutputState<B: Backend, const N: usize> {
    index: usize,
    grads: OutputGradients<B, N>,
}

impl<B: Backend, const N: usize> Backward<B, 1> for OutputStep<N> {
    type State = OutputState<B, N>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let first = ops.state.grads.put(ops.state.index, grad.clone());
        // A placeholder for the gradient of the hidden node: nothing is computed with it.
        if let ([Some(parent)], true) = (ops.parents, first) {
            grads.register::<B>(parent.id, grad);
        }
    }
}
