//! The values that cross the backend trait of linear layers.

use crate::linear::activation::kind::Activation;
use burn_blocksparse::internal::prelude::*;

/// Most weights of a call.
pub const WEIGHTS: usize = 3;

/// Most tensors that a row is split into.
pub const MOST_PARTS: usize = 3;

/// The heads of each part, and their width. None: there is no such part.
pub type HeadParts = [Option<(usize, usize)>; MOST_PARTS];

/// Form of a matmul: its inputs, and what becomes of its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinearForm {
    /// `x · W`: `[.., in]` to `[.., Σ out]`. No bias.
    Rows,
    /// `f(x · W + b)`, `[.., out]`, and with `keep` `x · W` as the second result. Of one weight.
    Activated {
        /// What is made of each number.
        activation: Activation,
        /// True if the product is also returned.
        keep: bool,
    },
    /// `f(x · W₁) ∘ (x · W₂)`, `[.., out]`: a gated unit. No bias.
    Gated(Activation),
    /// `x · W + b` by heads: `[batch, seq, in]` to `[batch, heads, seq, width]` each.
    ToHeads(HeadParts),
    /// `x · W` of x by heads: `[batch, heads, seq, width]` to `[batch, seq, out]`. Of one weight, no bias.
    FromHeads,
}

/// Parameters of a matmul.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinearCall {
    /// Of the factors, which are rounded to it, and of the results.
    pub dtype: FloatDType,
    /// Its form.
    pub form: LinearForm,
    /// True if a backward pass follows, which reads the factors as they were multiplied.
    pub for_backward: bool,
}

impl LinearCall {
    /// Of a form, without a backward pass.
    pub(crate) fn new(dtype: FloatDType, form: LinearForm) -> Self {
        Self {
            dtype,
            form,
            for_backward: false,
        }
    }

    /// A product of rows.
    pub(crate) fn rows(dtype: FloatDType) -> Self {
        Self::new(dtype, LinearForm::Rows)
    }
}

op_values! {
    /// Inputs of a matmul.
    pub struct LinearInputs {
        /// As [`LinearForm`] says.
        pub x: FloatTensor,
        /// `[in, out]` each.
        pub weights: ThreeFloats,
        /// `[Σ out]`, of any float dtype.
        pub bias: OptFloat,
    }
}

impl<B: Backend> LinearInputs<B> {
    /// Without a bias.
    pub(crate) fn new(x: FloatTensor<B>, weights: ThreeFloats<B>) -> Self {
        let bias = OptFloat::None;
        Self { x, weights, bias }
    }

    /// x, the weights and the bias.
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

    /// Which of them a backward pass reads as they came, of those whose gradients are wanted: what is multiplied in another dtype, or beside others, it reads as
    /// it was multiplied.
    #[cfg(feature = "autodiff")]
    pub(crate) fn reads(
        &self,
        call: LinearCall,
    ) -> impl FnOnce([bool; WEIGHTS + 2]) -> [bool; WEIGHTS + 2] + use<B> {
        let is_itself = |tensor: &FloatTensor<B>| FloatDType::from(tensor.dtype()) == call.dtype;
        let ThreeFloats { first, second, .. } = &self.weights;
        // Of x by heads no copy is kept.
        let x = call.form == LinearForm::FromHeads || is_itself(&self.x);
        let weight = second.as_ref().is_none() && first.as_ref().is_some_and(is_itself);
        move |[by_x, a, b, c, _]| [(a || b || c) && x, by_x && weight, false, false, false]
    }
}

op_values! {
    /// Output of a matmul.
    pub struct LinearOutput {
        /// In the product's dtype, as [`LinearForm`] says.
        pub out: ThreeFloats,
        /// x in the product's dtype, if it had another, is of rows and a backward pass follows.
        pub rounded: OptFloat,
        /// The weights side by side in the product's dtype, `[in, Σ out]`, if that is not the one weight itself and a backward pass follows.
        pub joined: OptFloat,
    }
}

impl<B: Backend> LinearOutput<B> {
    /// Results alone.
    pub(crate) fn new(out: ThreeFloats<B>) -> Self {
        Self {
            out,
            rounded: OptFloat::None,
            joined: OptFloat::None,
        }
    }

    /// Without what nobody reads.
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
        /// x as it was multiplied, `[.., in]`; by heads as it came.
        pub x: OptFloat,
        /// The weights as they were multiplied, `[in, Σ out]`.
        pub weight: OptFloat,
        /// By the product, `[.., Σ out]`.
        pub grad: FloatTensor,
    }

    /// Gradients, each of its input's shape and dtype, if it is wanted.
    pub struct LinearGrads {
        /// As x.
        pub x: OptFloat,
        /// `[in, out]` each.
        pub weights: ThreeFloats,
    }
}

impl<B: Backend> LinearGrads<B> {
    /// By x and the weights.
    pub fn into_list(self) -> [Option<FloatTensor<B>>; WEIGHTS + 1] {
        let [first, second, third] = self.weights.into_list();
        [self.x.into_option(), first, second, third]
    }
}

/// Gradients that the backward pass of a matmul computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinearTask {
    /// Of the product.
    pub dtype: FloatDType,
    /// Rows of the weights.
    pub inputs: usize,
    /// The heads of an x by heads, and their width.
    pub heads: Option<(usize, usize)>,
    /// x's dtype, if its gradient is wanted.
    pub x: Option<FloatDType>,
    /// Of each weight its columns and, if its gradient is wanted, its dtype. None: there is no such weight.
    pub weights: [Option<(usize, Option<FloatDType>)>; WEIGHTS],
}

impl LinearTask {
    /// The gradients of `dtypes`, of which the last, the bias's, is another's task.
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

    /// The gradients of a product of rows and one weight, `[inputs, outputs]`.
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

    /// Of x and the weights as they were multiplied, those that the gradients are computed of.
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
    /// x, the weights and the gradient.
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
    /// Rows, and what is added to each.
    pub struct BiasedRows {
        /// `[.., width]`
        pub x: FloatTensor,
        /// `[width]`, of any float dtype.
        pub bias: OptFloat,
    }

    /// Tensors saved for the backward pass of an activation.
    pub struct ActivationSaved {
        /// `[.., width]`; none without an activation, whose gradient does not depend on it.
        pub x: OptFloat,
        /// `[width]`
        pub bias: OptFloat,
        /// By the result.
        pub grad: FloatTensor,
    }

    /// Gradients, each of its input's shape and dtype, if it is wanted, and the activation.
    pub struct ActivationGrads {
        /// `[.., width]`
        pub x: OptFloat,
        /// `[width]`
        pub bias: OptFloat,
        /// The activation again, `[.., width]`.
        pub y: OptFloat,
    }
}

float_list!(BiasedRows, 2: x; bias);

impl<B: Backend> BiasedRows<B> {
    /// Rows, and a bias if there is one.
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
    /// True if the activation is wanted again. Then x's gradient is also wanted, and there is an activation.
    pub y: bool,
}

impl ActivationTask {
    pub(crate) fn new(x: bool, bias: Option<FloatDType>, y: bool) -> Self {
        Self { x, bias, y }
    }
}

/// Parameters of joined heads, besides the tensors: any of them may be missing, and is 0 then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JoinCall {
    /// Batch and sequence.
    pub rows: [usize; 2],
    /// The heads.
    pub parts: HeadParts,
    /// Of the tensors and the result.
    pub dtype: FloatDType,
    /// The dtype of the sums over all rows, the bias's gradient, if they are wanted.
    pub bias: Option<FloatDType>,
}

impl JoinCall {
    /// Heads of batch and sequence, of a dtype, without sums.
    pub(crate) fn new(rows: [usize; 2], parts: HeadParts, dtype: FloatDType) -> Self {
        let bias = None;
        Self {
            rows,
            parts,
            dtype,
            bias,
        }
    }

    /// With the sums over all rows in a dtype, if there is one.
    #[cfg(feature = "autodiff")]
    pub(crate) fn with_sums(self, bias: Option<FloatDType>) -> Self {
        Self { bias, ..self }
    }

    /// Elements of a row.
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
    /// Between the products.
    pub activation: Activation,
    /// Of the products.
    pub dtype: FloatDType,
    /// True if the backward pass computes the first product again.
    pub recompute: bool,
}

op_values! {
    /// Tensors saved for the half of a backward pass before the activation.
    pub struct MlpOuterSaved {
        /// `x · W₁`, `[.., hidden]`.
        pub hidden: FloatTensor,
        /// `[hidden]`
        pub bias: OptFloat,
        /// W₂ as it was multiplied, `[hidden, out]`.
        pub outer: FloatTensor,
        /// By the result, `[.., out]`.
        pub grad: FloatTensor,
    }
}

/// Results that this half computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MlpOuterTask {
    /// Between the products; not [`Activation::None`].
    pub activation: Activation,
    /// Of the products.
    pub dtype: FloatDType,
    /// The bias's dtype, if its gradient is wanted.
    pub bias: Option<FloatDType>,
    /// True if the activation is wanted again.
    pub active: bool,
}
