//! Paged attention and writes into pages, against f64 loops.

use burn_blocksparse::{OpPlan, merge_attention};
use burn_paged_attention::{PagedKeysValues, PagedOptions, append_rows, paged_attention};
use rand::seq::SliceRandom;

use crate::judge::golden::val;
use crate::judge::paged::{Problem, cases};
use crate::prelude::*;
use crate::training::case::assert_plan;

pub fn paged_attention_equals_f64(devices: &[Device]) {
    for (index, case) in cases().into_iter().enumerate() {
        for (device, dtype, tolerance) in exact(devices) {
            let mut problem = Problem::new(5000 + 10 * index as u64, case);
            problem.round(dtype);
            if case.sinks {
                round_to(&mut problem.sinks, DType::F32);
            }
            problem.check(&format!("case {index}"), device, dtype, [tolerance; 2]);
        }
    }
}

pub fn paged_attention_in_half_precision(devices: &[Device]) {
    for (device, dtype) in halves(devices) {
        for index in [0, 2, 3, 4, 7, 8, 12, 16, 17, 18, 19, 20, 21] {
            let mut problem = Problem::new(5200 + 10 * index as u64, cases()[index]);
            problem.round(dtype);
            round_to(&mut problem.sinks, DType::F32);
            let what = format!("case {index}");
            problem.check(&what, device, dtype, [unit(dtype), 1e-5]);
        }
    }
}

pub fn paged_attention_gives_the_same_bits(devices: &[Device]) {
    for device in devices {
        let dtypes = half_dtypes(device).into_iter().chain([DType::F32]);
        for (index, dtype) in dtypes.flat_map(|dtype| [7, 5, 20].map(|index| (index, dtype))) {
            let problem = Problem::new(5300, cases()[index]);
            let run = || problem.run(device, dtype).map(|x| x.as_bytes().to_vec());
            let first = run();
            for _ in 0..2 {
                assert!(run() == first, "{device:?}, {dtype:?}: other bits");
            }
        }
    }
}

/// With splits of a fixed size the other sequences of the batch have no effect.
pub fn paged_attention_with_fixed_split(devices: &[Device]) {
    for device in devices {
        let problem = Problem::new(5310, cases()[15]);
        let [whole, _] = problem.run(device, DType::F32);
        let pages = problem.pages(device, DType::F32);
        let q = problem.q(device, DType::F32);
        let whole = to_f64(whole);
        let numbers = whole.len() / problem.case.batch;
        for entry in 0..problem.case.batch {
            let mut alone = pages.clone();
            alone.table = pages.table.clone().narrow(0, entry, 1);
            alone.spans = pages.spans.clone().narrow(0, entry, 1);
            if entry % 2 == 1 {
                // Extra table capacity has no effect either.
                let room = ints(&[-1; 40], [1, 1, 40], device);
                alone.table = Tensor::cat(vec![alone.table, room], 2);
            }
            let q = q.clone().narrow(0, entry, 1);
            let output = paged_attention(q, &alone, &problem.options(device)).unwrap();
            let expected = &whole[entry * numbers..][..numbers];
            let got = to_f64(output.out.into_data());
            assert_eq!(got, expected, "{device:?}, {entry}");
        }
    }
}

/// Three ranges of keys and their merge, with externally computed values.
pub fn paged_attention_golden(devices: &[Device]) {
    for device in devices {
        let of = |of: usize| -> Vec<f64> {
            let numbers = (0..12).flat_map(|i| (0..4).map(move |c| (i, c)));
            numbers.map(|(i, c)| val(of, 0, i, c)).collect()
        };
        let pages = |start: i32, count: i32| {
            PagedKeysValues::new(
                tensor(&of(1), [3, 4, 4], device, DType::F32),
                tensor(&of(2), [3, 4, 4], device, DType::F32),
                1,
                ints(&[0, 1, 2], [1, 1, 3], device),
                ints(&[0, 0, start, count], [1, 1, 4], device),
            )
        };
        let attend = |start: i32, count: i32| {
            let q = tensor(&of(0)[44..], [1, 1, 1, 4], device, DType::F32);
            let options = PagedOptions::default().scale(0.5);
            paged_attention(q, &pages(start, count), &options).unwrap()
        };
        let mut merged = None;
        for (start, count, lse) in [(0, 5, 2.254144), (5, 5, 2.107475), (10, 2, 0.730671)] {
            let part = attend(start, count);
            assert_close("lse of a part", part.lse.clone().into_data(), &[lse], 1e-6);
            merged = Some(match merged {
                None => (part.out, part.lse),
                Some((out, lse)) => merge_attention(out, lse, part.out, part.lse).unwrap(),
            });
        }
        let whole = attend(0, 12);
        let out = [-0.2353, -0.2691, 0.3076, 0.0389];
        let (merged, lse) = merged.unwrap();
        for (out_got, lse_got) in [(merged, lse), (whole.out, whole.lse)] {
            assert_close("out", out_got.into_data(), &out, 2e-4);
            assert_close("lse", lse_got.into_data(), &[2.987249], 1e-6);
        }
    }
}

/// No queries, no sequences, no table entries, no pages.
pub fn paged_attention_of_nothing(devices: &[Device]) {
    for device in devices {
        for (batch, rows, max_pages, pages) in
            [(2, 0, 1, 2), (0, 1, 1, 2), (2, 1, 0, 2), (1, 1, 1, 0)]
        {
            let kv = PagedKeysValues::new(
                Tensor::ones([pages, 16, 8], (device, DType::F32)),
                Tensor::ones([pages, 16, 8], (device, DType::F32)),
                2,
                Tensor::zeros([batch, 1, max_pages], (device, DType::I32)),
                ints(&[5, 0, 0, 0].repeat(batch), [batch, 1, 4], device),
            );
            let q = Tensor::<4>::ones([batch, 4, rows, 8], (device, DType::F32));
            let output = paged_attention(q, &kv, &PagedOptions::default()).unwrap();
            assert_eq!(output.out.dims(), [batch, 4, rows, 8]);
            assert_eq!(output.lse.dims(), [batch, 4, rows]);
            let expected = vec![0.0; batch * 4 * rows * 8];
            assert_close("out", output.out.into_data(), &expected, 0.0);
            let expected = vec![f64::NEG_INFINITY; batch * 4 * rows];
            assert_close("lse", output.lse.into_data(), &expected, 0.0);
        }
    }
}

/// Tensors on an autodiff device, and views.
pub fn paged_attention_leaves_the_graph(devices: &[Device]) {
    for device in devices {
        let problem = Problem::new(5400, cases()[6]);
        let tracked = device.clone().autodiff();
        let pages = problem.pages(&tracked, DType::F32);
        let q = problem.q(&tracked, DType::F32).require_grad();
        // The same elements, stored in another order.
        let q = q.swap_dims(1, 3);
        let stored = Tensor::<4>::from_data(q.into_data(), (&tracked, DType::F32));
        let q = stored.require_grad().swap_dims(1, 3);
        let output = paged_attention(q, &pages, &problem.options(&tracked)).unwrap();
        assert!(!output.out.is_tracked() && !output.lse.is_tracked());
        let [out, lse] = problem.expected();
        assert_close("out", output.out.into_data(), &out, 1e-5);
        assert_close("lse", output.lse.into_data(), &lse, 1e-5);
    }
}

/// Returns the plan of a call, after checking that it is the device's.
pub fn plan(problem: &Problem, device: &Device) -> OpPlan {
    let (q, pages) = (
        problem.q(device, DType::F32),
        problem.pages(device, DType::F32),
    );
    let plan = problem.options(device).explain(&q, &pages).unwrap();
    assert_plan(&plan, device);
    plan
}

pub fn paged_attention_plans(devices: &[Device]) {
    for device in devices {
        for case in cases() {
            plan(&Problem::new(5410, case), device);
        }
    }
}

/// Rows of two sequences written to slots of pages, some of them not stored; a clone is unchanged.
pub fn appended_rows(devices: &[Device]) {
    for device in devices {
        let mut dtypes = half_dtypes(device);
        dtypes.push(DType::F32);
        for dtype in dtypes {
            for (own_tables, width, value_width) in [(false, 16, 5), (true, 8, 24)] {
                append_once(device, dtype, own_tables, [width, value_width]);
            }
        }
    }
}

/// Rows of two sequences for slots of pages, some of them not stored.
pub struct Appended {
    /// Batch entries, KV heads, rows of each.
    pub rows: [usize; 3],
    pub page: usize,
    pub pages: usize,
    tables: usize,
    slots: Vec<i32>,
}

impl Appended {
    /// Makes rows for pages that KV heads share, or with own tables.
    pub fn new(seed: u64, own_tables: bool) -> Self {
        let (rows, page) = ([2, 3, 4], 8);
        let [batch, kv_heads, count] = rows;
        let tables = if own_tables { kv_heads } else { 1 };
        let ids = 5 * tables;
        let mut places: Vec<i32> = (0..(ids * page) as i32).collect();
        places.shuffle(&mut seeded(seed));
        let mut slots = places[..batch * tables * count].to_vec();
        slots[1] = -1;
        slots[6] = -7;
        let pages = ids * kv_heads / tables;
        Self {
            rows,
            page,
            pages,
            tables,
            slots,
        }
    }

    pub fn slots(&self, device: &Device) -> Tensor<3, Int> {
        let [batch, _, rows] = self.rows;
        ints(&self.slots, [batch, self.tables, rows], device)
    }

    /// Returns each stored row with its place among the rows of all pages.
    pub fn places(&self) -> Vec<(usize, usize)> {
        let [batch, kv_heads, rows] = self.rows;
        let place = |at: usize| {
            let (entry, head, row) = (at / rows / kv_heads, at / rows % kv_heads, at % rows);
            let slot = self.slots[(entry * self.tables + head % self.tables) * rows + row];
            let slot = usize::try_from(slot).ok()?;
            let id = match self.tables {
                1 => slot / self.page * kv_heads + head,
                _ => slot / self.page,
            };
            Some((at, id * self.page + slot % self.page))
        };
        (0..batch * kv_heads * rows).filter_map(place).collect()
    }
}

fn append_once(device: &Device, dtype: DType, own_tables: bool, widths: [usize; 2]) {
    let appended = Appended::new(5500, own_tables);
    let ([batch, kv_heads, rows], page) = (appended.rows, appended.page);
    let (pages, of_slots) = (appended.pages, appended.slots(device));
    let mut expected = Vec::new();
    let (mut olds, mut news) = (Vec::new(), Vec::new());
    for (index, width) in widths.into_iter().enumerate() {
        let mut old = numbers(5510 + index as u64, pages * page * width);
        let mut new = numbers(5520 + index as u64, batch * kv_heads * rows * width);
        round_to(&mut old, dtype);
        round_to(&mut new, dtype);
        // Former contents have no effect.
        let mut all = old.clone();
        for (from, to) in appended.places() {
            all[to * width..][..width].copy_from_slice(&new[from * width..][..width]);
        }
        expected.push(all);
        olds.push((tensor(&old, [pages, page, width], device, dtype), old));
        news.push(tensor(&new, [batch, kv_heads, rows, width], device, dtype));
    }
    let clone = olds[0].0.clone();
    let [k, v] = [&news[0], &news[1]].map(Tensor::clone);
    let [keys, values] = [0, 1].map(|at| olds[at].0.clone());
    let (keys, values) = append_rows(keys, values, k, v, of_slots.clone()).unwrap();
    assert_close("keys", keys.clone().into_data(), &expected[0], 0.0);
    assert_close("values", values.clone().into_data(), &expected[1], 0.0);
    assert_close("a clone", clone.into_data(), &olds[0].1, 0.0);
    // In place, and once more.
    let [k, v] = [&news[0], &news[1]].map(Tensor::clone);
    let (keys, values) = append_rows(keys, values, k, v, of_slots).unwrap();
    assert_close("keys again", keys.into_data(), &expected[0], 0.0);
    assert_close("values again", values.into_data(), &expected[1], 0.0);
}
