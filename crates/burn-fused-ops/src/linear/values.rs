//! Values in the signatures of the backend trait of linear layers.

use crate::linear::activation::kind::Activation;
use burn_blocksparse::internal::prelude::*;

/// Most weights of a call.
pub const WEIGHTS: usize = 3;

/// Most tensors that a row is split into.
pub const MOST_PARTS: usize = 3;

/// Number of heads and head width of each part. None: the part does not exist.
pub type HeadParts = [Option<(usize, usize)>; MOST_PARTS];

/// Form of a matmul: the layout of its input, and its epilogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinearForm {
    /// `x · W`: `[.., in]` to `[.., Σ out]`, without a bias.
    Rows,
    /// `f(x · W + b)`, `[.., out]`, with one weight. With `keep`, `x · W` is the second result.
    Activated {
        /// Activation applied to each element.
        activation: Activation,
        /// True if the product is also returned.
        keep: bool,
    },
    /// `f(x · W₁) ∘ (x · W₂)`, `[.., out]`: a gated unit, without a bias.
    Gated(Activation),
    /// `x · W + b` by heads: `[batch, seq, in]` to `[batch, heads, seq, width]` for each part.
    ToHeads(HeadParts),
    /// `x · W` with x by heads: `[batch, heads, seq, width]` to `[batch, seq, out]`. One weight, no bias.
    FromHeads,
}

/// Parameters of a matmul.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinearCall {
    /// Dtype that the factors are rounded to and that the results have.
    pub dtype: FloatDType,
    /// Form of the product.
    pub form: LinearForm,
    /// True if a backward pass follows, which reads the rounded factors.
    pub for_backward: bool,
}

impl LinearCall {
    /// Returns a call without a backward pass.
    pub(crate) fn new(dtype: FloatDType, form: LinearForm) -> Self {
        Self {
            dtype,
            form,
            for_backward: false,
        }
    }

    /// Returns a call in row form.
    pub(crate) fn rows(dtype: FloatDType) -> Self {
        Self::new(dtype, LinearForm::Rows)
    }
}

op_values! {
    /// Inputs of a matmul.
    pub struct LinearInputs {
        /// Left factor, of the shape that the [`LinearForm`] states.
        pub x: FloatTensor,
        /// Weights, `[in, out]` each.
        pub weights: ThreeFloats,
        /// Bias, `[Σ out]`, of any float dtype.
        pub bias: OptFloat,
    }
}

impl<B: Backend> LinearInputs<B> {
    /// Returns inputs without a bias.
    pub(crate) fn new(x: FloatTensor<B>, weights: ThreeFloats<B>) -> Self {
        let bias = OptFloat::None;
        Self { x, weights, bias }
    }

    /// Returns x, the weights and the bias as a list.
    pub fn into_list(self) -> [Option<FloatTensor<B>>; WEIGHTS + 2] {
        let [first, second, third] = self.weights.into_list();
        [Some(self.x), first, second, third, self.bias.into_option()]
    }

    /// The inverse of [`Self::into_list`].
    pub fn of_list(list: [Option<FloatTensor<B>>; WEIGHTS + 2]) -> Self {
        let [x, first, second, third, bias] = list;
        Self {
            x: x.expect("x"),
            weights: ThreeFloats::of_list([first, second, third]),
            bias: bias.into(),
        }
    }

    /// Returns which inputs the backward pass reads unchanged, given which gradients are wanted. Of inputs that were cast or concatenated it reads the result
    /// instead.
    #[cfg(feature = "autodiff")]
    pub(crate) fn reads(
        &self,
        call: LinearCall,
    ) -> impl FnOnce([bool; WEIGHTS + 2]) -> [bool; WEIGHTS + 2] + use<B> {
        let is_itself = |tensor: &FloatTensor<B>| FloatDType::from(tensor.dtype()) == call.dtype;
        let ThreeFloats { first, second, .. } = &self.weights;
        // An x by heads is never copied.
        let x = call.form == LinearForm::FromHeads || is_itself(&self.x);
        let weight = second.as_ref().is_none() && first.as_ref().is_some_and(is_itself);
        move |[by_x, a, b, c, _]| [(a || b || c) && x, by_x && weight, false, false, false]
    }
}

op_values! {
    /// Output of a matmul.
    pub struct LinearOutput {
        /// Results in the product's dtype, of the shapes that the [`LinearForm`] states.
        pub out: ThreeFloats,
        /// x in the product's dtype, if x has another dtype and is in rows, and a backward pass follows.
        pub rounded: OptFloat,
        /// Concatenated weights in the product's dtype, `[in, Σ out]`, if they differ from the single input weight and a backward pass follows.
        pub joined: OptFloat,
    }
}

impl<B: Backend> LinearOutput<B> {
    /// Returns an output without factors.
    pub(crate) fn new(out: ThreeFloats<B>) -> Self {
        Self {
            out,
            rounded: OptFloat::None,
            joined: OptFloat::None,
        }
    }

    /// Drops the factors if no backward pass follows.
    pub(crate) fn of(self, call: LinearCall) -> Self {
        match call.for_backward {
            true => self,
            false => Self::new(self.out),
        }
    }
}

op_values! {
    /// Tensors saved for the backward pass of a matmul, as far as a wanted gradient needs them.
    pub struct LinearSaved {
        /// Rounded x, `[.., in]`; an x by heads unchanged.
        pub x: OptFloat,
        /// Rounded, concatenated weights, `[in, Σ out]`.
        pub weight: OptFloat,
        /// Gradient with respect to the product, `[.., Σ out]`.
        pub grad: FloatTensor,
    }

    /// Wanted gradients, each of its input's shape and dtype.
    pub struct LinearGrads {
        /// With respect to x.
        pub x: OptFloat,
        /// With respect to the weights, `[in, out]` each.
        pub weights: ThreeFloats,
    }
}

impl<B: Backend> LinearGrads<B> {
    /// Returns the gradients with respect to x and the weights as a list.
    pub fn into_list(self) -> [Option<FloatTensor<B>>; WEIGHTS + 1] {
        let [first, second, third] = self.weights.into_list();
        [self.x.into_option(), first, second, third]
    }
}

/// Gradients that the backward pass of a matmul computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinearTask {
    /// Dtype of the product.
    pub dtype: FloatDType,
    /// Number of rows of the weights.
    pub inputs: usize,
    /// Number of heads and head width, if x is by heads.
    pub heads: Option<(usize, usize)>,
    /// Dtype of x, if its gradient is wanted.
    pub x: Option<FloatDType>,
    /// For each weight its columns and, if its gradient is wanted, its dtype. None: the weight does not exist.
    pub weights: [Option<(usize, Option<FloatDType>)>; WEIGHTS],
}

impl LinearTask {
    /// Returns the task for gradients of these dtypes. The last one, the bias's, is not part of it.
    #[cfg(feature = "autodiff")]
    pub(crate) fn new<B: Backend>(
        inputs: &LinearInputs<B>,
        call: LinearCall,
        dtypes: [Option<FloatDType>; WEIGHTS + 2],
    ) -> Self {
        let ThreeFloats { first, second, .. } = &inputs.weights;
        let third = &inputs.weights.third;
        let [by_x, by_first, by_second, by_third, _] = dtypes;
        let of = |weight: &OptFloat<B>, dtype| Some((weight.as_ref()?.shape()[1], dtype));
        let weight = first.as_ref().expect("a weight");
        let heads = (call.form == LinearForm::FromHeads).then(|| {
            let [_, heads, _, dim] = inputs.x.shape().dims();
            (heads, dim)
        });
        Self {
            dtype: call.dtype,
            inputs: weight.shape()[0],
            heads,
            x: by_x,
            weights: [(first, by_first), (second, by_second), (third, by_third)]
                .map(|(weight, dtype)| of(weight, dtype)),
        }
    }

    /// Returns the task of a product of rows and one weight, `[inputs, outputs]`.
    pub(crate) fn one(
        dtype: FloatDType,
        [inputs, outputs]: [usize; 2],
        x: Option<FloatDType>,
        weight: Option<FloatDType>,
    ) -> Self {
        Self {
            dtype,
            inputs,
            heads: None,
            x,
            weights: [Some((outputs, weight)), None, None],
        }
    }

    /// Returns whether a weight's gradient is wanted.
    #[cfg(any(feature = "autodiff", feature = "cube"))]
    pub(crate) fn by_weights(&self) -> bool {
        let mut weights = self.weights.iter().flatten();
        weights.any(|(_, dtype)| dtype.is_some())
    }

    /// Keeps the rounded factors that the wanted gradients read.
    #[cfg(feature = "autodiff")]
    pub(crate) fn of_rounded<B: Backend>(
        &self,
        [x, weight]: [OptFloat<B>; 2],
    ) -> [Option<FloatTensor<B>>; 2] {
        let (x, weight) = (x.into_option(), weight.into_option());
        [
            x.filter(|_| self.by_weights()),
            weight.filter(|_| self.x.is_some()),
        ]
    }
}

impl<B: Backend> LinearSaved<B> {
    /// Collects x, the weights and the gradient.
    pub(crate) fn new(
        x: Option<FloatTensor<B>>,
        weight: Option<FloatTensor<B>>,
        grad: FloatTensor<B>,
    ) -> Self {
        let (x, weight) = (x.into(), weight.into());
        Self { x, weight, grad }
    }
}

op_values! {
    /// Rows, and a bias added to each.
    pub struct BiasedRows {
        /// Rows, `[.., width]`.
        pub x: FloatTensor,
        /// Bias, `[width]`, of any float dtype.
        pub bias: OptFloat,
    }

    /// Tensors saved for the backward pass of an activation.
    pub struct ActivationSaved {
        /// Input before the bias, `[.., width]`. Absent without an activation, since the gradient does not depend on it then.
        pub x: OptFloat,
        /// `[width]`
        pub bias: OptFloat,
        /// Gradient with respect to the result.
        pub grad: FloatTensor,
    }

    /// Wanted gradients, each of its input's shape and dtype, and the recomputed activation.
    pub struct ActivationGrads {
        /// Gradient with respect to x, `[.., width]`.
        pub x: OptFloat,
        /// Gradient with respect to the bias, `[width]`.
        pub bias: OptFloat,
        /// Recomputed activation, `[.., width]`.
        pub y: OptFloat,
    }
}

float_list!(BiasedRows, 2: x; bias);

impl<B: Backend> BiasedRows<B> {
    /// Returns rows with an optional bias.
    pub(crate) fn new(x: FloatTensor<B>, bias: Option<FloatTensor<B>>) -> Self {
        Self::of_list([Some(x), bias])
    }
}

/// Gradients that the backward pass of an activation computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ActivationTask {
    /// True if x's gradient is wanted.
    pub x: bool,
    /// The bias's dtype, if its gradient is wanted.
    pub bias: Option<FloatDType>,
    /// True if the activation is to be recomputed. Then x's gradient is also wanted, and there is an activation.
    pub y: bool,
}

impl ActivationTask {
    pub(crate) fn new(x: bool, bias: Option<FloatDType>, y: bool) -> Self {
        Self { x, bias, y }
    }
}

/// Parameters of joined heads, besides the tensors. A missing tensor counts as 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JoinCall {
    /// Batch size and sequence length.
    pub rows: [usize; 2],
    /// Heads of each part.
    pub parts: HeadParts,
    /// Dtype of the tensors and the result.
    pub dtype: FloatDType,
    /// Dtype of the sums over all rows, which are the bias's gradient, if they are wanted.
    pub bias: Option<FloatDType>,
}

impl JoinCall {
    /// Returns a call without sums.
    pub(crate) fn new(rows: [usize; 2], parts: HeadParts, dtype: FloatDType) -> Self {
        let bias = None;
        Self {
            rows,
            parts,
            dtype,
            bias,
        }
    }

    /// Adds sums over all rows in the given dtype, if there is one.
    #[cfg(feature = "autodiff")]
    pub(crate) fn with_sums(self, bias: Option<FloatDType>) -> Self {
        Self { bias, ..self }
    }

    /// Returns the number of elements of a row.
    pub fn width(&self) -> usize {
        let widths = self.parts.iter().flatten().map(|(heads, dim)| heads * dim);
        widths.sum()
    }
}

/// Joined tensors, `[batch, seq, Σ heads · width]`, and their sums over batch and sequence, if they are wanted.
pub type Joined<B> = BiasedRows<B>;

op_values! {
    /// Inputs of a feed-forward network.
    pub struct MlpInputs {
        /// `[.., in]`
        pub x: FloatTensor,
        /// `[in, hidden]`
        pub inner: FloatTensor,
        /// `[hidden]`
        pub bias: OptFloat,
        /// `[hidden, out]`
        pub outer: FloatTensor,
    }
}

float_list!(MlpInputs, 4: x inner outer; bias);

/// Parameters of a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MlpCall {
    /// Activation between the products.
    pub activation: Activation,
    /// Dtype of the products.
    pub dtype: FloatDType,
    /// True if the backward pass computes the first product again.
    pub recompute: bool,
}

op_values! {
    /// Tensors saved for the part of the backward pass from the result to the activation's input.
    pub struct MlpOuterSaved {
        /// `x · W₁`, `[.., hidden]`.
        pub hidden: FloatTensor,
        /// `[hidden]`
        pub bias: OptFloat,
        /// Rounded W₂, `[hidden, out]`.
        pub outer: FloatTensor,
        /// Gradient with respect to the result, `[.., out]`.
        pub grad: FloatTensor,
    }
}

/// Results of this part of the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MlpOuterTask {
    /// Activation between the products; not [`Activation::None`].
    pub activation: Activation,
    /// Dtype of the products.
    pub dtype: FloatDType,
    /// The bias's dtype, if its gradient is wanted.
    pub bias: Option<FloatDType>,
    /// True if the activation is to be recomputed.
    pub active: bool,
}
