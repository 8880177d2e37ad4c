//! How pages store keys and values.

use blocksparse::Quantization;
use burn::backend::Dispatch;
use burn::tensor::kind::Basic;
use burn::tensor::{DType, Device, Int, Tensor};

use crate::paged::values::{PackedRows, StoredPages, StoredRows};
use crate::paged::{append, check_append, check_page_sizes, inner, reference};
use burn_blocksparse::OpError;
use burn_blocksparse::internal::check::same_device;
use burn_blocksparse::internal::device::served;

/// Keys and values in pages.
#[derive(Clone, Debug)]
// One is made for a call, and moved; tensors are large whichever it is.
#[allow(clippy::large_enum_variant)]
pub enum PagedStore {
    /// As floats.
    Plain {
        /// `[pages, P, d_k]`
        keys: Tensor<3>,
        /// `[pages, P, d_v]`
        values: Tensor<3>,
    },
    /// In eight bits a number.
    Quantized(QuantizedPages),
}

/// Keys and values in eight bits a number, with a scale in f32 for each key and one for each value of a head ([`Quantization`] is the definition): `d_k + d_v + 8`
/// bytes a slot. Widths are multiples of 4; kernels are fast from multiples of 16 on.
#[derive(Clone, Debug)]
pub struct QuantizedPages {
    /// Type of the elements.
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

impl PagedStore {
    /// The same with a page for each slot: slot `s` of page `p` is page `p · P + s`.
    #[must_use]
    pub fn by_slots(self) -> Self {
        fn apart<K: Basic>(rows: Tensor<3, K>) -> Tensor<3, K> {
            let [pages, page, width] = rows.dims();
            rows.reshape([pages * page, 1, width])
        }
        match self {
            Self::Plain { keys, values } => Self::Plain {
                keys: apart(keys),
                values: apart(values),
            },
            Self::Quantized(pages) => {
                let scales = |scales: Tensor<2>| {
                    let [pages, page] = scales.dims();
                    scales.reshape([pages * page, 1])
                };
                Self::Quantized(QuantizedPages {
                    quantization: pages.quantization,
                    keys: apart(pages.keys),
                    values: apart(pages.values),
                    key_scales: scales(pages.key_scales),
                    value_scales: scales(pages.value_scales),
                })
            }
        }
    }
}

impl QuantizedPages {
    /// Pages of zeros, of keys and values so wide.
    ///
    /// # Errors
    /// [`OpError`] if a width is no multiple of 4 or 0, the page size is no power of two, or no feature of this crate serves the device.
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

    /// Widths of keys and values.
    pub fn widths(&self) -> [usize; 2] {
        [&self.keys, &self.values].map(|words| 4 * words.dims()[2])
    }

    /// Keys `[pages, P, d_k]` and values `[pages, P, d_v]` in f32.
    ///
    /// # Errors
    /// As [`dequantize`].
    pub fn dequantize(&self) -> Result<[Tensor<3>; 2], OpError> {
        let [pages, page, _] = self.keys.dims();
        let rows = |words: &Tensor<3, Int>, scales: &Tensor<2>| {
            let [_, _, width] = words.dims();
            let words = words.clone().reshape([pages * page, width]);
            let scales = scales.clone().reshape([pages * page]);
            let numbers = dequantize(self.quantization, words, scales)?;
            Ok::<_, OpError>(numbers.reshape([pages, page, 4 * width]))
        };
        Ok([
            rows(&self.keys, &self.key_scales)?,
            rows(&self.values, &self.value_scales)?,
        ])
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
    /// Pages, and slots of a page.
    pub fn pages(&self) -> [usize; 2] {
        let [pages, page, _] = match self {
            Self::Plain { keys, .. } => keys.dims(),
            Self::Quantized(store) => store.keys.dims(),
        };
        [pages, page]
    }

    /// Widths of keys and values.
    pub fn widths(&self) -> [usize; 2] {
        match self {
            Self::Plain { keys, values } => [keys.dims()[2], values.dims()[2]],
            Self::Quantized(store) => store.widths(),
        }
    }

    /// Quantization of the elements, if they are stored in eight bits.
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

    pub fn stored(self) -> StoredPages<Dispatch> {
        let plain = |rows: Tensor<3>| StoredRows::Plain(inner(rows));
        match self {
            Self::Plain { keys, values } => StoredPages {
                keys: plain(keys),
                values: plain(values),
            },
            Self::Quantized(pages) => {
                let packed = |words: Tensor<3, Int>, scales: Tensor<2>| {
                    StoredRows::Packed(PackedRows {
                        quantization: pages.quantization,
                        words: inner(words),
                        scales: inner(scales),
                    })
                };
                StoredPages {
                    keys: packed(pages.keys, pages.key_scales),
                    values: packed(pages.values, pages.value_scales),
                }
            }
        }
    }
}

impl From<StoredPages<Dispatch>> for PagedStore {
    fn from(pages: StoredPages<Dispatch>) -> Self {
        match (pages.keys, pages.values) {
            (StoredRows::Plain(keys), StoredRows::Plain(values)) => Self::Plain {
                keys: Tensor::from_dispatch(keys),
                values: Tensor::from_dispatch(values),
            },
            (StoredRows::Packed(keys), StoredRows::Packed(values)) => {
                Self::Quantized(QuantizedPages {
                    quantization: keys.quantization,
                    keys: Tensor::from_dispatch(keys.words),
                    values: Tensor::from_dispatch(values.words),
                    key_scales: Tensor::from_dispatch(keys.scales),
                    value_scales: Tensor::from_dispatch(values.scales),
                })
            }
            _ => unreachable!("keys and values are stored alike"),
        }
    }
}

/// [`append_rows`](crate::paged::append_rows) into quantised pages: each new key, and each new value, gets its scale and is stored, all of it final.
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
/// Those of [`append_rows`](crate::paged::append_rows), with `k` and `v` of any one float dtype; they are rounded to f32 first.
///
/// # Errors
/// As [`append_rows`](crate::paged::append_rows); if `pages` do not fit each other.
pub fn append_quantized(
    pages: QuantizedPages,
    k: Tensor<4>,
    v: Tensor<4>,
    slots: Tensor<3, Int>,
) -> Result<QuantizedPages, OpError> {
    let device = pages.keys.device();
    served(&device)?;
    pages.check()?;
    check_append(
        pages.keys.dims()[0],
        pages.widths(),
        &k,
        &v,
        &slots,
        &device,
    )?;
    OpError::expect_same("v's dtype", k.dtype(), "k's", v.dtype())?;
    match append(PagedStore::Quantized(pages), [k, v], slots) {
        PagedStore::Quantized(pages) => Ok(pages),
        PagedStore::Plain { .. } => unreachable!("pages stay as they are stored"),
    }
}

/// The elements `[n, 4 w]`, f32, of rows of words `[n, w]`, i32, with scales `[n]`, f32: what [`Quantization::dequantize`] says, bit for bit.
///
/// # Errors
/// [`OpError`] if shapes, dtypes or devices do not fit each other, or no feature of this crate serves the device.
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
