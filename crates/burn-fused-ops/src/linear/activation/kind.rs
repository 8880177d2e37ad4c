//! Kinds of activation.

/// Element-wise activation function of `bias_activation`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// Identity.
    #[default]
    None,
    /// `x · sigmoid(1.702 x)`, the Sparse Transformer's (Child et al., 2019, §5.2).
    GeluSigmoid,
    /// `x / 2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))` (Hendrycks and Gimpel, 2016, §2).
    GeluTanh,
    /// `x / 2 · (1 + erf(x / √2))` (Hendrycks and Gimpel, 2016, §2): burn-nn's `Gelu`.
    GeluErf,
    /// `max(x, 0)`.
    Relu,
    /// `x · sigmoid(x)`, also known as swish.
    Silu,
}

impl Activation {
    /// All kinds.
    pub const ALL: [Self; 6] = [
        Self::None,
        Self::GeluSigmoid,
        Self::GeluTanh,
        Self::GeluErf,
        Self::Relu,
        Self::Silu,
    ];
}
