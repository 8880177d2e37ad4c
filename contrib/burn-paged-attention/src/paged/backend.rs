//! Paged attention on each backend. Autodiff needs no implementation: the public functions detach their tensors first.

#[cfg(feature = "cube")]
pub use kernels::{handles, in_place, rows_by, text};

#[cfg(feature = "cube")]
mod kernels {
    use crate::kernels::paged;
    use crate::kernels::paged::{
        AppendShape, PagedBuffers, PagedPlan, PagedShape, SlotShape, SumsBuffers,
    };
    use blocksparse_cubecl::recording::Failure;
    use blocksparse_cubecl::{KernelError, recording};
    use burn::backend::cubecl::dtype_to_elem_type;
    use burn_cubecl::kernel::into_contiguous;
    use burn_cubecl::tensor::CubeTensor;
    use burn_cubecl::{CubeBackend, CubeDevice};
    use cubecl::server::Handle;

    use crate::paged::ops::PagedOps;
    use crate::paged::values::{
        AppendInputs, OptInt, PackedRows, PagedCall, PagedInputs, PagedRows, StoredPages,
        StoredRows, SumsInputs,
    };
    use crate::paged::{reference, slots_reference};
    use burn_blocksparse::internal::cube::{
        checked, contiguous, empty, integers, uses_reference, writable,
    };
    use burn_blocksparse::internal::prelude::*;

    /// Describes the launches of a call.
    pub fn text(
        device: &CubeDevice,
        inputs: &PagedInputs<Dispatch>,
        call: &PagedCall,
    ) -> Result<String, KernelError> {
        PagedPlan::new(&device.client(), shape_of(inputs, call)).map(|plan| plan.to_string())
    }

    fn shape_of<B: Backend>(inputs: &PagedInputs<B>, call: &PagedCall) -> PagedShape {
        let [batch, heads, rows, width] = inputs.q.shape().dims();
        let [_, value_width] = inputs.pages.widths();
        let [_, tables, entries] = inputs.table.shape().dims();
        let mut shape = PagedShape::new(
            [batch, heads, call.kv_heads, rows],
            [tables, entries],
            inputs.pages.pages(),
            [width, value_width],
            dtype_to_elem_type(inputs.q.dtype()),
        );
        shape.quantization = inputs.pages.keys.quantization();
        shape.softcap = call.softcap.is_some();
        shape.visibility = matches!(inputs.positions, OptInt::Some(_));
        shape.selected = match &inputs.selected {
            OptInt::Some(selected) => Some(selected.shape()[2]),
            OptInt::None => None,
        };
        shape.sinks = inputs.sinks.as_ref().is_some();
        shape.counters = matches!(&inputs.counters, OptInt::Some(x) if x.dtype() == DType::I32);
        shape.fixed_split = call.fixed_split;
        shape
    }

    fn maybe_integers(tensor: OptInt<CubeBackend>) -> Option<CubeTensor> {
        tensor.into_option().map(integers)
    }

    /// Returns the pages for a kernel to write; fails a graph capture if they are shared.
    pub fn in_place(pages: CubeTensor) -> CubeTensor {
        if !pages.can_mut() {
            recording::fails(&pages.client, Failure::NotInPlace("the pages"));
        }
        writable(pages)
    }

    /// Applies a function to the rows, or to their words and scales.
    pub fn rows_by(
        rows: StoredRows<CubeBackend>,
        of: fn(CubeTensor) -> CubeTensor,
    ) -> StoredRows<CubeBackend> {
        match rows {
            StoredRows::Plain(rows) => StoredRows::Plain(of(rows)),
            StoredRows::Packed(rows) => StoredRows::Packed(PackedRows {
                quantization: rows.quantization,
                words: of(rows.words),
                scales: of(rows.scales),
            }),
        }
    }

    /// Returns the handles of the rows, or of their words and scales.
    pub fn handles(rows: &StoredRows<CubeBackend>) -> (&Handle, Option<&Handle>) {
        match rows {
            StoredRows::Plain(rows) => (&rows.handle, None),
            StoredRows::Packed(rows) => (&rows.words.handle, Some(&rows.scales.handle)),
        }
    }

    impl PagedOps for CubeBackend {
        fn paged_attention(inputs: PagedInputs<Self>, call: PagedCall) -> PagedRows<Self> {
            let shape = shape_of(&inputs, &call);
            // Bindings must not be empty.
            let has_keys =
                shape.pages * shape.entries > 0 && shape.selected.is_none_or(|count| count > 0);
            let plan = match has_keys && !uses_reference() {
                true => PagedPlan::new(&inputs.q.client, shape),
                false => return reference::attention::<Self>(inputs, &call),
            };
            let Ok(plan) = plan else {
                return reference::attention::<Self>(inputs, &call);
            };
            let [batch, heads, rows, _] = inputs.q.meta.shape().dims();
            let value_width = shape.widths[1];
            let sums = DType::from(accumulate_in(FloatDType::from(inputs.q.dtype)));
            let out = empty(&inputs.q, [batch, heads, rows, value_width], inputs.q.dtype);
            let lse = empty(&inputs.q, [batch, heads, rows], sums);
            let q = into_contiguous(inputs.q);
            let StoredPages { keys, values } = inputs.pages;
            let [keys, values] = [keys, values].map(|rows| rows_by(rows, into_contiguous));
            let [(keys, key_scales), (values, value_scales)] = [&keys, &values].map(handles);
            let [table, spans] = [inputs.table, inputs.spans].map(integers);
            let sight = [inputs.positions, inputs.last, inputs.query_positions].map(maybe_integers);
            let selected = maybe_integers(inputs.selected);
            let sinks = contiguous(inputs.sinks);
            let counters = inputs.counters.into_option();
            let counters = counters.filter(|_| shape.counters).map(into_contiguous);
            let visibility = match &sight {
                [Some(positions), Some(last), Some(queries)] => {
                    Some([&positions.handle, &last.handle, &queries.handle])
                }
                _ => None,
            };
            let buffers = PagedBuffers {
                q: &q.handle,
                keys,
                values,
                scales: key_scales
                    .zip(value_scales)
                    .map(|(keys, values)| [keys, values]),
                table: &table.handle,
                spans: &spans.handle,
                visibility,
                selected: selected.as_ref().map(|selected| &selected.handle),
                sinks: sinks.as_ref().map(|sinks| &sinks.handle),
                counters: counters.as_ref().map(|counters| &counters.handle),
                out: &out.handle,
                lse: &lse.handle,
            };
            let result =
                paged::paged_attention(&q.client, &plan, &buffers, call.scale, call.softcap);
            checked(result);
            PagedRows { out, lse }
        }

        fn append(inputs: AppendInputs<Self>) -> StoredPages<Self> {
            let [batch, kv_heads, rows, width] = inputs.k.meta.shape().dims();
            let [pages, page] = inputs.pages.pages();
            let shape = AppendShape {
                batch,
                kv_heads,
                tables: inputs.slots.meta.shape()[1],
                rows,
                page,
                pages,
                widths: [width, inputs.v.meta.shape()[3]],
                dtype: dtype_to_elem_type(inputs.k.dtype),
            };
            let client = inputs.k.client.clone();
            let elsewhere = |inputs| {
                recording::fails(&client, Failure::NotInPlace("the pages"));
                reference::append::<Self>(inputs)
            };
            if uses_reference() {
                return elsewhere(inputs);
            }
            let [k, v] = [inputs.k, inputs.v].map(into_contiguous);
            let rows = [&k.handle, &v.handle];
            let slots = integers(inputs.slots);
            let StoredPages { keys, values } = inputs.pages;
            let [keys, values] = [keys, values].map(|rows| rows_by(rows, in_place));
            let written = match (&keys, &values) {
                (StoredRows::Plain(keys), StoredRows::Plain(values)) => {
                    let to = [&keys.handle, &values.handle];
                    paged::append_rows(&client, &shape, rows, &slots.handle, to)
                }
                (StoredRows::Packed(keys), StoredRows::Packed(values)) => {
                    let to = [&keys.words, &values.words, &keys.scales, &values.scales];
                    let (of, to) = (keys.quantization, to.map(|tensor| &tensor.handle));
                    paged::append_quantized(&client, &shape, of, rows, &slots.handle, to)
                }
                _ => unreachable!("keys and values are stored alike"),
            };
            let pages = StoredPages { keys, values };
            match written {
                Ok(()) => pages,
                Err(_) => elsewhere(AppendInputs { pages, k, v, slots }),
            }
        }

        fn page_list_slots(table: CubeTensor, spans: CubeTensor, page: usize) -> CubeTensor {
            let [page_lists, entries] = table.meta.shape().dims();
            if uses_reference() || page_lists * entries == 0 {
                return slots_reference::page_list_slots::<Self>(table, spans, page);
            }
            let [table, spans] = [table, spans].map(integers);
            let shape = SlotShape {
                page_lists,
                entries,
                page,
            };
            let slots = empty(&table, [page_lists, shape.slots()], DType::I32);
            checked(paged::page_list_slots(
                &table.client,
                &shape,
                [&table.handle, &spans.handle],
                &slots.handle,
            ));
            slots
        }

        fn picked_slots(
            places: CubeTensor,
            table: CubeTensor,
            heads: usize,
            page: usize,
        ) -> CubeTensor {
            let [page_lists, most] = places.meta.shape().dims();
            let [_, entries] = table.meta.shape().dims();
            if uses_reference() || page_lists * entries * most == 0 {
                return slots_reference::picked_slots::<Self>(places, table, heads, page);
            }
            let [places, table] = [places, table].map(integers);
            let shape = SlotShape {
                page_lists,
                entries,
                page,
            };
            let slots = empty(&table, [page_lists, heads, most], DType::I32);
            checked(paged::picked_slots(
                &table.client,
                &shape,
                [heads, most],
                [&places.handle, &table.handle],
                &slots.handle,
            ));
            slots
        }

        fn write_integers(to: CubeTensor, at: CubeTensor, values: CubeTensor) -> CubeTensor {
            if uses_reference() || to.dtype != DType::I32 {
                recording::fails(&to.client, Failure::NotInPlace("what is known of slots"));
                return slots_reference::write_integers::<Self>(to, at, values);
            }
            let to = in_place(to);
            let [at, values] = [at, values].map(integers);
            let sizes = [at.meta.shape()[0], to.meta.shape()[0]];
            let from = [&at.handle, &values.handle];
            checked(paged::write_integers(&to.client, sizes, from, &to.handle));
            to
        }

        fn attention_sums(inputs: SumsInputs<Self>, call: PagedCall) -> CubeTensor {
            let [batch, heads, rows, width] = inputs.q.meta.shape().dims();
            let [_, tables, entries] = inputs.table.meta.shape().dims();
            let [seats, slots, planes] = inputs.sums.meta.shape().dims();
            let mut shape = PagedShape::new(
                [batch, heads, call.kv_heads, rows],
                [tables, entries],
                inputs.pages.pages(),
                [width; 2],
                dtype_to_elem_type(inputs.q.dtype),
            );
            shape.softcap = call.softcap.is_some();
            let sizes = [seats / call.kv_heads, slots, planes - 1];
            let client = inputs.q.client.clone();
            let elsewhere = |inputs| {
                recording::fails(&client, Failure::NotInPlace("sums of attention"));
                reference::attention_sums::<Self>(inputs, &call)
            };
            if inputs.sums.dtype != DType::F32 || uses_reference() {
                return elsewhere(inputs);
            }
            let StoredRows::Plain(keys) = inputs.pages.keys.clone() else {
                return elsewhere(inputs);
            };
            let sums = in_place(inputs.sums);
            let [q, lse, keys] = [inputs.q, inputs.lse, keys].map(into_contiguous);
            let [table, spans, calls] = [inputs.table, inputs.spans, inputs.calls].map(integers);
            let buffers = SumsBuffers {
                q: &q.handle,
                lse: &lse.handle,
                keys: &keys.handle,
                table: &table.handle,
                spans: &spans.handle,
                calls: &calls.handle,
                sums: &sums.handle,
            };
            let (scale, softcap) = (call.scale, call.softcap);
            match paged::attention_sums(&client, &shape, sizes, &buffers, scale, softcap) {
                Ok(()) => sums,
                Err(_) => elsewhere(SumsInputs {
                    q,
                    lse,
                    pages: inputs.pages,
                    table,
                    spans,
                    calls,
                    sums,
                }),
            }
        }
    }
}
