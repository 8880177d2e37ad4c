use burn::tensor::Tensor;

/// A tensor without autodiff, with it if another one has it, and with the checkpointing strategy of that.
pub(crate) fn in_graph_of<const D: usize, const E: usize>(
    other: &Tensor<E>,
    x: Tensor<D>,
) -> Tensor<D> {
    if !other.is_autodiff() {
        return x;
    }
    match other.gradient_checkpointing_strategy() {
        Some(strategy) => x.autodiff().with_gradient_checkpointing_strategy(strategy),
        None => x.autodiff(),
    }
}
