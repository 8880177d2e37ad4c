//! Argument types of the backend traits. They are structs, so that an option with its own tensor becomes a field rather than another
//! signature.

#[cfg(feature = "cube")]
use std::sync::Arc;

use blocksparse::BlockLayout;
use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};
#[cfg(feature = "fusion")]
use burn::{backend::fusion::custom::TensorSpec, tensor::DType};

use crate::{float_list, op_values};

op_values! {
    /// Up to three float tensors: parts of a row, branches, weights, or gradients with respect to them.
    pub struct ThreeFloats {
        /// The first tensor.
        pub first: OptFloat,
        /// The second tensor.
        pub second: OptFloat,
        /// The third tensor.
        pub third: OptFloat,
    }
}

float_list!(ThreeFloats, 3: ; first second third);

impl<B: Backend> ThreeFloats<B> {
    /// Creates a list of one tensor.
    pub fn one(tensor: FloatTensor<B>) -> Self {
        Self::of_list([Some(tensor), None, None])
    }

    /// Returns the first tensor.
    pub fn into_one(self) -> FloatTensor<B> {
        self.first.into_option().expect("a first tensor")
    }
}

/// Defines a tensor that may be missing.
macro_rules! optional {
    ($(#[$doc:meta] $name:ident: $tensor:ident;)*) => {$(
        #[$doc]
        #[derive(ExtensionType, Clone, Debug)]
        #[extension_type(fusion: cfg(feature = "fusion"))]
        pub enum $name<B: Backend> {
            /// The tensor.
            Some($tensor<B>),
            /// No tensor.
            None,
        }

        impl<B: Backend> $name<B> {
            /// Returns the tensor, if there is one.
            pub fn as_ref(&self) -> Option<&$tensor<B>> {
                match self {
                    Self::Some(tensor) => Some(tensor),
                    Self::None => None,
                }
            }

            /// Returns the tensor, if there is one.
            pub fn into_option(self) -> Option<$tensor<B>> {
                match self {
                    Self::Some(tensor) => Some(tensor),
                    Self::None => None,
                }
            }
        }

        impl<B: Backend> From<Option<$tensor<B>>> for $name<B> {
            fn from(tensor: Option<$tensor<B>>) -> Self {
                tensor.map_or(Self::None, Self::Some)
            }
        }
    )*};
}

optional! {
    /// An optional float tensor.
    OptFloat: FloatTensor;
    /// An optional tensor of integers.
    OptInt: IntTensor;
}

#[cfg(feature = "fusion")]
impl From<Option<TensorSpec>> for OptFloatMetadata {
    fn from(spec: Option<TensorSpec>) -> Self {
        spec.map_or(Self::None, Self::Some)
    }
}

#[cfg(feature = "fusion")]
impl OptFloatMetadata {
    /// Returns the tensor's metadata, if there is one.
    pub fn as_ref(&self) -> Option<&TensorSpec> {
        match self {
            Self::Some(spec) => Some(spec),
            Self::None => None,
        }
    }

    /// Changes the dtype.
    pub fn cast(&self, dtype: DType) -> Self {
        let cast = |spec: &TensorSpec| TensorSpec::new(spec.shape.clone(), dtype);
        self.as_ref().map(cast).into()
    }

    /// Returns the metadata if the tensor is wanted.
    pub fn wanted(&self, is_wanted: bool) -> Self {
        self.as_ref().filter(|_| is_wanted).cloned().into()
    }
}

#[cfg(feature = "fusion")]
impl ThreeFloatsMetadata {
    /// Returns the metadata in the order of the fields.
    pub fn list(&self) -> [Option<&TensorSpec>; 3] {
        [&self.first, &self.second, &self.third].map(OptFloatMetadata::as_ref)
    }

    /// Inverts [`Self::list`].
    pub fn of_list(list: [Option<TensorSpec>; 3]) -> Self {
        let [first, second, third] = list.map(OptFloatMetadata::from);
        Self {
            first,
            second,
            third,
        }
    }
}

/// Number of tensors in [`ScoreTensors`].
#[cfg(any(feature = "autodiff", feature = "cube"))]
pub const SCORE_TENSORS: usize = 2;

op_values! {
    /// Tensors that are added to scores, or their gradients. A further one needs a field here, a row in the lists below, and another node in the
    /// autodiff step.
    pub struct ScoreTensors {
        /// `[batch or 1, heads or 1, seq_q or 1, seq_kv]`, in the dtype of q, k and v.
        pub bias: OptFloat,
        /// Bias by distance: `[heads or 1, 2 · reach + 1]`, in the dtype of sums.
        pub relative_bias: OptFloat,
    }
}

float_list!(ScoreTensors, 2: ; bias relative_bias);

impl<B: Backend> Default for ScoreTensors<B> {
    fn default() -> Self {
        Self::of_list([None, None])
    }
}

impl<B: Backend> ScoreTensors<B> {
    /// Returns the tensors in the order of the fields.
    #[cfg(any(feature = "autodiff", feature = "cube"))]
    pub fn list(&self) -> [Option<&FloatTensor<B>>; SCORE_TENSORS] {
        [self.bias.as_ref(), self.relative_bias.as_ref()]
    }

    /// Returns which tensors are present.
    #[cfg(feature = "cube")]
    pub fn kinds(&self) -> [bool; SCORE_TENSORS] {
        self.list().map(|tensor| tensor.is_some())
    }
}

/// Inputs of attention that have gradients.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct AttentionInputs<B: Backend> {
    /// `[batch, heads, seq_q, head_dim]`
    pub q: FloatTensor<B>,
    /// `[batch, kv_heads, seq_kv, head_dim]`
    pub k: FloatTensor<B>,
    /// `[batch, kv_heads, seq_kv, value_dim]`
    pub v: FloatTensor<B>,
    /// Tensors that are added to the scores.
    #[extension_type]
    pub scores: ScoreTensors<B>,
}

#[cfg(feature = "autodiff")]
impl<B: Backend> AttentionInputs<B> {
    /// Returns the tensors: q, k, v, and those that are added to scores.
    pub fn into_list(self) -> [Option<FloatTensor<B>>; 3 + SCORE_TENSORS] {
        let [bias, relative_bias] = self.scores.into_list();
        [
            Some(self.q),
            Some(self.k),
            Some(self.v),
            bias,
            relative_bias,
        ]
    }

    /// Inverts [`Self::into_list`].
    pub fn of_list(list: [Option<FloatTensor<B>>; 3 + SCORE_TENSORS]) -> Self {
        let [q, k, v, bias, relative_bias] = list;
        let [q, k, v] = [q, k, v].map(|tensor| tensor.expect("q, k and v"));
        let scores = ScoreTensors::of_list([bias, relative_bias]);
        Self { q, k, v, scores }
    }
}

/// The tensor that chooses the blocks of a layout, contiguous or not. The layout's [`DeviceChoice`](blocksparse::DeviceChoice) defines its meaning.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub enum DynamicBlocks<B: Backend> {
    /// None: the host layout lists the blocks.
    Host,
    /// `[batch or 1, heads or 1, q_blocks, kv_blocks]`: whether a block is chosen.
    Bools(BoolTensor<B>),
    /// i32, one of three kinds: the chosen key blocks, `[batch or 1, heads or 1, q_blocks, most]`, or −1; the positions of queries and keys,
    /// `[batch or 1, heads, seq_q + seq_kv]`; or the keys that each query sees, `[batch, heads or fewer, seq_q, most]`, ascending, distinct, padded with −1.
    Ints(IntTensor<B>),
    /// `[batch or 1, heads or 1, q_blocks, kv_blocks]`, f32 scores: the highest are chosen.
    Floats(FloatTensor<B>),
}

/// A layout as passed to backends: the host layout and its data on the device. Never on an autodiff device.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct LayoutTensors<B: Backend> {
    /// Pairs that are *not* computed, for each mask of the layout's table: `[masks, block_size · block_size]`, row-major, in Burn's convention (`true` =
    /// masked). A single element if kernels run, which use their own representation.
    pub blocked: BoolTensor<B>,
    /// Tensor that chooses the blocks of a device layout.
    #[extension_type]
    pub choice: DynamicBlocks<B>,
    /// The layout itself. For a device layout it has only sizes where kernels run.
    pub host: BlockLayout,
    /// Kernels of both passes of the call.
    pub plan: KernelPlan,
}

/// Kernels of an attention call, chosen once before the call. Empty if the reference runs or the op is not attention; a backend with
/// kernels then finds a plan itself.
///
/// It holds no layout except parts that were derived from one, so an attachment of a layout never keeps the layout itself alive.
#[derive(Clone, Debug, Default)]
pub struct KernelPlan {
    #[cfg(feature = "cube")]
    /// The plan, if kernels run.
    pub plan: Option<Arc<blocksparse_cubecl::AttentionPlan>>,
}

/// Output of the forward pass.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct AttentionOutput<B: Backend> {
    /// `[batch, heads, seq_q, value_dim]`, in the inputs' dtype.
    pub out: FloatTensor<B>,
    /// `[batch, heads, seq_q]`: the natural logarithm of the sum of exponentials of the scores; f32, or f64 for f64 inputs.
    pub lse: FloatTensor<B>,
    /// The weights `[batch, blocks, block_size, block_size]` in the dtype of lse, with `WeightsMode::Store`.
    #[extension_type]
    pub weights: OptFloat<B>,
    /// `[batch, heads, seq_q]` in the dtype of lse, if the options request it: each row's largest score over its allowed keys, scaled,
    /// softcapped and biased; −∞ in rows without keys. No gradient flows through it, and the backward pass does not read it.
    #[extension_type]
    pub max_scores: OptFloat<B>,
}

op_values! {
    /// Output of an earlier forward pass of the same call.
    pub struct KnownOutput {
        /// `[batch, heads, seq_q, value_dim]`, in the inputs' dtype.
        pub out: FloatTensor,
        /// `[batch, heads, seq_q]`; f32, or f64 for f64 inputs.
        pub lse: FloatTensor,
    }
}

impl<B: Backend> From<KnownOutput<B>> for AttentionOutput<B> {
    fn from(given: KnownOutput<B>) -> Self {
        Self {
            out: given.out,
            lse: given.lse,
            weights: OptFloat::None,
            max_scores: OptFloat::None,
        }
    }
}

/// Tensors saved for the backward pass.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct SavedTensors<B: Backend> {
    /// Inputs of the forward pass.
    #[extension_type]
    pub inputs: AttentionInputs<B>,
    /// Output of the forward pass.
    #[extension_type]
    pub output: AttentionOutput<B>,
}

/// Gradients of a loss with respect to the outputs of the forward pass.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct OutputGrads<B: Backend> {
    /// Gradient with respect to `out`: `[batch, heads, seq_q, value_dim]`, in its dtype.
    pub out: FloatTensor<B>,
    /// Gradient with respect to `lse`: `[batch, heads, seq_q]`, in its dtype. None means 0.
    #[extension_type]
    pub lse: OptFloat<B>,
}

/// Gradients, each with the shape and dtype of its input. Those of tensors added to the scores are present only if wanted.
pub type AttentionGrads<B> = AttentionInputs<B>;

/// Wanted gradients besides those of q, k and v.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NeedsGrad {
    /// True if the gradient of the bias is wanted.
    pub bias: bool,
    /// True if the gradient of the relative bias is wanted.
    pub relative_bias: bool,
}

op_values! {
    /// Inputs of [`accumulated_attention`](crate::attention_sums::accumulated_attention).
    pub struct AccumulatedInputs {
        /// `[batch, heads, seq_q, head_dim]`
        pub q: FloatTensor,
        /// `[batch, kv_heads, seq_kv, head_dim]`
        pub k: FloatTensor,
        /// `[batch, heads, seq_q]`; f32, or f64 for f64 inputs.
        pub lse: FloatTensor,
        /// Tensors that are added to the scores.
        pub scores: ScoreTensors,
    }

    /// Sums of [`accumulated_attention`](crate::attention_sums::accumulated_attention), in the dtype of lse.
    pub struct AccumulatedOutput {
        /// `[batch, heads, seq_kv]`
        pub columns: FloatTensor,
        /// `[batch, heads, seq_q + seq_kv − 1]`
        pub diagonals: FloatTensor,
    }
}
