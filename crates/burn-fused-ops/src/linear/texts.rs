//! Texts of plans for the forms of a product.

use burn::tensor::DType;
use burn_cubecl::CubeDevice;

use crate::linear::activation::kernels as between;
use crate::linear::activation::kind::Activation;
use crate::linear::backend;
use crate::linear::few_rows;
use crate::linear::heads::kernels as heads;
use crate::linear::wgmma;

/// Describes the launches of the first product and the activation: one kernel or two.
pub(crate) fn inner_text(
    device: &CubeDevice,
    dtype: DType,
    [rows, inputs, hidden]: [usize; 3],
    bias: Option<DType>,
    activation: Activation,
) -> Result<String, String> {
    let lengths = [rows, inputs, hidden];
    let kind = between::kind(activation);
    let fused = wgmma::activated_text(device, dtype, lengths, bias, kind);
    fused.or_else(|why| {
        let product = backend::text(device, dtype, lengths)?;
        let text = between::text(device, [rows, hidden], dtype, activation)
            .map_err(|error| error.to_string())?;
        Ok(format!("{product}; {text}; not as one: {why}"))
    })
}

/// Describes the launches of a projection to heads: one kernel or two.
pub(crate) fn to_heads_text(
    device: &CubeDevice,
    dtype: DType,
    [batch, seq, inputs]: [usize; 3],
    parts: &[(usize, usize)],
    bias: Option<DType>,
) -> Result<String, String> {
    let listed = std::array::from_fn(|part| parts.get(part).copied());
    let fused = wgmma::by_heads_text(device, dtype, [batch, seq, inputs], bias, listed);
    let widths: Vec<usize> = parts.iter().map(|(heads, dim)| heads * dim).collect();
    let fused = fused.map(|text| of_one(text, device, dtype, [batch, seq, inputs], &widths));
    fused.or_else(|why| {
        let outputs = parts.iter().map(|(heads, dim)| heads * dim).sum();
        let product = backend::text(device, dtype, [batch * seq, inputs, outputs])?;
        let split = heads::text(device, [batch * seq, seq], parts, dtype)
            .map_err(|error| error.to_string())?;
        Ok(format!("{product}; {split}; not as one: {why}"))
    })
}

/// Describes the launches of a projection from heads of dtype `own` in `dtype`.
pub(crate) fn from_heads_text(
    device: &CubeDevice,
    [own, dtype]: [DType; 2],
    [batch, heads, seq, dim]: [usize; 4],
    outputs: usize,
) -> Result<String, String> {
    let fused = match own == dtype {
        true => wgmma::of_heads_text(device, dtype, [batch, heads, seq, dim], outputs),
        false => Err(format!("{own:?} is rounded to {dtype:?}")),
    };
    let fused = fused.map(|text| {
        let lengths = [batch, seq, heads * dim];
        of_one(text, device, dtype, lengths, &[outputs])
    });
    fused.or_else(|why| {
        let join = heads::text(device, [batch * seq, seq], &[(heads, dim)], own)
            .map_err(|error| error.to_string())?;
        let product = backend::text(device, dtype, [batch * seq, heads * dim, outputs])?;
        Ok(format!("{join}; {product}; not as one: {why}"))
    })
}

/// Adds the kernel that runs if `seq` is 1, if it is another one.
fn of_one(
    text: String,
    device: &CubeDevice,
    dtype: DType,
    [batch, seq, inputs]: [usize; 3],
    outputs: &[usize],
) -> String {
    let few = (seq == 1).then(|| few_rows::text(device, dtype.into(), [batch, inputs], outputs));
    match few.flatten() {
        Some(few) => format!("{text}; {few}"),
        None => text,
    }
}
