//! Page summaries, and scores by them, on each backend. Autodiff needs no implementation: the public functions detach their tensors first.

#[cfg(feature = "cube")]
mod kernels {
    use blocksparse_cubecl::recording;
    use blocksparse_cubecl::recording::Failure;
    use burn::backend::cubecl::dtype_to_elem_type;
    use burn::tensor::DType;
    use burn_cubecl::CubeBackend;
    use burn_cubecl::kernel::into_contiguous;
    use burn_cubecl::tensor::CubeTensor;

    use crate::kernels::paged;
    use crate::kernels::paged::{AppendShape, PageScoreBuffers, PageScoreShape};
    use crate::paged::backend::{handles, in_place, rows_by};
    use crate::paged::values::StoredRows;
    use crate::summaries::ops::{
        PageScoreInputs, PageSummaryOps, SummarizeInputs, scores as reference_scores, summarize,
    };
    use burn_blocksparse::internal::cube::{empty, integers, uses_reference};
    use burn_sparse_select::PageSummary;
    use burn_sparse_select::pages::PageChoice;

    impl PageSummaryOps for CubeBackend {
        fn summarize_pages(
            inputs: SummarizeInputs<Self>,
            kv_heads: usize,
            summary: PageSummary,
        ) -> CubeTensor {
            let [pages, page, width] = inputs.keys.dims();
            let [batch, tables, rows] = inputs.slots.meta.shape().dims();
            let quantization = inputs.keys.quantization();
            let keys_dtype = match &inputs.keys {
                StoredRows::Plain(keys) => keys.dtype,
                StoredRows::Packed(_) => DType::F32,
            };
            let shape = AppendShape {
                batch,
                kv_heads,
                tables,
                rows,
                page,
                pages,
                widths: [width, 0],
                dtype: dtype_to_elem_type(keys_dtype),
            };
            let dtype = dtype_to_elem_type(inputs.summaries.dtype);
            let client = inputs.summaries.client.clone();
            let elsewhere = |inputs| {
                recording::fails(&client, Failure::NotInPlace("the summaries of pages"));
                summarize::<Self>(inputs, kv_heads, summary)
            };
            if uses_reference() {
                return elsewhere(inputs);
            }
            let summaries = in_place(inputs.summaries);
            let keys = rows_by(inputs.keys, into_contiguous);
            let slots = integers(inputs.slots);
            let (stored, scales) = handles(&keys);
            let stored = paged::StoredKeys {
                keys: stored,
                packed: quantization.zip(scales),
            };
            let to = (&summaries.handle, dtype);
            match paged::summarize_pages(&client, &shape, summary, stored, &slots.handle, to) {
                Ok(()) => summaries,
                Err(_) => elsewhere(SummarizeInputs {
                    summaries,
                    keys,
                    slots,
                }),
            }
        }

        fn page_scores(
            inputs: PageScoreInputs<Self>,
            kv_heads: usize,
            choice: PageChoice,
        ) -> CubeTensor {
            let [batch, heads, width] = inputs.q.meta.shape().dims();
            let [_, tables, entries] = inputs.table.meta.shape().dims();
            let pages = inputs.summaries.meta.shape()[0];
            let shape = PageScoreShape {
                batch,
                heads,
                kv_heads,
                tables,
                entries,
                pages,
                page: choice.page,
                width,
                dtype: dtype_to_elem_type(inputs.q.dtype),
                summary: choice.summary,
                summary_dtype: dtype_to_elem_type(inputs.summaries.dtype),
            };
            if batch * heads * entries * pages == 0 || uses_reference() {
                return reference_scores::<Self>(inputs, kv_heads, &choice);
            }
            let scores = empty(&inputs.q, [batch, kv_heads, entries], DType::F32);
            let [q, summaries] = [inputs.q, inputs.summaries].map(into_contiguous);
            let [table, spans] = [inputs.table, inputs.spans].map(integers);
            let buffers = PageScoreBuffers {
                q: &q.handle,
                summaries: &summaries.handle,
                table: &table.handle,
                spans: &spans.handle,
                scores: &scores.handle,
            };
            let factor = choice.factor(heads / kv_heads);
            match paged::page_scores(&q.client, &shape, &buffers, factor) {
                Ok(()) => scores,
                Err(_) => {
                    let inputs = PageScoreInputs {
                        q,
                        summaries,
                        table,
                        spans,
                    };
                    reference_scores::<Self>(inputs, kv_heads, &choice)
                }
            }
        }
    }
}
