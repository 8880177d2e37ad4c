//! What is known of each page of keys besides the keys: bounds of their numbers, or their mean.

use crate::kernels::paged::append::{AppendShape, Rows, row_slot};
use blocksparse::Quantization;
use blocksparse_cubecl::limits::{most_units, vector_of};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::codec::decode_word;
use burn_sparse_select::PageSummary;

/// Units of a cube.
const UNITS: usize = 256;
/// Numbers of eight bits in a word.
const WORD: usize = 4;

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Summed {
    summary: PageSummary,
    /// Vectors of a key.
    vectors: usize,
    /// What keys are in eight bits a number, if they are.
    quantization: Option<Quantization>,
}

/// The slot of a new key that is the last new one of its page; behind the last slot of all pages for others.
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

/// A vector of the key in a slot, or the four numbers of a word of it times the key's scale.
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

/// The largest and the smallest numbers with one more key's.
#[cube]
fn bound<N: Size>(most: &mut Vector<f32, N>, least: &mut Vector<f32, N>, key: Vector<f32, N>) {
    #[unroll]
    for c in 0..N::value() {
        let x = key.extract(c);
        most.insert(c, max(most.extract(c), x));
        least.insert(c, min(least.extract(c), x));
    }
}

/// A unit for each vector of a new key: that of the last new key of a page looks at all that the page has up to it. Of keys in eight bits a number it
/// looks at what these stand for, so that bounds are those of the keys that attention sees.
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

/// A type of floats of up to 32 bits that the device has.
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

/// The keys of pages, contiguous.
#[derive(Clone, Copy, Debug)]
pub struct StoredKeys<'a> {
    /// `[pages, page, width]`, the first of the shape's widths, or `[pages, page, width / 4]` words of four numbers.
    pub keys: &'a Handle,
    /// What numbers are in words, and the scale of each key, `[pages, page]`.
    pub packed: Option<(Quantization, &'a Handle)>,
}

/// Summaries of the pages that rows were written to, `[pages, rows of a summary, width]` of a type, in place: of what such a page has up to the last of its
/// new rows, and of numbers that words and scales stand for. `slots` are those that the rows were written to, as
/// [`append_rows`](crate::kernels::paged::append_rows) has them: those of a page one behind the other, ascending. Contiguous.
///
/// # Errors
/// [`KernelError`] if the device cannot index the pages or lacks a dtype; of words, if it has no vectors of four numbers.
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
    // SAFETY: a unit reads its vector of keys of a page below `pages`, and their scales, and writes that of the page's summary; the buffers have the lengths
    // they say.
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
