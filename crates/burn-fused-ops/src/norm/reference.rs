//! A residual norm in Burn primitives.

use blocksparse::ElementDropout;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape, TensorData};

use crate::norm::NormKind;
use crate::norm::values::{
    NormBackwardCall, NormCall, NormGrads, NormInputs, NormOutput, NormOutputGrads, NormSaved,
};
use burn_blocksparse::graph::recording;
use burn_blocksparse::internal::dtype::accumulate_in;
use burn_blocksparse::internal::values::OptFloat;

/// Rows and width of a shape.
pub(crate) fn matrix(shape: &Shape) -> [usize; 2] {
    let width = shape[shape.num_dims() - 1];
    [shape.num_elements() / width.max(1), width]
}

/// What both passes need.
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

    /// `[rows, width]` in the dtype of sums.
    fn matrix(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let x = B::float_reshape(x, Shape::new([self.rows, self.width]));
        B::float_cast(x, self.sums)
    }

    /// `[1, width]`, likewise.
    fn row(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        B::float_cast(B::float_reshape(x, Shape::new([1, self.width])), self.sums)
    }

    fn result(&self, x: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
        B::float_reshape(B::float_cast(x, dtype), self.shape.clone())
    }

    fn zeros(&self, shape: impl Into<Shape>, dtype: FloatDType) -> FloatTensor<B> {
        B::float_zeros(shape.into(), &self.device, dtype)
    }

    fn drop(&self, x: FloatTensor<B>, dropout: Option<ElementDropout>) -> FloatTensor<B> {
        let Some(dropout) = dropout else {
            return x;
        };
        recording::doom_by_upload(&self.device, "a mask of dropout");
        let mask = dropout.mask(self.rows, self.width);
        let mask = TensorData::new(mask, [self.rows, self.width]);
        let mask = B::float_from_data(mask, &self.device);
        let factors = B::float_mul_scalar(B::float_cast(mask, self.sums), dropout.factor().into());
        B::float_mul(x, factors)
    }

    /// The mean of a row's numbers, `[rows, 1]`.
    fn mean(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        B::float_mul_scalar(B::float_sum_dim(x, 1), (1.0 / self.width as f64).into())
    }

    fn column_sums(&self, x: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
        let sums = B::float_reshape(B::float_sum_dim(x, 0), Shape::new([self.width]));
        B::float_cast(sums, dtype)
    }
}

/// Dropout alone.
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
            branch = B::float_add(branch, rows.row(bias));
        }
        let sum = B::float_add(x, rows.drop(branch, call.dropout));
        let sum = rows.result(sum, dtype);
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
        x = B::float_sub(x.clone(), rows.mean(x));
    }
    let variance = rows.mean(B::float_mul(x.clone(), x.clone()));
    let rstd = B::float_recip(B::float_sqrt(B::float_add_scalar(
        variance,
        call.epsilon.into(),
    )));
    let xhat = B::float_mul(x, rstd.clone());
    let mut normed = B::float_mul(xhat.clone(), rows.row(gamma));
    if let OptFloat::Some(beta) = inputs.beta {
        normed = B::float_add(normed, rows.row(beta));
    }
    let kept = call.keep.then(|| {
        let rstd = B::float_reshape(rstd, Shape::new([rows.rows]));
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
        let product = B::float_mul(dh.clone(), xhat.clone());
        by_gamma = (call.gamma)
            .map(|dtype| rows.column_sums(product, dtype))
            .into();
        by_beta = (call.beta)
            .map(|dtype| rows.column_sums(dh.clone(), dtype))
            .into();
        let grad = B::float_mul(dh, rows.row(gamma));
        let product = rows.mean(B::float_mul(grad.clone(), xhat.clone()));
        let mut part = B::float_sub(grad.clone(), B::float_mul(xhat, product));
        if call.forward.norm == Some(NormKind::Layer) {
            part = B::float_sub(part, rows.mean(grad));
        }
        let rstd = B::float_reshape(rstd, Shape::new([rows.rows, 1]));
        let part = B::float_mul(part, rstd);
        ds = Some(match ds {
            Some(ds) => B::float_add(ds, part),
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
