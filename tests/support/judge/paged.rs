//! Random calls of paged attention, and their results in f64.

use burn_paged_attention::{
    PagedKeysValues, PagedOptions, PagedStore, PagedVisibility, Quantization, QuantizedPages,
    paged_attention,
};
use rand::seq::SliceRandom;

use crate::judge::packed::packed;
use crate::prelude::*;

#[derive(Clone, Copy)]
pub struct Case {
    pub batch: usize,
    /// Query heads and KV heads.
    heads: [usize; 2],
    /// Whether each KV head has its own table row.
    own_tables: bool,
    rows: usize,
    page: usize,
    /// Widths of keys and values.
    widths: [usize; 2],
    timed: bool,
    visibility: bool,
    selected: bool,
    /// Whether some table entries are −1.
    holes: bool,
    /// Whether sequences are so long that several cubes share each.
    long: bool,
    softcap: Option<f64>,
    pub sinks: bool,
    fixed_split: Option<usize>,
}

pub const PLAIN: Case = Case {
    batch: 6,
    heads: [4, 2],
    own_tables: false,
    rows: 1,
    page: 16,
    widths: [16, 16],
    timed: false,
    visibility: false,
    selected: false,
    holes: false,
    long: false,
    softcap: None,
    sinks: false,
    fixed_split: None,
};

/// Settings that differ from [`PLAIN`]: query and KV heads, own table rows for KV heads, widths of keys and values.
const TABLE: &str = "
    batch 6
    heads 3 3, own tables, widths 8 8
    heads 8 2, page 32, widths 64 64, softcap 3.0
    heads 8 1, page 64, widths 128 64, sinks
    page 4, widths 40 20, timed
    own tables, page 32, widths 24 96, timed
    rows 2, timed, visibility
    batch 3, heads 8 2, rows 4, page 32, widths 128 128, visibility
    heads 4 4, own tables, rows 5, page 8, timed, visibility, holes, sinks
    heads 2 2, rows 3, visibility, softcap 1.5
    timed, selected
    own tables, rows 2, page 64, visibility, selected, holes
    page 2, widths 5 7, timed, holes
    batch 40, page 1
    page 128, timed, holes, fixed_split 1
    timed, sinks, fixed_split 2
    heads 8 2, own tables, rows 5, page 32, widths 64 128, timed, visibility, selected, holes, sinks
    heads 8 1, rows 3, page 16, widths 256 256, visibility
    heads 4 4, page 32, widths 96 128
    batch 3, heads 4 2, rows 35, page 32, widths 64 64, visibility
    heads 8 2, page 64, widths 64 64, timed, long
    heads 4 2, page 4, widths 16 40, timed, long
";

pub fn cases() -> Vec<Case> {
    let case = |[row]: [&'static str; 1]| {
        let mut case = PLAIN;
        for (word, numbers) in settings(row) {
            match word {
                "batch" => case.batch = one(numbers),
                "heads" => case.heads = all(numbers),
                "own" => case.own_tables = true,
                "rows" => case.rows = one(numbers),
                "page" => case.page = one(numbers),
                "widths" => case.widths = all(numbers),
                "timed" => case.timed = true,
                "visibility" => case.visibility = true,
                "selected" => case.selected = true,
                "holes" => case.holes = true,
                "long" => case.long = true,
                "sinks" => case.sinks = true,
                "softcap" => case.softcap = Some(one(numbers)),
                "fixed_split" => case.fixed_split = Some(one(numbers)),
                _ => panic!("{word} is nothing to set"),
            }
        }
        case
    };
    rows(TABLE).into_iter().map(case).collect()
}

/// A slot of a page list: its table entry's value, and the slot within the page.
#[derive(Clone, Copy)]
struct Slot {
    id: usize,
    slot: usize,
}

#[derive(Clone)]
pub struct Problem {
    pub case: Case,
    /// Element type, if keys and values are quantized; `keys` and `values` are then the dequantized ones.
    quantization: Option<Quantization>,
    tables: usize,
    /// Number of values that a table entry may have.
    ids: usize,
    max_pages: usize,
    q: Vec<f64>,
    keys: Vec<f64>,
    values: Vec<f64>,
    pub sinks: Vec<f64>,
    table: Vec<i32>,
    spans: Vec<[usize; 4]>,
    positions: Vec<i32>,
    last: Vec<i32>,
    query_positions: Vec<i32>,
    selected: Vec<i32>,
    most_selected: usize,
}

impl Problem {
    pub fn new(seed: u64, case: Case) -> Self {
        let mut rng = seeded(seed);
        let ([heads, kv_heads], page, [width, value_width]) = (case.heads, case.page, case.widths);
        let tables = if case.own_tables { kv_heads } else { 1 };
        let rows = case.batch * tables;
        let lengths = match case.long {
            true => [1000, 0, 700, page - 1, 2500, page + 1],
            false => [0, 1, page - 1, page, page + 1, 5 * page + 3],
        };
        let spans: Vec<[usize; 4]> = (0..rows)
            .map(|row| {
                let permanent = lengths[(row + row / 6) % 6];
                let gap = rng.random_range(0..2);
                let first = permanent.div_ceil(page) + gap;
                let start = rng.random_range(0..2 * page);
                match case.timed {
                    true => [permanent, first, start, lengths[(5 * row + 2) % 6]],
                    false => [permanent, first, start, 0],
                }
            })
            .collect();
        let entries =
            |[_, first, start, timed]: &[usize; 4]| first + (start + timed).div_ceil(page);
        let max_pages = spans.iter().map(entries).max().unwrap_or(0) + 1;
        let ids = rows * max_pages + 3;
        let mut order: Vec<i32> = (0..ids as i32).collect();
        order.shuffle(&mut rng);
        let mut table = order[..rows * max_pages].to_vec();
        if case.holes {
            for entry in table.iter_mut().skip(1).step_by(3) {
                *entry = -1;
            }
        }
        let pages = ids * kv_heads / tables;
        let q_len = case.batch * heads * case.rows * width;
        let most_selected = 4;
        let mut problem = Self {
            quantization: None,
            tables,
            ids,
            max_pages,
            q: numbers(seed + 1, q_len).iter().map(|x| 3.0 * x).collect(),
            keys: numbers(seed + 2, pages * page * width),
            values: numbers(seed + 3, pages * page * value_width),
            sinks: numbers(seed + 4, heads),
            table,
            spans,
            positions: vec![i32::MAX; ids * page],
            last: vec![-1; ids * page],
            query_positions: Vec::new(),
            selected: Vec::new(),
            most_selected,
            case,
        };
        for _ in 0..case.batch * kv_heads {
            let mut entries: Vec<i32> = (0..max_pages as i32).collect();
            entries.shuffle(&mut rng);
            entries.resize(most_selected, -1);
            entries[2] = -1;
            problem.selected.extend(entries);
        }
        problem.place(&mut rng);
        problem.poison();
        problem
    }

    /// Assigns positions to slots in the order of page lists; sequences begin at different positions.
    fn place(&mut self, rng: &mut ChaCha8Rng) {
        for entry in 0..self.case.batch {
            let mut longest = 0;
            for table in 0..self.tables {
                let page_list = self.page_list(entry, table);
                longest = longest.max(page_list.len());
                for (index, slot) in page_list.into_iter().enumerate() {
                    let at = slot.id * self.case.page + slot.slot;
                    self.positions[at] = (10 * entry + index) as i32;
                    let life = rng.random_range(0..2 * longest as i32);
                    let last = self.positions[at] + life;
                    self.last[at] = if life % 3 == 0 { i32::MAX } else { last };
                }
            }
            let first = (10 * entry + longest).saturating_sub(self.case.rows) as i32;
            self.query_positions.push(first);
        }
    }

    /// Fills slots that are in no page list with NaN.
    fn poison(&mut self) {
        let (page, [width, value_width]) = (self.case.page, self.case.widths);
        let mut used = vec![false; self.keys.len() / width];
        for entry in 0..self.case.batch {
            for head in 0..self.case.heads[1] {
                for slot in self.page_list(entry, head % self.tables) {
                    used[self.page_of(slot, head) * page + slot.slot] = true;
                }
            }
        }
        for (row, _) in used.iter().enumerate().filter(|(_, used)| !**used) {
            self.keys[row * width..][..width].fill(f64::NAN);
            self.values[row * value_width..][..value_width].fill(f64::NAN);
        }
    }

    fn page_of(&self, slot: Slot, head: usize) -> usize {
        match self.case.own_tables {
            true => slot.id,
            false => slot.id * self.case.heads[1] + head,
        }
    }

    /// Lists slots one by one, by their definition, with their entries.
    fn entries(&self, entry: usize, table: usize) -> Vec<(usize, Slot)> {
        let row = entry * self.tables + table;
        let page = self.case.page;
        let [permanent, first, start, timed] = self.spans[row];
        let one = (0..permanent).map(|slot| (slot / page, slot % page));
        let two = (start..start + timed).map(|slot| (first + slot / page, slot % page));
        one.chain(two)
            .filter_map(|(entry, slot)| {
                let id = self.table[row * self.max_pages + entry];
                let id = usize::try_from(id).ok()?;
                Some((entry, Slot { id, slot }))
            })
            .collect()
    }

    fn page_list(&self, entry: usize, table: usize) -> Vec<Slot> {
        let slots = self.entries(entry, table).into_iter();
        slots.map(|(_, slot)| slot).collect()
    }

    /// Makes the problem with quantized keys and values; None if the widths do not allow it.
    pub fn quantised(seed: u64, case: Case, quantization: Quantization) -> Option<Self> {
        if case.widths.iter().any(|width| width % 4 > 0) {
            return None;
        }
        let mut problem = Self::new(seed, case);
        problem.quantization = Some(quantization);
        let stored = [&mut problem.keys, &mut problem.values].into_iter();
        for (numbers, width) in stored.zip(case.widths) {
            for (row, numbers) in numbers.chunks_mut(width).enumerate() {
                // Rows of several magnitudes.
                let factor = [1.0, 0.25, 1.75][row % 3];
                let rounded: Vec<f32> = numbers.iter().map(|x| (x * factor) as f32).collect();
                let (words, scale) = quantization.quantize(&rounded);
                let stored = words.iter().flat_map(|word| word.to_le_bytes());
                for (x, byte) in numbers.iter_mut().zip(stored) {
                    *x = f64::from(quantization.decode(byte)) * f64::from(scale);
                }
            }
        }
        problem.poison();
        Some(problem)
    }

    fn store(&self, count: usize, device: &Device, dtype: DType) -> PagedStore {
        let (page, [width, value_width]) = (self.case.page, self.case.widths);
        let Some(quantization) = self.quantization else {
            return PagedStore::Plain {
                keys: tensor(&self.keys, [count, page, width], device, dtype),
                values: tensor(&self.values, [count, page, value_width], device, dtype),
            };
        };
        let (keys, key_scales) = packed(quantization, &self.keys, width);
        let (values, value_scales) = packed(quantization, &self.values, value_width);
        let scales = |scales: Vec<f32>| floats(&scales, [count, page], device);
        PagedStore::Quantized(QuantizedPages {
            quantization,
            keys: ints(&keys, [count, page, width / 4], device),
            values: ints(&values, [count, page, value_width / 4], device),
            key_scales: scales(key_scales),
            value_scales: scales(value_scales),
        })
    }

    pub fn round_queries(&mut self, dtype: DType) {
        round_to(&mut self.q, dtype);
    }

    pub fn round(&mut self, dtype: DType) {
        round_to(&mut self.q, dtype);
        round_to(&mut self.keys, dtype);
        round_to(&mut self.values, dtype);
    }

    /// Returns out and lse.
    pub fn expected(&self) -> [Vec<f64>; 2] {
        let Case {
            batch, rows, page, ..
        } = self.case;
        let ([heads, kv_heads], [width, value_width]) = (self.case.heads, self.case.widths);
        let (mut outs, mut logs) = (Vec::new(), Vec::new());
        for entry in 0..batch {
            for head in 0..heads {
                let kv_head = head / (heads / kv_heads);
                let of_head = (entry * kv_heads + kv_head) * self.most_selected;
                let chosen = &self.selected[of_head..][..self.most_selected];
                let slots: Vec<Slot> = (self.entries(entry, kv_head % self.tables).into_iter())
                    .filter(|(place, _)| !self.case.selected || chosen.contains(&(*place as i32)))
                    .map(|(_, slot)| slot)
                    .collect();
                for row in 0..rows {
                    let q = &self.q[((entry * heads + head) * rows + row) * width..][..width];
                    let position = self.query_positions[entry] + row as i32;
                    let sees = |slot: &&Slot| {
                        let at = slot.id * page + slot.slot;
                        let (from, to) = (self.positions[at], self.last[at]);
                        !self.case.visibility || (from <= position && position <= to)
                    };
                    let (mut scores, mut places) = (Vec::new(), Vec::new());
                    for slot in slots.iter().filter(sees) {
                        let at = self.page_of(*slot, kv_head) * page + slot.slot;
                        let key = &self.keys[at * width..][..width];
                        let score = dot(q, key) / (width as f64).sqrt();
                        scores.push(match self.case.softcap {
                            Some(cap) => cap * (score / cap).tanh(),
                            None => score,
                        });
                        places.push(at);
                    }
                    let mut total: f64 = scores.iter().map(|s| s.exp()).sum();
                    if self.case.sinks {
                        total += self.sinks[head].exp();
                    }
                    let mut out = vec![0.0; value_width];
                    for (score, at) in scores.iter().zip(&places) {
                        let p = score.exp() / total;
                        add(&mut out, p, &self.values[at * value_width..][..value_width]);
                    }
                    outs.extend(out);
                    logs.push(total.ln());
                }
            }
        }
        [outs, logs]
    }

    pub fn pages(&self, device: &Device, dtype: DType) -> PagedKeysValues {
        let (batch, [_, kv_heads], page) = (self.case.batch, self.case.heads, self.case.page);
        let count = self.ids * kv_heads / self.tables;
        let spans: Vec<i32> = self.spans.iter().flatten().map(|x| *x as i32).collect();
        let mut pages = PagedKeysValues::of_store(
            self.store(count, device, dtype),
            kv_heads,
            ints(&self.table, [batch, self.tables, self.max_pages], device),
            ints(&spans, [batch, self.tables, 4], device),
        );
        if self.case.visibility {
            pages = pages.visibility(PagedVisibility {
                positions: ints(&self.positions, [self.ids, page], device),
                last: ints(&self.last, [self.ids, page], device),
                query_positions: ints(&self.query_positions, [batch], device),
            });
        }
        if self.case.selected {
            let shape = [batch, kv_heads, self.most_selected];
            pages = pages.selected(ints(&self.selected, shape, device));
        }
        pages
    }

    pub fn q(&self, device: &Device, dtype: DType) -> Tensor<4> {
        let (case, [heads, _], [width, _]) = (self.case, self.case.heads, self.case.widths);
        tensor(
            &self.q,
            [case.batch, heads, case.rows, width],
            device,
            dtype,
        )
    }

    pub fn options(&self, device: &Device) -> PagedOptions {
        let mut options = PagedOptions::default();
        options.softcap = self.case.softcap;
        options.fixed_split = self.case.fixed_split;
        if self.case.sinks {
            let heads = [self.case.heads[0]];
            options = options.sinks(tensor(&self.sinks, heads, device, DType::F32));
        }
        options
    }

    pub fn run(&self, device: &Device, dtype: DType) -> [TensorData; 2] {
        let pages = self.pages(device, dtype);
        let output = paged_attention(self.q(device, dtype), &pages, &self.options(device)).unwrap();
        [output.out.into_data(), output.lse.into_data()]
    }

    /// Compares with f64. Tensor cores round weights to the values' dtype, an error relative to the largest value.
    pub fn check(&self, what: &str, device: &Device, dtype: DType, tolerance: [f64; 2]) {
        let expected = self.expected();
        let finite = self.values.iter().copied().filter(|x| x.is_finite());
        let finite: Vec<f64> = finite.collect();
        let terms = match dtype {
            DType::BF16 | DType::F16 => [largest(&finite), 0.0],
            _ => [0.0; 2],
        };
        let compare = |how: &str, got: [TensorData; 2]| {
            for (index, name) in ["out", "lse"].into_iter().enumerate() {
                let what = format!("{what}{how}, {device:?}, {dtype:?}: {name}");
                let got = got[index].clone();
                assert_close_to(terms[index], &what, got, &expected[index], tolerance[index]);
            }
        };
        compare("", self.run(device, dtype));
        if terms[0] > 0.0 {
            let case = self.case;
            let counters = vec![0; case.batch * case.heads[0] * case.rows];
            let counters = ints(&counters, [counters.len()], device);
            let pages = self.pages(device, dtype).counters(counters.clone());
            for how in [", with counters", ", with counters again"] {
                let q = self.q(device, dtype);
                let output = paged_attention(q, &pages, &self.options(device)).unwrap();
                compare(how, [output.out.into_data(), output.lse.into_data()]);
                let left = counters.clone().abs().sum().into_scalar::<i32>();
                assert_eq!(left, 0, "{what}{how}");
            }
        }
    }
}
