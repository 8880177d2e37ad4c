//! Paged attention in Burn's primitives. The host reads the tables: on CPU backends, which run this, they are in its memory.

use std::ops::Range;

use blocksparse::Quantization;
use burn::backend::get_device_settings;
use burn::tensor::IndexingUpdateOp;

use crate::paged::values::{
    AppendInputs, PackedRows, PagedCall, PagedInputs, PagedRows, StoredPages, StoredRows,
    SumsInputs,
};
use burn_blocksparse::graph::recording;
use burn_blocksparse::internal::host;
use burn_blocksparse::internal::prelude::*;

/// Lower bound of a row's maximum, for rows without keys; above the scores of masked pairs.
const LOWEST: f64 = -1e29;
/// Added to the scores of masked pairs.
const LOW: f64 = -1e30;
/// Name of the uploads that a graph capture must not contain.
const SLOTS: &str = "slots of pages";

/// Processes one sequence after the other: gathers the slots of its page list and masks those that queries do not see.
pub fn attention<B: Backend>(inputs: PagedInputs<B>, call: &PagedCall) -> PagedRows<B> {
    let [batch, heads, rows, _] = inputs.q.shape().dims();
    let [_, value_width] = inputs.pages.widths();
    let dtype = FloatDType::from(inputs.q.dtype());
    let sums = accumulate_in(dtype);
    let device = inputs.q.device();
    let kv_heads = call.kv_heads;
    if batch * heads * rows == 0 {
        return PagedRows {
            out: Array::<B>::zeros([batch, heads, rows, value_width], &device, dtype).0,
            lse: Array::<B>::zeros([batch, heads, rows], &device, sums).0,
        };
    }
    let q = Array::<B>(inputs.q).cast(sums);
    let lists = [inputs.table, inputs.spans];
    let (mut problem, q) = Rows::new(q, inputs.pages, lists, call);
    let [_, _, group_rows] = problem.shape;
    problem.page_lists.selected = (inputs.selected.into_option()).map(HostInts::read::<B>);
    problem.sight = match (
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
    problem.sinks = inputs.sinks.into_option().map(|sinks| {
        let group = heads / kv_heads;
        let sinks = Array::<B>(sinks)
            .cast(sums)
            .reshape([kv_heads, group, 1, 1]);
        let sinks = B::float_expand(sinks.0, Shape::new([kv_heads, group, rows, 1]));
        Array(sinks).reshape([1, kv_heads, group_rows, 1])
    });
    let (mut outs, mut logs) = (Vec::new(), Vec::new());
    for entry in 0..batch {
        let (mut out_heads, mut log_heads) = (Vec::new(), Vec::new());
        for heads in problem.heads_together() {
            let part = q.clone().narrow(0, entry..entry + 1);
            let part = part.narrow(1, heads.clone());
            let [out, log] = problem.attend(part, entry, heads);
            out_heads.push(out);
            log_heads.push(log);
        }
        outs.push(Array::cat(out_heads, 1));
        logs.push(Array::cat(log_heads, 1));
    }
    let out = Array::cat(outs, 0).cast(dtype);
    PagedRows {
        out: out.reshape([batch, heads, rows, value_width]).0,
        lse: Array::cat(logs, 0).reshape([batch, heads, rows]).0,
    }
}

/// Processes one sequence after the other, like [`attention`].
pub fn attention_sums<B: Backend>(inputs: SumsInputs<B>, call: &PagedCall) -> FloatTensor<B> {
    let [batch, _, rows, _] = inputs.q.shape().dims();
    let [seats, slots, planes] = inputs.sums.shape().dims();
    let (kv_heads, device) = (call.kv_heads, inputs.q.device());
    let all = Array::<B>(inputs.sums).reshape([seats * slots, planes]);
    let sums = all.dtype();
    let calls = HostInts::read::<B>(inputs.calls);
    let q = Array::<B>(inputs.q).cast(sums);
    let (problem, q) = Rows::new(q, inputs.pages, [inputs.table, inputs.spans], call);
    let [_, _, group_rows] = problem.shape;
    let lse = Array::<B>(inputs.lse).cast(sums);
    let lse = lse.reshape([batch, kv_heads, group_rows, 1]);
    let bools = get_device_settings::<B>(&device).bool_dtype;
    let table = &problem.page_lists.table;
    let all = (0..batch).fold(all, |mut all, entry| {
        let of = |i: usize| calls.values[entry * 4 + i].max(0) as usize;
        let (seat, tokens, loose, position) = (of(0), of(1).min(rows), of(2), of(3));
        for own in problem.heads_together() {
            let list = problem.page_lists.of(entry, own.start);
            let (count, heads) = (list.len().min(slots), own.len());
            if count == 0 {
                continue;
            }
            let [q, lse] = [&q, &lse].map(|x| {
                let x = x.clone().narrow(0, entry..entry + 1);
                x.narrow(1, own.clone())
            });
            let scores = problem.scores(q, entry, &own, &list[..count]);
            let attention = (scores - lse).exp();
            let attention = attention.reshape([heads, group_rows / rows, rows, count]);
            let attention = attention.sum_dim(1).reshape([heads, rows, count]);
            let ids = own.clone().flat_map(|head| {
                let row = (seat * kv_heads + head) * slots;
                (row..row + count).map(|id| id as i64)
            });
            let ids = table.upload::<B>(ids.collect(), &device);
            // Zeroes the columns from slot `seen` on.
            let before = |x: Array<B>, seen: usize| {
                let behind: Vec<i64> = (0..count).map(|at| i64::from(at >= seen)).collect();
                let behind = table.upload::<B>(behind, &device);
                let behind = B::int_reshape(behind, Shape::new([1, count, 1]));
                let behind = B::int_expand(behind, Shape::new([heads, count, 1]));
                x.fill(B::int_equal_elem(behind, 1.into(), bools), 0.0)
            };
            // Keys before these tokens: slots are in causal order.
            let seen = list.len() - tokens.min(list.len());
            let old = all.clone().select(0, ids.clone());
            let old = old.reshape([heads, count, planes]);
            let mut of_planes: Vec<_> = (0..planes)
                .map(|plane| before(old.clone().narrow(2, plane..plane + 1), seen))
                .collect();
            for row in 0..tokens {
                let x = attention.clone().narrow(1, row..row + 1);
                let x = before(x.reshape([heads, count, 1]), seen + row + 1);
                match planes - 1 {
                    0 => of_planes[0] = of_planes[0].clone() + x,
                    ring => {
                        let place = 1 + (position + row) % ring;
                        if loose + row >= ring {
                            of_planes[0] = of_planes[0].clone() + &of_planes[place];
                        }
                        of_planes[place] = x;
                    }
                }
            }
            let new = Array::cat(of_planes, 2).reshape([heads * count, planes]);
            all = Array(assign::<B>(all.0, ids, new.0));
        }
        all
    });
    all.reshape([seats, slots, planes]).0
}

/// Keys, values and masks of a call.
struct Rows<B: Backend> {
    /// KV heads, queries of a sequence per head, and queries of a sequence per KV head.
    shape: [usize; 3],
    keys: StoredRows<B>,
    values: StoredRows<B>,
    /// `[1, kv_heads, group_rows, 1]`
    sinks: Option<Array<B>>,
    softcap: Option<f64>,
    sums: FloatDType,
    page_lists: PageLists,
    sight: Option<Sight>,
}

impl<B: Backend> Rows<B> {
    /// Collects the slots of all page lists. Also returns the queries as rows of KV heads, scaled, in the accumulation dtype.
    fn new(
        q: Array<B>,
        pages: StoredPages<B>,
        [table, spans]: [IntTensor<B>; 2],
        call: &PagedCall,
    ) -> (Self, Array<B>) {
        let ([batch, heads, rows, width], kv_heads) = (q.dims(), call.kv_heads);
        let ([count, page], [_, tables, _]) = (pages.pages(), table.shape().dims());
        let group_rows = heads / kv_heads * rows;
        let problem = Self {
            shape: [kv_heads, rows, group_rows],
            keys: pages.keys,
            values: pages.values,
            sinks: None,
            softcap: call.softcap,
            sums: q.dtype(),
            page_lists: PageLists {
                table: HostInts::read::<B>(table),
                spans: HostInts::read::<B>(spans),
                selected: None,
                page,
                pages: count,
                heads_of_table: kv_heads / tables,
            },
            sight: None,
        };
        let q = (q * call.scale).reshape([batch, kv_heads, group_rows, width]);
        (problem, q)
    }

    /// Ranges of KV heads that read the same slots, for one matrix product each.
    fn heads_together(&self) -> impl Iterator<Item = Range<usize>> {
        let together = match self.page_lists.selected {
            Some(_) => 1,
            None => self.page_lists.heads_of_table,
        };
        let firsts = (0..self.shape[0]).step_by(together);
        firsts.map(move |first| first..first + together)
    }

    /// Attends with scaled queries `[1, heads, group_rows, width]`. Returns the output `[1, heads, group_rows, value_width]` and the lse
    /// `[1, heads, group_rows, 1]`.
    fn attend(&self, q: Array<B>, entry: usize, heads: Range<usize>) -> [Array<B>; 2] {
        let device = q.0.device();
        let ([_, _, group_rows], [_, _, value_width]) = (self.shape, self.values.dims());
        let no_values = || {
            let dims = [1, heads.len(), group_rows, value_width];
            Array::zeros(dims, &device, self.sums)
        };
        let page_list = self.page_lists.of(entry, heads.start);
        let mut scores = Vec::new();
        if !page_list.is_empty() {
            scores.push(self.scores(q, entry, &heads, &page_list));
        }
        if let Some(sinks) = &self.sinks {
            scores.push(sinks.clone().narrow(1, heads.clone()));
        }
        if scores.is_empty() {
            let dims = Shape::new([1, heads.len(), group_rows, 1]);
            let log = B::float_full(dims, f64::NEG_INFINITY.into(), &device, self.sums);
            return [no_values(), Array(log)];
        }
        let s = Array::cat(scores, 3);
        let top = s.clone().max_dim(3).at_least(LOWEST);
        let p = (s - &top).exp();
        let total = p.clone().sum_dim(3);
        let log = top + total.clone().log();
        if page_list.is_empty() {
            return [no_values(), log];
        }
        // Rows without keys have p = 0; the bound avoids 0 / 0.
        let total = total.at_least(f64::from(f32::MIN_POSITIVE));
        let values = self.gather(&self.values, &heads, &page_list);
        [p.narrow(3, 0..page_list.len()).matmul(values) / total, log]
    }

    /// Computes the scores of a page list, `[1, heads, group_rows, slots]`.
    fn scores(
        &self,
        q: Array<B>,
        entry: usize,
        heads: &Range<usize>,
        page_list: &[Slot],
    ) -> Array<B> {
        let keys = self.gather(&self.keys, heads, page_list);
        let mut s = q.matmul(keys.transpose());
        if let Some(softcap) = self.softcap {
            s = Array(B::float_tanh((s / softcap).0)) * softcap;
        }
        let Some(sight) = &self.sight else {
            return s;
        };
        let [_, rows, group_rows] = self.shape;
        let hidden = sight.hidden(entry, page_list, rows, self.page_lists.page);
        let device = s.0.device();
        let shape = [1, 1, group_rows, page_list.len()];
        let hidden = TensorData::new(hidden.repeat(group_rows / rows), shape);
        let hidden = hidden.convert_dtype(self.sums.into());
        recording::doom_by_upload(&device, SLOTS);
        s + Array(B::float_from_data(hidden, &device))
    }

    /// Gathers the rows of a page list, `[1, heads, slots, width]`.
    fn gather(&self, of: &StoredRows<B>, heads: &Range<usize>, page_list: &[Slot]) -> Array<B> {
        let row = |head: usize| page_list.iter().map(move |slot| (head, slot));
        let ids: Vec<i64> = (heads.clone())
            .flat_map(row)
            .map(|(head, slot)| slot.row(head, &self.page_lists) as i64)
            .collect();
        let device = match of {
            StoredRows::Plain(rows) => rows.device(),
            StoredRows::Packed(rows) => rows.scales.device(),
        };
        let rows = rows_at(of, self.page_lists.table.upload::<B>(ids, &device));
        let [_, width] = rows.dims();
        let rows = rows.reshape([1, heads.len(), page_list.len(), width]);
        rows.cast(self.sums)
    }
}

/// Gathers rows `ids` of all pages, `[rows, width]`, dequantized.
pub fn rows_at<B: Backend>(of: &StoredRows<B>, ids: IntTensor<B>) -> Array<B> {
    let [pages, page, width] = of.dims();
    let all = pages * page;
    match of {
        StoredRows::Plain(rows) => Array::<B>(rows.clone())
            .reshape([all, width])
            .select(0, ids),
        StoredRows::Packed(rows) => {
            let words = B::int_reshape(rows.words.clone(), Shape::new([all, width / 4]));
            let words = B::int_select(words, 0, ids.clone());
            let scales = Array::<B>(rows.scales.clone()).flat().select(0, ids);
            Array(dequantize::<B>(rows.quantization, words, scales.0))
        }
    }
}

/// Dequantizes words `[n, w]` with scales `[n]` to `[n, 4 w]`, by a lookup table of the 256 bytes.
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
    let numbers = Array::<B>(table)
        .select(0, bytes)
        .reshape([rows, 4 * width]);
    (numbers * Array::<B>(scales).reshape([rows, 1])).0
}

/// Returns index pairs of source and destination rows: source rows in the order of batch, head and position, destination rows among those of all
/// pages.
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

/// Writes rows in the order of batch, head and position, so the last of those with the same slot stays. The host quantizes rows for quantized pages,
/// as the definition says.
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
    let [from_ids, to] = [from.clone(), to].map(|list| slots.upload::<B>(list, &device));
    let all = count * page;
    let write = |into: StoredRows<B>, rows: FloatTensor<B>| match into {
        StoredRows::Plain(into) => {
            let (into, rows) = (Array::<B>(into), Array::<B>(rows));
            let [batch, kv_heads, new, width] = rows.dims();
            let rows = rows.reshape([batch * kv_heads * new, width]);
            let rows = rows.select(0, from_ids.clone());
            let shape = into.shape();
            let into = into.reshape([all, width]);
            let into = Array::<B>(assign::<B>(into.0, to.clone(), rows.0));
            StoredRows::Plain(into.reshape(shape).0)
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
            let flat = Array::<B>(scales).reshape([all, 1]);
            let scales = Array::<B>(assign::<B>(flat.0, to.clone(), new_scales));
            StoredRows::Packed(PackedRows {
                quantization,
                words: B::int_reshape(words, shape),
                scales: scales.reshape(sizes).0,
            })
        }
    };
    StoredPages {
        keys: write(pages.keys, k),
        values: write(pages.values, v),
    }
}

/// Overwrites rows. Not every backend assigns by an index, but all scatter.
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
    dtype: DType,
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

    /// Uploads integers in the dtype of these.
    pub(crate) fn upload<B: Backend>(&self, values: Vec<i64>, device: &B::Device) -> IntTensor<B> {
        recording::doom_by_upload(device, SLOTS);
        let count = values.len();
        let data = TensorData::new(values, [count]).convert_dtype(self.dtype);
        B::int_from_data(data, device)
    }
}

/// The page lists of a call.
struct PageLists {
    table: HostInts,
    spans: HostInts,
    selected: Option<HostInts>,
    page: usize,
    pages: usize,
    /// Heads whose pages make up one entry of the table.
    heads_of_table: usize,
}

/// A slot of a page list: its table entry's value, and the slot within the page.
struct Slot {
    id: usize,
    slot: usize,
}

impl Slot {
    /// Returns its row among those of all pages.
    fn row(&self, head: usize, page_lists: &PageLists) -> usize {
        let heads = page_lists.heads_of_table;
        (self.id * heads + head % heads) * page_lists.page + self.slot
    }
}

impl PageLists {
    /// Returns the slots of a sequence that a KV head reads, in order.
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

/// Visibility of slots to queries.
struct Sight {
    positions: Vec<i64>,
    last: Vec<i64>,
    queries: Vec<i64>,
}

impl Sight {
    /// Returns the mask to add to the scores of `rows` queries, `[rows, slots]`.
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
