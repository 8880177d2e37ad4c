//! Storage formats of paged keys and values.

use blocksparse::Quantization;
use burn::tensor::kind::Basic;

use crate::paged::ops::PagedOps;
use crate::paged::values::{AppendInputs, PackedRows, StoredPages, StoredRows};
use crate::paged::{check_heads, check_page_sizes, check_pages, check_shared, inner, reference};
use burn_blocksparse::internal::prelude::*;

/// Keys and values in pages.
#[derive(Clone, Debug)]
// Few values exist at a time, each made for one call; both variants are large.
#[allow(clippy::large_enum_variant)]
pub enum PagedStore {
    /// Floats.
    Plain {
        /// `[pages, P, d_k]`
        keys: Tensor<3>,
        /// `[pages, P, d_v]`
        values: Tensor<3>,
    },
    /// Eight bits per element.
    Quantized(QuantizedPages),
}

/// Keys and values with eight bits per element and an f32 scale for each key and each value of a head ([`Quantization`] defines the formats):
/// `d_k + d_v + 8` bytes a slot. Widths are multiples of 4; multiples of 16 are fast.
#[derive(Clone, Debug)]
pub struct QuantizedPages {
    /// Element type.
    pub quantization: Quantization,
    /// `[pages, P, d_k / 4]`, i32: four elements each, the first in the lowest bits.
    pub keys: Tensor<3, Int>,
    /// `[pages, P, d_v / 4]`, likewise.
    pub values: Tensor<3, Int>,
    /// `[pages, P]`, f32.
    pub key_scales: Tensor<2>,
    /// `[pages, P]`, f32.
    pub value_scales: Tensor<2>,
}

/// Keys or values of a [`PagedStore`].
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)]
pub enum Rows {
    Plain(Tensor<3>),
    /// Words and scales.
    Packed(Quantization, Tensor<3, Int>, Tensor<2>),
}

impl QuantizedPages {
    /// Allocates pages of zeros with keys and values of these widths.
    ///
    /// # Errors
    /// [`OpError`] if a width is 0 or no multiple of 4, the page size is no power of two, or no feature of this crate serves the device.
    pub fn zeros(
        quantization: Quantization,
        [pages, page]: [usize; 2],
        widths: [usize; 2],
        device: &Device,
    ) -> Result<Self, OpError> {
        served(device)?;
        for (argument, width) in ["keys' width", "values' width"].into_iter().zip(widths) {
            blocksparse::ensure! { OpError; width != 0 && width.is_multiple_of(4) => argument, "a multiple of 4", width; }
        }
        check_page_sizes([pages, page], [pages, page])?;
        let words = |width| Tensor::zeros([pages, page, width / 4], (device, DType::I32));
        let ones = || Tensor::ones([pages, page], (device, DType::F32));
        Ok(Self {
            quantization,
            keys: words(widths[0]),
            values: words(widths[1]),
            key_scales: ones(),
            value_scales: ones(),
        })
    }

    /// Returns the widths of keys and values.
    pub fn widths(&self) -> [usize; 2] {
        [&self.keys, &self.values].map(|words| 4 * words.dims()[2])
    }

    /// Returns keys `[pages, P, d_k]` and values `[pages, P, d_v]` in f32.
    ///
    /// # Errors
    /// Those of [`dequantize`].
    pub fn dequantize(&self) -> Result<[Tensor<3>; 2], OpError> {
        let [keys, values] = PagedStore::Quantized(self.clone()).rows();
        Ok([keys.numbers()?, values.numbers()?])
    }

    pub fn check(&self) -> Result<(), OpError> {
        let [pages, page, key_words] = self.keys.dims();
        let [value_pages, value_page, value_words] = self.values.dims();
        check_page_sizes([pages, page], [value_pages, value_page])?;
        for (argument, words) in [("keys' words", key_words), ("values' words", value_words)] {
            OpError::ensure_positive(argument, words)?;
        }
        for (argument, scales) in [
            ("key_scales' shape", &self.key_scales),
            ("value_scales' shape", &self.value_scales),
        ] {
            OpError::expect_same(argument, [pages, page], "the pages'", scales.dims())?;
        }
        for (argument, got, expected) in [
            ("keys' dtype", self.keys.dtype(), DType::I32),
            ("values' dtype", self.values.dtype(), DType::I32),
            ("key_scales' dtype", self.key_scales.dtype(), DType::F32),
            ("value_scales' dtype", self.value_scales.dtype(), DType::F32),
        ] {
            OpError::expect_same(argument, expected, "for quantised pages", got)?;
        }
        for (argument, device) in [
            ("values' device", self.values.device()),
            ("key_scales' device", self.key_scales.device()),
            ("value_scales' device", self.value_scales.device()),
        ] {
            same_device(argument, &self.keys.device(), "the keys'", &device)?;
        }
        Ok(())
    }
}

impl PagedStore {
    /// Returns `[pages, slots of a page]`.
    pub fn pages(&self) -> [usize; 2] {
        let [pages, page, _] = match self {
            Self::Plain { keys, .. } => keys.dims(),
            Self::Quantized(store) => store.keys.dims(),
        };
        [pages, page]
    }

    /// Returns the widths of keys and values.
    pub fn widths(&self) -> [usize; 2] {
        match self {
            Self::Plain { keys, values } => [keys.dims()[2], values.dims()[2]],
            Self::Quantized(store) => store.widths(),
        }
    }

    /// Returns the element type if elements have eight bits.
    pub fn quantization(&self) -> Option<Quantization> {
        match self {
            Self::Plain { .. } => None,
            Self::Quantized(store) => Some(store.quantization),
        }
    }

    pub fn device(&self) -> Device {
        match self {
            Self::Plain { keys, .. } => keys.device(),
            Self::Quantized(store) => store.keys.device(),
        }
    }

    /// Views each slot as a page: slot `s` of page `p` becomes page `p · P + s`.
    #[must_use]
    pub fn by_slots(self) -> Self {
        self.rows().map(Rows::by_slots).into()
    }

    pub(crate) fn rows(self) -> [Rows; 2] {
        match self {
            Self::Plain { keys, values } => [keys, values].map(Rows::Plain),
            Self::Quantized(pages) => [
                Rows::Packed(pages.quantization, pages.keys, pages.key_scales),
                Rows::Packed(pages.quantization, pages.values, pages.value_scales),
            ],
        }
    }

    /// Writes rows as [`append_rows`](crate::paged::append_rows) and [`append_quantized`] do.
    pub(crate) fn append(
        self,
        k: Tensor<4>,
        v: Tensor<4>,
        slots: Tensor<3, Int>,
    ) -> Result<Self, OpError> {
        self.check_append(&k, &v, &slots)?;
        let inputs = AppendInputs {
            pages: self.stored(),
            k: inner(k),
            v: inner(v),
            slots: inner(slots),
        };
        Ok(<Dispatch as PagedOps>::append(inputs).into())
    }

    pub(crate) fn check(&self) -> Result<(), OpError> {
        match self {
            Self::Plain { keys, values } => check_pages(keys, values),
            Self::Quantized(pages) => pages.check(),
        }
    }

    fn check_append(
        &self,
        k: &Tensor<4>,
        v: &Tensor<4>,
        slots: &Tensor<3, Int>,
    ) -> Result<(), OpError> {
        let device = self.device();
        served(&device)?;
        self.check()?;
        let ([pages, _], [width, value_width]) = (self.pages(), self.widths());
        let [batch, kv_heads, rows, _] = k.dims();
        let expected = [batch, kv_heads, rows, width];
        OpError::expect_same("k's shape", expected, "of the keys' width", k.dims())?;
        let expected = [batch, kv_heads, rows, value_width];
        OpError::expect_same("v's shape", expected, "k's, of the values' width", v.dims())?;
        let tables = slots.dims()[1];
        check_heads("slots' heads", tables, kv_heads)?;
        check_shared(pages, kv_heads, tables)?;
        let expected = [batch, tables, rows];
        OpError::expect_same("slots' shape", expected, "k's rows", slots.dims())?;
        for (argument, other) in [
            ("k's device", k.device()),
            ("v's device", v.device()),
            ("slots' device", slots.device()),
        ] {
            same_device(argument, &device, "the keys'", &other)?;
        }
        match self {
            Self::Plain { keys, .. } => {
                OpError::expect_same("k's dtype", keys.dtype(), "the keys'", k.dtype())?;
                OpError::expect_same("v's dtype", keys.dtype(), "the keys'", v.dtype())
            }
            Self::Quantized(_) => OpError::expect_same("v's dtype", k.dtype(), "k's", v.dtype()),
        }
    }

    pub fn stored(self) -> StoredPages<Dispatch> {
        let [keys, values] = self.rows().map(Rows::stored);
        StoredPages { keys, values }
    }
}

impl From<[Rows; 2]> for PagedStore {
    fn from(rows: [Rows; 2]) -> Self {
        match rows {
            [Rows::Plain(keys), Rows::Plain(values)] => Self::Plain { keys, values },
            [
                Rows::Packed(quantization, keys, key_scales),
                Rows::Packed(_, values, value_scales),
            ] => Self::Quantized(QuantizedPages {
                quantization,
                keys,
                values,
                key_scales,
                value_scales,
            }),
            _ => unreachable!("keys and values are stored alike"),
        }
    }
}

impl From<StoredPages<Dispatch>> for PagedStore {
    fn from(pages: StoredPages<Dispatch>) -> Self {
        let rows = |rows| match rows {
            StoredRows::Plain(rows) => Rows::Plain(Tensor::from_dispatch(rows)),
            StoredRows::Packed(rows) => Rows::Packed(
                rows.quantization,
                Tensor::from_dispatch(rows.words),
                Tensor::from_dispatch(rows.scales),
            ),
        };
        [pages.keys, pages.values].map(rows).into()
    }
}

impl Rows {
    /// Views each slot as a page.
    pub fn by_slots(self) -> Self {
        fn apart<K: Basic>(rows: Tensor<3, K>) -> Tensor<3, K> {
            let [pages, page, width] = rows.dims();
            rows.reshape([pages * page, 1, width])
        }
        self.map(apart, apart, |scales| {
            let [pages, page] = scales.dims();
            scales.reshape([pages * page, 1])
        })
    }

    /// Gathers pages.
    pub fn select(self, pages: &Tensor<1, Int>) -> Self {
        self.map(
            |rows| rows.select(0, pages.clone()),
            |words| words.select(0, pages.clone()),
            |scales| scales.select(0, pages.clone()),
        )
    }

    /// Applies a function to the floats, or one to the words and one to the scales.
    pub fn map(
        self,
        plain: impl FnOnce(Tensor<3>) -> Tensor<3>,
        of_words: impl FnOnce(Tensor<3, Int>) -> Tensor<3, Int>,
        of_scales: impl FnOnce(Tensor<2>) -> Tensor<2>,
    ) -> Self {
        match self {
            Self::Plain(rows) => Self::Plain(plain(rows)),
            Self::Packed(of, words, scales) => Self::Packed(of, of_words(words), of_scales(scales)),
        }
    }

    /// Returns the elements `[pages, P, width]`, dequantized.
    pub fn numbers(self) -> Result<Tensor<3>, OpError> {
        match self {
            Self::Plain(rows) => Ok(rows),
            Self::Packed(of, words, scales) => {
                let [pages, page, width] = words.dims();
                let (words, scales) = (words.flatten(0, 1), scales.flatten(0, 1));
                let numbers = dequantize(of, words, scales)?;
                Ok(numbers.reshape([pages, page, 4 * width]))
            }
        }
    }

    fn stored(self) -> StoredRows<Dispatch> {
        match self {
            Self::Plain(rows) => StoredRows::Plain(inner(rows)),
            Self::Packed(quantization, words, scales) => StoredRows::Packed(PackedRows {
                quantization,
                words: inner(words),
                scales: inner(scales),
            }),
        }
    }
}

/// [`append_rows`](crate::paged::append_rows) into quantized pages. Each new key and each new value gets its own scale, so stored rows never change.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_paged_attention::{Quantization, QuantizedPages, append_quantized};
///
/// let device = Device::flex();
/// let pages = QuantizedPages::zeros(Quantization::Int8, [4, 16], [8, 8], &device)?;
/// let k = Tensor::<4>::ones([1, 2, 1, 8], &device) * 3.0;
/// let slots = Tensor::<3, Int>::from_data([[[16 + 5]]], &device);
/// let pages = append_quantized(pages, k.clone(), k, slots)?;
/// let [keys, _] = pages.dequantize()?;
/// assert_eq!(keys.slice([3..4, 5..6]).sum().into_scalar::<f32>(), 24.0);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// Those of [`append_rows`](crate::paged::append_rows); `k` and `v` have any one float dtype and are rounded to f32 first.
///
/// # Errors
/// Those of [`append_rows`](crate::paged::append_rows); also if the tensors of `pages` do not match.
pub fn append_quantized(
    pages: QuantizedPages,
    k: Tensor<4>,
    v: Tensor<4>,
    slots: Tensor<3, Int>,
) -> Result<QuantizedPages, OpError> {
    match PagedStore::Quantized(pages).append(k, v, slots)? {
        PagedStore::Quantized(pages) => Ok(pages),
        PagedStore::Plain { .. } => unreachable!("pages stay as they are stored"),
    }
}

/// Dequantizes rows of words `[n, w]`, i32, with scales `[n]`, f32, to elements `[n, 4 w]`, f32: [`Quantization::dequantize`] bit for bit.
///
/// # Errors
/// [`OpError`] if shapes, dtypes or devices do not match, or no feature of this crate serves the device.
pub fn dequantize(
    quantization: Quantization,
    words: Tensor<2, Int>,
    scales: Tensor<1>,
) -> Result<Tensor<2>, OpError> {
    served(&words.device())?;
    let [rows, _] = words.dims();
    OpError::expect_same("scales' shape", [rows], "a row each", scales.dims())?;
    OpError::expect_same("words' dtype", DType::I32, "of four bytes", words.dtype())?;
    OpError::expect_same("scales' dtype", DType::F32, "the only one", scales.dtype())?;
    same_device(
        "scales' device",
        &words.device(),
        "the words'",
        &scales.device(),
    )?;
    let words = inner(words);
    let scales = inner(scales);
    let numbers = reference::dequantize::<Dispatch>(quantization, words, scales);
    Ok(Tensor::from_dispatch(numbers))
}
