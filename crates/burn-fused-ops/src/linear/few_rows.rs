//! Linear layers of few rows on CubeCL devices.

use crate::kernels::few_rows::{FewRows, FewRowsPlan, FewRowsRequest, FewRowsWeight, MOST_ROWS};
use crate::linear::activation::kernels::kind;
use crate::linear::products::rounded;
use crate::linear::values::{LinearCall, LinearForm, LinearInputs, LinearOutput};
use burn_blocksparse::internal::cube::*;
use burn_blocksparse::internal::prelude::*;

/// Returns the plan of a layer of `[rows, inputs]` and weights of these columns without a backward pass, if it has few rows.
pub(crate) fn text(
    device: &CubeDevice,
    dtype: FloatDType,
    lengths: [usize; 2],
    outputs: &[usize],
) -> Option<String> {
    let element = dtype_to_elem_type(dtype.into());
    let request = FewRowsRequest::new(element, lengths, outputs, [false, false]).ok()?;
    let plan = FewRowsPlan::new(&device.client(), &request).ok()?;
    Some(format!("without a backward pass: {plan}"))
}

/// Returns the product, if no backward pass follows and the kernel supports it.
pub(crate) fn forward(
    inputs: &LinearInputs<CubeBackend>,
    call: LinearCall,
) -> Option<LinearOutput<CubeBackend>> {
    let shape = inputs.x.meta.shape();
    let rank = shape.num_dims();
    // Leading dimensions of the result, and its heads if any.
    let (leading, parts) = match call.form {
        LinearForm::Rows | LinearForm::Gated(_) => {
            (shape.iter().take(rank - 1).copied().collect(), None)
        }
        LinearForm::FromHeads if shape[2] == 1 => (vec![shape[0], 1], None),
        LinearForm::ToHeads(parts) if shape[1] == 1 => (vec![shape[0]], Some(parts)),
        _ => return None,
    };
    let rows = leading.iter().product::<usize>();
    if call.for_backward || rows > MOST_ROWS {
        return None;
    }
    let weights = inputs.weights.clone().into_list();
    let weights: Vec<&CubeTensor> = weights.iter().flatten().collect();
    let [depth, _] = weights.first()?.meta.shape().dims();
    let widths: Vec<usize> = weights
        .iter()
        .map(|weight| weight.meta.shape()[1])
        .collect();
    let same = |weight: &&CubeTensor| FloatDType::from(weight.dtype) == call.dtype;
    if !weights.iter().all(same) {
        return None;
    }
    let all = |transposed| -> Option<Vec<FewRowsWeight>> {
        (weights.iter().map(|weight| lying(weight, transposed))).collect()
    };
    let (weights, transposed) = match all(false) {
        Some(weights) => (weights, false),
        None if widths.len() == 1 && inputs.bias.as_ref().is_none() => (all(true)?, true),
        None => return None,
    };
    let element = dtype_to_elem_type(call.dtype.into());
    let gated = matches!(call.form, LinearForm::Gated(_));
    let ways = [transposed, gated];
    let request = FewRowsRequest::new(element, [rows, depth], &widths, ways).ok()?;
    let plan = FewRowsPlan::new(&inputs.x.client, &request).ok()?;
    let x = into_contiguous(rounded::<CubeBackend>(inputs.x.clone(), call.dtype));
    let bias = contiguous(inputs.bias.clone());
    let bytes = x.dtype.size();
    let (gate, total) = match call.form {
        LinearForm::Gated(activation) => (Some(kind(activation)), widths[0]),
        _ => (None, widths.iter().sum()),
    };
    let mut starts = [0; 3];
    let mut numbers = rows * total;
    if let Some(parts) = parts {
        let parts: Vec<usize> = parts
            .iter()
            .flatten()
            .map(|(heads, dim)| heads * dim)
            .collect();
        if parts != widths {
            return None;
        }
        // Alignment of slices of the buffer.
        let alignment = (x.client.properties().memory.alignment as usize / bytes).max(1);
        numbers = 0;
        for (start, width) in starts.iter_mut().zip(&widths) {
            *start = numbers;
            numbers = (numbers + rows * width).next_multiple_of(alignment);
        }
    }
    let all = empty(&x, [numbers], x.dtype);
    let result = plan.launch(
        &x.client,
        &FewRows {
            x: typed(&x),
            lengths: [rows, depth],
            weights: &weights,
            transposed,
            bias: bias.as_ref().map(typed),
            output: &all.handle,
            numbers,
            starts: parts.map(|_| starts),
            gate,
        },
    );
    result.ok()?;
    let out = match parts {
        Some(parts) => {
            let mut starts = starts.into_iter();
            parts.map(|part| {
                let (start, (heads, dim)) = (starts.next()?, part?);
                Some(part_of(&all, start, Shape::new([rows, heads, 1, dim])))
            })
        }
        None => {
            let shape = leading.into_iter().chain([total]).collect::<Vec<_>>();
            [Some(part_of(&all, 0, Shape::from(shape))), None, None]
        }
    };
    Some(LinearOutput::new(ThreeFloats::of_list(out)))
}

/// Returns the weight as the kernel reads it, if its rows (or columns, if `transposed`) are contiguous and begin at multiples of 16 bytes.
fn lying(weight: &CubeTensor, transposed: bool) -> Option<FewRowsWeight<'_>> {
    let (shape, strides) = (weight.meta.shape(), weight.meta.strides());
    let (along, across) = if transposed { (0, 1) } else { (1, 0) };
    let pitch = strides[across];
    let is_aligned = |bytes: usize| bytes.is_multiple_of(16);
    let lies = strides[along] == 1
        && pitch >= shape[along]
        && is_aligned(pitch * weight.dtype.size())
        && is_aligned(weight.handle.offset_start.unwrap_or(0) as usize)
        && weight.qparams.is_none()
        && !weight.meta.is_tiled();
    lies.then_some(FewRowsWeight {
        handle: &weight.handle,
        width: shape[1],
        pitch,
    })
}
