//! The one step of Burn's autodiff from which all ops are built: a forward pass on untracked tensors that returns its backward pass.
//!
//! An op has a list of float inputs and a list of outputs, of which some may be missing. A step of Burn has one output. An op with several
//! outputs is a hidden node (`OutputGradients`) followed by one step per output.

use std::fmt;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::FloatDType;

pub use burn::backend::AutodiffBackend;
pub use burn::backend::autodiff::Autodiff;
pub use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

use crate::base::outputs::OutputGradients;
use crate::base::values::OptFloat;

/// A float tensor with its autodiff history.
pub type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

/// Float tensors of a call, or gradients with respect to them. Some may be missing.
pub type Floats<B, const N: usize> = [Option<FloatTensor<B>>; N];

/// Serves as `reads` of an op whose backward pass reads no input.
pub fn nothing<const N: usize>(_wanted: [bool; N]) -> [bool; N] {
    [false; N]
}

/// Serves as `reads` of an op whose backward pass reads every input.
pub fn everything<const N: usize>(_wanted: [bool; N]) -> [bool; N] {
    [true; N]
}

/// Creates an op with one output and a custom gradient.
///
/// - `forward` receives the inputs and which of their gradients are wanted. It returns the output and the backward pass.
/// - The backward pass receives the inputs that it `reads` and the gradient with respect to the output. It returns the gradients with respect to the inputs.
///   Gradients
///   that are not wanted are dropped.
/// - Inputs that it `reads` are stored with the checkpointer, which may recompute them. Everything else that it needs it captures.
pub fn custom_gradient<B, C, const IN: usize, F>(
    inputs: [Option<Tracked<B, C>>; IN],
    reads: impl FnOnce([bool; IN]) -> [bool; IN],
    forward: impl FnOnce(Floats<B, IN>, [bool; IN]) -> (FloatTensor<B>, F),
) -> Tracked<B, C>
where
    B: Backend,
    C: CheckpointStrategy,
    F: FnOnce(Floats<B, IN>, FloatTensor<B>) -> Floats<B, IN> + Send + 'static,
{
    let [output] = custom_gradients::<B, C, _, _, _>(inputs, reads, |inputs, wanted| {
        let (output, backward) = forward(inputs, wanted);
        let backward = |read: Floats<B, IN>, [grad]: Floats<B, 1>| backward(read, there(grad));
        ([Some(output)], backward)
    });
    there(output)
}

/// Creates an op like [`custom_gradient`] with several outputs. The backward pass receives the gradients of the outputs that a loss depends on, at least one.
pub fn custom_gradients<B, C, const IN: usize, const OUT: usize, F>(
    inputs: [Option<Tracked<B, C>>; IN],
    reads: impl FnOnce([bool; IN]) -> [bool; IN],
    forward: impl FnOnce(Floats<B, IN>, [bool; IN]) -> (Floats<B, OUT>, F),
) -> [Option<Tracked<B, C>>; OUT]
where
    B: Backend,
    C: CheckpointStrategy,
    F: FnOnce(Floats<B, IN>, Floats<B, OUT>) -> Floats<B, IN> + Send + 'static,
{
    let constant = <Autodiff<B, C> as AutodiffBackend>::from_inner;
    // A missing input is replaced by a constant, so that a step always has as many inputs as the op.
    let missing = || constant(there(inputs.iter().flatten().next()).primitive().clone());
    let nodes = (inputs.each_ref()).map(|input| match input {
        Some(input) => input.node(),
        None => missing().node(),
    });
    let wanted = (inputs.each_ref()).map(|input| input.as_ref().is_some_and(|x| x.is_tracked()));
    let is_read = match wanted.contains(&true) {
        true => reads(wanted),
        false => [false; IN],
    };
    let read: [_; IN] = std::array::from_fn(|at| inputs[at].clone().filter(|_| is_read[at]));
    let inputs = inputs.map(|input| input.map(|input| input.into_primitive()));
    let (outputs, backward) = forward(inputs, wanted);

    let mut there_are = (0..OUT).filter(|at| outputs[*at].is_some());
    let (first, is_only) = (there(there_are.next()), there_are.next().is_none());
    let by_outputs = OutputGradients::<B, OUT>::default();
    let step = Step {
        backward,
        read: read.each_ref().map(|input| input.as_ref().map(|x| x.id())),
        only: is_only.then_some(first),
        by_outputs: by_outputs.clone(),
    };
    let node = match step.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            for input in read.iter().flatten() {
                prep.checkpoint(input);
            }
            let node = prep.finish((), there(outputs[first].clone()));
            if !is_only {
                let mut at = 0..OUT;
                return outputs.map(|output| {
                    let at = there(at.next());
                    output.map(|output| by_outputs.node::<C>(&node, at, output))
                });
            }
            node
        }
        OpsKind::UnTracked(prep) => prep.finish(there(outputs[first].clone())),
    };
    let mut outputs = outputs.map(|output| output.map(constant));
    outputs[first] = Some(node);
    outputs
}

/// Unwraps a tensor that every call has.
pub fn there<T>(tensor: Option<T>) -> T {
    tensor.expect("a tensor that every call has")
}

/// Returns `gradient`, or zeros in the shape of an output that no loss depends on.
pub fn or_zeros<B: Backend>(
    gradient: Option<FloatTensor<B>>,
    output: &FloatTensor<B>,
) -> FloatTensor<B> {
    gradient
        .unwrap_or_else(|| B::float_zeros(output.shape(), &output.device(), output.dtype().into()))
}

/// Returns the dtype of a tensor's gradient.
pub fn own_dtype<T: TensorMetadata>(tensor: &T) -> FloatDType {
    tensor.dtype().into()
}

/// Returns the dtypes of the wanted gradients.
pub fn wanted_dtypes<T: TensorMetadata, const N: usize>(
    inputs: &[Option<T>; N],
    wanted: [bool; N],
) -> [Option<FloatDType>; N] {
    std::array::from_fn(|at| inputs[at].as_ref().filter(|_| wanted[at]).map(own_dtype))
}

/// Returns a tensor without its history.
pub fn inner<B: Backend, C: CheckpointStrategy>(tensor: OptFloat<Autodiff<B, C>>) -> OptFloat<B> {
    let tensor = tensor.into_option();
    tensor.map(|tensor| tensor.into_primitive()).into()
}

/// Detaches a tensor from the graph.
pub fn constant<B: Backend, C: CheckpointStrategy>(
    tensor: OptFloat<B>,
) -> OptFloat<Autodiff<B, C>> {
    let tensor = tensor.into_option();
    tensor
        .map(<Autodiff<B, C> as AutodiffBackend>::from_inner)
        .into()
}

struct Step<B: Backend, F, const IN: usize, const OUT: usize> {
    backward: F,
    read: [Option<NodeId>; IN],
    /// The only output, whose node is the step's own, or `None` if there are several.
    only: Option<usize>,
    by_outputs: OutputGradients<B, OUT>,
}

impl<B: Backend, F, const IN: usize, const OUT: usize> fmt::Debug for Step<B, F, IN, OUT> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::any::type_name::<F>())
    }
}

impl<B, F, const IN: usize, const OUT: usize> Backward<B, IN> for Step<B, F, IN, OUT>
where
    B: Backend,
    F: FnOnce(Floats<B, IN>, Floats<B, OUT>) -> Floats<B, IN> + Send + 'static,
{
    type State = ();

    fn backward(
        self,
        ops: Ops<Self::State, IN>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let own = grads.consume::<B>(&ops.node);
        let mut by_outputs = self.by_outputs.take();
        match self.only {
            Some(only) => by_outputs[only] = Some(own),
            None => drop(own),
        }
        let read = (self.read).map(|id| id.map(|id| checkpointer.retrieve_node_output(id)));
        let made = (self.backward)(read, by_outputs);
        for (parent, grad) in ops.parents.into_iter().zip(made) {
            if let (Some(parent), Some(grad)) = (parent, grad) {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}
