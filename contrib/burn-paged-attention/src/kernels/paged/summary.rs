//! Kernel that computes summaries of pages: bounds of the keys' elements, or their mean.

use crate::kernels::paged::append::{AppendShape, Rows, row_slot};
use blocksparse::Quantization;
use blocksparse_cubecl::limits::{most_units, vector_of};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::codec::decode_word;
use burn_sparse_select::PageSummary;

/// Units of a cube.
const UNITS: usize = 256;
/// 8-bit elements of a word.
const WORD: usize = 4;

/// Comptime shape of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Summed {
    summary: PageSummary,
    /// Vectors of a key.
    vectors: usize,
    /// Element type of quantized keys.
    quantization: Option<Quantization>,
}

/// Returns the slot of a new key if it is the last new one of its page; otherwise the number of slots of all pages.
#[cube]
fn last_new(slots: &[i32], row: usize, sizes: &Rows) -> usize {
    let none = sizes.pages * sizes.page;
    let slot = row_slot(slots, row, sizes);
    let mut last = slot;
    if slot < none && row % sizes.rows + 1 < sizes.rows {
        let next = row_slot(slots, row + 1, sizes);
        if next / sizes.page == slot / sizes.page {
            last = none;
        }
    }
    last
}

/// Returns a vector of the key in a slot; of a quantized key, four dequantized elements.
#[cube]
fn key_at<K: Numeric, W: Size, N: Size>(
    keys: &[Vector<K, W>],
    scales: &ComptimeOption<Box<[f32]>>,
    slot: usize,
    vector: usize,
    #[comptime] t: Summed,
) -> Vector<f32, N> {
    let x = keys[slot * comptime!(t.vectors) + vector];
    if comptime!(t.quantization.is_some()) {
        let word = u32::cast_from(x.extract(0usize));
        let numbers = decode_word::<f32, N>(word, comptime!(t.quantization.unwrap()));
        numbers * Vector::<f32, N>::empty().fill(scales.as_ref().unwrap()[slot])
    } else {
        Vector::<f32, N>::cast_from(x)
    }
}

/// Extends bounds by one more key.
#[cube]
fn bound<N: Size>(most: &mut Vector<f32, N>, least: &mut Vector<f32, N>, key: Vector<f32, N>) {
    #[unroll]
    for c in 0..N::value() {
        let x = key.extract(c);
        most.insert(c, max(most.extract(c), x));
        least.insert(c, min(least.extract(c), x));
    }
}

/// A unit has one vector of a new key. That of the last new key of a page reads all keys of the page up to it. Quantized keys are dequantized, so
/// that bounds are those of the keys that attention sees.
#[cube(launch_unchecked, address_type = "dynamic")]
fn summarize<K: Numeric, S: Float, W: Size, N: Size>(
    keys: &[Vector<K, W>],
    scales: ComptimeOption<Box<[f32]>>,
    slots: &[i32],
    summaries: &mut [Vector<S, N>],
    sizes: Rows,
    #[comptime] t: Summed,
    #[define(K, S)] _types: [ElemType; 2],
) {
    let row = ABSOLUTE_POS / comptime!(t.vectors);
    let vector = ABSOLUTE_POS % comptime!(t.vectors);
    if row < sizes.count {
        let slot = last_new(slots, row, &sizes);
        if slot < sizes.pages * sizes.page {
            let page = slot / sizes.page;
            let first = page * sizes.page;
            let own = key_at::<K, W, N>(keys, &scales, slot, vector, t);
            match comptime!(t.summary) {
                PageSummary::Bounds => {
                    let mut most = own;
                    let mut least = own;
                    for other in first..slot {
                        let key = key_at::<K, W, N>(keys, &scales, other, vector, t);
                        bound::<N>(&mut most, &mut least, key);
                    }
                    let at = page * comptime!(2 * t.vectors) + vector;
                    summaries[at] = Vector::<S, N>::cast_from(most);
                    summaries[at + comptime!(t.vectors)] = Vector::<S, N>::cast_from(least);
                }
                PageSummary::Mean => {
                    let mut sum = Vector::<f32, N>::zeroed();
                    for other in first..slot {
                        sum += key_at::<K, W, N>(keys, &scales, other, vector, t);
                    }
                    sum += own;
                    let count = Vector::<f32, N>::empty().fill(f32::cast_from(slot - first + 1));
                    let at = page * comptime!(t.vectors) + vector;
                    summaries[at] = Vector::<S, N>::cast_from(sum / count);
                }
            }
        }
    }
}

/// Checks that the device supports a float dtype of up to 32 bits.
pub(crate) fn check_float(
    properties: &DeviceProperties,
    dtype: ElemType,
) -> Result<(), KernelError> {
    let is_float = matches!(dtype, ElemType::Float(kind) if kind != FloatKind::F64);
    match is_float && properties.supports_type(dtype) {
        true => Ok(()),
        false => {
            let dtype = format!("{dtype:?}");
            Err(KernelError::Dtype { dtype })
        }
    }
}

/// Keys of pages, contiguous.
#[derive(Clone, Copy, Debug)]
pub struct StoredKeys<'a> {
    /// `[pages, page, width]`, or `[pages, page, width / 4]` words of four elements; `width` is the first of the shape's widths.
    pub keys: &'a Handle,
    /// Element type of words, and the scale of each key, `[pages, page]`.
    pub packed: Option<(Quantization, &'a Handle)>,
}

/// Updates the summaries of the pages that rows were written to, `[pages, rows of a summary, width]`, in place: over the keys of such a page up to
/// its last new row, dequantized. `slots` are those of [`append_rows`](crate::kernels::paged::append_rows); those of a page are adjacent and
/// ascending. Contiguous.
///
/// # Errors
/// [`KernelError`] if the device cannot index the pages or lacks a dtype; for quantized keys also if it has no vectors of four elements.
pub fn summarize_pages(
    client: &Client,
    shape: &AppendShape,
    summary: PageSummary,
    StoredKeys { keys, packed }: StoredKeys,
    slots: &Handle,
    (summaries, dtype): (&Handle, ElemType),
) -> Result<(), KernelError> {
    let (quantization, scales) = packed.unzip();
    let properties = client.properties();
    for dtype in [shape.dtype, dtype] {
        check_float(properties, dtype)?;
    }
    let width = shape.widths[0];
    let vector = match quantization {
        Some(_) => WORD,
        None => vector_of(properties, shape.dtype.size().max(dtype.size()), &[width]),
    };
    let most = properties.hardware.max_vector_size;
    if quantization.is_some() && (most < WORD || !width.is_multiple_of(WORD)) {
        let what = "numbers of a vector, which has a word";
        return Err(KernelError::limit(what, most as u32, WORD));
    }
    let vectors = width / vector;
    let units = UNITS.min(most_units(properties));
    let of_rows = shape.count() * vectors;
    let largest = (shape.pages * shape.page.max(2) * width).max(of_rows + units);
    let address = address_of(client, largest)?;
    let cubes = spread(client, of_rows.div_ceil(units) as u64)?;
    if shape.count() == 0 || shape.pages == 0 {
        return Ok(());
    }
    let all = shape.pages * shape.page;
    let (stored, stored_dtype) = match quantization {
        Some(_) => (1, ElemType::UInt(UIntKind::U32)),
        None => (vector, shape.dtype),
    };
    // SAFETY: a unit reads its vector of keys of a page below `pages`, and their scales, and writes that of the page's summary; the buffers have the
    // stated lengths.
    unsafe {
        summarize::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(units as u32),
            address,
            stored,
            vector,
            buffer(keys, all * vectors),
            optional(scales, all),
            buffer(slots, shape.batch * shape.tables * shape.rows),
            buffer(summaries, shape.pages * summary.rows() * vectors),
            shape.sizes(),
            Summed {
                summary,
                vectors,
                quantization,
            },
            [stored_dtype, dtype],
        );
    }
    Ok(())
}
