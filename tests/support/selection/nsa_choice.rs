//! Attention sums and selections of native sparse attention, from compressed keys, against plain f64 loops.
//!
//! Inputs are rounded before both sides get them, so attention sums from the kernel have the tolerance of f32 sums.

use burn_sparse_select::nsa::{Nsa, NsaKeysValues, NsaOptions};

use crate::judge::nsa::{CASE, Case, Inputs, cases};
use crate::prelude::*;
use crate::selection::nsa::check_choices;

/// Tolerance of attention sums from the kernel: f32 sums of weights whose exponents are f32 sums.
const KERNEL_TOLERANCE: f64 = 2e-4;

/// Settings that differ from [`PLAIN`].
const TABLE: &str = "
    groups of 16, ragged steps                           | heads 32 2, seq 700 700, dims 128 16, selected 16, keep 9
    groups of 8, two batch entries                       | batch 2, heads 8 1, seq 333 333, compressed 16 8, selected 16, keep 6, forced 0 1
    groups of 4, fewer queries, the published blocks     | heads 8 2, seq 150 610, dims 192 16, compressed 32 16, selected 64
    groups of 6, blocks that overlap much                | heads 6 1, seq 203 203, dims 32 16, compressed 8 2
    each head for itself, blocks that do not overlap     | batch 2, heads 2 2, seq 270 270, dims 48 16, compressed 4 4, keep 20
    the first queries choose among blocks without attention_sums | heads 32 2, seq 150 150, compressed 64 8, selected 16, forced 0 1
    more choices than a warp has units                   | heads 16 1, seq 420 420, dims 256 16, keep 45
    a width that the kernel does not take                | heads 4 2, seq 77 77, dims 72 16
";

const PLAIN: Case = Case {
    batch: 1,
    dims: [64, 16],
    ..CASE
};

/// Returns a device's attention sums and selected blocks.
fn found(nsa: &Nsa, q: &Tensor<4>, keys_values: &NsaKeysValues) -> (TensorData, Tensor<4, Int>) {
    let attention_sums = nsa.block_importance(q.clone(), keys_values).unwrap();
    let lists = nsa.query_lists(q.clone(), keys_values).unwrap();
    let blocks = lists.expect("there is a choice").blocks;
    (attention_sums.into_data(), blocks)
}

/// Attention sums equal f64; selections follow from the device's own attention sums, and equal those of f64 unless sums nearly tie. With the kernel
/// and without.
pub fn nsa_choices_equal_f64(devices: &[Device]) {
    let (part, parts) = shard();
    let cases = cases(PLAIN, TABLE).into_iter().enumerate();
    let (mut clear, mut all) = (0, 0);
    for (index, case) in cases.filter(|(index, _)| index % parts == part) {
        for device in devices {
            let single = [DType::F32]
                .into_iter()
                .filter(|&f32| supports(device, f32));
            for dtype in half_dtypes(device).into_iter().chain(single) {
                let of_case = check(case, 9500 + index as u64, device, dtype);
                clear += of_case[0];
                all += of_case[1];
            }
        }
    }
    // Holds for kernels; without them roundings of half precision decide most.
    assert!(clear * 3 >= all, "{clear} of {all}");
}

/// Returns the number of the kernel's selections that no rounding can change, and of all its selections.
fn check(case: Case, seed: u64, device: &Device, dtype: DType) -> [usize; 2] {
    let mut inputs = Inputs::random(case, seed, dtype);
    // With size 1 all blocks would get nearly equal attention.
    inputs.q.iter_mut().for_each(|q| *q *= 4.0);
    let ([_, kv_heads], [width, value_dim]) = (case.heads, case.dims);
    let (entries, lists) = (case.entries(), case.batch * kv_heads);
    let mut keys = numbers(seed * 100 + 50, lists * entries * width);
    round_to(&mut keys, dtype);
    let dims = [case.batch, kv_heads, entries, width];
    let x = inputs.tensors(device, dtype);
    let k = tensor(&keys, dims, device, dtype);
    let v = Tensor::zeros([case.batch, kv_heads, entries, value_dim], (device, dtype));
    let keys_values = NsaKeysValues {
        compressed: Some([k, v]),
        ..NsaKeysValues::shared(x.keys[1].clone(), x.values[1].clone())
    };
    let expected = inputs.attention_sums(&keys);
    let general = case.nsa().without_importance_kernel();
    let is_half = dtype != DType::F32;
    let mut of_kernels = [0, 0];
    let is_served = is_half && width.is_multiple_of(16) && runs_on_tensor_cores(&x.q, dtype);
    for (nsa, is_kernels) in [(case.nsa(), is_served), (general, false)] {
        let plan = nsa.explain(&x.q, &keys_values).unwrap();
        let what = format!("{}, {device:?}, {dtype:?}, {plan}", case.name);
        assert_eq!(plan.is_kernels(), is_kernels, "{what}");
        let tolerance = match (plan.is_kernels(), is_half) {
            (true, _) => KERNEL_TOLERANCE,
            (false, true) => half_tolerance(dtype),
            // f32 products are tf32 on tensor cores, and scores here are larger than their factors.
            (false, false) => match product_tolerance(device, dtype, 1e-5) > 1e-5 {
                true => 2e-2,
                false => 2e-5,
            },
        };
        let (sums, picks) = found(&nsa, &x.q, &keys_values);
        // The same queries in the memory order of a layer's projection.
        let again = found(&nsa, &by_rows(&inputs, device, dtype), &keys_values);
        assert_eq!(sums.as_bytes(), again.0.as_bytes(), "{what}");
        assert_eq!(picks.to_data(), again.1.into_data(), "{what}");
        let (picks, clear) =
            check_choices(&what, &inputs, &expected, sums, Some(&picks), tolerance);
        if plan.is_kernels() {
            // The more blocks are selected, the smaller is the gap at the boundary: 691 of 1,400 in one case, 107 of 420 in another.
            let all = picks.len();
            assert!(clear * 8 > all, "{what}: {clear} of {all}");
            of_kernels = [clear, all];
        }
    }
    of_kernels
}

/// Returns the queries with the heads of a row adjacent in memory.
fn by_rows(inputs: &Inputs, device: &Device, dtype: DType) -> Tensor<4> {
    let (case, [heads, _]) = (&inputs.case, inputs.case.heads);
    let ([rows, _], [width, _]) = (case.seq, case.dims);
    let mut numbers = Vec::with_capacity(inputs.q.len());
    for at in 0..case.batch * rows * heads {
        let (head, row, batch) = (at % heads, at / heads % rows, at / heads / rows);
        let start = ((batch * heads + head) * rows + row) * width;
        numbers.extend_from_slice(&inputs.q[start..start + width]);
    }
    let dims = [case.batch, rows, heads, width];
    tensor::<4>(&numbers, dims, device, dtype).swap_dims(1, 2)
}

/// Returns whether attention in half precision runs on tensor cores here, according to plans.
fn runs_on_tensor_cores(q: &Tensor<4>, dtype: DType) -> bool {
    let [_, heads, ..] = q.dims();
    let layout = Pattern::causal().layout(heads, 64, 32).unwrap();
    let [q, k, v] = [(); 3].map(|_| Tensor::<4>::zeros([1, heads, 64, 64], (&q.device(), dtype)));
    let plan = plan_of([&q, &k, &v], &layout, &AttentionOptions::default());
    plan.contains("forward  hopper") || plan.contains("forward  mma")
}

/// Queries at arbitrary positions, over compressed keys indexed by the stride that they end with, see the same as in the whole call. Their pages are
/// those of the forced blocks and of the one with the largest attention sum of the others.
pub fn queries_at_any_positions_equal_the_whole(devices: &[Device]) {
    const SEQ: usize = 203;
    const AT: [[usize; 4]; 2] = [[3, 15, 100, 202], [14, 202, 177, 16]];
    let options = NsaOptions::default().block(16).stride(4).window(8);
    let nsa = Nsa::new(options.selected_block(32).keep(4)).unwrap();
    let choice = nsa.on_pages(16).unwrap();
    for device in devices {
        device.seed(31);
        let random = |heads: usize, rows: usize, width: usize| {
            let dims = [2, heads, rows, width];
            Tensor::<4>::random(dims, Distribution::Normal(0.0, 1.0), device)
        };
        let (q, k, v) = (random(4, SEQ, 16), random(2, SEQ, 16), random(2, SEQ, 8));
        let entries = nsa.entries(SEQ);
        let pair = [random(2, entries, 16), random(2, entries, 8)];
        let keys_values = NsaKeysValues {
            compressed: Some(pair.clone()),
            ..NsaKeysValues::shared(k, v)
        };
        let whole = nsa.compressed_branch(q.clone(), &keys_values).unwrap();
        let attention_sums = nsa.block_importance(q.clone(), &keys_values).unwrap();
        // No block ends with the first three strides, nor with the last ones.
        let by_strides = pair.map(|x| {
            let [.., width] = x.dims();
            let none = |rows| Tensor::full([2, 2, rows, width], f32::NAN, device);
            Tensor::cat(vec![none(3), x, none(2)], 2)
        });
        let positions = AT.map(|at| at.map(|at| at as i32)).concat();
        let positions = ints(&positions, [2, 4], device);
        let rows = |x: &Tensor<4>| {
            let rows = (0..2).flat_map(|entry| AT[entry].map(|at| (entry, at)));
            let rows = rows.map(|(entry, at)| x.clone().narrow(0, entry, 1).narrow(2, at, 1));
            let rows: Vec<_> = rows.collect();
            let entries = rows.chunks(4).map(|rows| Tensor::cat(rows.to_vec(), 2));
            Tensor::cat(entries.collect(), 0)
        };
        let seen = nsa.of_strides(rows(&q), by_strides, &positions).unwrap();
        let expected = to_f64(rows(&whole.unwrap()).into_data());
        let tolerance = product_tolerance(device, DType::F32, 1e-5);
        assert_close("out", seen.out.into_data(), &expected, tolerance);
        let [.., blocks] = attention_sums.dims();
        let expected = to_f64(rows(&attention_sums).into_data());
        let got = to_f64(seen.importance.clone().into_data());
        let picks = nsa
            .choose_pages(seen.importance, &positions, &choice)
            .unwrap();
        assert_eq!(picks.dims(), [8, 2, 8]);
        let picks: Vec<i64> = picks.into_data().iter::<i64>().collect();
        for (row, &at) in AT.iter().flatten().enumerate() {
            for head in 0..2 {
                let own = at / 32;
                let place = ((row / 4 * 2 + head) * 4 + row % 4) * blocks;
                let (expected, got) = (&expected[place..][..=own], &got[place..][..=own]);
                assert_near("importance", got, expected, 2.0 * tolerance);
                // With several equal largest sums another one might be selected; random numbers have none.
                let others = (1..own.saturating_sub(1)).max_by(|&a, &b| got[a].total_cmp(&got[b]));
                let mut chosen: Vec<usize> = [0, own.saturating_sub(1), own].to_vec();
                chosen.extend(others);
                chosen.sort_unstable();
                chosen.dedup();
                let pages = chosen.iter().flat_map(|block| [2 * block, 2 * block + 1]);
                let pages = pages.filter(|page| page * 16 <= at).map(|page| page as i64);
                let mut pages: Vec<i64> = pages.collect();
                pages.resize(8, -1);
                assert_eq!(picks[(row * 2 + head) * 8..][..8], pages, "{at}");
            }
        }
    }
}
