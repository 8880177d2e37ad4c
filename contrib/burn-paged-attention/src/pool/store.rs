//! Keys and values of one layer.

use burn::tensor::kind::Basic;
use burn::tensor::{DType, Device, FloatDType, IndexingUpdateOp, Int, Tensor, TensorData};
use burn_blocksparse::graph::StaticInput;
use burn_sparse_select::PageSummary;
use burn_sparse_transformer::TransformerError;

use crate::paged::store::Rows;
use crate::pages::PageCopy;
use crate::summaries::{PageSummaries, summarize_stored};
use crate::{PagedStore, Quantization, QuantizedPages};

/// Storage format of a pool's elements.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stored {
    Float(FloatDType),
    Quantized(Quantization),
}

/// Pages of keys and values. They are taken out of the option for writing, so that no second handle prevents an in-place write.
#[derive(Clone, Debug)]
pub(super) struct Store {
    pages: Option<PagedStore>,
    kv_heads: usize,
    /// Summaries for page selection, also written in place.
    summaries: Option<PageSummaries>,
}

/// Pages to copy before anything is written.
#[derive(Clone, Debug)]
pub(super) struct Copies {
    /// Source pages, `[copies · heads of a table row, padded to whole batch entries]`.
    from: Tensor<1, Int>,
    /// `[batch, T, P]`
    slots: Tensor<3, Int>,
    /// First destination page of each copy; `heads` adjacent pages follow.
    to: Vec<usize>,
    heads: usize,
}

impl Copies {
    /// Makes the copies of a step; None if there are none.
    pub(super) fn new<'a>(
        copies: impl Iterator<Item = &'a PageCopy>,
        [table_rows, kv_heads, page_size]: [usize; 3],
        device: &Device,
    ) -> Option<Self> {
        let copies: Vec<&PageCopy> = copies.collect();
        if copies.is_empty() {
            return None;
        }
        let heads = kv_heads / table_rows;
        let entries = copies.len().div_ceil(table_rows);
        let mut from = Vec::with_capacity(entries * kv_heads);
        let mut slots = vec![-1; entries * table_rows * page_size];
        for (place, slots) in slots.chunks_mut(page_size).enumerate() {
            let copy = copies.get(place);
            let page = copy.map_or(0, |copy| copy.from);
            from.extend((0..heads).map(|head| (page * heads + head) as i32));
            if let Some(copy) = copy {
                for slot in copy.slots.clone() {
                    slots[slot] = (copy.to * page_size + slot) as i32;
                }
            }
        }
        Some(Self {
            from: ints(from, [entries * kv_heads], device),
            slots: ints(slots, [entries, table_rows, page_size], device),
            to: copies.iter().map(|copy| copy.to * heads).collect(),
            heads,
        })
    }

    /// Copies pages of one tensor.
    fn copied<const D: usize, K: Basic>(&self, mut pages: Tensor<D, K>) -> Tensor<D, K> {
        let rows = pages.clone().select(0, self.from.clone());
        for (copy, to) in self.to.iter().enumerate() {
            let rows = rows.clone().narrow(0, copy * self.heads, self.heads);
            pages = pages.slice_assign(*to..to + self.heads, rows);
        }
        pages
    }
}

impl Store {
    pub(super) fn new(
        [pages, page_size]: [usize; 2],
        kv_heads: usize,
        [key, value]: [usize; 2],
        device: &Device,
        stored: Stored,
    ) -> Result<Self, TransformerError> {
        let store = match stored {
            Stored::Float(dtype) => {
                let zeros =
                    |width| Tensor::zeros([pages, page_size, width], (device, DType::from(dtype)));
                PagedStore::Plain {
                    keys: zeros(key),
                    values: zeros(value),
                }
            }
            Stored::Quantized(quantization) => PagedStore::Quantized(QuantizedPages::zeros(
                quantization,
                [pages, page_size],
                [key, value],
                device,
            )?),
        };
        Ok(Self {
            pages: Some(store),
            kv_heads,
            summaries: None,
        })
    }

    /// Adds summaries for page selection.
    pub(super) fn with_summaries(mut self, summary: PageSummary) -> Self {
        if let Some(store) = &self.pages {
            let ([pages, _], [width, _]) = (store.pages(), store.widths());
            let dtype = match store {
                PagedStore::Plain { keys, .. } => dtype_of(summary, keys.dtype()),
                // Rounding a bound to eight bits could put it below a key.
                PagedStore::Quantized(_) => DType::F32,
            };
            let zeros = PageSummaries::zeros(summary, pages, width, dtype, &store.device());
            self.summaries = Some(zeros);
        }
        self
    }

    pub(super) fn summaries(&self) -> Result<&PageSummaries, TransformerError> {
        self.summaries.as_ref().ok_or_else(lost)
    }

    /// Updates the summaries of the pages that keys were written to; `slots`, `[batch, T, s]`, ascend within a page.
    pub(super) fn summarize(&mut self, slots: Tensor<3, Int>) -> Result<(), TransformerError> {
        let Some(summaries) = self.summaries.take() else {
            return Ok(());
        };
        let store = self.pages.as_ref().ok_or_else(lost)?;
        self.summaries = Some(summarize_stored(summaries, store, self.kv_heads, slots)?);
        Ok(())
    }

    /// Returns the bytes of a page's summary.
    pub(super) fn summary_bytes(&self) -> usize {
        self.summaries.as_ref().map_or(0, |summaries| {
            let [_, rows, width] = summaries.values.dims();
            rows * width * summaries.values.dtype().size()
        })
    }

    /// Returns whether elements have eight bits.
    pub(super) fn is_quantized(&self) -> bool {
        matches!(self.pages, Some(PagedStore::Quantized(_)))
    }

    /// Returns the widths of keys and values.
    pub(super) fn widths(&self) -> Option<[usize; 2]> {
        self.pages.as_ref().map(PagedStore::widths)
    }

    /// Returns the bytes of a slot: of a key, its value, and their scales if quantized.
    pub(super) fn slot_bytes(&self) -> usize {
        self.pages.as_ref().map_or(0, |store| {
            let numbers: usize = store.widths().iter().sum();
            match store {
                PagedStore::Plain { keys, .. } => numbers * keys.dtype().size(),
                PagedStore::Quantized(_) => numbers + 2 * size_of::<f32>(),
            }
        })
    }

    /// Returns the bytes of all pages and their summaries.
    pub(super) fn bytes(&self) -> usize {
        let slots = |store: &PagedStore| store.pages().iter().product::<usize>();
        let pages = self.pages.as_ref().map_or(0, |store| store.pages()[0]);
        self.pages.as_ref().map_or(0, slots) * self.slot_bytes() + pages * self.summary_bytes()
    }

    pub(super) fn pages(&self) -> Result<PagedStore, TransformerError> {
        self.pages.clone().ok_or_else(lost)
    }

    pub(super) fn page_size(&self) -> usize {
        self.pages.as_ref().map_or(0, |store| store.pages()[1])
    }

    /// Applies a function to the float keys, in place if there is no other reference.
    pub(super) fn with_keys(
        &mut self,
        f: impl FnOnce(Tensor<3>) -> Tensor<3>,
    ) -> Result<(), TransformerError> {
        self.with_plain(|[keys, values]| [f(keys), values])
    }

    fn with_plain(
        &mut self,
        f: impl FnOnce([Tensor<3>; 2]) -> [Tensor<3>; 2],
    ) -> Result<(), TransformerError> {
        let store = self.pages.take().ok_or_else(lost)?;
        self.pages = Some(match store {
            PagedStore::Plain { keys, values } => {
                let [keys, values] = f([keys, values]);
                PagedStore::Plain { keys, values }
            }
            quantized => quantized,
        });
        Ok(())
    }

    /// Extends the float pages with zeros to `to` pages and slots of a page.
    pub(super) fn grow(&mut self, to: [usize; 2]) -> Result<(), TransformerError> {
        let grown = |x: Tensor<3>| {
            (0..2).fold(x, |x, dim| {
                let mut shape = x.dims();
                shape[dim] = to[dim] - shape[dim];
                let zeros = Tensor::zeros(shape, (&x.device(), x.dtype()));
                Tensor::cat(vec![x, zeros], dim)
            })
        };
        self.with_plain(|pair| pair.map(grown))
    }

    /// Gathers float keys by row among those of all pages, `[rows, d_k]`.
    pub(super) fn keys_at(&self, ids: &Tensor<1, Int>) -> Result<Tensor<2>, TransformerError> {
        match self.pages.as_ref().ok_or_else(lost)? {
            PagedStore::Plain { keys, .. } => Ok(keys.clone().flatten(0, 1).select(0, ids.clone())),
            PagedStore::Quantized(_) => Err(lost()),
        }
    }

    pub(super) fn copy(&mut self, copies: Option<&Copies>) -> Result<(), TransformerError> {
        let Some(copies) = copies else {
            return Ok(());
        };
        let store = self.pages.take().ok_or_else(lost)?;
        let store = match &store {
            PagedStore::Plain { keys, values } => {
                let Copies { from, slots, .. } = copies;
                let [entries, _, page_size] = slots.dims();
                let [k, v] = [keys, values].map(|pages| {
                    let [_, _, width] = pages.dims();
                    let shape = [entries, self.kv_heads, page_size, width];
                    pages.clone().select(0, from.clone()).reshape(shape)
                });
                store.append(k, v, slots.clone())?
            }
            PagedStore::Quantized(_) => {
                let copied = |rows: Rows| {
                    rows.map(
                        |rows| copies.copied(rows),
                        |words| copies.copied(words),
                        |scales| copies.copied(scales),
                    )
                };
                store.rows().map(copied).into()
            }
        };
        self.pages = Some(store);
        Ok(())
    }

    /// Copies pages, then writes new keys and values `[batch, kv_heads, s, width]` into `slots`, `[batch, T, s]`.
    pub(super) fn write(
        &mut self,
        copies: Option<&Copies>,
        [key, value]: [Tensor<4>; 2],
        slots: Tensor<3, Int>,
    ) -> Result<(), TransformerError> {
        // Fail before the pages are taken out.
        let widths = self.widths().ok_or_else(lost)?;
        let got = [key.dims()[3], value.dims()[3]];
        blocksparse::ensure! {
            TransformerError;
            got == widths && key.dims()[1] == self.kv_heads => "pool",
                format!("of {} heads {got:?} wide, the layer's", key.dims()[1]), format!("{} heads {widths:?} wide", self.kv_heads);
        }
        self.copy(copies)?;
        let written = slots.clone();
        let store = self.pages.take().ok_or_else(lost)?;
        let [key, value] = [key, value].map(|rows| as_stored(rows, &store));
        self.pages = Some(store.append(key, value, slots)?);
        self.summarize(written)
    }

    /// Gathers rows among those of all pages, `[rows, width]` for keys and for values.
    pub(super) fn gather(
        &self,
        ids: &Tensor<1, Int>,
        dtype: FloatDType,
    ) -> Result<[Tensor<2>; 2], TransformerError> {
        let [keys, values] = self.pages()?.rows().map(|rows| {
            let rows = rows.by_slots().select(ids).numbers()?;
            Ok::<_, TransformerError>(rows.flatten(0, 1).cast(dtype))
        });
        Ok([keys?, values?])
    }

    /// Gathers all slots of the pages of tables `[batch, entries]` that all heads share, `[batch, kv_heads, entries · P, width]` for keys and for
    /// values. Unused entries give arbitrary rows.
    pub(super) fn of_tables(
        &self,
        table: Tensor<2, Int>,
        dtype: FloatDType,
    ) -> Result<[Tensor<4>; 2], TransformerError> {
        let store = self.pages.as_ref().ok_or_else(lost)?;
        let ([_, page_size], heads) = (store.pages(), self.kv_heads);
        let ([batch, entries], device) = (table.dims(), table.device());
        let dims = [batch, heads, entries, page_size];
        let counted =
            |count: usize| Tensor::<1, Int>::arange(0..count as i64, (&device, table.dtype()));
        let pages = table.clone().clamp_min(0).mul_scalar(heads as i32);
        let pages = pages.reshape([batch, 1, entries, 1]).expand(dims);
        let pages = pages + counted(heads).reshape([1, heads, 1, 1]).expand(dims);
        let slots = counted(page_size).reshape([1, 1, 1, page_size]);
        let ids = pages.mul_scalar(page_size as i32) + slots.expand(dims);
        let ids = ids.reshape([dims.iter().product::<usize>()]);
        let rows = self.gather(&ids, dtype)?;
        Ok(rows.map(|rows| {
            let [_, width] = rows.dims();
            rows.reshape([batch, heads, entries * page_size, width])
        }))
    }

    /// Returns the dtype in which elements of the pages are returned.
    pub(super) fn dtype(&self) -> FloatDType {
        match &self.pages {
            Some(PagedStore::Plain { keys, .. }) => keys.dtype().into(),
            _ => FloatDType::F32,
        }
    }

    /// Gathers the keys of some pages, `[n, P, d_k]`.
    pub(super) fn keys_of(&self, pages: &Tensor<1, Int>) -> Result<Tensor<3>, TransformerError> {
        let [keys, _] = self.pages()?.rows();
        Ok(keys.select(pages).numbers()?)
    }

    /// Reads rows in storage format, `[n, ..]` each: keys, values, and their scales if quantized.
    pub(super) fn raw(&self, ids: &Tensor<1, Int>) -> Result<Vec<TensorData>, TransformerError> {
        let raw = |rows: Rows| match rows.by_slots().select(ids) {
            Rows::Plain(rows) => (rows.flatten::<2>(0, 1).into_data(), None),
            Rows::Packed(_, words, scales) => {
                let scales = scales.flatten::<1>(0, 1).into_data();
                (words.flatten::<2>(0, 1).into_data(), Some(scales))
            }
        };
        let [(keys, key_scales), (values, value_scales)] = self.pages()?.rows().map(raw);
        let scales = key_scales.into_iter().chain(value_scales);
        Ok([keys, values].into_iter().chain(scales).collect())
    }

    /// Returns shapes and dtypes of [`Self::raw`] with `rows` rows.
    pub(super) fn raw_shapes(
        &self,
        rows: usize,
    ) -> Result<Vec<(Vec<usize>, DType)>, TransformerError> {
        let store = self.pages.as_ref().ok_or_else(lost)?;
        let widths = store.widths();
        Ok(match store {
            PagedStore::Plain { keys, .. } => widths
                .map(|width| (vec![rows, width], keys.dtype()))
                .to_vec(),
            PagedStore::Quantized(_) => {
                let words = widths.map(|width| (vec![rows, width / 4], DType::I32));
                let scale = (vec![rows], DType::F32);
                [words.to_vec(), vec![scale.clone(), scale]].concat()
            }
        })
    }

    /// Names the storage format: a dtype or a quantization.
    pub(super) fn kind(&self) -> String {
        match &self.pages {
            Some(PagedStore::Quantized(pages)) => format!("{:?}", pages.quantization),
            _ => format!("{:?}", self.dtype()),
        }
    }

    /// Writes rows from [`Self::raw`], of the shapes of [`Self::raw_shapes`].
    pub(super) fn write_raw(
        &mut self,
        ids: &Tensor<1, Int>,
        data: &[TensorData],
    ) -> Result<(), TransformerError> {
        let [keys, values] = self.pages.take().ok_or_else(lost)?.rows();
        let written = |rows: Rows, at: usize| {
            rows.map(
                |pages| with_rows::<3, 2, _>(pages, ids, &data[at]),
                |words| with_rows::<3, 2, _>(words, ids, &data[at]),
                |scales| with_rows::<2, 1, _>(scales, ids, &data[at + 2]),
            )
        };
        self.pages = Some([written(keys, 0), written(values, 1)].into());
        Ok(())
    }

    /// Fills pages with values that no result may depend on.
    pub(super) fn poison(&mut self, freed: &[usize], heads: usize) {
        let Some(store) = self.pages.take() else {
            return;
        };
        let ranges = || (freed.iter()).map(|page| page * heads..(page + 1) * heads);
        let fill = |mut tensor: Tensor<3>| {
            let [_, page_size, width] = tensor.dims();
            for pages in ranges() {
                let nan = Tensor::full(
                    [heads, page_size, width],
                    f32::NAN,
                    (&tensor.device(), tensor.dtype()),
                );
                tensor = tensor.slice_assign([pages, 0..page_size, 0..width], nan);
            }
            tensor
        };
        let fill_scales = |scales: Tensor<2>| {
            let [pages, page_size] = scales.dims();
            fill(scales.reshape([pages, page_size, 1])).reshape([pages, page_size])
        };
        let filled = |rows: Rows| rows.map(fill, |words| words, fill_scales);
        self.pages = Some(store.rows().map(filled).into());
    }
}

/// Overwrites some rows of pages.
fn with_rows<const D: usize, const R: usize, K: Basic>(
    pages: Tensor<D, K>,
    ids: &Tensor<1, Int>,
    rows: &TensorData,
) -> Tensor<D, K> {
    let shape = pages.dims();
    let rows = Tensor::from_data(rows.clone(), (&pages.device(), pages.dtype()));
    let all = pages.flatten::<R>(0, 1);
    all.select_assign(0, ids.clone(), rows, IndexingUpdateOp::Assign)
        .reshape(shape)
}

/// Casts queries to the dtype of float keys.
pub(super) fn as_stored(query: Tensor<4>, store: &PagedStore) -> Tensor<4> {
    match store {
        PagedStore::Plain { keys, .. } => query.cast(FloatDType::from(keys.dtype())),
        PagedStore::Quantized(_) => query,
    }
}

pub(super) fn lost() -> TransformerError {
    TransformerError::argument("pool", "one whose last write succeeded", "another")
}

/// Uploads integers in the dtype that kernels read.
pub(super) fn ints<const D: usize>(
    values: Vec<i32>,
    shape: [usize; D],
    device: &Device,
) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}

/// Returns the dtype of summaries. Bounds are elements of the keys, so the keys' dtype is exact.
fn dtype_of(summary: PageSummary, keys: DType) -> DType {
    match (summary, keys) {
        (PageSummary::Bounds, keys) => keys,
        (_, DType::F64) => DType::F64,
        _ => DType::F32,
    }
}

/// Overwrites a tensor that captured steps read.
pub(super) fn overwrite<const D: usize>(
    input: &StaticInput<D, Int>,
    numbers: Vec<i32>,
) -> Result<(), TransformerError> {
    Ok(input.write(TensorData::new(numbers, input.dims()))?)
}

/// Allocates a tensor of zeros that captured steps read.
pub(super) fn zeros<const D: usize>(
    shape: [usize; D],
    device: &Device,
) -> Result<StaticInput<D, Int>, TransformerError> {
    Ok(StaticInput::new(
        TensorData::new(vec![0i32; shape.iter().product()], shape),
        device,
    )?)
}
