//! Residual norms and dropout on CubeCL devices.

use crate::kernels::rows;
use crate::kernels::rows::norm::{NormBranch, NormOf};
use crate::kernels::rows::norm_backward::{NormBackward, NormGrad, StreamGrad};
use blocksparse::ElementDropout;

use crate::by_kernels::by_kernels;
use crate::norm::ops::NormOps;
use crate::norm::values::{
    NormBackwardCall, NormCall, NormGrads, NormInputs, NormOutput, NormOutputGrads, NormSaved,
};
use crate::norm::{NormKind, reference};
use burn_blocksparse::internal::cube::*;
use burn_blocksparse::internal::prelude::*;

impl NormOps for CubeBackend {
    fn stream_dropout(x: CubeTensor, dropout: ElementDropout) -> CubeTensor {
        by_kernels(|| {
            let x = into_contiguous(x.clone());
            let sizes = matrix(x.meta.shape());
            let output = empty_like(&x, x.dtype);
            rows::stream_dropout(&x.client, typed(&x), sizes, &output.handle, &dropout)?;
            Ok(output)
        })
        .unwrap_or_else(|| reference::dropout::<Self>(x, dropout))
    }

    fn add_norm(inputs: NormInputs<Self>, call: NormCall) -> NormOutput<Self> {
        by_kernels(|| forward(inputs.clone(), &call))
            .unwrap_or_else(|| reference::forward::<Self>(inputs, &call))
    }

    fn residual_norm_backward(
        saved: NormSaved<Self>,
        grads: NormOutputGrads<Self>,
        call: NormBackwardCall,
    ) -> NormGrads<Self> {
        if uses_reference() {
            return reference::backward::<Self>(saved, grads, &call);
        }
        let [xhat, rstd, gamma] = [saved.xhat, saved.rstd, saved.gamma].map(contiguous);
        let [stream, normed] = [grads.stream, grads.normed].map(contiguous);
        // Asked before `norm` and `saved` add handles.
        let in_place = stream.as_ref().is_some_and(CubeTensor::can_mut);
        let norm = [xhat, rstd, gamma];
        match backward(stream.as_ref(), normed.as_ref(), &norm, in_place, &call) {
            Ok(grads) => grads,
            Err(_) => {
                let [xhat, rstd, gamma] = norm.map(OptFloat::from);
                let saved = NormSaved { xhat, rstd, gamma };
                let grads = NormOutputGrads {
                    stream: stream.into(),
                    normed: normed.into(),
                };
                reference::backward::<Self>(saved, grads, &call)
            }
        }
    }
}

fn forward(
    inputs: NormInputs<CubeBackend>,
    call: &NormCall,
) -> Result<NormOutput<CubeBackend>, KernelError> {
    let stream = &into_contiguous(inputs.stream);
    let tensors = [inputs.branch, inputs.bias, inputs.gamma, inputs.beta].map(contiguous);
    let [branch, bias, gamma, beta] = tensors.each_ref().map(Option::as_ref);
    let [rows, width] = matrix(stream.meta.shape());
    let sum = branch.map(|_| empty_like(stream, stream.dtype));
    let has_norm = call.norm.is_some();
    let [normed, xhat] = [has_norm, has_norm && call.keep]
        .map(|wanted| wanted.then(|| empty_like(stream, call.dtype.into())));
    let sums = accumulate_in(stream.dtype.into());
    let rstd = (xhat.as_ref()).map(|_| shaped(stream, Shape::new([rows]), sums.into()));
    let branch = branch.zip(sum.as_ref()).map(|(x, sum)| NormBranch {
        x: typed(x),
        bias: bias.map(typed),
        dropout: call.dropout.as_ref(),
        sum: &sum.handle,
    });
    let norm = gamma.zip(normed.as_ref()).map(|(gamma, normed)| NormOf {
        centered: call.norm == Some(NormKind::Layer),
        epsilon: call.epsilon,
        gamma: typed(gamma),
        beta: beta.map(typed),
        normed: typed(normed),
        kept: (xhat.as_ref().zip(rstd.as_ref())).map(|(xhat, rstd)| [&xhat.handle, &rstd.handle]),
    });
    rows::add_norm(&stream.client, typed(stream), [rows, width], branch, norm)?;
    Ok(NormOutput {
        stream: sum.into(),
        normed: normed.into(),
        xhat: xhat.into(),
        rstd: rstd.into(),
    })
}

fn backward(
    by_sum: Option<&CubeTensor>,
    by_normed: Option<&CubeTensor>,
    [xhat, rstd, gamma]: &[Option<CubeTensor>; 3],
    in_place: bool,
    call: &NormBackwardCall,
) -> Result<NormGrads<CubeBackend>, KernelError> {
    let like = by_sum.or(by_normed).expect("a gradient by an output");
    let [rows, width] = matrix(like.meta.shape());
    let norm = by_normed.and_then(|normed| {
        Some(NormGrad {
            centered: call.forward.norm == Some(NormKind::Layer),
            normed: typed(normed),
            xhat: &xhat.as_ref()?.handle,
            rstd: &rstd.as_ref()?.handle,
            gamma: typed(gamma.as_ref()?),
        })
    });
    let stream_type: DType = call.stream.into();
    // The returned stream gradient, and where the kernel writes it.
    let (stream, to) = match (by_sum, &norm) {
        (Some(by_sum), None) => (by_sum.clone(), None),
        (Some(by_sum), Some(_)) if in_place => (by_sum.clone(), None),
        _ => {
            let stream = empty_like(like, stream_type);
            (stream.clone(), Some(stream))
        }
    };
    let dropout = call.forward.dropout.as_ref();
    // Without dropout, a branch of the stream's dtype has the stream's gradient.
    let same = dropout.is_none() && call.branch == Some(call.stream);
    let branch = (call.branch.filter(|_| !same)).map(|dtype| empty_like(like, dtype.into()));
    let wanted = [
        call.bias,
        call.gamma.filter(|_| norm.is_some()),
        call.beta.filter(|_| norm.is_some()),
    ];
    let pass = NormBackward {
        element: dtype_to_elem_type(stream_type),
        sum: by_sum.map(|grad| &grad.handle),
        stream: match (&to, &norm) {
            (Some(to), _) => StreamGrad::Written(&to.handle),
            (None, Some(_)) => StreamGrad::InPlace,
            (None, None) => StreamGrad::Kept,
        },
        norm,
        branch: branch.as_ref().map(typed),
        dropout: dropout.filter(|_| call.branch.is_some() || call.bias.is_some()),
        sums: wanted.map(|dtype| dtype.is_some()),
    };
    let nothing = pass.norm.is_none() && branch.is_none() && call.bias.is_none();
    let sums = match nothing {
        true => None,
        false => rows::residual_norm_backward(&like.client, [rows, width], &pass)?,
    };
    let sums = sums.map(|sums| {
        let (client, device) = (like.client.clone(), like.device.clone());
        let dtype: DType = accumulate_in(call.stream).into();
        let all = Shape::new([sums.pitch * wanted.iter().flatten().count()]);
        let all = CubeTensor::new_contiguous(client, device, all, sums.handle, dtype);
        (all, sums.pitch)
    });
    let mut index = 0;
    let [bias, by_gamma, by_beta] = wanted.map(|dtype| {
        let (dtype, (all, pitch)) = (dtype?, sums.as_ref()?);
        index += 1;
        let sum = part_of(all, (index - 1) * pitch, Shape::new([width]));
        Some(cast(sum, dtype.into()))
    });
    // Inputs that did not contribute have a gradient of 0.
    let or_zeros = |sum: Option<CubeTensor>, dtype: Option<FloatDType>| {
        let zeros = || dtype.map(|dtype| filled(like, [width], 0.0, dtype.into()));
        OptFloat::from(sum.or_else(zeros))
    };
    Ok(NormGrads {
        branch: match same {
            true => OptFloat::Some(stream.clone()),
            false => branch.into(),
        },
        stream,
        bias: bias.into(),
        gamma: or_zeros(by_gamma, call.gamma),
        beta: or_zeros(by_beta, call.beta),
    })
}
