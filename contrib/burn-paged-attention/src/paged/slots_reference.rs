//! Slot index lists in Burn's primitives.

use burn::backend::get_device_settings;
use burn::tensor::{IndexingUpdateOp, IntDType};

use crate::paged::reference::HostInts;
use burn_blocksparse::internal::prelude::*;

/// See [`PagedOps::page_list_slots`](crate::paged::ops::PagedOps::page_list_slots).
pub(crate) fn page_list_slots<B: Backend>(
    table: IntTensor<B>,
    spans: IntTensor<B>,
    page: usize,
) -> IntTensor<B> {
    let device = table.device();
    let bools = get_device_settings::<B>(&device).bool_dtype;
    let [page_lists, entries] = table.shape().dims();
    let all = Shape::new([page_lists, entries * page]);
    let by_page = Shape::new([page_lists, entries, page]);
    let first = B::int_mul_scalar(table, (page as i64).into());
    let first = B::int_reshape(first, Shape::new([page_lists, entries, 1]));
    let first = B::int_expand(first, by_page.clone());
    let dtype = IntDType::from(first.dtype());
    let within = B::int_arange(0..page as i64, &device, dtype);
    let within = B::int_expand(B::int_reshape(within, Shape::new([1, 1, page])), by_page);
    let slots = B::int_reshape(B::int_add(first, within), all.clone());
    let lengths = B::int_slice(
        B::int_cast(spans, dtype),
        &[Slice::from(0..page_lists), Slice::from(0..1)],
    );
    let lengths = B::int_expand(lengths, all.clone());
    let places = B::int_arange(0..(entries * page) as i64, &device, dtype);
    let places = B::int_expand(B::int_reshape(places, Shape::new([1, entries * page])), all);
    let is_behind = B::int_greater_equal(places, lengths, bools);
    let slots = B::int_mask_fill(slots, is_behind, (-1).into());
    B::int_cast(slots, IntDType::I32)
}

/// See [`PagedOps::picked_slots`](crate::paged::ops::PagedOps::picked_slots).
pub(crate) fn picked_slots<B: Backend>(
    places: IntTensor<B>,
    table: IntTensor<B>,
    heads: usize,
    page: usize,
) -> IntTensor<B> {
    let device = table.device();
    let bools = get_device_settings::<B>(&device).bool_dtype;
    let dtype = IntDType::from(table.dtype());
    let places = B::int_cast(places, dtype);
    let [page_lists, most] = places.shape().dims();
    let [_, entries] = table.shape().dims();
    let size = page as i64;
    let is_none = B::int_lower_elem(places.clone(), 0.into(), bools);
    let last = (entries * page) as i64 - 1;
    let places = B::int_clamp(places, 0.into(), last.into());
    let within = B::int_remainder_scalar(places.clone(), size.into());
    let entry = B::int_gather(1, table, B::int_div_scalar(places, size.into()));
    let is_missing = B::int_lower_elem(entry.clone(), 0.into(), bools);
    let is_none = B::bool_or(is_none, is_missing);
    let all = Shape::new([page_lists, heads, most]);
    let by_head = Shape::new([page_lists, 1, most]);
    let own = B::int_arange(0..heads as i64, &device, dtype);
    let own = B::int_mul_scalar(own, size.into());
    let own = B::int_expand(B::int_reshape(own, Shape::new([1, heads, 1])), all.clone());
    let slots = B::int_mul_scalar(entry, (heads as i64 * size).into());
    let slots = B::int_reshape(B::int_add(slots, within), by_head.clone());
    let slots = B::int_add(B::int_expand(slots, all.clone()), own);
    let is_none = B::bool_expand(B::bool_reshape(is_none, by_head), all);
    let slots = B::int_mask_fill(slots, is_none, (-1).into());
    B::int_cast(slots, IntDType::I32)
}

/// See [`PagedOps::write_integers`](crate::paged::ops::PagedOps::write_integers).
pub(crate) fn write_integers<B: Backend>(
    to: IntTensor<B>,
    at: IntTensor<B>,
    values: IntTensor<B>,
) -> IntTensor<B> {
    let (device, dtype) = (to.device(), IntDType::from(to.dtype()));
    let [length] = to.shape().dims();
    let (at, values) = (HostInts::read::<B>(at), HostInts::read::<B>(values));
    let pairs = at.values.iter().zip(&values.values);
    let pairs = pairs.filter(|&(&at, _)| (0..length as i64).contains(&at));
    let (places, numbers): (Vec<i64>, Vec<i64>) = pairs.unzip();
    if places.is_empty() {
        return to;
    }
    let count = Shape::new([places.len(), 1]);
    let places = B::int_reshape(at.upload::<B>(places, &device), count.clone());
    let numbers = B::int_cast(values.upload::<B>(numbers, &device), dtype);
    let numbers = B::int_reshape(numbers, count);
    let rows = B::int_reshape(to, Shape::new([length, 1]));
    let rows = B::int_scatter_nd(rows, places, numbers, IndexingUpdateOp::Assign);
    B::int_reshape(rows, Shape::new([length]))
}
