use burn::tensor::Tensor;

/// Puts a tensor without autodiff on the autodiff device if `other` is on one, with its checkpointing strategy.
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
