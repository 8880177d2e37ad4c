//! Autodiff steps with several outputs.
//!
//! A step of Burn's autodiff has one output. So the node of a step with several is hidden, and each of its outputs is a step after it
//! ([`OutputStep`]), which runs before it in the backward pass and leaves its gradient in a cell. The hidden node's own gradient only says that one
//! of them did: the step consumes it, and takes the gradients from the cell.

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::Backend;
use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;

/// The gradients with respect to `N` outputs, as far as their steps have run.
#[derive(Clone, Debug)]
pub struct OutputGradients<B: Backend, const N: usize>(Arc<Mutex<[Option<FloatTensor<B>>; N]>>);

impl<B: Backend, const N: usize> Default for OutputGradients<B, N> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new([const { None }; N])))
    }
}

impl<B: Backend, const N: usize> OutputGradients<B, N> {
    /// Those that there are. The cell is empty afterwards.
    pub fn take(&self) -> [Option<FloatTensor<B>>; N] {
        let mut cell = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *cell, [const { None }; N])
    }

    /// Leaves the gradient with respect to one output; whether it is the first.
    fn put(&self, index: usize, grad: FloatTensor<B>) -> bool {
        let mut cell = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let first = cell.iter().all(Option::is_none);
        cell[index] = Some(grad);
        first
    }

    /// Makes `value`, the output `index` of the hidden step whose node is `step`'s, a node of its own.
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

/// An output of a step with `N` of them.
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
        // In place of a gradient of the hidden node: nothing is computed with it.
        if let ([Some(parent)], true) = (ops.parents, first) {
            grads.register::<B>(parent.id, grad);
        }
    }
}
