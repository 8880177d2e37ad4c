//! Paged attention.

use burn_blocksparse::alibi_slopes;
use burn_blocksparse_tests::prelude::*;
use burn_paged_attention::summaries::{PageSummaries, select_pages, summarize_pages};
use burn_paged_attention::{
    PagedKeysValues, PagedOptions, PagedStore, PagedVisibility, Quantization, QuantizedPages,
    append_quantized, append_rows, dequantize, paged_attention,
};
use burn_sparse_select::{PageSummary, Selection};

burn_blocksparse_tests::tests!(paged);

fn int<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::zeros(shape, (device, DType::I32))
}

fn float<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::zeros(shape, (device, DType::F32))
}

/// Returns two sequences with four query heads on two KV heads that share a table.
fn pages(device: &Device) -> PagedKeysValues {
    PagedKeysValues::new(
        float([6, 16, 8], device),
        float([6, 16, 8], device),
        2,
        int([2, 1, 4], device),
        int([2, 1, 4], device),
    )
}

fn plain(pages: &mut PagedKeysValues) -> (&mut Tensor<3>, &mut Tensor<3>) {
    match &mut pages.store {
        PagedStore::Plain { keys, values } => (keys, values),
        PagedStore::Quantized(_) => panic!("pages of floats"),
    }
}

#[test]
fn arguments_are_checked() {
    for device in &devices() {
        let visible = |positions: [usize; 2], rows: [usize; 1]| PagedVisibility {
            positions: int(positions, device),
            last: int([3, 16], device),
            query_positions: int(rows, device),
        };
        let with = |change: &dyn Fn(&mut PagedKeysValues, &mut PagedOptions)| {
            let (mut kv, mut options) = (pages(device), PagedOptions::default());
            let q = float([2, 4, 1, 8], device);
            paged_attention(q.clone(), &kv, &options).unwrap();
            change(&mut kv, &mut options);
            paged_attention(q, &kv, &options)
        };
        refused! {
            with(&|kv, _| *plain(kv).0 = float([6, 12, 8], device)) => "keys' page size must be a power of two, got 12";
            with(&|kv, _| *plain(kv).0 = float([6, 16, 4], device)) => "keys' width must be 8, q's, got 4";
            with(&|kv, _| *plain(kv).1 = float([5, 16, 8], device)) => "values' pages must be 6, the keys', got 5";
            with(&|kv, _| *plain(kv).1 = float([6, 8, 8], device)) => "values' page size must be 16, the keys', got 8";
            with(&|kv, _| kv.kv_heads = 0) => "kv_heads must be at least 1, got 0";
            with(&|kv, _| kv.kv_heads = 3) => "kv_heads must be a divisor of the 4 heads of q, got 3";
            with(&|kv, _| kv.table = int([2, 3, 4], device)) => "table's heads must be 1 or 2, kv_heads, got 3";
            with(&|kv, _| kv.table = int([3, 1, 4], device)) => "table's batch must be 2, q's, got 3";
            with(&|kv, _| kv.spans = int([2, 2, 4], device)) => "spans' shape must be [2, 1, 4], the table's rows, got [2, 2, 4]";
            with(&|kv, _| { *plain(kv).0 = float([5, 16, 8], device); *plain(kv).1 = float([5, 16, 8], device) }) => "keys' pages must be a multiple of 2, kv_heads, because they share the table, got 5";
            with(&|kv, _| kv.selected = Some(int([2, 1, 3], device))) => "selected's shape must be [2, 2, 3], a list a head, got [2, 1, 3]";
            with(&|kv, _| kv.visibility = Some(visible([6, 16], [2]))) => "positions' shape must be [3, 16], the table's pages, got [6, 16]";
            with(&|kv, _| kv.visibility = Some(visible([3, 16], [1]))) => "query_positions' shape must be [2], q's batch, got [1]";
            with(&|_, options| options.sinks = Some(float([2], device))) => "sinks' heads must be 4, q's, got 2";
            with(&|_, options| options.scale = Some(f64::NAN)) => "options.scale must be finite in f32, got NaN";
            with(&|_, options| options.softcap = Some(0.0)) => "options.softcap must be positive and finite in f32, got 0";
            with(&|_, options| options.fixed_split = Some(0)) => "options.fixed_split must be at least 1, got 0";
        }
    }
}

#[test]
fn rows_to_append_are_checked() {
    for device in devices() {
        let pages = || float([6, 16, 8], &device);
        let row = |heads: usize| float([1, heads, 1, 8], &device);
        let append = |k, v, slots| append_rows(pages(), pages(), k, v, int(slots, &device));
        refused! {
            append(row(2), row(1), [1, 1, 1]) => "v's shape must be [1, 2, 1, 8], k's, of the values' width, got [1, 1, 1, 8]";
            append(row(2), row(2), [1, 1, 3]) => "slots' shape must be [1, 1, 1], k's rows, got [1, 1, 3]";
            append(row(4), row(4), [1, 1, 1]) => "keys' pages must be a multiple of 4, kv_heads, because they share the table, got 6";
        }
    }
}

#[test]
fn choices_of_pages_are_checked() {
    for device in devices() {
        let choice = "quest:16,48".parse::<Selection>().unwrap().on_pages(16, 2);
        let choice = choice.unwrap();
        let bounds = |pages, width| {
            PageSummaries::zeros(PageSummary::Bounds, pages, width, DType::F32, &device)
        };
        let keys = float([6, 16, 8], &device);
        let slots = |heads| int([1, heads, 1], &device);
        refused! {
            summarize_pages(bounds(6, 4), &keys, 2, slots(1)) => "summaries' shape must be [6, 2, 8], of the keys, got [6, 2, 4]";
            summarize_pages(bounds(6, 8), &keys, 2, slots(3)) => "slots' heads must be 1 or 2, kv_heads, got 3";
        }
        let select = |q: [usize; 3], summaries: PageSummaries, table, spans| {
            let (table, spans) = (int(table, &device), int(spans, &device));
            select_pages(float(q, &device), &summaries, 2, &table, &spans, &choice)
        };
        let table = [2, 1, 4];
        let picks = select([2, 4, 8], bounds(6, 8), table, [2, 1, 4]).unwrap();
        assert_eq!(picks.dims(), [2, 2, 3]);
        let means = PageSummaries::zeros(PageSummary::Mean, 6, 8, DType::F32, &device);
        refused! {
            select([2, 4, 4], bounds(6, 8), table, [2, 1, 4]) => "summaries' width must be 4, q's, got 8";
            select([2, 3, 8], bounds(6, 8), table, [2, 1, 4]) => "kv_heads must be a divisor of the 3 heads of q, got 2";
            select([3, 4, 8], bounds(6, 8), table, [2, 1, 4]) => "table's batch must be 3, q's, got 2";
            select([2, 4, 8], bounds(6, 8), table, [2, 2, 4]) => "spans' shape must be [2, 1, 4], the table's rows, got [2, 2, 4]";
            select([2, 4, 8], bounds(5, 8), table, [2, 1, 4]) => "keys' pages must be a multiple of 2, kv_heads, because they share the table, got 5";
            select([2, 4, 8], means, table, [2, 1, 4]) => "summaries must be Bounds, the choice's, got Mean";
        }
    }
}

#[test]
fn options_that_pages_do_not_have() {
    let tensors = AttentionTensors::default();
    let options = AttentionOptions::default().softcap(30.0).scale(0.5);
    let paged = PagedOptions::for_attention(&options, &tensors).unwrap();
    assert_eq!((paged.softcap, paged.scale), (Some(30.0), Some(0.5)));
    refused! { PagedOptions::for_attention(&options.alibi(alibi_slopes(4)), &tensors) => "options.alibi must be unset, because attention over pages does not support it, got a value"; }
}

#[test]
fn quantised_pages_are_checked() {
    for device in devices() {
        let zeros =
            |sizes, widths| QuantizedPages::zeros(Quantization::Int8, sizes, widths, &device);
        refused! {
            zeros([6, 16], [8, 6]) => "values' width must be a multiple of 4, got 6";
            zeros([6, 12], [8, 8]) => "keys' page size must be a power of two, got 12";
        }
        let pages = zeros([6, 16], [8, 8]).unwrap();
        assert_eq!(pages.widths(), [8, 8]);
        let row = |heads: usize| float([1, heads, 1, 8], &device);
        let slots = || int([1, 1, 1], &device);
        refused! { append_quantized(pages.clone(), row(2), row(1), slots()) => "v's shape must be [1, 2, 1, 8], k's, of the values' width, got [1, 1, 1, 8]"; }
        let mut other = pages.clone();
        other.key_scales = float([6, 8], &device);
        refused! { append_quantized(other, row(2), row(2), slots()) => "key_scales' shape must be [6, 16], the pages', got [6, 8]"; }
        let mut other = pages.clone();
        other.keys = Tensor::zeros([6, 16, 2], (&device, DType::I64));
        refused! { append_quantized(other, row(2), row(2), slots()) => "keys' dtype must be I32, for quantised pages, got I64"; }
        let [table, spans] = [(); 2].map(|()| int([2, 1, 4], &device));
        let kv = PagedKeysValues::of_store(PagedStore::Quantized(pages), 2, table, spans);
        let (q, options) = (float([2, 4, 1, 4], &device), PagedOptions::default());
        let (words, scales) = (int([3, 2], &device), float([2], &device));
        refused! {
            paged_attention(q, &kv, &options) => "keys' width must be 4, q's, got 8";
            dequantize(Quantization::Fp8E4m3, words, scales) => "scales' shape must be [3], a row each, got [2]";
        }
    }
}
