//! Page selection on each backend. Autodiff has none: public functions pass tensors without autodiff.

#[cfg(feature = "cube")]
mod kernels {
    use burn::tensor::DType;
    use burn_cubecl::CubeBackend;
    use burn_cubecl::kernel::{cast, into_contiguous};
    use burn_cubecl::tensor::CubeTensor;

    use crate::kernels::rows;
    use crate::kernels::rows::TopKPagesShape;
    use crate::pages::ops::{PageChoiceOps, highest_pages};
    use crate::pages::page_choice::PageChoice;
    use burn_blocksparse::internal::cube::{empty, integers, uses_reference};

    impl PageChoiceOps for CubeBackend {
        fn topk_pages(scores: CubeTensor, spans: CubeTensor, choice: PageChoice) -> CubeTensor {
            let [batch, kv_heads, entries] = scores.meta.shape().dims();
            let shape = TopKPagesShape {
                batch,
                kv_heads,
                tables: spans.meta.shape()[1],
                entries,
                page: choice.page,
                block: choice.block,
                chosen: choice.chosen(),
                kept: choice.kept(),
                forced: choice.forced,
            };
            if batch * kv_heads * entries == 0 || uses_reference() {
                return highest_pages::<Self>(scores, spans, &choice);
            }
            let scores = into_contiguous(cast(scores, DType::F32));
            let spans = integers(spans);
            let dims = [batch, kv_heads, choice.selected_pages()];
            let picks = empty(&scores, dims, DType::I32);
            let (client, to) = (&scores.client, &picks.handle);
            match rows::topk_pages(client, &shape, &scores.handle, &spans.handle, to) {
                Ok(()) => picks,
                Err(_) => highest_pages::<Self>(scores, spans, &choice),
            }
        }
    }
}
