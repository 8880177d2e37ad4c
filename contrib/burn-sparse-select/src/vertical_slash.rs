//! Vertical-slash layouts from tensors of columns and diagonals.

use blocksparse::{BlockLayout, LayoutShape, Pattern};
use burn::tensor::{Int, Tensor, TensorData, Transaction};

use burn_blocksparse::OpError;

/// Builds the vertical-slash layout (Jiang et al., MInference, 2024, section 3) of columns and diagonals that were selected at run time. Head `h` allows
/// `j ≤ i ∧ (j ∈ vertical[h] ∨ i − j ∈ slash[h])`, as [`Pattern::vertical_slash`] does. `i` and `j` are positions: with `seq_q ≠ seq_kv` query row `r` is at
/// `r + seq_kv − seq_q`. Duplicates are allowed, so heads with fewer columns or diagonals can pad their rows.
///
/// The tensors are **read back to the host**, which waits for the device, and the layout is built there, in the time of [`BlockLayout::new`]. Call it once per
/// prompt, not per layer and step. [`BlockLayout::stack_batch`] combines layouts of batch entries.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_blocksparse::{LayoutShape, Pattern};
/// use burn_sparse_select::vertical_slash_layout;
///
/// let device = Device::flex();
/// let vertical = Tensor::<2, Int>::from_data([[0, 33], [0, 0]], &device);
/// let slash = Tensor::<2, Int>::from_data([[0, 1, 9], [0, 1, 2]], &device);
/// let shape = LayoutShape { heads: 2, seq_q: 64, seq_kv: 64, block_size: 8 };
/// let layout = vertical_slash_layout(vertical, slash, shape)?;
/// let heads = [
///     Pattern::vertical_slash([0, 33], [0, 1, 9]),
///     Pattern::vertical_slash([0], [0, 1, 2]),
/// ];
/// assert_eq!(layout, Pattern::per_head(heads).layout(2, 64, 8)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `vertical`: `[heads, columns]`, key positions in `0..seq_kv`
/// - `slash`: `[heads, diagonals]`, distances from a query back to a key, in `0..seq_kv`
///
/// # Errors
/// [`OpError`] if the number of heads differs from the shape's, an element is out of range, or no layout can have the shape.
pub fn vertical_slash_layout(
    vertical: Tensor<2, Int>,
    slash: Tensor<2, Int>,
    shape: LayoutShape,
) -> Result<BlockLayout, OpError> {
    check(&vertical, &slash, shape)?;
    let numbers = read(vertical, slash).try_execute();
    build(numbers.map_err(OpError::read)?, shape)
}

/// Builds the layout of [`vertical_slash_layout`], and yields to other tasks while it waits for the device. On the web, GPUs can only be read this way.
///
/// # Errors
/// Those of [`vertical_slash_layout`].
pub async fn vertical_slash_layout_async(
    vertical: Tensor<2, Int>,
    slash: Tensor<2, Int>,
    shape: LayoutShape,
) -> Result<BlockLayout, OpError> {
    check(&vertical, &slash, shape)?;
    let numbers = read(vertical, slash).execute_async().await;
    build(numbers.map_err(OpError::read)?, shape)
}

fn check(
    vertical: &Tensor<2, Int>,
    slash: &Tensor<2, Int>,
    shape: LayoutShape,
) -> Result<(), OpError> {
    for (argument, tensor) in [("vertical's heads", vertical), ("slash's heads", slash)] {
        OpError::expect_same(argument, shape.heads, "the shape's", tensor.dims()[0])?;
    }
    Ok(())
}

/// Reads both tensors in one transaction.
fn read(vertical: Tensor<2, Int>, slash: Tensor<2, Int>) -> Transaction {
    Transaction::default().register(vertical).register(slash)
}

fn build(numbers: Vec<TensorData>, shape: LayoutShape) -> Result<BlockLayout, OpError> {
    let [vertical, slash] = &numbers[..] else {
        unreachable!("two tensors were read")
    };
    let vertical = per_head("vertical", vertical, shape)?;
    let slash = per_head("slash", slash, shape)?;
    let heads = vertical.into_iter().zip(slash);
    let pattern =
        Pattern::per_head(heads.map(|(vertical, slash)| Pattern::vertical_slash(vertical, slash)));
    Ok(BlockLayout::new(&pattern, shape)?)
}

/// Returns the elements of each head, if they are key positions.
fn per_head(
    argument: &'static str,
    numbers: &TensorData,
    shape: LayoutShape,
) -> Result<Vec<Vec<usize>>, OpError> {
    let positions = (numbers.iter::<i64>())
        .map(|number| match usize::try_from(number) {
            Ok(position) if position < shape.seq_kv => Ok(position),
            _ => Err(OpError::argument(
                argument,
                format!(
                    "at least 0 and less than {}, the shape's seq_kv",
                    shape.seq_kv
                ),
                number,
            )),
        })
        .collect::<Result<Vec<_>, _>>()?;
    let count = positions.len() / shape.heads.max(1);
    Ok((0..shape.heads)
        .map(|head| positions[head * count..(head + 1) * count].to_vec())
        .collect())
}
