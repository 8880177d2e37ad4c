//! Selections of an indexer among paged keys, against those among contiguous keys.

use burn_paged_attention::dsa::{DsaPages, choose_in_pages};
use burn_paged_attention::{PagedKeysValues, PagedOptions, PagedStore, paged_attention};
use burn_sparse_select::dsa::Dsa;
use rand::seq::SliceRandom;

use crate::judge::dsa::{Problem, dsa_of};
use crate::prelude::*;

/// Page lists of these lengths in random order, and their queries.
struct PageLists {
    /// One query each.
    problems: Vec<Problem>,
    page: usize,
    /// Pages of the pool, and entries of the table.
    pages: usize,
    entries: usize,
    table: Vec<i32>,
}

impl PageLists {
    fn new(seed: u64, index: [usize; 2], lengths: &[usize], page: usize, spare: usize) -> Self {
        let mut rng = seeded(seed);
        let problem = |(page_list, &length): (usize, &usize)| {
            Problem::of([2, 1, 4], index, [1, length]).filled(seed + page_list as u64)
        };
        let problems = lengths.iter().enumerate().map(problem).collect();
        let of_lists = lengths.iter().map(|length| length.div_ceil(page));
        let entries = of_lists.clone().max().unwrap() + spare;
        let pages = of_lists.clone().sum::<usize>() + 3;
        let mut order: Vec<i32> = (0..pages as i32).collect();
        order.shuffle(&mut rng);
        let mut table = Vec::new();
        for count in of_lists {
            table.extend(order.drain(..count));
            // Entries after the last are arbitrary.
            table.extend((count..entries).map(|_| match rng.random_bool(0.5) {
                true => -1,
                false => 0,
            }));
        }
        Self {
            problems,
            page,
            pages,
            entries,
            table,
        }
    }

    /// Returns the slot of a key of a page list.
    fn slot(&self, page_list: usize, key: usize) -> usize {
        let entry = self.table[page_list * self.entries + key / self.page];
        entry as usize * self.page + key % self.page
    }

    fn index(&self, device: &Device, dtype: DType) -> DsaPages {
        let page_lists = self.problems.len();
        let [heads, width] = [self.problems[0].index_heads, self.problems[0].index_dim];
        // Slots in no page list hold NaN.
        let mut keys = vec![f64::NAN; self.pages * self.page * width];
        for (page_list, problem) in self.problems.iter().enumerate() {
            for (key, row) in problem.index[1].chunks(width).enumerate() {
                keys[self.slot(page_list, key) * width..][..width].copy_from_slice(row);
            }
        }
        let of = |part| Problem::parts(&self.problems, part);
        let spans = self.problems.iter().flat_map(|problem| {
            let seen = problem.seq[1] as i32;
            [seen, 0, 0, 0]
        });
        let spans: Vec<i32> = spans.collect();
        DsaPages {
            q: tensor(&of(0), [page_lists, heads, width], device, dtype),
            weights: tensor(&of(2), [page_lists, heads], device, dtype),
            keys: tensor(&keys, [self.pages, self.page, width], device, dtype),
            table: ints(&self.table, [page_lists, 1, self.entries], device),
            spans: ints(&spans, [page_lists, 1, 4], device),
        }
    }
}

/// Selected slots equal those of contiguous keys, unless a rounding decides: page lists of unequal lengths, one query and many, tables longer than
/// any page list, few scores in memory at a time, and KV heads that share entries.
pub fn dsa_chooses_in_pages(devices: &[Device]) {
    // Heads of the indexer and their width; lengths of page lists; slots of a page, and spare entries; numbers of kept keys and of near ones; scores
    // in memory at a time; KV heads.
    let rows = [
        ([3, 6], vec![70, 1, 33], 8, 2, [9, 0], 1 << 24, 1),
        ([3, 6], vec![70, 12, 33, 13, 64], 16, 0, [12, 3], 200, 2),
        ([1, 5], vec![40], 1, 5, [40, 1], 1 << 24, 3),
        ([4, 16], vec![900, 300, 4], 32, 9, [120, 2], 1 << 24, 2),
        ([64, 128], vec![530, 70], 16, 4, [64, 0], 1 << 24, 1),
        // Rows that are cut: one is empty in its second part, and one has no more keys than are kept.
        ([2, 8], vec![50_000, 7000, 300], 64, 3, [500, 2], 1 << 24, 1),
    ];
    for device in devices {
        let dtypes = exact_dtypes(device).into_iter().map(|(dtype, _)| dtype);
        for dtype in dtypes.chain(half_dtypes(device)) {
            let tolerance = match dtype {
                DType::F64 => 1e-12,
                _ => 10.0 * product_tolerance(device, DType::F32, 1e-6),
            };
            for (seed, (index, lengths, page, spare, [keep, near], numbers, kv_heads)) in
                (0..).zip(rows.clone())
            {
                let what = format!("{device:?}, {dtype:?}, {lengths:?} by {page}");
                let mut page_lists =
                    PageLists::new(11_300 + 10 * seed, index, &lengths, page, spare);
                for problem in &mut page_lists.problems {
                    *problem = problem.rounded(dtype);
                }
                let dsa = dsa_of([keep, near], numbers);
                let slots = choose_in_pages(&dsa, &page_lists.index(device, dtype), kv_heads);
                let slots = slots.unwrap();
                let most = keep.min(page_lists.entries * page);
                assert_eq!(slots.dims(), [lengths.len(), kv_heads, most], "{what}");
                let slots: Vec<i32> = slots.into_data().iter().collect();
                let mut compared = 0;
                for (row, slots) in slots.chunks(most).enumerate() {
                    let (page_list, head) = (row / kv_heads, row % kv_heads);
                    let (chosen, gap) = page_lists.problems[page_list].choice(0, keep, near);
                    let (there, behind) = slots.split_at(chosen.len());
                    assert!(behind.iter().all(|&slot| slot < 0), "{what}: {row}");
                    if gap <= 2.0 * tolerance {
                        continue;
                    }
                    compared += 1;
                    let expected: Vec<i32> = (chosen.iter())
                        .map(|&key| page_lists.slot(page_list, key))
                        .map(|slot| (slot / page * kv_heads + head) * page + slot % page)
                        .map(|slot| slot as i32)
                        .collect();
                    assert_eq!(there, expected, "{what}: {row}");
                }
                let is_rounded = tolerance > 1e-3;
                assert!(is_rounded || compared > 0, "{what}: {compared}");
            }
        }
    }
}

/// Attention to the selected slots equals attention to these keys.
pub fn dsa_attends_in_pages(devices: &[Device]) {
    let (heads, kv_heads, width, page, keep) = (4, 2, 32, 16, 24);
    for device in devices {
        let page_lists = PageLists::new(11_400, [3, 6], &[90, 20, 47], page, 1);
        let count = page_lists.problems.len();
        let mut rng = seeded(11_401);
        let mut random = |count: usize| drawn(&mut rng, count, -1.0f64..1.0);
        let q = random(count * heads * width);
        let stored = [(); 2].map(|()| random(page_lists.pages * kv_heads * page * width));
        let index = page_lists.index(device, DType::F32);
        let slots = choose_in_pages(&Dsa::new(keep).unwrap(), &index, kv_heads);
        let slots = slots.unwrap();
        let listed: Vec<i32> = slots.clone().into_data().iter().collect();
        let shape = [page_lists.pages * kv_heads, page, width];
        let [keys, values] =
            (stored.each_ref()).map(|rows| tensor(rows, shape, device, DType::F32));
        let store = PagedStore::Plain { keys, values };
        let pages = PagedKeysValues::of_slots(store, slots, &index.spans);
        let of_device = tensor(&q, [count, heads, 1, width], device, DType::F32);
        let out = paged_attention(of_device, &pages, &PagedOptions::default()).unwrap();
        let (out, [keys, values]) = (to_f64(out.out.into_data()), stored);
        let tolerance = product_tolerance(device, DType::F32, 1e-5);
        for (row, out) in out.chunks(width).enumerate() {
            let (page_list, head) = (row / heads, row % heads);
            let list = (page_list * kv_heads + head / (heads / kv_heads)) * keep;
            let slots = named(&listed[list..][..keep]);
            assert_eq!(slots.len(), keep.min(page_lists.problems[page_list].seq[1]));
            let q = &q[row * width..][..width];
            let score =
                |&slot: &usize| dot(q, &keys[slot * width..][..width]) / (width as f64).sqrt();
            let weights = softmax(&slots.iter().map(score).collect::<Vec<_>>());
            let sum = |column: usize| {
                let pairs = slots.iter().zip(&weights);
                let products = pairs.map(|(slot, weight)| weight * values[slot * width + column]);
                products.sum::<f64>()
            };
            let expected: Vec<f64> = (0..width).map(sum).collect();
            assert_near(&format!("{device:?}: {row}"), out, &expected, tolerance);
        }
    }
}

/// Errors for arguments that do not match.
pub fn dsa_in_pages_errors(devices: &[Device]) {
    for device in devices {
        let page_lists = PageLists::new(11_500, [3, 6], &[40, 20], 8, 0);
        let index = page_lists.index(device, DType::F32);
        let dsa = Dsa::new(4).unwrap();
        let refuses = |change: &dyn Fn(&mut DsaPages)| {
            let mut wrong = index.clone();
            change(&mut wrong);
            choose_in_pages(&dsa, &wrong, 1)
        };
        let zeros = |shape: [usize; 3]| Tensor::<3>::zeros(shape, (device, DType::F32));
        let none = |shape: [usize; 3]| Tensor::<3, Int>::zeros(shape, (device, DType::I32));
        refused! {
            choose_in_pages(&dsa, &index, 0) => "…kv_heads…";
            refuses(&|wrong| wrong.keys = zeros([4, 6, 6])) => "…page size…";
            refuses(&|wrong| wrong.keys = zeros([4, 8, 5])) => "…index_dim…";
            refuses(&|wrong| wrong.weights = Tensor::ones([2, 4], (device, DType::F32))) => "…weights' shape…";
            refuses(&|wrong| wrong.spans = none([1, 1, 4])) => "…spans' shape…";
            refuses(&|wrong| wrong.table = none([2, 2, 5])) => "…table's shape…";
        }
    }
}
