//! Products with block-sparse weights on wgmma: passes Burn's tensors to `crate::kernels::linear::blocks`.

use crate::kernels::linear::blocks::{
    BlockGradientPlan, BlockProductPlan, BlockTables, Direction, block_gradient, blocks_of_dense,
    dense_of_blocks, multiply_blocks, pack_blocks,
};
use blocksparse::WeightLayout;
use blocksparse_cubecl::rows::{Window, window_sums};
use burn::backend::DType;

use crate::linear::wgmma as dense;
use crate::sparse_linear::values::Pass;
use burn_blocksparse::internal::cube::*;

/// Adds the partial gradients of row groups: `[parts, elements]` to `[elements]`.
fn sum(parts: &CubeTensor) -> Option<CubeTensor> {
    let [count, width] = parts.meta.shape().dims();
    let out = empty(parts, [width], parts.dtype);
    let window = Window {
        start: 0,
        width,
        pitch: width,
    };
    let sizes = [count, 1];
    (window_sums(&parts.client, typed(parts), sizes, window, typed(&out)))
        .is_ok()
        .then_some(out)
}

/// Returns `x · W` or `dy · Wᵀ`.
fn multiplied(
    direction: Direction,
    [x, weight]: [&CubeTensor; 2],
    tables: &BlockTables,
) -> Option<CubeTensor> {
    let client = &x.client;
    let [rows, _] = x.meta.shape().dims();
    let weight = into_contiguous(weight.clone());
    let [_, width] = tables.ends(direction);
    if !tables.is_gathered(direction) {
        let whole = empty(x, tables.widths(), x.dtype);
        dense_of_blocks(client, tables, typed(&weight), typed(&whole)).ok()?;
        let whole = match direction {
            Direction::Forward => whole,
            Direction::Backward => dense::swapped(whole),
        };
        let out = empty(x, [rows, width], x.dtype);
        return dense::multiply(x, &whole, &out).map(|()| out);
    }
    let plan = BlockProductPlan::new(
        client,
        tables,
        direction,
        dense::is_bf16(x.dtype).ok()?,
        rows,
    )
    .ok()?;
    let view = dense::view(x).ok()?;
    let packed = empty(x, [tables.packed_elements(direction)], x.dtype);
    let out = empty(x, [rows, width], x.dtype);
    pack_blocks(client, tables, direction, typed(&weight), typed(&packed)).ok()?;
    (multiply_blocks(
        client,
        &plan,
        tables,
        direction,
        &view,
        &packed.handle,
        &out.handle,
    ))
    .is_ok()
    .then_some(out)
}

/// Returns `xᵀ · dy` of the kept blocks, in f32.
fn gradient([x, dy]: [&CubeTensor; 2], tables: &BlockTables) -> Option<CubeTensor> {
    let client = &x.client;
    let [rows, _] = x.meta.shape().dims();
    if !tables.is_gradient_gathered() {
        let parts = dense::parts(&dense::swapped(x.clone()), dy)?;
        let [count, inputs, outputs] = parts.meta.shape().dims();
        let whole = sum(&reshaped(parts, [count, inputs * outputs].into()))?;
        let out = empty(x, [tables.elements()], DType::F32);
        blocks_of_dense(client, tables, typed(&whole), typed(&out)).ok()?;
        return Some(out);
    }
    let plan = BlockGradientPlan::new(client, tables, dense::is_bf16(x.dtype).ok()?, rows).ok()?;
    let views = [dense::view(x).ok()?, dense::view(dy).ok()?];
    let parts = empty(x, [plan.parts(), tables.elements()], DType::F32);
    block_gradient(client, &plan, tables, [&views[0], &views[1]], &parts.handle).ok()?;
    sum(&parts)
}

/// Computes one of the products of factors of one dtype, if the kernels support them.
pub(crate) fn product(
    pass: Pass,
    factors: [&CubeTensor; 2],
    layout: &WeightLayout,
    dtype: DType,
) -> Option<CubeTensor> {
    let [lhs, rhs] = factors;
    let rows = lhs.meta.shape()[0];
    if lhs.dtype != rhs.dtype || layout.is_empty() || rows == 0 {
        return None;
    }
    dense::is_bf16(lhs.dtype).ok()?;
    let wanted = match pass {
        Pass::Weight => DType::F32,
        _ => lhs.dtype,
    };
    if dtype != wanted {
        return None;
    }
    dense::available(&lhs.device).then_some(())?;
    let tables = BlockTables::of(&lhs.client, layout).ok()?;
    match pass {
        Pass::Forward => multiplied(Direction::Forward, factors, &tables),
        Pass::Input => multiplied(Direction::Backward, factors, &tables),
        Pass::Weight => {
            gradient(factors, &tables).map(|made| reshaped(made, layout.shape().into()))
        }
    }
}

/// Describes the products of `rows` rows, or returns why they do not run on wgmma.
pub(crate) fn text(
    device: &CubeDevice,
    dtype: DType,
    rows: usize,
    layout: &WeightLayout,
) -> Result<String, String> {
    let bf16 = dense::is_bf16(dtype)?;
    if layout.is_empty() {
        return Err("no block is kept".to_owned());
    }
    let client = device.client();
    let tables = BlockTables::of(&client, layout)?;
    let zeros = "a dense weight with zeros";
    let by = |direction| -> Result<String, String> {
        let [inputs, outputs] = tables.ends(direction);
        match tables.is_gathered(direction) {
            true => Ok(BlockProductPlan::new(&client, &tables, direction, bf16, rows)?.to_string()),
            false => Ok(format!(
                "{zeros}, {}",
                dense::text(device, dtype, [rows, inputs, outputs])?
            )),
        }
    };
    let (forward, backward) = (by(Direction::Forward)?, by(Direction::Backward)?);
    let weight = match tables.is_gradient_gathered() {
        true => BlockGradientPlan::new(&client, &tables, bf16, rows)?.to_string(),
        false => zeros.to_owned(),
    };
    Ok(format!(
        "x · W: {forward}; dy · Wᵀ: {backward}; xᵀ · dy: {weight}"
    ))
}
