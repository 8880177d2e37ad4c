//! The backend trait of page summaries and of scores by them, its argument types, and a reference in Burn's primitives.

use crate::paged::reference::{HostInts, assign, rows_at, written};
use crate::paged::values::StoredRows;
use burn::tensor::IntDType;
use burn_blocksparse::internal::prelude::*;
use burn_sparse_select::PageSummary;
use burn_sparse_select::pages::PageChoice;

op_values! {
    /// The tensors of [`summarize_pages`](crate::summaries::summarize_pages) and [`summarize_stored`](crate::summaries::summarize_stored).
    pub struct SummarizeInputs {
        /// `[pages, 2 or 1, d_k]`
        pub summaries: FloatTensor,
        /// Keys of the pages.
        pub keys: StoredRows,
        /// `[batch, T, s]`: slots of the new rows; negative: not stored.
        pub slots: IntTensor,
    }

    /// The tensors of [`page_scores`](crate::summaries::page_scores).
    pub struct PageScoreInputs {
        /// `[batch, heads, d_k]`
        pub q: FloatTensor,
        /// `[pages, 2 or 1, d_k]`
        pub summaries: FloatTensor,
        /// `[batch, T, max_pages]`
        pub table: IntTensor,
        /// `[batch, T, 4]`
        pub spans: IntTensor,
    }
}

/// Page summaries and scores by them as backend operations, on tensors that are not on an autodiff device. The public functions check the arguments.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait PageSummaryOps: Backend {
    /// Updates the summaries of the pages that rows were written to: in place if the call holds the only reference, otherwise in a copy.
    #[fusion(dtype = inputs.summaries.dtype, shape = inputs.summaries.shape.clone())]
    fn summarize_pages(
        #[extension_type] inputs: SummarizeInputs<Self>,
        kv_heads: usize,
        summary: PageSummary,
    ) -> FloatTensor<Self> {
        summarize::<Self>(inputs, kv_heads, summary)
    }

    /// Computes scores of pages, f32 `[batch, kv_heads, entries]`.
    #[fusion(
        dtype = DType::F32,
        shape = [inputs.table.shape[0], *kv_heads, inputs.table.shape[2]].into()
    )]
    fn page_scores(
        #[extension_type] inputs: PageScoreInputs<Self>,
        kv_heads: usize,
        choice: PageChoice,
    ) -> FloatTensor<Self> {
        scores::<Self>(inputs, kv_heads, &choice)
    }
}

reference_backends!(PageSummaryOps);

/// A page with new keys, and its number of keys including them.
struct Touched {
    page: i64,
    keys: i64,
}

pub(crate) fn summarize<B: Backend>(
    inputs: SummarizeInputs<B>,
    kv_heads: usize,
    summary: PageSummary,
) -> FloatTensor<B> {
    let SummarizeInputs {
        summaries,
        keys,
        slots,
    } = inputs;
    let [pages, page, width] = keys.dims();
    let [batch, _, rows] = slots.shape().dims();
    let slots = HostInts::read::<B>(slots);
    let (_, to) = written(&slots, [batch, kv_heads, rows], [pages, page]);
    let size = page as i64;
    let mut touched: Vec<Touched> = Vec::new();
    for slot in to {
        let (page, keys) = (slot / size, slot % size + 1);
        match touched.last_mut().filter(|last| last.page == page) {
            Some(last) => last.keys = keys,
            None => touched.push(Touched { page, keys }),
        }
    }
    if touched.is_empty() {
        return summaries;
    }
    let summaries = Array::<B>(summaries);
    let (device, dtype, shape) = (summaries.0.device(), summaries.dtype(), summaries.shape());
    let count = touched.len();
    // Pad with the page's first key: bounds ignore repetitions, and means weigh them 0.
    let ids = touched.iter().flat_map(|touched| {
        (0..size).map(|slot| touched.page * size + if slot < touched.keys { slot } else { 0 })
    });
    let rows = rows_at(&keys, slots.upload::<B>(ids.collect(), &device));
    let sums = accumulate_in(rows.dtype());
    let rows = rows.cast(sums).reshape([count, page, width]);
    let made = match summary {
        PageSummary::Bounds => {
            let least = -(-rows.clone()).max_dim(1);
            Array::cat([rows.max_dim(1), least], 1)
        }
        PageSummary::Mean => {
            let weights = touched.iter().flat_map(|touched| {
                let weight = 1.0 / touched.keys as f64;
                (0..size).map(move |slot| if slot < touched.keys { weight } else { 0.0 })
            });
            let weights = TensorData::new(weights.collect::<Vec<f64>>(), [count, 1, page]);
            let weights = B::float_from_data(weights.convert_dtype(sums.into()), &device);
            Array::<B>(weights).matmul(rows)
        }
    };
    let numbers = summary.rows() * width;
    let made = made.cast(dtype).reshape([count, numbers]);
    let places = touched.iter().map(|touched| touched.page).collect();
    let places = slots.upload::<B>(places, &device);
    let flat = summaries.reshape([pages, numbers]);
    Array::<B>(assign::<B>(flat.0, places, made.0))
        .reshape(shape)
        .0
}

pub(crate) fn scores<B: Backend>(
    inputs: PageScoreInputs<B>,
    kv_heads: usize,
    choice: &PageChoice,
) -> FloatTensor<B> {
    let PageScoreInputs {
        q,
        summaries,
        table,
        ..
    } = inputs;
    let (q, summaries) = (Array::<B>(q), Array::<B>(summaries));
    let [batch, heads, width] = q.dims();
    let [_, tables, entries] = table.shape().dims();
    let [pages, rows, _] = summaries.dims();
    let device = q.0.device();
    let sums = accumulate_in(q.dtype());
    if batch * heads * entries * pages == 0 {
        let shape = [batch, kv_heads, entries];
        return Array::<B>::zeros(shape, &device, FloatDType::F32).0;
    }
    let group = heads / kv_heads;
    let q = q.cast(sums);
    let q = match choice.summary {
        PageSummary::Bounds => {
            let least = q.clone().clamp(f64::NEG_INFINITY, 0.0);
            Array::cat([q.at_least(0.0), least], 2)
        }
        PageSummary::Mean => q,
    };
    let numbers = rows * width;
    let q = q.reshape([batch * kv_heads, group, numbers]);
    let q = q.sum_dim(1) * choice.factor(group);
    // With one table the pages of the heads are adjacent.
    let shared = kv_heads / tables;
    let ids = B::int_clamp_min(table, 0.into());
    let ids = B::int_reshape(ids, Shape::new([batch, tables, 1, entries]));
    let ids = B::int_expand(ids, Shape::new([batch, tables, shared, entries]));
    let ids = B::int_mul_scalar(ids, (shared as i64).into());
    let dtype = IntDType::from(ids.dtype());
    let own = B::int_arange(0..shared as i64, &device, dtype);
    let own = B::int_reshape(own, Shape::new([1, 1, shared, 1]));
    let own = B::int_expand(own, Shape::new([batch, tables, shared, entries]));
    let ids = B::int_clamp_max(B::int_add(ids, own), (pages as i64 - 1).into());
    let ids = B::int_reshape(ids, Shape::new([batch * kv_heads * entries]));
    let found = summaries.reshape([pages, numbers]).select(0, ids);
    let found = found
        .cast(sums)
        .reshape([batch * kv_heads, entries, numbers]);
    let scores = q.matmul(found.transpose());
    let scores = scores.reshape([batch, kv_heads, entries]);
    scores.cast(FloatDType::F32).0
}
