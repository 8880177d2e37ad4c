/// Precision that the factors of an attention call's matmuls may be rounded to. Sums, exponentials and lse are f32 in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ProductPrecision {
    /// The tensors' own.
    #[default]
    Full,
    /// Factors of f32 tensors may be rounded to tf32, which has 10 bits of mantissa, where tensor cores take them: NVIDIA GPUs from Ampere on. Elsewhere,
    /// and where the plan says so, as [`Full`](Self::Full).
    Tf32,
    /// For inference. Queries, keys, values and weights of bf16 and f16 tensors may be rounded to FP8 (E4M3, 3 bits of mantissa), 64 rows of a head with a
    /// scale of their own, where tensor cores take them: NVIDIA Hopper GPUs. Elsewhere, where the plan says so, and where gradients are tracked, as
    /// [`Full`](Self::Full).
    Fp8,
}
