//! Sampling on each backend. Autodiff needs no implementation: the public function detaches its tensors first.

#[cfg(feature = "cube")]
pub(crate) use kernels::text;

#[cfg(feature = "cube")]
mod kernels {
    use crate::kernels::sample::{sample_rows, sample_text};
    use blocksparse_cubecl::KernelError;
    use burn::tensor::DType;
    use burn_cubecl::kernel::into_contiguous;
    use burn_cubecl::tensor::CubeTensor;
    use burn_cubecl::{CubeBackend, CubeDevice};

    use crate::paged::values::OptInt;
    use crate::sample_options::SampleOptions;
    use crate::sampling::ops::{SamplingOps, sampled_on_host};
    use burn_blocksparse::internal::cube::{empty, uses_reference};

    /// Describes the launches of a call.
    pub(crate) fn text(
        device: &CubeDevice,
        vocab: usize,
        options: &SampleOptions,
    ) -> Result<String, KernelError> {
        sample_text(&device.client(), vocab, options)
    }

    impl SamplingOps for CubeBackend {
        fn sample_tokens(
            logits: CubeTensor,
            draws: CubeTensor,
            seen: OptInt<Self>,
            options: SampleOptions,
        ) -> CubeTensor {
            let [rows, vocab] = logits.meta.shape().dims();
            if uses_reference() {
                return sampled_on_host::<Self>(logits, draws, seen.into_option(), &options);
            }
            let [logits, draws] = [logits, draws].map(into_contiguous);
            let seen = seen.into_option().map(into_contiguous);
            let tokens = empty(&logits, [rows], DType::I32);
            let result = sample_rows(
                &logits.client,
                &options,
                [rows, vocab],
                [&logits.handle, &draws.handle],
                seen.as_ref().map(|seen| &seen.handle),
                &tokens.handle,
            );
            match result {
                Ok(()) => tokens,
                Err(_) => sampled_on_host::<Self>(logits, draws, seen, &options),
            }
        }
    }
}
