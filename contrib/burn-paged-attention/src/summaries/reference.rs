//! Summaries of pages, and scores by them, in Burn's primitives.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, IntDType, Shape, TensorData};
use burn_blocksparse::graph::recording;
use burn_blocksparse::internal::dtype::accumulate_in;
use burn_sparse_select::PageSummary;
use burn_sparse_select::pages::PageChoice;

use crate::paged::reference::{HostInts, assign, int_data, rows_at, written};
use crate::summaries::values::{PageScoreInputs, SummarizeInputs};

/// A page that has new keys, and how many it has with them.
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
    let device = summaries.device();
    recording::doom_by_upload(&device, "slots of pages");
    let dtype = FloatDType::from(summaries.dtype());
    let count = touched.len();
    // The first key once more for each that is not there.
    let ids = touched.iter().flat_map(|touched| {
        (0..size).map(|slot| touched.page * size + if slot < touched.keys { slot } else { 0 })
    });
    let ids = B::int_from_data(int_data(ids.collect(), &slots), &device);
    let rows = rows_at(&keys, ids);
    let sums = accumulate_in(FloatDType::from(rows.dtype()));
    let rows = B::float_reshape(B::float_cast(rows, sums), Shape::new([count, page, width]));
    let made = match summary {
        PageSummary::Bounds => {
            let most = B::float_max_dim(rows.clone(), 1);
            let least = B::float_neg(B::float_max_dim(B::float_neg(rows), 1));
            B::float_cat(vec![most, least], 1)
        }
        PageSummary::Mean => {
            let weights = touched.iter().flat_map(|touched| {
                let weight = 1.0 / touched.keys as f64;
                (0..size).map(move |slot| if slot < touched.keys { weight } else { 0.0 })
            });
            let weights = TensorData::new(weights.collect::<Vec<f64>>(), [count, 1, page]);
            let weights = B::float_from_data(weights.convert_dtype(sums.into()), &device);
            B::float_matmul(weights, rows)
        }
    };
    let numbers = summary.rows() * width;
    let made = B::float_reshape(B::float_cast(made, dtype), Shape::new([count, numbers]));
    let places = touched.iter().map(|touched| touched.page).collect();
    let places = B::int_from_data(int_data(places, &slots), &device);
    let shape = summaries.shape();
    let flat = B::float_reshape(summaries, Shape::new([pages, numbers]));
    B::float_reshape(assign::<B>(flat, places, made), shape)
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
    let [batch, heads, width] = q.shape().dims();
    let [_, tables, entries] = table.shape().dims();
    let [pages, rows, _] = summaries.shape().dims();
    let device = q.device();
    let sums = accumulate_in(FloatDType::from(q.dtype()));
    if batch * heads * entries * pages == 0 {
        let shape = Shape::new([batch, kv_heads, entries]);
        return B::float_zeros(shape, &device, FloatDType::F32);
    }
    let group = heads / kv_heads;
    let q = B::float_cast(q, sums);
    let parts = match choice.summary {
        PageSummary::Bounds => vec![
            B::float_clamp_min(q.clone(), 0.0.into()),
            B::float_clamp_max(q, 0.0.into()),
        ],
        PageSummary::Mean => vec![q],
    };
    let q = match parts.len() {
        1 => parts.into_iter().next().expect("one part"),
        _ => B::float_cat(parts, 2),
    };
    let numbers = rows * width;
    let q = B::float_reshape(q, Shape::new([batch * kv_heads, group, numbers]));
    let q = B::float_mul_scalar(B::float_sum_dim(q, 1), choice.factor(group).into());
    // With one table the pages of the heads follow each other.
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
    let flat = B::float_reshape(summaries, Shape::new([pages, numbers]));
    let found = B::float_cast(B::float_select(flat, 0, ids), sums);
    let found = B::float_reshape(found, Shape::new([batch * kv_heads, entries, numbers]));
    let scores = B::float_matmul(q, B::float_transpose(found));
    let scores = B::float_reshape(scores, Shape::new([batch, kv_heads, entries]));
    B::float_cast(scores, FloatDType::F32)
}
