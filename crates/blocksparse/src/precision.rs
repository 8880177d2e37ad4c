/// Precision to which the operands of an attention call's matmuls may be rounded. Sums, exponentials and lse are always f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ProductPrecision {
    /// The precision of the tensors.
    #[default]
    Full,
    /// Operands of f32 tensors may be rounded to tf32, which has 10 bits of mantissa, where tensor cores support it: NVIDIA GPUs from Ampere on. Otherwise,
    /// and where the plan says so, as [`Full`](Self::Full).
    Tf32,
    /// For inference. Queries, keys, values and weights of bf16 and f16 tensors may be rounded to FP8 (E4M3, 3 bits of mantissa), with one scale for each 64
    /// rows of a head, where tensor cores support it: NVIDIA Hopper GPUs. Otherwise, where the plan says so, and where gradients are tracked, as
    /// [`Full`](Self::Full).
    Fp8,
}
