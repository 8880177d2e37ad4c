//! The keys and values of one layer.

use burn::tensor::kind::Basic;
use burn::tensor::{DType, Device, FloatDType, IndexingUpdateOp, Int, Tensor, TensorData};
use burn_blocksparse::graph::StaticInput;
use burn_sparse_select::PageSummary;
use burn_sparse_transformer::TransformerError;

use crate::paged::store::Rows;
use crate::pages::PageCopy;
use crate::summaries::{PageSummaries, summarize_stored};
use crate::{PagedStore, Quantization, QuantizedPages};

/// How a pool stores numbers, once it is known of which model.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stored {
    Float(FloatDType),
    Quantized(Quantization),
}

/// Pages of keys and values. They are taken out while they are written, so that no second handle keeps the write from
/// being in place.
#[derive(Clone, Debug)]
pub(super) struct Store {
    pages: Option<PagedStore>,
    kv_heads: usize,
    /// By what queries choose pages, if they do. They are also written in place.
    summaries: Option<PageSummaries>,
}

/// Pages that are copied before anything is written.
#[derive(Clone, Debug)]
pub(super) struct Copies {
    /// The pages that are read, `[copies · heads of a table row, padded to whole batch entries]`.
    from: Tensor<1, Int>,
    /// `[batch, T, P]`
    slots: Tensor<3, Int>,
    /// The first page that each copy is written to, and how many follow each other.
    to: Vec<usize>,
    heads: usize,
}

impl Copies {
    /// The copies of a step, none if there is nothing to copy.
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

    /// The copies of pages, as they are.
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

    /// With what queries choose pages by.
    pub(super) fn with_summaries(mut self, summary: PageSummary) -> Self {
        if let Some(store) = &self.pages {
            let ([pages, _], [width, _]) = (store.pages(), store.widths());
            let dtype = match store {
                PagedStore::Plain { keys, .. } => dtype_of(summary, keys.dtype()),
                // No eight bits hold a bound that no key is above.
                PagedStore::Quantized(_) => DType::F32,
            };
            let zeros = PageSummaries::zeros(summary, pages, width, dtype, &store.device());
            self.summaries = Some(zeros);
        }
        self
    }

    /// What queries choose pages by.
    pub(super) fn summaries(&self) -> Result<&PageSummaries, TransformerError> {
        self.summaries.as_ref().ok_or_else(lost)
    }

    /// Looks again at the pages that keys were written to, in the order of their slots, `[batch, T, s]`.
    pub(super) fn summarize(&mut self, slots: Tensor<3, Int>) -> Result<(), TransformerError> {
        let Some(summaries) = self.summaries.take() else {
            return Ok(());
        };
        let store = self.pages.as_ref().ok_or_else(lost)?;
        self.summaries = Some(summarize_stored(summaries, store, self.kv_heads, slots)?);
        Ok(())
    }

    /// Bytes of what queries choose pages by, of a page.
    pub(super) fn summary_bytes(&self) -> usize {
        self.summaries.as_ref().map_or(0, |summaries| {
            let [_, rows, width] = summaries.values.dims();
            rows * width * summaries.values.dtype().size()
        })
    }

    /// Returns whether numbers have eight bits.
    pub(super) fn is_quantized(&self) -> bool {
        matches!(self.pages, Some(PagedStore::Quantized(_)))
    }

    /// Widths of keys and values.
    pub(super) fn widths(&self) -> Option<[usize; 2]> {
        self.pages.as_ref().map(PagedStore::widths)
    }

    /// Bytes of a slot: of a key, its value, and their scales if they have some.
    pub(super) fn slot_bytes(&self) -> usize {
        self.pages.as_ref().map_or(0, |store| {
            let numbers: usize = store.widths().iter().sum();
            match store {
                PagedStore::Plain { keys, .. } => numbers * keys.dtype().size(),
                PagedStore::Quantized(_) => numbers + 2 * size_of::<f32>(),
            }
        })
    }

    /// Bytes of all pages, and of what they are chosen by.
    pub(super) fn bytes(&self) -> usize {
        let slots = |store: &PagedStore| store.pages().iter().product::<usize>();
        let pages = self.pages.as_ref().map_or(0, |store| store.pages()[0]);
        self.pages.as_ref().map_or(0, slots) * self.slot_bytes() + pages * self.summary_bytes()
    }

    pub(super) fn pages(&self) -> Result<PagedStore, TransformerError> {
        self.pages.clone().ok_or_else(lost)
    }

    /// Slots of a page.
    pub(super) fn page_size(&self) -> usize {
        self.pages.as_ref().map_or(0, |store| store.pages()[1])
    }

    /// Hands plain keys to what gives them back, in place if nobody else has them.
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

    /// Room for more pages, and slots of each, of zeros.
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

    /// Plain keys of slots of all pages, `[rows, d_k]`.
    pub(super) fn keys_at(&self, ids: &Tensor<1, Int>) -> Result<Tensor<2>, TransformerError> {
        match self.pages.as_ref().ok_or_else(lost)? {
            PagedStore::Plain { keys, .. } => Ok(keys.clone().flatten(0, 1).select(0, ids.clone())),
            PagedStore::Quantized(_) => Err(lost()),
        }
    }

    /// Copies pages.
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

    /// Copies pages, and then writes new keys and values `[batch, kv_heads, s, width]` into `slots`, `[batch, T, s]`.
    pub(super) fn write(
        &mut self,
        copies: Option<&Copies>,
        [key, value]: [Tensor<4>; 2],
        slots: Tensor<3, Int>,
    ) -> Result<(), TransformerError> {
        // What could make the write fail while the pages are out of here.
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

    /// Rows of all pages, `[rows, width]` of keys and of values.
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

    /// Rows of all slots of the pages of tables `[batch, entries]` that all heads share, `[batch, kv_heads, entries · P, width]` of keys and of values. Where a
    /// table has no entry they are any.
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

    /// The dtype in which elements of the pages are returned.
    pub(super) fn dtype(&self) -> FloatDType {
        match &self.pages {
            Some(PagedStore::Plain { keys, .. }) => keys.dtype().into(),
            _ => FloatDType::F32,
        }
    }

    /// The keys of some pages, `[n, P, d_k]`.
    pub(super) fn keys_of(&self, pages: &Tensor<1, Int>) -> Result<Tensor<3>, TransformerError> {
        let [keys, _] = self.pages()?.rows();
        Ok(keys.select(pages).numbers()?)
    }

    /// Rows of all pages as they are stored, `[n, ..]` each: of keys, of values, and their scales if they have some.
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

    /// Shapes and dtypes of so many [`Self::raw`] rows.
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

    /// What the numbers are, as text: a dtype, or eight bits of some kind.
    pub(super) fn kind(&self) -> String {
        match &self.pages {
            Some(PagedStore::Quantized(pages)) => format!("{:?}", pages.quantization),
            _ => format!("{:?}", self.dtype()),
        }
    }

    /// Writes rows that [`Self::raw`] gave, of the shapes of [`Self::raw_shapes`].
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

    /// Fills pages with what no result may depend on.
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

/// Pages with rows written over some of all of theirs.
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

/// Queries in the dtype of keys that are floats.
pub(super) fn as_stored(query: Tensor<4>, store: &PagedStore) -> Tensor<4> {
    match store {
        PagedStore::Plain { keys, .. } => query.cast(FloatDType::from(keys.dtype())),
        PagedStore::Quantized(_) => query,
    }
}

pub(super) fn lost() -> TransformerError {
    TransformerError::argument("pool", "one whose last write succeeded", "another")
}

/// Integers as kernels read them.
pub(super) fn ints<const D: usize>(
    values: Vec<i32>,
    shape: [usize; D],
    device: &Device,
) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}

/// The dtype of summaries of keys: bounds are some of the keys' own numbers.
fn dtype_of(summary: PageSummary, keys: DType) -> DType {
    match (summary, keys) {
        (PageSummary::Bounds, keys) => keys,
        (_, DType::F64) => DType::F64,
        _ => DType::F32,
    }
}

/// Writes numbers into a tensor that recorded steps read.
pub(super) fn overwrite<const D: usize>(
    input: &StaticInput<D, Int>,
    numbers: Vec<i32>,
) -> Result<(), TransformerError> {
    Ok(input.write(TensorData::new(numbers, input.dims()))?)
}

/// Such a tensor, of zeros.
pub(super) fn zeros<const D: usize>(
    shape: [usize; D],
    device: &Device,
) -> Result<StaticInput<D, Int>, TransformerError> {
    Ok(StaticInput::new(
        TensorData::new(vec![0i32; shape.iter().product()], shape),
        device,
    )?)
}
