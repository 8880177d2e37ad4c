//! Summaries of pages, and scores by them, on each backend. Autodiff has none: public functions hand over tensors that it does not follow.

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
    use crate::kernels::paged::{AppendShape, PageScoreBuffers, PageScoreShape, Summary};
    use crate::paged::backend::in_place;
    use crate::summaries::ops::PageSummaryOps;
    use crate::summaries::reference;
    use crate::summaries::values::{PageScoreInputs, SummarizeInputs, SummarizePacked};
    use burn_blocksparse::internal::cube::{checked, empty, integers, uses_reference};
    use burn_sparse_select::PageSummary;
    use burn_sparse_select::backend::PageChoiceCall;

    fn summary_of(summary: PageSummary) -> Summary {
        match summary {
            PageSummary::Bounds => Summary::Bounds,
            PageSummary::Mean => Summary::Mean,
        }
    }

    impl PageSummaryOps for CubeBackend {
        fn summarize_pages(
            inputs: SummarizeInputs<Self>,
            kv_heads: usize,
            summary: PageSummary,
        ) -> CubeTensor {
            let [pages, page, width] = inputs.keys.meta.shape().dims();
            let [batch, tables, rows] = inputs.slots.meta.shape().dims();
            let shape = AppendShape::new(
                [batch, kv_heads, tables, rows],
                [pages, page],
                [width, 0],
                dtype_to_elem_type(inputs.keys.dtype),
            );
            let dtype = dtype_to_elem_type(inputs.summaries.dtype);
            let client = inputs.keys.client.clone();
            if uses_reference() || paged::check_summarize(&client, &shape, dtype).is_err() {
                recording::fails(&client, Failure::NotInPlace("the summaries of pages"));
                return reference::summarize::<Self>(inputs, kv_heads, summary);
            }
            let summaries = in_place(inputs.summaries);
            let keys = into_contiguous(inputs.keys);
            let slots = integers(inputs.slots);
            checked(paged::summarize_pages(
                &client,
                &shape,
                summary_of(summary),
                &keys.handle,
                &slots.handle,
                (&summaries.handle, dtype),
            ));
            summaries
        }

        fn summarize_quantized(
            inputs: SummarizePacked<Self>,
            kv_heads: usize,
            summary: PageSummary,
        ) -> CubeTensor {
            let [pages, page, words] = inputs.words.meta.shape().dims();
            let [batch, tables, rows] = inputs.slots.meta.shape().dims();
            let shape = AppendShape::new(
                [batch, kv_heads, tables, rows],
                [pages, page],
                [4 * words, 0],
                dtype_to_elem_type(DType::F32),
            );
            let client = inputs.words.client.clone();
            if uses_reference() || paged::check_summarize_quantized(&client, &shape).is_err() {
                recording::fails(&client, Failure::NotInPlace("the summaries of pages"));
                return reference::summarize_packed::<Self>(inputs, kv_heads, summary);
            }
            let summaries = in_place(inputs.summaries);
            let (words, scales) = (
                into_contiguous(inputs.words),
                into_contiguous(inputs.scales),
            );
            let slots = integers(inputs.slots);
            checked(paged::summarize_quantized(
                &client,
                &shape,
                summary_of(summary),
                (&words.handle, &scales.handle, inputs.quantization),
                &slots.handle,
                &summaries.handle,
            ));
            summaries
        }

        fn page_scores(inputs: PageScoreInputs<Self>, call: PageChoiceCall) -> CubeTensor {
            let [batch, heads, width] = inputs.q.meta.shape().dims();
            let [_, tables, entries] = inputs.table.meta.shape().dims();
            let pages = inputs.summaries.meta.shape()[0];
            let shape = PageScoreShape::new(
                [batch, heads, call.kv_heads],
                [tables, entries],
                [pages, call.choice.page, width],
                dtype_to_elem_type(inputs.q.dtype),
                (
                    summary_of(call.choice.summary),
                    dtype_to_elem_type(inputs.summaries.dtype),
                ),
            );
            let client = inputs.q.client.clone();
            let is_empty = batch * heads * entries * pages == 0;
            if is_empty || uses_reference() || paged::check_page_scores(&client, &shape).is_err() {
                return reference::scores::<Self>(inputs, &call);
            }
            let scores = empty(&inputs.q, [batch, call.kv_heads, entries], DType::F32);
            let [q, summaries] = [inputs.q, inputs.summaries].map(into_contiguous);
            let [table, spans] = [inputs.table, inputs.spans].map(integers);
            let buffers = PageScoreBuffers {
                q: &q.handle,
                summaries: &summaries.handle,
                table: &table.handle,
                spans: &spans.handle,
                scores: &scores.handle,
            };
            let factor = call.factor(heads / call.kv_heads);
            checked(paged::page_scores(&client, &shape, &buffers, factor));
            scores
        }
    }
}
