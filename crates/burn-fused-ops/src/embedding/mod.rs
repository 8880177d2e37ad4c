//! Embedding lookup and its gradient with respect to the table.
#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
mod backend;
#[doc(hidden)]
pub mod ops;

pub(crate) mod reference;

use crate::embedding::ops::EmbeddingOps;
use burn_blocksparse::internal::prelude::*;

/// Gathers the rows `ids` of a table. The gradient with respect to the table, `dE[v] = Σ dy[t]` over the positions `t` with `ids[t] = v`, is summed in a
/// fixed order, so it has the same bits every time.
///
/// This is one node of the autodiff graph, which stores the ids. Ids are not read back from the device and so not checked: an id that is not below `vocab`
/// behaves as in the backend's `select`.
///
/// ```
/// use burn::tensor::{Device, Distribution, Int, Tensor};
/// use burn_fused_ops::embedding;
///
/// let device = Device::flex().autodiff();
/// let table = Tensor::<2>::random([256, 8], Distribution::Default, &device).require_grad();
/// let ids = Tensor::<2, Int>::from_data([[3, 1, 3], [0, 3, 255]], &device);
/// let rows = embedding(table.clone(), ids)?;
/// assert_eq!(rows.dims(), [2, 3, 8]);
/// let gradients = rows.sum().backward();
/// let by_table = table.grad(&gradients).unwrap();
/// assert_eq!(by_table.slice([3..4, 0..1]).into_scalar::<f32>(), 3.0);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// - `table`: `[vocab, width]`
/// - `ids`: `[batch, seq]`
/// - result: `[batch, seq, width]`
///
/// # Errors
/// [`OpError`] if the devices differ, or no feature of this crate serves them.
pub fn embedding(table: Tensor<2>, ids: Tensor<2, Int>) -> Result<Tensor<3>, OpError> {
    served(&table.device())?;
    same_device("ids' device", &table.device(), "table's", &ids.device())?;
    let [batch, seq] = ids.dims();
    let [_, width] = table.dims();
    // Ids have no gradient and no node in the graph.
    let ids = ids.without_autodiff().reshape([batch * seq]);
    let rows = <Dispatch as EmbeddingOps>::table_rows(table.into_dispatch(), ids.into_dispatch());
    Ok(Tensor::<2>::from_dispatch(rows).reshape([batch, seq, width]))
}

/// Returns the gradient of [`embedding`] with respect to the table alone, for callers that keep no graph, in the dtype that sums of `grad` have. Ids that are
/// not below `vocab` are skipped on devices with kernels and are an error of the backend on others.
///
/// # Shapes
/// - `ids`: `[positions]`
/// - `grad`: `[positions, width]`
/// - result: `[vocab, width]`, without autodiff
///
/// # Errors
/// [`OpError`] if the numbers of ids and gradients differ, the devices differ, or no feature of this crate serves them.
pub fn embedding_backward(
    ids: Tensor<1, Int>,
    grad: Tensor<2>,
    vocab: usize,
) -> Result<Tensor<2>, OpError> {
    check_backward(&ids, &grad)?;
    let (ids, grad) = (ids.without_autodiff(), grad.without_autodiff());
    let dtype = accumulate_in(grad.dtype().into());
    let (ids, grad) = (ids.into_dispatch(), grad.into_dispatch());
    let table = <Dispatch as EmbeddingOps>::table_gradient(ids, grad, vocab, dtype);
    Ok(Tensor::from_dispatch(table))
}

/// Returns the plan of the backward pass of [`embedding`].
///
/// # Errors
/// Those of [`embedding`].
pub fn explain(table: &Tensor<2>, ids: &Tensor<2, Int>) -> Result<OpPlan, OpError> {
    served(&table.device())?;
    same_device("ids' device", &table.device(), "table's", &ids.device())?;
    let [batch, seq] = ids.dims();
    let positions = batch * seq;
    Ok(burn_blocksparse::op_plan!(&table.device(), |device| {
        use crate::kernels::rows::embedding::{EmbeddingKind, embedding_text};
        use burn_blocksparse::internal::cube::dtype_to_elem_type;

        let dtypes = [table.dtype(), table.dtype(), ids.dtype()];
        let kind = EmbeddingKind::new(table.dims(), dtypes.map(dtype_to_elem_type));
        embedding_text(&device.client(), &kind, positions)
    }))
}

fn check_backward(ids: &Tensor<1, Int>, grad: &Tensor<2>) -> Result<(), OpError> {
    served(&grad.device())?;
    same_device("ids' device", &grad.device(), "grad's", &ids.device())?;
    let ([ids], [positions, _]) = (ids.dims(), grad.dims());
    blocksparse::ensure! { OpError; ids == positions => "ids' length", format!("{positions}, grad's rows"), ids; }
    Ok(())
}
