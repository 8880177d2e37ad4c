//! Selection of pages by summaries of their keys, before attention reads them.

pub(crate) mod backend;
pub(crate) mod ops;

use burn_blocksparse::internal::prelude::*;
use burn_sparse_select::PageSummary;

use crate::PagedStore;
use crate::paged::{check_heads, check_shared, check_tables, inner};
use crate::summaries::ops::{PageScoreInputs, PageSummaryOps, SummarizeInputs};

pub use burn_sparse_select::pages::{PageChoice, topk_pages};

/// Summaries of pages of keys: `[pages, 2, d_k]` with the maximum and then the minimum of each channel, or `[pages, 1, d_k]` with the means.
#[derive(Clone, Debug)]
pub struct PageSummaries {
    /// Kind of the summary.
    pub summary: PageSummary,
    /// The summaries. Bounds are exact in the keys' dtype.
    pub values: Tensor<3>,
}

impl PageSummaries {
    /// Makes summaries of empty pages: zeros.
    pub fn zeros(
        summary: PageSummary,
        pages: usize,
        width: usize,
        dtype: DType,
        device: &Device,
    ) -> Self {
        let shape = [pages, summary.rows(), width];
        Self {
            summary,
            values: Tensor::zeros(shape, (device, dtype)),
        }
    }

    fn check(&self) -> Result<(), OpError> {
        let [_, rows, width] = self.values.dims();
        let expected = self.summary.rows();
        OpError::expect_same("summaries' rows", expected, "of a summary", rows)?;
        OpError::ensure_positive("summaries' width", width)
    }
}

/// Updates the summaries of the pages that new keys were written to, from all keys of such a page up to the last new one. Works in place if the call
/// holds the only reference to the buffer (pass it by value and keep no clone). Call it after [`append_rows`](crate::append_rows), with the same
/// slots; those of a page are adjacent and ascending. Former contents of a page (keys rolled back, a copy, another sequence) have no influence.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_paged_attention::append_rows;
/// use burn_paged_attention::summaries::{PageSummaries, summarize_pages};
/// use burn_sparse_select::PageSummary;
///
/// let device = Device::flex();
/// let [keys, values] = [(); 2].map(|_| Tensor::<3>::zeros([4, 16, 8], &device));
/// let k = Tensor::<4>::ones([1, 2, 1, 8], &device);
/// // A key of one sequence with two heads: slot 0 of table entry 1, so of pages 2 and 3.
/// let slots = Tensor::<3, Int>::from_data([[[16]]], &device);
/// let (keys, _) = append_rows(keys, values, k.clone(), k, slots.clone())?;
/// let summaries = PageSummaries::zeros(PageSummary::Bounds, 4, 8, keys.dtype(), &device);
/// let summaries = summarize_pages(summaries, &keys, 2, slots)?;
/// assert_eq!(summaries.values.slice([2..4]).sum().into_scalar::<f32>(), 32.0);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// - `keys`: `[pages, P, d_k]`
/// - `slots`: `[batch, 1 or kv_heads, s]`, i32, like those of [`append_rows`](crate::append_rows)
///
/// # Errors
/// [`OpError`] if shapes or devices do not match, or no feature of this crate serves the device.
pub fn summarize_pages(
    summaries: PageSummaries,
    keys: &Tensor<3>,
    kv_heads: usize,
    slots: Tensor<3, Int>,
) -> Result<PageSummaries, OpError> {
    let store = PagedStore::Plain {
        keys: keys.clone(),
        values: keys.clone(),
    };
    summarize_stored(summaries, &store, kv_heads, slots)
}

/// [`summarize_pages`] for keys in any storage format. 8-bit keys are dequantized, so bounds are those of the keys that attention sees; their
/// summaries are f32.
///
/// ```
/// use burn::tensor::{DType, Device, Int, Tensor};
/// use burn_paged_attention::summaries::{PageSummaries, summarize_stored};
/// use burn_paged_attention::{PagedStore, Quantization, QuantizedPages, append_quantized};
/// use burn_sparse_select::PageSummary;
///
/// let device = Device::flex();
/// let pages = QuantizedPages::zeros(Quantization::Int8, [4, 16], [8, 8], &device)?;
/// let k = Tensor::<4>::ones([1, 2, 1, 8], &device) * 3.0;
/// let slots = Tensor::<3, Int>::from_data([[[16]]], &device);
/// let pages = append_quantized(pages, k.clone(), k, slots.clone())?;
/// let summaries = PageSummaries::zeros(PageSummary::Bounds, 4, 8, DType::F32, &device);
/// let summaries = summarize_stored(summaries, &PagedStore::Quantized(pages), 2, slots)?;
/// assert_eq!(summaries.values.slice([2..4]).sum().into_scalar::<f32>(), 96.0);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Errors
/// Those of [`summarize_pages`]; also if summaries of 8-bit pages are not f32.
pub fn summarize_stored(
    summaries: PageSummaries,
    store: &PagedStore,
    kv_heads: usize,
    slots: Tensor<3, Int>,
) -> Result<PageSummaries, OpError> {
    let ([pages, page], [width, _]) = (store.pages(), store.widths());
    let device = store.device();
    served(&device)?;
    summaries.check()?;
    blocksparse::ensure! { OpError; page.is_power_of_two() => "keys' page size", "a power of two", page; }
    let expected = [pages, summaries.summary.rows(), width];
    let got = summaries.values.dims();
    OpError::expect_same("summaries' shape", expected, "of the keys", got)?;
    let tables = slots.dims()[1];
    check_heads("slots' heads", tables, kv_heads)?;
    check_shared(pages, kv_heads, tables)?;
    for (argument, other) in [
        ("summaries' device", summaries.values.device()),
        ("slots' device", slots.device()),
    ] {
        same_device(argument, &device, "the keys'", &other)?;
    }
    if let PagedStore::Quantized(pages) = store {
        pages.check()?;
        let dtype = summaries.values.dtype();
        OpError::expect_same("summaries' dtype", DType::F32, "of quantised keys", dtype)?;
    }
    let PageSummaries { summary, values } = summaries;
    let inputs = SummarizeInputs {
        summaries: inner(values),
        keys: store.clone().stored().keys,
        slots: inner(slots),
    };
    let values = <Dispatch as PageSummaryOps>::summarize_pages(inputs, kv_heads, summary);
    Ok(PageSummaries {
        summary,
        values: Tensor::from_dispatch(values),
    })
}

/// Returns the scores of each query for the pages of region one, f32 `[batch, kv_heads, max_pages]`: `Σ_c max(q_c · max_c, q_c · min_c)`, an upper
/// bound of the dot products with the page's keys, or `q · mean`; then the mean or sum over the heads that share a KV head. Elements beyond the
/// pages of a list are undefined.
///
/// # Shapes
/// - `q`: `[batch, heads, d_k]`, one query of each head per page list
/// - `table`, `spans`: those of [`PagedKeysValues`](crate::PagedKeysValues)
///
/// # Errors
/// [`OpError`] if shapes, dtypes or devices do not match, or no feature of this crate serves the device.
pub fn page_scores(
    q: Tensor<3>,
    summaries: &PageSummaries,
    kv_heads: usize,
    table: &Tensor<3, Int>,
    spans: &Tensor<3, Int>,
    choice: &PageChoice,
) -> Result<Tensor<3>, OpError> {
    check(&q, summaries, kv_heads, table, spans, choice)?;
    let inputs = PageScoreInputs {
        q: inner(q),
        summaries: inner(summaries.values.clone()),
        table: inner(table.clone()),
        spans: inner(spans.clone()),
    };
    Ok(Tensor::from_dispatch(
        <Dispatch as PageSummaryOps>::page_scores(inputs, kv_heads, *choice),
    ))
}

/// Selects pages for [`PagedKeysValues::selected`](crate::PagedKeysValues::selected). For each query and KV head these are the
/// [forced](PageChoice::forced) blocks of pages, including the one in which region one ends, and the others with the highest [`page_scores`], up to
/// `keep` (ties go to the earlier; NaN sorts last). Pages are ascending, padded with −1. Lengths and tables stay on the device, nothing is read
/// back, and launches depend on shapes alone.
///
/// ```
/// use burn::tensor::{Device, Distribution, Int, Tensor};
/// use burn_paged_attention::summaries::{PageSummaries, select_pages, summarize_pages};
/// use burn_paged_attention::{PagedKeysValues, PagedOptions, paged_attention};
/// use burn_sparse_select::{PageSummary, Selection};
///
/// let device = Device::flex();
/// let random = |shape| Tensor::<3>::random(shape, Distribution::Default, &device);
/// // A sequence of 75 keys in five of eight pages.
/// let (keys, values) = (random([8, 16, 32]), random([8, 16, 32]));
/// let table = Tensor::<3, Int>::from_data([[[7, 2, 5, 0, 3]]], &device);
/// let spans = Tensor::<3, Int>::from_data([[[75, 0, 0, 0]]], &device);
/// let slots: Vec<i32> = (0..75).map(|i| [7, 2, 5, 0, 3][i / 16] * 16 + i as i32 % 16).collect();
/// let slots = Tensor::<1, Int>::from_data(slots.as_slice(), &device).reshape([1, 1, 75]);
/// let summaries = PageSummaries::zeros(PageSummary::Bounds, 8, 32, keys.dtype(), &device);
/// let summaries = summarize_pages(summaries, &keys, 1, slots)?;
/// // The page of the query and two of the others.
/// let choice = "quest:16,48".parse::<Selection>()?.on_pages(16, 4)?;
/// let q = random([1, 4, 32]);
/// let selected = select_pages(q.clone(), &summaries, 1, &table, &spans, &choice)?;
/// assert_eq!(selected.dims(), [1, 1, 3]);
/// let pages = PagedKeysValues::new(keys, values, 1, table, spans).selected(selected);
/// let q = q.reshape([1, 4, 1, 32]);
/// assert_eq!(paged_attention(q, &pages, &PagedOptions::default())?.out.dims(), [1, 4, 1, 32]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// - `q`: `[batch, heads, d_k]`, one query of each head per page list
/// - output: i32 `[batch, kv_heads, choice.selected_pages()]`
///
/// # Errors
/// Those of [`page_scores`].
pub fn select_pages(
    q: Tensor<3>,
    summaries: &PageSummaries,
    kv_heads: usize,
    table: &Tensor<3, Int>,
    spans: &Tensor<3, Int>,
    choice: &PageChoice,
) -> Result<Tensor<3, Int>, OpError> {
    let scores = page_scores(q, summaries, kv_heads, table, spans, choice)?;
    topk_pages(scores, spans, choice)
}

fn check(
    q: &Tensor<3>,
    summaries: &PageSummaries,
    kv_heads: usize,
    table: &Tensor<3, Int>,
    spans: &Tensor<3, Int>,
    choice: &PageChoice,
) -> Result<(), OpError> {
    served(&q.device())?;
    summaries.check()?;
    choice.check()?;
    let [batch, heads, width] = q.dims();
    let [pages, _, summary_width] = summaries.values.dims();
    OpError::expect_same("summaries' width", width, "q's", summary_width)?;
    check_tables([batch, heads], kv_heads, pages, table, spans)?;
    let (expected, got) = (choice.summary, summaries.summary);
    blocksparse::ensure! { OpError; expected == got => "summaries", format!("{expected:?}, the choice's"), format!("{got:?}"); }
    for (argument, device) in [
        ("summaries' device", summaries.values.device()),
        ("table's device", table.device()),
        ("spans' device", spans.device()),
    ] {
        same_device(argument, &q.device(), "q's", &device)?;
    }
    Ok(())
}
