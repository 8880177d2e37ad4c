//! Page selection: summaries, scores and selected pages, against f64 loops.

use burn_paged_attention::summaries::{
    PageChoice, PageSummaries, page_scores, select_pages, summarize_stored, topk_pages,
};
use burn_paged_attention::{PagedStore, Quantization, QuantizedPages, append_quantized};
use burn_sparse_select::{Always, PageSummary, Selection};
use rand::seq::SliceRandom;

use crate::prelude::*;

#[derive(Clone)]
struct Case {
    text: &'static str,
    /// Query heads and KV heads.
    heads: [usize; 2],
    own_tables: bool,
    page: usize,
    width: usize,
    lengths: Vec<usize>,
}

/// A selection, query and KV heads, own or shared tables of KV heads, page size, width, and lengths.
const TABLE: &str = "
    quest:16,64                          | 4 2 | shared | 16 | 16  | 1 16 17 150 300
    quest:16,48,share=sum                | 6 2 | own    | 16 | 20  | 100 15
    quest:32,96                          | 8 1 | shared | 32 | 128 | 700 64
    moba:64,3,share=mean                 | 4 2 | shared | 16 | 24  | 60 65 300
    moba:32,2                            | 3 3 | own    | 32 | 5   | 95 33
    quest:16,48                          | 2 2 | shared | 16 | 160 | 77
    quest:16,80,first=1,local=2          | 4 2 | shared | 16 | 16  | 1 16 33 80 81 300
    moba:32,4,first=2,local=1,share=mean | 4 2 | own    | 16 | 24  | 60 65 300
";

fn cases() -> Vec<Case> {
    let case = |[text, heads, tables, page, width, lengths]: [&'static str; 6]| {
        let lengths = lengths.split_whitespace().map(one).collect();
        let (heads, own_tables) = (all(heads), tables == "own");
        let [page, width] = [page, width].map(one);
        Case {
            text,
            heads,
            own_tables,
            page,
            width,
            lengths,
        }
    };
    rows(TABLE).into_iter().map(case).collect()
}

/// A call in f64.
struct Problem {
    case: Case,
    choice: PageChoice,
    q: Vec<f64>,
    keys: Vec<f64>,
    /// Pages of the pool.
    pages: usize,
    entries: usize,
    table: Vec<i32>,
    spans: Vec<i32>,
    /// `[batch, tables, longest]`
    slots: Vec<i32>,
}

impl Problem {
    fn new(seed: u64, case: &Case, dtype: DType) -> Self {
        let mut rng = seeded(seed);
        let selection: Selection = case.text.parse().unwrap();
        let [heads, kv_heads] = case.heads;
        let choice = selection.on_pages(case.page, heads / kv_heads).unwrap();
        let tables = if case.own_tables { kv_heads } else { 1 };
        let shared = kv_heads / tables;
        let pages_of = |length: &usize| length.div_ceil(case.page);
        let entries = case.lengths.iter().map(pages_of).max().unwrap() + 1;
        let ids = tables * case.lengths.iter().map(pages_of).sum::<usize>() + 2;
        let mut order: Vec<i32> = (0..ids as i32).collect();
        order.shuffle(&mut rng);
        let mut order = order.into_iter();
        let longest = case.lengths.iter().max().unwrap();
        let (mut table, mut spans, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        for length in &case.lengths {
            for _ in 0..tables {
                let own: Vec<i32> = order.by_ref().take(pages_of(length)).collect();
                slots.extend((0..*longest).map(|i| match i < *length {
                    true => own[i / case.page] * case.page as i32 + (i % case.page) as i32,
                    false => -1,
                }));
                let rest = entries - own.len();
                table.extend(own);
                table.extend(std::iter::repeat_n(-1, rest));
                spans.extend([*length as i32, 0, 0, 0]);
            }
        }
        let pages = ids * shared;
        let mut q = numbers(seed + 1, case.lengths.len() * heads * case.width);
        let mut keys = numbers(seed + 2, pages * case.page * case.width);
        round_to(&mut q, dtype);
        round_to(&mut keys, dtype);
        let mut problem = Self {
            case: case.clone(),
            choice,
            q,
            keys,
            pages,
            entries,
            table,
            spans,
            slots,
        };
        // Slots of no sequence must have no effect.
        let mut is_used = vec![false; pages * case.page];
        for batch in 0..case.lengths.len() {
            for head in 0..kv_heads {
                for key in 0..case.lengths[batch] {
                    is_used[problem.slot(batch, head, key)] = true;
                }
            }
        }
        for slot in (0..is_used.len()).filter(|slot| !is_used[*slot]) {
            problem.keys[slot * case.width..][..case.width].fill(f64::NAN);
        }
        problem
    }

    fn tables(&self) -> usize {
        self.slots.len() / self.case.lengths.len() / self.longest()
    }

    fn longest(&self) -> usize {
        *self.case.lengths.iter().max().unwrap()
    }

    fn page(&self, batch: usize, head: usize, entry: usize) -> usize {
        let tables = self.tables();
        let shared = self.case.heads[1] / tables;
        let row = batch * tables + head % tables;
        self.table[row * self.entries + entry] as usize * shared + head % shared
    }

    fn slot(&self, batch: usize, head: usize, key: usize) -> usize {
        let page = self.case.page;
        self.page(batch, head, key / page) * page + key % page
    }

    fn key(&self, batch: usize, head: usize, key: usize) -> &[f64] {
        let width = self.case.width;
        &self.keys[self.slot(batch, head, key) * width..][..width]
    }

    fn keys_of_page(&self, batch: usize, entry: usize) -> std::ops::Range<usize> {
        let page = self.case.page;
        entry * page..((entry + 1) * page).min(self.case.lengths[batch])
    }

    /// Returns the rows of a page's summary.
    fn summary(&self, batch: usize, head: usize, entry: usize) -> Vec<f64> {
        let keys = self.keys_of_page(batch, entry);
        let column = |c: usize| keys.clone().map(move |key| self.key(batch, head, key)[c]);
        let width = 0..self.case.width;
        match self.choice.summary {
            PageSummary::Bounds => {
                let most = width.clone().map(|c| column(c).fold(f64::MIN, f64::max));
                let least = width.map(|c| column(c).fold(f64::MAX, f64::min));
                most.chain(least).collect()
            }
            _ => {
                let count = keys.len() as f64;
                width.map(|c| column(c).sum::<f64>() / count).collect()
            }
        }
    }

    /// Returns float keys.
    fn plain(&self, device: &Device, dtype: DType) -> PagedStore {
        let shape = [self.pages, self.case.page, self.case.width];
        let keys = tensor(&self.keys, shape, device, dtype);
        PagedStore::Plain {
            values: keys.clone(),
            keys,
        }
    }

    /// Returns quantized keys, and rounds the problem's keys to them.
    fn quantized(&mut self, device: &Device, quantization: Quantization) -> PagedStore {
        let (case, [_, kv_heads], width) = (&self.case, self.case.heads, self.case.width);
        let (batch, tables, longest) = (case.lengths.len(), self.tables(), self.longest());
        let pages = [self.pages, case.page];
        let mut store = QuantizedPages::zeros(quantization, pages, [width, width], device).unwrap();
        // Slots of no sequence must have no effect.
        store.key_scales = store.key_scales + f32::NAN;
        let mut k = vec![0.0; batch * kv_heads * longest * width];
        for (at, row) in k.chunks_mut(width).enumerate() {
            let (entry, head) = (at / longest / kv_heads, at / longest % kv_heads);
            let key = at % longest;
            if key < case.lengths[entry] {
                row.copy_from_slice(self.key(entry, head, key));
            }
        }
        let k = tensor(&k, [batch, kv_heads, longest, width], device, DType::F32);
        let slots = ints(&self.slots, [batch, tables, longest], device);
        let store = append_quantized(store, k.clone(), k, slots).unwrap();
        let [keys, _] = store.dequantize().unwrap();
        self.keys = to_f64(keys.into_data());
        PagedStore::Quantized(store)
    }

    fn check(&self, what: &str, store: &PagedStore, device: &Device, dtype: DType, tolerance: f64) {
        let Case {
            page,
            width,
            ref lengths,
            ..
        } = self.case;
        let [heads, kv_heads] = self.case.heads;
        let (batch, tables, longest) = (lengths.len(), self.tables(), self.longest());
        let q = tensor(&self.q, [batch, heads, width], device, dtype);
        let table = ints(&self.table, [batch, tables, self.entries], device);
        let spans = ints(&self.spans, [batch, tables, 4], device);
        let slots = ints(&self.slots, [batch, tables, longest], device);
        // In two parts, of which the first ends within pages: the second updates their summaries.
        let summary = self.choice.summary;
        let of_summaries = match store {
            PagedStore::Plain { .. } => dtype,
            PagedStore::Quantized(_) => DType::F32,
        };
        let mut summaries = PageSummaries::zeros(summary, self.pages, width, of_summaries, device);
        summaries.values = summaries.values + f32::NAN;
        let cut = longest / 2;
        for part in [0..cut, cut..longest] {
            if part.is_empty() {
                continue;
            }
            let slots = slots.clone().slice_dim(2, part);
            summaries = summarize_stored(summaries, store, kv_heads, slots).unwrap();
        }
        let made = to_f64(summaries.values.clone().into_data());
        let numbers = made.len() / self.pages;
        let choice = &self.choice;
        let scores = page_scores(q.clone(), &summaries, kv_heads, &table, &spans, choice);
        let scores = scores.unwrap();
        assert_eq!(scores.dtype(), DType::F32);
        let got = to_f64(scores.clone().into_data());
        let mut is_made = vec![false; self.pages];
        let group = heads / kv_heads;
        for (entry, length) in lengths.iter().enumerate() {
            for head in 0..kv_heads {
                for at in 0..length.div_ceil(page) {
                    let id = self.page(entry, head, at);
                    is_made[id] = true;
                    let expected = self.summary(entry, head, at);
                    let own = &made[id * numbers..][..numbers];
                    for (got, expected) in own.iter().zip(&expected) {
                        let close = match summary {
                            PageSummary::Bounds => got == expected,
                            _ => (got - expected).abs() <= tolerance,
                        };
                        assert!(close, "{what}: page {at}: {got}, expected {expected}");
                    }
                    let queries = (head * group..(head + 1) * group)
                        .map(|head| &self.q[(entry * heads + head) * width..][..width]);
                    let of_query = |q: &[f64]| -> f64 {
                        let channels = q.iter().enumerate();
                        match summary {
                            PageSummary::Bounds => channels
                                .map(|(c, q)| (q * own[c]).max(q * own[width + c]))
                                .sum(),
                            _ => channels.map(|(c, q)| q * own[c]).sum(),
                        }
                    };
                    let mut expected: f64 = queries.clone().map(of_query).sum();
                    if self.choice.mean {
                        expected /= group as f64;
                    }
                    let got = got[(entry * kv_heads + head) * self.entries + at];
                    let size = group as f64 * (width as f64).sqrt();
                    let score = format!("{what}: score of page {at}");
                    assert_near(&score, &[got], &[expected], 1e-5 * size);
                    // No dot product exceeds a bound, nor does a sum of them.
                    if summary == PageSummary::Bounds {
                        for key in self.keys_of_page(entry, at) {
                            let key = self.key(entry, head, key);
                            let mut sum: f64 = queries.clone().map(|q| dot(q, key)).sum();
                            if self.choice.mean {
                                sum /= group as f64;
                            }
                            let is_bound = sum <= got + 1e-5 * size;
                            assert!(is_bound, "{what}: {sum} in page {at}, bound {got}");
                        }
                    }
                }
            }
        }
        for page in (0..self.pages).filter(|page| !is_made[*page]) {
            let own = &made[page * numbers..][..numbers];
            let untouched = own.iter().all(|x| x.is_nan());
            assert!(untouched, "{what}: page {page} is no one's");
        }
        let scores_are: Vec<f32> = got.iter().map(|x| *x as f32).collect();
        let picks = topk_pages(scores, &spans, &self.choice).unwrap();
        assert_picks(what, &picks, &scores_are, lengths, &self.choice);
        let selected = select_pages(q, &summaries, kv_heads, &table, &spans, &self.choice);
        let selected = read(selected.unwrap());
        assert_eq!(selected, picks.into_data(), "{what}: the same twice");
    }
}

/// Checks selected pages `[batch, kv_heads, listed]` against scores `[batch, kv_heads, entries]`.
fn assert_picks(
    what: &str,
    picks: &Tensor<3, Int>,
    scores: &[f32],
    lengths: &[usize],
    choice: &PageChoice,
) {
    let [batch, kv_heads, listed] = picks.dims();
    assert_eq!((batch, listed), (lengths.len(), choice.selected_pages()));
    let entries = scores.len() / (batch * kv_heads);
    let data = read(picks.clone());
    let picks: Vec<i64> = data.iter::<i64>().collect();
    for row in 0..batch * kv_heads {
        let pages = lengths[row / kv_heads].div_ceil(choice.page);
        let last = pages.saturating_sub(1) / choice.block;
        let block = |at: usize| -> f32 {
            let own = &scores[row * entries + at * choice.block..][..choice.block];
            let sum: f32 = own[1..].iter().fold(own[0], |a, b| a + b);
            if sum.is_nan() { f32::NEG_INFINITY } else { sum }
        };
        let Always { first, local } = choice.forced;
        let is_forced = |at: &usize| *at < first || last - at < local;
        let (mut kept, mut order): (Vec<usize>, Vec<usize>) = (0..=last).partition(is_forced);
        order.sort_by(|a, b| block(*b).partial_cmp(&block(*a)).unwrap());
        order.truncate(choice.keep.saturating_sub(kept.len()));
        kept.extend(order);
        kept.sort_unstable();
        let pages_of = |block: usize| block * choice.block..(block + 1) * choice.block;
        let kept = kept.into_iter().flat_map(pages_of);
        let kept = kept.filter(|page| *page < pages);
        let mut expected: Vec<i64> = kept.map(|page| page as i64).collect();
        expected.resize(listed, -1);
        let got = &picks[row * listed..][..listed];
        assert_eq!(got, expected, "{what}: row {row}");
    }
}

pub fn chosen_pages_equal_f64(devices: &[Device]) {
    for (index, case) in cases().into_iter().enumerate() {
        let exact =
            exact(devices).map(|(device, dtype, tolerance)| (device, dtype, tolerance.max(1e-7)));
        let half = halves(devices).map(|(device, dtype)| (device, dtype, 4e-3));
        for (device, dtype, tolerance) in exact.chain(half) {
            let problem = Problem::new(7000 + 10 * index as u64, &case, dtype);
            let what = format!("{}, {dtype:?} on {device:?}", case.text);
            let store = problem.plain(device, dtype);
            problem.check(&what, &store, device, dtype, tolerance);
        }
    }
}

/// Summaries of 8-bit pages are those of the dequantized keys.
pub fn chosen_quantised_pages_equal_f64(devices: &[Device]) {
    let words = |case: &Case| case.width.is_multiple_of(4);
    for (index, case) in cases().into_iter().filter(words).enumerate() {
        for device in devices {
            for quantization in [Quantization::Int8, Quantization::Fp8E4m3] {
                let mut dtypes = vec![DType::F32];
                dtypes.extend(half_dtypes(device).into_iter().take(index % 2));
                for dtype in dtypes {
                    let mut problem = Problem::new(7200 + 10 * index as u64, &case, dtype);
                    let store = problem.quantized(device, quantization);
                    let what = format!("{}, {quantization:?}, {dtype:?}, {device:?}", case.text);
                    problem.check(&what, &store, device, dtype, 1e-6);
                }
            }
        }
    }
}

/// Any scores: ties, NaN, rows of all lengths and of more blocks than units hold.
pub fn picks_of_any_scores(devices: &[Device]) {
    let mut rng = seeded(7100);
    let long: Vec<usize> = vec![16 * 40_000];
    let some = vec![0, 1, 16, 17, 48, 49, 700, 16 * 300 - 1, 16 * 300];
    for (text, page, lengths, entries) in [
        ("quest:16,48", 16, some.clone(), 300),
        ("quest:16,2048", 16, some.clone(), 300),
        ("moba:64,4", 16, some.clone(), 300),
        ("quest:16,48,first=1,local=2", 16, some.clone(), 300),
        ("quest:16,96,first=1,local=2", 16, some.clone(), 300),
        ("quest:16,48,first=4,local=3", 16, some.clone(), 300),
        ("quest:16,64,first=1000,local=1000", 16, some.clone(), 300),
        ("moba:64,6,first=2,local=2", 16, some, 300),
        ("quest:16,16000", 16, long.clone(), 40_000),
        ("quest:16,16000,first=7,local=100", 16, long, 40_000),
    ] {
        let choice = text
            .parse::<Selection>()
            .unwrap()
            .on_pages(page, 1)
            .unwrap();
        let kv_heads = 2;
        let count = lengths.len() * kv_heads * entries;
        for kind in 0..3 {
            let score = |rng: &mut ChaCha8Rng| match kind {
                0 => rng.random::<f32>() * 2.0 - 1.0,
                1 => rng.random_range(0..7) as f32,
                _ => ODD[rng.random_range(0..ODD.len())],
            };
            // Sums of infinities of both signs are NaN, in whatever order.
            let scores: Vec<f32> = (0..count).map(|_| score(&mut rng)).collect();
            let spans = lengths.iter().flat_map(|length| [*length as i32, 0, 0, 0]);
            let spans: Vec<i32> = spans.collect();
            for device in devices {
                let of_device = floats(&scores, [lengths.len(), kv_heads, entries], device);
                let spans = ints(&spans, [lengths.len(), 1, 4], device);
                let picks = topk_pages(of_device, &spans, &choice).unwrap();
                let what = format!("{text}, kind {kind} on {device:?}");
                assert_picks(&what, &picks, &scores, &lengths, &choice);
            }
        }
    }
}
