//! Attention over pages in Burn's primitives. Tables are read by the host: on CPU backends, which run this, they are in its memory.

use std::ops::Range;

use blocksparse::Quantization;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata, get_device_settings};
use burn::tensor::{FloatDType, IndexingUpdateOp, Shape, Slice, TensorData};

use crate::paged::values::{
    AppendInputs, PackedRows, PagedCall, PagedInputs, PagedRows, StoredPages, StoredRows,
    SumsInputs,
};
use burn_blocksparse::graph::recording;
use burn_blocksparse::internal::dtype::accumulate_in;
use burn_blocksparse::internal::host;

/// Where scores of rows without keys are, and above those of pairs that do not count.
const LOWEST: f64 = -1e29;
/// Added to the scores of pairs that do not count.
const LOW: f64 = -1e30;

/// One sequence after the other: the slots of its page list are gathered, and what the queries do not see is masked.
pub fn attention<B: Backend>(inputs: PagedInputs<B>, call: &PagedCall) -> PagedRows<B> {
    let [batch, heads, rows, width] = inputs.q.shape().dims();
    let [pages, page] = inputs.pages.pages();
    let [_, value_width] = inputs.pages.widths();
    let [_, tables, _] = inputs.table.shape().dims();
    let dtype = FloatDType::from(inputs.q.dtype());
    let sums = accumulate_in(dtype);
    let device = inputs.q.device();
    let kv_heads = call.kv_heads;
    if batch * heads * rows == 0 {
        let shape = Shape::new([batch, heads, rows, value_width]);
        return PagedRows {
            out: B::float_zeros(shape, &device, dtype),
            lse: B::float_zeros(Shape::new([batch, heads, rows]), &device, sums),
        };
    }
    let page_lists = PageLists {
        table: HostInts::read::<B>(inputs.table),
        spans: HostInts::read::<B>(inputs.spans),
        selected: (inputs.selected.into_option()).map(HostInts::read::<B>),
        page,
        pages,
        heads_of_table: kv_heads / tables,
    };
    let sight = match (
        inputs.positions.into_option(),
        inputs.last.into_option(),
        inputs.query_positions.into_option(),
    ) {
        (Some(positions), Some(last), Some(queries)) => Some(Sight {
            positions: HostInts::read::<B>(positions).values,
            last: HostInts::read::<B>(last).values,
            queries: HostInts::read::<B>(queries).values,
        }),
        _ => None,
    };
    let StoredPages { keys, values } = inputs.pages;
    let q = B::float_mul_scalar(B::float_cast(inputs.q, sums), call.scale.into());
    // Heads that share a head of keys are rows of it.
    let group_rows = heads / kv_heads * rows;
    let q = B::float_reshape(q, Shape::new([batch, kv_heads, group_rows, width]));
    let sinks = inputs.sinks.into_option().map(|sinks| {
        let shape = Shape::new([kv_heads, heads / kv_heads, 1, 1]);
        let sinks = B::float_reshape(B::float_cast(sinks, sums), shape);
        let shape = Shape::new([kv_heads, heads / kv_heads, rows, 1]);
        let shape_of_rows = Shape::new([1, kv_heads, group_rows, 1]);
        B::float_reshape(B::float_expand(sinks, shape), shape_of_rows)
    });
    let call = Rows::<B> {
        shape: [kv_heads, rows, group_rows],
        keys,
        values,
        value_width,
        sinks,
        softcap: call.softcap,
        sums,
        page_lists,
        sight,
    };
    let (mut outs, mut logs) = (Vec::new(), Vec::new());
    for entry in 0..batch {
        let (mut out_heads, mut log_heads) = (Vec::new(), Vec::new());
        for first in (0..kv_heads).step_by(call.together()) {
            let heads = first..first + call.together();
            let part = [Slice::from(entry..entry + 1), Slice::from(heads.clone())];
            let [out, log] = call.attend(B::float_slice(q.clone(), &part), entry, heads);
            out_heads.push(out);
            log_heads.push(log);
        }
        outs.push(B::float_cat(out_heads, 1));
        logs.push(B::float_cat(log_heads, 1));
    }
    let out = B::float_cast(B::float_cat(outs, 0), dtype);
    PagedRows {
        out: B::float_reshape(out, Shape::new([batch, heads, rows, value_width])),
        lse: B::float_reshape(B::float_cat(logs, 0), Shape::new([batch, heads, rows])),
    }
}

/// One sequence after the other, as [`attention`].
pub fn attention_sums<B: Backend>(inputs: SumsInputs<B>, call: &PagedCall) -> FloatTensor<B> {
    let [batch, heads, rows, width] = inputs.q.shape().dims();
    let [pages, page] = inputs.pages.pages();
    let [_, tables, _] = inputs.table.shape().dims();
    let [seats, slots, planes] = inputs.sums.shape().dims();
    let (kv_heads, device) = (call.kv_heads, inputs.q.device());
    let sums = FloatDType::from(inputs.sums.dtype());
    let table = HostInts::read::<B>(inputs.table);
    let calls = HostInts::read::<B>(inputs.calls);
    let q = B::float_mul_scalar(B::float_cast(inputs.q, sums), call.scale.into());
    let group_rows = heads / kv_heads * rows;
    let q = B::float_reshape(q, Shape::new([batch, kv_heads, group_rows, width]));
    let lse = B::float_reshape(inputs.lse, Shape::new([batch, kv_heads, group_rows, 1]));
    let lse = B::float_cast(lse, sums);
    let StoredPages { keys, values } = inputs.pages;
    let call = Rows::<B> {
        shape: [kv_heads, rows, group_rows],
        keys,
        values,
        value_width: width,
        sinks: None,
        softcap: call.softcap,
        sums,
        page_lists: PageLists {
            spans: HostInts::read::<B>(inputs.spans),
            selected: None,
            page,
            pages,
            heads_of_table: kv_heads / tables,
            table,
        },
        sight: None,
    };
    let all = B::float_reshape(inputs.sums, Shape::new([seats * slots, planes]));
    let bools = get_device_settings::<B>(&device).bool_dtype;
    let upload = |numbers: TensorData| {
        recording::doom_by_upload(&device, "slots of pages");
        numbers
    };
    let one = |entry: usize| Slice::from(entry..entry + 1);
    let all = (0..batch).fold(all, |mut all, entry| {
        let of = |i: usize| calls.values[entry * 4 + i].max(0) as usize;
        let (seat, tokens, loose, position) = (of(0), of(1).min(rows), of(2), of(3));
        for first in (0..kv_heads).step_by(call.together()) {
            let own = first..first + call.together();
            let list = call.page_lists.of(entry, first);
            let (count, heads) = (list.len().min(slots), own.len());
            if count == 0 {
                continue;
            }
            let part = [one(entry), Slice::from(own.clone())];
            let [q, lse] = [&q, &lse].map(|x| B::float_slice(x.clone(), &part));
            let scores = call.scores(q, entry, &own, &list[..count]);
            let attention = B::float_exp(B::float_sub(scores, lse));
            let by_row = Shape::new([heads, group_rows / rows, rows, count]);
            let attention = B::float_sum_dim(B::float_reshape(attention, by_row), 1);
            let attention = B::float_reshape(attention, Shape::new([heads, rows, count]));
            let ids = own.clone().flat_map(|head| {
                let row = (seat * kv_heads + head) * slots;
                (row..row + count).map(|id| id as i64)
            });
            let ids = upload(int_data(ids.collect(), &call.page_lists.table));
            let ids = B::int_from_data(ids, &device);
            // The slots from one on.
            let behind = |seen: usize| {
                let numbers: Vec<i64> = (0..count).map(|at| i64::from(at >= seen)).collect();
                let numbers = upload(int_data(numbers, &call.page_lists.table));
                let numbers = B::int_reshape(
                    B::int_from_data(numbers, &device),
                    Shape::new([1, count, 1]),
                );
                let numbers = B::int_expand(numbers, Shape::new([heads, count, 1]));
                B::int_equal_elem(numbers, 1.into(), bools)
            };
            // Slots are seen in order.
            let before = list.len() - tokens.min(list.len());
            let old = B::float_select(all.clone(), 0, ids.clone());
            let old = B::float_reshape(old, Shape::new([heads, count, planes]));
            let mut of_planes: Vec<_> = (0..planes)
                .map(|plane| {
                    let x =
                        B::float_slice(old.clone(), &[Slice::full(), Slice::full(), one(plane)]);
                    B::float_mask_fill(x, behind(before), 0.0.into())
                })
                .collect();
            for row in 0..tokens {
                let x = B::float_slice(attention.clone(), &[Slice::full(), one(row)]);
                let x = B::float_reshape(x, Shape::new([heads, count, 1]));
                let x = B::float_mask_fill(x, behind(before + row + 1), 0.0.into());
                match planes - 1 {
                    0 => of_planes[0] = B::float_add(of_planes[0].clone(), x),
                    ring => {
                        let place = 1 + (position + row) % ring;
                        if loose + row >= ring {
                            let settled = of_planes[place].clone();
                            of_planes[0] = B::float_add(of_planes[0].clone(), settled);
                        }
                        of_planes[place] = x;
                    }
                }
            }
            let new = B::float_cat(of_planes, 2);
            let new = B::float_reshape(new, Shape::new([heads * count, planes]));
            all = assign::<B>(all, ids, new);
        }
        all
    });
    B::float_reshape(all, Shape::new([seats, slots, planes]))
}

/// What the queries of a call attend to.
struct Rows<B: Backend> {
    /// Heads of keys, queries of a head, and queries of a head of keys.
    shape: [usize; 3],
    keys: StoredRows<B>,
    values: StoredRows<B>,
    value_width: usize,
    /// `[1, kv_heads, group_rows, 1]`
    sinks: Option<FloatTensor<B>>,
    softcap: Option<f64>,
    sums: FloatDType,
    page_lists: PageLists,
    sight: Option<Sight>,
}

impl<B: Backend> Rows<B> {
    /// Heads of keys that read the same slots: they are one product.
    fn together(&self) -> usize {
        match self.page_lists.selected {
            Some(_) => 1,
            None => self.page_lists.heads_of_table,
        }
    }

    /// `[1, heads, group_rows, value_width]` and `[1, heads, group_rows, 1]` of scaled queries `[1, heads, group_rows, width]`.
    fn attend(&self, q: FloatTensor<B>, entry: usize, heads: Range<usize>) -> [FloatTensor<B>; 2] {
        let device = q.device();
        let [_, _, group_rows] = self.shape;
        let value_width = self.value_width;
        let page_list = self.page_lists.of(entry, heads.start);
        let mut scores = Vec::new();
        if !page_list.is_empty() {
            scores.push(self.scores(q, entry, &heads, &page_list));
        }
        if let Some(sinks) = &self.sinks {
            let part = [Slice::full(), Slice::from(heads.clone())];
            scores.push(B::float_slice(sinks.clone(), &part));
        }
        let shape = |width: usize| Shape::new([1, heads.len(), group_rows, width]);
        if scores.is_empty() {
            let lowest = f64::NEG_INFINITY.into();
            return [
                B::float_zeros(shape(value_width), &device, self.sums),
                B::float_full(shape(1), lowest, &device, self.sums),
            ];
        }
        let s = match scores.len() {
            1 => scores.remove(0),
            _ => B::float_cat(scores, 3),
        };
        let top = B::float_clamp_min(B::float_max_dim(s.clone(), 3), LOWEST.into());
        let p = B::float_exp(B::float_sub(s, top.clone()));
        let total = B::float_sum_dim(p.clone(), 3);
        let log = B::float_add(top, B::float_log(total.clone()));
        if page_list.is_empty() {
            let out = B::float_zeros(shape(value_width), &device, self.sums);
            return [out, log];
        }
        let [all, keys] = [Slice::full(), Slice::from(0..page_list.len())];
        let p = B::float_slice(p, &[all, all, all, keys]);
        // Rows without keys have p = 0.
        let total = B::float_clamp_min(total, f64::from(f32::MIN_POSITIVE).into());
        let values = self.gather(&self.values, &heads, &page_list);
        [B::float_div(B::float_matmul(p, values), total), log]
    }

    /// The scores of a page list, `[1, heads, group_rows, slots]`.
    fn scores(
        &self,
        q: FloatTensor<B>,
        entry: usize,
        heads: &Range<usize>,
        page_list: &[Slot],
    ) -> FloatTensor<B> {
        let keys = self.gather(&self.keys, heads, page_list);
        let mut s = B::float_matmul(q, B::float_transpose(keys));
        if let Some(softcap) = self.softcap {
            let t = B::float_tanh(B::float_div_scalar(s, softcap.into()));
            s = B::float_mul_scalar(t, softcap.into());
        }
        let Some(sight) = &self.sight else {
            return s;
        };
        let [_, rows, group_rows] = self.shape;
        let hidden = sight.hidden(entry, page_list, rows, self.page_lists.page);
        let device = s.device();
        let shape = [1, 1, group_rows, page_list.len()];
        let hidden = TensorData::new(hidden.repeat(group_rows / rows), shape);
        let hidden = hidden.convert_dtype(self.sums.into());
        recording::doom_by_upload(&device, "slots of pages");
        B::float_add(s, B::float_from_data(hidden, &device))
    }

    /// Rows of the slots of a page list, `[1, heads, slots, width]`.
    fn gather(
        &self,
        of: &StoredRows<B>,
        heads: &Range<usize>,
        page_list: &[Slot],
    ) -> FloatTensor<B> {
        let row = |head: usize| page_list.iter().map(move |slot| (head, slot));
        let ids: Vec<i64> = (heads.clone())
            .flat_map(row)
            .map(|(head, slot)| slot.row(head, &self.page_lists) as i64)
            .collect();
        let device = match of {
            StoredRows::Plain(rows) => rows.device(),
            StoredRows::Packed(rows) => rows.scales.device(),
        };
        recording::doom_by_upload(&device, "slots of pages");
        let ids = B::int_from_data(int_data(ids, &self.page_lists.table), &device);
        let rows = rows_at(of, ids);
        let shape = Shape::new([1, heads.len(), page_list.len(), rows.shape()[1]]);
        B::float_cast(B::float_reshape(rows, shape), self.sums)
    }
}

/// Rows of some slots of all pages, `[rows, width]`: of those in eight bits what they stand for.
pub fn rows_at<B: Backend>(of: &StoredRows<B>, ids: IntTensor<B>) -> FloatTensor<B> {
    let [pages, page, width] = of.dims();
    let all = pages * page;
    match of {
        StoredRows::Plain(rows) => {
            let rows = B::float_reshape(rows.clone(), Shape::new([all, width]));
            B::float_select(rows, 0, ids)
        }
        StoredRows::Packed(rows) => {
            let words = B::int_reshape(rows.words.clone(), Shape::new([all, width / 4]));
            let words = B::int_select(words, 0, ids.clone());
            let scales = B::float_reshape(rows.scales.clone(), Shape::new([all]));
            dequantize::<B>(rows.quantization, words, B::float_select(scales, 0, ids))
        }
    }
}

/// The numbers `[n, 4 w]` of words `[n, w]` with scales `[n]`, from a table of what bytes are.
pub fn dequantize<B: Backend>(
    quantization: Quantization,
    words: IntTensor<B>,
    scales: FloatTensor<B>,
) -> FloatTensor<B> {
    let device = scales.device();
    let [rows, width] = words.shape().dims();
    let numbers = (0..=255).map(|code| quantization.decode(code)).collect();
    recording::doom_by_upload(&device, "numbers of eight bits");
    let table = B::float_from_data(TensorData::new::<f32, _>(numbers, [256]), &device);
    let bytes = (0..4).map(|byte| {
        let shifted = B::bitwise_right_shift_scalar(words.clone(), (8 * byte).into());
        let byte = B::bitwise_and_scalar(shifted, 255.into());
        B::int_reshape(byte, Shape::new([rows, width, 1]))
    });
    let bytes = B::int_cat(bytes.collect(), 2);
    let bytes = B::int_reshape(bytes, Shape::new([rows * width * 4]));
    let shape = Shape::new([rows, 4 * width]);
    let numbers = B::float_reshape(B::float_select(table, 0, bytes), shape.clone());
    let scales = B::float_reshape(scales, Shape::new([rows, 1]));
    B::float_mul(numbers, B::float_expand(scales, shape))
}

/// Pairs of new rows and page rows: rows in the order of batch, head and position, and rows of all pages.
pub fn written(
    slots: &HostInts,
    [batch, kv_heads, rows]: [usize; 3],
    [pages, page]: [usize; 2],
) -> (Vec<i64>, Vec<i64>) {
    let tables = slots.shape[1];
    let (mut from, mut to) = (Vec::new(), Vec::new());
    for entry in 0..batch {
        for head in 0..kv_heads {
            for row in 0..rows {
                let slot = slots.values[(entry * tables + head % tables) * rows + row];
                let Ok(slot) = usize::try_from(slot) else {
                    continue;
                };
                let heads = kv_heads / tables;
                let own = slot / page * heads + head % heads;
                if own < pages {
                    from.push(((entry * kv_heads + head) * rows + row) as i64);
                    to.push((own * page + slot % page) as i64);
                }
            }
        }
    }
    (from, to)
}

/// Rows in the order of batch, head and position; the last of those that go to the same slot stays. Where pages are quantised, the host quantises rows as the
/// definition says.
pub fn append<B: Backend>(inputs: AppendInputs<B>) -> StoredPages<B> {
    let AppendInputs { pages, k, v, slots } = inputs;
    let [batch, kv_heads, rows, _] = k.shape().dims();
    let sizes @ [count, page] = pages.pages();
    let slots = HostInts::read::<B>(slots);
    let (from, to) = written(&slots, [batch, kv_heads, rows], sizes);
    if to.is_empty() {
        return pages;
    }
    let device = k.device();
    recording::doom_by_upload(&device, "slots of pages");
    let ids = |list: Vec<i64>| B::int_from_data(int_data(list, &slots), &device);
    let (from_ids, to) = (ids(from.clone()), ids(to));
    let all = count * page;
    let write = |into: StoredRows<B>, rows: FloatTensor<B>| match into {
        StoredRows::Plain(into) => {
            let shape = into.shape();
            let width = shape[2];
            let new = rows.shape().num_elements() / width;
            let rows = B::float_reshape(rows, Shape::new([new, width]));
            let rows = B::float_select(rows, 0, from_ids.clone());
            let into = B::float_reshape(into, Shape::new([all, width]));
            StoredRows::Plain(B::float_reshape(assign::<B>(into, to.clone(), rows), shape))
        }
        StoredRows::Packed(PackedRows {
            quantization,
            words,
            scales,
        }) => {
            let [_, _, _, width] = rows.shape().dims();
            let shape = words.shape();
            let numbers: Vec<f32> = host::floats::<B, _>(rows);
            let rows = from.iter().map(|&row| {
                let row = &numbers[row as usize * width..][..width];
                quantization.quantize(row)
            });
            let written = from.len();
            let (new_words, new_scales): (Vec<_>, Vec<_>) = rows.unzip();
            let new_words = TensorData::new(new_words.concat(), [written, width / 4]);
            let new_words = B::int_from_data(new_words, &device);
            let flat = B::int_reshape(words, Shape::new([all, width / 4]));
            let places = B::int_reshape(to.clone(), Shape::new([written, 1]));
            let words = B::int_scatter_nd(flat, places, new_words, IndexingUpdateOp::Assign);
            let new_scales = TensorData::new(new_scales, [written, 1]);
            let new_scales = B::float_from_data(new_scales, &device);
            let flat = B::float_reshape(scales, Shape::new([all, 1]));
            let scales = assign::<B>(flat, to.clone(), new_scales);
            StoredRows::Packed(PackedRows {
                quantization,
                words: B::int_reshape(words, shape),
                scales: B::float_reshape(scales, Shape::new(sizes)),
            })
        }
    };
    StoredPages {
        keys: write(pages.keys, k),
        values: write(pages.values, v),
    }
}

/// Rows in the place of others. Not every backend assigns by an index, but all scatter.
pub fn assign<B: Backend>(
    into: FloatTensor<B>,
    to: IntTensor<B>,
    rows: FloatTensor<B>,
) -> FloatTensor<B> {
    let [count] = to.shape().dims();
    let places = B::int_reshape(to, Shape::new([count, 1]));
    B::float_scatter_nd(into, places, rows, IndexingUpdateOp::Assign)
}

/// A tensor of integers on the host.
pub struct HostInts {
    #[doc(hidden)]
    pub values: Vec<i64>,
    #[doc(hidden)]
    pub shape: Vec<usize>,
    dtype: burn::tensor::DType,
}

impl HostInts {
    #[doc(hidden)]
    pub fn read<B: Backend>(tensor: IntTensor<B>) -> Self {
        let dtype = tensor.dtype();
        let shape = tensor.shape().to_vec();
        Self {
            values: host::ints::<B, _>(tensor),
            shape,
            dtype,
        }
    }
}

/// Integers in the dtype that a tensor of the call has.
pub fn int_data(values: Vec<i64>, like: &HostInts) -> TensorData {
    let count = values.len();
    TensorData::new(values, [count]).convert_dtype(like.dtype)
}

/// The page lists of a call.
struct PageLists {
    table: HostInts,
    spans: HostInts,
    selected: Option<HostInts>,
    page: usize,
    pages: usize,
    /// Heads that an entry of the table has a page of each.
    heads_of_table: usize,
}

/// A slot of a page list: the number in the table, and the slot of its page.
struct Slot {
    id: usize,
    slot: usize,
}

impl Slot {
    /// Its row in all pages.
    fn row(&self, head: usize, page_lists: &PageLists) -> usize {
        let heads = page_lists.heads_of_table;
        (self.id * heads + head % heads) * page_lists.page + self.slot
    }
}

impl PageLists {
    /// The slots of a sequence that a head of keys reads, in order.
    fn of(&self, entry: usize, head: usize) -> Vec<Slot> {
        let (tables, most) = (self.table.shape[1], self.table.shape[2]);
        let row = entry * tables + head % tables;
        let table = &self.table.values[row * most..][..most];
        let span = |i: usize| self.spans.values[row * 4 + i].max(0) as usize;
        let [permanent, timed_entry, start, timed] = [0, 1, 2, 3].map(span);
        let first_pages = permanent.div_ceil(self.page);
        let last_pages = match timed {
            0 => 0..0,
            _ => start / self.page..(start + timed).div_ceil(self.page),
        };
        let entries: Vec<usize> = match &self.selected {
            None => (0..first_pages)
                .chain(last_pages.map(|page| timed_entry + page))
                .collect(),
            Some(selected) => {
                let heads = selected.shape[1];
                let count = selected.shape[2];
                let own = &selected.values[(entry * heads + head) * count..][..count];
                own.iter()
                    .filter_map(|x| usize::try_from(*x).ok())
                    .collect()
            }
        };
        let mut slots = Vec::new();
        for place in entries {
            let range = if place < first_pages {
                0..(permanent - place * self.page).min(self.page)
            } else if place >= timed_entry {
                let first = (place - timed_entry) * self.page;
                let end = (start + timed).saturating_sub(first);
                start.saturating_sub(first)..end.min(self.page)
            } else {
                0..0
            };
            let id = table.get(place).copied().unwrap_or(-1);
            let Ok(id) = usize::try_from(id) else {
                continue;
            };
            if (id + 1) * self.heads_of_table <= self.pages {
                slots.extend(range.map(|slot| Slot { id, slot }));
            }
        }
        slots
    }
}

/// Which queries see which slots.
struct Sight {
    positions: Vec<i64>,
    last: Vec<i64>,
    queries: Vec<i64>,
}

impl Sight {
    /// What is added to the scores of `rows` queries, `[rows, slots]`.
    fn hidden(&self, entry: usize, page_list: &[Slot], rows: usize, page: usize) -> Vec<f64> {
        let rows = 0..rows as i64;
        rows.flat_map(|row| {
            let query = self.queries[entry] + row;
            page_list.iter().map(move |slot| {
                let at = slot.id * page + slot.slot;
                let sees = self.positions[at] <= query && query <= self.last[at];
                if sees { 0.0 } else { LOW }
            })
        })
        .collect()
    }
}
