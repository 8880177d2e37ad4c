//! MiniMax sparse attention, its selections and the loss of its index branch, against plain f64 loops.

use burn_sparse_select::msa::{Msa, MsaIndex, MsaTarget};
use burn_sparse_select::{SelectedBlocks, pages::PageChoice};

use crate::judge::msa::{Case, Index, cases};
use crate::prelude::*;
use crate::selection::prefix::Prefix;

/// Returns the blocks of each list without the own one, ascending; None without lists.
fn blocks(lists: &Option<SelectedBlocks>) -> Option<Vec<Vec<usize>>> {
    let lists = lists.as_ref()?;
    let [.., most] = lists.blocks.dims();
    let ints = read_ints(lists.blocks.clone());
    let row = |row: &[i32]| {
        let mut blocks = named(row);
        blocks.sort_unstable();
        blocks
    };
    Some(ints.chunks(most).map(row).collect())
}

/// Returns a device's attention over the selection, with its gradients.
fn attended(msa: &Msa, index: &Index, problem: &Problem, device: &Device, dtype: DType) -> Results {
    let device = device.clone().autodiff();
    let lists = msa.choose(&index.tensors(&device, dtype)).unwrap();
    differentiated(problem, &device, dtype, |q, k, v| {
        let options = AttentionOptions::default();
        msa.attention(q, k, v, lists.clone(), options).unwrap()
    })
}

/// Returns the loss, and its gradients with respect to the index.
fn learned(
    msa: &Msa,
    index: &Index,
    problem: &Problem,
    (device, dtype): (&Device, DType),
    all: bool,
) -> [TensorData; 3] {
    let device = device.clone().autodiff();
    let MsaIndex { q, k, .. } = index.tensors(&device, dtype);
    let own = MsaIndex::new(q.require_grad(), k.require_grad()).unwrap();
    let [q, k, v, _] = inputs(problem, &device, dtype);
    let [q, k] = [q, k].map(Tensor::require_grad);
    let lists = msa.choose(&own).unwrap();
    let options = AttentionOptions::default();
    let (_, lse) = msa
        .attention(q.clone(), k.clone(), v, lists.clone(), options)
        .unwrap();
    let over = match all {
        true => MsaTarget::All,
        false => MsaTarget::Chosen {
            lists: lists.as_ref(),
            lse: &lse,
        },
    };
    let loss = msa.loss(&own, [&q, &k], None, over).unwrap();
    let grads = loss.backward();
    assert!(q.grad(&grads).is_none() && k.grad(&grads).is_none());
    let [by_q, by_k] = [&own.q, &own.k].map(|x| x.grad(&grads).unwrap().into_data());
    [loss.into_data(), by_q, by_k]
}

/// Selections equal f64: slabs of any size, groups of 1, 2 and 4, ragged, fewer queries than keys.
pub fn msa_choices_equal_f64(devices: &[Device]) {
    for (seed, case) in (0..).zip(cases()) {
        let index = Index::clear(case, 41_000 + 10 * seed, DType::F32, 2e-5);
        let kept: Vec<_> = index.rows().map(|row| index.choice(row).0).collect();
        for (device, dtype, tolerance) in exact(devices) {
            let tensors = index.tensors(device, dtype);
            let what = format!("{}, {device:?}, {dtype:?}", case.name);
            let scores = to_f64(case.msa().block_scores(&tensors).unwrap().into_data());
            let blocks_of_all = 0..case.seq[1].div_ceil(case.block);
            let of = |row| blocks_of_all.clone().map(move |block| (row, block));
            let expected: Vec<f64> = (index.rows().flat_map(of))
                .map(|(row, block)| index.block_score(row, block))
                .collect();
            assert_near(&what, &scores, &expected, 10.0 * tolerance);
            for numbers in [1 << 24, 1000] {
                let msa = case.msa().with_chunk_elements(numbers).unwrap();
                let lists = msa.choose(&tensors).unwrap();
                let is_choice = case.keep > 1 && case.seq[1].div_ceil(case.block) > case.keep;
                assert_eq!(lists.is_some(), is_choice, "{what}");
                let chosen = blocks(&lists).into_iter().flatten();
                for (at, (chosen, kept)) in chosen.zip(&kept).enumerate() {
                    // The last is the query's own block.
                    assert_eq!(chosen, kept[..kept.len() - 1], "{what}, list {at}");
                }
            }
        }
    }
}

/// Out, lse and the gradients with respect to q, k and v equal f64, twice with equal bits.
pub fn msa_equals_f64(devices: &[Device]) {
    for (seed, case) in (0..).zip(cases()) {
        let index = Index::clear(case, 42_000 + 10 * seed, DType::F32, 2e-5);
        let problem = index.problem(42_500 + seed, DType::F32);
        let answer = problem.solve();
        for (device, dtype, tolerance) in exact(devices) {
            let what = format!("{}, {device:?}, {dtype:?}", case.name);
            let run = || attended(&case.msa(), &index, &problem, device, dtype);
            let got = run();
            assert_same_bits(&what, &got, &run());
            answer.assert(&what, got, &[Near::Tensor(tolerance)]);
        }
    }
}

/// Like [`msa_equals_f64`], in half precision and with several widths; also blocks so large that they are matched with the queries that list them.
pub fn msa_in_half_precision(devices: &[Device]) {
    let is_tried = |(at, case): &(usize, Case)| *at < 4 || case.block == 128;
    let widths = [16, 64, 96, 32, 128];
    let tried = cases().into_iter().enumerate().filter(is_tried);
    for ((_, case), index_dim) in tried.zip(widths) {
        let case = Case {
            dims: [64, 64],
            index_dim,
            ..case
        };
        for (device, dtype) in halves(devices) {
            let index = Index::clear(case, 43_000, dtype, 2e-5);
            let problem = index.problem(43_500, dtype);
            let what = format!("{}, {device:?}, {dtype:?}", case.name);
            let got = attended(&case.msa(), &index, &problem, device, dtype);
            let near = Near::Tensor(half_tolerance(dtype));
            problem.solve().assert(&what, got, &[near]);
            let (loss, grads) = index.loss(&problem, 0.125, false);
            let [got, by_q, by_k] = learned(&case.msa(), &index, &problem, (device, dtype), false);
            assert_near(&what, &to_f64(got), &[loss], 2e-3);
            for (got, expected) in [by_q, by_k].into_iter().zip(&grads) {
                assert_near(&what, &to_f64(got), expected, 2e-2 * largest(expected));
            }
        }
    }
}

/// Losses over selected keys and over all, and their gradients, equal f64, twice with equal bits.
pub fn msa_losses_equal_f64(devices: &[Device]) {
    for (seed, case) in some_of((0..).zip(cases()), 2) {
        let index = Index::clear(case, 44_000 + 10 * seed, DType::F32, 2e-5);
        let problem = index.problem(44_500 + seed, DType::F32);
        let scale = 1.0 / (case.dims[0] as f64).sqrt();
        for (device, dtype, tolerance) in exact(devices) {
            for all in [false, true] {
                let what = format!("{}, {device:?}, {dtype:?}, all: {all}", case.name);
                let (loss, grads) = index.loss(&problem, scale, all);
                let msa = case.msa().with_chunk_elements(1 << 12).unwrap();
                let run = || learned(&msa, &index, &problem, (device, dtype), all);
                let got = run();
                for (got, again) in got.iter().zip(run()) {
                    assert_eq!(got.as_bytes(), again.as_bytes(), "{what}");
                }
                let [got, by_q, by_k] = got;
                assert_near(&what, &to_f64(got), &[loss], 10.0 * tolerance);
                for (got, expected) in [by_q, by_k].into_iter().zip(&grads) {
                    let tolerance = 10.0 * tolerance * largest(expected).max(1e-3);
                    assert_near(&what, &to_f64(got), expected, tolerance);
                }
            }
        }
    }
}

/// Later tokens change no selection and no output, and queries alone select and see the same as among all.
pub fn msa_is_prefix_stable(devices: &[Device]) {
    let case = cases()[0];
    let index = Index::clear(case, 46_000, DType::F32, 2e-5);
    let problem = index.problem(46_500, DType::F32);
    for device in devices {
        let of_index = index.tensors(device, DType::F32);
        let [q, k, v, _] = inputs(&problem, device, DType::F32);
        let choose = |queries: &[Tensor<4>], keys: &[Tensor<4>]| {
            let index = MsaIndex::new(queries[0].clone(), keys[0].clone()).unwrap();
            case.msa().choose(&index).unwrap()
        };
        let prefix = Prefix {
            what: format!("{device:?}"),
            queries: vec![of_index.q, q],
            keys: vec![of_index.k, k, v],
            attend: &|queries, keys| {
                let [q, k, v] = [&queries[1], &keys[1], &keys[2]].map(Clone::clone);
                let (lists, options) = (choose(queries, keys), AttentionOptions::default());
                case.msa().attention(q, k, v, lists, options).unwrap().0
            },
            choose: &|queries, keys| choose(queries, keys).unwrap().blocks,
            is_clear: &|_| true,
            within: 10.0 * product_tolerance(device, DType::F32, 1e-6),
        };
        prefix.assert_stable();
    }
}

/// Pages of the selection, for queries at arbitrary positions, with arbitrary contents after them.
pub fn msa_chooses_in_pages(devices: &[Device]) {
    for (case, page) in cases().into_iter().zip([8, 4, 1, 16, 8, 8, 2, 8]) {
        let index = Index::clear(case, 47_000, DType::F32, 2e-5);
        let [seq_q, seq_kv] = case.seq;
        let msa = case.msa();
        let choice = msa.on_pages(page).unwrap();
        for device in devices {
            let MsaIndex { q, k, .. } = index.tensors(device, DType::F32);
            let slots = seq_kv.next_multiple_of(page) + page;
            let dims = [case.batch, 1, slots - seq_kv, case.index_dim];
            let behind = Tensor::full(dims, f32::NAN, (device, DType::F32));
            let paged = MsaIndex::new(q, Tensor::cat(vec![k, behind], 2)).unwrap();
            let spans: Vec<i32> = (0..case.batch * seq_q)
                .flat_map(|row| [case.position(row % seq_q) as i32 + 1, 0, 0, 0])
                .collect();
            let spans = ints(&spans, [case.batch * seq_q, 1, 4], device);
            let pages = msa.choose_pages(&paged, &spans, &choice).unwrap();
            check_pages(&index, &pages, &choice, page);
        }
    }
}

fn check_pages(index: &Index, pages: &Tensor<3, Int>, choice: &PageChoice, page: usize) {
    let case = index.case;
    let ([_, groups], [seq_q, _]) = (case.heads, case.seq);
    let [_, _, most] = pages.dims();
    assert_eq!(most, choice.selected_pages());
    let pages = read_ints(pages.clone());
    for row in index.rows() {
        let [batch, group, query] = row;
        let at = (batch * seq_q + query) * groups + group;
        let (kept, _) = index.choice(row);
        let last = case.position(query) / page;
        let is_of = |at: &usize| kept.contains(&(at * page / case.block));
        let expected: Vec<usize> = (0..=last).filter(is_of).collect();
        let mut got = named(&pages[at * most..][..most]);
        got.retain(|&page| page <= last);
        assert_eq!(got, expected, "{}, {row:?}", case.name);
    }
}

/// Errors for wrong sizes and numbers.
pub fn msa_errors(devices: &[Device]) {
    refused! {
        Msa::new(12, 4) => "block must be 8, 16, 32, 64, 128 or a larger multiple of 128, got 12";
        Msa::new(192, 4) => "…larger multiple of 128, got 192";
        Msa::new(8, 0) => "keep must be at least 1, the own block, got 0";
        Msa::new(8, 2).unwrap().with_chunk_elements(0) => "numbers must be at least 1, got 0";
        Msa::new(16, 2).unwrap().on_pages(12) => "page_size must be a power of two that divides 16, the block of msa, got 12";
        Msa::new(16, 2).unwrap().on_pages(32) => "…a power of two that divides 16…";
    }
    let msa = Msa::new(8, 2).unwrap();
    for device in devices {
        let zeros = |shape: [usize; 4]| Tensor::<4>::zeros(shape, (device, DType::F32));
        let (q, k) = (|| zeros([1, 2, 32, 4]), || zeros([1, 1, 32, 4]));
        refused! {
            MsaIndex::new(q(), zeros([1, 2, 32, 4])) => "…index k's heads…";
            MsaIndex::new(q(), zeros([1, 1, 32, 5])) => "…index_dim…";
            MsaIndex::new(q(), zeros([2, 1, 32, 4])) => "…batch…";
            MsaIndex::new(q(), zeros([1, 1, 31, 4])) => "…seq_q…";
        }
        let index = MsaIndex::new(q(), k()).unwrap();
        let lists = msa.choose(&index).unwrap();
        let x = || zeros([1, 4, 32, 8]);
        let kv = || zeros([1, 2, 32, 8]);
        let options = AttentionOptions::default();
        let other = Msa::new(16, 1).unwrap();
        let all = Msa::new(8, 4).unwrap();
        let lse = Tensor::<3>::zeros([1, 4, 32], (device, DType::F32));
        let chosen = |lists, lse| MsaTarget::Chosen { lists, lse };
        let short = Tensor::<3>::zeros([1, 4, 31], (device, DType::F32));
        refused! {
            other.attention(x(), kv(), kv(), lists.clone(), options.clone()) => "…lists' block…";
            all.attention(x(), kv(), kv(), lists.clone(), options.clone()) => "lists must be none where there are at most keep blocks, got some";
            msa.attention(x(), zeros([1, 4, 32, 8]), zeros([1, 4, 32, 8]), lists.clone(), options.clone().alibi(vec![0.5; 4])) => "…alibi…";
            msa.attention(zeros([1, 4, 40, 8]), kv(), kv(), None, options.clone()) => "seq_q must be between 1 and seq_kv, which is 32, got 40";
            msa.loss(&index, [&zeros([1, 4, 31, 8]), &kv()], None, MsaTarget::All) => "…q's seq_q…";
            msa.loss(&index, [&x(), &zeros([1, 4, 32, 8])], None, MsaTarget::All) => "…k's heads…";
            msa.loss(&index, [&x(), &kv()], None, chosen(lists.as_ref(), &short)) => "…lse's shape…";
            other.loss(&index, [&x(), &kv()], None, chosen(lists.as_ref(), &lse)) => "…lists' block…";
        }
    }
}
