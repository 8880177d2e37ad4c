//! Residual norms in Burn primitives.

use blocksparse::ElementDropout;

use crate::norm::NormKind;
use crate::norm::values::{
    NormBackwardCall, NormCall, NormGrads, NormInputs, NormOutput, NormOutputGrads, NormSaved,
};
use burn_blocksparse::graph::recording;
use burn_blocksparse::internal::prelude::*;

/// Shape and dtypes that forward and backward share.
struct Rows<B: Backend> {
    shape: Shape,
    rows: usize,
    width: usize,
    sums: FloatDType,
    device: B::Device,
}

impl<B: Backend> Rows<B> {
    fn new(like: &FloatTensor<B>, stream: FloatDType) -> Self {
        let shape = like.shape();
        let [rows, width] = matrix(&shape);
        Self {
            shape,
            rows,
            width,
            sums: accumulate_in(stream),
            device: like.device(),
        }
    }

    /// Reshapes to `[rows, width]` in the dtype of sums.
    fn matrix(&self, x: FloatTensor<B>) -> Array<B> {
        let x = Array::<B>(x).reshape([self.rows, self.width]);
        x.cast(self.sums)
    }

    /// Reshapes to `[1, width]` in the dtype of sums.
    fn row(&self, x: FloatTensor<B>) -> Array<B> {
        Array::<B>(x).reshape([1, self.width]).cast(self.sums)
    }

    fn result(&self, x: Array<B>, dtype: FloatDType) -> FloatTensor<B> {
        x.cast(dtype).reshape(self.shape.clone()).0
    }

    fn zeros(&self, shape: impl Into<Shape>, dtype: FloatDType) -> FloatTensor<B> {
        Array::<B>::zeros(shape, &self.device, dtype).0
    }

    fn drop(&self, x: Array<B>, dropout: Option<ElementDropout>) -> Array<B> {
        let Some(dropout) = dropout else {
            return x;
        };
        recording::doom_by_upload(&self.device, "a mask of dropout");
        let mask = dropout.mask(self.rows, self.width);
        let mask = TensorData::new(mask, [self.rows, self.width]);
        let mask = Array::<B>(B::float_from_data(mask, &self.device));
        x * (mask.cast(self.sums) * dropout.factor())
    }

    /// Returns the mean of each row, `[rows, 1]`.
    fn mean(&self, x: Array<B>) -> Array<B> {
        x.sum_dim(1) * (1.0 / self.width as f64)
    }

    fn column_sums(&self, x: Array<B>, dtype: FloatDType) -> FloatTensor<B> {
        x.sum_dim(0).reshape([self.width]).cast(dtype).0
    }
}

pub(crate) fn dropout<B: Backend>(x: FloatTensor<B>, dropout: ElementDropout) -> FloatTensor<B> {
    let dtype: FloatDType = x.dtype().into();
    let rows = Rows::<B>::new(&x, dtype);
    if rows.rows * rows.width == 0 {
        return x;
    }
    let kept = rows.drop(rows.matrix(x), Some(dropout));
    rows.result(kept, dtype)
}

pub(crate) fn forward<B: Backend>(inputs: NormInputs<B>, call: &NormCall) -> NormOutput<B> {
    let dtype: FloatDType = inputs.stream.dtype().into();
    let rows = Rows::<B>::new(&inputs.stream, dtype);
    let has_branch = inputs.branch.as_ref().is_some();
    if rows.rows == 0 {
        return without_rows(&rows, dtype, has_branch, call);
    }
    let mut x = rows.matrix(inputs.stream);
    let mut stream = None;
    if let OptFloat::Some(branch) = inputs.branch {
        let mut branch = rows.matrix(branch);
        if let OptFloat::Some(bias) = inputs.bias {
            branch = branch + rows.row(bias);
        }
        let sum = rows.result(x + rows.drop(branch, call.dropout), dtype);
        x = rows.matrix(sum.clone());
        stream = Some(sum);
    }
    let (Some(norm), OptFloat::Some(gamma)) = (call.norm, inputs.gamma) else {
        return NormOutput {
            stream: stream.into(),
            normed: OptFloat::None,
            xhat: OptFloat::None,
            rstd: OptFloat::None,
        };
    };
    if norm == NormKind::Layer {
        x = x.clone() - rows.mean(x);
    }
    let variance = rows.mean(x.clone() * &x);
    let rstd = (variance + call.epsilon).sqrt().recip();
    let xhat = x * &rstd;
    let mut normed = xhat.clone() * rows.row(gamma);
    if let OptFloat::Some(beta) = inputs.beta {
        normed = normed + rows.row(beta);
    }
    let kept = call.keep.then(|| {
        let rstd = rstd.reshape([rows.rows]).0;
        (rows.result(xhat, call.dtype), rstd)
    });
    let (xhat, rstd) = kept.unzip();
    NormOutput {
        stream: stream.into(),
        normed: OptFloat::Some(rows.result(normed, call.dtype)),
        xhat: xhat.into(),
        rstd: rstd.into(),
    }
}

fn without_rows<B: Backend>(
    rows: &Rows<B>,
    dtype: FloatDType,
    has_branch: bool,
    call: &NormCall,
) -> NormOutput<B> {
    let empty = |wanted: bool, dtype: FloatDType| {
        let empty = wanted.then(|| rows.zeros(rows.shape.clone(), dtype));
        OptFloat::from(empty)
    };
    let (norm, keep) = (call.norm.is_some(), call.norm.is_some() && call.keep);
    NormOutput {
        stream: empty(has_branch, dtype),
        normed: empty(norm, call.dtype),
        xhat: empty(keep, call.dtype),
        rstd: keep.then(|| rows.zeros([0], rows.sums)).into(),
    }
}

pub(crate) fn backward<B: Backend>(
    saved: NormSaved<B>,
    grads: NormOutputGrads<B>,
    call: &NormBackwardCall,
) -> NormGrads<B> {
    let like = grads.stream.as_ref().or(grads.normed.as_ref());
    let rows = Rows::<B>::new(like.expect("a gradient by an output"), call.stream);
    let zeros = |dtype: Option<FloatDType>| {
        OptFloat::from(dtype.map(|dtype| rows.zeros([rows.width], dtype)))
    };
    if rows.rows == 0 {
        let empty = |dtype: FloatDType| rows.zeros(rows.shape.clone(), dtype);
        return NormGrads {
            stream: empty(call.stream),
            branch: call.branch.map(empty).into(),
            bias: zeros(call.bias),
            gamma: zeros(call.gamma),
            beta: zeros(call.beta),
        };
    }
    let [mut by_gamma, mut by_beta] = [zeros(call.gamma), zeros(call.beta)];
    let mut ds = grads.stream.into_option().map(|ds| rows.matrix(ds));
    if let (
        OptFloat::Some(normed),
        OptFloat::Some(xhat),
        OptFloat::Some(rstd),
        OptFloat::Some(gamma),
    ) = (grads.normed, saved.xhat, saved.rstd, saved.gamma)
    {
        let (dh, xhat) = (rows.matrix(normed), rows.matrix(xhat));
        let sums = |x: Array<B>, dtype: Option<FloatDType>| {
            OptFloat::from(dtype.map(|dtype| rows.column_sums(x, dtype)))
        };
        by_gamma = sums(dh.clone() * &xhat, call.gamma);
        by_beta = sums(dh.clone(), call.beta);
        let grad = dh * rows.row(gamma);
        let mut part = grad.clone() - xhat.clone() * rows.mean(grad.clone() * &xhat);
        if call.forward.norm == Some(NormKind::Layer) {
            part = part - rows.mean(grad);
        }
        let part = part * Array::<B>(rstd).reshape([rows.rows, 1]);
        ds = Some(match ds {
            Some(ds) => ds + part,
            None => part,
        });
    }
    let ds = ds.expect("a gradient by an output");
    let stream = rows.result(ds.clone(), call.stream);
    let (mut branch, mut bias) = (None, None);
    if call.branch.is_some() || call.bias.is_some() {
        let da = rows.drop(ds, call.forward.dropout);
        bias = (call.bias).map(|dtype| rows.column_sums(da.clone(), dtype));
        branch = (call.branch).map(|dtype| rows.result(da, dtype));
    }
    NormGrads {
        stream,
        branch: branch.into(),
        bias: bias.into(),
        gamma: by_gamma,
        beta: by_beta,
    }
}
