//! Attention over a paged KV cache, for decoding: append, attend, int8 and fp8 pages, page selection.
pub mod backend;
pub mod ops;

pub mod options;
pub mod reference;
pub mod slots_reference;
#[doc(hidden)]
pub mod store;
pub mod values;

pub use blocksparse::Quantization;

use burn::backend::DispatchTensor;
use burn::tensor::kind::Autodiff;

use crate::paged::ops::PagedOps;
use burn_blocksparse::internal::prelude::*;
pub use options::{PagedKeysValues, PagedOptions, PagedVisibility};
pub use store::{PagedStore, QuantizedPages, append_quantized, dequantize};
use values::{PagedCall, PagedInputs, SumsInputs};

/// Output of [`paged_attention`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PagedOutput {
    /// `[batch, heads, s, d_v]`, in q's dtype; zeros in rows without keys.
    pub out: Tensor<4>,
    /// `[batch, heads, s]`: natural log of the sum of exponentials of the scaled scores, sinks included; −∞ in rows without keys and sinks. f32, or
    /// f64 for f64 inputs.
    pub lse: Tensor<3>,
}

/// Computes attention of the last few queries of each sequence to keys and values in pages: `out[i] = Σ_j p[i, j] · v[j]`,
/// `p = softmax(scale · q · kᵀ)` over the slots of the sequence's page list ([`PagedKeysValues`]).
///
/// Lengths and tables stay on the device: nothing is read back, and launches depend on shapes alone. A sequence's page list is split among the
/// multiprocessors; the parts are merged by their lse (Dao et al., "Flash-Decoding", 2023), in a second launch or, with
/// [`PagedKeysValues::counters`], in the same one. Equal calls give equal bits; with [`PagedOptions::fixed_split`] a sequence gives equal bits in
/// any batch.
///
/// It has no gradient: inputs are detached from the autodiff graph, and results are on the device without autodiff.
///
/// ```
/// use burn::tensor::{Device, Distribution, Int, Tensor};
/// use burn_paged_attention::{PagedKeysValues, PagedOptions, paged_attention};
///
/// let device = Device::flex();
/// let random = |shape| Tensor::<3>::random(shape, Distribution::Default, &device);
/// // Eight pages of 16 slots; two heads of keys share table entries, so entry x is pages 2x and 2x + 1.
/// let (keys, values) = (random([8, 16, 32]), random([8, 16, 32]));
/// // Two sequences: 20 slots in entries 3 and 0, 16 slots in entry 2.
/// let table = Tensor::<3, Int>::from_data([[[3, 0]], [[2, -1]]], &device);
/// let spans = Tensor::<3, Int>::from_data([[[20, 0, 0, 0]], [[16, 0, 0, 0]]], &device);
/// let pages = PagedKeysValues::new(keys, values, 2, table, spans);
/// let q = Tensor::<4>::random([2, 4, 1, 32], Distribution::Default, &device);
/// let attended = paged_attention(q, &pages, &PagedOptions::default())?;
/// assert_eq!(attended.out.dims(), [2, 4, 1, 32]);
/// assert_eq!(attended.lse.dims(), [2, 4, 1]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// - `q`: `[batch, heads, s, d_k]`, the last `s` positions of each sequence; `kv_heads` divides `heads`
/// - The other shapes are at [`PagedKeysValues`]
///
/// # Errors
/// [`OpError`] if shapes, dtypes, devices or options do not match, or no feature of this crate serves the device. The contents of tables and spans
/// are on the device and are not checked: entries and pages that do not exist are skipped.
pub fn paged_attention(
    q: Tensor<4>,
    pages: &PagedKeysValues,
    options: &PagedOptions,
) -> Result<PagedOutput, OpError> {
    check(&q, pages, options)?;
    let call = options.call(&q, pages);
    let rows = <Dispatch as PagedOps>::paged_attention(inputs_of(q, pages, options), call);
    Ok(PagedOutput {
        out: Tensor::from_dispatch(rows.out),
        lse: Tensor::from_dispatch(rows.lse),
    })
}

fn inputs_of(
    q: Tensor<4>,
    pages: &PagedKeysValues,
    options: &PagedOptions,
) -> PagedInputs<Dispatch> {
    let sight = pages.visibility.as_ref();
    let sums = accumulate_in(q.dtype().into());
    PagedInputs {
        q: inner(q),
        pages: pages.store.clone().stored(),
        table: inner(pages.table.clone()),
        spans: inner(pages.spans.clone()),
        positions: sight.map(|sight| inner(sight.positions.clone())).into(),
        last: sight.map(|sight| inner(sight.last.clone())).into(),
        query_positions: (sight.map(|sight| inner(sight.query_positions.clone()))).into(),
        selected: pages.selected.clone().map(inner).into(),
        sinks: (options.sinks.clone())
            .map(|sinks| inner(sinks.cast(sums)))
            .into(),
        counters: pages.counters.clone().map(inner).into(),
    }
}

/// Detaches a tensor, since the backend ops have no gradient.
pub(crate) fn inner<const D: usize, K: Autodiff>(tensor: Tensor<D, K>) -> DispatchTensor {
    tensor.without_autodiff().into_dispatch()
}

impl PagedOptions {
    /// Returns the plan of [`paged_attention`], which prints its launches.
    ///
    /// # Errors
    /// Those of [`paged_attention`].
    #[cfg_attr(not(feature = "cube"), allow(unused_variables))]
    pub fn explain(&self, q: &Tensor<4>, pages: &PagedKeysValues) -> Result<OpPlan, OpError> {
        check(q, pages, self)?;
        Ok(burn_blocksparse::op_plan!(&q.device(), |device| {
            let inputs = inputs_of(q.clone(), pages, self);
            crate::paged::backend::text(device, &inputs, &self.call(q, pages))
        }))
    }
}

/// Writes new keys and values into slots of pages, and returns the pages. It writes in place if the call holds the only reference (pass the tensors
/// by value and keep no clone), and otherwise copies.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_paged_attention::append_rows;
///
/// let device = Device::flex();
/// let keys = Tensor::<3>::zeros([4, 16, 8], &device);
/// let values = Tensor::<3>::zeros([4, 16, 8], &device);
/// // A row of one sequence with two heads: slot 5 of table entry 1, so of pages 2 and 3.
/// let k = Tensor::<4>::ones([1, 2, 1, 8], &device);
/// let slots = Tensor::<3, Int>::from_data([[[16 + 5]]], &device);
/// let (keys, values) = append_rows(keys, values, k.clone(), k, slots)?;
/// assert_eq!(keys.slice([3..4, 5..6]).sum().into_scalar::<f32>(), 8.0);
/// # drop(values);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// - `keys`: `[pages, P, d_k]`, `values`: `[pages, P, d_v]`
/// - `k`: `[batch, kv_heads, s, d_k]`, `v`: `[batch, kv_heads, s, d_v]`
/// - `slots`: `[batch, 1 or kv_heads, s]`, i32: `x · P + slot` for table entry `x` ([`PagedKeysValues`] defines its page); negative: the row is not
///   stored. No two rows may have the same slot.
///
/// # Errors
/// [`OpError`] if shapes, dtypes or devices do not match, or no feature of this crate serves the device.
pub fn append_rows(
    keys: Tensor<3>,
    values: Tensor<3>,
    k: Tensor<4>,
    v: Tensor<4>,
    slots: Tensor<3, Int>,
) -> Result<(Tensor<3>, Tensor<3>), OpError> {
    match (PagedStore::Plain { keys, values }).append(k, v, slots)? {
        PagedStore::Plain { keys, values } => Ok((keys, values)),
        PagedStore::Quantized(_) => unreachable!("pages stay as they are stored"),
    }
}

/// Scatters integers into `to` at the indices `at`; indices out of range are skipped.
pub(crate) fn write_integers(
    to: Tensor<1, Int>,
    at: Tensor<1, Int>,
    values: Tensor<1, Int>,
) -> Tensor<1, Int> {
    let [to, at, values] = [to, at, values].map(Tensor::into_dispatch);
    Tensor::from_dispatch(<Dispatch as PagedOps>::write_integers(to, at, values))
}

/// Adds the attention of some queries to the running sums: see [`PagedOps::attention_sums`].
pub(crate) fn attention_sums(
    sums: Tensor<3>,
    (q, lse): (Tensor<4>, Tensor<3>),
    pages: &PagedKeysValues,
    calls: Tensor<2, Int>,
    options: &PagedOptions,
) -> Tensor<3> {
    let call = options.call(&q, pages);
    let inputs = SumsInputs {
        q: q.into_dispatch(),
        lse: lse.into_dispatch(),
        pages: pages.store.clone().stored(),
        table: pages.table.clone().into_dispatch(),
        spans: pages.spans.clone().into_dispatch(),
        calls: calls.into_dispatch(),
        sums: sums.into_dispatch(),
    };
    Tensor::from_dispatch(<Dispatch as PagedOps>::attention_sums(inputs, call))
}

impl PagedOptions {
    fn call(&self, q: &Tensor<4>, pages: &PagedKeysValues) -> PagedCall {
        let [.., width] = q.dims();
        PagedCall {
            kv_heads: pages.kv_heads,
            scale: self.scale.unwrap_or_else(|| 1.0 / (width as f64).sqrt()),
            softcap: self.softcap,
            fixed_split: self.fixed_split,
        }
    }
}

/// Checks that keys and values have the same pages, dtype and device.
fn check_pages(keys: &Tensor<3>, values: &Tensor<3>) -> Result<(), OpError> {
    let [pages, page, width] = keys.dims();
    let [value_pages, value_page, value_width] = values.dims();
    check_page_sizes([pages, page], [value_pages, value_page])?;
    for (argument, width) in [("keys' width", width), ("values' width", value_width)] {
        OpError::ensure_positive(argument, width)?;
    }
    OpError::expect_same("values' dtype", keys.dtype(), "the keys'", values.dtype())?;
    same_device(
        "values' device",
        &keys.device(),
        "the keys'",
        &values.device(),
    )
}

/// Checks that keys and values have the same `[pages, P]`, and that `P` is a power of two.
fn check_page_sizes(
    [pages, page]: [usize; 2],
    [value_pages, value_page]: [usize; 2],
) -> Result<(), OpError> {
    blocksparse::ensure! { OpError; page.is_power_of_two() => "keys' page size", "a power of two", page; }
    OpError::expect_same("values' pages", pages, "the keys'", value_pages)?;
    OpError::expect_same("values' page size", page, "the keys'", value_page)
}

/// Checks that a table has one row for all KV heads or one for each.
pub fn check_heads(argument: &'static str, tables: usize, kv_heads: usize) -> Result<(), OpError> {
    OpError::ensure_positive("kv_heads", kv_heads)?;
    blocksparse::ensure! { OpError; tables == 1 || tables == kv_heads => argument, format!("1 or {kv_heads}, kv_heads"), tables; }
    Ok(())
}

/// Checks that the pages divide evenly into entries of a shared table.
pub fn check_shared(pages: usize, kv_heads: usize, tables: usize) -> Result<(), OpError> {
    blocksparse::ensure! {
        OpError;
        pages.is_multiple_of(kv_heads / tables) => "keys' pages", format!("a multiple of {kv_heads}, kv_heads, because they share the table"), pages;
    }
    Ok(())
}

/// Checks that the tables match queries `[batch, heads, ..]` and the number of pages.
pub(crate) fn check_tables(
    [batch, heads]: [usize; 2],
    kv_heads: usize,
    pages: usize,
    table: &Tensor<3, Int>,
    spans: &Tensor<3, Int>,
) -> Result<(), OpError> {
    let [table_batch, tables, _] = table.dims();
    check_heads("table's heads", tables, kv_heads)?;
    check_shared(pages, kv_heads, tables)?;
    blocksparse::ensure! { OpError; heads.is_multiple_of(kv_heads) => "kv_heads", format!("a divisor of the {heads} heads of q"), kv_heads; }
    OpError::expect_same("table's batch", batch, "q's", table_batch)?;
    let expected = [batch, tables, 4];
    OpError::expect_same("spans' shape", expected, "the table's rows", spans.dims())?;
    for (argument, dtype) in [
        ("table's dtype", table.dtype()),
        ("spans' dtype", spans.dtype()),
    ] {
        blocksparse::ensure! { OpError; matches!(dtype, DType::I32 | DType::I64) => argument, "I32 or I64", format!("{dtype:?}"); }
    }
    Ok(())
}

fn check(q: &Tensor<4>, pages: &PagedKeysValues, options: &PagedOptions) -> Result<(), OpError> {
    served(&q.device())?;
    let PagedKeysValues {
        store,
        kv_heads,
        table,
        spans,
        visibility,
        selected,
        counters,
    } = pages;
    let kv_heads = *kv_heads;
    store.check()?;
    if let PagedStore::Plain { keys, .. } = store {
        OpError::expect_same("keys' dtype", q.dtype(), "q's", keys.dtype())?;
    }
    let [batch, heads, rows, q_width] = q.dims();
    let [page_count, page] = store.pages();
    let [width, _] = store.widths();
    let [_, tables, _] = table.dims();
    OpError::expect_same("keys' width", q_width, "q's", width)?;
    check_tables([batch, heads], kv_heads, page_count, table, spans)?;
    let mut devices = vec![
        ("keys' device", store.device()),
        ("table's device", table.device()),
        ("spans' device", spans.device()),
    ];
    let mut dtypes = vec![("spans' dtype", spans.dtype())];
    if let Some(sight) = visibility {
        let expected = [page_count / (kv_heads / tables), page];
        for (argument, tensor) in [
            ("positions' shape", &sight.positions),
            ("last's shape", &sight.last),
        ] {
            OpError::expect_same(argument, expected, "the table's pages", tensor.dims())?;
        }
        let got = sight.query_positions.dims();
        OpError::expect_same("query_positions' shape", [batch], "q's batch", got)?;
        devices.push(("positions' device", sight.positions.device()));
        devices.push(("last's device", sight.last.device()));
        devices.push(("query_positions' device", sight.query_positions.device()));
        dtypes.push(("positions' dtype", sight.positions.dtype()));
        dtypes.push(("last's dtype", sight.last.dtype()));
        dtypes.push(("query_positions' dtype", sight.query_positions.dtype()));
    }
    if let Some(selected) = selected {
        let [_, _, count] = selected.dims();
        let expected = [batch, kv_heads, count];
        OpError::expect_same(
            "selected's shape",
            expected,
            "a list a head",
            selected.dims(),
        )?;
        devices.push(("selected's device", selected.device()));
        dtypes.push(("selected's dtype", selected.dtype()));
    }
    if let Some(counters) = counters {
        let needed = batch * heads * rows;
        blocksparse::ensure! {
            OpError;
            counters.dims()[0] >= needed => "counters' length", format!("at least {needed}, one for each query"), counters.dims()[0];
        }
        devices.push(("counters' device", counters.device()));
        dtypes.push(("counters' dtype", counters.dtype()));
    }
    if let Some(sinks) = &options.sinks {
        OpError::expect_same("sinks' heads", heads, "q's", sinks.dims()[0])?;
        devices.push(("sinks' device", sinks.device()));
    }
    for (argument, dtype) in dtypes {
        OpError::expect_same(argument, table.dtype(), "the table's", dtype)?;
    }
    for (argument, device) in devices {
        same_device(argument, &q.device(), "q's", &device)?;
    }
    options.validate(q.dtype())
}
